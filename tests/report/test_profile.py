"""Where the time of a model goes: a row for every node, and for every layer that an engine runs of a region."""

import pytest
import torch

import fxq
from fxq.backends.engine import EngineBackend
from fxq.common.data import Batch
from fxq.report.latency import profile_of
from fxq.report.report import report_data
from tests.support.browser import opened
from tests.support.machine import quiet
from tests.support.models import batch, build

pytestmark = [pytest.mark.any_cpu, pytest.mark.usefixtures("one_round")]


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def engine(request):
    """A model of one region."""
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))
        recipe = fxq.Recipe.static(backend=request.param, optimize="coverage").with_min_sqnr(None)
        return fxq.quantize(build("residual"), recipe, data=[torch.randn(64, 3, 16, 16)])


def region(qmodel):
    (region_node,) = [node for node in qmodel.history[-1].graph if node.is_region]
    return region_node


def test_kernels_are_a_row_each(qmodel):
    profiled = qmodel.profile(example_inputs=batch("residual"))
    assert [row.node for row in profiled] == [n.name for n in qmodel.graph.nodes if n.op.startswith("call")]
    views = qmodel.history[-1].graph
    assert all((row.layer, row.op, row.kind) == ("", views[row.node].label, views[row.node].kind) for row in profiled)
    assert all(row.us > 0 for row in profiled)
    assert profiled.batch.startswith("float32[4, 3, 8, 8], ")


def long(layers):
    """The convolutions: OpenVINO tells nothing of a layer that took less than a microsecond, as the others may."""
    convolutions = [layer for layer in layers if "Conv" in layer[1]]
    assert len(convolutions) == 5
    return convolutions


@pytest.mark.one_in(2)
def test_a_region_has_a_row_for_each_of_its_layers(engine):
    node = region(engine)
    profiled = engine.profile()
    layers = [row for row in profiled if row.node == node.name]
    told = [(row.layer, row.op, row.dtype, row.kind) for row in layers]
    rows = [(" + ".join(layer.nodes), layer.op, layer.dtype, layer.kind) for layer in node.layers]
    assert long(told) == long(rows)
    assert len(layers) > 3 and sum(row.us for row in layers) > 0
    assert profiled.sort("us", reverse=True)[0].us == max(row.us for row in profiled)
    text = profiled.to_text()
    assert all(row.op in text for row in layers) and profiled.batch in text


@pytest.mark.slow
def test_other_inputs_are_timed_anew(engine):
    small, large = (sum(row.us for row in engine.profile(example_inputs=torch.randn(n, 3, 8, 8))) for n in (1, 256))
    assert large > small


def test_inputs_that_the_model_refuses(engine):
    with quiet(), pytest.raises(fxq.InputError, match="the model does not run on"):
        engine.profile(example_inputs=torch.randn(4, 3, 8, 8, 2))


@pytest.mark.one_in(2)
def test_a_profile_leaves_the_model_as_it_is(engine):
    x = batch("residual")
    want, state = engine(x), torch.get_rng_state()
    profile_of(engine, Batch((x,)))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(engine(x), want)


@pytest.mark.one_in(2)
def test_the_page_has_the_layers(engine):
    data, node = report_data(engine), region(engine)
    (record,) = [data["nodes"][i] for i in data["passes"][-1]["nodes"] if data["nodes"][i]["name"] == node.name]
    assert [tuple(layer) for layer in record["layers"]] == [tuple(layer) for layer in node.layers]
    timed = [op for op in data["time"]["ops"] if op["name"] == node.name]
    told = [(op["layer"], op["label"], op["kind"]) for op in timed]
    rows = [(" + ".join(layer.nodes), layer.op, layer.kind) for layer in node.layers]
    assert long(told) == long(rows)


INSIDE = """name => {
  const { scene } = fxq.panes.after.picture();
  const found = [];
  const collect = (child) => {
    if (child.children) child.children.forEach(collect);
    else found.push([child.name, child.box.lines.map((line) => line.text)]);
  };
  collect(scene.groups.get(`region ${name} `));
  return found;
}"""
TOGGLE = """name => {
  const { scene, places } = fxq.panes.after.picture();
  const placed = places.get(fxq.shown(scene.items.get(name)));
  const at = fxq.where(name), { k } = fxq.panes.after.view();
  return [at.x + (placed.width / 2 - 14) * k, at.y];
}"""


@pytest.mark.one_in(2)
def test_a_region_opens(engine, browser, tmp_path):
    """In the graph: into the qdq graph that it was made of, with the times of the engine's layers."""
    node = region(engine)
    before = engine.history[engine.history.names.index("lower") - 1].graph
    with opened(browser, engine.report(tmp_path / "r.html"), "tab=graph") as page:
        assert [box["name"] for box in page.evaluate("fxq.drawn().boxes")] == ["x", f"region {node.name} ", "output"]
        page.mouse.click(*page.evaluate(TOGGLE, node.name))
        drawn = page.evaluate("fxq.drawn()")
        assert f"region {node.name} " in [frame["name"] for frame in drawn["frames"]]
        inside = dict(page.evaluate(INSIDE, node.name))
        assert set(inside) == {n.name for n in before if n.kind not in ("io", "constant")}
        assert {box["name"] for box in drawn["boxes"]} >= set(inside) | {"x", "output"}
        ends = {(wire["from"], wire["to"]) for wire in drawn["wires"]}
        assert {tail for tail, head in ends if head == "output"} <= set(inside)
        assert {head for tail, head in ends if tail == "x"} <= set(inside)
        for layer in node.layers:
            if layer.nodes and layer.nodes[0] in inside:
                assert any(f"s  {layer.op}  {layer.dtype}" in line for line in inside[layer.nodes[0]])
        page.evaluate("fxq.panes.after.focus(['x_q'], 0)")
        page.mouse.click(*page.evaluate("name => { const at = fxq.where(name); return [at.x, at.y]; }", "x_q"))
        assert page.locator("#panel").get_attribute("data-node") == "x_q"
        page.evaluate("fxq.panes.after.fit(0)")
        page.mouse.click(*page.evaluate(TOGGLE, node.name))
        assert len(page.evaluate("fxq.drawn().boxes")) == 3


@pytest.mark.slow
def test_the_panel_of_a_region(engine, browser, tmp_path):
    """It lists the layers; one leads to its op in the qdq graph."""
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
