"""Colours of text: names clipped and made plain."""

import pytest

from fxq.display.colours import clip, escape

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("text", ["", "\x00", 'a<b>&"\\'])
def test_escaped_text_is_never_empty_nor_markup(text):
    assert escape(text) and not set(escape(text)) & set('<>"\\\x00')


def test_long_names_are_clipped_in_the_middle():
    assert clip("a" * 30 + "b" * 30, 20) == "a" * 13 + "…" + "b" * 6
