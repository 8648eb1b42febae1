"""The Tuning tab in a browser: the candidates of a search and the layers that cost most, as tables and charts."""

import re

import pytest

import fxq
from fxq.errors import InputError
from tests.support.browser import opened
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build

pytestmark = pytest.mark.any_cpu


@pytest.fixture(scope="module")
def searched():
    model, data = build("residual"), [batch("residual") for _ in range(2)]
    result = fxq.search(model, REFERENCE, data, target=54.0)
    return result, fxq.quantize(model, result.recipe, data=data)


@pytest.fixture(scope="module")
def path(searched, one_round, tmp_path_factory):
    result, qmodel = searched
    return qmodel.report(tmp_path_factory.mktemp("tuning") / "report.html", tuning=result)


def cells(page, label, key):
    table = page.locator(f'table[aria-label="{label}"]')
    index = table.locator("th").evaluate_all(f"cells => cells.findIndex(c => c.dataset.key === '{key}')")
    return table.locator("tbody tr").evaluate_all(f"rows => rows.map(r => r.cells[{index}].innerText.trim())")


def test_candidates_and_layers_stand_in_tables(browser, path, searched):
    result, _ = searched
    assert len(result) > 3 and result.sensitivity is not None
    with opened(browser, path, "tab=tuning") as page:
        assert cells(page, "candidates", "change") == [row.change for row in result]
        assert cells(page, "candidates", "chosen").index("chosen") == [row.chosen for row in result].index(True)
        assert cells(page, "sensitivity", "layer") == [row.path or row.name for row in result.sensitivity]
        shown = [float(text) for text in cells(page, "sensitivity", "sqnr")]
        assert shown == pytest.approx([row.sqnr for row in result.sensitivity], abs=0.051)
        tiles = page.locator("#view-tuning .tiles").inner_text()
        assert f"{len(result.floats)} of {result.layers}" in tiles


@pytest.mark.slow
def test_every_candidate_and_timed_layer_has_a_mark(browser, path, searched):
    result, _ = searched
    with opened(browser, path, "tab=tuning") as page:
        marks = page.locator('[aria-label="candidates, score against cost"] g[aria-label="dot"] > *')
        assert marks.count() == len(result)
        timed = [row for row in result.sensitivity if row.extra_us is not None]
        marks = page.locator('[aria-label^="layers, share of the noise"] g[aria-label="dot"] > *')
        assert marks.count() == len(timed)


@pytest.mark.slow
def test_a_page_without_such_a_table_has_no_such_tab(browser, searched, one_round, tmp_path):
    result, qmodel = searched
    with opened(browser, qmodel.report(tmp_path / "plain.html")) as page:
        assert page.locator('#tabs [data-tab="tuning"]').count() == 0
    with opened(browser, qmodel.report(tmp_path / "one.html", tuning=result.sensitivity), "tab=tuning") as page:
        assert page.locator('table[aria-label="candidates"]').count() == 0
        assert len(cells(page, "sensitivity", "layer")) == len(result.sensitivity)


def test_something_else_is_refused(searched, tmp_path):
    _, qmodel = searched
    with pytest.raises(InputError, match=re.escape("tuning is a dict; give what fxq.search or fxq.sensitivity")):
        qmodel.report(tmp_path / "r.html", tuning={})
