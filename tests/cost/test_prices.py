"""The qdq graph as ops and values with prices, and what is said where integers are slower."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxq
from fxq.backends.by_name import get_backend
from fxq.cost.cache import Costs
from fxq.cost.min_cut import PricedOp, PricedValue
from fxq.cost.prices import priced_values, regions_of, slower_for_size, slower_than_float
from fxq.cost.probe import Prober
from fxq.graph.info import Cost, info, set_info
from fxq.graph.unit import emits_float
from tests.support.graphs import until
from tests.support.helpers import REFERENCE, module
from tests.support.models import NETWORKS, batch, build

pytestmark = pytest.mark.any_cpu


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", NETWORKS)
def test_regions_are_those_of_what_runs_on_integers(name):
    gm = until(build(name), batch(name), "propagate", REFERENCE).gm
    regions_by_node = regions_of(gm, list(gm.graph.nodes))
    planned = {n for n in gm.graph.nodes if (plan := info(n).plan) is not None and plan.precision != "float"}
    assert (
        regions_by_node
        and set(regions_by_node) <= planned
        and all(region.node is n for n, region in regions_by_node.items())
    )
    for n, region in regions_by_node.items():
        set_info(n, shape=None)
        assert not Prober(get_backend("reference"), REFERENCE, Costs()).can_price(region)


def test_one_layer_with_an_activation_emits_float_and_a_sum_does_not():
    def forward(self, x):
        return F.relu(self.b(F.relu(self.a(x)) + 0) + self.c(x))

    layers = {name: nn.Conv2d(3, 3, 1) for name in "abc"}
    gm = until(module(forward, **layers), torch.rand(2, 3, 4, 4), "propagate", REFERENCE).gm
    units = {n.name: emits_float(gm, n) for n in gm.graph.nodes if n.op == "call_module"}
    assert units == {name: "add" not in name for name in units} and set(units.values()) == {True, False}


class Fixed:
    """A prober that has measured everything."""

    def quantize(self, elements):
        return 1.0

    def dequantize(self, elements):
        return 2.0

    def measure(self, gm, quantize):
        return 3.0


def test_a_value_that_is_measured_is_measured_once_and_read_as_floats():
    """Two layers read one measured form of a value, and a third its calibrated one."""

    def forward(self, x):
        y = self.a(x)
        return self.b(y), self.c(y), self.d(y)

    rows = fxq.Recipe.dynamic().config
    layers = {name: nn.Linear(3, 3) for name in "abcd"}
    mixed = REFERENCE.override("c", rows).override("d", rows)
    gm = until(module(forward, **layers), torch.rand(2, 3), "propagate", mixed).gm
    nodes = list(gm.graph.nodes)
    priced = priced_values(gm, nodes, regions_of(gm, nodes), Fixed())
    by_reader = {str(reader): v for v in priced for reader in v.readers}
    measured, calibrated = by_reader["c"], by_reader["b"]
    assert by_reader["d"] is measured and (measured.producer, measured.quantize, measured.dequantize) == (None, 3.0, 0)
    assert str(calibrated.producer) == "a" and None in calibrated.readers and calibrated.quantize == 1.0


a, b = (fx.Graph().placeholder(name) for name in "ab")
A, B = PricedOp(a, 3e-3, 1e-3), PricedOp(b, 1e-3, 2e-3)


def test_what_loses_is_named_with_its_times():
    said = slower_than_float([A, B], [], {a, b}, 0.0)
    assert said is not None and re.search(r"1\.3 times as long as in float .*: 4 ms instead of 3 ms", said)
    assert "a (3 ms, in float 1 ms)" in said and "b (" not in said
    assert said.endswith('but not with effort="fast".')  # which times nothing


KEPT = {a: Cost(4000.0, 5000.0), b: Cost(1000.0, 900.0)}


def test_integer_weights_that_make_a_model_slower_are_told_of():
    said = slower_for_size(KEPT, 3e-3)
    assert said is not None and re.search(r"estimated to take 1\.1 times .*: 8\.9 ms instead of 8 ms", said)
    assert "a (5 ms, in float 4 ms), b (0.9 ms, in float 1 ms)" in said
    assert "recipe.override('a', fxq.FLOAT)" in said


@pytest.mark.parametrize(("kept", "others"), [(KEPT, 1.0), ({}, 0.0), ({b: KEPT[b]}, 0.0)])
def test_nothing_is_said_of_integer_weights_that_make_little_difference(kept, others):
    assert slower_for_size(kept, others) is None


@pytest.mark.parametrize("numba", ["none", "0.66.0"])
def test_the_warning_names_compiled_loops_where_they_are_missing(numba, monkeypatch):
    monkeypatch.setattr("fxq.backends.loops.code.compiler.installed", lambda: numba)
    assert ("pip install fxq[jit]" in slower_for_size(KEPT, 3e-3)) == (numba == "none")
    assert ('weight_only(compute="bfloat16")' in slower_for_size(KEPT, 3e-3, [a])) == (numba == "none")
    assert "bfloat16" not in slower_for_size(KEPT, 3e-3)


def test_conversions_may_be_what_loses():
    said = slower_than_float([B], [PricedValue(None, (b,), 5e-3, 0.0, False)], {b}, 0.0)
    assert said is not None and "conversions cost more" in said


@pytest.mark.parametrize(
    ("ops", "integers", "left"),
    [
        ([B], {b}, 0.0),
        ([A, B], {b}, 0.0),
        ([A], {a}, 1.0),  # the rest takes so long that it makes no difference
        ([PricedOp(a, 9.0, math.inf, source="")], {a}, 0.0),
        ([], set(), 0.0),
    ],
)
def test_nothing_is_said_where_it_is_not_slower(ops, integers, left):
    assert slower_than_float(ops, [], integers, left) is None
