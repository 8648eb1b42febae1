"""Making the ledger: what became of every op."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.x86.onednn_conv import OnednnConv
from tests.helpers import REFERENCE, module
from tests.ledgers import RECIPES, X86, X, needs_x86, net
from tests.models import NETWORKS, batch, build


def test_one_entry_per_op(ledger):
    assert [(e.path, e.op, e.fate) for e in ledger] == [
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
    assert by_name["erf"].source.startswith("tests/ledgers.py:")


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
        assert entry.fate in ("int8", "moves", "float", "folded")
        assert bool(entry.reason) == (entry.fate in ("float", "folded"))
        assert entry.into in names or (entry.into == "" and entry.fate == "folded")
        assert entry.fix == "" or entry.fate != "folded"
    assert any(e.sqnr is not None for e in qmodel.ledger)


@needs_x86
def test_int8_means_a_kernel():
    """On a backend with kernels, an op that computes between a dequantize and a quantize runs in float."""
    for name in NETWORKS:
        qmodel = fxq.quantize(build(name), X86, data=[batch(name)])
        nodes = {n.name: n for n in qmodel.graph.nodes}
        for entry in qmodel.ledger.where(fate=("int8", "moves")):
            node = nodes[entry.into]
            kernel = node.op == "call_module" and "fxq_kernels" in node.target
            assert kernel or not node.meta["fxq"].dtype.is_floating_point, (name, entry)


@needs_x86
def test_what_failed_verification_is_float_and_keeps_its_name(monkeypatch):
    forward = OnednnConv.forward
    monkeypatch.setattr(OnednnConv, "forward", lambda self, *args: forward(self, *args) + 2)
    with pytest.warns(fxq.FxqWarning, match="wrong on this machine"):
        qmodel = fxq.quantize(net(), X86, data=[X])
    wrong = qmodel.ledger.where(path="block**", fate="float")
    assert [e.op for e in wrong] == ["conv2d", "add", "relu"] * 2
    assert all("failed verification" in e.reason for e in wrong)
    assert [e.into for e in wrong] == ["block_conv_add_relu"] * 3 + ["block_conv_1_add_relu"] * 3
    assert {e.into for e in wrong} <= {n.name for n in qmodel.graph.nodes}
    assert qmodel.ledger.where(op="batch_norm").count("folded") == 2


def test_a_padding_of_its_own_has_an_entry_of_its_own():
    model = module(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 4, 2, padding="same"))
    ledger = fxq.quantize(model, REFERENCE, data=[X]).ledger
    assert [(e.path, e.op, e.fate) for e in ledger] == [("conv", "pad", "moves"), ("conv", "conv2d", "int8")]
    assert ledger[0].fix == 'recipe.override(fxq.op("pad", "conv"), fxq.FLOAT)'.replace('"', "'")


def test_a_module_with_several_outputs_is_one_op():
    def forward(self, x):
        y, _ = self.rnn(self.a(x))
        return self.b(y)

    model = module(
        forward, a=nn.Linear(4, 6), rnn=nn.LSTM(6, 7, batch_first=True, bidirectional=True), b=nn.Linear(14, 2)
    )
    ledger = fxq.quantize(model, REFERENCE, data=[torch.randn(3, 5, 4)]).ledger
    assert [(e.op, e.fate) for e in ledger] == [("linear", "int8"), ("lstm", "float"), ("linear", "int8")]
    lstm = 3 * 5 * 2 * (28 * 6 + 28 * 7)
    linear = 3 * 5 * (4 * 6 + 14 * 2)
    assert [e.macs for e in ledger] == [3 * 5 * 24, lstm, 3 * 5 * 28]
    assert ledger.coverage == pytest.approx(linear / (linear + lstm))
