"""Values with ranges that differ, put together: each keeps a grid that is fine enough."""

import pytest
import torch
import torch.nn.functional as F

import fxq
from fxq.common.metrics import sqnr
from fxq.quant.observer_base import Observer
from tests.support.graphs import MINMAX, until
from tests.support.helpers import REFERENCE
from tests.support.models import settled
from tests.test_ranges import BACKENDS, Net, conv, precisions, quality, quantized, two_convs


def mixed(put_together):
    def function(m, x):
        a = F.hardswish(m.first(x))
        return put_together(m, a, 1e3 * m.second(x))

    return settled(lambda: Net(function, first=conv(3, 8, 3), second=conv(3, 8, 3), last=conv(8, 4)))


def branch_and_cat(m, a, b):
    return m.last(a), m.last(torch.cat([a, b], 1)[:, 8:])


def branch_and_stack(m, a, b):
    return m.last(a), m.last(torch.stack([a, b], 1)[:, 1])


def branch_and_maximum(m, a, b):
    return m.last(a), m.last(torch.maximum(a, b))


def both_parts_of_a_cat(m, a, b):
    y = torch.cat([a, b], 1)
    return m.last(y[:, :8]), m.last(y[:, 8:])


def both_parts_of_a_turned_cat(m, a, b):
    parts = torch.cat([a, b], 1).flip(2).chunk(2, 1)
    return m.last(parts[0]), m.last(parts[1])


@pytest.mark.parametrize("observer", ["moving_average", "minmax"])
def test_a_grid_covers_all_that_is_put_together(observer):
    """Averaged ranges would cut off the larger tensor."""
    model = mixed(lambda m, a, b: m.last(torch.cat([a, b], 1)[:, 8:]))
    data = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    recipe = fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(observer=observer))
    assert sqnr(model(data[0]), fxq.quantize(model, recipe, data=data)(data[0])) > 30


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "together",
    [branch_and_cat, branch_and_stack, branch_and_maximum, both_parts_of_a_cat, both_parts_of_a_turned_cat],
)
def test_a_fine_branch_keeps_its_grid(together, backend):
    sqnrs, qmodel = quality(mixed(together), (torch.randn(4, 3, 12, 12),), backend)
    assert min(sqnrs) > 25
    assert [precision for op, precision in precisions(qmodel) if op == "conv2d"] == ["int8"] * 4
    if together is branch_and_cat:
        assert ("cat", "moves") in precisions(qmodel)
        requantized = [n for n in qmodel.history["fallback"].graph if n.label == "requantize"]
        assert len(requantized) == 1


def test_a_clamp_to_a_small_part_reads_floats():
    def function(m, x):
        y = m.first(x)
        return m.last(y.clamp(-0.01, 0.01)), m.last(y)

    model = settled(lambda: Net(function, **two_convs()))
    sqnrs, qmodel = quality(model, (torch.randn(4, 3, 12, 12),), "x86")
    assert min(sqnrs) > 20
    assert "the range of the values that it selects" in next(e.reason for e in qmodel.ledger if e.op == "hardtanh")


def many_cats(depth):
    """Each cat puts a coarser value beside all before, each of which is read as it is as well."""

    def function(m, x):
        total, result = m.first(x), 0
        for i in range(depth):
            result = result + m.last(total[:, :8])
            total = torch.cat([total, m.first(x) * 3.0 ** (i % 9)], 1).relu()[:, -16:]
        return result, m.last(total[:, 8:])

    return settled(lambda: Net(function, **two_convs()))


def test_grids_beside_grids():
    """Every grid holds what is brought to it, over several steps, whatever is tied."""
    model, x = many_cats(12), torch.randn(2, 3, 6, 6)
    qmodel = quantized(model, (x,), "reference", activation=MINMAX)
    assert min(sqnr(a, b) for a, b in zip(model(x), qmodel(x), strict=True)) > 25


def test_grid_groups_grow_in_proportion_to_the_graph(monkeypatch):
    """The joining of observers, counted."""
    joins = []
    join = Observer.join
    monkeypatch.setattr(Observer, "join", lambda self, other: (joins.append(1), join(self, other)))
    counts = []
    for depth in (10, 40):
        joins.clear()
        until(many_cats(depth), torch.randn(1, 3, 4, 4), "choose-grids", REFERENCE)
        counts.append(len(joins))
    assert counts[1] < 5 * max(counts[0], 1)
