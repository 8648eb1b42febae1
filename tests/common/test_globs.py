"""Globs: `*` stops at a dot, `**` crosses dots."""

import pytest

from fxq.common.globs import crossing, path_matches, text_matches


@pytest.mark.parametrize(
    ("path", "glob", "matches"),
    [
        ("a.b", "a.*", True),
        ("a.b.c", "a.*", False),
        ("a.b.c", "a.**", True),
        ("a", "a.**", False),
        ("", "*", True),
        ("a.b", "**", True),
        ("dense", "**.dense", True),
        ("x.y.dense", "**.dense", True),
        ("xdense", "**.dense", False),
        ("a.b", "a.**.b", True),
        ("a.x.y.b", "a.**.b", True),
        ("layer.10.conv", "layer.1*.conv", True),
        ("layer.1.0.conv", "layer.1*.conv", False),
        ("layer.1.0.conv", "layer.1**.conv", True),
        ("a.b", "a?b", False),
        ("a1", "a[0-9]", True),
        ("a[0]", "a[[]0]", True),
        ("a]", "a[]]", True),
        ("a^", "a[^]", True),
        ("ac", "a[!c]", False),
        ("ab", "a[!c]", True),
        ("a[", "a[", True),
        ("a\\", "a[\\]", True),
        ("a.b", "A.b", False),
    ],
)
def test_paths(path, glob, matches):
    assert path_matches(path, glob) is matches


def test_text_has_no_borders():
    assert text_matches("float is faster. 3.5 us", "float*us")


def test_the_wider_glob_is_named_where_it_means_something():
    assert crossing("a.*.c", ["a.b.x.c"]) == "a.**.c"
    assert crossing("a.*.c", ["b"]) is None
    assert crossing("a.**.c", ["a.c"]) is None
