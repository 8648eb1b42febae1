"""Reader of graphs: valid texts, and the errors for invalid lines, with their line numbers."""

import operator
import os
import random

import pytest
import torch

import fxq
from fxq.graph.info import info
from fxq.graph.unit import unit_of
from tests.support.graphs import node, program

pytestmark = pytest.mark.any_cpu
W = {"w": torch.arange(8.0).reshape(2, 4), "s": torch.ones(2)}


def read(text, **tensors):
    return fxq.extend.read_graph(text, {**W, **tensors})


def test_types_follow_from_the_ops():
    gm = read("""
        def linear_relu(x, weight):
            linear = linear(x, weight)
            relu = relu(linear)
            return relu

        # the weight is in the mapping
        x: float32[3, 4] = input()
        w = tensor('w')
        y = linear_relu(x, w)
        z = reshape(y, shape=(6,))
        return {'z': z, 'plain': (1, -inf)}
    """)
    assert (info(node(gm, "y")).shape, info(node(gm, "z")).shape) == ((3, 2), (6,))
    assert program(gm).splitlines()[5:] == [
        "x: float32[3, 4] = input()",
        "w: float32[2, 4] = tensor('w')",
        "y: float32[3, 2] = linear_relu(x, w)",
        "z: float32[6] = reshape(y, shape=(6,))",
        "return {'z': z, 'plain': (1, -inf)}",
    ]
    x = torch.ones(3, 4)
    assert torch.equal(gm(x)["z"], (x @ W["w"].T).reshape(6)) and gm.w is W["w"]


def test_what_is_known_of_a_node():
    gm = read("""
        def conv(x):  # 'a kind'
            relu = relu(x)
            tanh = tanh(relu)
            return tanh
        x: float32[3, 4] = input()
        y = conv(x)  # 'layer.0', 'net.py:3', origins=('a', 'b'), plan=Plan(Decision('float', text='# no'))
        z = relu(y)
        return z
    """)
    about, plain = info(node(gm, "y")), info(node(gm, "z"))
    assert unit_of(gm, node(gm, "y")).kind == "a kind"
    assert (about.path, about.source, about.origins) == ("layer.0", "net.py:3", ("a", "b"))
    assert (about.fused.parts, about.fused.paths) == ((("a",), ("b",)), ("layer.0", "layer.0"))
    assert about.fused.values == (((3, 4), torch.float32),) * 2
    assert (about.plan.precision, about.plan.decision.text) == ("float", "# no")
    assert (plain.path, plain.origins, plain.plan) == ("", ("z",), None)


def test_inputs_sizes_and_checks():
    gm = read("""
        x: float32[3, 4] = input()
        scale = input(default=2.0)
        check = check_same(scale, 2.0, how='float', place='net.py:1', text='scale')
        size = x.size(0)
        shape = getattr(x, 'shape')
        part = operator.getitem(shape, slice(1, None, None))
        y = torch.full((size, 4), 0.5, dtype=torch.float32, device=torch.device('cpu'))
        z = add(x, y)
        return (z, part)
    """)
    assert node(gm, "part").target is operator.getitem
    x = torch.zeros(3, 4)
    assert gm(x)[1] == (4,) and torch.equal(gm(x)[0], torch.full((3, 4), 0.5))
    with pytest.raises(fxq.InputError, match="float of a value in `scale` is"):
        gm(x, 3.0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("y = relo(x)", "unknown op, unit or function 'relo'; did you mean 'relu'"),
        ("y = relu(v)", "there is no value 'v' above this line"),
        ("y = relu(x", "expected a line of Python"),
        ("y = relu(x); z = relu(y)", "expected one statement"),
        ("relu(x)", "expected `name: type = call`"),
        ("y = z = relu(x)", "expected `name: type = call`"),
        ("y = x", "expected a call, not `x`"),
        ("x = relu(x)", "the value 'x' is already defined"),
        ("len = relu(x)", "a value cannot be called 'len'"),
        ("y = relu(x, inplace=True)", "relu: unknown option 'inplace'"),
        ("y = relu()", "relu takes the tensors x, not 0"),
        ("y = relu(x, x)", "relu takes the tensors x, not 2"),
        ("y: float32[3, 5] = relu(x)", r"its value is float32\[3, 4\], but the line says float32\[3, 5\]"),
        ("y: float16[3, 4] = relu(x)", r"its value is float32\[3, 4\], but the line says float16\[3, 4\]"),
        ("y: float32[4, 2] = tensor('w')", r"its value is float32\[2, 4\], but the line says float32\[4, 2\]"),
        ("y: float33[3, 4] = relu(x)", r"expected a type such as `float32\[1, 3\]`"),
        ("y: float32[-3] = relu(x)", r"expected a type such as `float32\[1, 3\]`"),
        ("y = tensor('v')", "unknown tensor 'v'"),
        ("y = tensor(3)", "expected the path of a tensor or module, not 3"),
        ("y = unit(x)", "unknown op, unit or function 'unit'"),
        ("y = relu(x)  # nonsense of a person", "expected a line of Python"),
        ("y = relu(x)  # colour='red'", "unknown fact of a node 'colour'"),
        ("y = relu(x)  # plan=Plan(mood='good')", "these fields do not fit Plan"),
        ("y = input('1x')", "expected the name of an argument"),
        ("def relu(x):", "expected `def name"),
        ("    y = relu(x)", "expected the lines of a unit, and no others, to be indented"),
        ("y = relu(**{'x': x})", "expected arguments by name"),
        ("y = relu(3 + 4)", "expected a value"),
        ("y = relu(b'x')", "expected a value"),
    ],
)
def test_refused_lines(line, why):
    with pytest.raises(fxq.InputError, match=f"^line 3: .*{why}"):
        read(f"\nx: float32[3, 4] = input()\n{line}\nreturn x", **{"3": torch.ones(1)})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "line",
    [
        "y = __import__('os')",
        "y = __import__('os').system('touch HERE')",
        "y = eval('1')",
        "y = exec('1')",
        "y = os.system('touch HERE')",
        "y = torch.load('HERE')",
        "y = torch.save(x, 'HERE')",
        "y = torch.hub.load('a', 'b')",
        "y = torch.ops.load_library('HERE')",
        "y = torch.ops.aten.from_file.default('HERE', True, 4)",
        "y = torch.ops.aten.relu.__class__('x')",
        "y = torch.utils.model_zoo.load_url('x')",
        "y = operator.attrgetter('__class__')",
        "y = operator.methodcaller('x')",
        "y = getattr(x, '__class__')",
        "y = getattr(x, name='__class__')",
        "y = x.__class__()",
        "y = x.__reduce_ex__(2)",
        "y = x.apply_(len)",
        "y = x.numpy.__class__(x)",
        "y = relu((lambda: 1)())",
        "y = relu([z for z in (1,)])",
        "y = relu(x if x else x)",
        "y = relu(f'{x}')",
        "y = relu(x)(x)",
        "y = (relu)(x)[0]",
        'y = tensor(\'w")+__import__("os").system("touch HERE\')',
        'y = input(\'y=__import__("os").system("touch HERE")\')',
        "y = relu(x)  # __import__('os').system('touch HERE')",
        "y: __import__('os').system('touch HERE') = relu(x)",
        "y = relu(torch.device(__import__('os')))",
        "y = relu(torch.Tensor)",
        "modules['y'] = os.system('touch HERE')",
        "modules['y'] = observer(spec=__import__('os'))",
        "modules[__import__('os')] = leaf('x')",
        "def f(x=__import__('os')):",
        "def f(x):  # __import__('os')",
        "import os",
        "del x",
    ],
)
def test_code_is_refused(line, tmp_path):
    with pytest.raises(fxq.InputError, match=r"^line 2: "):
        read("x: float32[3, 4] = input()\n" + line.replace("HERE", str(tmp_path / "touched")) + "\nreturn x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the text ends too early"),
        ("x = input()", "the text ends too early"),
        ("def f(x):\n    y = relu(x)", "the text ends too early"),
        ("x = input()\nreturn x\ny = relu(x)", "line 3: expected nothing after `return`"),
        ("def f(x):\n    y: float32[1] = relu(x)", "line 2: lines of a unit have no types"),
        ("def f(x):\n    y = tensor('w')", "line 2: a unit has no tensors"),
        (
            "def f(x):\n    y = relu(x)\n    return y\nx = input()\ny = f(x, x)",
            "line 5: the unit f takes 1 inputs, not 2",
        ),
    ],
)
def test_refused_texts(text, why):
    with pytest.raises(fxq.InputError, match=why):
        read(text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_whatever_the_text_it_is_read_or_refused():
    good = (
        "x: float32[3, 4] = input()\nw = tensor('w')\ny = linear(x, w)  # 'a', origins=('b',)\nreturn (y, [1.5, None])"
    )
    draw = random.Random(0)
    for _ in range(400):
        at, char = draw.randrange(len(good)), draw.choice("()[]{}'\":=,.#\n -+*0aw\\")
        try:
            read(good[:at] + char + good[at + draw.randrange(2) :])
        except fxq.InputError as error:
            assert "line" in str(error) or "the text ends" in str(error)
