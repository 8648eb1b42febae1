"""Measure fxq beside other engines and their quantizers: is `backend="fastest"` as fast as the best of them?

    python -m scripts.bench.engines                                 every network, every contender, batch 1
    python -m scripts.bench.engines --batch 1 --batch 8             batch 8, too
    python -m scripts.bench.engines --only unet --contender fxq     one network, those whose name starts so
    python -m scripts.bench.engines --json numbers.json             the numbers to a file, and into one that is there
    python -m scripts.bench.engines --threads 2                     on two threads
    python -m scripts.bench.engines --folder /path                  where NNCF is: pip install --target /path nncf

Each contender has a process of its own, so that engines do not disturb each other; they run in turns, in an order drawn
anew every round, on one thread. A time is the median of the calls; with --cpu-time, for busy machines, it is the least
that the process had of the CPU. The networks have random weights with realistic batch-norm statistics; FSRCNN and the
digits network are trained. SQNR is against float, on inputs that are not among the calibration data. "Best other" is
the fastest contender but fxq whose SQNR is at least 10 dB; the ratio is that of the times, so that 1 and less is good.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tabulate import tabulate

import fxq
from scripts.bench import history
from scripts.bench.engine_cases import CASES
from scripts.bench.engine_contenders import CONTENDERS
from scripts.bench.number import sqnr
from scripts.bench.timing import no_gc
from scripts.bench.torch_ao import RIGHT

FASTEST = "fxq fastest"
ROUNDS = 10
MIN_CALLS = 3
"""In each round."""
CLOCKS = {False: "median of wall time", True: "least CPU time"}


@dataclass(frozen=True)
class Cell:
    """Result of one contender on one network.

    Attributes:
        network, batch, contender: what was measured.
        ms: of a call; None where it failed.
        sqnr: dB against float; None where it is float, or failed.
        seconds: to quantize, or to get ready in float: with conversion, calibration and compiling.
        note: what the contender chose, or why it failed.
    """

    network: str
    batch: int
    contender: str
    ms: float | None = None
    sqnr: float | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def right(self) -> bool:
        """Whether it runs, and gives what the float network gives."""
        return self.ms is not None and (self.sqnr is None or self.sqnr >= RIGHT)


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        cpu_time: least CPU time of a call, in place of the median time.
        threads: number of threads of a contender.
        seconds: how long each contender is timed.
        folders: where other tools are installed.
    """

    cpu_time: bool
    threads: int
    seconds: float
    folders: Sequence[Path]


# ---- in the process of a contender


def serve(pipe: Connection, network: str, batch: int, contender: str, settings: Settings) -> None:
    """Make a network ready, say how that went, and then time calls for as many seconds as is asked, until None comes.

    The answers are the note, the seconds to get ready and the SQNR, or a text: why it failed; then lists of seconds.
    """
    sys.path += map(str, settings.folders)  # after installed packages
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tools print progress bars
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings.threads)
    clock = time.process_time if settings.cpu_time else time.perf_counter
    try:
        case = CASES[network]().timed_at(batch)
        start = clock()
        runner = CONTENDERS[contender](case)
        took = clock() - start
        parts = [part for part in case.fresh.split(batch) if len(part) == batch] or [case.timed]
        with torch.no_grad():
            reference = torch.cat([case.model(part) for part in parts])
            outputs = torch.cat([runner.call(_laid_out(part, runner.memory_format)) for part in parts])
        pipe.send((runner.note, took, sqnr(reference, outputs)))
    except Exception as error:  # it fails in many ways; each is a result
        pipe.send(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:70]}")
        return
    x = _laid_out(case.timed, runner.memory_format)
    with torch.no_grad(), no_gc():
        while (seconds := pipe.recv()) is not None:
            runner.call(x)  # the caches are those of another contender
            times: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(times) < MIN_CALLS:
                before = clock()
                runner.call(x)
                times.append(clock() - before)
            pipe.send(times)


def _laid_out(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return x.clone(memory_format=memory_format)


# ---- in the process that asks


@dataclass
class Process:
    """A contender at work.

    Attributes:
        cell: what is known so far.
        times: seconds of its calls.
    """

    cell: Cell
    worker: multiprocessing.process.BaseProcess
    pipe: Connection
    times: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, cell: Cell, settings: Settings) -> Process:
        """Start it, and wait until it is ready or has failed."""
        context = _context()
        pipe, child_end = context.Pipe()
        about = (cell.network, cell.batch, cell.contender)
        worker = context.Process(target=serve, args=(child_end, *about, settings), daemon=True)
        worker.start()
        child_end.close()  # so that a process that dies is an end of file here
        try:
            answer = pipe.recv()
        except EOFError:
            answer = f"the process died: exit code {_exit_code(worker)}"
        if isinstance(answer, str):
            return cls(Cell(*about, note=answer), worker, pipe)
        note, seconds, noise = answer
        is_exact = math.isinf(noise) or cell.contender.startswith("float ")
        return cls(Cell(*about, sqnr=None if is_exact else noise, seconds=seconds, note=note), worker, pipe)

    @property
    def failed(self) -> bool:
        return self.cell.seconds is None

    def turn(self, seconds: float) -> None:
        """Let it run for so long."""
        try:
            self.pipe.send(seconds)
            self.times += self.pipe.recv()
        except (EOFError, BrokenPipeError):
            about = (self.cell.network, self.cell.batch, self.cell.contender)
            self.cell = Cell(*about, note=f"the process died: exit code {_exit_code(self.worker)}")

    def end(self, cpu_time: bool) -> Cell:
        """Stop it; what it did."""
        if self.failed:
            return self.cell
        self.pipe.send(None)
        self.worker.join()
        statistic = min if cpu_time else statistics.median
        return Cell(**{**asdict(self.cell), "ms": 1e3 * statistic(self.times)})


def _context() -> multiprocessing.context.ForkServerContext | multiprocessing.context.SpawnContext:
    """How processes start: where possible, from one that has imported what all of them import, and no engine."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fxq", "sklearn.datasets", "sklearn.model_selection"])
    return context


def _exit_code(worker: multiprocessing.process.BaseProcess) -> int | None:
    worker.join()
    return worker.exitcode


def measured(network: str, batch: int, contenders: Iterable[str], settings: Settings) -> list[Cell]:
    """All contenders on one network: made ready one after the other, then timed in turns."""
    order = random.Random(0)
    processes = [Process.start(Cell(network, batch, name), settings) for name in contenders]
    for _ in range(ROUNDS):
        running = [process for process in processes if not process.failed]
        order.shuffle(running)
        for process in running:
            process.turn(settings.seconds / ROUNDS)
    return [process.end(settings.cpu_time) for process in processes]


# ---- what is printed and kept


def best_other(cells: Iterable[Cell]) -> Cell | None:
    """The fastest of those that are not fxq's, and right."""
    others = [cell for cell in cells if cell.right and not cell.contender.startswith("fxq ")]
    return min(others, key=lambda cell: cell.ms or math.inf, default=None)


def table(cells: Sequence[Cell]) -> str:
    """The cells of one network at one batch size."""
    best = best_other(cells)
    rows: list[list[object]] = []
    for cell in cells:
        ratio = cell.ms / best.ms if cell.ms and best and best.ms else None
        wrong = "" if cell.right or cell.ms is None else "wrong"
        rows.append([cell.contender, cell.ms, ratio, cell.sqnr, cell.seconds, cell.note, wrong])
    headers = (
        f"{cells[0].network}, batch {cells[0].batch}",
        "ms",
        "/ best other",
        "SQNR, dB",
        "to quantize, s",
        "",
        "",
    )
    return tabulate(rows, headers=headers, floatfmt=("", ".3f", ".2f", ".1f", ".1f"))


def summary(cells: Iterable[Cell]) -> str:
    """For each network, fxq's fastest beside the best other, and the geometric mean for each batch size."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.network, cell.batch), []).append(cell)
    rows: list[list[object]] = []
    ratios: dict[int, list[float]] = {}
    for (network, batch), group in groups.items():
        own, best = next((c for c in group if c.contender == FASTEST), None), best_other(group)
        if own and own.ms and own.right and best and best.ms:
            ratios.setdefault(batch, []).append(own.ms / best.ms)
            rows.append([network, batch, own.ms, own.note, best.ms, best.contender, own.ms / best.ms])
    for batch, batch_ratios in ratios.items():
        mean = statistics.geometric_mean(batch_ratios)
        rows.append([f"geometric mean of {len(batch_ratios)}", batch, "", "", "", "", mean])
    headers = ("network", "batch", f"{FASTEST}, ms", "", "best other, ms", "", "ratio")
    return tabulate(rows, headers=headers, floatfmt=("", "", ".3f", "", ".3f", "", ".2f"))


def machine(settings: Settings) -> dict[str, str]:
    """Description of the machine and the settings that the numbers belong to."""
    about = fxq.doctor(["reference"], progress=False).machine
    facts = {name: about[name] for name in ("CPU", "vectors", "VNNI", "AMX", "torch")}
    for package in ("numba", "openvino", "onnxruntime", "nncf"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    threads = "one thread" if settings.threads == 1 else f"{settings.threads} threads"
    return {**facts, "fxq": fxq.__version__, "times": f"{CLOCKS[settings.cpu_time]}, {threads}"}


def read(path: Path, about: dict[str, str]) -> dict[tuple[str, int, str], Cell]:
    """The cells of a file, by network, batch size and contender; none if there is no such file.

    Raises:
        SystemExit: they were not measured on this machine, with these versions, in this way.
    """
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["machine"] != about:
        raise SystemExit(f"{path} was measured otherwise: {data['machine']}, and this is {about}. Choose another file.")
    return {(cell.network, cell.batch, cell.contender): cell for cell in (Cell(**row) for row in data["cells"])}


def for_history(cells: Sequence[Cell], settings: Settings) -> Iterator[tuple[str, str, float, str]]:
    """Milliseconds and SQNR of each contender that ran, the time of fxq's to that of the best other, and seconds."""
    best = best_other(cells)
    threads = "" if settings.threads == 1 else f", {settings.threads} threads"
    for cell in cells:
        case = f"{cell.network}, batch {cell.batch}, {cell.contender}{threads}"
        if cell.seconds is not None:
            yield case, "time to get ready", cell.seconds, "s"
        if cell.ms is not None:
            yield case, "time of a call", cell.ms, "ms"
            if best is not None and best.ms is not None and cell.contender.startswith("fxq"):
                yield case, "time to that of the best other", cell.ms / best.ms, "times"
        if cell.sqnr is not None:
            yield case, "SQNR", cell.sqnr, "dB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", metavar="NAME", help=f"one of {', '.join(CASES)}")
    parser.add_argument(
        "--contender", action="append", metavar="NAME", help=f"what its name starts with, of {', '.join(CONTENDERS)}"
    )
    parser.add_argument("--batch", type=int, action="append", metavar="N", help="batch size (default 1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each is timed (default %(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="least CPU time of a call, instead of the median time")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each contender (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the numbers to this file, too")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where other tools are installed")
    history.add_argument(parser)
    arguments = parser.parse_args()
    sys.path += map(str, arguments.folder)
    settings = Settings(arguments.cpu_time, arguments.threads, arguments.seconds, arguments.folder)
    about = machine(settings)
    numbers: list[tuple[str, str, float, str]] = []
    cells = read(arguments.json, about) if arguments.json else {}
    contenders = [name for name in CONTENDERS if name.startswith(tuple(arguments.contender or ("",)))]
    for name in arguments.only or CASES:
        for batch in arguments.batch or [1]:
            rows = measured(name, batch, contenders, settings)
            print(table(rows) + "\n", flush=True)
            numbers += for_history(rows, settings)
            cells.update({(cell.network, cell.batch, cell.contender): cell for cell in rows})
            if arguments.json:
                data = {"machine": about, "cells": [asdict(cell) for cell in cells.values()]}
                arguments.json.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    history.append(arguments.history, "bench.engines" + (" --cpu-time" if arguments.cpu_time else ""), numbers)
    print(summary(cells.values()))
    print("\n" + ", ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
