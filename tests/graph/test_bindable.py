"""Modules report every kind of change to their watches."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from fxq.graph.bindable import Bindable, ModuleSnapshot, ModuleWatch

pytestmark = pytest.mark.any_cpu


class Double(Bindable):
    def __init__(self):
        super().__init__()
        self.register_buffer("two", torch.tensor(2.0))
        self.option = 3

    def forward(self, x):
        return x * self.two

    def bind(self, x):
        return lambda y: y + y


class Overridden(Double):
    def forward(self, x):
        return x * 5


X = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "tells"),
    [
        (lambda m: setattr(m, "option", 4), True),
        (lambda m: setattr(m, "option", m.option), False),
        (lambda m: delattr(m, "option"), True),
        (lambda m: m.eval() and None, True),
        (lambda m: m.train() and None, False),
        (lambda m: m.register_forward_hook(print), True),
        (lambda m: m.register_forward_pre_hook(print), True),
        (lambda m: m.register_full_backward_hook(print), True),
        (lambda m: m.register_full_backward_pre_hook(print), True),
        (lambda m: m.load_state_dict(m.state_dict()), True),
        (lambda m: m(X), False),
    ],
)
def test_a_change_is_reported(change, tells):
    module, watch = Double(), ModuleWatch()
    module.notify(watch)
    change(module)
    assert watch.changed is tells


@pytest.mark.parametrize(
    ("write", "holds"),
    [
        (lambda m: m.two.add_(1), False),
        (lambda m: setattr(m, "two", torch.tensor(3.0)), False),
        (lambda m: setattr(m.two, "data", torch.tensor(4.0)), False),
        (lambda m: m.register_buffer("more", torch.ones(1)), False),
        (lambda m: m._buffers.update(other=m._buffers.pop("two")), False),
        (lambda m: m._buffers.update(two=m._buffers["two"].clone()), False),
        (lambda m: m.two + 1, True),
    ],
)
def test_its_tensors_are_as_they_were(write, holds):
    module = Double()
    snapshot = ModuleSnapshot(module._buffers)
    assert snapshot.is_unchanged()
    write(module)
    assert snapshot.is_unchanged() is holds


def test_callable_for_inputs():
    module = Double()
    assert module.callable_for(X)(X).tolist() == module.callable_for()(X).tolist() == [2, 2]
    assert module.callable_for() == module.forward and module.callable_for(X) != module.forward
    assert Overridden().callable_for(X)(X).tolist() == [5, 5]  # the inherited bind belongs to another forward
    module.forward = lambda x: x * 7
    assert module.callable_for(X)(X).tolist() == [7, 7]
    hooked = Double()
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    assert hooked.callable_for(X) is hooked and hooked.callable_for(X)(X).tolist() == [3, 3]


def test_copies_and_pickles_do_not_report_to_the_watch_of_the_original():
    module, watch = Double(), ModuleWatch()
    module.notify(watch)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied.option = 9
    assert not watch.changed


def test_a_watch_that_is_gone_is_not_held():
    module, watch = Double(), ModuleWatch()
    module.notify(watch)
    del watch
    gc.collect()
    assert len(module._watches) == 0
    nn.Module.eval(module)
