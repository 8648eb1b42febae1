"""Value numbers: nodes that compute the same expression have the same number, in any graph."""

import torch
from torch import nn

import fxq
from fxq.graph.analysis.expressions import Expressions


def graph(model, until, x):
    return fxq.extend.run_passes(model, fxq.Recipe.static(backend="reference"), example_inputs=x, until=until)


def test_fusing_and_observing_change_no_number():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval(), torch.randn(2, 3, 8, 8)
    seen = Expressions()
    before, after = (seen.of(graph(model, until, x)) for until in ("canonicalize", "insert-observers"))
    layers = [number for node, number in before.items() if "conv2d" in str(node.target)]
    assert len(set(layers)) == 2
    assert set(layers) <= set(after.values())
    assert len({number for node, number in after.items() if node.op == "call_module"} & set(layers)) == 1


def test_other_options_weights_and_inputs_are_other_expressions():
    gm = fxq.extend.read_graph(
        """
        x: float32[2, 4] = input()
        y: float32[2, 4] = input()
        w: float32[4, 4] = tensor('w')
        v: float32[4, 4] = tensor('v')
        a = linear(x, w)
        b = linear(x, w)
        c = linear(x, v)
        d = linear(y, w)
        e = softmax(a, dim=0)
        f = softmax(b, dim=1)
        g = softmax(b, dim=0)
        return (a, b, c, d, e, f, g)
        """,
        {"w": torch.eye(4), "v": torch.eye(4)},
    )
    numbers = {node.name: number for node, number in Expressions().of(gm).items()}
    assert numbers["a"] == numbers["b"] and numbers["e"] == numbers["g"]
    assert len({numbers[name] for name in "acdef"}) == 5
