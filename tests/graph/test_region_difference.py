"""Differences between a kernel and its region, and those that rounding explains."""

import pytest
import torch
from torch import fx, nn

import fxq
from fxq.graph import region_difference
from fxq.graph.analysis.partition import connected_regions
from fxq.graph.grid import grid_of
from fxq.graph.query import NodeSnapshot, is_op
from fxq.graph.region import read_region, unit_regions
from fxq.graph.region_difference import disagreement, magnitude
from fxq.graph.region_run import RegionOutput, run_region
from fxq.ops import OPS
from fxq.passes.verify_lowering import VerifyLowering
from tests.support.graphs import until
from tests.support.helpers import REFERENCE

INF, NAN = float("inf"), float("nan")


def integers(*values):
    return torch.tensor(values, dtype=torch.uint8)


def none():
    return 0.0


@pytest.mark.parametrize(
    ("expected", "got", "wrong"),
    [
        (torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8), False),
        (torch.zeros(1000, dtype=torch.uint8), (torch.arange(1000) < 1).to(torch.uint8), True),  # no rounding here
        (integers(0, 5, 5), integers(255, 5, 5), True),
        (integers(5, 5, 5), integers(5, 5), True),
        (integers(5, 5, 5), torch.tensor([5.0, 5.0, 5.0]), True),
        (torch.tensor([1.0, -100.0]), torch.tensor([1.0, -100.009]), False),
        (torch.tensor([1.0, -100.0]), torch.tensor([1.0, -100.02]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), True),
        (torch.zeros(3), torch.full((3,), 1e-20), True),
        (torch.tensor([1.0, -INF, NAN]), torch.tensor([1.0, -INF, NAN]), False),
        (torch.tensor([1.0, -INF, NAN]), torch.tensor([1.1, -INF, NAN]), True),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, -INF]), True),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, 1e30]), True),
        (torch.zeros(0, 3), torch.zeros(0, 3), False),
    ],
)
def test_disagreement(expected, got, wrong):
    assert (disagreement(RegionOutput(expected), got, VerifyLowering(), none) is not None) is wrong


def test_terms_beyond_float32_are_no_reason_for_any_difference():
    expected = RegionOutput(torch.tensor([1e38, 0.0]))
    assert (
        disagreement(expected, torch.tensor([INF, 0.0]), VerifyLowering(), lambda: INF)
        == "off by inf, more than 1.03e+34"
    )


@pytest.mark.parametrize(
    ("real", "got", "wrong"),
    [
        ([1.4, 1.5, 2.5], (4, 4, 6), False),  # ties to even ...
        ([1.5, 1.5, 2.5], (5, 4, 5), False),  # ... or the other way, and in as many elements as there are
        ([1.5005], (4,), False),  # float32 arithmetic
        ([1.52], (4,), True),
        ([1.4, 1.4, 1.4], (5, 4, 4), True),  # a single element off by one step
        ([300.0, -300.0], (15, 0), False),  # clamped
        ([300.0, -300.0], (14, 0), True),
        ([-300.0], (255,), True),  # 0 - 255 does not wrap
        ([float("nan"), 1.0], (0, 4), False),
    ],
)
def test_disagreement_with_a_real_value(real, got, wrong):
    """The grid has 16 steps of 1/2, zero point 1: `real` is in steps above it."""
    graph = fx.Graph()
    grid = {"scale": 0.5, "zero_point": 3, "qmin": 0, "qmax": 15}
    quantize = graph.call_function(OPS["quantize"].target, (graph.placeholder("x"),), grid)
    expected = RegionOutput(torch.tensor(real) / 2, NodeSnapshot.of(quantize))
    assert (disagreement(expected, integers(*got), VerifyLowering(), none) is not None) is wrong


def test_zeros_are_compared_by_the_size_of_other_results():
    """Terms that cancel leave a rounding error, which is small compared with the terms."""
    expected, got = RegionOutput(torch.zeros(3)), torch.tensor([0.0, 1e-8, 0.0])
    for size, wrong in [(1e-1, False), (1e-3, True)]:
        assert (disagreement(expected, got, VerifyLowering(), lambda size=size: size) is not None) is wrong


def test_the_magnitude_of_what_is_summed():
    """Computed in float64: the sum of the magnitudes of all products, with zero points, and of the bias."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).eval()
    manager = until(nn.Sequential(model).eval(), torch.randn(4, 5), "fallback", REFERENCE)
    gm = manager.gm
    node = next(n for n in gm.graph.nodes if is_op(n, "linear"))
    region = read_region(gm, node)
    (x,) = region.inputs
    q = torch.randint(0, 256, (4, 5), dtype=torch.uint8)
    qp = grid_of(gm, x)
    got = magnitude(gm, region, {x: q})
    weight = run_region(gm, region, {x: torch.eye(5, dtype=torch.uint8) + qp.z})[0].value - model.bias
    raw = (q.double() - qp.z).abs() + qp.z
    expected = (raw @ weight.double().abs() + model.bias.double().abs()).max()
    assert got == pytest.approx(float(expected), rel=1e-4)


def test_the_magnitude_where_the_graph_holds_the_scale():
    written = """
        q: uint8[1, 2] = input()
        s: float32[()] = tensor('s')
        z: int32[()] = tensor('z')
        w: float32[2, 2] = tensor('w')
        x = dequantize(q, scale={}, zero_point={})
        y = linear(x, w)
        return y
    """
    tensors = {
        "s": torch.tensor(0.5),
        "z": torch.tensor(4, dtype=torch.int32),
        "w": torch.tensor([[1.0, -2.0], [0.0, 1.0]]),
    }
    magnitudes = []
    for numbers in (("s", "z"), (0.5, 4)):
        gm = fxq.extend.read_graph(written.format(*numbers), tensors)
        region = next(iter(unit_regions(gm)))
        magnitudes.append(magnitude(gm, region, {region.inputs[0]: torch.tensor([[4, 10]], dtype=torch.uint8)}))
    assert magnitudes == [2 * 1 + 5 * 2] * 2  # |x| and the zero point are (2, 5)


def test_the_magnitude_of_a_region_is_the_largest_value_in_it():
    gm = fxq.extend.read_graph(
        """
        x: float32[2] = input()
        w = tensor('w')
        a = add(x, w)
        b = sub(a, w)
        return b
        """,
        {"w": torch.tensor([1e6, -3e6])},
    )
    (region,) = connected_regions(gm, lambda node: True)
    x = next(iter(gm.graph.nodes))
    assert magnitude(gm, region, {x: torch.ones(2)}) == 3e6


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        ([1.0, 2.0, 3.0, 4.0], None),
        ([1.0, 2.0, 3.2, 4.0], None),
        ([1.0, 2.0, 3.25, 4.0], "off by 0.25, more than 0.212"),  # 0.05 sqrt(2 log(2 * 4 / 0.001)), and 4e-4
        ([1.2, 2.2, 3.2, 4.2], "off by 0.2 on average, more than 0.195"),  # 0.05 sqrt(2 log(2 / 0.001)), and 4e-4
    ],
)
def test_an_output_after_values_that_are_rounded_inside(got, wrong):
    expected, shifted = (
        RegionOutput(torch.tensor([1.0, 2.0, 3.0, 4.0])),
        RegionOutput(torch.tensor([1.0, 2.1, 3.0, 4.0])),
    )
    message = disagreement(expected, torch.tensor(got), VerifyLowering(), none, [expected, shifted])
    assert message is None if wrong is None else message.startswith(wrong)


@pytest.mark.parametrize(("error", "runs"), [(0, 0), (1, 2)])
def test_a_region_is_run_again_only_for_a_result_that_differs(monkeypatch, error, runs):
    gm = fxq.extend.read_graph(
        """
        x: float32[2] = input()
        w = tensor('w')
        a = add(x, w)
        b = sub(a, w)
        return b
        """,
        {"w": torch.tensor([1.0, -3.0])},
    )
    counted = []
    monkeypatch.setattr(region_difference, "run_region", lambda *args: counted.append(1) or run_region(*args))
    (region,) = connected_regions(gm, lambda node: True)
    assert not region.calls
    values = {next(iter(gm.graph.nodes)): torch.ones(2)}
    expected = run_region(gm, region, values)
    region_difference.difference(gm, region, values, expected, expected[0].value + error, VerifyLowering())
    assert len(counted) == runs


@pytest.mark.parametrize("shape", [(0,), (), (3, 5, 7), (1001, 17)])
def test_signs_are_drawn_for_every_value(shape):
    like = torch.zeros(shape, dtype=torch.float64)
    signs = region_difference._signs(like, torch.Generator().manual_seed(0))
    assert signs.shape == shape and signs.dtype == like.dtype and bool((signs.abs() == 1).all())
    if signs.numel() > 1000:
        assert signs.mean().abs() < 0.04 and (signs[1:] * signs[:-1]).mean().abs() < 0.04
        assert all((signs.flatten()[:-at] * signs.flatten()[at:]).mean().abs() < 0.04 for at in (1, 7, 8))


def test_an_element_that_one_value_near_a_tie_has_moved_is_right_among_many_that_none_has():
    """`sigma` is 0.01, which does not bound the error of the single element."""
    want = torch.zeros(10_000)
    moved = want.clone()
    moved[7] = 1.0
    others = [RegionOutput(want), RegionOutput(moved)]
    assert disagreement(RegionOutput(want), moved, VerifyLowering(), none, others) is None
    assert disagreement(RegionOutput(want), 1.1 * moved, VerifyLowering(), none, others).startswith(
        "off by 1.1, more than 1"
    )
