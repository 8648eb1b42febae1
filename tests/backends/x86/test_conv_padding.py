"""Padding with reused memory, against F.pad."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86 import conv_padding as x86_pad
from fxq.backends.x86.conv_padding import Padding
from fxq.backends.x86.onednn_conv import OnednnConv
from tests.support.kernels import CHANNELS_LAST, OUTS, X, activations, agree, bytes_, real, weight
from tests.support.machine import needs_x86


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("pad", [(1, 1, 1, 1), (2, 1, 0, 3), (0, 0, 4, 0), (1, -1, 0, 0), (-2, 0, 1, 1)], ids=str)
def test_as_f_pad(pad, limit, monkeypatch):
    monkeypatch.setattr(x86_pad, "MAX_REUSED_IMAGE_BYTES", limit)
    for shape in [(1, 3, 5, 4), (2, 1, 3, 3), (3, 8, 1, 7), (0, 4, 3, 3)]:
        padding = Padding(torch.Size(shape), pad, 77)
        for _ in range(3):
            x = bytes_(*shape).contiguous(memory_format=CHANNELS_LAST)
            padded = padding.take(x)
            assert torch.equal(padded.image, F.pad(x, pad, value=77))
            assert padded.image.is_contiguous(memory_format=CHANNELS_LAST)
            assert (padded.inside is not None) == ((limit > 0 or not x.numel()) and min(pad) >= 0)
            padding.give_back(padded)


def test_memory_is_used_again_but_never_by_two():
    x = bytes_(1, 8, 6, 6)
    padding = Padding(x.shape, (1, 1, 1, 1), 3)
    first, second = padding.take(x), padding.take(x)
    assert first.image.data_ptr() != second.image.data_ptr()
    padding.give_back(first)
    assert padding.take(x).image.data_ptr() == first.image.data_ptr()


def test_made_in_inference_mode_and_used_outside():
    x = bytes_(1, 8, 6, 6)
    padding = Padding(x.shape, (1, 1, 1, 1), 3)
    with torch.inference_mode():
        padding.give_back(padding.take(x))
    assert torch.equal(padding.take(x).image, F.pad(x, (1, 1, 1, 1), value=3))


@needs_x86
def test_a_convolution_in_many_threads():
    q, qp, w = weight(16, 16, 3, 3)
    conv = OnednnConv(LayerSpec(q, qp, None, X, OUTS[0], padding=1))
    images = [activations(1, 16, 9, 9) for _ in range(4)]
    results: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}

    def run(i: int) -> None:
        for _ in range(50):
            results[i].append(conv(images[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, image in enumerate(images):
        expected = results[i][0]
        agree(expected, F.conv2d(real(image, X), w, padding=1), OUTS[0])
        assert len(results[i]) == 50 and all(torch.equal(y, expected) for y in results[i])
