"""Specs of roles: the grid of integers they ask for, what they refuse, and their form as data."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.errors import RecipeError
from fxq.quant.spec import ACTIVATION, FLOAT, WEIGHT, QuantConfig, TensorSpec, fits_int16


@given(st.builds(TensorSpec, bits=st.integers(2, 8), signed=st.booleans(), symmetric=st.booleans()))
def test_grid_of_a_spec(spec):
    assert spec.qmin <= 0 <= spec.qmax
    assert spec.dtype == (torch.int8 if spec.signed else torch.uint8)
    info = torch.iinfo(spec.dtype)
    assert info.min <= spec.qmin < spec.qmax <= info.max
    assert spec.qmax - spec.qmin + 1 == 2**spec.bits - (spec.signed and spec.symmetric)
    if spec.signed and spec.symmetric:
        assert spec.qmin == -spec.qmax


@pytest.mark.parametrize("bits", [1, 9, 0, -8, 7.0, "8"])
def test_bits_out_of_range(bits):
    with pytest.raises(RecipeError, match="from 2 to 8"):
        TensorSpec(bits=bits)


PLANNED = [
    QuantConfig(None),
    QuantConfig(weight=None),
    QuantConfig(None, WEIGHT, TensorSpec(per=64), TensorSpec(per="row")),
]


@pytest.mark.parametrize(
    "config", [FLOAT, QuantConfig(), QuantConfig(TensorSpec(bits=7, observer="minmax"), WEIGHT), *PLANNED]
)
def test_config_survives_as_data(config):
    assert QuantConfig.from_dict(config.to_dict()) == config
    assert config.is_float == (config is FLOAT)


def test_config_refusals():
    with pytest.raises(RecipeError, match=r"'bitz'.*did you mean 'bits'"):
        QuantConfig.from_dict({"activation": {"bitz": 8}})
    with pytest.raises(RecipeError, match=r"'weights'.*did you mean 'weight'"):
        QuantConfig.from_dict({"weights": {}})
    assert str(ACTIVATION) == "uint8 affine (histogram)"
    assert str(WEIGHT) == "int8 symmetric per-channel (minmax)"
    assert str(TensorSpec(per=64, range="dynamic")) == "uint8 affine blocks of 64 (dynamic)"


@pytest.mark.parametrize("per", [0, -1, True, 2.0, "64", None])
def test_what_is_no_per(per):
    with pytest.raises(RecipeError, match="unknown value of per in TensorSpec"):
        TensorSpec(per=per)


@pytest.mark.parametrize("activation", [255, 128, 127])
@pytest.mark.parametrize("weight", [127, 64, 63])
def test_what_fits_int16(activation, weight):
    worst = torch.tensor([activation * weight] * 2).sum()
    assert fits_int16(activation, weight) == (worst <= torch.iinfo(torch.int16).max)


def test_a_table_has_blocks_where_a_layer_has_channels():
    by_row = TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")
    assert by_row.for_embedding == TensorSpec(signed=True, symmetric=True, per=64, observer="minmax")
    for spec in (TensorSpec(bits=4, per=32), TensorSpec(), replace(by_row, format="float16")):
        assert spec.for_embedding is spec
