"""Integers of four bits, two to a byte."""

import pytest
import torch

from fxq.quant.packing import halves, pack, pack_adjacent, unpack, unpack_adjacent


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 5), (4, 3, 3, 3), (1, 7), (5, 1, 1)], ids=str)
@pytest.mark.parametrize("signed", [True, False])
def test_what_is_packed_comes_back(shape, signed):
    low, dtype = (-8, torch.int8) if signed else (0, torch.uint8)
    values = torch.randint(low, low + 16, shape).to(dtype)
    packed = pack(values)
    assert packed.shape == (shape[0], (values[0].numel() + 1) // 2) and packed.dtype == torch.uint8
    again = unpack(packed, shape[1:], signed)
    assert torch.equal(again, values) and again.dtype == dtype


def test_the_first_half_of_a_row_is_in_the_low_bits():
    packed = pack(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert packed.tolist() == [[0x31, 0x42]]
    assert [half.tolist() for half in halves(packed, signed=False)] == [[[1, 2]], [[3, 4]]]


def test_a_row_can_be_taken_alone():
    values = torch.randint(-7, 8, (6, 9)).to(torch.int8)
    assert torch.equal(unpack(pack(values)[2:4], (9,), True), values[2:4])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(3, 9), (1, 1), (2, 16), (0, 5), (4, 0)], ids=str)
def test_adjacent_values_of_a_byte(shape, bits):
    values = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack_adjacent(values, bits)
    wanted = [
        [sum(v << (bits * i) for i, v in enumerate(row[k : k + 8 // bits])) for k in range(0, len(row), 8 // bits)]
        for row in values.tolist()
    ]
    assert packed.tolist() == wanted and packed.dtype == torch.uint8
    assert torch.equal(unpack_adjacent(packed, bits, shape[1]), values)
