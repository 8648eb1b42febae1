"""Concatenation to a growing tensor: equal to torch.cat in every order of calls, in memory that is reserved ahead."""

import copy
import io
import threading

import pytest
import torch
from torch import Tensor

import fxq
from fxq.common.appending import appended, extended


@pytest.fixture(autouse=True)
def _no_grad():
    """Decoding runs without gradients: with them, memory is not shared."""
    with torch.no_grad():
        yield


def entries(first: int, count: int = 1, batch: int = 2) -> Tensor:
    """Tensor (batch, 3, count, 4) of consecutive numbers."""
    size = batch * 3 * count * 4
    return torch.arange(first, first + size, dtype=torch.float32).reshape(batch, 3, count, 4)


def grown(steps: int, start: int = 5) -> Tensor:
    """State of `start + steps` entries that was continued entry by entry."""
    state = entries(0, start)
    for i in range(steps):
        state = appended(state, entries(100 * i), 2)
    return state


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_each_result_is_that_of_cat() -> None:
    state = reference = entries(0, 5)
    for i in range(300):
        new = entries(100 * i, 1 + i % 3)
        state, reference = appended(state, new, 2), torch.cat([reference, new], 2)
        assert torch.equal(state, reference)


def test_the_state_is_copied_a_logarithmic_number_of_times() -> None:
    """2,000 entries one by one: copies of the whole state add up to a few times its final size, not to its square."""
    state, copied, before = entries(0, 5), 0, 0
    for i in range(2000):
        state = appended(state, entries(i), 2)
        copied += state.shape[2] if memory_of(state) != before else 0
        before = memory_of(state)
    assert copied < 4 * state.shape[2]
    assert state.untyped_storage().nbytes() <= 1.6 * state.numel() * 4


def test_a_single_call_returns_a_tensor_of_its_own() -> None:
    """A model that happens to concatenate to an input gets what torch.cat returns: contiguous, nothing reserved."""
    state = appended(entries(0, 5), entries(7), 2)
    assert state.is_contiguous() and state.untyped_storage().nbytes() == 4 * state.numel()


@pytest.mark.parametrize("steps", [0, 1, 2, 40])
def test_two_continuations_of_one_state_stay_apart(steps: int) -> None:
    past = grown(steps)
    copy_of_past = past.clone()
    first = appended(past, entries(1000), 2)
    second = appended(past, entries(2000), 2)
    third = appended(first, entries(3000), 2)
    assert torch.equal(past, copy_of_past)
    assert torch.equal(first, torch.cat([copy_of_past, entries(1000)], 2))
    assert torch.equal(second, torch.cat([copy_of_past, entries(2000)], 2))
    assert torch.equal(third, torch.cat([copy_of_past, entries(1000), entries(3000)], 2))


CHANGES = {
    "crop": lambda state: state[:, :, :-2],
    "window": lambda state: state[:, :, 3:],
    "reorder": lambda state: state.index_select(0, torch.tensor([1, 1])),
    "one sample": lambda state: state[:1],
    "last sample": lambda state: state[1:],
    "one head": lambda state: state[:, 1:2],
    "every other": lambda state: state[:, :, ::2],
    "turned": lambda state: state.transpose(0, 1),
    "part of a row": lambda state: state[..., :2],
    "repeated": lambda state: state[:1].expand(2, -1, -1, -1),
    "other dtype": lambda state: state.view(torch.int32),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_state_is_continued_right(change) -> None:
    state = grown(40)
    whole = state.clone()
    changed = change(state)
    new = entries(5000).to(changed.dtype)
    new = new.transpose(0, 1)[: changed.shape[0]] if changed.shape[0] == 3 else new[: changed.shape[0]]
    new = new[:, : changed.shape[1], :, : changed.shape[3]]
    for _ in range(3):
        reference = torch.cat([changed, new], 2)
        changed = appended(changed, new, 2)
        assert torch.equal(changed, reference)
    assert torch.equal(state, whole)


def test_a_window_moves_on_in_its_memory() -> None:
    """A sliding window of 8 entries: its states are copied only where the memory ends."""
    state, memory = entries(0, 8), set()
    for i in range(300):
        state = appended(state, entries(i), 2)[:, :, -8:]
        memory.add(memory_of(state))
    assert torch.equal(state, torch.cat([entries(i) for i in range(292, 300)], 2))
    assert len(memory) <= 8


def test_another_axis_than_before() -> None:
    state = grown(5)
    assert torch.equal(appended(state, state, 0), torch.cat([state, state], 0))
    assert torch.equal(appended(state, entries(3), -2), torch.cat([state, entries(3)], 2))


def test_dtypes_are_promoted_and_wrong_sizes_refused() -> None:
    state = grown(5)
    assert appended(state, entries(3).double(), 2).dtype is torch.float64
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        appended(state, entries(3)[:1], 2)
    assert torch.equal(appended(state, entries(4), 2)[:, :, -1:], entries(4))  # nothing was claimed


def test_gradients() -> None:
    with torch.enable_grad():
        state, new = grown(5), entries(3).requires_grad_()
        appended(state, new, 2).sum().backward()
    assert new.grad is not None and torch.equal(new.grad, torch.ones_like(new))


def test_backward_after_the_state_was_continued() -> None:
    """A product saves the state for the gradient of its other factor."""
    state, query = grown(40), torch.ones(2, 3, 4, 1, requires_grad=True)
    with torch.enable_grad():
        loss = (state @ query).sum()
        appended(state, entries(3), 2)
        loss.backward()
    assert query.grad is not None and torch.equal(query.grad, state.sum(2)[..., None])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_appending_nothing_returns_a_copy(mode) -> None:
    with mode():
        state = grown(40)
        whole, result = state.clone(), appended(state, entries(0)[:, :, :0], 2)
        result.zero_()
        assert torch.equal(state, whole)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("written", [0, 1, 2], ids=["first", "earlier", "latest"])
def test_a_write_into_shared_memory_is_noticed(written, mode) -> None:
    """Also if the written state is dropped, and in views; a copy may be written."""
    with mode():
        states = [grown(2)]
        for i in range(2):
            states.append(appended(states[-1], entries(i), 2))
        latest = states[2].clone()
        latest.mul_(2)
        assert torch.equal(appended(latest, entries(2), 2), torch.cat([latest, entries(2)], 2))
        appended(states[2], entries(2), 2)[:, :1].add_(1) if written == 2 else states[written][0].zero_()
        for state in (states.pop(), states.pop()):
            with pytest.raises(fxq.StateError, match=r"written to.*shares memory.*state\.clone\(\)"):
                appended(state, entries(3), 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_state_alone_in_its_memory_may_be_written(mode) -> None:
    with mode():
        state = appended(entries(0, 5), entries(1), 2)
        for i in range(3):
            state.mul_(2)
            want = torch.cat([state, entries(i)], 2)
            state = appended(state, entries(i), 2)
            assert torch.equal(state, want)


def test_a_state_that_processes_share_is_copied() -> None:
    """Each process counts the entries of the memory itself, so that both would write the next one to one place."""
    state = grown(40).share_memory_()
    assert memory_of(appended(state, entries(1), 2)) != memory_of(state)


def test_inference_mode() -> None:
    with torch.inference_mode():
        state, memory = entries(0, 5), set()
        for i in range(40):
            state = appended(state, entries(i), 2)
            memory.add(memory_of(state))
        assert len(memory) == 2
        state = grown(5)
        state = appended(state, entries(1), 2)
    later = appended(state, entries(2), 2)
    with torch.inference_mode():
        last = appended(later, entries(3), 2)
    assert torch.equal(last, torch.cat([state, entries(2), entries(3)], 2))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_tools_that_trace_see_a_concatenation() -> None:
    past, new = grown(5), entries(3)
    exported = torch.export.export(_Append(), (past, new)).module()
    assert torch.equal(exported(past, new), torch.cat([past, new], 2))
    traced = torch.jit.trace(_Append(), (past, new))
    assert torch.equal(traced(past, 2 * new), torch.cat([past, 2 * new], 2))
    mapped = torch.func.vmap(lambda p, n: appended(p, n, 1))(past, new)
    assert torch.equal(mapped, torch.cat([past, new], 2))


class _Append(torch.nn.Module):
    def forward(self, past, new):
        return appended(past, new, 2)


def test_a_saved_state_is_continued() -> None:
    state, file = grown(5), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(appended(loaded, entries(3), 2), torch.cat([state, entries(3)], 2))


def test_threads_that_continue_one_state() -> None:
    past = grown(40)
    results: dict[int, Tensor] = {}

    def continue_it(number: int) -> None:
        state = past
        for i in range(50):
            state = appended(state, entries(100 * number + i), 2)
        results[number] = state

    threads = [threading.Thread(target=continue_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, state in results.items():
        assert torch.equal(state, torch.cat([past, *(entries(100 * number + i) for i in range(50))], 2))


@pytest.mark.parametrize("grad", [False, True])
def test_an_extended_state_is_that_of_appended_once_written(grad: bool) -> None:
    state, reference = entries(0, 5), entries(0, 5)
    with torch.set_grad_enabled(grad):
        for i in range(100):
            new, before = entries(100 * i, 1 + i % 2), state
            state = extended(state, new.shape[2], 2)
            state.numpy()[:, :, -new.shape[2] :] = new.numpy()  # does not count as a write
            reference = torch.cat([reference, new], 2)
            assert torch.equal(state, reference) and torch.equal(before, reference[:, :, : before.shape[2]])
    assert (memory_of(state) == memory_of(before)) != grad


def test_extending_and_appending_in_turn() -> None:
    state = extended(grown(40), 1, 2)
    state.numpy()[:, :, -1:] = entries(7).numpy()
    continued = appended(state, entries(8), 2)
    assert memory_of(continued) == memory_of(state)
    assert torch.equal(continued, torch.cat([grown(40), entries(7), entries(8)], 2))
    written = extended(grown(40), 2, 2)
    written.add_(1)  # a write of the user
    with pytest.raises(fxq.FxqError, match="written to"):
        extended(written, 1, 2)
