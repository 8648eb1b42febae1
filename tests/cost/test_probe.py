"""Probes for timing: kernels and float ops of the units of every network run on random inputs; their cache keys."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import lower_graph
from fxq.backends.by_name import get_backend
from fxq.backends.kernel import Kernel
from fxq.common.timed_calls import threads_set_to
from fxq.cost.cache import Costs
from fxq.cost.prices import regions_of
from fxq.cost.probe import Prober
from fxq.graph.info import info
from fxq.graph.region import unit_regions
from tests.support.graphs import until
from tests.support.machine import X86, needs_x86
from tests.support.models import NETWORKS, batch, build

pytestmark = needs_x86


def prober(costs=None):
    return Prober(get_backend("x86"), X86, costs or Costs())


def regions(model, inputs, recipe=X86):
    gm = until(model, inputs, "propagate", recipe).gm
    return gm, list(filter(prober().can_price, regions_of(gm, list(gm.graph.nodes)).values()))


class Results(Costs):
    """Prices that are made up; what would have been timed is run once, and its result kept, by key."""

    def __init__(self):
        super().__init__()
        self.results = {}

    def seconds(self, key, prepare, cold=False):
        if key not in self.rounds:
            with torch.inference_mode():
                self.results[key], self.rounds[key] = prepare()(), [1.0]
        return self.rounds[key][0]


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_unit_runs_both_ways(name, monkeypatch):
    """As a kernel on integers and as float ops: results of the same shape, each region measured once."""
    lowered, lower = [], lower_graph.lower_graph
    monkeypatch.setattr(lower_graph, "lower_graph", lambda r: (lower(r), lowered.append(list(r.gm.modules()))))
    gm, priced_regions = regions(build(name), batch(name))
    before, code = list(gm.graph.nodes), gm.code
    timer = prober(Results())
    for region in priced_regions:
        seen = set(timer.costs.rounds)
        int8, real = timer.keys(region)
        assert timer.knows(region) is ({int8, real} <= seen)
        timer.kernel(gm, region)
        timer.real(gm, region)
        assert timer.knows(region) and set(timer.costs.rounds) == seen | {int8, real}
        about = info(region.outputs[0])
        assert tuple(timer.costs.results[int8].shape) == tuple(timer.costs.results[real].shape) == about.shape
        assert timer.costs.results[int8].dtype == about.dtype and timer.costs.results[real].dtype == torch.float32
        if info(region.node).plan.precision == "int8":
            assert any(isinstance(module, Kernel) for module in lowered[-1])
    assert lowered and list(gm.graph.nodes) == before and gm.code == code


def test_a_layer_whose_input_has_a_scale_that_the_graph_holds_is_timed_in_float():
    tensors = {"s": torch.tensor(0.5), "z": torch.tensor(3, dtype=torch.int32), "w": torch.ones(4, 3)}
    gm = fxq.extend.read_graph(
        """
        q: uint8[2, 3] = input()
        s: float32[()] = tensor('s')
        z: int32[()] = tensor('z')
        w: float32[4, 3] = tensor('w')
        x = dequantize(q, scale=s, zero_point=z)
        y = linear(x, w)
        return y
        """,
        tensors,
    )
    region = next(unit_regions(gm))
    timer = prober(Results())
    timer.real(gm, region)
    assert timer.costs.results[timer.keys(region)[1]].shape == (2, 4)


@pytest.mark.parametrize("elements", [1, 1000, 300_000])
def test_conversions_are_timed_with_the_backends_kernels(elements):
    timer = prober(Results())
    timer.table = None  # which knows what they cost
    assert timer.quantize(elements) > 0 and timer.dequantize(elements) > 0
    seconds_by_op = {key.partition(": ")[2].split()[0]: value for key, value in timer.costs.results.items()}
    assert {op: value.dtype for op, value in seconds_by_op.items()} == {
        "quantize": torch.uint8,
        "dequantize": torch.float32,
    }
    assert all(key.startswith("x86 ") for key in timer.costs.rounds)


def test_measuring_leaves_the_users_random_numbers_alone():
    gm, priced_regions = regions(build("residual"), batch("residual"))
    before, timer = torch.get_rng_state(), prober()
    for region in priced_regions:
        timer.kernel(gm, region)
        timer.real(gm, region)
    timer.quantize(1000)
    assert torch.equal(torch.get_rng_state(), before)


class Pair(nn.Module):
    def __init__(self, *channels, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, c, 3, bias=bias) for c in channels)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def keys(*channels, size=8):
    _, priced_regions = regions(Pair(*channels).eval(), torch.rand(1, 3, size, size))
    return [prober()._kernel_key(region) for region in priced_regions]


def test_equal_layers_are_measured_once_and_others_apart():
    same, again = keys(4, 4)
    assert same == again
    assert keys(4)[0] == same
    assert len({same, *keys(5), *keys(4, size=9)}) == 3


def test_a_zero_point_of_zero_has_a_time_of_its_own():
    recipe = fxq.Recipe.static(backend="x86", activation=fxq.TensorSpec(symmetric=True))
    model = Pair(4).eval()
    first, shifted = (
        prober()._kernel_key(regions(model, torch.rand(1, 3, 8, 8) - shift)[1][0]) for shift in (0.0, 0.5)
    )
    assert "at 0" in first and "shifted" in shifted and recipe.config.activation.symmetric


def test_prices_belong_to_a_number_of_threads():
    """Of kernels, float ops and conversions: with other threads, each is measured again."""
    gm, (region,) = regions(Pair(4).eval(), torch.rand(1, 3, 8, 8))
    timer = prober(Results())
    timer.table = None
    for count in (1, 2, 1):
        with threads_set_to(count):
            timer.kernel(gm, region), timer.real(gm, region), timer.quantize(5000), timer.dequantize(5000)
    asked = list(timer.costs.rounds)
    single_thread = [key for key in asked if " 1 threads" in key]
    assert len(single_thread) == 6 and [key.replace(" 1 threads", " 2 threads") for key in single_thread] == asked[6:]


@pytest.mark.parametrize("axis", ["row", "tensor"])
def test_a_layer_with_a_dynamic_scale_is_timed_as_a_kernel(axis, monkeypatch):
    activation = fxq.TensorSpec(per=axis, range="dynamic")
    recipe = fxq.Recipe.dynamic(activation=activation, backend="x86")
    gm, (region,) = regions(nn.Linear(16, 8).eval(), (torch.randn(2, 3, 16),), recipe)
    lowered = prober()._lowered(gm, region.to_graph())
    assert any(isinstance(module, Kernel) for module in lowered.modules())
