"""The folder of what is kept between processes."""

from pathlib import Path

from fxq.common.cache_folder import cache_folder, chosen_folder


def test_the_environment_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("FXQ_CACHE", str(tmp_path))
    assert cache_folder() == chosen_folder() == tmp_path
    monkeypatch.setenv("FXQ_CACHE", "~/kept")
    assert cache_folder() == Path.home() / "kept"


def test_else_it_is_in_the_users_cache(monkeypatch):
    for empty in (True, False):
        monkeypatch.delenv("FXQ_CACHE", raising=False)
        if empty:
            monkeypatch.setenv("FXQ_CACHE", "")
        assert chosen_folder() is None and cache_folder().name == "fxq"
