"""Integers of few bits, packed into bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.quant.packing import PACKED_BITS, Packing, halves, pack_adjacent, planes_of, unpack_adjacent


def drawn(shape, bits, signed):
    low, dtype = (-(2 ** (bits - 1)), torch.int8) if signed else (0, torch.uint8)
    return torch.randint(low, low + 2**bits, shape).to(dtype)


def by_definition(codes, bits):
    """Bytes of a row of unsigned values, value by value."""
    units = [codes] if bits == 4 else [codes[i : i + 64] for i in range(0, len(codes), 64)]
    row = []
    for unit in units:
        position = 0
        for width in (w for w in (4, 2, 1) if bits & w):
            size = -(-len(unit) * width // 8)
            plane = [0] * size
            for j, value in enumerate(unit):
                plane[j % size] |= ((value >> position) % 2**width) << (width * (j // size))
            row += plane
            position += width
    return row


@settings(max_examples=33, deadline=None)
@given(
    shape=st.one_of(
        st.tuples(st.integers(0, 4), st.integers(1, 300)),
        st.sampled_from([(1, 1), (4, 3, 3, 3), (2, 5, 1), (5, 1, 1), (2, 64), (2, 576), (1, 7, 2, 2, 2)]),
    ),
    bits=st.sampled_from(PACKED_BITS),
    signed=st.booleans(),
)
def test_what_is_packed_comes_back(shape, bits, signed):
    values = drawn(shape, bits, signed)
    packing = Packing(shape[1:], bits, signed)
    packed = packing.pack(values)
    assert packed.shape == (shape[0], packing.row_bytes) and packed.dtype == torch.uint8
    again = packing.unpack(packed)
    assert torch.equal(again, values) and again.dtype == values.dtype
    lowest = 2 ** (bits - 1) if signed else 0
    codes = (values.flatten(1).int() + lowest).tolist()
    codes = [[value ^ 8 for value in row] for row in codes] if signed and bits == 4 else codes  # two's complement
    assert packed.tolist() == [by_definition(row, bits) for row in codes]


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_bytes_are_those_of_the_bits(bits):
    for count in (64, 576, 1536, 4096):
        assert Packing((count,), bits, True).row_bytes == bits * count // 8
    for count in (1, 3, 27, 100, 577):
        planes = len(planes_of(bits))
        assert 0 <= Packing((count,), bits, False).row_bytes - bits * count / 8 < planes  # each ends in a whole byte


def test_rows_of_4_bits_are_halves_in_the_low_and_high_bits():
    """Files of earlier versions have them, and values of 2 and 3 bits in them, too."""
    packing = Packing((4,), 4, False)
    packed = packing.pack(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert packed.tolist() == [[0x31, 0x42]]
    assert [half.tolist() for half in halves(packed, signed=False)] == [[[1, 2]], [[3, 4]]]
    assert Packing((3,), 4, True).pack(torch.tensor([[1, -2, 3]], dtype=torch.int8)).tolist() == [[0x31, 0x0E]]


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_a_row_can_be_taken_alone(bits):
    values, packing = drawn((6, 9), bits, True), Packing((9,), bits, True)
    assert torch.equal(packing.unpack(packing.pack(values)[2:4]), values[2:4])


@pytest.mark.parametrize(
    ("qmin", "qmax", "bits"),
    [
        (0, 1, 2), (0, 3, 2), (0, 4, 3), (0, 15, 4), (0, 16, 5), (0, 63, 6), (0, 64, None), (0, 255, None),
        (-1, 1, 2), (-2, 1, 2), (-2, 2, 3), (-3, 3, 3), (-7, 7, 4), (-8, 7, 4), (-8, 8, 5), (-31, 31, 6),
        (-32, 31, 6), (-33, 31, None), (-127, 127, None), (-1, 5, 4),
    ],
)  # fmt: skip
def test_the_fewest_bits_of_a_grid(qmin, qmax, bits):
    packing = Packing.of_grid(qmin, qmax, (2,))
    assert (None if packing is None else packing.bits) == bits
    if packing is not None:
        assert packing.signed is (qmin < 0)
        ends = torch.tensor([[qmin, qmax]]).to(torch.int8 if qmin < 0 else torch.uint8)
        assert torch.equal(packing.unpack(packing.pack(ends)), ends)


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
