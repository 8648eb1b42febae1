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
