"""A tensor that is stored as integers with a scale per row: equal to its float values, whatever is computed with it."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxq.errors import InputError
from fxq.quant.packing import Packing
from fxq.quant.quantized_rows import QuantizedRows


def rows(*shape: int) -> QuantizedRows:
    """Random rows (2, 3, 7, 8) or of another shape."""
    return rows_of(8, 1, shape or (2, 3, 7, 8))


def rows_of(bits: int, blocks: int, shape: tuple[int, ...] = (2, 3, 7, 8)) -> QuantizedRows:
    """Random rows of integers of this width with several blocks each."""
    generator, sizes = torch.Generator().manual_seed(0), (shape, (*shape[:-1], blocks))
    integers, zero_point = (torch.randint(0, 2**bits, size, generator=generator).byte() for size in sizes)
    packing = None if bits == 8 else Packing(shape[-1:], bits, signed=False)
    stored = integers if packing is None else packing.pack_last(integers)
    return QuantizedRows(stored, torch.rand(zero_point.shape, generator=generator) + 0.1, zero_point, packing)


FORMS = [(8, 1), (4, 1), (8, 2), (4, 2), (4, 4), (3, 2), (8, 8), (4, 8)]


ORDER = torch.tensor([1, 0, 0])
MOVES = {
    "reorder": lambda x: x.index_select(0, ORDER),
    "crop": lambda x: x[..., :3, :],
    "window": lambda x: x[:, :, -4:, :],
    "repeat": lambda x: x.repeat_interleave(2, dim=0),
    "choose": lambda x: x[torch.tensor([1]), ...],
    "join": lambda x: torch.cat([x, x], 0),
    "append": lambda x: torch.cat([x, x], -2),
    "split": lambda x: x.split(1, 0)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "select": lambda x: x[0],
    "select by a tensor": lambda x: x[torch.tensor(1)],
    "crop by a tensor": lambda x: x[:, :, : torch.tensor(3)],
    "narrow by a tensor": lambda x: x.narrow(2, torch.tensor(1), 2),
    "join by name": lambda x: torch.cat(tensors=[x, x], dim=0),
    "reorder by name": lambda x: torch.index_select(input=x, dim=0, index=ORDER),
    "flip": lambda x: x.flip(0, 2),
    "flip by name": lambda x: torch.flip(x, dims=(1, -2)),
    "roll": lambda x: x.roll((1, 2), (0, -2)),
    "tile": lambda x: x.repeat(2, 1, 3, 1),
    "repeat to more axes": lambda x: torch.tile(x, (2, 1, 1, 1, 1)),
    "expand": lambda x: x[:1].expand(4, -1, -1, -1),
    "expand by sizes": lambda x: x[:1].expand((4, 3, 7, 8)),
    "unbind": lambda x: x.unbind(1)[2],
    "iterate": lambda x: list(x)[1],
    "mask of samples": lambda x: x[torch.tensor([False, True])],
    "repeat each": lambda x: x.repeat_interleave(torch.tensor([2, 1]), 0),
    "clone by name": lambda x: torch.clone(input=x),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "device": lambda x: x.to("cpu"),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
COMPUTES = {
    "sum": lambda x: x.sum(-1),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "attention": lambda x: F.scaled_dot_product_attention(torch.ones(2, 3, 1, 8), x, x),
    "view": lambda x: x.view(6, 7, 8),
    "part of rows": lambda x: x[..., :2],
    "half of rows": lambda x: x[..., :4],
    "part of rows by index": lambda x: x.index_select(-1, torch.tensor([3, 2, 1, 0])),
    "doubled rows": lambda x: x.repeat_interleave(2, dim=-1),
    "column": lambda x: x[..., 3],
    "turned rows": lambda x: x[..., torch.arange(7, -1, -1)],
    "same column": lambda x: x[..., torch.zeros(8, dtype=torch.long)],
    "mask": lambda x: x[torch.ones(2, 3, 7, 8, dtype=torch.bool)],
    "joined rows": lambda x: torch.cat([x, x], -1),
    "with floats": lambda x: torch.cat([x, torch.ones(2, 3, 1, 8)], 2),
    "uint8": lambda x: x.to(torch.uint8),
    "float64": lambda x: x.to(torch.float64),
    "comparison": lambda x: x > 0,
    "whole number": lambda x: torch.tensor(int(x[0, 0, 0, 0])),
    "flipped rows": lambda x: x.flip(-1),
    "rolled rows": lambda x: x.roll(1, -1),
    "rolled values": lambda x: x.roll(3),
    "repeated rows": lambda x: x.repeat(1, 1, 1, 2),
    "unbound rows": lambda x: x.unbind(-1)[2],
    "joined rows by name": lambda x: torch.cat(tensors=[x, x], dim=-1),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "new": lambda x: torch.zeros_like(x),
    "read": lambda x: torch.tensor(float(x[0, 0, 0, 0])),
    "into another": lambda x: torch.zeros(2, 3, 7, 8).copy_(x),
}
MODES = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("function", MOVES.values(), ids=MOVES)
def test_whole_rows_move_as_integers(function, mode):
    x = rows()
    with mode():
        result = function(x)
        assert type(result) is QuantizedRows and result.integers.dtype is torch.uint8
        assert torch.equal(result.dequantize(), function(x.dequantize()))
        assert result.shape == result.integers.shape


@pytest.mark.parametrize(("bits", "blocks"), FORMS)
def test_packed_rows_and_blocks(bits, blocks):
    """Functions that move whole rows keep their form, and all results have the values of the float function."""
    x = rows_of(bits, blocks)
    step = x.scale.repeat_interleave(8 // blocks, -1)
    want = (x.integers.float() - x.zero_point.repeat_interleave(8 // blocks, -1)) * step
    assert torch.equal(x.dequantize(), want) and int(x.integers.max()) > 0.9 * 2**bits - 1
    assert x.shape == (2, 3, 7, 8) and x.parts[0].shape[-1] == bits
    assert x.is_stored_as(None if blocks == 1 else 8 // blocks, bits) and not x.is_stored_as(3, bits)
    for name, function in MOVES.items():
        result = function(x)
        assert type(result) is QuantizedRows, name
        assert (result.packing, result.blocks) == (x.packing, blocks), name
        assert torch.equal(result.dequantize(), function(want)) and result.shape == function(want).shape, name
    for name, function in COMPUTES.items():
        result = function(x)  # with a block for each value, parts of rows can be integers, too
        result = result.dequantize() if isinstance(result, QuantizedRows) else result
        assert torch.equal(result, function(want)), name


def test_rows_of_several_forms_are_joined_as_floats():
    forms = [rows_of(bits, blocks) for bits, blocks in ((8, 1), (4, 1), (4, 2), (8, 2))]
    for x in forms:
        for y in forms:
            joined = torch.cat([x, y], 2)
            assert isinstance(joined, QuantizedRows) == (x is y)
            assert torch.equal(torch.cat([x.dequantize(), y.dequantize()], 2), 1 * joined)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("function", COMPUTES.values(), ids=COMPUTES)
def test_all_else_is_computed_in_float(function, mode):
    x = rows()
    with mode():
        result = function(x)
        assert type(result) is torch.Tensor and torch.equal(result, function(x.dequantize()))


def test_rows_of_one_value_and_square_rows():
    for shape in [(4, 1), (1, 1), (3, 3, 3), (2, 8, 8)]:
        x = rows(*shape)
        for function in (lambda x: x[..., 0], lambda x: x.select(-1, 0), lambda x: x.index_select(-1, ORDER[1:2])):
            result = function(x)
            values = result.dequantize() if isinstance(result, QuantizedRows) else result
            assert torch.equal(values, function(x.dequantize()))


def test_it_is_described_without_its_values():
    x = rows()
    assert (x.shape, x.dtype, x.device.type, x.dim(), x.numel(), len(x)) == (
        (2, 3, 7, 8),
        torch.float32,
        "cpu",
        4,
        336,
        2,
    )
    assert x.nbytes == 336 + 42 * 5 and x.size(-2) == 7 and not x.requires_grad
    assert repr(x) == "QuantizedRows((2, 3, 7, 8), integers=torch.uint8)"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x[0].zero_(),
        lambda x: torch.add(1, 1, out=x),
        lambda x: x.__iadd__(1),
        lambda x: torch.relu_(input=x),
        lambda x: F.relu(x, inplace=True),
    ],
)
def test_a_change_in_place_is_refused(change):
    x = rows()
    before = x.dequantize()
    with pytest.raises(InputError, match="stored as integers"):
        change(x)
    assert torch.equal(x.dequantize(), before)


def test_torch_save():
    x, file = rows(), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is QuantizedRows and torch.equal(loaded.dequantize(), x.dequantize())


@pytest.mark.parametrize("read", [lambda x: x.data_ptr(), lambda x: x.untyped_storage(), lambda x: x.share_memory_()])
def test_memory_of_floats_is_refused(read):
    """An address of floats that are computed for the call would be invalid after it."""
    with pytest.raises(InputError, match=r"no memory of floats.*x\.parts"):
        read(rows())


@pytest.mark.parametrize("function", [MOVES["reorder"], MOVES["clone"], MOVES["crop"], MOVES["flip"]])
def test_packed_rows_move_without_unpacking(function):
    """No tensor of the size of the unpacked integers is made, on the CPU."""
    x, sizes = rows_of(4, 1, (2, 3, 7, 64)), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend([result.numel()] if isinstance(result, torch.Tensor) and result.device.type == "cpu" else [])
            return result

    with Sizes():
        result = function(x)
    assert isinstance(result, QuantizedRows) and max(sizes) <= result.numel() / 2
