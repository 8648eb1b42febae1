"""Measure fxq on networks of sequences: speed, accuracy and size beside torch.ao, torchao and ONNX Runtime.

    python -m scripts.bench.sequence                      all networks, all quantizers
    python -m scripts.bench.sequence --only lstm          one network: bert, lstm or gru
    python -m scripts.bench.sequence --quantizer fxq      only those whose name starts so
    python -m scripts.bench.sequence --json numbers.json  the numbers as data too

BERT has 6 layers of width 384 with embeddings and reads 128 words; the LSTM and the GRU have 2 layers of width 512 and
read 100 steps. All have random weights and a batch of one. One thread; all models of a network run in turns in an order
drawn anew. A time is what the thread had of the CPU, the least of the runs, so that the ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxq
from scripts.bench import history
from scripts.bench.networks import as_data
from scripts.bench.number import Number, sqnr, table
from scripts.bench.rivals import Call, restored_engine, rivals, saved
from scripts.bench.sequence_recipes import RECIPES, on_integers
from scripts.bench.timing import interleaved, threads_set_to
from scripts.networks.sequence import Bert, Recurrent

FLOAT_QUANTIZER = "float"


@dataclass(frozen=True)
class Case:
    """A network, and what fxq is to reach with it.

    Attributes:
        model: the float network.
        draw: makes new inputs.
        faster: least ratio of the float time to that of dynamic quantization.
        sqnr: least dB of that.
        sizes: most bytes in memory relative to float, by quantizer.
    """

    model: nn.Module
    draw: Callable[[], Tensor]
    faster: float = 1.0
    sqnr: float | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """Result of one quantizer on a network.

    Attributes:
        name: the quantizer.
        call: runs it; None where it failed.
        noise: dB of its output against float.
        memory, file: bytes of its tensors, where they can be counted, and of its state dict or ONNX file.
        note: how much runs on integers, or why it failed.
    """

    name: str
    call: Call | None = None
    noise: float = float("nan")
    memory: int | None = None
    file: int = 0
    note: str = ""


def bert(vnni: bool) -> Case:
    """BERT of the size of MiniLM, 128 words."""
    model = Bert().eval()
    sizes = {"fxq int8 weights": 0.27, "fxq int4 weights": 0.16}
    return Case(model, lambda: torch.randint(30522, (1, 128)), 1.9 if vnni else 1.0, 40.0 if vnni else 37.0, sizes)


def lstm(vnni: bool) -> Case:
    """Two LSTM layers, 100 steps."""
    model = Recurrent(nn.LSTM(512, 512, 2, batch_first=True)).eval()
    return Case(model, lambda: torch.randn(1, 100, 512), 1.0, 36.0 if vnni else None)


def gru(vnni: bool) -> Case:
    """Two GRU layers, 100 steps."""
    model = Recurrent(nn.GRU(512, 512, 2, batch_first=True)).eval()
    return Case(model, lambda: torch.randn(1, 100, 512), 1.5 if vnni else 1.0)


CASES = {"bert": bert, "lstm": lstm, "gru": gru}


def measured(name: str, seconds: float, wanted: tuple[str, ...]) -> tuple[list[list[object]], list[Number]]:
    """The rows of the table of one network, and the numbers that have a target."""
    torch.manual_seed(0)
    about = fxq.doctor(["reference"], progress=False).machine
    case = CASES[name](about["VNNI"] == "yes")
    with threads_set_to(1), torch.no_grad(), restored_engine():
        entries = list(made(case, wanted))
        x = case.draw()
        runs = {entry.name: (lambda call=entry.call: call(x)) for entry in entries if entry.call}  # type: ignore[misc]
        times = interleaved(runs, seconds * len(runs), statistic=min, clock=time.thread_time)
    before = entries[0]
    rows: list[list[object]] = []
    for entry in entries:
        taken = times.get(entry.name)
        speed = [1e3 * taken, times[FLOAT_QUANTIZER] / taken] if taken else ["", ""]
        sizes = [_share(entry.memory, before.memory), _share(entry.file, before.file)]
        noise = "" if entry is before or not entry.call else entry.noise
        rows.append([entry.name, *speed, noise, *sizes, entry.note])
    return rows, list(judged(name, case, {entry.name: entry for entry in entries}, times))


def _share(size: int | None, whole: int | None) -> object:
    return f"{size / 1e6:.2f} ({size / whole:.3f})" if size and whole else ""


def made(case: Case, wanted: tuple[str, ...]) -> Iterator[Entry]:
    """The float network, and what every quantizer makes of it, judged on an input that it has not seen."""
    example, data, fresh = case.draw(), [case.draw() for _ in range(8)], case.draw()
    expected = case.model(fresh)
    yield Entry(FLOAT_QUANTIZER, case.model, memory=fxq.results.nbytes(case.model), file=saved(case.model))
    own = {name: recipe for name, recipe in RECIPES.items() if name.startswith(wanted)}
    for name, recipe in own.items():
        try:
            start = time.perf_counter()
            qmodel = quantize(case.model, recipe(), data, example)
            took = time.perf_counter() - start
            chosen = f", {qmodel.backend}" if recipe().backend == "fastest" else ""
            note = f"{on_integers(qmodel)}{chosen}; {took:.0f} s to quantize"
            noise = sqnr(expected, qmodel(fresh))
            yield Entry(name, qmodel, noise, fxq.results.nbytes(qmodel), saved(qmodel), note)
        except Exception as error:  # it is a result, too
            yield Entry(name, note=_failed(error))
    for name, make in rivals(engines=True).items():
        if not name.startswith(wanted):
            continue
        try:
            quantized = make(case.model, (example,))
            yield Entry(name, quantized.call, sqnr(expected, quantized.call(fresh)), file=quantized.nbytes)
        except Exception as error:  # it fails in many ways; each is a result
            yield Entry(name, note=_failed(error))


def quantize(model: nn.Module, recipe: fxq.Recipe, data: list[Tensor], example: Tensor) -> fxq.results.QuantizedModel:
    """With what is slower on integers left in float, as recipes do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        calibration = data if recipe.preset == "static" else None
        return fxq.quantize(model, recipe, data=calibration, example_inputs=example, progress=False)


def _failed(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:70]}"


def judged(name: str, case: Case, entries: Mapping[str, Entry], times: Mapping[str, float]) -> Iterator[Number]:
    """Records of the numbers that have a target."""
    own = [quantizer for quantizer in RECIPES if quantizer in times]
    dynamic = [quantizer for quantizer in own if quantizer.startswith("fxq dynamic")]
    for quantizer in own:
        ratio = times[FLOAT_QUANTIZER] / times[quantizer]
        least = case.faster if quantizer in dynamic else 0.97
        yield Number(name, f"{quantizer}: times faster than float", ratio, least=least)
    engines = [engine for engine in times if engine.startswith("torch.ao ")]
    for quantizer in dynamic:
        if engines:
            best = min(engines, key=times.__getitem__)
            quantity, detail = f"{quantizer}: times faster than torch.ao", f"{best}, {entries[best].noise:.1f} dB"
            yield Number(name, quantity, times[best] / times[quantizer], 1.0, detail=detail)
        if case.sqnr is not None:
            yield Number(name, f"{quantizer}: SQNR, dB", entries[quantizer].noise, least=case.sqnr)
    for quantizer, most in case.sizes.items():
        if quantizer in times:
            for quantity, part in (("memory", entries[quantizer].memory), ("state dict", entries[quantizer].file)):
                whole = entries[FLOAT_QUANTIZER].memory if quantity == "memory" else entries[FLOAT_QUANTIZER].file
                yield Number(name, f"{quantizer}: share of float, {quantity}", (part or 0) / (whole or 1), most=most)


HEADERS = ("quantizer", "ms", "times faster", "SQNR, dB", "memory, MB", "file, MB", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", metavar="NAME", help=f"one of {', '.join(CASES)}")
    parser.add_argument(
        "--quantizer", action="append", metavar="NAME", help="what its name starts with: 'fxq', 'torch'"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each model is timed (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers to this file too")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where other tools are installed")
    history.add_argument(parser)
    arguments = parser.parse_args()
    numbers, tables = [], {}
    with multiprocessing.get_context("spawn").Pool(1, _add_folders, (arguments.folder,), maxtasksperchild=1) as alone:
        for name in arguments.only or CASES:
            rows, results = alone.apply(measured, (name, arguments.seconds, tuple(arguments.quantizer or ("",))))
            tables[name] = [dict(zip(HEADERS, row, strict=True)) for row in rows]
            numbers += results
            print(tabulate(rows, headers=(name, *HEADERS[1:]), floatfmt=".2f"), end="\n\n", flush=True)
    print(table(numbers))
    about = fxq.doctor(["reference"], progress=False).machine
    print(f"\n{about['CPU']}, {about['vectors']}, VNNI: {about['VNNI']}, AMX: {about['AMX']}, torch {about['torch']}")
    history.append(arguments.history, "bench.sequence", [(n.subject, n.quantity, n.value, "") for n in numbers])
    if arguments.json is not None:
        data = {"machine": about, "numbers": [as_data(number) for number in numbers], "tables": tables}
        arguments.json.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _add_folders(folders: list[Path]) -> None:
    import sys

    sys.path += map(str, folders)  # after installed packages


if __name__ == "__main__":
    main()
