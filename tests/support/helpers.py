"""Small things that several test files need: models from one function, a rewriter outside a pass, counted steps."""

import gc
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import fxq
from fxq.backends.by_name import get_backend
from fxq.common.data import Batch
from fxq.ops import OPS
from fxq.pipeline.context import Context
from fxq.pipeline.manager import PassManager
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

REFERENCE = fxq.Recipe.static(backend="reference")


def plain(recipe):
    """The recipe without the passes that fit weights and biases to the samples: what is left is rounding."""
    return recipe.without_pass("smooth").without_pass("smooth-depthwise").without_pass("correct-bias")


PLAIN = plain(REFERENCE)


def module(forward, **children):
    """An eval-mode module whose forward is this function of (self, ...), with these children and parameters."""
    instance = type("Model", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(instance, name, nn.Parameter(child) if isinstance(child, torch.Tensor) else child)
    return instance.eval()


def context(model, *inputs, recipe=REFERENCE):
    """Context of a pipeline run for this model."""
    return Context(recipe, get_backend(recipe.backend), model, Batch(inputs))


def managed(model, *inputs, recipe=REFERENCE):
    """A manager that has run no pass yet."""
    return PassManager(context(model, *inputs, recipe=recipe))


def rewriter(gm, *inputs, name="the-test"):
    """A rewriter of a graph, outside any pass."""
    return Rewriter(gm, context(gm, *inputs), name)


def run(gm, *inputs):
    """The result of an edited graph."""
    gm.recompile()
    return gm(*inputs)


@dataclass(frozen=True)
class Scale(Pass):
    """A pass of the user's, with an option."""

    factor: float = 1.0
    name = "scale"
    needs = gives = Stage.CANONICAL

    def run(self, rewriter):
        pass


def steps(work):
    """Calls of functions while `work` runs: a clock that other programs cannot slow down.

    The collector is off: it would call what waits for the end of other tests' objects. They are not collected before,
    which takes seconds once a process has run many tests.
    """
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


@contextmanager
def restored_fusions():
    """The registered fusions; those that are added inside are taken away again."""
    before = {rule.name for rule in fxq.extend.FUSIONS}
    try:
        yield fxq.extend.FUSIONS
    finally:
        for rule in fxq.extend.FUSIONS:
            if rule.name not in before:
                fxq.extend.FUSIONS.discard(rule.name)


def ops_of_fxq():
    """The rows of the op table, without those that tests have added."""
    return [op for op in OPS if op.target.__module__.startswith("fxq.")]


def filed(model):
    """The model that comes out of a file."""
    with tempfile.TemporaryDirectory() as folder:
        return fxq.load(model.save(Path(folder) / "model.fxq"))
