"""Memory that states in integers share: what is claimed of it, and what is not."""

import pytest
import torch

from fxq.common.appending import extended
from fxq.errors import StateError
from fxq.quant.quantized_rows import QuantizedRows
from fxq.quant.row_memory import RowMemory


def parts(length=5):
    """Parts of a state (2, 3, length, 8) in memory with room for more entries."""
    shape = 2, 3, length - 2
    start = torch.zeros(*shape, 8, dtype=torch.uint8), torch.ones(*shape, 1), torch.zeros(*shape, 1, dtype=torch.uint8)
    with torch.no_grad():
        return [extended(extended(part, 1, 2), 1, 2) for part in start]


@torch.no_grad()
def test_a_state_is_continued_in_the_memory_of_its_parts():
    of_state = parts()
    memory = RowMemory.of(of_state)
    assert memory.claims(5, 2) and memory.sizes == (2, 3, 8)
    state = memory.state(7)
    assert type(state) is QuantizedRows and state.shape == (2, 3, 7, 8) and state.dtype is torch.float32
    for before, after, numbers in zip(of_state, state.parts, torch.tensor(memory.numbers(7)).view(3, 5), strict=True):
        assert after.data_ptr() == before.data_ptr() and after.shape == (2, 3, 7, before.shape[3])
        assert numbers.tolist() == [after.data_ptr(), 7, *after.stride()[:3]]


@torch.no_grad()
def test_entries_are_claimed_once():
    """By the memory and by `extended` alike."""
    of_state = parts()
    memory = RowMemory.of(of_state)
    assert memory.claims(5, 1) and not memory.claims(5, 1)
    assert extended(of_state[0], 1, 2).data_ptr() != of_state[0].data_ptr()
    assert extended(memory.state(6).integers, 1, 2).data_ptr() == of_state[0].data_ptr()
    assert not memory.claims(6, 1)


@torch.no_grad()
def test_there_is_no_more_room_than_memory():
    memory = RowMemory.of(parts())
    room = memory.parts(5)[0].untyped_storage().nbytes() // (2 * 3 * 8) - 5
    assert not memory.claims(5, room + 1) and memory.claims(5, room)


@torch.no_grad()
def test_a_write_by_the_user_is_an_error():
    memory = RowMemory.of(parts())
    assert memory.claims(5, 1)
    memory.state(6).scale[0, 0, 0] = 2.0
    with pytest.raises(StateError, match="was written to after the model returned it"):
        memory.claims(6, 1)


def test_nothing_is_claimed_with_gradients_or_of_memory_that_has_moved():
    of_state = parts()
    memory = RowMemory.of(of_state)
    assert not memory.claims(5, 1)
    with torch.no_grad():
        of_state[1].share_memory_()
        assert not memory.claims(5, 1)


def test_windows_and_other_tensors_have_no_such_memory():
    of_state = parts()
    assert RowMemory.of([part[:, :, 1:] for part in of_state]) is None
    assert RowMemory.of([part.clone() for part in of_state]) is None


def test_parts_cannot_be_replaced():
    """A program would not see it."""
    with pytest.raises(AttributeError):
        RowMemory.of(parts()).state(5).integers = torch.zeros(2, 3, 5, 8, dtype=torch.uint8)
