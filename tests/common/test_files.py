"""Files that a person asked for: folders are made, and what cannot be written is said."""

import pytest

from fxq.common.files import as_path, replacing, write_file
from fxq.errors import InputError, RenderError

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
