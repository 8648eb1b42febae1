"""Measure how accurate int8 is: fxq beside NNCF and ONNX Runtime, on networks with trained weights.

    python -m scripts.bench.accuracy --install build/accuracy  fetch networks, pictures and tools, then run: hours
    python -m scripts.bench.accuracy --folder build/accuracy   run with what was fetched
    python -m scripts.bench.accuracy --only faces --only voices    some of the networks
    python -m scripts.bench.accuracy --contender fxq           those whose name starts so
    python -m scripts.bench.accuracy --only faces --search 35  fxq also with what its search finds for 35 dB
    python -m scripts.bench.accuracy --crops 280               fewer pictures for EfficientNet-Lite0
    python -m scripts.bench.accuracy --json numbers.json       the numbers to a file, too

Everyone's integers are simulated exactly, so that the numbers are those of every CPU whose kernels are right; only "fxq
on this CPU" is what its kernels give, with what is faster in float left in float. No network was trained here. All data
that is judged is other data than what calibrates. "Agreement" is how often the top class is that of the float network,
which is no accuracy; its standard error is that of independent crops. Seconds to quantize are those of the CPU, with
the export to ONNX where there is one. What fails has its reason in place of numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from tabulate import tabulate

import fxq
from scripts.bench import history
from scripts.bench.accuracy_contenders import Contender, contenders
from scripts.bench.accuracy_data import install
from scripts.bench.accuracy_subjects import SUBJECTS, Subject
from scripts.bench.timing import threads_set_to
from scripts.demo.sequence_data import Missing, fetched

FLOAT_CONTENDER = "float"


@dataclass(frozen=True)
class Row:
    """Result of one contender on one network.

    Attributes:
        contender: its name.
        numbers: quantities of the network, by name; empty where it failed.
        seconds: of the CPU, to quantize.
        note: how much runs on integers, or why it failed.
    """

    contender: str
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    note: str = ""


def measured(subject: Subject, makes: dict[str, Contender]) -> Iterator[Row]:
    """The rows of one network: float first, then every contender."""
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1

    expected = subject.outputs([counting(part.model, counted) for part in subject.parts])
    yield Row(FLOAT_CONTENDER, subject.judge(expected, expected))
    for name, make in makes.items():
        yield judged(subject, name, make, expected, calls)


def judged(subject: Subject, name: str, make: Contender, expected: Any, calls: int) -> Row:
    """Quantize a network with one contender, about this many times. A failure is a result, too."""
    start = time.process_time()
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar, rows = progress.add_task(f"{subject.name}: {name}, to quantize", total=len(subject.parts)), []
            for part in subject.parts:
                rows.append(make(part, subject.is_transformer))
                progress.advance(bar)
            seconds = time.process_time() - start
            bar = progress.add_task(f"{subject.name}: {name}, to judge", total=calls)
            outputs = subject.outputs([counting(call, partial(progress.advance, bar)) for call, _ in rows])
        numbers = subject.judge(expected, outputs)
    except Exception as error:  # it fails in many ways; each is a result
        return Row(name, note=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:70]}")
    return Row(name, numbers, seconds, "; ".join(note for _, note in rows if note))


def counting(call: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    """Wrapper of a call that counts its calls."""

    def counted(*inputs: Any) -> Any:
        count()
        return call(*inputs)

    return counted


def table(name: str, rows: Sequence[Row]) -> str:
    """The rows of one network."""
    kinds = list(rows[0].numbers)
    cells = [[row.contender, *(row.numbers.get(kind) for kind in kinds), row.seconds, row.note] for row in rows]
    forms = [".4f" if kind.endswith(("cosine", "IoU")) else "g" if "face" in kind else ".2f" for kind in kinds]
    return tabulate(cells, headers=(name, *kinds, "to quantize, s", ""), floatfmt=("", *forms, ".1f"))


def machine() -> dict[str, str]:
    """Description of the machine and the versions that the numbers belong to."""
    about = fxq.doctor(["reference"], progress=False).machine
    facts = {name: about[name] for name in ("CPU", "vectors", "VNNI", "AMX", "torch")}
    for package in ("onnxruntime", "nncf"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return {**facts, "fxq": fxq.__version__}


def as_data(row: Row) -> dict[str, object]:
    """A row for JSON, which has no infinity: null for the SQNR of what is float."""
    numbers = {kind: value if math.isfinite(value) else None for kind, value in row.numbers.items()}
    return {"contender": row.contender, **numbers, "seconds to quantize": row.seconds, "note": row.note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="fetch networks and tools into FOLDER first")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where they were fetched before")
    parser.add_argument("--only", choices=SUBJECTS, action="append", help=f"one of {', '.join(SUBJECTS)}")
    parser.add_argument("--contender", action="append", metavar="NAME", help="what its name starts with")
    parser.add_argument("--observers", action="store_true", help="fxq with each of its observers, too")
    parser.add_argument("--search", type=float, metavar="DB", help="fxq with a mix that is searched for, too")
    parser.add_argument("--crops", type=int, default=1000, metavar="N", help="pictures to judge (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers to this file too")
    history.add_argument(parser)
    arguments = parser.parse_args()
    folders = fetched(arguments, install)
    about = machine()
    tables: dict[str, list[dict[str, object]]] = {}
    print(", ".join(f"{name}: {value}" for name, value in about.items()), end="\n\n", flush=True)
    wanted = tuple(arguments.contender or ("",))
    available = contenders(arguments.observers, arguments.search)
    makes = {name: make for name, make in available.items() if name.startswith(wanted)}
    with threads_set_to(1), torch.no_grad():
        for name in arguments.only or SUBJECTS:
            try:
                subject = SUBJECTS[name](folders, arguments.crops)
            except Missing as missing:
                print(f"{name}: {missing}", file=sys.stderr)
                continue
            rows: list[Row] = []
            for row in measured(subject, makes):
                rows.append(row)
                tables.setdefault(subject.name, []).append(as_data(row))
                if arguments.json is not None:  # each row at once: one can take many minutes
                    data = {"machine": about, "tables": tables}
                    arguments.json.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            numbers = [
                (f"{subject.name}, {r.contender}", kind, value, "") for r in rows for kind, value in r.numbers.items()
            ]
            history.append(arguments.history, "bench.accuracy", numbers)
            print(table(subject.name, rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
