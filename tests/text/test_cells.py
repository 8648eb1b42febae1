from fxq.text.cells import Cell, Column, Table, cells, plain, visible


def test_a_table_is_aligned_and_a_line_is_joined():
    table = Table((Column("name"), Column("n", "right")), (cells("a", "1"), cells("longer", Cell("200", "strong"))))
    assert plain([cells("two ", Cell("rows", "added")), table]).splitlines() == [
        "two rows",
        "name      n",
        "------  ---",
        "a         1",
        "longer  200",
    ]


def test_without_headers_it_is_a_list():
    assert plain([Table((Column(), Column()), (cells("-", "a"), cells("+", "b")))]) == "-  a\n+  b"


def test_what_is_for_the_eye_only_is_left_out():
    columns = (Column("a"), Column("time", extra=True, bars=8), Column("tag", extra=True))
    assert plain([Table(columns, (cells("1", Cell(bar=((1.0, "op"),)), "int8"),))]).split() == ["a", "---", "1"]


def test_numbers_stay_as_they_are_written():
    assert plain([Table((Column("v"),), (cells("1e3"), cells("0x10"), cells("007")))]).split()[2:] == [
        "1e3",
        "0x10",
        "007",
    ]


def test_nothing_to_say():
    assert plain([]) == "" and plain([Table((Column("a"),), ())]).split() == ["a", "---"]
    assert plain([Table((), ())]) == ""


def test_line_breaks_only_in_a_column_that_folds():
    table = Table((Column("name"), Column("why", give="fold")), (cells("a\nb", "first\nsecond"),))
    assert plain([table]).splitlines()[2:] == ["a b     first", "        second"]


def test_names_are_data():
    """What a terminal would obey, what has no width, and what turns the line around."""
    assert visible("a\x1b[31mred\x07\tb\r\nc") == "a [31mred b c"
    assert visible("abc\u202edef\u200b\ud800!") == "abc def  !"
    assert visible("卷积 [red] ×") == "卷积 [red] ×"
    evil = cells("\x1b[2J")
    assert plain([evil, Table((Column(),), (evil,))]).split() == ["[2J", "[2J"]
