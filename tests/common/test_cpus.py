"""How many CPUs there are for this process: bound to, or allowed by its control group."""

import pytest

from fxq.common import cpus


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({}, 8),
    ],
)
def test_a_quota_counts_and_not_what_the_host_has(tmp_path, monkeypatch, files, wanted):
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: range(8), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpus.usable_cpus(tmp_path) == wanted


@pytest.mark.parametrize(("share", "busy"), [(1.0, False), (0.5, True)])
def test_a_thread_that_has_its_cpu_for_half_of_the_time_is_held_up(monkeypatch, share, busy):
    now = [0.0]

    def thread_time():
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(cpus.time, "thread_time", thread_time)
    monkeypatch.setattr(cpus.time, "perf_counter", lambda: now[0] / share)
    assert cpus.is_contended() is busy
