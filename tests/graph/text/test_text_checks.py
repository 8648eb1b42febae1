"""Texts that parse but are refused: names and values that could run other code."""

import builtins

import pytest
import torch

import fxq
from fxq.graph.text.text_reader import read_graphs
from fxq.graph.text.text_writer import write_graphs
from tests.support import models
from tests.support.graphs import graph, program

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("self = relu(x)", "cannot be called 'self'"),
        ("y = input('self')", "expected the name of an argument, not 'self'"),
        ("y = input('*self')", "expected the name of an argument"),
        ("y = input(default=x)", "there is no value 'x'"),
        ("y = input(default=Plan(decision=Decision('float')))", "a Plan cannot be an argument of a call"),
        ("y = relu(x, Decision('float'))", "a Decision cannot be an argument of a call"),
        ("y = relu([{'a': (1, Cost(float_us=1.0))}])", "a Cost cannot be an argument of a call"),
        ("y = relu({x: 1})", "there is no value 'x'"),
        ("y = relu({Cost(float_us=1.0): 1})", "expected a value"),
        ("return Decision('float')", "a Decision cannot be an argument of a call"),
        ("y = relu('text')", "relu takes tensors, not a string"),
        ("s = input(default='__class__')\ny = getattr(x, s)", "expected the name of a public attribute"),
        ("y = getattr(x)", "expected the name of a public attribute"),
        ("y = getattr(x, '_version')", "expected the name of a public attribute"),
        ("y = make_output('subprocess:Popen', {'args': 'ls'})", "the class of an output, .* not 'subprocess:Popen'"),
        ("y = make_output('fxq.recipe.recipe:Recipe', {})", "the class of an output"),
        ("y = make_output(x, {})", "the class of an output"),
        ("y = make_output()", "the class of an output"),
        ("y = torch.nn.functional.triplet_margin_with_distance_loss(x, x, x, distance_function=x)", "unknown op"),
        (
            "modules['y'] = observer(spec=TensorSpec(observer='this:X'), axis=None)",
            "loading a file imports no code: `import this` first",
        ),
        ("y = relu(" + "0, " * 600_000 + ")", "the line is too long"),
        ("y = relu(" + "1+" * 5_000 + "1)", ""),
        ("y = relu(x)\r\nimport os", "expected `name: type = call`"),
    ],
)
def test_refused(line, why):
    with pytest.raises(fxq.InputError, match=f"line [23]: .*{why}" if not why.startswith("line") else why):
        fxq.extend.read_graph(f"x: float32[3, 4] = input()\n{line}\nreturn x", {})


@pytest.mark.parametrize("inputs", [("x = input('a')", "y = input('a')"), ("x = input(default=1)", "y = input()")])
def test_inputs_that_no_function_has(inputs):
    with pytest.raises(fxq.InputError, match=r"torch\.fx cannot generate code"):
        fxq.extend.read_graph("\n".join([*inputs, "return x"]), {})


def test_outputs_of_models_are_made():
    gm = fxq.extend.read_graph("x = input()\ny = make_output('collections:OrderedDict', {'a': x})\nreturn y", {})
    assert list(gm(torch.ones(1))) == ["a"]
    gm = fxq.extend.read_graph("x = input()\ny = make_output('a_model:Output', {'a': x})\nreturn y", {})
    assert gm(torch.ones(1)).a == 1


def test_names_of_generated_code_are_taken():
    """A value with a name of generated code is refused, or does not replace what the code calls."""
    for name in ("device", "inf", "nan", "torch", "operator", *dir(builtins)):
        full = "y = torch.full((2,), inf, device=torch.device('cpu'))"
        text = f"x: float32[3] = input()\n{name} = relu(x)\n{full}\nreturn (y, {name})"
        try:
            results = fxq.extend.read_graph(text, {})(torch.ones(3))
        except fxq.InputError:
            continue
        assert torch.isinf(results[0]).all() and torch.equal(results[1], torch.ones(3)), name


def test_several_graphs_in_a_text():
    graphs = {
        f"g{i}": graph(models.build(name), models.batch(name), "fuse") for i, name in enumerate(("residual", "dense"))
    }
    text = write_graphs(graphs)
    heads = [line for line in text.splitlines() if line.startswith("def ")]
    assert len(heads) == len(set(heads)) and {"def g0():", "def g1():"} < set(heads)
    restored = read_graphs(text, {name: fxq.extend.graph_tensors(gm) for name, gm in graphs.items()})
    for name, (read, units) in restored.items():
        gm = torch.fx.GraphModule({**fxq.extend.graph_tensors(graphs[name]), **units}, read)
        assert program(gm) == program(graphs[name])
    with pytest.raises(fxq.InputError, match="expected the graphs g0, g1, g2"):
        read_graphs(
            text, {"g0": fxq.extend.graph_tensors(graphs["g0"]), "g1": fxq.extend.graph_tensors(graphs["g1"]), "g2": {}}
        )
    with pytest.raises(fxq.InputError, match=r"expected no kernel in a graph inside a kernel, not x86\.conv"):
        read_graphs("def g():\n    modules['a'] = x86.conv()", {"g": {}})
