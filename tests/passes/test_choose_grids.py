"""choose-grids: scale and zero point of every edge from what observers saw, and what is on no grid.

What that is worth in numbers is in tests/test_ranges.py and tests/test_masks.py.
"""

import pytest
import torch

import fxq
from fxq.graph.info import info
from fxq.passes import ChooseGrids
from fxq.quant.dynamic_grid import DynamicGrid
from tests.support.graphs import node, run_pass
from tests.support.helpers import REFERENCE

S = "TensorSpec(observer='minmax')"
MADE, MOVED, SELECTED = f"Edge({S}, 0, True, True)", f"Edge({S}, 0, False)", f"Edge({S}, 0, False, True)"
INT8, MOVES = f"plan=Plan(Decision('int8'), reads={S})", f"plan=Plan(Decision('moves'), reads={S})"


def observed(program, *names, constants=()):
    """The program after the declarations of its observers."""
    declared = [f"modules['o.{name}'] = observer(spec={S}, constants={constants!r})" for name in names]
    return "\n".join([*declared, *(line.strip() for line in program.splitlines())])


CAT = observed(
    f"""
    a: float32[1, 256] = input()  # edges=({MADE},)
    b: float32[1, 256] = input()  # edges=({MADE},)
    a_o: float32[1, 256] = modules['o.a'](a)
    b_o: float32[1, 256] = modules['o.b'](b)
    w: float32[2, 256] = tensor('w')
    cat = cat([a_o, b_o])  # edges=({MOVED},), {MOVES}
    y = linear(cat, w)  # {INT8}
    return y
    """,
    "a",
    "b",
)
BRANCH = CAT.replace("return y", f"z = linear(a_o, w)  # {INT8}\nreturn (y, z)")
STEPS = torch.arange(256.0).reshape(1, 256)


def grids(gm):
    """Scale and zero point of each value that is on a grid."""
    edges = {n.name: info(n).edges for n in gm.graph.nodes if info(n).edges}
    return {name: (round(value_edges[0].qparams.s, 6), value_edges[0].qparams.z) for name, value_edges in edges.items()}


def test_what_is_moved_together_shares_a_grid():
    gm = run_pass(ChooseGrids(), CAT, data=(STEPS, 0.5 * STEPS - 10))
    assert grids(gm) == dict.fromkeys(["a", "b", "cat"], (round(265 / 255, 6), 10))
    assert {edge.group for n in gm.graph.nodes for edge in info(n).edges} == {0}


@pytest.mark.parametrize("times", [2, 100])
def test_a_fine_value_that_is_read_as_it_is_keeps_its_grid_beside_a_coarse_one(times):
    data = STEPS, times * STEPS
    coarse = (float(times), 0)
    fine = coarse if times == 2 else (1.0, 0)
    assert grids(run_pass(ChooseGrids(), BRANCH, data=data)) == {"a": fine, "b": coarse, "cat": coarse}
    assert grids(run_pass(ChooseGrids(), CAT, data=data))["a"] == coarse  # it has no other reader


PADDED = f"""
    x: float32[1, 256] = input()  # edges=({MADE},)
    x_o: float32[1, 256] = modules['o.x'](x)
    w: float32[2, 258] = tensor('w')
    pad = pad(x_o, pad=(1, 1), value=VALUE)  # edges=({SELECTED},), {MOVES}
    pad_o: float32[1, 258] = modules['o.pad'](pad)
    y = linear(pad_o, w)  # {INT8}
    return y
"""


def padded(value):
    return run_pass(
        ChooseGrids(), observed(PADDED.replace("VALUE", f"{value}"), "x", "pad", constants=(value,)), data=(STEPS,)
    )


def test_a_constant_near_the_data_makes_the_grid_wider():
    assert grids(padded(-255.0)) == dict.fromkeys(["x", "pad"], (2.0, 128))


def test_a_constant_far_from_the_data_is_on_no_grid():
    gm = padded(-1e4)
    assert grids(gm) == {"x": (1.0, 0)}
    plan = info(node(gm, "y")).plan.decision
    said = "its input %pad holds -10000, far outside of its data (0 to 255)"
    assert (plan.precision, plan.kind, plan.text, plan.decided_by) == ("float", "off the grid", said, "choose-grids")
    assert info(node(gm, "pad")).plan.precision == "float"


def test_what_selects_a_small_part_reads_floats():
    program = f"""
        x: float32[1, 256] = input()
        w: float32[2, 256] = tensor('w')
        v = sigmoid(x)  # edges=({MADE},), {INT8}
        v_o: float32[1, 256] = modules['o.v'](v)
        clamp = hardtanh(v_o, min_val=0.0, max_val=0.01)  # edges=({SELECTED},), {MOVES}
        clamp_o: float32[1, 256] = modules['o.clamp'](clamp)
        y = linear(clamp_o, w)  # {INT8}
        return y
    """
    gm = run_pass(ChooseGrids(), observed(program, "v", "clamp"), data=(STEPS,))
    assert grids(gm) == {"v": (round(1 / 255, 6), 0), "clamp": (round(0.01 / 255, 6), 0)}
    plan = info(node(gm, "clamp")).plan
    assert (
        plan.exact
        and plan.decision.text == "the range of the values that it selects is 100 times smaller than that of its input"
    )


LAYER = f"""
    modules['o.x'] = observer(spec={S})
    modules['o.w'] = observer(spec=W, axis=0)
    x: float32[1, 256] = input()  # edges=({MADE},)
    x_o: float32[1, 256] = modules['o.x'](x)
    w: float32[2, 256] = tensor('w')  # edges=(Edge(W, 1, True, True, axis=0),)
    w_o: float32[2, 256] = modules['o.w'](w)
    y = linear(x_o, w_o)  # {INT8[:-1]}, weight=W, overflows=True)
    return y
""".replace("W", "TensorSpec(signed=True, symmetric=True, per='channel', observer='minmax')")


@pytest.mark.parametrize(("role", "steps", "limit"), [("activations", 127, 127), ("weights", 255, 63)])
def test_one_of_two_roles_has_7_bits_where_a_kernel_overflows(role, steps, limit):
    """Also: a weight has one scale for each channel; the observer is shown it here."""
    recipe = fxq.Recipe.static(backend="reference", reduce_range=role)
    gm = run_pass(ChooseGrids(), LAYER, recipe=recipe, data=(STEPS,))
    (edge,), (weight,) = info(node(gm, "x")).edges, info(node(gm, "w")).edges
    assert edge.qparams.s == pytest.approx(255 / steps)
    assert (weight.qparams.axis, weight.qparams.qmax) == (0, limit)
    torch.testing.assert_close(weight.qparams.scale, gm.w.abs().amax(1) / limit)


@pytest.mark.parametrize(("role", "bits"), [("activations", 7), ("weights", 8)])
def test_a_dynamic_edge_gets_its_grid_without_an_observer(role, bits):
    rows = "TensorSpec(symmetric=True, per='row', range='dynamic')"
    lines = LAYER.replace(MADE, f"Edge({rows}, 0, True, axis=-1)").replace(f"reads={S}", f"reads={rows}")
    lines = "\n".join(line for line in lines.splitlines() if "o.x" not in line).replace("linear(x_o", "linear(x")
    gm = run_pass(
        ChooseGrids(), lines, recipe=fxq.Recipe.dynamic(backend="reference", reduce_range=role), data=(STEPS,)
    )
    (edge,) = info(node(gm, "x")).edges
    assert edge.qparams == DynamicGrid(0, 2**bits - 1, torch.uint8, -1)


def test_refuses_a_weight_that_no_observer_watches():
    with pytest.raises(fxq.PassError, match=r"%w .*no observer watches this weight. Run insert-observers"):
        unwatched = LAYER.replace("w_o: float32[2, 256] = modules['o.w'](w)", "").replace("w_o", "w")
        run_pass(ChooseGrids(), unwatched, data=(STEPS,))


def test_what_is_always_zero_is_noted():
    gm = run_pass(ChooseGrids(), CAT, data=(0 * STEPS, STEPS))
    assert info(node(gm, "a")).note == "calibration saw only zeros: its grid is that of values up to 1"
    assert info(node(gm, "b")).note == ""


def test_refuses_a_value_that_no_observer_watches():
    program = f"x: float32[2] = input()  # edges=({MADE},)\nreturn x"
    with pytest.raises(fxq.PassError, match=r"%x .*no observer watches its value. Run insert-observers"):
        run_pass(ChooseGrids(), program, recipe=REFERENCE)


def test_refuses_what_has_seen_no_data():
    with pytest.raises(fxq.CalibrationError, match="has seen no data"):
        run_pass(ChooseGrids(), CAT)
