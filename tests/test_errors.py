"""Names that are near, and warnings that point at the user's line."""

import warnings

import pytest

import fxq
from fxq import errors
from fxq.errors import FxqError, nearest, unknown, warn, warn_once, words_of

pytestmark = pytest.mark.any_cpu


def test_every_error_is_one_of_fxq():
    exceptions = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, FxqError) for e in exceptions if e is not errors.FxqWarning)
    assert {e.__name__ for e in exceptions} <= set(dir(fxq)) | {"NoAttributeError"}


def test_an_unknown_name_is_told_the_nearest_and_all():
    assert nearest("lower", ["lower", "flower", "fuse"])[0] == "lower"
    assert nearest("xyz", ["lower"]) == []
    assert unknown("pass", "xyz", ["b", "a"]) == "unknown pass 'xyz'. Known: a, b."
    assert unknown("pass", 3, []) == "unknown pass '3'. Known: none."


def test_a_warning_points_at_the_line_outside_of_fxq():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("here")
    assert caught[0].filename == __file__ and caught[0].category is fxq.FxqWarning


def test_what_does_not_change_is_told_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_once("only this test says this")
    assert len(caught) == 1


def test_what_fx_adds_to_a_message_is_left_out():
    assert words_of(ValueError("wrong size\n\nWhile executing %add : ...")) == "wrong size"
