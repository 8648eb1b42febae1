"""Rows of the kernel table that match a unit, and their captures. `tests/passes/test_lower.py` lowers networks."""

import pytest
import torch

import fxq
from fxq.backends.table.kernel_table import CLAMPS, KernelRequest, KernelRow, matching_rows, rule_key
from fxq.backends.x86.x86_kernels import ROWS
from fxq.graph.region import Weight
from fxq.graph.unit import calls_of
from fxq.patterns.fusions.excite import squeeze_excite, squeeze_excite_mean
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams

pytestmark = pytest.mark.any_cpu

TENSORS = {"w": torch.zeros(3, 3, 1, 1), "b": torch.zeros(3), "s": torch.tensor([0.5])}
TEXT = """
def gate(a, k, c, r):
    {body}

x: float32[1, 3, 4, 4] = input()
y: float32[1, 3, 4, 4] = input()
w: float32[3, 3, 1, 1] = tensor('w')
b: float32[3] = tensor('b')
s: float32[1] = tensor('s')
z: float32[1, 3, 4, 4] = gate({inputs})
return z
"""


def unit(body, inputs="x, w, b, y"):
    gm = fxq.extend.read_graph(TEXT.format(body=body.replace("; ", "\n    "), inputs=inputs), TENSORS)
    return gm, calls_of(gm, next(n for n in gm.graph.nodes if n.name == "z"))


def shown(calls, rows):
    """Number of ops and captures of each matching row, as text."""
    return [
        f"{len(match.calls)}: " + " ".join(f"{k}={v}" for k, v in match.captures.items())
        for match in matching_rows(calls, rows)
    ]


LAYER = "x=x weight=w bias=b"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "l = conv2d(a, k, c); m = add(r, l); n = relu(m); return n",
            [f"3: {LAYER} residual=y slope=None", f"2: {LAYER} residual=y", f"1: {LAYER}"],
        ),
        ("l = conv2d(a, k, c); m = add(l, r, alpha=2); n = relu(m); return n", [f"1: {LAYER}"]),
        ("l = conv2d(a, k, c); m = add(l, l); n = mul(m, r); return n", [f"1: {LAYER}"]),
        ("l = conv2d(a, k, c); m = relu(l); n = mul(m, r); return n", [f"2: {LAYER} slope=None", f"1: {LAYER}"]),
        ("l = conv2d(a, k, c); m = relu(l); n = mul(m, l); o = add(n, r); return o", [f"1: {LAYER}"]),
        ("l = conv2d(a, k, c); m = sigmoid(l); n = mul(m, r); return n", [f"1: {LAYER}"]),
        ("l = conv2d(a, k, c); m = add(l, r); n = silu(m); return n", [f"2: {LAYER} residual=y", f"1: {LAYER}"]),
        ("l = group_norm(a, num_groups=1); m = conv2d(l, k, c); n = add(m, r); return n", []),
        ("l = add(a, r); m = relu(l); n = conv2d(m, k, c); return n", ["2: x=x other=y slope=None", "1: x=x other=y"]),
    ],
)
def test_the_first_ops_of_a_unit_that_kernels_run(body, expected):
    assert shown(unit(body)[1], ROWS) == expected


def test_a_function_after_a_layer_gives_its_weight():
    calls = unit("l = conv2d(a, k, c); m = prelu(l, r); return m", "x, w, b, s")[1]
    assert shown(calls, ROWS)[0] == f"2: {LAYER} slope=s"
    assert shown(unit("l = conv2d(a, k, c); m = prelu(l, a); n = add(m, r); return n")[1], ROWS)[1:] == [f"1: {LAYER}"]


BODY = "l = conv2d(a, k, c); m = sigmoid(l); n = mul(m, r); return n"


def test_the_kernel_of_a_fusion_runs_its_units_whole_and_asks_for_its_captures():
    calls = unit(BODY)[1]
    assert shown(calls, {**ROWS, rule_key("gate", "akcr"): KernelRow(None)}) == ["3: a=x k=w c=b r=y", f"1: {LAYER}"]
    assert shown(calls, {rule_key("gate", "akcr"): KernelRow(None)}) == ["3: a=x k=w c=b r=y"]
    another = {
        rule_key("gate", ("a", "k", "c", "residual")): KernelRow(None),
        rule_key("gated", "akcr"): KernelRow(None),
    }
    assert shown(calls, another) == []


def test_x86_has_a_kernel_for_every_squeeze_and_excitation():
    for rule in (*squeeze_excite, *squeeze_excite_mean):
        assert rule_key(rule.name, rule.captures) in ROWS


def asked(refuses, inputs="x, w, b, y"):
    """Reason of a kernel that refuses the unit, and the `KernelRequest` objects that it was asked about."""
    seen = []

    def judge(request):
        seen.append(request)
        return refuses

    gm, calls = unit(BODY, inputs)
    (match,) = matching_rows(calls, {rule_key("gate", "akcr"): KernelRow(lambda request: None, judge)})
    return match.refused(gm), seen


def test_a_kernel_is_asked_before_grids_are_known():
    reason, (request,) = asked("not today")
    assert reason == "not today" and isinstance(request, KernelRequest)
    weight = request.captures["k"]
    assert isinstance(weight, Weight) and weight.values.shape == (3, 3, 1, 1) and weight.values.dtype == torch.int8
    assert torch.equal(request.captures["c"], TENSORS["b"])
    assert [name for name, value in request.captures.items() if isinstance(value, QParams)] == ["a", "r"]
    assert len(request.grids) == 2 and request.out is not None
    assert asked(None, "x, w, None, 1.5")[1][0].captures["r"] == 1.5


def test_constants_that_are_computed_are_refused():
    gm, calls = unit("l = conv2d(a, k, c); m = prelu(l, r); return m", "x, w, b, y")
    assert [match.refused(gm) for match in matching_rows(calls, ROWS)] == ["its slope is computed at run time", None]


def test_the_function_after_a_layer_is_a_post_op():
    calls = unit("l = conv2d(a, k, c); m = add(l, r); n = relu(m); return n")[1]
    posts = [KernelRequest({}, (None,), calls[:ops]).post for ops in (1, 2, 3)]
    assert posts[:2] == [None, None] and posts[2].name == "relu" and posts[2].name in CLAMPS


QDQ = """
def gate(a, k, c, r):
    l = conv2d(a, k, c)
    m = sigmoid(l)
    n = mul(m, r)
    return n

x: uint8[1, 3, 4, 4] = input()
x_dq: float32[1, 3, 4, 4] = dequantize(x, scale=0.5, zero_point=3)
y: float32[1, 3, 4, 4] = input()
w: int8[3, 3, 1, 1] = tensor('w')
w_dq: float32[3, 3, 1, 1] = dequantize(w, scale=0.25, zero_point=0, qmin=-127, qmax=127)
s: float32[1] = tensor('s')
z: float32[1, 3, 4, 4] = gate(x_dq, w_dq, {rest})
return z
"""


@pytest.mark.parametrize(
    ("rest", "inputs", "expected"),
    [
        ("None, x_dq", ["x", "x"], {"a": 0.5, "k": "int8", "c": None, "r": 0.5}),
        ("None, s", ["x"], {"a": 0.5, "k": "int8", "c": None, "r": TENSORS["s"]}),
        ("s, 1.5", ["x"], {"a": 0.5, "k": "int8", "c": TENSORS["s"], "r": 1.5}),
        ("None, y", ["x"], {"a": 0.5, "k": "int8", "c": None, "r": None}),
    ],
)
def test_what_a_kernel_is_made_of(rest, inputs, expected):
    """Captures are grids of activations, which are inputs of the kernel, int8 weights, constants and numbers."""
    gm = fxq.extend.read_graph(
        QDQ.format(rest=rest), {"w": torch.ones(3, 3, 1, 1, dtype=torch.int8), "s": TENSORS["s"]}
    )
    calls = calls_of(gm, next(n for n in gm.graph.nodes if n.name == "z"))
    (match,) = matching_rows(calls, {rule_key("gate", "akcr"): KernelRow(None)})
    read, captures = match.integers(gm)
    assert [node.name for node in read] == inputs
    assert {name: brief(value) for name, value in captures.items()} == expected


def brief(value):
    if isinstance(value, QParams):
        return value.s
    return str(value.values.dtype).removeprefix("torch.") if isinstance(value, Weight) else value


DYNAMIC = """
x: float32[3, 8] = input()
s: float32[3, 1] = choose_scale(x, {scale})
{zero}
q: uint8[3, 8] = quantize(x, {grid})
dq: float32[3, 8] = dequantize(q, {grid})
w: int8[5, 8] = tensor('w')
w_dq: float32[5, 8] = dequantize(w, scale=0.25, zero_point=0, qmin=-127, qmax=127)
y: float32[3, 5] = linear(dq, w_dq)
return y
"""


@pytest.mark.parametrize(
    ("scale", "zero", "zero_point", "inputs", "grid"),
    [
        ("steps=63, axis=-1", "", 64, ["q", "s"], DynamicGrid(0, 127, torch.uint8, -1)),
        (
            "steps=126, axis=-1, symmetric=False",
            "z: float32[3, 1] = choose_zero_point(x, scale=s, axis=-1)",
            "z",
            ["q", "s", "z"],
            DynamicGrid(0, 127, torch.uint8, -1, symmetric=False),
        ),
    ],
)
def test_a_kernel_of_a_dynamic_input_gets_its_grid(scale, zero, zero_point, inputs, grid):
    """It takes the integers, then their scale, and their zero point if that is computed, too."""
    options = f"scale=s, zero_point={zero_point}, qmin=0, qmax=127"
    text = DYNAMIC.format(scale=scale, zero=zero, grid=options)
    gm = fxq.extend.read_graph(text, {"w": torch.ones(5, 8, dtype=torch.int8)})
    calls = calls_of(gm, next(n for n in gm.graph.nodes if n.name == "y"))
    (match,) = matching_rows(calls, {"linear": KernelRow(None)})
    read, captures = match.integers(gm)
    assert [node.name for node in read] == inputs and captures["x"] == grid and grid.inputs == len(inputs) - 1
    request = KernelRequest(captures, (None,), calls)
    (static,) = request.with_unit_scales.grids
    wanted = QParams.per_tensor(1.0, 64 if grid.symmetric else 0, 0, 127)
    assert request.grids == () and static.same_as(wanted)


def test_integers_on_a_grid_with_another_middle_are_no_input_of_a_kernel():
    """Kernels take the zero point of a symmetric dynamic grid from its limits."""
    text = DYNAMIC.format(scale="steps=63, axis=-1", zero="", grid="scale=s, zero_point=60, qmin=0, qmax=127")
    gm = fxq.extend.read_graph(text, {"w": torch.ones(5, 8, dtype=torch.int8)})
    calls = calls_of(gm, next(n for n in gm.graph.nodes if n.name == "y"))
    (match,) = matching_rows(calls, {"linear": KernelRow(None)})
    assert match.integers(gm)[0] == () and match.integers(gm)[1]["x"] is None
