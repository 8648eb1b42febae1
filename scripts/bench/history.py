"""History of all benchmarks: JSON lines, one record for each measured number, with CPU, versions, date and commit.

    python -m scripts.bench.networks --history      measure, and append the numbers to `history.jsonl`
    python -m scripts.bench.history plot.svg        draw every number that was measured on more than one day
    python -m scripts.docs.measured_page            write the page of the documentation anew from the history

Records whose `source` is "page" were read once from the page `measured.md` when it was still written by hand; their
date and commit are those of the line. Their `text` is the number as the page shows it, or a whole paragraph.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fxq

HISTORY = Path(__file__).with_name("history.jsonl")
PACKAGES = ("fxq", "torch", "numba", "openvino", "onnxruntime")


@dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        benchmark: the script, by its module below `scripts`, and the options that say what was measured.
        case: what was measured: a network, a kernel and its size.
        quantity: what the number says, such as "times faster, batch 1".
        value: the number; None where none came out, or where `text` is a paragraph.
        unit: of the value; "times" for a ratio, empty where the quantity names it.
        cpu: kind of CPU.
        versions: of packages, by name.
        date: day, as YYYY-MM-DD.
        commit: of the checkout; with "+" after it if files were changed.
        source: "run" of the benchmark, or "page".
        text: the number or paragraph as the page shows it.
        section: heading of the page that it stands under, with its number signs.
        table, row: number of the page's table, counted from 1, and of the row; 0 for a paragraph.
        header: title of the table's first column.
    """

    benchmark: str
    case: str
    quantity: str
    value: float | None
    unit: str
    cpu: str
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    commit: str = ""
    source: str = "run"
    text: str = ""
    section: str = ""
    table: int = 0
    row: int = 0
    header: str = ""


def read(path: Path = HISTORY) -> list[Record]:
    """All records of a history, the oldest first."""
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write(records: Iterable[Record], path: Path, mode: str = "a") -> None:
    """Append records to a history; fields that are empty are left out."""
    with path.open(mode, encoding="utf-8") as file:
        for record in records:
            fields = {
                name: value
                for name, value in asdict(record).items()
                if value not in ("", {}) and (name not in ("table", "row", "header") or record.table)
            }
            file.write(json.dumps({"unit": "", **fields}, ensure_ascii=False, allow_nan=False) + "\n")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option `--history [PATH]` of a benchmark."""
    text = "append the numbers to this history (without PATH: to scripts/bench/history.jsonl)"
    parser.add_argument("--history", type=Path, nargs="?", const=HISTORY, metavar="PATH", help=text)


def append(path: Path | None, benchmark: str, numbers: Iterable[tuple[str, str, float, str]]) -> None:
    """Append the numbers of a run to a history, with CPU, versions, date and commit.

    Args:
        path: the history; None where the run is not to be kept.
        benchmark: the script with its options, such as "bench.kernels", see `Record`.
        numbers: case, quantity, value and unit of each. A value that is not finite is stored as None.
    """
    if path is None:
        return
    about = fxq.doctor(["reference"], progress=False).machine
    cpu = f"{about['CPU']}, {about['vectors']}, VNNI: {about['VNNI']}, AMX: {about['AMX']}"
    day, commit, versions = datetime.now(timezone.utc).date().isoformat(), _commit(), dict(_versions())
    write(
        (
            Record(benchmark, case, quantity, value if math.isfinite(value) else None, unit, cpu, versions, day, commit)
            for case, quantity, value, unit in numbers
        ),
        path,
    )


def _versions() -> Iterable[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _commit() -> str:
    """Short hash of the checkout's commit, with "+" for changed files; empty where there is no git."""
    command = ["git", "-C", str(HISTORY.parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def series(records: Iterable[Record]) -> dict[str, list[tuple[str, float]]]:
    """Days and values of every number that was run on more than one day, by its name and CPU."""
    values: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for record in records:
        if record.value is not None and record.source == "run":
            name = f"{record.benchmark}: {record.case}, {record.quantity} ({record.cpu.partition(',')[0]})"
            values[name].append((record.date, record.value))
    return {name: sorted(points) for name, points in values.items() if len({day for day, _ in points}) > 1}


def plot(records: Iterable[Record], path: Path) -> int:
    """Draw each series of a history as a panel of an SVG file; returns how many there are."""
    from matplotlib.figure import Figure

    curves = series(records)
    figure = Figure(figsize=(8, max(2.2 * len(curves), 1)), layout="constrained")
    for i, (name, points) in enumerate(sorted(curves.items())):
        panel = figure.add_subplot(len(curves), 1, i + 1)
        panel.plot([datetime.fromisoformat(day) for day, _ in points], [value for _, value in points], marker="o")
        panel.set_title(name, fontsize=8)
        panel.set_ylim(bottom=0)
        panel.tick_params(labelsize=7)
    figure.savefig(path, format="svg")
    return len(curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--history", type=Path, default=HISTORY, help="history to read (default %(default)s)")
    arguments = parser.parse_args()
    count = plot(read(arguments.history), arguments.picture)
    print(f"{arguments.picture}: {count} numbers that were measured on more than one day")


if __name__ == "__main__":
    main()
