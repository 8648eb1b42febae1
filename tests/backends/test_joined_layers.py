"""Layers that read one value as one kernel: the same numbers as from each alone, and all that is known of each."""

import copy

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.joined_layers import JoinedLayers
from fxq.backends.layer_spec import LayerSpec
from fxq.backends.measured_layer import MeasuredLayer
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.errors import BackendError
from fxq.quant.qparams import QParams
from tests.kernels import POSTS, activations, copies, weight
from tests.machine import QMAX, needs_x86

pytestmark = needs_x86


def layer(out, inside=6, bias=True, post=None):
    values, qparams, _ = weight(out, inside)
    grid = QParams.per_tensor(1.0, 0, 0, QMAX)
    b = torch.randn(out) if bias else None
    return MeasuredLayer.of(OnednnLinear, LayerSpec(values, qparams, b, grid, None, post=post))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(5,), (1,), (2, 3), (0,)])
def test_the_same_as_each_alone(rows, bias):
    layers = [layer(out, bias=bias) for out in (4, 1, 3)]
    joined = JoinedLayers.of(layers)
    given = activations(*rows, 6), torch.rand(*rows, 1) + 0.1, torch.rand(*rows, 1) * QMAX
    alone = [one(*given) for one in layers]
    for kernel in (joined, *copies(joined)):
        for found in (kernel(*given), kernel.bind(*given)(*given)):
            assert all(map(torch.equal, found, alone)) and len(found) == 3
    joined.bias_1.add_(1.0) if bias else joined.weight_scale_1.mul_(2.0)
    torch.testing.assert_close(joined(*given)[1], alone[1] + 1.0 if bias else 2 * alone[1])
    assert torch.equal(joined(*given)[2], alone[2])


def test_layers_that_differ_are_refused():
    for other in (layer(4, inside=5), layer(4, bias=False), layer(4, post=POSTS["relu"][0])):
        with pytest.raises(BackendError, match=r"as many inputs|some have a bias|differ in their options"):
            JoinedLayers.of([layer(4), other])


class Shared(nn.Module):
    """Three layers that read one value, one that reads another, and one whose function a kernel takes along."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 4)
        self.gate, self.bare = nn.Linear(16, 4), nn.Linear(16, 4, bias=False)

    def forward(self, x):
        query, other = self.query(x), self.key(x).sum(-1, keepdim=True) + x
        return query, self.value(x), self.gate(other).relu(), self.bare(x)


def test_a_model():
    model, x = Shared().eval(), torch.randn(2, 7, 16)
    recipe = fxq.Recipe.dynamic(optimize="coverage").with_min_sqnr(None)
    qmodel = fxq.quantize(model, recipe, example_inputs=x)
    joined = [kernel for kernel in qmodel.modules() if isinstance(kernel, JoinedLayers)]
    assert [[len(kernel.get_buffer(f"weight_{i}")) for i in range(3)] for kernel in joined] == [[16, 8, 4]]
    for y, wanted in zip(qmodel(x), model(x), strict=True):
        torch.testing.assert_close(y, wanted, atol=0.1, rtol=0.03)  # without VNNI activations have 7 bits
    assert {"query", "key", "value", "gate", "bare"} == set(qmodel.qparams())
    assert {row.path for row in qmodel.ledger.where(fate="int8")} >= {"query", "key", "value"}
    assert all(map(torch.equal, copy.deepcopy(qmodel)(x), qmodel(x)))
