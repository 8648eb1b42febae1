"""The graph of the report in a browser: passes, nodes, diffs, groups and search, against the history."""

import pytest

from tests.support.browser import opened

pytestmark = pytest.mark.any_cpu


def drawn(graph):
    """The nodes of a snapshot's graph that have a box: constants are a line in the box of who reads them."""
    read = {name for node in graph for name in node.inputs}
    return [node for node in graph if not (node.kind == "constant" and node.name in read)]


def shown(page):
    """Content of the graph tab after painting."""
    page.evaluate("fxq.painted()")
    return page.evaluate("fxq.stats()")


def click(page, name, **options):
    """Click the box of a node, or the head of a group, where it is painted."""
    page.evaluate("fxq.painted()")
    place = page.evaluate("name => fxq.where(name)", name)
    page.mouse.click(place["x"], place["y"], **options)


def fact(page, name):
    """A fact of the node's panel."""
    return page.locator(f'#panel [data-fact="{name}"]').first.inner_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_the_arrows_step_through_all_passes(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    with opened(browser, path, f"pass={qmodel.history.names[0]}") as page:
        for snapshot in qmodel.history:
            shown_graph = shown(page)
            assert (shown_graph["pass"], shown_graph["nodes"]) == (snapshot.name, len(drawn(snapshot.graph)))
            assert page.locator('#timeline [aria-current="step"] b').inner_text() == snapshot.name
            page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        assert shown(page)["pass"] == qmodel.history.names[-2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_a_click_on_a_node_shows_its_scale(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    wanted = [node for node in qmodel.history["lower"].graph if node.kind == "convert"][5]
    with opened(browser, path, f"pass=lower&node={wanted.name}") as page:
        page.keyboard.press("Escape")
        assert page.locator("#panel").get_attribute("data-node") == ""
        click(page, wanted.name)
        assert page.locator("#panel").get_attribute("data-node") == wanted.name
        assert (fact(page, "scale"), fact(page, "zero point")) == (wanted.scale, wanted.zero_point)
        assert fact(page, "dtype") == wanted.dtype
        assert fact(page, "shape") == " × ".join(map(str, wanted.shape))


def test_a_layer_shows_where_it_comes_from_and_its_weights(browser, resnet50):
    qmodel, path = resnet50
    layer = qmodel.qparams()["layer2.1.conv2"]
    wanted = qmodel.history[-1].graph[layer.node]
    with opened(browser, path, f"node={layer.node}") as page:
        assert (fact(page, "module"), fact(page, "source")) == (wanted.path, wanted.source)
        assert page.locator('#panel [data-chart="weights"] svg').count() == 2
        assert f"{len(layer.weight_scale)} channels" in page.locator('#panel [data-chart="weights"]').inner_text()


def test_a_float_node_says_why(browser, digits):
    qmodel, path = digits
    (entry,) = qmodel.ledger.where(path="block2.conv2")
    with opened(browser, path, f"node={entry.into}") as page:
        assert fact(page, "reason") == entry.reason


@pytest.mark.one_in(2)
@pytest.mark.parametrize("network", ["digits", "resnet50"])
def test_the_diff_marks_what_a_pass_changed(browser, network, request):
    qmodel, path = request.getfixturevalue(network)
    names = qmodel.history.names
    before = qmodel.history[names.index("fuse") - 1].graph
    after = qmodel.history["fuse"].graph
    added = {n.name for n in drawn(after)} - {n.name for n in before}
    removed = {n.name for n in drawn(before)} - {n.name for n in after}
    with opened(browser, path, "pass=fuse") as page:
        page.locator('[data-mode="diff"]').click()
        shown_graph = shown(page)
        assert (shown_graph["mode"], shown_graph["nodes"]) == ("diff", len(drawn(after)) + len(removed))
        marks = page.locator("#changes").inner_text()
        assert f"+ added {len(added)}" in marks
        assert f"− removed {len(removed)}" in marks


def test_side_by_side_shows_the_graph_before_too(browser, digits):
    qmodel, path = digits
    with opened(browser, path, "pass=fuse") as page:
        before = page.locator('[data-side="before"]')
        assert not before.is_visible()
        page.keyboard.press("s")
        assert shown(page)["mode"] == "side"
        assert before.is_visible()
        assert qmodel.history.names[qmodel.history.names.index("fuse") - 1] in before.inner_text()
        page.keyboard.press("g")
        assert not before.is_visible()


@pytest.mark.slow
@pytest.mark.parametrize(("network", "module"), [("digits", "block1"), ("resnet50", "layer1.0")])
def test_a_module_collapses_and_expands(browser, network, module, request):
    _, path = request.getfixturevalue(network)
    with opened(browser, path, "pass=trace&depth=all") as page:
        everything = shown(page)["boxes"]
        click(page, module, click_count=2)
        collapsed = shown(page)["boxes"]
        assert collapsed < everything
        assert shown(page)["nodes"] > everything - collapsed
        click(page, module, click_count=2)
        assert shown(page)["boxes"] == everything
        page.locator("#collapse-all").click()
        assert shown(page)["boxes"] < collapsed
        page.locator("#expand-all").click()
        assert shown(page)["boxes"] == everything


def test_search_goes_to_what_it_finds(browser, resnet50):
    qmodel, path = resnet50
    names = [n.name for n in drawn(qmodel.history[-1].graph) if "layer3.2" in n.path]
    with opened(browser, path) as page:
        page.keyboard.press("/")
        page.locator("#search").fill("layer3.2")
        assert page.locator("#results [role=option]").count() == len(names)
        page.keyboard.press("Enter")
        assert page.evaluate("fxq.state.node") == names[0]
        page.evaluate("fxq.painted()")
        place = page.evaluate("name => fxq.where(name)", names[0])
        assert 0 < place["x"] < 1440 and 0 < place["y"] < 900  # the view went there


def test_a_rewrite_shows_its_nodes_before_and_after(browser, digits):
    qmodel, path = digits
    edit = qmodel.history["fuse"].edits[0]
    with opened(browser, path, "pass=fuse") as page:
        rule = page.locator(f'[data-rule="{edit.rule}"]')
        assert edit.source in rule.inner_text()
        rule.locator("summary").click()
        page.locator('[data-rewrite="0"]').click()
        assert page.evaluate("fxq.state.rw") == "0"
        assert shown(page)["mode"] == "diff"


def test_what_a_link_asks_for_is_what_is_shown(browser, digits):
    qmodel, path = digits
    node = next(n for n in qmodel.history["fuse"].graph if n.kind == "op")
    with opened(browser, path, f"pass=fuse&mode=diff&node={node.name}&theme=dark") as page:
        shown_graph = shown(page)
        assert (shown_graph["pass"], shown_graph["mode"]) == ("fuse", "diff")
        assert page.locator("#panel").get_attribute("data-node") == node.name
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
