"""Garbage collection while a model is quantized."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fxq
from fxq.common import collector
from fxq.common.collector import new_objects_collected


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch):
    """The tests freeze the objects of imported modules, which a user's process does not."""
    monkeypatch.setattr(collector, "_blocks_after_search", 0)
    monkeypatch.setattr(collector, "_caller_freezes", False)
    count = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if count:
        gc.freeze()


class Ring:
    def __init__(self):
        self.itself = self


def test_only_new_objects_are_collected():
    old = weakref.ref(Ring())
    before = gc.get_threshold()
    with new_objects_collected():
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None and old() is not None
    assert gc.get_threshold() == before and not gc.get_freeze_count()
    gc.collect()
    assert old() is None


def test_an_error_leaves_the_collector_as_it_was():
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="inside"), new_objects_collected():
        raise ValueError("inside")
    assert gc.get_threshold() == before and not gc.get_freeze_count()


def test_frozen_objects_of_the_caller_stay_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with new_objects_collected():
            assert gc.get_freeze_count() == count
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with new_objects_collected():
            assert not gc.isenabled() and not gc.get_freeze_count()
    finally:
        gc.enable()


def test_quantizing_does_not_search_the_objects_before_it(monkeypatch):
    frozen = []
    monkeypatch.setattr(fxq.api, "quantize_model", lambda *args: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(fxq.api, "prepare_model", lambda *args: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(fxq.api, "convert_model", lambda *args: frozen.append(gc.get_freeze_count()))
    fxq.quantize(nn.Linear(4, 4).eval(), "dynamic", example_inputs=torch.randn(2, 4))
    fxq.convert(fxq.prepare(nn.Linear(4, 4).eval(), "dynamic", example_inputs=torch.randn(2, 4)))
    assert len(frozen) == 3 and all(frozen) and not gc.get_freeze_count()


@pytest.mark.parametrize("counts_blocks", [True, False], ids=["Python's allocator", "another one"])
def test_objects_of_earlier_contexts_are_searched_once_there_are_a_quarter_more(counts_blocks, monkeypatch):
    if not counts_blocks:
        monkeypatch.setattr(sys, "getallocatedblocks", lambda: 0)  # as with PYTHONMALLOC=malloc
    with new_objects_collected():
        old = weakref.ref(Ring())
    with new_objects_collected():
        assert old() is not None
    monkeypatch.setattr(collector, "_blocks_after_search", collector._blocks_after_search // 2)
    with new_objects_collected():
        assert old() is None


def test_many_blocks_do_not_hide_models():
    """A quarter of the memory blocks of a process with much data can be many models."""
    kept = [str(i) for i in range(10**6)]
    with new_objects_collected():
        old = weakref.ref(Ring())
    kept += [str(i) for i in range(210_000)]
    with new_objects_collected():
        assert old() is None
    assert kept


def test_a_context_in_another_one_leaves_it_alone():
    with new_objects_collected():
        count = gc.get_freeze_count()
        with new_objects_collected():
            assert gc.get_freeze_count() == count
        assert gc.get_freeze_count() == count
    with new_objects_collected():
        assert gc.get_freeze_count()


def test_a_context_beside_one_of_another_thread():
    with ThreadPoolExecutor(1) as pool:
        with new_objects_collected():
            count = gc.get_freeze_count()

            def beside():
                with new_objects_collected():
                    return gc.get_freeze_count()

            assert pool.submit(beside).result() == count
        assert not gc.get_freeze_count() and pool.submit(beside).result()


def test_a_caller_that_has_ever_frozen_objects_is_left_alone():
    gc.freeze()
    with new_objects_collected():
        pass
    gc.unfreeze()
    with new_objects_collected():
        assert not gc.get_freeze_count()
