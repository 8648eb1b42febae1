"""The history of the benchmarks, and the page that is made from it."""

import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import fxq
from scripts.bench import history
from scripts.bench.history import Record
from scripts.docs import measured_page

pytestmark = pytest.mark.any_cpu

RUN = Record(
    "bench.kernels", "add, 8 x 8", "times faster", 2.0, "times", "a CPU", {"torch": "2.13"}, "2026-01-01", "abc"
)


def test_the_page_is_what_the_script_makes_of_the_history():
    """Fails where a number of the page was typed, and where the script was not run after a benchmark."""
    assert measured_page.PAGE.read_text(encoding="utf-8") == measured_page.page(history.read())


def test_records_of_the_history_are_complete():
    records = history.read()
    assert len(records) > 400
    for record in records:
        assert record.benchmark and record.case and record.quantity and record.cpu, record
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.date), record
        assert record.source in ("run", "page"), record
        module = Path(history.__file__).parents[1] / (record.benchmark.split()[0].replace(".", "/") + ".py")
        assert module.exists(), record.benchmark


def test_values_of_the_page_are_those_of_its_text():
    """A number was read from the text of its cell: it stands there, whatever the unit."""
    cells = [record for record in history.read() if record.table and record.value is not None]
    assert len(cells) > 350
    for cell in cells:
        numbers = {float(text) for text in re.findall(r"\d+\.?\d*", cell.text.replace(",", ""))}
        assert abs(cell.value) in numbers, cell


@pytest.mark.slow
def test_a_run_is_appended_with_machine_versions_and_date(tmp_path):
    path = tmp_path / "history.jsonl"
    history.append(path, "bench.kernels", [("add", "ratio", 1.5, "times"), ("add", "time", math.inf, "us")])
    history.append(path, "bench.kernels", [("mul", "ratio", 3.0, "times")])
    first, second, third = history.read(path)
    assert (first.case, first.value, second.value, third.value) == ("add", 1.5, None, 3.0)
    assert first.versions["torch"] == history.version("torch") and first.versions["fxq"] == fxq.__version__
    assert first.source == "run" and "VNNI" in first.cpu
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def test_nothing_is_written_unless_asked(monkeypatch):
    written = []
    monkeypatch.setattr(history, "write", lambda *args: written.append(args))
    history.append(None, "bench.kernels", [("add", "ratio", 1.5, "times")])
    assert not written


def test_the_newest_run_is_on_the_page():
    newer = dataclasses.replace(RUN, value=2.5, date="2026-02-01")
    text = measured_page.page([RUN, newer])
    assert "2026-02-01, commit abc; torch 2.13:\n\n| case | times faster |\n|---|---|\n| add, 8 x 8 | 2.5 |\n" in text
    assert "2026-01-01" not in text


def test_a_run_is_one_table_with_a_column_for_each_quantity():
    timed = dataclasses.replace(RUN, quantity="time", value=12.5, unit="us")
    single = dataclasses.replace(RUN, case="mul", quantity="error", value=None, unit="steps")
    text = measured_page.page([RUN, timed, single])
    assert "| case | times faster | time, us |\n|---|---|---|\n| add, 8 x 8 | 2 | 12.5 |\n" in text
    assert text.endswith("| case | error, steps |\n|---|---|\n| mul | |\n")


def test_a_plot_has_a_panel_for_each_number_of_several_days(tmp_path):
    pytest.importorskip("matplotlib")
    later = dataclasses.replace(RUN, value=2.5, date="2026-02-01")
    alone = dataclasses.replace(RUN, case="mul")
    typed = dataclasses.replace(later, source="page", case="add, typed")
    path = tmp_path / "history.svg"
    assert history.plot([later, RUN, alone, typed], path) == 1
    assert ET.parse(path).getroot().tag.endswith("svg")
    assert history.series([later, RUN, alone]) == {
        "bench.kernels: add, 8 x 8, times faster (a CPU)": [("2026-01-01", 2.0), ("2026-02-01", 2.5)]
    }


def test_engines_tell_the_history_how_they_stand_to_the_best_other(script):
    engines = script("bench.engines")
    cells = [engines.Cell("net", 1, "nncf", 2.0, 20.0), engines.Cell("net", 1, "fxq fastest", 1.0, 30.0, 9.0)]
    numbers = {
        threads: list(engines.for_history(cells, engines.Settings(True, threads, 1.0, []))) for threads in (1, 2)
    }
    assert ("net, batch 1, fxq fastest", "time to that of the best other", 0.5, "times") in numbers[1]
    assert ("net, batch 1, fxq fastest, 2 threads", "time to get ready", 9.0, "s") in numbers[2]
