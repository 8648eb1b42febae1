"""Measurements of one model for `scripts/coverage/run.py`."""

from __future__ import annotations

import copy
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxq
from scripts.coverage.models import Subject
from scripts.coverage.others import rounding, torch_ao
from scripts.coverage.outputs import outputs, sqnr

ENGINES = ("jit", "openvino", "onnxruntime")
EXACT = "reference"
"""The backend without kernels. Others are not asked beside it: what the passes do is quickly seen."""
CALIBRATION, FRESH = 2, 3
"""Batches to calibrate with, and others to judge on: the noise of one is that of a few values."""
MIN_SQNR_DB = 20.0
"""dB. Below it, other quantizers are asked whether the network can be quantized any better."""
MARGIN, BETWEEN = 1.0, 6.0
"""dB that fxq may be below torch.ao and still be as good, and below a rounding that leaves out all between layers."""


@dataclass
class Result:
    """Result of one model; a number is None if it was not measured.

    Attributes:
        model: its name.
        suite: the package that it comes from.
        stage: how far it came: `build`, `float`, `quantize`, `compare`, `onnx`, `dynamic`, `weight_only` or
            `done`.
        error: what stopped it there; empty when it is done.
        trace: where that was raised.
        leaves: modules that run in float as they are because torch.fx cannot trace them, with the reason.
        ops: number of ops by what became of them (see `fxq.results.Ledger`).
        reasons: the most frequent reasons for float, with how many ops they hold back.
        heavy: by preset, the reasons for float of ops that multiply and accumulate, with their share of all that is.
        macs: share of multiply-accumulates that run on integers.
        sqnr: dB of int8 against float, on fresh batches.
        plain: dB of the same before smooth-depthwise, smooth and correct-bias, as a qdq graph.
        kernels: dB of the lowered graph against the qdq graph that it was lowered from, same batch.
        dynamic: dB of the model with ranges measured at run time, which needs no data.
        weight_only: dB of the model with integer weights and float arithmetic.
        put_back: kernels that verify-lowering found wrong, of any of the three.
        regions: with an engine: how many kernels of it there are.
        outside: with an engine: the ops that run in PyTorch beside them, and why, with how many there are.
        onnx: why there is no ONNX file of it, or why that is wrong; empty where ONNX Runtime computes what it should.
        rounding: dB of the float model whose conv and linear layers round inputs and weights to 8 bits; where `sqnr`
            is low.
        torch_ao: dB of torch.ao's reference graph, where `sqnr` is low and torch.ao traces the model.
        seconds: time to quantize, calibration included.
        slowest: the three passes that took longest, with their seconds.
    """

    model: str
    suite: str
    stage: str = "build"
    error: str = ""
    trace: str = ""
    leaves: dict[str, str] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    heavy: dict[str, dict[str, float]] = field(default_factory=dict)
    macs: float | None = None
    sqnr: float | None = None
    plain: float | None = None
    kernels: float | None = None
    dynamic: float | None = None
    weight_only: float | None = None
    put_back: list[str] = field(default_factory=list)
    regions: int | None = None
    outside: dict[str, int] = field(default_factory=dict)
    onnx: str | None = None
    rounding: float | None = None
    torch_ao: float | None = None
    seconds: float | None = None
    slowest: dict[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether an engine runs all of it at once."""
        return self.regions == 1 and not self.outside

    @property
    def verdict(self) -> str:
        """`ok`; `ill-conditioned`: rounding alone costs this network too much, with any tool; else the failure.

        No tool quantizes a network well that is below `MIN_SQNR_DB` with only its layers rounded. fxq then has to
        be as good as torch.ao, where that runs, and near the rounding alone; otherwise it loses accuracy elsewhere.
        """
        if self.stage != "done":
            return f"fails to {self.stage}"
        if self.put_back:
            return f"{len(self.put_back)} wrong kernels"
        if self.sqnr is None or self.kernels is None or math.isnan(self.sqnr) or math.isnan(self.kernels):
            return "not finite"
        if self.sqnr >= MIN_SQNR_DB:
            return "ok"
        if self.rounding is None or self.rounding >= MIN_SQNR_DB + MARGIN:
            return "inaccurate"
        least = self.rounding - BETWEEN
        if self.torch_ao is not None:
            least = max(least, min(self.torch_ao, self.rounding) - MARGIN)
        return "ill-conditioned" if self.sqnr >= least else "inaccurate"


@dataclass(frozen=True)
class KeepQdq(fxq.Pass):
    """Before: any graph    After: the same, and `seen` holds a copy of it."""

    seen: list[fx.GraphModule] = field(default_factory=list)

    name = "keep-qdq"
    needs = gives = fxq.extend.Stage.QDQ

    def run(self, rewriter: fxq.extend.Rewriter) -> None:
        """Copy the graph; the tensors are shared, as no pass changes one in place."""
        self.seen.append(fx.GraphModule(rewriter.gm, copy.deepcopy(rewriter.gm.graph)))


@dataclass(frozen=True)
class KeepPlain(KeepQdq):
    """SQNR of the graph before any pass corrects it."""

    name = "keep-plain"


def measure(
    subject: Subject, options: Mapping[str, str], further: Sequence[str], report: Callable[[Result], None]
) -> None:
    """Put one model through the pipeline; `report` is called after every step, so that a crash leaves what was known.

    `options` are the recipe's `backend` and `optimize`; `further` is what else is measured: the presets `dynamic` and
    `weight_only`, and `onnx`. A model that fails is a result like any other.
    """
    torch.set_num_threads(1)
    result = Result(subject.name, subject.suite)
    report(result)
    try:
        with torch.no_grad():
            for step in _steps(subject, options, further, result):
                result.stage = step
                report(result)
    except (Exception, SystemExit) as error:
        result.error = f"{type(error).__name__}: {error}"
        result.trace = "".join(traceback.format_exception(error)[-12:])
    report(result)


def _steps(subject: Subject, options: Mapping[str, str], further: Sequence[str], result: Result) -> Iterator[str]:
    """Measure into `result`, step by step; yields the name of the step that comes next."""
    model, batches = subject.build(CALIBRATION + FRESH)
    data, fresh = batches[:CALIBRATION], batches[CALIBRATION:]
    yield "float"
    expected = outputs(model, fresh)
    yield "quantize"
    keep, plain = KeepQdq(), KeepPlain()
    recipe = (
        fxq.Recipe.static(**options).insert_pass(keep, before="lower").insert_pass(plain, before="smooth-depthwise")
    )
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qmodel = fxq.quantize(model, recipe, data=data, progress=False)
    result.seconds = time.perf_counter() - start
    passes = sorted(qmodel.history, key=lambda snapshot: -snapshot.seconds)
    result.slowest = {snapshot.name: snapshot.seconds for snapshot in passes[:3]}
    result.put_back = _wrong(caught)
    _read_ledger(qmodel, result)
    if options["backend"] in ENGINES:
        _read_regions(qmodel, f"{options['backend']}.region", result)
    yield "compare"
    got = outputs(qmodel, fresh)
    result.sqnr = sqnr(expected, got)
    result.kernels = sqnr(outputs(keep.seen[0], fresh), got)
    result.plain = sqnr(expected, outputs(plain.seen[0], fresh))
    del keep, plain
    if not result.sqnr >= MIN_SQNR_DB and options["backend"] != EXACT:
        result.torch_ao = torch_ao(model, data, fresh, expected)
        result.rounding = rounding(model, data, fresh, expected)
    for name in further:
        yield name
        if name == "onnx":
            result.onnx = _export(qmodel, fresh[0])
        else:
            setattr(result, name, _without_data(name, options, model, data, fresh, expected, result))
    yield "done"


def _wrong(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "runs in qdq form" in str(w.message)]


def _export(qmodel: fxq.results.QuantizedModel, batch: Any) -> str:
    """Why a model cannot be written as ONNX; empty where it can, and computes the same."""
    with TemporaryDirectory() as folder:
        try:
            qmodel.export(Path(folder) / "model.onnx", example_inputs=batch)
        except fxq.FxqError as error:
            return str(error).partition(": ")[2]
    return ""


def _without_data(
    preset: str,
    options: Mapping[str, str],
    model: nn.Module,
    data: list[Any],
    fresh: list[Any],
    expected: list[Tensor],
    result: Result,
) -> float:
    """dB of the model with a preset that needs no data; kernels that are wrong are added to the result."""
    recipe = getattr(fxq.Recipe, preset)(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qmodel = fxq.quantize(model, recipe, example_inputs=data[0], progress=False)
    result.put_back += _wrong(caught)
    result.heavy[preset] = _heavy(qmodel.ledger)
    return sqnr(expected, outputs(qmodel, fresh))


def _read_ledger(qmodel: fxq.results.QuantizedModel, result: Result) -> None:
    result.ops = dict(Counter(entry.precision for entry in qmodel.ledger))
    result.reasons = dict(Counter(e.reason for e in qmodel.ledger if e.precision == "float").most_common(5))
    traced = qmodel.history["trace"].graph
    result.leaves = {node.path: node.note for node in traced if node.note}
    result.macs = qmodel.ledger.coverage
    result.heavy["static"] = _heavy(qmodel.ledger)


def _read_regions(qmodel: fxq.results.QuantizedModel, kernel: str, result: Result) -> None:
    """Layers that kernels of this name run, and the ops that run in PyTorch beside them, most frequent first."""
    graph = qmodel.history[-1].graph
    kernels = {node.name for node in graph if node.label == kernel}
    kernel_counts: Counter[str] = Counter()
    for node in graph:
        part = node.label == "getitem" and not node.options and node.inputs[0] in kernels
        if node.kind not in ("io", "constant", "size") and node.shape is not None and not part:
            (why, *_) = node.reason.splitlines() or [""]
            kernel_counts[f"{node.label}: {why[:80]}"] += node.name not in kernels
    result.regions, result.outside = len(kernels), dict((+kernel_counts).most_common())


def _heavy(ledger: fxq.results.Ledger) -> dict[str, float]:
    """The reasons for float of ops that multiply and accumulate, with the share of all that is."""
    total = max(sum(entry.macs for entry in ledger), 1)
    shares: dict[str, float] = {}
    for entry in ledger.where(lambda entry: entry.precision == "float" and entry.macs > 0):
        shares[entry.reason] = shares.get(entry.reason, 0.0) + entry.macs / total
    return shares
