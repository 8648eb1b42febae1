"""Ranks: each gets what all know, an error on one is an error on all."""

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxq
from fxq.common import ranks as module
from fxq.common.ranks import Ranks
from fxq.errors import CalibrationError, InputError
from tests.support.processes import on_ranks

pytestmark = pytest.mark.any_cpu


def test_one_process_is_alone():
    assert Ranks.of() == Ranks.of(None) == Ranks(0, 1)
    assert list(Ranks().exchanged(lambda: {"not": nn.ReLU})) == [{"not": nn.ReLU}]
    with pytest.raises(ZeroDivisionError):
        Ranks().together(lambda: 1 / 0)


@pytest.mark.parametrize("group", ["world", 3, False, "auto "])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(InputError, match=r"group is .*, and must be a torch.distributed.ProcessGroup"):
        Ranks.of(group)


def test_every_rank_gets_what_all_have_in_order(tmp_path):
    def work(rank):
        ranks = Ranks.of()
        mine = {"rank": rank, "of": (ranks.rank, ranks.size), "x": torch.full((rank,), 1.5), "none": [None] * rank}
        return [list(ranks.exchanged(lambda: mine)), ranks.together(lambda: rank * 10)]

    results = on_ranks(3, tmp_path, work)
    for rank, (received, own) in enumerate(results):
        assert [item["rank"] for item in received] == [0, 1, 2] and own == 10 * rank
        assert [item["of"] for item in received] == [(0, 3), (1, 3), (2, 3)]
        assert [item["x"].tolist() for item in received] == [[], [1.5], [1.5, 1.5]]


def test_a_group_of_some_ranks(tmp_path):
    def work(rank):
        group = dist.new_group([2, 1])
        if rank == 0:
            with pytest.raises(InputError, match="this process belongs to"):
                Ranks.of(group)
            return None
        return list(Ranks.of(group).exchanged(lambda: rank)), list(Ranks.of(None).exchanged(lambda: rank))

    _, first, second = on_ranks(3, tmp_path, work)
    assert first[0] == second[0] and sorted(first[0]) == [1, 2]
    assert (first[1], second[1]) == ([1], [2])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (CalibrationError("NaN."), CalibrationError, "rank 1: NaN."),
        (OSError("no disk"), CalibrationError, "rank 1: OSError: no disk"),
        (fxq.errors.NoAttributeError("x"), fxq.errors.NoAttributeError, "rank 1: x"),
        (object(), InputError, "rank 1: a object cannot be stored as data"),
    ],
)
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path, error, kind, words):
    def work(rank):
        def make():
            if rank == 1 and isinstance(error, Exception):
                raise error
            return error if rank == 1 else rank

        return list(Ranks.of().exchanged(make))

    for raised in on_ranks(3, tmp_path, work):
        assert type(raised) is kind
        assert str(raised).startswith(words)


def test_sums_are_equal_on_all_ranks(tmp_path):
    def work(rank):
        own = {"x": torch.full((2, 3), rank + 1.0), "count": torch.tensor(2**40 + rank)}
        return Ranks.of().summed(own if rank != 1 else {"y": torch.ones(2).t()}, "cpu", "sums")

    for sums in on_ranks(3, tmp_path, work):
        assert torch.equal(sums["x"], torch.full((2, 3), 4.0)) and torch.equal(sums["y"], torch.ones(2))
        assert int(sums["count"]) == 2**41 + 2
    assert Ranks().summed({"x": torch.ones(1)}, "cpu", "sums") == {"x": torch.ones(1)}


ERRORS = {
    "before an exchange": ("", "rank 1: OSError: no disk"),
    "in an exchange": ("inner", "rank 1: OSError: no disk"),
    "other things": ("about", "ranks do different things: rank {rank} is at "),
    "the end, where others exchange": ("nothing", "ranks do different things: rank {rank} is at "),
}


@pytest.mark.parametrize("name", ERRORS)
def test_nested_exchanges_leave_no_rank_waiting(tmp_path, name):
    how, words = ERRORS[name]

    def fail(rank):
        if rank == 1:
            raise OSError("no disk")
        return rank

    def work(rank):
        ranks = Ranks.of()

        def make():
            if how == "":
                fail(rank)
            if how != "nothing" or rank == 0:
                about = f"layer {rank if how == 'about' else 0}"
                list(ranks.exchanged(lambda: fail(rank) if how == "inner" else rank, about=about))

        try:
            ranks.together(make)
        except Exception as error:
            # as a pass that names itself
            raise (RuntimeError("again") if rank == 0 else error) from error

    for rank, raised in enumerate(on_ranks(2, tmp_path, lambda rank: Ranks.of().together(lambda: work(rank)))):
        raised = raised.__cause__ or raised if rank == 0 else raised
        assert isinstance(raised, (RuntimeError, fxq.errors.FxqError))
        assert "again" in str(raised) or words.format(rank=rank) in str(raised)


def test_a_second_try_after_an_error_on_all_ranks(tmp_path):
    """Its own error is raised while the first one is handled, which all ranks have raised already."""

    def fail(rank):
        if rank == 1:
            raise OSError("no disk")

    def work(rank):
        ranks = Ranks.of()
        try:
            ranks.together(lambda: fail(rank))
        except CalibrationError:
            ranks.together(lambda: fail(1 - rank))

    for raised in on_ranks(2, tmp_path, work):
        assert type(raised) is CalibrationError and str(raised) == "rank 0: OSError: no disk"


def test_who_waits_for_others_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WARN_AFTER_SECONDS", 0.2)

    def work(rank):
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        module.log.addHandler(handler)
        time.sleep(0.8 * rank)
        Ranks.of().together(lambda: None)
        return said

    first, second = on_ranks(2, tmp_path, work)
    assert second == [] and len(first) == 1
    assert (
        "rank 0 has waited 0.2 seconds for the other processes of its group of 2" in first[0]
        and "group=None" in first[0]
    )
