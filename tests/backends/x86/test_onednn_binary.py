"""Sums on oneDNN that `tests/backends/plain/test_binary.py` does not cover."""

import torch

from fxq.backends import cpu
from fxq.backends.x86.onednn_binary import OnednnAdd
from fxq.quant.qparams import QParams
from tests.support.machine import needs_x86

pytestmark = needs_x86


def test_sums_take_all_bits_on_any_cpu(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    grid = QParams.per_tensor(1.0, 0)
    x = torch.randint(250, 256, (2, 24, 40, 40), dtype=torch.uint8)
    added = OnednnAdd(grid, grid, QParams.per_tensor(2.0, 0))(x, x.flip(1))
    assert torch.equal(added, ((x.float() + x.flip(1)) / 2).round().to(torch.uint8))
