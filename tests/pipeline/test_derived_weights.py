"""Constants that are made of the model's tensors: made again, they are what the passes made."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fxq.pipeline.derived_weights import FoldedNorm, ParameterRows


@pytest.mark.parametrize(
    ("layer", "axis"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), 0),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), 1),
        (nn.ConvTranspose1d(4, 6, 3), 1),
        (nn.Linear(4, 6, bias=False), 0),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_a_layer_with_its_batch_norm(layer, axis, affine):
    kind = {nn.Linear: nn.BatchNorm1d, nn.ConvTranspose1d: nn.BatchNorm1d}.get(type(layer), nn.BatchNorm2d)
    norm = kind(6, affine=affine).eval()
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2.0)
    tensors = {**layer.state_dict(prefix="l."), **norm.state_dict(prefix="n.")}
    fold = FoldedNorm(
        weight="w",
        bias="b",
        own_weight="l.weight",
        own_bias="l.bias" if layer.bias is not None else None,
        mean="n.running_mean",
        var="n.running_var",
        gamma="n.weight" if affine else None,
        beta="n.bias" if affine else None,
        eps=norm.eps,
        axis=axis,
        groups=getattr(layer, "groups", 1),
        commutes=True,
    )
    constants = fold.made(tensors)
    size = {nn.Linear: (5, 4), nn.ConvTranspose1d: (2, 4, 7)}.get(type(layer), (2, 4, 7, 7))
    x = torch.randn(size)
    wanted = norm(layer(x))
    with torch.no_grad():
        layer.weight.copy_(constants["w"])
        layer.bias = nn.Parameter(constants["b"])
    assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)
    assert fold.scale(tensors).shape == (6,)


def test_rows_of_a_parameter():
    whole = torch.randn(12, 4)
    tensors = {"other": torch.randn(12, 4), "in_proj": whole}
    rows = ParameterRows.of("q", whole[4:8], tensors)
    assert rows == ParameterRows("q", "in_proj", 4, 4)
    assert torch.equal(rows.made(tensors)["q"], whole[4:8])
    assert ParameterRows.of("q", whole[4:8].clone(), tensors) is None
    assert ParameterRows.of("q", whole[:, :2], tensors) is None
    assert ParameterRows.of("q", whole[::2], tensors) is None
