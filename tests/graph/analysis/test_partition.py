"""Regions for engines: they are connected and maximal, and none depends on itself."""

import operator
import random
from textwrap import dedent

import networkx as nx
import pytest
import torch
from torch import fx, nn

import fxq
from fxq.graph.analysis.partition import connected_regions
from fxq.graph.info import TracedInfo, set_info
from fxq.graph.query import is_size
from fxq.graph.run import value_of
from fxq.ops import OPS
from tests.support.helpers import steps

pytestmark = pytest.mark.any_cpu


def regions(gm, takes=lambda node: not node.name.startswith("out")):
    """Names of the nodes of each region. The engine does not support nodes named out...."""
    return [[node.name for node in region.nodes] for region in connected_regions(gm, takes)]


def cut(text):
    return regions(fxq.extend.read_graph(f"x: float32[4] = input()\n{text}", {"w": torch.ones(4)}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = relu(x)\nb = tanh(a)\nc = add(a, b)\nreturn (a, c)", [["a", "b", "c"]]),
        ("a = relu(x)\nb = relu(x)\nc = relu(b)\nreturn a", [["a"]]),  # the others are not read
        ("a = relu(x)\nb = relu(x)\nreturn (a, b)", [["a"], ["b"]]),  # a common input does not connect them
        ("a = relu(x)\nout = erf(a)\nb = relu(out)\nreturn b", [["a"], ["b"]]),
        (
            "a = relu(x)\nout = erf(a)\nb = add(a, out)\nreturn b",
            [["a"], ["b"]],
        ),  # else a path would leave the region and return
        ("a = relu(x)\nout = erf(a)\nb = tanh(a)\nreturn (out, b)", [["a", "b"]]),
        ("a = relu(x)\nlate = relu(x)\nout = erf(a)\nb = add(late, out)\nreturn b", [["a"], ["late", "b"]]),
        (  # `late` also has a reader outside, which can run later
            "a = relu(x)\nlate = relu(x)\nout = erf(a)\nout_1 = erf(late)\nb = add(late, out)\nreturn (b, out_1)",
            [["a"], ["late", "b"]],
        ),
        ("w = tensor('w')\na = add(x, w)\nout = erf(a)\nreturn out", [["a"]]),
        ("out = erf(x)\nreturn out", []),
    ],
)
def test_what_becomes_a_region(text, expected):
    assert cut(text) == expected


def test_nodes_between_those_of_a_region_move_before_or_after_it():
    gm = fxq.extend.read_graph(
        """
        x: float32[4] = input()
        a = relu(x)
        out_1 = erf(a)
        out_2 = erf(x)
        b = add(a, out_2)
        return (b, out_1)
        """,
        {},
    )
    before = gm(torch.ones(4))
    assert regions(gm) == [["a", "b"]]
    assert [n.name for n in gm.graph.nodes][:-1] == ["x", "out_2", "a", "b", "out_1"]
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, gm(torch.ones(4)), before))


def test_inputs_and_outputs_of_a_region_with_its_weights():
    gm = fxq.extend.read_graph(
        """
        x: float32[4] = input()
        w = tensor('w')
        out = erf(x)
        q = quantize(out, scale=0.1, zero_point=3)
        dq = dequantize(q, scale=0.1, zero_point=3)
        weight = dequantize(w, scale=0.5, zero_point=0)
        a = add(dq, weight)
        b = mul(a, x)
        return (q, b)
        """,
        {"w": torch.ones(4, dtype=torch.int8)},
    )
    (region,) = connected_regions(gm, lambda node: not node.name.startswith("out"))
    assert [n.name for n in region.inputs] == ["out", "x"]
    assert [n.name for n in region.outputs] == ["q", "b"]
    assert [s.name for s in region.steps] == ["q", "dq", "w", "weight", "a", "b"]
    assert [n.name for n in region.nodes] == ["q", "dq", "a", "b"]
    own = fx.GraphModule(gm, region.to_graph())
    x = torch.linspace(-1, 1, 4)
    assert all(map(torch.equal, own(torch.erf(x), x), gm(x)))


def test_the_parts_of_a_unit_go_with_it():
    gm = fxq.extend.read_graph(
        """
        def two(x):
            relu = relu(x)
            tanh = tanh(relu)
            return (relu, tanh)
        x: float32[4] = input()
        unit = two(x)
        first: float32[4] = operator.getitem(unit, 0)
        second: float32[4] = operator.getitem(unit, 1)
        out = erf(first)
        a = relu(second)
        return (a, out)
        """,
        {},
    )
    (region,) = connected_regions(gm, lambda node: node.name in ("unit", "a"))
    assert [n.name for n in region.outputs] == ["first", "a"]


def test_what_shares_memory_with_a_changed_value_is_in_no_region_and_keeps_its_order():
    """`leaf` changes the memory of `view`, so it must run after `b` has read it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(OPS["relu"].target, (x,))
    view = graph.call_function(OPS["reshape"].target, (a,), {"shape": (4,)})
    b = graph.call_function(OPS["add"].target, (view, x))
    leaf = graph.call_method("add_", (a, 1))
    c = graph.call_function(OPS["relu"].target, (view,))
    d = graph.call_function(OPS["add"].target, (b, c))
    graph.output((d, leaf))
    for node in graph.nodes:
        set_info(node, shape=(4,), dtype=torch.float32, traced=TracedInfo((1,) if node in (a, view, leaf) else ()))
    set_info(leaf, traced=TracedInfo((1,), changes=(1,)))
    gm = fx.GraphModule(nn.Module(), graph)
    before, order = gm(torch.ones(4)), [n.name for n in graph.nodes]
    assert regions(gm, lambda node: True) == [[d.name]]
    assert [n.name for n in graph.nodes] == order
    assert all(map(torch.equal, fx.GraphModule(gm, graph)(torch.ones(4)), before))


def typed(graph):
    """Module of the graph, with the shapes and dtypes of its values for an input (2, 6)."""
    gm = fx.GraphModule(nn.Module(), graph)
    env = {}
    for node in graph.nodes:
        if node.op != "output":
            env[node] = value = torch.zeros(2, 6) if node.op == "placeholder" else value_of(gm, node, env)
            is_tensor = isinstance(value, torch.Tensor)
            set_info(node, shape=tuple(value.shape) if is_tensor else None, dtype=value.dtype if is_tensor else None)
    return gm


def test_sizes_are_included_with_their_readers():
    """Sizes that are read inside only need no output and no second region."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(OPS["relu"].target, (x,))
    size = graph.call_method("size", (a,))
    rows = graph.call_function(operator.getitem, (size, 0))
    columns = graph.call_function(operator.getitem, (size, 1))
    half = graph.call_function(operator.floordiv, (columns, 2))
    b = graph.call_function(OPS["reshape"].target, (a,), {"shape": (rows, 2, half)})
    out = graph.call_function(OPS["erf"].target, (b,))
    c = graph.call_function(OPS["reshape"].target, (out,), {"shape": (rows, columns)})
    graph.output(c)
    gm = typed(graph)
    before = gm(x := torch.randn(4, 8))
    first, second = connected_regions(gm, lambda node: node is not out)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(x), before)
    assert [n.name for n in first.nodes] == [a.name, b.name]
    assert {step.node for step in first.steps} == {a, size, rows, columns, half, b}
    assert first.outputs == (a, b)  # the second region reads sizes of it
    assert second.nodes == (c,) and set(second.inputs) == {out, a}
    (whole,) = connected_regions(gm, lambda node: True)
    assert whole.outputs == (c,) and whole.inputs == (graph.find_nodes(op="placeholder")[0],)
    assert torch.equal(fx.GraphModule(gm, whole.to_graph())(x), before)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(30))
def test_sizes_in_random_graphs(seed):
    """Every region computes the same values as the graph, and the reordered graph still runs."""
    rng, graph = random.Random(seed), fx.Graph()
    nodes, taken = [graph.placeholder("x")], set()
    for _ in range(25):
        x, source = nodes[max(0, len(nodes) - 1 - int(rng.expovariate(0.3)))], rng.choice(nodes)
        size = graph.call_function(operator.getitem, (graph.call_method("size", (source,)), 1))
        halves = graph.call_function(operator.floordiv, (size, 2))
        wide = graph.call_function(OPS["reshape"].target, (x,), {"shape": (-1, 2, halves)})
        flat = graph.call_function(OPS["reshape"].target, (wide,), {"shape": (-1, rng.choice([size, 6]))})
        nodes.append(graph.call_function(OPS["tanh"].target, (flat,)))
        taken.update(node for node in (wide, flat, nodes[-1]) if rng.random() < 0.8)
    graph.output(tuple(nodes[-3:]))
    gm = typed(graph)
    before = gm(x := torch.randn(2, 6))
    all_regions = list(connected_regions(gm, taken.__contains__))
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, gm(x), before))
    values = {graph.find_nodes(op="placeholder")[0]: x}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = value_of(gm, node, values)
    for region in all_regions:
        assert not {node for node in region.inputs if is_size(node)}
        outputs = fx.GraphModule(gm, region.to_graph())(*(values[node] for node in region.inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(torch.equal(value, values[node]) for node, value in zip(region.outputs, outputs, strict=True))
        read = {n for r in region.nodes for n in r.users if n not in region.nodes and not is_size(n)}
        assert {n for r in read for n in r.all_input_nodes if n in region.nodes} <= set(region.outputs)


def test_a_size_of_what_is_changed_in_place_is_read_where_it_stands():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(OPS["relu"].target, (x,))
    size = graph.call_method("size", (a, 0))
    leaf = graph.call_method("unsqueeze_", (a, 0))
    b = graph.call_function(OPS["reshape"].target, (x,), {"shape": (size, -1)})
    graph.output((b, leaf))
    gm = typed(graph)
    for node in (a, leaf):
        set_info(node, traced=TracedInfo((1,)))
    set_info(leaf, traced=TracedInfo((1,), changes=(1,)))
    before, order = gm(torch.ones(2, 6)), list(graph.nodes)
    assert not list(connected_regions(gm, lambda node: True))
    assert list(graph.nodes) == order
    assert all(map(torch.equal, gm(torch.ones(2, 6)), before))


def dag(seed, count):
    """Random graph of sums, and the nodes that an engine supports."""
    rng, graph = random.Random(seed), fx.Graph()
    nodes, taken = [graph.placeholder("x")], set()
    for _ in range(count):
        reads = [nodes[max(0, len(nodes) - 1 - int(rng.expovariate(0.3)))] for _ in range(rng.choice([1, 1, 2]))]
        nodes.append(graph.call_function(OPS["add" if len(reads) == 2 else "relu"].target, tuple(reads)))
        taken.update(nodes[-1:] if rng.random() < 0.8 else [])
    graph.output(tuple(node for node in nodes if not node.users or node in nodes[-3:]))
    for node in nodes:
        set_info(node, shape=(2,), dtype=torch.float32)
    return fx.GraphModule(nn.Module(), graph), taken


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(50))
def test_regions_of_random_graphs(seed):
    gm, taken = dag(seed, 40)
    x = torch.tensor([0.3, -1.2])
    before = gm(x)
    groups = [region.nodes for region in connected_regions(gm, taken.__contains__)]
    home = {node: i for i, nodes in enumerate(groups) for node in nodes}
    assert home.keys() == taken and len(home) == sum(map(len, groups))
    edges = [(read, node) for node in gm.graph.nodes for read in node.all_input_nodes]
    assert all(nx.is_weakly_connected(nx.DiGraph(edges).subgraph(nodes)) for nodes in groups)
    outside = nx.DiGraph((home.get(a, a), home.get(b, b)) for a, b in edges)
    outside.remove_edges_from([*nx.selfloop_edges(outside)])
    assert nx.is_directed_acyclic_graph(outside)
    order = [node for node in gm.graph.nodes if node in home]
    assert order == [node for nodes in groups for node in nodes]  # the nodes of a region are adjacent
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, gm(x), before))
    for a, b in {(home[a], home[b]) for a, b in edges if a in home and b in home and home[a] != home[b]}:
        outside.remove_edge(a, b)
        assert nx.has_path(outside, a, b)  # else they could be merged
        outside.add_edge(a, b)


def test_neighbours_on_two_levels_are_one_region_where_nothing_is_between_them():
    """A region of two levels keeps its lower level, since a node outside the engine reads it."""
    text = """
        a = relu(x)
        side = tanh(a)
        c = relu(x)
        out = erf(c)
        b = add(a, out)
        out_1 = erf(side)
        return (b, out_1)
    """
    assert cut(dedent(text)) == [["c"], ["a", "side", "b"]]


def test_a_search_that_is_too_long_leaves_neighbours_apart(monkeypatch):
    text = "a = relu(x)\nc = relu(x)\nout = erf(c)\nb = add(a, out)\nreturn b"
    assert cut(text) == [["c"], ["a", "b"]]
    monkeypatch.setattr("fxq.graph.analysis.partition.MAX_SEARCHED_EDGES", 0)
    assert cut(text) == [["a"], ["c"], ["b"]]


def test_time_is_in_proportion_to_the_graph():
    counts = []
    for count in (150, 300):
        gm, taken = dag(1, count)
        counts.append(steps(lambda gm=gm, taken=taken: list(connected_regions(gm, taken.__contains__))))
    assert counts[1] < 2.2 * counts[0]
