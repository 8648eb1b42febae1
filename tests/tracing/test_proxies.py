"""Traced values that a forward uses as plain ones or passes to torch."""

import queue
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE, module
from tests.support.machine import no_warnings
from tests.support.traced import X, close, conv

pytestmark = no_warnings


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "use",
    [
        lambda y: y / np.sqrt(8.0),
        lambda y: np.sqrt(2.0) * y,
        lambda y: np.float32(1) - y,
        lambda y: y + np.int64(1),
        lambda y: F.leaky_relu(y, np.float64(0.1)),
        lambda y: F.interpolate(y, scale_factor=np.float64(2.0)),
        lambda y: torch.clamp(y, -1, np.float64(1.0)),
        lambda y: y.reshape(y.shape[0], np.prod(y.shape[1:])),
    ],
    ids=["div", "in front", "float32", "int64", "slope", "scale", "bound", "size"],
)
def test_numbers_of_numpy_are_numbers(use):
    close(module(lambda self, x: use(self.a(x)), a=conv()), X)


def test_torch_is_what_it_was_afterwards():
    """Replacing Tensor.__getitem__ for a while would make tensors sequences for the rest of the process."""
    scale, shift = torch.tensor(2.0), torch.tensor(1.0)
    close(module(lambda self, x: self.a(x) * torch.tensor([x.mean(), x.std()])[1], a=conv()), X)
    assert torch.tensor([scale, shift]).tolist() == [2.0, 1.0]
    assert "__getitem__" not in vars(torch.Tensor)


def test_a_shape_that_sizes_make():
    close(module(lambda self, x: (lambda y: F.layer_norm(y, y.shape[1:]))(self.a(x)), a=conv()), X)


def test_a_tensor_of_the_model_with_a_traced_index():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.rand(9, 5))
            self.a = nn.Linear(5, 3)

        def forward(self, x):
            return self.a(self.table[x] + self.table[None, : x.shape[1]])

    model, x = Model(), torch.tensor([[1, 8, 0], [4, 3, 2]])
    qmodel = close(model, x)
    with torch.no_grad():
        assert sqnr(model(x[:, :2]), qmodel(x[:, :2])) > 25


@pytest.mark.slow
def test_models_run_and_are_traced_in_several_threads_at_once():
    """A trace does not affect other threads, and two traces leave torch unchanged."""
    model, second, results, errors = nn.Sequential(conv(), nn.ReLU(), conv()).eval(), conv(), queue.SimpleQueue(), []
    with torch.no_grad():
        want = second(X)

    def forward(self, x):
        thread = threading.Thread(target=lambda: results.put(torch.equal(second(X), want)))
        thread.start()
        thread.join()
        return self.second(x)

    def work():
        try:
            for _ in range(3):
                fxq.compare(model, fxq.quantize(model, REFERENCE, data=[X]), [X])
        except BaseException as error:
            errors.append(error)

    graph(module(forward, second=second).eval(), X, "trace")
    assert results.qsize() and all(results.get() for _ in range(results.qsize()))
    call, threads = nn.Module.__call__, [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and nn.Module.__call__ is call


def test_another_thread_draws_numbers_of_its_own():
    drawn_beside = queue.SimpleQueue()

    def forward(self, x):
        beside = threading.Thread(target=lambda: drawn_beside.put(torch.rand(1)))
        beside.start()
        beside.join()
        return self.a(x)

    graph(module(forward, a=conv()).eval(), X, "trace")
    assert {type(drawn_beside.get()) for _ in range(drawn_beside.qsize())} == {torch.Tensor}
