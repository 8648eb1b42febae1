"""Linear layers of one row into float: a product of integers where PyTorch has a quick one, else oneDNN's layer."""

import pytest
import torch

from fxq.backends import cpu
from fxq.backends.cpu import has_onednn_int8
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.quant.qparams import QParams
from tests.kernels import real, weight

pytestmark = pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
X = QParams.per_tensor(0.0217, 51, 0, 127)  # a grid that every CPU takes


@pytest.mark.parametrize("shape", [(33,), (1, 33), (1, 1, 33)])
@pytest.mark.parametrize("quick", [True, False])
def test_one_row_is_right_either_way(shape, quick, monkeypatch):
    product, asked = torch._int_mm, []
    monkeypatch.setattr(torch, "_int_mm", lambda *given: asked.append(1) or product(*given))
    monkeypatch.setattr(cpu, "has_int_mm", lambda: quick)
    q, qp, w = weight(40, 33)
    bias = torch.randn(40)
    linear = OnednnLinear(q, qp, bias, X, None)
    x = torch.randint(0, 128, shape, dtype=torch.uint8)
    wanted = real(x, X) @ w.T + bias.double()
    for got in (linear(x), linear.bind(x)(x)):
        assert got.shape == (*shape[:-1], 40) and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert bool(asked) is quick
