"""The report in a browser: the tabs beside the graph, and that names of a model are text whatever they hold."""

import pytest
import torch
from torch import nn

import fxq
from fxq.report.report import report_data, write_page
from tests.support.browser import opened
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu


def chart(page, label):
    """The chart with this label."""
    return page.locator(f'#view-quality svg[aria-label^="{label}"], #view-quality [aria-label^="{label}"]').first


def column(page, key):
    """The texts of a column of the ledger, of the rows that are shown."""
    index = page.locator("#view-ledger th").evaluate_all(f"cells => cells.findIndex(c => c.dataset.key === '{key}')")
    rows = page.locator("#view-ledger tbody tr:not([hidden])")
    return rows.evaluate_all(f"rows => rows.map(r => r.cells[{index}].innerText.trim())")


# ---- quality


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_quality_shows_a_mark_for_every_layer_with_an_sqnr(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    layers = [entry for entry in qmodel.ledger if entry.sqnr is not None]
    with opened(browser, path, "tab=quality") as page:
        marks = chart(page, "SQNR of each layer").locator("g[aria-label=dot] > *")
        assert marks.count() == len(layers)
        tiles = page.locator("#view-quality .tile").all_inner_texts()
        assert f"{qmodel.output_sqnr:.1f} dB" in tiles[0]


def test_a_click_on_a_layer_shows_its_node_in_the_graph(browser, digits):
    qmodel, path = digits
    layers = [entry for entry in qmodel.ledger if entry.sqnr is not None]
    with opened(browser, path, "tab=quality") as page:
        marks = chart(page, "SQNR of each layer").locator("g[aria-label=dot] > *")
        marks.nth(3).hover()
        marks.nth(3).click()
        assert page.evaluate("fxq.state.node") == layers[3].into
        assert page.evaluate("fxq.state.tab") == "graph"


def test_the_noise_that_a_layer_adds_stands_apart(browser, digits):
    qmodel, path = digits
    layers = [entry for entry in qmodel.ledger if entry.sqnr is not None]
    own = [min(10 ** (-entry.own_sqnr / 10), 10 ** (-entry.sqnr / 10)) for entry in layers]
    with opened(browser, path, "tab=quality") as page:
        bars = chart(page, "noise that each layer adds itself").locator("g[aria-label=rect] > rect")
        heights = bars.evaluate_all("bars => bars.map(b => Number(b.getAttribute('height')))")
        assert [h / max(heights) for h in heights] == pytest.approx([o / max(own) for o in own if o > 0], abs=0.01)


@pytest.mark.slow
def test_charts_follow_the_width_of_the_window(browser, digits):
    with opened(browser, digits[1], "tab=quality") as page:
        wide = chart(page, "SQNR of each layer").bounding_box()["width"]
        page.set_viewport_size({"width": 800, "height": 900})
        page.wait_for_timeout(200)
        assert chart(page, "SQNR of each layer").bounding_box()["width"] < wide - 500


@pytest.mark.slow
def test_without_any_sqnr_the_page_says_so(browser, digits, tmp_path):
    data = report_data(digits[0])
    for row in data["ledger"]["rows"]:
        row["sqnr"] = row["own_sqnr"] = None
    with opened(browser, write_page(data, tmp_path / "r.html"), "tab=quality") as page:
        assert "No SQNR is on record" in page.locator("#view-quality").inner_text()
        page.locator('[data-tab="ledger"]').click()
        assert page.locator('#view-ledger th[data-key="sqnr"]').count() == 0


@pytest.mark.slow
def test_numbers_that_are_none_are_drawn(browser, digits, tmp_path):
    data = report_data(digits[0])
    rows = [row for row in data["ledger"]["rows"] if row["sqnr"] is not None]
    for row, value in zip(rows, ("inf", "-inf", "nan"), strict=False):
        row["sqnr"] = row["own_sqnr"] = value
    with opened(browser, write_page(data, tmp_path / "r.html"), "tab=quality") as page:
        assert chart(page, "SQNR of each layer").locator("g[aria-label=dot] > *").count() == len(rows)
        page.locator('[data-tab="ledger"]').click()
        page.locator('#view-ledger th[data-key="sqnr"] button').click()
        assert column(page, "sqnr")[0] == "-inf"
        assert "exact" in column(page, "sqnr")


# ---- ledger


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_the_ledger_has_every_row_and_sorts_by_a_click_and_by_a_key(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    with opened(browser, path, "tab=ledger") as page:
        assert column(page, "layer") == [entry.path or entry.name for entry in qmodel.ledger]
        header = page.locator('#view-ledger th[data-key="macs"]')
        assert header.get_attribute("aria-sort") == "none"
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == "descending"
        most = sorted(qmodel.ledger, key=lambda entry: -entry.macs)
        assert column(page, "op")[:3] == [entry.op for entry in most[:3]]
        header.locator("button").press("Enter")
        assert header.get_attribute("aria-sort") == "ascending"
        assert column(page, "macs")[-1] == ""  # those without a value come last either way
        page.locator('#view-ledger th[data-key="sqnr"] button').click()
        assert header.get_attribute("aria-sort") == "none"
        worst = min((entry for entry in qmodel.ledger if entry.sqnr is not None), key=lambda entry: entry.sqnr)
        assert column(page, "sqnr")[0] == f"{worst.sqnr:.1f}"


def test_the_ledger_is_filtered_by_precision_and_text(browser, digits):
    qmodel, path = digits
    with opened(browser, path, "tab=ledger") as page:
        page.locator('#view-ledger button[data-precision="float"]').click()
        assert column(page, "precision") == ["float"] * qmodel.ledger.count("float")
        assert page.locator("#view-ledger output").inner_text().startswith(f"{qmodel.ledger.count('float')} of ")
        page.locator('#view-ledger button[data-precision="float"]').click()
        page.locator("#ledger-filter").fill("BLOCK2 conv2d")
        wanted = [entry.path for entry in qmodel.ledger.where(op="conv2d", path="block2.**")]
        assert column(page, "layer") == wanted != []


def test_a_float_op_says_why_and_what_would_change_it(browser, digits):
    qmodel, path = digits
    (entry,) = qmodel.ledger.where(path="block2.conv2")
    with opened(browser, path, "tab=ledger") as page:
        row = page.locator("#view-ledger tr", has=page.get_by_text("block2.conv2", exact=True))
        assert entry.reason and entry.reason in row.inner_text()
        assert entry.kind and f"{entry.kind}, by {entry.decided_by}" in row.inner_text()


def test_a_fix_can_be_copied(browser, digits):
    qmodel, path = digits
    entry = next(entry for entry in qmodel.ledger if entry.fix)
    with opened(browser, path, "tab=ledger", permissions=["clipboard-read", "clipboard-write"]) as page:
        row = page.locator("#view-ledger tbody tr", has=page.locator(".copy")).first
        row.hover()
        row.locator(".copy").click()
        row.locator(".copy", has_text="copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == entry.fix
        assert page.evaluate("fxq.state.tab") == "ledger"  # the button does not open the row


@pytest.mark.slow
def test_a_row_shows_its_node_by_click_and_by_key(browser, digits):
    qmodel, path = digits
    with opened(browser, path, "tab=ledger") as page:
        page.locator("#view-ledger tbody tr").nth(0).press("Enter")
        assert page.evaluate("[fxq.state.tab, fxq.state.node]") == ["graph", qmodel.ledger[0].into]
    with opened(browser, path, "tab=ledger") as page:
        page.locator("#view-ledger tbody tr").nth(5).locator("td").nth(2).click()
        assert page.evaluate("[fxq.state.tab, fxq.state.node]") == ["graph", qmodel.ledger[5].into]


# ---- time


def test_time_shows_latency_size_and_where_it_goes(browser, digits):
    qmodel, path = digits
    with opened(browser, path, "tab=time") as page:
        text = page.locator("#view-time").inner_text()
        assert f"{fxq.results.nbytes(qmodel) / 1e3:.3g} kB" in text
        assert "float32[8, 1, 8, 8], 1 thread" in text
        shares = page.locator("#view-time .share").get_attribute("aria-label")
        assert shares.startswith("int8 ") and "q/dq" in shares and "float" in shares
        nodes = page.locator("#view-time [aria-label='most costly nodes'] button").all_inner_texts()
        assert nodes and set(nodes) <= {node.name for node in qmodel.graph.nodes}
        page.get_by_role("button", name=nodes[0], exact=True).click()
        assert page.evaluate("[fxq.state.tab, fxq.state.node]") == ["graph", nodes[0]]


@pytest.mark.slow
def test_a_model_without_weights_is_not_a_number_of_times_smaller(browser, tmp_path):
    qmodel = fxq.quantize(Plain().eval(), REFERENCE, data=[torch.rand(2, 4)])
    with opened(browser, qmodel.report(tmp_path / "r.html"), "tab=time") as page:
        text = page.locator("#view-time").inner_text()
        assert "0 B" in text and "NaN" not in text


class Plain(nn.Module):
    """A model that holds nothing."""

    def forward(self, x):
        return x


def test_what_could_not_be_timed_says_why(browser, tmp_path):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.layer(inputs[1])

    qmodel = fxq.quantize(Nested().eval(), REFERENCE, data=[({1: torch.rand(2, 4)},)])
    with opened(browser, qmodel.report(tmp_path / "r.html"), "tab=time") as page:
        assert "Not timed: input 0 is not a tensor" in page.locator("#view-time").inner_text()


# ---- all of it


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_one_is_chosen(browser, digits, scheme):
    with opened(browser, digits[1], "tab=quality", color_scheme=scheme) as page:
        paper = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 127"
        assert page.evaluate(paper) == (scheme == "light")
        page.locator("#theme").click()
        assert page.evaluate(paper) == (scheme == "dark")


EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def test_names_of_a_model_are_text_on_every_tab(browser, tmp_path):
    model = nn.Sequential()
    model.add_module(EVIL, nn.Linear(4, 4))
    model.add_module("</td><b>&amp;", nn.Linear(4, 4))
    path = fxq.quantize(model.eval(), REFERENCE, data=[torch.rand(2, 4)]).report(tmp_path / "r.html")
    for tab in ("graph", "quality", "ledger", "time"):
        with opened(browser, path, f"tab={tab}") as page:
            page.wait_for_timeout(50)
            assert page.locator("img, td b").count() == 0
            if tab == "ledger":
                assert column(page, "layer") == [EVIL, "</td><b>&amp;"]


@pytest.mark.slow
def test_a_thousand_ops_make_a_ledger_that_sorts_and_filters(browser, digits, tmp_path):
    data = report_data(digits[0])
    rows = [{**data["ledger"]["rows"][0], "op": ("linear", "relu")[i % 2]} for i in range(1200)]
    data["ledger"] = {"coverage": 1.0, "rows": rows}
    with opened(browser, write_page(data, tmp_path / "r.html"), "tab=ledger") as page:
        page.locator('#view-ledger th[data-key="op"] button').click()
        assert column(page, "op") == ["linear"] * 600 + ["relu"] * 600
        page.locator("#ledger-filter").fill("relu")
        assert page.locator("#view-ledger output").inner_text() == "600 of 1200 ops"
