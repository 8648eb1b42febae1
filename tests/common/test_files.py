"""Files that a person asked for: folders are made, and what cannot be written is said."""

import os
import threading

import pytest

from fxq.common.files import as_path, check_writable, replacing, write_file
from fxq.errors import InputError, RenderError
from tests.support.processes import full_disk

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("path", [None, 3, b"name", ["a"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InputError, match="named by a str or a path, not by"):
        as_path(path)


def test_missing_folders_are_made_and_a_file_is_replaced(tmp_path):
    path = as_path(str(tmp_path / "a" / "b" / "c.bin"))
    assert write_file(path, b"much longer than the next") == path
    write_file(path, b"short")
    assert path.read_bytes() == b"short"


def test_what_cannot_be_written_is_an_error_of_fxq(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RenderError, match=r"cannot write .*file.inside: "):
        write_file(tmp_path / "file" / "inside", b"")
    with pytest.raises(RenderError, match=r"cannot write '.*\\x00': "):
        write_file(tmp_path / "\0", b"")


def _replace(path, data):
    with replacing(path) as file:
        file.write(data)


def test_a_file_is_there_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "a" / "c.bin"
    _replace(path, b"old")

    def crash(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", crash)
        with pytest.raises(RenderError, match=r"cannot write .*c.bin: Input/output error"):
            _replace(path, b"new")
    assert path.read_bytes() == b"old"
    _replace(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in path.parent.iterdir()] == ["c.bin"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_file(tmp_path / "c.bin", b"old")
    with full_disk(1000), pytest.raises(RenderError, match=r"cannot write .*c.bin: File too large"):
        write_file(path, b"x" * 2000)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["c.bin"]


def test_what_fails_inside_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_file(tmp_path / "c.bin", b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["c.bin"]


def test_many_threads_write_one_path(tmp_path):
    path, wrong = tmp_path / "c.bin", []
    contents = [bytes([65 + i]) * 100_000 for i in range(8)]

    def write(data):
        try:
            for _ in range(10):
                write_file(path, data)
                if path.read_bytes() not in contents:
                    wrong.append("not one of them")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and os.listdir(tmp_path) == ["c.bin"]


def test_no_other_file_is_written_through_a_foreseen_name(tmp_path, monkeypatch):
    """The temporary file is created, never opened where there is one."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / ".fxq-known").symlink_to(tmp_path / "target")
    with pytest.raises(RenderError, match="File exists"):
        write_file(tmp_path / "c.bin", b"new")
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_links_devices_and_long_names(tmp_path):
    (tmp_path / "v1").write_bytes(b"old")
    (tmp_path / "current").symlink_to("v1")
    write_file(tmp_path / "current", b"new")
    assert (tmp_path / "current").is_symlink() and (tmp_path / "v1").read_bytes() == b"new"
    write_file(as_path("/dev/null"), b"data")
    assert not as_path("/dev/null").is_file()
    assert write_file(tmp_path / ("n" * 255), b"data").read_bytes() == b"data"
    mask = os.umask(0o022)
    try:
        assert write_file(tmp_path / "shared", b"").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_whether_a_file_can_be_written(tmp_path):
    check_writable(tmp_path / "a" / "b.bin")
    assert os.listdir(tmp_path / "a") == []
    with pytest.raises(RenderError, match="it is a folder"):
        check_writable(tmp_path)
    (tmp_path / "file").write_bytes(b"old")
    check_writable(tmp_path / "file")
    check_writable(as_path("/dev/null"))
    assert (tmp_path / "file").read_bytes() == b"old"
    with pytest.raises(RenderError, match="cannot write"):
        check_writable(tmp_path / "file" / "inside")
