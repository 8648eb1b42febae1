from fxq.display.tables import Column, Table, bar, line, plain, row, text, visible


def test_a_table_is_aligned_and_a_line_is_joined():
    table = Table((Column("name"), Column("n", "right")), (row("a", "1"), row("longer", text("200", "strong"))))
    assert plain([line("two ", text("rows", "added")), table]).splitlines() == [
        "two rows",
        "name      n",
        "------  ---",
        "a         1",
        "longer  200",
    ]


def test_without_headers_it_is_a_list():
    assert plain([Table((Column(), Column()), (row("-", "a"), row("+", "b")))]) == "-  a\n+  b"


def test_what_is_for_the_eye_only_is_left_out():
    columns = (Column("a"), Column("time", extra=True), Column("tag", extra=True))
    assert plain([Table(columns, (row("1", bar(8, (1.0, "op")), "int8"),))]).split() == ["a", "---", "1"]


def test_numbers_stay_as_they_are_written():
    assert plain([Table((Column("v"),), (row("1e3"), row("0x10"), row("007")))]).split()[2:] == [
        "1e3",
        "0x10",
        "007",
    ]


def test_nothing_to_say():
    assert plain([]) == "" and plain([Table((Column("a"),), ())]).split() == ["a", "---"]
    assert plain([Table((), ())]) == ""


def test_line_breaks_only_in_a_column_that_folds():
    columns = (Column("name"), Column("why", give="fold"))
    table = Table(columns, (row("a\nb", text("first\nsecond", breaks=True)),))
    assert plain([table]).splitlines()[2:] == ["a b     first", "        second"]


def test_names_are_data():
    """Control sequences, characters without width, and marks that reverse the text direction are removed."""
    assert visible("a\x1b[31mred\x07\tb\r\nc") == "a [31mred b c"
    assert visible("abc\u202edef\u200b\ud800!") == "abc def  !"
    assert visible("卷积 [red] ×") == "卷积 [red] ×"
    evil = text("\x1b[2J")
    assert plain([evil, Table((Column(),), ([evil],))]).split() == ["[2J", "[2J"]


def test_bars_end_on_an_eighth_and_pieces_add_up():
    def drawn(*pieces):
        return bar(8, *pieces).plain

    assert drawn((0.5, "op")) == "████"
    assert drawn((1 / 64, "op")) == "▏"
    assert drawn((0.26, "op"), (0.5, "int8"), (0.24, "float")) == "████████"
    assert drawn((0.0, "op")) == drawn() == ""
