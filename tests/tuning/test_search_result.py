"""Table, JSON and picture of a search result."""

import json
from xml.etree import ElementTree

import pytest

import fxq
from fxq.tuning.search_result import SearchResult, TriedRecipe

ROWS = (
    TriedRecipe("as the recipe says", 20.0, False, 0, 0, 0.0, front=True),
    TriedRecipe("2 layers in float", 31.0, True, 2, 3_000_000, 1500.0),
    TriedRecipe("back on integers: a", 30.5, True, 1, 1_000_000, 400.0, front=True, chosen=True),
)
RESULT = SearchResult(ROWS, fxq.Recipe.static(), ("b",), 30.5, 30.0, 4, 9)


def test_the_table():
    text = str(RESULT)
    assert "+400" in text and "1,000,000" in text and text.count("front") == 3
    assert text.endswith("1 of 4 layers in float, score 30.5, target 30; 9 candidates evaluated, 2.2 per layer")
    assert [row.floats for row in RESULT.front] == [0, 1] and RESULT.reached
    assert RESULT.where(reached=True).sort("extra_us")[0].chosen
    data = json.loads(RESULT.to_json())
    assert data["floats"] == ["b"] and len(data["candidates"]) == 3


@pytest.mark.parametrize("timed", [True, False])
def test_the_picture(tmp_path, timed):
    rows = (
        ROWS if timed else tuple(TriedRecipe(e.change, e.score, e.reached, e.floats, e.float_macs, None) for e in ROWS)
    )
    path = SearchResult(rows, fxq.Recipe.static(), (), 1.0, 2.0, 1, 1).render(tmp_path / "a" / "pareto.svg")
    text = "".join(ElementTree.parse(path).getroot().itertext())
    assert ("milliseconds" in text) == timed and "2 layers in float: 31" in text


def test_another_ending(tmp_path):
    with pytest.raises(fxq.RenderError, match=r"written as \.svg"):
        RESULT.render(tmp_path / "pareto.png")
    with pytest.raises(fxq.InputError):
        RESULT.render(3)
