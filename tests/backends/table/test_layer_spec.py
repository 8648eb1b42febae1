"""`LayerSpec`: how sizes are stored, and that every kernel refuses layers that none can run."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from fxq.backends.kernel import PostOp
from fxq.backends.packed.fbgemm import FbgemmConv
from fxq.backends.packed.qnnpack import QnnpackConv
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams
from tests.support.kernels import RESIDUAL, layer

pytestmark = pytest.mark.any_cpu


def test_sizes_are_one_number_per_dimension():
    spec = layer(4, 4, 3, 5, stride=2, padding="same", dilation=[1, 2])
    assert (spec.dims, spec.stride, spec.padding, spec.dilation) == (2, (2, 2), (1, 4), (1, 2))
    assert layer(4, 4, 3, padding="valid").padding == (0,)
    rows = layer(4, 4)
    assert (rows.dims, rows.stride, rows.padding) == (0, (), ())
    with pytest.raises(FrozenInstanceError):
        rows.groups = 2


@pytest.mark.parametrize("kernel", [OnednnConv, FbgemmConv, QnnpackConv])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"padding_mode": "circular"}, "pads with mode 'circular'"),
        ({"padding": "same"}, "pads asymmetrically"),
        ({"residual": RESIDUAL, "post": PostOp("silu")}, "silu after a residual"),
        ({"residual": RESIDUAL, "out": None}, "it adds a residual and emits float32; the sum is uint8"),
        ({"x": QParams.per_tensor(0.1, 0, -128, 127, torch.int8)}, "the input is int8, the kernels take uint8"),
        ({"slope": torch.tensor([0.5, 2.0])}, "prelu has slopes above 1 in some channels and below 1 in others"),
    ],
)
def test_what_no_kernel_runs(kernel, change, reason):
    spec = replace(layer(4, 4, 2, 2), **change)
    assert kernel.refuses(spec) == reason
    assert kernel.refuses(layer(4, 4, 2, 2)) is None
