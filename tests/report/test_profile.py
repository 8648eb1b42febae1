"""Where the time of a model goes: a row for every node, and for every layer that an engine runs of a region."""

import pytest
import torch

import fxq
from fxq.backends.engines.engine import EngineBackend
from fxq.common.data import Batch
from fxq.report.latency import profile_of
from fxq.report.report import report_data
from tests.browser import opened
from tests.machine import quiet
from tests.models import batch, build

pytestmark = [pytest.mark.any_cpu, pytest.mark.usefixtures("one_round")]


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def engine(request):
    """A model of one region."""
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.Prices({}, 0.0))
        recipe = fxq.Recipe.static(backend=request.param, optimize="coverage").with_min_sqnr(None)
        return fxq.quantize(build("residual"), recipe, data=[batch("residual")])


def region(qmodel):
    (found,) = [node for node in qmodel.history[-1].graph if node.is_region]
    return found


def test_kernels_are_a_row_each(qmodel):
    found = qmodel.profile(batch("residual"))
    assert [row.node for row in found] == [n.name for n in qmodel.graph.nodes if n.op.startswith("call")]
    views = qmodel.history[-1].graph
    assert all((row.layer, row.op, row.kind) == ("", views[row.node].label, views[row.node].kind) for row in found)
    assert all(row.us > 0 for row in found)
    assert found.batch.startswith("float32[4, 3, 8, 8], ")


def test_a_region_has_a_row_for_each_of_its_layers(engine):
    node = region(engine)
    found = engine.profile()
    layers = [row for row in found if row.node == node.name]
    assert [(row.layer, row.op, row.dtype, row.kind) for row in layers] == [
        (" + ".join(layer.nodes), layer.op, layer.dtype, layer.kind) for layer in node.layers
    ]
    assert len(layers) > 3 and sum(row.us for row in layers) > 0
    assert found.sort("us", reverse=True)[0].us == max(row.us for row in found)
    text = found.to_text()
    assert all(row.op in text for row in layers) and found.batch in text


def test_other_inputs_are_timed_anew(engine):
    small, large = (sum(row.us for row in engine.profile(torch.randn(n, 3, 8, 8))) for n in (1, 256))
    assert large > small


def test_inputs_that_the_model_refuses(engine):
    with quiet(), pytest.raises(fxq.InputError, match="the model does not run on"):
        engine.profile(torch.randn(4, 3, 8, 8, 2))


def test_a_profile_leaves_the_model_as_it_is(engine):
    x = batch("residual")
    want, state = engine(x), torch.get_rng_state()
    profile_of(engine, Batch((x,)))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(engine(x), want)


def test_the_page_has_the_layers(engine):
    data, node = report_data(engine), region(engine)
    (record,) = [data["nodes"][i] for i in data["passes"][-1]["nodes"] if data["nodes"][i]["name"] == node.name]
    assert [tuple(layer) for layer in record["layers"]] == [tuple(layer) for layer in node.layers]
    timed = [op for op in data["time"]["ops"] if op["name"] == node.name]
    assert [(op["layer"], op["label"], op["kind"]) for op in timed] == [
        (" + ".join(layer.nodes), layer.op, layer.kind) for layer in node.layers
    ]


def test_a_region_opens(engine, browser, tmp_path):
    """Its panel lists the layers; one leads to its op in the qdq graph."""
    node = region(engine)
    first = next(layer for layer in node.layers if layer.kind == "int8")
    with opened(browser, engine.report(tmp_path / "r.html"), "tab=graph") as page:
        page.mouse.click(*page.evaluate("name => { const at = fxq.where(name); return [at.x, at.y]; }", node.name))
        assert page.locator("#panel").get_attribute("data-node") == node.name
        rows = page.locator('#panel .bars [role="listitem"]')
        assert rows.count() == len(node.layers)
        told = rows.all_inner_texts()
        for text, layer in zip(told, node.layers, strict=True):
            assert " + ".join(layer.nodes) in text and layer.dtype in text and layer.op in text
        rows.nth(node.layers.index(first)).locator("button").click()
        assert page.locator("#panel").get_attribute("data-node") == first.nodes[0]
        assert page.evaluate("fxq.state.pass") == engine.history.names[engine.history.names.index("lower") - 1]
