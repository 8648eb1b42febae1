"""Panels of the report for a node, a rewrite and a near miss, in a browser, compared with the history."""

import pytest
import torch
from torch import nn

import fxq
from tests.support.browser import opened
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu


def shown(page):
    """The text of the panel, once its charts are drawn."""
    page.evaluate("fxq.painted()")
    return page.locator("#panel").inner_text()


# ---- a node


def test_the_histogram_of_a_node_shows_what_is_clipped(browser, digits):
    qmodel, path = digits
    name, seen = next((name, seen) for name, seen in qmodel.record.values.items() if seen.clip is not None)
    (entry,) = qmodel.ledger.where(name=name)
    with opened(browser, path, f"node={entry.into}") as page:
        text = shown(page)
        chart = page.locator('#panel [data-chart="values"]')
        bars = chart.locator('g[aria-label="rect"] > rect')
        assert bars.count() == len(seen.counts)
        assert chart.locator('g[aria-label="rule"][stroke-dasharray] line').count() == 2
        assert f"clipped to {seen.clip[0]:.3g} … {seen.clip[1]:.3g}" in text


def test_a_float_value_has_a_histogram_without_a_clip(browser, digits):
    qmodel, path = digits
    name = next(
        e.name for e in qmodel.ledger if e.name in qmodel.record.values and not qmodel.record.values[e.name].clip
    )
    with opened(browser, path, f"node={name}&pass=trace") as page:
        shown(page)
        text = page.locator('#panel [data-chart="values"]').inner_text()
        assert "values " in text and "clipped" not in text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_a_node_shows_its_error_and_the_rule_that_made_it_of_which_nodes(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    edit = qmodel.history["fuse"].edits[-1]
    (replacement,) = edit.after
    (entry,) = [e for e in qmodel.ledger if e.into == replacement and e.sqnr is not None]
    with opened(browser, path, f"node={replacement}") as page:
        text = shown(page)
        assert f"{entry.sqnr:.1f} dB" in text and f"{entry.own_sqnr:.1f} dB" in text
        step = page.locator("#panel .story li", has=page.get_by_role("button", name="fuse", exact=True))
        told = step.inner_text()
        assert edit.rule in told and edit.source in told
        assert all(name in told for name in edit.before)


# ---- rewrites


def test_a_rewrite_names_its_nodes_in_the_order_in_which_they_run(browser, digits):
    qmodel, path = digits
    history = qmodel.history
    before = history[history.names.index("fuse") - 1].graph
    edit = history["fuse"].edits[0]
    went = [node.name for node in before if node.name in edit.before]
    with opened(browser, path, "pass=fuse&rw=0") as page:
        assert page.locator('[data-rewrite="0"]').inner_text() == f"{' + '.join(went)} → {' + '.join(edit.after)}"


def test_rules_that_almost_matched_say_where_and_why(browser, tmp_path):
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x):
            x = self.conv(x)
            return self.norm(x) + x

    qmodel = fxq.quantize(Read().eval(), REFERENCE, data=[torch.rand(2, 2, 4, 4)])
    (miss,) = qmodel.history["fold-batch-norm"].near
    with opened(browser, qmodel.report(tmp_path / "r.html"), "pass=fold-batch-norm") as page:
        near = page.locator("#near")
        near.locator("summary").click()
        near.locator("li button").wait_for()  # filled when it has opened
        text = near.inner_text()
        assert miss.rule in text and miss.source in text and miss.reason in text
        near.locator("li button").click()
        assert page.locator("#panel").get_attribute("data-node") == miss.node


# ---- against the diff of the history


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_every_pass_adds_and_removes_what_its_diff_does(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    with opened(browser, path, "mode=diff") as page:
        for before, after in zip(qmodel.history, qmodel.history[1:], strict=False):
            difference = fxq.diff(before, after)
            page.evaluate("name => fxq.step(name)", after.name)
            page.evaluate("fxq.painted()")
            marks = page.locator("#changes").inner_text()
            for mark, names, graph in (
                ("+ added", difference.added, after.graph),
                ("− removed", difference.removed, before.graph),
            ):
                count = sum(graph[name].kind != "constant" for name in names)
                assert f"{mark} {count}\n" in f"{marks}\n" if count else mark not in marks, (after.name, marks)


def test_the_report_of_a_large_network_is_a_small_file(resnet50):
    assert resnet50[1].stat().st_size < 3e6
