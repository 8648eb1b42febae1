"""Making the ledger: what became of every op."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.graph.info import DECISION_KINDS
from tests.support.helpers import REFERENCE, module
from tests.support.ledgers import RECIPES, X, net
from tests.support.machine import X86, needs_x86
from tests.support.models import NETWORKS, batch, build


@pytest.mark.one_in(2)
def test_one_entry_per_op(ledger):
    assert [(e.path, e.op, e.precision) for e in ledger] == [
        ("stem", "conv2d", "int8"),
        ("same", "identity", "folded"),
        ("block.conv", "conv2d", "int8"),
        ("block.bn", "batch_norm", "folded"),
        ("block.drop", "dropout", "folded"),
        ("block", "add", "int8"),
        ("block", "relu", "int8"),
        ("block.conv", "conv2d", "int8"),
        ("block.bn", "batch_norm", "folded"),
        ("block.drop", "dropout", "folded"),
        ("block", "add", "int8"),
        ("block", "relu", "int8"),
        ("", "mean", "int8"),
        ("head", "linear", "int8"),
        ("", "erf", "float"),
    ]
    assert len({e.name for e in ledger}) == len(ledger)


def test_where_everything_went(ledger):
    by_name = {e.name: e for e in ledger}
    assert by_name["same"].reason == by_name["block_drop"].reason == "has no effect on the output"
    assert by_name["block_bn"].reason == "into block_conv_add_relu"
    assert {by_name[n].into for n in ("block_conv", "block_bn", "add", "relu")} == {"block_conv_add_relu"}
    assert "has no integer form" in by_name["erf"].reason
    assert by_name["erf"].source.rpartition(":")[0].endswith("support/ledgers.py")


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_entry_is_consistent(name, recipe):
    qmodel = fxq.quantize(build(name), recipe, data=[batch(name)])
    names = {n.name for n in qmodel.graph.nodes}
    traced = {
        n.name for n in qmodel.history["trace"].graph if n.origins and n.shape is not None and n.label != "getitem"
    }
    assert len(qmodel.ledger) >= len(traced)
    for entry in qmodel.ledger:
        assert entry.precision in ("int8", "moves", "float", "folded")
        assert bool(entry.reason) == (entry.precision in ("float", "folded"))
        assert entry.into in names or (entry.into == "" and entry.precision == "folded")
        assert entry.fix == "" or entry.precision != "folded"
    assert any(e.sqnr is not None for e in qmodel.ledger)


@needs_x86
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NETWORKS)
def test_int8_means_a_kernel(name):
    """On a backend with kernels, an op that computes between a dequantize and a quantize runs in float."""
    qmodel = fxq.quantize(build(name), X86, data=[batch(name)])
    nodes = {n.name: n for n in qmodel.graph.nodes}
    for entry in qmodel.ledger.where(precision=("int8", "moves")):
        node = nodes[entry.into]
        kernel = node.op == "call_module" and "fxq_kernels" in node.target
        assert kernel or not node.meta["fxq"].dtype.is_floating_point, entry


@needs_x86
def test_what_failed_verification_is_float_and_keeps_its_name(monkeypatch):
    forward = OnednnConv.forward
    monkeypatch.setattr(OnednnConv, "forward", lambda self, *args: forward(self, *args) + 2)
    with pytest.warns(fxq.FxqWarning, match="wrong on this machine"):
        qmodel = fxq.quantize(net(), X86, data=[X])
    wrong = qmodel.ledger.where(path="block**", precision="float")
    assert [e.op for e in wrong] == ["conv2d", "add", "relu"] * 2
    assert all("failed verification" in e.reason and e.kind == "unverified" for e in wrong)
    assert [e.into for e in wrong] == ["block_conv_add_relu"] * 3 + ["block_conv_1_add_relu"] * 3
    assert {e.into for e in wrong} <= {n.name for n in qmodel.graph.nodes}
    assert qmodel.ledger.where(op="batch_norm").count("folded") == 2


def test_a_padding_of_its_own_has_an_entry_of_its_own():
    model = module(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 4, 2, padding="same"))
    ledger = fxq.quantize(model, REFERENCE, data=[X]).ledger
    assert [(e.path, e.op, e.precision) for e in ledger] == [("conv", "pad", "moves"), ("conv", "conv2d", "int8")]
    assert ledger[0].fix == 'recipe.override(fxq.by_op("pad", "conv"), fxq.FLOAT)'.replace('"', "'")


def test_a_module_with_several_outputs_is_one_op():
    def forward(self, x):
        y, _ = self.rnn(self.a(x))
        return self.b(y)

    model = module(
        forward, a=nn.Linear(4, 6), rnn=nn.LSTM(6, 7, batch_first=True, bidirectional=True), b=nn.Linear(14, 2)
    )
    ledger = fxq.quantize(model, REFERENCE.leaf("rnn"), data=[torch.randn(3, 5, 4)]).ledger
    assert [(e.op, e.precision) for e in ledger] == [("linear", "int8"), ("lstm", "float"), ("linear", "int8")]
    lstm = 3 * 5 * 2 * (28 * 6 + 28 * 7)
    linear = 3 * 5 * (4 * 6 + 14 * 2)
    assert [e.macs for e in ledger] == [3 * 5 * 24, lstm, 3 * 5 * 28]
    assert ledger.coverage == pytest.approx(linear / (linear + lstm))


def one_of_each(self, x):
    x = self.kept(torch.relu(torch.erf(self.conv(x))))
    x = self.last(self.excluded(x)).masked_fill(x > 1e9, -1e4).amax(2)
    return torch.sort(self.slow(x)).values


@needs_x86
def test_every_kind_of_reason(plant, monkeypatch):
    """One op at least for each kind, with the pass that decided it."""
    plant(lambda key: 0.0 if "quantize" in key else 9.0 if key.startswith("float") != ("linear" in key) else 1.0)
    forward = OnednnConv.forward
    monkeypatch.setattr(OnednnConv, "forward", lambda self, *args: forward(self, *args) + 2)
    convs = {name: nn.Conv2d(3, 3, 1) for name in ("conv", "excluded", "last")}
    model = module(one_of_each, **convs, kept=nn.Sequential(nn.Conv2d(3, 3, 1)), slow=nn.Linear(8, 4))
    with pytest.warns(fxq.FxqWarning, match="wrong on this machine"):
        ledger = fxq.quantize(model, X86.leaf("kept").override("excluded", fxq.FLOAT), data=[X]).ledger
    assert [(e.op, e.kind, e.decided_by) for e in ledger] == [
        ("conv2d", "unverified", "verify-lowering"),
        ("erf", "unsupported", "annotate"),
        ("relu", "no integer neighbour", "annotate"),
        ("Sequential", "leaf", "trace"),
        ("conv2d", "excluded by the recipe", "annotate"),
        ("conv2d", "unverified", "verify-lowering"),
        ("gt", "unsupported", "annotate"),
        ("masked_fill", "unsupported", "annotate"),
        ("amax", "off the grid", "choose-grids"),
        ("linear", "slower", "fallback"),
        ("sort", "no tensor", "annotate"),
        ("getattr", "unsupported", "canonicalize"),
    ]
    assert [e.path for e in ledger.where(kind="slower")] == ["slow"]
    assert ledger.where(kind=("leaf", "unverified"), decided_by="trace").to_dicts()[0]["kind"] == "leaf"
    assert "leaf,trace" in ledger.to_csv() and '"kind": "leaf"' in ledger.to_json()
    assert set(DECISION_KINDS) == {e.kind for e in ledger} | {"undecided"}


def test_a_kind_that_there_is_not(ledger):
    with pytest.raises(fxq.InputError, match="unknown kind 'slow'; did you mean 'slower'"):
        ledger.where(kind="slow")


def test_what_no_pass_has_decided():
    recipe = REFERENCE.without_pass("annotate")
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        ledger = fxq.quantize(nn.Sequential(nn.Linear(4, 4)), recipe, data=[torch.rand(2, 4)]).ledger
    assert [(e.precision, e.kind, e.decided_by) for e in ledger] == [("float", "undecided", "")]


def test_what_runs_on_integers_needs_no_reason(ledger):
    """Nor does what is folded, which no pass decides about."""
    assert {(e.kind, e.decided_by) for e in ledger.where(precision=("int8", "moves"))} == {("", "annotate")}
    assert {(e.kind, e.decided_by) for e in ledger.where(precision="folded")} == {("", "")}
