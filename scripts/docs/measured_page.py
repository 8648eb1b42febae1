"""Write the page `measured.md` anew from the history of all benchmarks, `scripts/bench/history.jsonl`.

    python -m scripts.docs.measured_page [PAGE]

First what the page had when it was written by hand, in its order, and then the newest run of every benchmark since: a
table for each benchmark and CPU. A number of the page is changed by running its benchmark with `--history`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from scripts.bench.history import HISTORY, Record, read

PAGE = Path(__file__).resolve().with_name("measured.md")
NOTE = """\
<!-- Written by `python -m scripts.docs.measured_page` from `scripts/bench/history.jsonl`. Do not edit it: run a
benchmark with `--history`, and then the script. -->"""


def page(records: Sequence[Record]) -> str:
    """The page as Markdown."""
    parts = [NOTE, "# Measured"]
    old = [record for record in records if record.source == "page"]
    section = ""
    for (heading, table), group in groupby(old, key=lambda record: (record.section, record.table)):
        if heading != section:
            parts.append(heading)
            section = heading
        block = list(group)
        parts += [hand_table(block)] if table else [record.text for record in block]
    runs = [record for record in records if record.source == "run"]
    if runs:
        parts += ["## Newest runs", *run_tables(runs)]
    return "\n\n".join(parts) + "\n"


def hand_table(cells: Sequence[Record]) -> str:
    """A table of the page: a row for each case, in which every number is under its quantity."""
    quantities = list(dict.fromkeys(cell.quantity for cell in cells))
    lines = [line([cells[0].header, *quantities]), "|" + "---|" * (len(quantities) + 1)]
    for _, group in groupby(cells, key=lambda cell: cell.row):
        row = list(group)
        texts = {cell.quantity: cell.text for cell in row}
        lines.append(line([row[0].case, *(texts.get(quantity, "") for quantity in quantities)]))
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """A line of a table; empty cells have one space."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def run_tables(runs: Sequence[Record]) -> Iterator[str]:
    """The newest value of each number: for each run of a benchmark a line that says where and when, and its tables."""
    newest = {(r.benchmark, r.cpu, r.case, r.quantity): r for r in runs}

    def run_of(record: Record) -> tuple[str, str, str, str, tuple[tuple[str, str], ...]]:
        return record.benchmark, record.cpu, record.date, record.commit, tuple(record.versions.items())

    for (benchmark, cpu, date, commit, versions), group in groupby(sorted(newest.values(), key=run_of), key=run_of):
        packages = ", ".join(f"{name} {version}" for name, version in versions)
        yield f"`python -m scripts.{benchmark}`, {cpu}; {date}, commit {commit}; {packages}:"
        yield from run_table(list(group))


def run_table(records: Sequence[Record]) -> Iterator[str]:
    """Tables with a row for each case and a column for each quantity; cases with none in common have another table."""
    cases: dict[str, dict[str, Record]] = {}
    for record in records:
        cases.setdefault(record.case, {})[record.quantity] = record
    tables: list[tuple[dict[str, None], list[str]]] = []
    for case, numbers in cases.items():
        quantities, rows = next((table for table in tables if table[0].keys() & numbers.keys()), ({}, []))
        if not rows:
            tables.append((quantities, rows))
        quantities.update(dict.fromkeys(numbers))
        rows.append(case)
    for quantities, rows in tables:
        units = {q: {cases[case][q].unit for case in rows if q in cases[case]} for q in quantities}
        titles = [titled(q, units[q]) for q in quantities]
        lines = [line(["case", *titles]), "|" + "---|" * (len(titles) + 1)]
        lines += [line([case, *(shown(cases[case].get(q), len(units[q]) > 1) for q in quantities)]) for case in rows]
        yield "\n".join(lines)


def titled(quantity: str, units: Collection[str]) -> str:
    """Quantity as the title of a column, with the unit of its numbers if they have one and it does not name it."""
    (unit, *others) = units
    return quantity if others or not unit or unit in quantity.split() else f"{quantity}, {unit}"


def shown(record: Record | None, with_unit: bool) -> str:
    """Number of a cell in three digits; empty where none came out."""
    if record is None or record.value is None:
        return ""
    return f"{record.value:.3g} {record.unit}".strip() if with_unit else f"{record.value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page Measured from the history of benchmarks.")
    parser.add_argument("target", nargs="?", type=Path, default=PAGE, help="file to write; default: the page")
    target = parser.parse_args().target
    target.write_text(page(read(HISTORY)), encoding="utf-8")
    print(f"{target} is written from {HISTORY}")


if __name__ == "__main__":
    main()
