"""Measured costs: what is measured, when, and how it is kept."""

import json
import logging
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from fxq.backends import cpu
from fxq.backends.loops.code import compiler
from fxq.cost import cache as costs
from fxq.cost.cache import Costs, measure


def never():
    raise AssertionError("this was measured before")


def counted(calls, result=None):
    """A `prepare` whose call counts itself."""
    return lambda: lambda: calls.append(result)


def test_measure_goes_on_until_runs_agree(monkeypatch):
    """The clock of a busy machine: most runs are interrupted."""
    runs = iter([0.5, 0.5, 3.0, 1.0, 1.1, 5.0, 1.2, 9.0, 1.05, 7.0, 1.2, 0.1])  # the first two are left out
    now = [0.0]
    monkeypatch.setattr(costs, "clock", lambda: lambda: now[0])
    monkeypatch.setattr(costs, "MAX_MEASURE_SECONDS", 1e9)

    def call():
        now[0] += next(runs)

    assert measure(call) == pytest.approx(1.0)
    assert list(runs) == [9.0, 1.05, 7.0, 1.2, 0.1]


def test_measure_gives_up_in_the_end(monkeypatch):
    lengths = iter(range(10**6))
    now = [0.0]
    monkeypatch.setattr(costs, "clock", lambda: lambda: now[0])

    def call():
        now[0] += 0.01 * 2 ** next(lengths)

    assert measure(call) == pytest.approx(0.04)


def test_a_cost_is_measured_once(tmp_path):
    cache, calls = Costs(tmp_path / "costs.json"), []
    assert "conv" not in cache
    first = cache.seconds("conv", counted(calls))
    assert calls and "conv" in cache
    assert cache.seconds("conv", never) == first


def test_released_prices_hold_no_tensors_and_can_be_measured_again():
    cache, weights = Costs(), []

    def prepare():
        weight = torch.ones(64)
        weights.append(weakref.ref(weight))
        return partial(torch.neg, weight)

    price = cache.seconds("linear", prepare)
    assert weights[0]() is not None
    cache.release(["linear", "conv"])  # a price that was never measured has nothing to release
    assert weights[0]() is None and cache.seconds("linear", never) == price
    cache.seconds("linear", prepare)
    cache.settle(["linear"])
    assert len(weights) == 2 and len(cache.rounds["linear"]) > 1


def test_costs_are_kept_between_sessions(tmp_path):
    path = tmp_path / "deep" / "costs.json"
    first, second = Costs(path), Costs(path)
    seconds = first.seconds("conv", counted([]))
    first.save()
    second.seconds("linear", counted([]))
    second.save()  # does not forget what the first one wrote
    assert Costs(path).rounds == {"conv": [seconds], "linear": second.rounds["linear"]}
    assert json.loads(path.read_text())["machine"] == costs.machine()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"machine": {}, "rounds": [1]}']
    + ['{"machine": {}, "rounds": {"a": ' + rounds + "}}" for rounds in ('"b"', "null", "[]", "1")],
)
def test_a_broken_file_is_measured_anew(tmp_path, text, caplog):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "fxq"):
        cache = Costs(path)
    assert "cannot be read" in caplog.text and cache.rounds == {}
    cache.seconds("conv", counted([]))
    cache.save()
    assert list(Costs(path).rounds) == ["conv"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = Costs(tmp_path / "file" / "costs.json")
    cache.seconds("conv", counted([]))
    with caplog.at_level(logging.INFO, "fxq"):
        cache.save()
    assert "are not stored" in caplog.text


def test_sizes_between_powers_of_four_lie_on_a_line(monkeypatch):
    monkeypatch.setattr(costs, "measure", lambda call, cold: call() if cold else 0.0)
    cache, asked = Costs(), []

    def prepare(size):
        asked.append(size)
        return lambda: 10.0 + size

    assert [cache.of_size("add", n, prepare) for n in (4096, 5000, 16383)] == pytest.approx([4106.0, 5010.0, 16393.0])
    assert asked == [4096, 16384]
    assert cache.of_size("add", 0, prepare) == pytest.approx(4106.0)  # below, the call is all that counts
    assert cache.of_size("add", 16384, prepare) == pytest.approx(16394.0)


# ---- rounds


@pytest.fixture
def rounds(monkeypatch):
    """`rounds(conv=[...])`: costs whose rounds measure these seconds, one after the other; time passes in sleeping."""
    now = [0.0]
    monkeypatch.setattr(costs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(costs.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def made(**seconds):
        left = {key: iter(values) for key, values in seconds.items()}
        monkeypatch.setattr(costs, "measure", lambda call, cold: next(left[call()]))
        cache = Costs()
        for key in seconds:
            cache.seconds(key, lambda key=key: lambda: key)
        return cache

    made.now = now
    return made


def test_what_two_rounds_agree_on_is_sure(rounds, monkeypatch):
    monkeypatch.setattr(costs, "MAX_ROUNDS", 5)
    cache = rounds(quiet=[1.0, 1.05, 1.3], noisy=[2.0, 3.0, 4.0, 1.0, 1.02], wild=[16.0, 8.0, 4.0, 2.0, 1.0])
    cache.settle()
    assert cache.rounds == {
        "quiet": [1.0, 1.05, 1.3],
        "noisy": [2.0, 3.0, 4.0, 1.0, 1.02],
        "wild": [16.0, 8.0, 4.0, 2.0, 1.0],
    }
    assert cache.seconds("noisy", never) == 1.0


def test_calls_are_kept_as_long_as_there_is_room(monkeypatch, rounds):
    monkeypatch.setattr(costs, "MAX_CACHED_BYTES", 40)
    calls = []

    def prepare(elements):
        calls.append(elements)
        return partial(lambda x, ys: x, torch.zeros(elements), ys=[torch.zeros(1)])

    cache = rounds()
    monkeypatch.setattr(costs, "measure", lambda call, cold: 1.0)
    for elements in (8, 9, 0):  # 36 bytes fit, no 40 more, 4 do
        cache.seconds(f"{elements}", lambda elements=elements: prepare(elements))
    cache.settle()
    assert calls == [8, 9, 0] + [9] * (costs.MIN_ROUNDS - 1)


def test_rounds_are_not_back_to_back(rounds):
    cache = rounds(conv=[1.0] * 9)
    cache.settle()
    assert len(cache.rounds["conv"]) == costs.MIN_ROUNDS and rounds.now[0] >= costs.MIN_ROUND_INTERVAL * (
        costs.MIN_ROUNDS - 2
    )


def test_conversions_get_all_rounds(monkeypatch, rounds):
    cache = rounds()
    monkeypatch.setattr(costs, "measure", lambda call, cold: 1.0)
    cache.seconds("quantize", lambda: None, cold=True)
    cache.settle()
    assert cache.rounds["quantize"] == [1.0] * costs.MAX_ROUNDS


def test_patience_ends(monkeypatch, rounds):
    monkeypatch.setattr(costs, "MAX_EXTRA_SECONDS", 2.5 * costs.MIN_ROUND_INTERVAL)
    cache = rounds(conv=[2.0, 1.0, 0.5, 0.25, 0.1])
    cache.settle()
    assert 1 < len(cache.rounds["conv"]) < costs.MAX_ROUNDS


def test_what_an_earlier_session_was_sure_of_stays(tmp_path, monkeypatch, caplog):
    """Else the same network would become another model when it is quantized again."""
    path = tmp_path / "costs.json"
    costs.write_rounds(path, {"sure": [1.0, 1.0, 1.0], "unsure": [1.0, 2.0, 4.0]})
    monkeypatch.setattr(costs, "MIN_ROUND_INTERVAL", 0.0)
    monkeypatch.setattr(costs, "MAX_ROUNDS", 5)
    monkeypatch.setattr(costs, "measure", lambda call, cold: 3.0)
    cache = Costs(path)
    for key in ("sure", "unsure"):
        cache.seconds(key, counted([]))
    with caplog.at_level(logging.INFO, "fxq"):
        cache.settle()
    cache.save()
    assert Costs(path).rounds == {"sure": [1.0, 1.0, 1.0], "unsure": [1.0, 2.0, 4.0, 3.0, 3.0]}
    assert "1 of 2 prices differ from round to round" in caplog.text


# ---- the machine's file


def test_the_file_belongs_to_this_machine(monkeypatch):
    before, path = costs.machine(), costs.machine_path()
    others = {"cpu_name": "another CPU", "has_vnni": not cpu.has_vnni(), "has_amx": not cpu.has_amx()}
    for name, other_machine in others.items():
        with monkeypatch.context() as patch:
            patch.setattr(cpu, name, lambda other_machine=other_machine: other_machine)
            assert costs.machine() != before and costs.machine_path() != path
    for name, value in (
        ("ONEDNN_MAX_CPU_ISA", "SSE41"),
        ("FXQ_CPU_KIND", "another kind"),
        ("NUMBA_CPU_NAME", "generic"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert costs.machine_path() != path


def test_the_machine_is_described_without_loops(monkeypatch):
    """Models whose kernels are PyTorch's need no Numba, which takes long to import."""
    monkeypatch.setattr(compiler, "_loaded", None)  # to call it raises
    assert compiler.installed() in costs.machine()["loops"]


def test_edited_kernels_have_prices_of_their_own(tmp_path, monkeypatch):
    package = tmp_path / "fxq"
    shutil.copytree(Path(costs.__file__).parents[1], package, ignore=shutil.ignore_patterns("page", "__pycache__"))
    monkeypatch.setattr(costs, "__file__", str(package / "cost" / "cache.py"))

    def code():
        costs.kernels_code.cache_clear()
        return costs.kernels_code()

    try:
        before = code()
        (package / "model.py").write_text("# edited")  # takes no part in what is measured
        assert code() == before
        for name in ("backends/x86/onednn_conv.py", "ops/pointwise.py", "runtime/binding.py"):
            (package / name).write_text((package / name).read_text() + "\n# edited\n")
            assert code() != before
            before = code()
    finally:
        costs.kernels_code.cache_clear()


def test_what_was_measured_in_cpu_time_is_kept_however_busy_the_machine_is(tmp_path, monkeypatch):
    """By the wall clock, only what rounds agree on."""
    for cpu_time in (True, False):
        path = tmp_path / f"{cpu_time}.json"
        monkeypatch.setattr(costs, "counts_cpu_time", lambda cpu_time=cpu_time: cpu_time)
        cache = Costs(path)
        cache.seconds("once", counted([]))
        cache.seconds("agreed", counted([]))
        cache.rounds["agreed"] = [1.0, 1.0, 1.0]
        cache.save()
        assert set(costs.read_rounds(path)) == ({"once", "agreed"} if cpu_time else {"agreed"})
