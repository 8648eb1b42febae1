"""How much memory is free: of the machine, and what its control group allows."""

import pytest

from fxq.common import free_memory

MACHINE = 1000 * 4096


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"memory.max": "3000\n", "memory.current": "1000\n"}, 2000),
        ({"memory.max": "1000\n", "memory.current": "3000\n"}, 0),
        ({"memory.max": "max\n", "memory.current": "1000\n"}, MACHINE),
        ({"memory.max": f"{2**60}\n", "memory.current": "1000\n"}, MACHINE),
        ({"memory/memory.limit_in_bytes": "3000\n", "memory/memory.usage_in_bytes": "500\n"}, 2500),
        ({"memory.max": "3000\n"}, MACHINE),
        ({"memory.max": "nonsense", "memory.current": "1000\n"}, MACHINE),
        ({}, MACHINE),
    ],
)
def test_a_limit_counts_and_not_what_the_host_has(tmp_path, monkeypatch, files, wanted):
    monkeypatch.setattr(
        free_memory.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__, raising=False
    )
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert free_memory.free_bytes(tmp_path) == wanted


def test_systems_that_do_not_tell(tmp_path, monkeypatch):
    def unknown(name):
        raise ValueError(f"unrecognized configuration name: {name}")

    monkeypatch.setattr(free_memory.os, "sysconf", unknown, raising=False)
    assert free_memory.free_bytes(tmp_path) is None
    monkeypatch.delattr(free_memory.os, "sysconf")
    assert free_memory.free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("3000")
    (tmp_path / "memory.current").write_text("1000")
    assert free_memory.free_bytes(tmp_path) == 2000
