"""fallback, the part that prices: which integer ops go back to float, and what the graph looks like then."""

import warnings
import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.cost import cache as costs
from fxq.graph.info import info
from fxq.graph.view import view
from fxq.passes import Fallback
from fxq.passes.fallback import SLOWER, SLOWER_WITH_CONVERSIONS
from tests.support.graphs import (
    GRID,
    again,
    equal,
    expected,
    idle,
    integer_weight,
    joined,
    node,
    qdq,
    run_pass,
    text,
    until,
)
from tests.support.helpers import REFERENCE, plain
from tests.support.machine import X86, needs_x86
from tests.support.models import NETWORKS, batch, build, call, settled

pytestmark = needs_x86


def int8(key):
    """Whether a kernel is priced, neither a float op nor a conversion."""
    return not key.startswith("float") and "quantize" not in key


class Three(nn.Module):
    """Three layers, the second of which is small; something that moves data; a head."""

    def __init__(self):
        super().__init__()
        self.a, self.small, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x):
        x = F.relu(self.small(F.relu(self.a(x))))
        return self.head(F.relu(self.b(x)).flatten(1))


INT8 = "plan=Plan(Decision('int8'), reads=TensorSpec())"
MOVES = "plan=Plan(Decision('moves'), reads=TensorSpec())"
CONV_RELU = """
    def conv2d_relu(x, weight, bias):
        conv2d = conv2d(x, weight, bias)
        relu = relu(conv2d)
        return relu
"""
THREE = joined(
    CONV_RELU, "x: float32[2, 3, 8, 8] = input()",
    "c: float32[8] = tensor('c')", "d: float32[4] = tensor('d')", "e: float32[5] = tensor('e')",
    integer_weight("a", "8, 3, 3, 3"), integer_weight("small", "4, 8, 1, 1"), integer_weight("b", "8, 4, 3, 3"),
    integer_weight("head", "5, 128"), qdq("x"),
    f"a = conv2d_relu(x_qdq, a_dq, c)  # {INT8}", qdq("a"),
    f"small = conv2d_relu(a_qdq, small_dq, d)  # {INT8}", qdq("small"),
    f"b = conv2d_relu(small_qdq, b_dq, c)  # {INT8}", f"b_q = quantize(b, {GRID})",
    f"flat = flatten(b_q, start_dim=1)  # {MOVES}", f"flat_dq = dequantize(flat, {GRID})",
    f"head = linear(flat_dq, head_dq, e)  # {INT8}", "return head",
)  # fmt: skip


def three(recipe=X86, tensors=None):
    """Three layers, the second of which is small; something that moves data; a head."""
    return run_pass(Fallback(), THREE, tensors, recipe=recipe)


def precisions(gm):
    return {n.label: n.kind for n in view(gm) if n.kind in ("int8", "moves", "float")}


def test_what_always_loses_runs_in_float_as_the_model_does(plant):
    plant(lambda key: 9.0 if int8(key) else 1.0)
    gm = three()
    assert text(gm) == expected("""
        x = input
        a = conv2d_relu(x, @a.weight, @c)
        small = conv2d_relu(a, @small.weight, @d)
        b = conv2d_relu(small, @b.weight, @c)
        flat = flatten(b, start_dim=1)
        head = linear(flat, @head.weight, @e)
        return head
    """)
    assert info(node(gm, "a")).made_by.startswith("fallback: run_in_float (pipeline/in_float.py:")


def test_one_small_layer_in_float_costs_its_conversions(plant):
    """It saves 3 in float: not worth a dequantize of 1 and a quantize of 3, but worth one of each at 1."""
    for quantize, kept in ((3.0, True), (1.0, False)):
        plant(lambda key, q=quantize: q if "quantize" in key else (5.0 if "[4, 8, 1, 1]" in key else 1.0)
              if int8(key) else (2.0 if "[4, 8, 1, 1]" in key else 9.0))  # fmt: skip
        lines = text(three())
        assert ("small = conv2d_relu(a_qdq, small_dq" in lines) is kept
        assert ("small = conv2d_relu(a, @small.weight" in lines) is not kept  # a emits float
        assert "a_q" in lines if kept else "a_q" not in lines
        assert "b = conv2d_relu(small_qdq, b_dq" in lines


def test_what_moves_integers_moves_floats_again(plant):
    plant(
        lambda key: (
            1.0 if "quantize" in key else 9.0 if int8(key) == any(s in key for s in ("flatten", "linear")) else 1.0
        )
    )
    assert text(three()).splitlines()[-4:] == [
        "b = conv2d_relu(small_qdq, b_dq, @c)",
        "flat = flatten(b, start_dim=1)",
        "head = linear(flat, @head.weight, @e)",
        "return head",
    ]


def rounds_of(price):
    """Costs that measure so many microseconds for what a key names; the first round of each is ten times as long."""

    class Rounds(costs.Costs):
        def _measure(self, key):
            seconds = self.rounds.setdefault(key, [])
            seconds.append(1e-6 * price(key) * (1 if seconds else 10 if key.startswith("x86") else 1))
            self._new.add(key)

    return Rounds()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("noise", [0.6, 0.8, 1.25, 1.7])
@pytest.mark.parametrize("wins", ["int8", "float"])
def test_noise_changes_no_decision(plant_table, monkeypatch, noise, wins):
    """The price table decides near ties: a measurement that is off by less than the margin does not count."""
    loses = 1.1 if wins == "int8" else 1.5
    plant_table(lambda key: 0.1 if "quantize" in key else 1.0 if key.startswith(wins) else loses)
    prober = rounds_of(lambda key: (noise if int8(key) else 1.0) * (1.0 if int8(key) == (wins == "int8") else loses))
    monkeypatch.setattr(costs, "machine_costs", lambda: prober)
    model, x = settled(Three), torch.rand(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # nothing runs on integers
        qmodel = fxq.quantize(model, X86, data=[x])
    assert {entry.precision for entry in qmodel.ledger} - {"moves", "folded"} == {wins}
    assert {decision.by for decision in qmodel.decisions} == {"table"}


def test_what_is_clearly_otherwise_than_the_table_says_is_measured_again_and_counts(plant_table, monkeypatch):
    """One round of the kernels was interrupted, and is no outlier later; but the small layer is slow each time."""
    plant_table(lambda key: 0.1 if "quantize" in key else 1.0 if key.startswith("int8") else 3.0)
    slow = lambda key: int8(key) and "[4, 8, 1, 1]" in key  # noqa: E731
    timed_costs = rounds_of(lambda key: 90.0 if slow(key) else 1.0 if int8(key) else 3.0)
    monkeypatch.setattr(costs, "machine_costs", lambda: timed_costs)
    monkeypatch.setattr(costs, "MIN_ROUND_INTERVAL", 0.0)
    model, x = settled(Three), torch.rand(2, 3, 8, 8)
    qmodel = fxq.quantize(model, X86, data=[x])
    by_path = {decision.path: decision for decision in qmodel.decisions}
    assert (by_path["small"].by, by_path["small"].runs) == ("measured", "float")
    assert by_path["small"].int8_us == pytest.approx(90.0)
    for path in ("a", "b", "head"):
        assert (by_path[path].by, by_path[path].runs) == ("table", "int8")
    assert all(
        len(seconds) >= costs.MIN_ROUNDS for key, seconds in timed_costs.rounds.items() if int8(key) and "conv2d" in key
    )


def test_what_rounds_do_not_agree_on_does_not_count(plant_table, monkeypatch):
    plant_table(lambda key: 0.1 if "quantize" in key else 1.0 if key.startswith("int8") else 3.0)
    times = iter(2.0**i for i in range(400, 0, -1))
    timed_costs = rounds_of(lambda key: next(times) if int8(key) else 3.0)
    monkeypatch.setattr(costs, "machine_costs", lambda: timed_costs)
    monkeypatch.setattr(costs, "MIN_ROUND_INTERVAL", 0.0)
    qmodel = fxq.quantize(settled(Three), X86, data=[torch.rand(2, 3, 8, 8)])
    assert {(decision.by, decision.runs) for decision in qmodel.decisions} == {("table", "int8"), ("table", "moves")}


def test_costs_and_the_reason_are_on_record(plant):
    plant(lambda key: 0.0 if "quantize" in key else 9.0 if int8(key) == ("linear" in key) else 1.5)
    model, x = settled(Three), torch.rand(2, 3, 8, 8)
    qmodel = fxq.quantize(model, X86, data=[x])
    by_op = {entry.op: entry for entry in qmodel.ledger}
    assert by_op["linear"].precision == "float" and by_op["linear"].reason == SLOWER
    assert (by_op["linear"].kind, by_op["linear"].decided_by) == ("slower", "fallback")
    assert by_op["linear"].fix == 'recipe.with_optimize("coverage")'
    assert by_op["conv2d"].precision == "int8"
    plans = [n.meta["fxq"].plan for n in qmodel.graph.nodes if n.meta["fxq"].plan is not None]
    assert {(p.cost.float_us, p.cost.int8_us) for p in plans if p.cost is not None} == {(9.0, 1.5), (1.5, 9.0)}


def test_what_conversions_cost_is_on_record(plant):
    """The layer's kernel saves 847 µs, and to quantize its input takes more than that; it emits float itself."""
    plant(lambda key: 1200.0 if "quantize" in key else (163.0 if int8(key) else 1010.0) if "linear" in key else 9.0)
    model = nn.Sequential(nn.Softmax(-1), nn.Linear(6, 6), nn.Softmax(-1)).eval()
    with pytest.warns(fxq.FxqWarning, match="1 of 3 ops, with 100% of the multiply-accumulates, stay in float"):
        qmodel = fxq.quantize(model, X86, data=[torch.rand(4, 6)])
    entry = qmodel.ledger[1]
    assert (entry.precision, entry.float_us, entry.int8_us) == ("float", 1010.0, 163.0)
    assert entry.conversions_us == pytest.approx(1200.0)
    assert entry.reason == SLOWER_WITH_CONVERSIONS


def test_coverage_measures_nothing_and_does_not_choose(plant_table, monkeypatch):
    """Estimates of the price table are recorded."""
    plant_table(lambda key: 9.0 if key.startswith("int8") else 1.0)
    monkeypatch.setattr(costs, "measure", lambda *_: pytest.fail("something was measured"))
    gm = three(X86.with_optimize("coverage"))
    assert set(precisions(gm).values()) == {"int8", "moves"}
    plans = [info(n).plan for n in gm.graph.nodes if info(n).plan is not None]
    costs_of_plans = {plan.cost for plan in plans if plan.precision != "float"}
    assert {(cost.float_us, cost.int8_us, cost.priced_by) for cost in costs_of_plans} == {(1.0, 9.0, "table")}


def test_coverage_says_when_it_is_slower_than_float(plant_table):
    """Four ops in float: 1 µs each. On integers, the small layer takes 9 and the conversion in front 0.5."""
    small = lambda key: key.startswith("int8") and "[4, 8, 1, 1]" in key  # noqa: E731
    table = lambda key: 0.5 if "quantize" in key else 9.0 if small(key) else 1.0  # noqa: E731
    plant_table(table)
    model, x = settled(Three), torch.rand(2, 3, 8, 8)
    said = (
        r"estimated to take 2\.7 times as long as in float on this machine: 0\.0135 ms instead of 0\.005 ms\. "
        r"The ops that lose the most: small \(0\.009 ms, in float 0\.001 ms\)\. recipe\.with_optimize\(\"speed\"\)"
    )
    with pytest.warns(fxq.FxqWarning, match=said):
        fxq.quantize(model, X86.with_optimize("coverage"), data=[x])
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message="nothing runs on integers|this CPU has no VNNI")
        plant_table(lambda key: 0.5 if "quantize" in key else 1.04)
        fxq.quantize(model, X86.with_optimize("coverage"), data=[x])


def test_coverage_says_when_conversions_alone_make_it_slower(plant_table):
    plant_table(lambda key: 9.0 if "quantize" in key else 1.0)
    with pytest.warns(fxq.FxqWarning, match="Its conversions cost more than its kernels save"):
        fxq.quantize(settled(Three), X86.with_optimize("coverage"), data=[torch.rand(2, 3, 8, 8)])


def test_the_reference_backend_asks_no_prices(monkeypatch):
    monkeypatch.setattr(costs, "machine_costs", lambda: pytest.fail("prices were asked for"))
    assert set(precisions(three(REFERENCE)).values()) == {"int8", "moves"}


def test_ops_without_a_kernel_have_a_price_in_float(plant):
    plant(lambda key: 0.0 if int8(key) else 2.0 if "softmax" in key else 1.0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Linear(6, 3)).eval()
    qmodel = fxq.quantize(model, X86, data=[torch.rand(4, 6)])
    rows = {entry.op: (entry.precision, entry.float_us, entry.int8_us) for entry in qmodel.ledger}
    assert rows == {"linear": ("int8", 1.0, 0.0), "softmax": ("float", 2.0, None)}
    assert [e.op for e in qmodel.ledger.where(precision="float").sort("float_us", reverse=True)] == ["softmax"]


def test_a_corrected_bias_goes_back_too(plant):
    plant(lambda key: 9.0 if int8(key) else 1.0)
    recipe = fxq.Recipe.static(backend="x86")
    model, x = settled(Three), torch.rand(16, 3, 8, 8)
    manager = until(model, x, "fallback", recipe)
    assert "bias_corrected" in text(manager.history["correct-bias"].graph)
    assert equal(call(manager.gm, x), call(model, x))


@pytest.mark.one_in(45)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_mixture_is_right(name, seed, plant):
    """Prices at random: whatever stays on integers, the graph runs and is near the model, before and after lowering."""
    plant(lambda key: zlib.crc32(f"{seed} {key.partition(')')[0]}".encode()) % 7)  # the same whatever it emits
    model, inputs = build(name), batch(name)
    manager = until(model, inputs, "fallback", X86)
    assert again(manager, Fallback()) == []
    assert not idle(manager.history["fallback"].graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # some prices leave nothing on integers
        qmodel = fxq.quantize(model, X86, data=[inputs])
    wanted = call(model, inputs)
    for got in (call(manager.gm, inputs), call(qmodel, inputs)):
        assert sqnr(wanted, got) > 18


def test_a_kernel_that_cannot_be_timed_stays(monkeypatch, caplog):
    def fail(self, key, prepare, cold=False):
        raise RuntimeError("no such kernel")

    class Failing(costs.Costs):
        seconds = fail
        of_size = lambda self, key, elements, prepare: 0.0  # noqa: E731

    monkeypatch.setattr(costs, "machine_costs", Failing)
    assert set(precisions(three()).values()) == {"int8", "moves"}
    assert "cannot be timed (RuntimeError: no such kernel)" in caplog.text


class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


@pytest.mark.parametrize("whole", [2.0, 4.0])
def test_the_faster_of_two_kernels_is_taken(whole, plant):
    """conv + prelu: on integers with a second convolution, or the convolution alone and prelu in float."""
    plant(lambda key: 9.0 if key.startswith("float") else 3.0 if "after 1" in key else whole if "prelu" in key else 1.0)
    model, x = settled(Slopes), torch.rand(2, 3, 8, 8)
    lines = text(until(model, x, "fallback", plain(X86)).gm).splitlines()
    inside = "a_prelu = conv2d_prelu(x_dq, a_weight_dq, @a.bias, @act.weight)"
    assert (inside in lines) is (whole < 3)
    assert ("act = prelu(a, @act.weight)" in lines) is (whole > 3)
    wanted = call(model, x)
    assert sqnr(wanted, call(fxq.quantize(model, X86, data=[x]), x)) > 30


def test_coverage_takes_the_kernel_with_more_ops():
    model, x = settled(Slopes), torch.rand(2, 3, 8, 8)
    manager = until(model, x, "fallback", X86.with_optimize("coverage"))
    assert "a_prelu = conv2d_prelu(x_dq" in text(manager.gm)
    assert again(manager, Fallback()) == []
    entry = next(e for e in fxq.quantize(model, X86.with_optimize("coverage"), data=[x]).ledger if e.op == "prelu")
    assert (entry.precision, entry.reason) == ("int8", "")


class BesideCoarse(nn.Module):
    """A fine value that is read as it is, and put beside a coarse one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        a = self.a(x)
        return self.c(a), self.c(torch.cat([a, self.b(x)], 1)[:, 8:])


@pytest.mark.parametrize(("requantize", "kept"), [(0.5, True), (50.0, False)])
def test_a_conversion_to_a_coarser_grid_belongs_to_the_price_of_what_asks_for_it(plant, requantize, kept):
    """Where the op is moved to float, it reads the fine integers."""
    plant(lambda key: requantize if "requantize" in key else 0.1 if "quantize" in key else 1.0 if int8(key) else 9.0)
    model, x = settled(BesideCoarse), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        model.b.weight.mul_(1e3)
    manager = until(model, x, "fallback", X86)
    lines = text(manager.gm).splitlines()
    assert any("requantize(a_q" in line for line in lines) is kept
    assert any(line.startswith("cat = cat([a_q_dq, ") for line in lines) is not kept
    cat = next(n for n in manager.gm.graph.nodes if n.name == "cat")
    assert info(cat).plan.cost.int8_us == pytest.approx(1.0 + requantize)
    assert min(sqnr(a, b) for a, b in zip(call(model, x), call(manager.gm, x), strict=True)) > 25
