"""The progress bar: on stderr where it is asked for or a terminal, nowhere else."""

import io
import sys

import pytest

from fxq.common.progress import progress_bar

pytestmark = pytest.mark.any_cpu


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "show", "shown"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_it_is_shown_on_a_terminal_and_where_it_is_asked_for(terminal, show, shown, monkeypatch, capsys):
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress_bar("calibrating", 2, show) as advance:
        advance()
        advance()
    assert ("calibrating" in stream.getvalue()) is shown
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("total", [3, None])
def test_an_error_inside_comes_out(total):
    with pytest.raises(KeyError), progress_bar("work", total, show=False) as advance:
        advance()
        raise KeyError


def test_where_no_bar_is_shown_the_time_left_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("fxq.common.progress._LOG_EVERY", 0.0)
    with caplog.at_level("INFO", "fxq"), progress_bar("rounding", 40, show=False) as advance:
        advance(10)
        advance()
    messages = [record.message.partition(",")[0] for record in caplog.records]
    assert messages == ["rounding: 25 % done", "rounding: 28 % done"]
    assert "s left" in caplog.text
