"""Pass manager: runs passes in order, checks the graph after each, and records the history."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.common.data import Batch, first_of, samples_in
from fxq.common.isolation import copied, seeded, without_autocast
from fxq.common.metrics import Agreement, loss, sqnr, tensors
from fxq.common.source import source_of
from fxq.errors import FxqError, PassError, warn, words_of
from fxq.graph.info import info, set_info
from fxq.graph.place import where
from fxq.graph.query import module_of
from fxq.graph.run import Runner
from fxq.graph.uncompiled import UncompiledModule
from fxq.graph.view import GraphView, NodeView, view
from fxq.pipeline.context import Context
from fxq.pipeline.history import History, Snapshot
from fxq.pipeline.invariants import check
from fxq.quant.observer_base import Observer
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter
from fxq.tracing.fidelity import part_for

log = logging.getLogger("fxq")

MAX_ZERO_ERROR = 1e-5
"""Error that float32 rounding may leave of a sum that should be zero, relative to the largest input or output."""
MIN_GRAPH_SQNR_DB = 60.0
"""SQNR of a float graph against the model, from which differences are float32 rounding of rewritten ops."""

CHECKED_SAMPLES = 2
"""Number of samples on which a large model is compared with its graph before quantization."""


class PassManager:
    """Pass manager of one graph.

    Attributes:
        gm: module of the graph; empty before the trace pass.
        stage: stage that the graph has reached.
        history: one snapshot per pass that has run.
        context: context of the passes.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.gm: fx.GraphModule = UncompiledModule(nn.Module(), fx.Graph())
        self.stage = Stage.NONE
        self.history = History()
        self._views: dict[fx.Node, NodeView] = {}
        self._sqnr = float("inf")

    def fork(self, **changes: Any) -> PassManager:
        """Independent manager at the same point of the pipeline, with `changes` of the context.

        The nodes of its graph are copies. Modules and tensors are shared, since passes replace but do not change them.
        """
        forked = PassManager(replace(self.context, units={}, regions={}, **changes))
        forked.gm = module_of(copy.deepcopy(self.gm.graph), self.gm)
        forked.stage, forked._sqnr = self.stage, self._sqnr
        forked.history = replace(self.history, snapshots=list(self.history))
        return forked

    def run(self, passes: Iterable[Pass]) -> fx.GraphModule:
        """Run the passes in order, and return the module of the graph.

        Raises:
            PassError: a pass needs a later or earlier stage, or left the graph invalid; or a pass of the user raised an
                error, or left a graph that does not run on the example.
        """
        with self.context.untouched(), torch.no_grad(), without_autocast():  # leaves may keep state
            for step in passes:
                self._run_one(step)
        self.gm.recompile()
        return self.gm

    def check_float(self) -> None:
        """Warn if the graph, before anything is quantized, computes something else on the example than the model.

        In the quantized model, a small error of a pass could not be distinguished from rounding. Pipelines with passes
        of the user are not checked, since these may change numbers on purpose.
        """
        context = self.context
        if not all(map(is_own, context.recipe.pipeline)):
            return
        wants, results = self._few_results() or (list(tensors(context.outputs)), self._results(context.example))
        values = tensors((context.example.args, context.example.kwargs, context.outputs))
        float_tensors = [t for t in values if t.is_floating_point() and t.numel()]
        largest = max((float(t.detach().abs().nan_to_num(0, 0, 0).max()) for t in float_tensors), default=0.0)
        for want, got in zip(wants, results, strict=True):
            agreement = Agreement()
            if want.is_floating_point():
                agreement.add(want, got)
            if not agreement.sqnr > MIN_GRAPH_SQNR_DB and not agreement.max_error <= MAX_ZERO_ERROR * largest:
                warn(
                    "before quantization, the graph computes something else than the model: "
                    f"{agreement.sqnr:.1f} dB SQNR on the example. A pass or a row of the op table is wrong; "
                    "recipe.with_check() says after which pass, and recipe.leaf(...) keeps a module as it is. If you "
                    "added no ops, please report it."
                )
                return

    def _results(self, batch: Batch) -> list[Tensor]:
        """Tensors that the graph returns for a batch."""
        own_batch = copied(batch)  # a forward may change its inputs in place
        with self.context.untouched(), seeded(), torch.no_grad(), without_autocast(), observers_paused(self.gm):
            return list(tensors(Runner(self.gm, own_batch).run()))  # generating code for one call takes longer

    def _few_results(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Outputs of a large model and its graph on `CHECKED_SAMPLES` samples; None if the whole example must run.

        Two samples are enough to detect samples that are mixed up.
        """
        context, count = self.context, samples_in(self.context.example) or 0
        if (
            context.original is None
            or not context.original.is_large
            or not context.divisible
            or count <= CHECKED_SAMPLES
        ):
            return None
        try:
            results = self._results(
                first_of(context.example, CHECKED_SAMPLES, start := count // 2 - CHECKED_SAMPLES // 2)
            )
            pairs = zip(tensors(context.outputs), results, strict=True)
            return [part_for(whole, few, start, CHECKED_SAMPLES, count) for whole, few in pairs], results
        except Exception as error:  # the graph rejects this size; any type of error
            log.info("the graph is compared with the model on all samples of the example: %s", error)
            return None

    def _run_one(self, step: Pass) -> None:
        if step.needs > self.stage:
            raise PassError(
                f"{step.name} needs the stage {step.needs}, but the graph is {self.stage}. "
                "The pass that gives it was removed from the pipeline, or this pass is too early."
            )
        if step.latest is not None and self.stage > step.latest:
            raise PassError(
                f"{step.name} works on graphs up to the stage {step.latest}, and the graph is {self.stage} already. "
                "It is too late in the pipeline: insert it earlier."
            )
        rewriter = Rewriter(self.gm, self.context, step.name, source_of(type(step).run))
        gm, stage = self.gm, self.stage
        start = time.perf_counter()
        try:
            step.run(rewriter)
        except FxqError as error:
            if is_own(step):
                raise
            raise type(error)(f"{step.name} failed: {error}") from error
        except Exception as error:
            raise PassError(f"{step.name} failed: {type(error).__name__}: {words_of(error)}") from error
        seconds = time.perf_counter() - start
        self.gm = rewriter.gm
        self.stage = max(self.stage, step.gives)
        # passes of the user may edit without the rewriter
        edited = rewriter.edits or rewriter.touched or not is_own(step) or self.gm is not gm
        if edited or self.stage > stage:
            check(self.gm, self.stage, step.name)
        if not is_own(step):
            self._try_out(step)
            check(self.gm, self.stage, step.name)  # now it is known which of its nodes are tensors
        self._snapshot(step, rewriter, seconds, None if edited or not self.history else self.history[-1].graph)

    def _try_out(self, step: Pass) -> None:
        """Run the graph on the example after a pass of the user, so that an error names this pass and not a later one.

        Nodes without a shape get the shape and dtype of their value.
        """
        with observers_paused(self.gm):
            runner = Runner(self.gm, copied(self.context.example))
            for node in self.gm.graph.nodes:
                try:
                    value = runner.step(node)
                except Exception as error:  # ops raise errors of any type for wrong inputs
                    raise PassError(
                        f"after {step.name}: the graph does not run on the example: {where(self.gm, node)}: "
                        f"{words_of(error)}"
                    ) from error
                if info(node).shape is None and isinstance(value, Tensor):
                    set_info(node, shape=tuple(value.shape), dtype=value.dtype)

    def _snapshot(self, step: Pass, rewriter: Rewriter, seconds: float, same: GraphView | None) -> None:
        """Add a snapshot to the history. `same`: view of the graph before the pass, if it left the graph as it was."""
        if same is not None:
            graph = replace(same, name=step.name)
        else:
            for node in rewriter.touched if is_own(step) else list(self._views):
                self._views.pop(node, None)
            graph = view(self.gm, step.name, self._views)
        value = self._measure(step) if self.context.recipe.check == "numeric" else None
        edits, near_misses = tuple(rewriter.edits), rewriter.near_misses.all()
        self.history.snapshots.append(Snapshot(step.name, seconds, edits, graph, self.stage, value, near_misses))
        log.info("%s: %d edits, %d nodes, %.1f ms", step.name, len(rewriter.edits), len(graph), 1e3 * seconds)

    def _measure(self, step: Pass) -> float:
        """SQNR of the graph against the float model on the example, in dB. Warns at the first pass that loses much."""
        self.gm.recompile()
        with torch.no_grad(), observers_paused(self.gm):
            result = self.gm(*self.context.example.args, **self.context.example.kwargs)
        value = sqnr(self.context.outputs, result)
        lost = loss(self._sqnr, value)
        if lost > self.context.recipe.max_loss and self.history.first_loss is None:
            self.history.first_loss = step.name
            warn(
                f"{step.name} lost {lost:.1f} dB: the output is at {value:.1f} dB SQNR against the float model. "
                f"Compare history[{step.name!r}] with the snapshot before it."
            )
        self._sqnr = value
        return value


def is_own(step: Pass) -> bool:
    """Whether a pass is fxq's, not the user's."""
    return type(step).__module__.partition(".")[0] == "fxq"


@contextmanager
def observers_paused(gm: nn.Module) -> Iterator[None]:
    """Pause the observers of a graph, so that a run of it does not count as calibration."""
    running = [m for m in gm.modules() if isinstance(m, Observer) and not m.paused]
    for observer in running:
        observer.paused = True
    try:
        yield
    finally:
        for observer in running:
            observer.paused = False
