"""Table of the decisions between int8 and float for every op that could run as either."""

from fxq.ledger.decisions import Decisions
from fxq.ledger.ledger import Entry

PRICED = {"float_us": 9.0, "int8_us": 4.0}
ENTRIES = (
    Entry("a", "a", "linear", "int8", priced_by="table", conversions_us=1.5, **PRICED),
    Entry("b", "b", "conv2d", "float", reason="float is faster", priced_by="measured", float_us=4.0, int8_us=9.0),
    Entry("s", "s", "softmax", "float", reason="no kernel", float_us=2.0, priced_by="table"),
    Entry("w", "w", "embedding", "weight-only", priced_by="measured", **PRICED),
    Entry("n", "n", "norm", "folded"),
)


def test_rows_are_what_has_two_prices():
    decisions = Decisions.of(ENTRIES)
    assert [(row.name, row.runs, row.by, row.why) for row in decisions] == [
        ("a", "int8", "table", ""),
        ("b", "float", "measured", "float is faster"),
    ]
    assert [row.name for row in decisions.where(by="table")] == ["a"]


def test_it_prints_where_prices_are_from():
    said = str(Decisions.of(ENTRIES))
    assert "2 ops, 1 by measured prices, 1 by the price table" in said
    for word in ("conv2d", "measured", "table", "float is faster", "9.0", "1.5"):
        assert word in said
