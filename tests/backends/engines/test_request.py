"""Memory that a compiled model reads and writes, with an engine that doubles its input."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from fxq.backends.engines.request import MAX_COPIED_BYTES, EngineCall, Request
from fxq.onnx.graph import OnnxGraph

pytestmark = pytest.mark.any_cpu
LARGE_COUNT = MAX_COPIED_BYTES // 4 + 1


class Doubled(Request):
    """Counts what it is told."""

    def __init__(self):
        self.told = []

    def set_input(self, i, x):
        self.x = x
        self.told.append("input")

    def set_output(self, i, y):
        self.y = y
        self.told.append("output")

    def run(self):
        torch.mul(self.x, 2, out=self.y)


def call_of(x, last=False, requests=None):
    """An engine's call for inputs like x; `made` gets its requests."""
    requests = [] if requests is None else requests
    like = (x.permute(0, 2, 3, 1) if last else x).to("meta")
    written = OnnxGraph(None, (0,), False, (like,), (last,))
    return EngineCall(written, lambda: requests.append(Doubled()) or requests[-1], [x], [last])


@pytest.mark.parametrize(("size", "told"), [(4, 1), (LARGE_COUNT, 3)])
def test_a_small_tensor_has_a_place_and_a_large_one_is_used_where_it_lies(size, told):
    requests = []
    call = call_of(torch.ones(size), requests=requests)
    results = [call(torch.full((size,), float(i))) for i in range(told)]
    assert requests[0].told == ["input", "output"] * told
    assert [float(y[0]) for y in results] == [2.0 * i for i in range(told)]  # one result is not written over by another


@pytest.mark.parametrize("size", [4, LARGE_COUNT])
def test_each_thread_has_a_request_of_its_own(size):
    requests, ready = [], Barrier(4)
    call = call_of(torch.ones(size), requests=requests)

    def work(i):
        ready.wait(10)
        return all(bool((call(torch.full((size,), float(i))) == 2.0 * i).all()) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert len(requests) == 5  # one of the thread that made the call


@pytest.mark.parametrize("size", [4, LARGE_COUNT])
def test_first_called_in_inference_mode_and_then_outside_with_a_gradient(size):
    x = torch.ones(size)
    with torch.inference_mode():
        call = call_of(x)
        assert float(call(x)[0]) == 2.0
    assert float(call(x.clone().requires_grad_())[0]) == 2.0


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (1, 16, 48, 32)])
def test_images_channels_last_come_out_so(shape):
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    y = call_of(x, last=True)(x)
    assert torch.equal(y, 2 * x) and y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [4, LARGE_COUNT])
def test_inputs_with_gaps_or_a_sign_in_view(size):
    call, x = call_of(torch.ones(size)), torch.randn(2 * size)
    assert torch.equal(call(x[::2]), 2 * x[::2])
    assert torch.equal(call(torch._neg_view(x[:size])), -2 * x[:size])
