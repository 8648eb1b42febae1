"""Bytes of a model's tensors."""

import torch
from torch import nn

import fxq
from fxq.common.metrics import nbytes
from tests.helpers import REFERENCE


def test_counts_parameters_and_buffers():
    norm = nn.BatchNorm1d(4)  # weight, bias, mean and variance of 4 floats, and an int64
    assert nbytes(norm) == 4 * 4 * 4 + 8


def test_counts_what_is_shared_once():
    layer = nn.Linear(8, 8, bias=False)
    assert nbytes(nn.ModuleList([layer, nn.Linear(8, 8, bias=False), layer])) == 2 * 8 * 8 * 4
    tied = nn.Linear(8, 8, bias=False)
    tied.weight = nn.Parameter(layer.weight.detach())  # another parameter on the same memory
    assert nbytes(nn.ModuleList([layer, tied])) == 8 * 8 * 4


def test_a_model_without_tensors_takes_nothing():
    assert nbytes(nn.ReLU()) == 0


def test_int8_weights_take_a_quarter():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.rand(4, 256)])
    weights = 2 * 256 * 256
    assert weights <= nbytes(qmodel) <= 1.1 * weights  # scales and biases come on top
    assert nbytes(model) >= 4 * weights
