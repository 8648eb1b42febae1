"""Tables that can be asked, on a ledger: chosen, sorted, and written as JSON and CSV."""

import csv
import io
import json
from dataclasses import replace

import pytest

import fxq
from fxq.ledger.ledger import Entry
from tests.support.ledgers import SOME, names


def test_where():
    assert names(SOME.where(precision="float")) == ["s", "h"]
    assert names(SOME.where(precision="float", op="linear")) == ["h"]
    with pytest.raises(
        fxq.InputError, match=r"function of an entry, .* not 'float': ledger.where\(precision=\"float\"\)"
    ):
        SOME.where("float")
    assert names(SOME.where(path="layer1.*")) == ["a", "r"]
    deeper = replace(SOME, entries=tuple(replace(e, path=f"body.{e.path}") for e in SOME.entries))
    assert not deeper.where(path="body.*.*.*") and names(deeper.where(path="**.layer1.**")) == ["a", "r"]
    assert names(SOME.where(op=("relu", "silu"))) == ["r", "s"]
    assert names(SOME.where(lambda e: e.macs > 0, precision="int8")) == ["a"]
    assert names(SOME.where(sqnr=None)) == ["a", "d"]
    assert SOME.where().entries == SOME.entries


def test_sort_puts_the_worst_first_and_the_unknown_last():
    assert names(SOME.sort("sqnr")) == ["h", "r", "s", "a", "d"]
    assert names(SOME.sort("sqnr", reverse=True)) == ["s", "r", "h", "a", "d"]
    assert names(SOME.sort("own_sqnr"))[0] == "r" == names(SOME.where(lambda e: e.own_sqnr is not None))[0]
    assert names(SOME.sort("macs", reverse=True))[:2] == ["a", "h"]
    assert names(SOME.sort("op")) == ["a", "d", "h", "r", "s"]


@pytest.mark.parametrize("ask", [lambda: SOME.sort("sqrn"), lambda: SOME.where(sqrn=3)])
def test_unknown_fields(ask):
    with pytest.raises(fxq.FxqError, match="unknown field of the ledger 'sqrn'; did you mean 'sqnr'"):
        ask()


@pytest.mark.parametrize(
    "ask",
    [lambda x: x.where(precision="flaot"), lambda x: x.where(precision=["int8", "flaot"]), lambda x: x.count("flaot")],
)
def test_unknown_precisions(ask):
    with pytest.raises(fxq.InputError, match="unknown precision 'flaot'; did you mean 'float'"):
        ask(SOME)


def test_json(tmp_path):
    text = SOME.to_json(tmp_path / "ledger.json")
    assert (tmp_path / "ledger.json").read_text(encoding="utf-8") == text
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["coverage"] == 0.9
    assert [row["name"] for row in data["ops"]] == ["a", "r", "s", "d", "h"]
    assert list(data["ops"][0]) == list(SOME.fields)
    assert [row["sqnr"] for row in data["ops"]] == [None, 30.5, "inf", None, 9]
    assert data["ops"][1]["own_sqnr"] == 41.25


def test_csv(tmp_path):
    text = SOME.to_csv(tmp_path / "new" / "ledger.csv")
    assert (tmp_path / "new" / "ledger.csv").read_text(encoding="utf-8") == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == list(SOME.fields)
    assert [row["sqnr"] for row in rows] == ["", "30.5", "inf", "", "9"]
    assert [row["own_sqnr"] for row in rows] == ["", "41.25", "", "", ""]
    assert rows[0]["fix"] == "recipe.override('layer1.conv', fxq.FLOAT)"


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(fxq.RenderError, match="cannot write"):
        SOME.to_json(tmp_path / "file" / "ledger.json")
    with pytest.raises(fxq.InputError, match="named by a str or a path, not by 3"):
        SOME.to_csv(3)


def test_dicts():
    assert [Entry(**row) for row in SOME.to_dicts()] == list(SOME)
