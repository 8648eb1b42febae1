"""Garbage collection while a model is quantized."""

import gc
import weakref

import pytest
import torch
from torch import nn

import fxq
from fxq.common.collection import collecting_new_objects


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    """`tests/conftest.py` freezes what is imported."""
    had = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if had:
        gc.freeze()


class Cycle:
    def __init__(self):
        self.own = self


def test_only_new_objects_are_collected_inside():
    gc.collect()
    old = Cycle()
    old_ref = weakref.ref(old)
    with collecting_new_objects():
        new = Cycle()
        new_ref = weakref.ref(new)
        del old, new
        gc.collect()
        assert new_ref() is None and old_ref() is not None
    gc.collect()
    assert old_ref() is None and gc.get_freeze_count() == 0


def test_what_the_program_has_frozen_stays_frozen():
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with collecting_new_objects():
            assert gc.get_freeze_count() == before
        assert gc.get_freeze_count() == before > 0
    finally:
        gc.unfreeze()


def test_quantize_leaves_no_object_frozen():
    fxq.quantize(nn.Sequential(nn.Linear(4, 4)).eval(), "weight_only", example_inputs=torch.rand(2, 4))
    assert gc.get_freeze_count() == 0
