"""Stored grids: weights of quantized files stay on the integers of the file."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import has_memory
from fxq.backends.loops.tokens.token_binder import value_kind
from fxq.quant.qparams import QParams, dequantize
from fxq.quant.spec import TensorSpec
from fxq.quant.stored_grids import grid_within, lies_on_grid, store_grid, stored_grid

BLOCKS = fxq.Recipe.weight_only(bits=4, per=16, backend="reference", optimize="coverage")


def layer_of_a_file(uses_all=True):
    """Linear layer without bias whose weight has a stored grid of 4 bits in blocks of 16; its integers.

    With `uses_all=False`, the largest integers are missing, so that no observer of the weight finds the grid.
    """
    generator = torch.Generator().manual_seed(0)
    largest = 7 if uses_all else 5
    integers = torch.randint(-largest, largest + 1, (8, 32), generator=generator, dtype=torch.int8)
    scale = torch.rand(8, 2, generator=generator) + 0.1
    grid = QParams(scale, torch.zeros(8, 2, dtype=torch.int32), -8, 7, torch.int8, 1, 16)
    layer = nn.Linear(32, 8, bias=False).eval()
    layer.weight = nn.Parameter(integers * scale.repeat_interleave(16, 1))
    store_grid(layer.weight, grid)
    return layer


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def with_state_of_a_file(model):
    new = layer_of_a_file()
    new.load_state_dict(model.state_dict())
    return new


def pickled_and_copied(model):
    return copy.deepcopy(pickled(model))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, pickled_and_copied, with_state_of_a_file])
def test_copies_of_a_model_keep_the_integers_of_its_file(copied):
    own, x = layer_of_a_file(uses_all=False), torch.randn(3, 32)
    qmodel = fxq.quantize(copied(own), BLOCKS, example_inputs=x)
    torch.testing.assert_close(qmodel(x), own(x), rtol=0, atol=1e-5)  # float32 sums: nothing is rounded
    without = nn.Linear(32, 8, bias=False).eval()
    without.weight = nn.Parameter(own.weight.detach())
    assert (fxq.quantize(without, BLOCKS, example_inputs=x)(x) - own(x)).abs().max() > 0.01  # its grid is another


def test_a_layer_left_in_float_reads_its_weight_as_any_other():
    """Its type does not keep compiled loops from reading it by address."""
    own, x = layer_of_a_file(), torch.randn(3, 32)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        qmodel = fxq.quantize(own, BLOCKS.override("**", fxq.FLOAT), example_inputs=x)
    (weight,) = (p for name, p in qmodel.named_parameters() if name == "weight")
    assert stored_grid(weight) is not None and has_memory(weight) and value_kind(weight)[0] == "tensor"
    assert type(qmodel(x)) is torch.Tensor


def test_tied_weights_stay_tied():
    own = layer_of_a_file()
    tied = nn.ModuleList([own, nn.Linear(32, 8, bias=False)])
    tied[1].weight = own.weight
    for copied in (copy.deepcopy(tied), pickled(tied)):
        assert copied[0].weight is copied[1].weight
        assert stored_grid(copied[1].weight).same_as(stored_grid(own.weight))


def test_a_changed_weight_gets_a_new_grid_and_a_warning():
    model, x = layer_of_a_file(), torch.randn(3, 32)
    with torch.no_grad():
        model.weight.mul_(1.37)
    with pytest.warns(fxq.FxqWarning, match=r"no longer on the grids of their file: weight\. New scales"):
        qmodel = fxq.quantize(model, BLOCKS, example_inputs=x)
    without = nn.Linear(32, 8, bias=False).eval()
    without.weight = nn.Parameter(model.weight.detach().clone())
    torch.testing.assert_close(qmodel(x), fxq.quantize(without, BLOCKS, example_inputs=x)(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 3, 2.6])
def test_values_in_other_dtypes_lie_on_their_grid(dtype, zero):
    """A zero point of 2.6 stands for an offset per block, of which some tools' files have one."""
    q = torch.arange(16, dtype=torch.uint8).expand(4, 16).contiguous()
    kind = torch.float32 if isinstance(zero, float) else torch.int32
    grid = QParams(torch.tensor([[0.013], [1.7], [-0.3], [40.0]]), torch.full((4, 1), zero, dtype=kind), 0, 15,
                   torch.uint8, 1, 16)  # fmt: skip
    weight = dequantize(q, grid)
    assert lies_on_grid(weight.to(dtype), grid)
    for moved in (weight * 1.02, weight + 0.1 * grid.scale, weight + 2 * grid.scale):
        assert not lies_on_grid(moved.to(dtype), grid)


def test_a_grid_is_within_a_spec_that_has_its_integers():
    grid = stored_grid(layer_of_a_file().weight)
    wide = TensorSpec(bits=8, signed=True, per=16)
    assert grid_within(wide, 1, grid).same_as(grid)
    assert grid_within(replace(wide, symmetric=True), 1, grid).same_as(grid)
    for narrower in (replace(wide, bits=3), replace(wide, per=8), replace(wide, per="channel")):
        assert grid_within(narrower, 1, grid) is None
    assert grid_within(wide, 0, grid) is None  # scales along another axis
    shifted = replace(grid, zero_point=grid.zero_point + 1)
    assert grid_within(replace(wide, symmetric=True), 1, shifted) is None
    unsigned = grid_within(TensorSpec(bits=4, per=16), 1, shifted)
    assert (unsigned.dtype, unsigned.qmin, unsigned.qmax, unsigned.zero_point.unique().tolist()) == (
        torch.uint8, 0, 15, [9],
    )  # fmt: skip
    assert grid_within(wide, 1, unsigned).same_as(shifted)
