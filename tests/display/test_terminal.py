"""Printed output: plain text in a pipe; in a terminal coloured, aligned and no wider than the terminal."""

import io
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from torch import nn

import fxq
from fxq.diagnosis import Diagnosis, LayerCheck
from fxq.display.colours import CHANGES, LOOKS
from fxq.display.tables import Column, Table, bar, row
from fxq.display.terminal import coloured
from fxq.graph.view import GraphView, NodeView
from fxq.ledger.ledger import Entry, Ledger
from fxq.picture.diff import diff
from fxq.pipeline.history import History, Snapshot
from fxq.recipe.pass_base import Stage
from fxq.rewriting.editor import Edit
from tests.support.helpers import REFERENCE, steps

pytestmark = pytest.mark.any_cpu

ESCAPE = re.compile(r"\x1b\[[\d;]*m")
LEDGER = Ledger(
    (
        Entry("stem", "stem", "conv2d", "int8", macs=900_000, sqnr=30.5, float_us=12.0, int8_us=4.25),
        Entry("norm", "norm", "batch_norm", "folded", reason="into stem"),
        Entry("act", "body.0.act", "silu", "float", "act", "there is no kernel for it " * 6, "recipe.x"),
        Entry("deep", ".".join(["module"] * 9), "conv_transpose2d", "int8", macs=10),
    )
)
GRAPH = GraphView(
    (
        NodeView("x", "io", "input", text="x = input"),
        NodeView("a", "int8", "x86.conv", inputs=("x",), text="a = x86.conv(x)", shape=(1, 8), dtype="uint8"),
        NodeView("b", "float", "silu", inputs=("a",), text="b = silu(a)", reason="no kernel"),
        NodeView("c", "of the user's own", "Mine", inputs=("b",), text="c = Mine(b)"),
    ),
    "lower",
)
HISTORY = History(
    [
        Snapshot("trace", 0.2, (), GraphView(GRAPH.nodes[:1], "trace"), Stage.TRACED, 60.0),
        Snapshot("lower", 0.05, (Edit("x86.conv", "f.py:1", (), ("a",)),) * 3, GRAPH, Stage.LOWERED, 20.0),
    ],
    first_loss="lower",
)
DIAGNOSIS = Diagnosis(
    {"CPU": "some " * 30},
    (LayerCheck("x86", "conv2d", "right", ("x86.conv",), 1.0, 2.0, "because " * 20),),
    "x86",
    "it runs",
)
DIFF = diff(HISTORY[0], HISTORY[1])
PRINTED = [HISTORY, HISTORY[1], DIFF, LEDGER, fxq.Recipe.static().pipeline, DIAGNOSIS]


class Stream(io.StringIO):
    """A stdout that says whether it is a terminal."""

    encoding = "utf-8"
    terminal = True

    def isatty(self):
        return self.terminal


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal of some width; call it again for another."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def make(width=100, is_terminal=True, encoding="utf-8", **environment):
        settings = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(width), **environment}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        stream = Stream()
        stream.terminal, stream.encoding = is_terminal, encoding
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return make


def bare(text):
    """Text without colours."""
    return ESCAPE.sub("", text)


def ground(look):
    """The escape code of a badge's ground."""
    return "48;2;" + ";".join(str(int(look.colour[i : i + 2], 16)) for i in (1, 3, 5))


# ---- where there are colours, and where not


@pytest.mark.one_in(6)
@pytest.mark.parametrize("shown", PRINTED, ids=lambda shown: type(shown).__name__)
def test_plain_into_a_pipe_and_in_colour_in_a_terminal(terminal, shown):
    terminal(is_terminal=False)
    plain = str(shown)
    assert plain == shown.to_text() and "\x1b" not in plain
    terminal(width=400)
    assert ESCAPE.search(str(shown)) and "\x1b" not in bare(str(shown))
    assert shown.to_text() == plain
    words = re.findall(r"[a-z_]{4,}", plain)
    assert words and [word for word in words if word not in bare(str(shown))] in ([], ["conversions"])


@pytest.mark.parametrize("shown", PRINTED, ids=lambda shown: type(shown).__name__)
@pytest.mark.parametrize("setting", [{"TERM": "dumb"}, {"TTY_COMPATIBLE": "0"}, {"is_terminal": False}], ids=str)
def test_plain_where_a_terminal_takes_no_colours(terminal, shown, setting):
    terminal(**setting)
    assert str(shown) == shown.to_text()


@pytest.mark.parametrize("shown", PRINTED, ids=lambda shown: type(shown).__name__)
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_stdout_cannot_write_is_a_question_mark(monkeypatch, shown, encoding, is_terminal):
    """A pipe on Windows, a C locale."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    print(shown)
    stream.flush()
    written = stream.buffer.getvalue().decode(encoding)
    assert written == shown.to_text().encode(encoding, "replace").decode(encoding) + "\n"


def test_plain_without_a_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert str(LEDGER) == LEDGER.to_text()


def test_no_color_still_fits(terminal):
    terminal(width=70, NO_COLOR="1")
    text = str(LEDGER)
    assert not re.search(r"\x1b\[[\d;]*[34]8;", text)
    assert cell_len(bare(text).splitlines()[1]) <= 70 < len(LEDGER.to_text().splitlines()[1])


def test_forced_colours_in_a_file_leave_nothing_out(terminal):
    terminal(width=40, is_terminal=False, FORCE_COLOR="1")
    text = str(LEDGER)
    assert ground(LOOKS["int8"]) in text
    assert LEDGER[2].reason.strip() in bare(text)
    assert "…" not in bare(str(HISTORY)) and "x86.conv" in bare(str(HISTORY))


def test_the_palette_is_used(terminal):
    terminal(width=200)
    assert ground(LOOKS["int8"]) in str(LEDGER) and ground(LOOKS["float"]) in str(LEDGER)
    assert ground(LOOKS["convert"]) in str(HISTORY)
    assert ground(CHANGES["removed"]) in str(HISTORY)  # the pass that lost much
    assert ground(CHANGES["removed"]) not in str(replace(HISTORY, first_loss=None))
    assert ground(CHANGES["added"]) in str(DIFF)
    assert ground(CHANGES["added"]) in str(DIAGNOSIS)


# ---- width


@pytest.mark.parametrize("shown", [*PRINTED[:3], LEDGER, DIAGNOSIS], ids=lambda shown: type(shown).__name__)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_nothing_is_wider_than_the_terminal(terminal, shown, width):
    terminal(width=width)
    lines = bare(str(shown)).splitlines()
    apart = [
        i for i, line in enumerate(lines) if re.match(r"\d+ int8|lower is|trace → lower|backend=", line)
    ]  # no table
    assert max(cell_len(line) for i, line in enumerate(lines) if i not in apart) <= width


@pytest.mark.parametrize("width", [50, 80, 120, 300])
def test_columns_stay_aligned(terminal, width):
    terminal(width=width)
    header, _, *rows = bare(str(LEDGER)).splitlines()
    for column, words in (
        ("op", ["conv2d", "batch_norm", "silu", "conv_transpose2d"]),
        ("runs as", ["int8", "folded"]),
    ):
        at = header.index(column)
        cells = [row[at:].strip().split(" ")[0].rstrip("…") for row in rows[:2]]
        assert all(cell and word.startswith(cell) for cell, word in zip(cells, words, strict=False))


def test_a_reason_folds_inside_its_column(terminal):
    terminal(width=90)
    header, _, *rows = bare(str(LEDGER)).splitlines()
    at = header.index("why")
    assert " ".join(row[at:].strip() for row in rows[2:6]).startswith(LEDGER[2].reason.strip()[:60])
    assert all(not row[:at].strip() for row in rows[3:5])


def test_wide_characters_count_twice(terminal):
    terminal(width=60)
    ledger = Ledger((Entry("a", "卷积层.主干", "conv2d", "int8"), Entry("b", "stem", "conv2d", "int8")))
    _, _, wide, narrow, *_ = bare(str(ledger)).splitlines()
    assert cell_len(wide[: wide.index("conv2d")]) == narrow.index("conv2d")


WIDE = Table(
    (
        Column("name", give="start"),
        Column("fixed"),
        Column("bars", extra=True, drop=2),
        Column("why", give="fold", drop=1),
        Column(),
    ),
    (row("n" * 30, "fixed", bar(10, (1.0, "op")), "w" * 60, ""),),
)


@pytest.mark.parametrize(
    ("width", "titles", "sizes"),
    [
        (1000, "name fixed bars why", (30, 60)),
        (111, "name fixed bars why", (30, 60)),
        (90, "name fixed bars why", (30, 39)),  # the widest column gives way
        (61, "name fixed bars why", (20, 20)),
        (60, "name fixed why", (25, 26)),  # the bars go first
        (48, "name fixed", (30, None)),
        (20, "name fixed", (13, None)),
        (10, "name fix…", (4, None)),
    ],
)
def test_what_gives_way(width, titles, sizes):
    lines = bare(coloured([WIDE], Console(file=io.StringIO()), width)).splitlines()
    assert " ".join(lines[0].split()) == titles and max(map(cell_len, lines)) <= width
    name, why = (max(re.findall(f"…?{letter}+", lines[2]), key=len, default="") for letter in "nw")
    assert (len(name), len(why) or None) == sizes


def test_a_path_loses_its_beginning_and_a_name_its_end():
    table = Table((Column(give="start"), Column()), (row("abcdefghij", "abcdefghij"),))
    assert bare(coloured([table], Console(file=io.StringIO()), 12)) == "…hij  abcde…"


def test_linear_in_the_rows(terminal):
    terminal(width=100)

    def work(count):
        ledger = Ledger(tuple(replace(LEDGER[i % 4], name=f"n{i}") for i in range(count)))
        return steps(lambda: str(ledger))

    work(10)
    assert work(80) < 2.3 * work(40)


# ---- names are data


EVIL = "[red]x[/] [/oops] \x1b[2J\x07"


def test_markup_and_control_characters_show_as_text(terminal):
    ledger = Ledger((Entry("a", EVIL, "conv2d", "float", reason=f"because {EVIL}"),))
    graph = GraphView((NodeView(EVIL, "op", EVIL, text=EVIL, reason=EVIL),), EVIL)
    history = History([Snapshot(EVIL, 0.1, (Edit(EVIL, "", (), ()),), graph, Stage.TRACED)], EVIL)
    for shown in (ledger, history, history[0], diff(GraphView(()), graph)):
        terminal(width=200)
        text = str(shown)
        assert "[red]x[/] [/oops]" in bare(text) and "\x1b[2J" not in text and "\x07" not in text
        assert "\x1b" not in shown.to_text() and "[red]x[/] [/oops]" in shown.to_text()


def test_rich_prints_it_without_taking_names_for_markup(terminal):
    stream = terminal(width=120)
    Console(file=stream, width=120).print(Ledger((Entry("a", EVIL, "conv2d", "int8"),)))
    assert "[red]x[/] [/oops]" in bare(stream.getvalue()) and ground(LOOKS["int8"]) in stream.getvalue()


# ---- at a prompt


@pytest.mark.parametrize("shown", PRINTED, ids=lambda shown: type(shown).__name__)
def test_repr_is_short(shown):
    assert re.fullmatch(rf"<{type(shown).__name__}: .+>", repr(shown)) and len(repr(shown)) < 350


def test_ipython_shows_what_print_shows():
    class Printer:
        said = ""

        def text(self, text):
            self.said += text

    printer = Printer()
    LEDGER._repr_pretty_(printer, False)
    assert printer.said == str(LEDGER)


def test_what_is_printed_of_a_real_model(terminal):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.rand(2, 3, 8, 8)])
    terminal(width=100)
    header, _, *rows = bare(str(qmodel.history)).splitlines()
    assert header.split()[:2] == ["pass", "ms"] and [row.split()[0] for row in rows] == qmodel.history.names
    assert any("█" in row for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_in_a_real_terminal(monkeypatch):
    """A process whose stdout is a pseudo-terminal of 64 characters."""
    import fcntl
    import pty
    import struct
    import subprocess
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 64, 0, 0))
    hidden = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"TERM": "xterm-256color"}
    code = "import fxq; print(fxq.Recipe.static().pipeline)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    data = b""
    while chunk := _read(ours):
        data += chunk
    assert process.wait(60) == 0
    lines = data.decode().splitlines()
    assert "\x1b[1mtrace" in lines[0] and 40 < max(cell_len(bare(line)) for line in lines) <= 64


def _read(terminal):
    """Bytes that have arrived; empty when the other end is closed, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
