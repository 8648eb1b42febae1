"""Measured costs: what is measured, when, and how it is kept."""

import json
import logging

import pytest

from fxq import costs
from fxq.costs import Costs, measure


def never():
    raise AssertionError("this was measured before")


def counted(calls, result=None):
    """A `prepare` whose call counts itself."""
    return lambda: lambda: calls.append(result)


def test_measure_goes_on_until_runs_agree(monkeypatch):
    """The clock of a busy machine: most runs are interrupted."""
    runs = iter([0.5, 0.5, 3.0, 1.0, 1.1, 5.0, 1.2, 9.0, 1.05, 7.0, 1.2, 0.1])  # the first two are left out
    now = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(costs, "LONGEST", 1e9)

    def call():
        now[0] += next(runs)

    assert measure(call) == pytest.approx(1.0)
    assert list(runs) == [9.0, 1.05, 7.0, 1.2, 0.1]


def test_measure_gives_up_in_the_end(monkeypatch):
    lengths = iter(range(10**6))
    now = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 0.01 * 2 ** next(lengths)

    assert measure(call) == pytest.approx(0.04)


def test_a_cost_is_measured_once(tmp_path):
    known, calls = Costs(tmp_path / "costs.json"), []
    assert "conv" not in known
    first = known.seconds("conv", counted(calls))
    assert calls and "conv" in known
    assert known.seconds("conv", never) == first


def test_costs_are_kept_between_sessions(tmp_path):
    path = tmp_path / "deep" / "costs.json"
    one, other = Costs(path), Costs(path)
    seconds = one.seconds("conv", counted([]))
    one.save()
    other.seconds("linear", counted([]))
    other.save()  # does not forget what the first one wrote
    assert Costs(path).known == {"conv": seconds, "linear": other.known["linear"]}
    assert json.loads(path.read_text())["machine"] == costs.machine()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"seconds": [1]}', '{"seconds": {"a": "b"}}', '{"seconds": {"a": null}}']
)
def test_a_broken_file_is_measured_anew(tmp_path, text, caplog):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "fxq"):
        known = Costs(path)
    assert "not readable" in caplog.text and known.known == {}
    known.seconds("conv", counted([]))
    known.save()
    assert list(Costs(path).known) == ["conv"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    known = Costs(tmp_path / "file" / "costs.json")
    known.seconds("conv", counted([]))
    with caplog.at_level(logging.INFO, "fxq"):
        known.save()
    assert "are not kept" in caplog.text


def test_sizes_between_powers_of_four_lie_on_a_line(monkeypatch):
    monkeypatch.setattr(costs, "measure", lambda call, cold: call() if cold else 0.0)
    known, asked = Costs(), []

    def prepare(size):
        asked.append(size)
        return lambda: 10.0 + size

    assert [known.of_size("add", n, prepare) for n in (64, 100, 255)] == pytest.approx([74.0, 110.0, 265.0])
    assert asked == [64, 256]
    assert known.of_size("add", 0, prepare) == pytest.approx(26.0)  # 16 elements are the least


def test_the_file_belongs_to_this_machine(monkeypatch):
    monkeypatch.undo()
    here = costs.Costs.__mro__  # the class itself is not patched, `machine_costs` is
    assert object in here
    before = costs.machine()
    monkeypatch.setattr(costs, "cpu_name", lambda: "another CPU")
    assert costs.machine() != before
