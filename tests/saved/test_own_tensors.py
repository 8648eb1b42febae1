"""Tensors that the user sets on a quantized model, in files; `tests/test_model.py` has them in copies."""

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError
from fxq.saved.own_tensors import own_tensors, set_own_tensors
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu


def model():
    return fxq.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), REFERENCE, data=[torch.rand(2, 4)])


def test_a_model_without_any_has_none():
    assert own_tensors(model(), {}) == ({}, {}, [])


def test_which_there_are():
    built = model()
    built.register_buffer("a", torch.zeros(1))
    built.head = nn.Sequential(nn.Linear(2, 2))
    tensors, named, lost = own_tensors(built, {"b": torch.ones(2), "c": 3})
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {":a": [1], ":b": [2]}
    assert (named, lost) == ({"a": "buffer", "b": "attribute"}, ["head"])


@pytest.mark.parametrize(
    ("path", "kind", "tensor"),
    [
        ("a", "buffer", None),
        ("a", "module", torch.zeros(1)),
        ("a", "parameter", torch.zeros(1)),
        ("forward", "buffer", torch.zeros(1)),
        ("__class__", "attribute", torch.zeros(1)),
        ("qparams", "attribute", torch.zeros(1)),
        ("_float", "attribute", torch.zeros(1)),
        ("fxq_units.linear_relu.a", "buffer", torch.zeros(1)),
        ("0.weight", "buffer", torch.zeros(1)),
    ],
)
def test_forged_ones_are_refused(path, kind, tensor):
    gm = fxq.extend.run_passes(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), REFERENCE, example_inputs=torch.rand(2, 4), until="fuse"
    )
    with pytest.raises(InputError):
        set_own_tensors(gm, {path: tensor}, {path: kind})
