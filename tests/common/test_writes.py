"""Tensors that are written to are copied first, whichever way they are written to."""

import pytest
import torch
from torch import nn

from fxq.common.writes import WriteWatch

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.data.clamp_(-0.1, 0.1),
        lambda w: w[0].zero_(),
        lambda w: torch.add(w, 1, out=w),
        lambda w: nn.init.ones_(w),
        lambda w: nn.functional.embedding(torch.tensor([0]), w, max_norm=0.1),
    ],
    ids=["mul_", "data", "view", "out", "init", "max_norm"],
)
def test_a_write_is_seen_and_undone(write):
    written, parameter = nn.Parameter(torch.ones(2, 3) * 2), nn.Parameter(torch.ones(2))
    before = written.detach().clone()
    with torch.no_grad(), WriteWatch([written, parameter]) as watch:
        write(written)
        parameter + 1
    assert not torch.equal(written, before)
    assert [t is written for t in watch.written] == [True]
    watch.put_back()
    assert torch.equal(written, before)
