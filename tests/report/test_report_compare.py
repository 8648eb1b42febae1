"""The page of two quantized models in a browser: layers side by side, what runs as something else, both graphs."""

import pytest

import fxq
from tests.support.browser import opened
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build

pytestmark = pytest.mark.any_cpu


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A comparison of two recipes, the second of which leaves one layer in float, and its page."""
    model, data = build("residual"), [batch("residual")]
    a = fxq.quantize(model, REFERENCE, data=data)
    b = fxq.quantize(model, REFERENCE.override("head", fxq.FLOAT), data=data)
    comparison = fxq.compare(a, b, data)
    return comparison, comparison.report(tmp_path_factory.mktemp("pair") / "report.html")


def column(page, key):
    index = page.locator("#view-layers th").evaluate_all(f"cells => cells.findIndex(c => c.dataset.key === '{key}')")
    return page.locator("#view-layers tbody tr").evaluate_all(
        f"rows => rows.map(r => r.cells[{index}].innerText.trim())"
    )


def test_every_layer_has_a_mark_for_either_side_and_a_row(browser, pair):
    comparison, path = pair
    with opened(browser, path) as page:
        marks = page.locator('[aria-label^="SQNR of each layer in a and in b"] g[aria-label="dot"] > *')
        assert marks.count() == sum((row.sqnr_a is not None) + (row.sqnr_b is not None) for row in comparison)
        assert column(page, "sqnr_a") == [f"{row.sqnr_a:.1f}" for row in comparison]
        assert column(page, "precision_b") == [row.precision_b for row in comparison]
        assert f"{comparison.output_sqnr:.1f} dB" in page.locator(".tiles").inner_text()


def test_layers_sort_by_what_b_is_better_by(browser, pair):
    comparison, path = pair
    with opened(browser, path) as page:
        header = page.locator('#view-layers th[data-key="gain"]')
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == "descending"
        gains = sorted((row.sqnr_b - row.sqnr_a for row in comparison), reverse=True)
        assert [float(text.replace("−", "-")) for text in column(page, "gain")] == pytest.approx(gains, abs=0.051)


def test_what_runs_as_something_else_says_why(browser, pair):
    comparison, path = pair
    apart = [row for row in comparison if row.precision_a != row.precision_b]
    with opened(browser, path) as page:
        items = page.locator(".apart li")
        assert items.count() == len(apart)
        assert "the recipe says float" in items.filter(has_text="head").inner_text()


def test_recipes_stand_side_by_side_and_lines_that_differ_are_marked(browser, pair):
    _, path = pair
    with opened(browser, path) as page:
        recipes = page.locator("pre.recipe")
        assert recipes.count() == 2
        assert recipes.nth(0).locator("mark").count() == 0
        assert 'path = "head"' in recipes.nth(1).locator("mark").all_inner_texts()[1]


@pytest.mark.slow
def test_a_layer_leads_to_both_graphs(browser, pair):
    comparison, path = pair
    (b,) = comparison.models[1:]
    with opened(browser, path) as page:
        page.locator("#view-layers tbody tr").nth(1).press("Enter")
        page.evaluate("fxq.painted()")
        stats = page.evaluate("fxq.stats()")
        assert (stats["pass"], stats["mode"]) == ("b", "side")
        (into,) = [entry.into for entry in b.ledger if entry.name == comparison[1].name]
        assert page.locator("#panel").get_attribute("data-node") == into
        assert page.locator('[data-side="before"]').inner_text().strip() == "a"
        assert page.locator("#timeline b").all_inner_texts() == ["traced", "a", "b"]
