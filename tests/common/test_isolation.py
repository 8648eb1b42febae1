"""Running a model leaves no mark: its attributes, buffers and random numbers are what they were."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxq.common.data import Batch
from fxq.common.isolation import autocast_on, copied, seeded, untouched, without_autocast

pytestmark = pytest.mark.any_cpu


class Busy(nn.Module):
    """Does all that a forward can do to its module."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.cache = 0, ["before"], {"a": 1}
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("other", torch.ones(2))

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.cache.clear()
        self.extra = x
        self.total += x
        self.other = self.other + x
        return x


def test_everything_is_undone_and_said():
    model = nn.Sequential(Busy(), nn.BatchNorm1d(2))
    busy = model[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lists, buffers = (busy.seen, busy.cache), (busy.total, busy.other)
    with untouched(model) as touched:
        busy(torch.tensor([1.0, 2.0]))
        model[1](torch.rand(3, 2))
        assert busy.calls == 1 and busy.total.tolist() == [1, 2]
    assert (busy.calls, busy.seen, busy.cache) == (0, ["before"], {"a": 1}) and not hasattr(busy, "extra")
    assert busy.seen is lists[0] and busy.cache is lists[1]
    assert busy.total is buffers[0] and busy.other is buffers[1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(touched.buffers) == {"0.total", "1.num_batches_tracked"}
    assert set(touched.attributes["0"]) == {"calls", "seen[1]", "cache['a']", "extra", "other"}


def test_statistics_that_torch_writes_without_counting_it_are_undone():
    class Normalizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.0, float("nan")]))
            self.register_buffer("var", torch.ones(2))

        def forward(self, x):
            return F.batch_norm(x, self.mean, self.var, training=True)

    model = Normalizes().eval()
    with untouched(model):
        model(torch.rand(3, 2) + 5)
        assert model.mean[0] != 0
    assert model.mean[0] == 0 and model.mean[1].isnan() and model.var.tolist() == [1, 1]


def test_an_error_inside_undoes_it_too():
    busy = Busy()
    with pytest.raises(KeyError), untouched(busy):
        busy(torch.ones(2))
        raise KeyError
    assert busy.calls == 0 and not busy.total.any()


def test_a_model_that_does_nothing_is_not_said_to():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    with untouched(model) as touched:
        model(torch.rand(3, 2))
    assert (touched.buffers, touched.attributes) == ([], {})


def test_random_numbers_are_the_same_each_time_and_the_users_go_on():
    torch.manual_seed(7)
    wanted = torch.rand(2)
    torch.manual_seed(7)
    with seeded():
        first = torch.rand(3)
    with seeded():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(2), wanted)


def test_without_autocast_a_layer_keeps_its_type():
    layer, x = nn.Linear(2, 2), torch.rand(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_on() == ["cpu"] and layer(x).dtype == torch.bfloat16
        with without_autocast():
            assert autocast_on() == [] and layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


def test_copies_share_no_tensor():
    x = torch.zeros(2, requires_grad=True)
    batch = Batch((x, [x, 3]), {"more": {"x": x}})
    duplicate = copied(batch)
    tensors = [duplicate.args[0], duplicate.args[1][0], duplicate.kwargs["more"]["x"]]
    assert all(torch.equal(t, x) and t.data_ptr() != x.data_ptr() and not t.requires_grad for t in tensors)
    assert duplicate.args[1][1] == 3


class Table(dict):
    """Subclass of dict, which `torch.utils._pytree` does not know."""


@dataclass
class Pair:
    first: object
    second: object


def test_a_copy_of_a_batch_has_its_own_containers():
    """Also those that are no pytrees, in their own classes and with their attributes."""
    table = Table(x=Pair(torch.ones(2), [torch.zeros(1)]))
    table.length = 3
    batch = Batch((table, "text"), {"more": table})
    first, text = copied(batch).args
    assert type(first) is Table and first.length == 3 and text == "text"
    first["x"].second.append(1)
    first["x"].first.add_(1)
    first["y"] = 0
    assert table == {"x": table["x"]} and len(table["x"].second) == 1
    assert torch.equal(table["x"].first, torch.ones(2))
    held = Table(x=torch.ones(1), other=object())
    assert copied(held) is held  # an object that is no data cannot be copied
