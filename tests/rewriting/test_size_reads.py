"""Sizes that are read from inputs: graph text, numbers for other lengths, exports, and what is read as before."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.by_name import unavailable
from fxq.common.metrics import sqnr
from fxq.passes import Canonicalize
from tests.support.graphs import again, expected, graph, text, until

IDS = torch.arange(6).reshape(2, 3)


class Encoder(nn.Module):
    """Attention with a mask whose size is read from the embedded words."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(9, 32), nn.LayerNorm(32)
        self.projections, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)

    def forward(self, ids):
        assert ids.dim() == 2
        x = self.norm(self.words(ids))
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places[None, :] <= places[:, None]).expand(x.shape[0], 1, -1, -1)
        query, key, value = (linear(x).unflatten(-1, (2, 16)).transpose(1, 2) for linear in self.projections)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
        return self.out(heads.reshape(x.shape[0], x.shape[1], 32))


def test_text_of_the_graph():
    manager = until(Encoder().eval(), IDS, "canonicalize")
    mask, heads = text(manager.gm).split("projections_0 =")
    assert mask.strip() == expected("""
        ids = input
        check_fixed = check_fixed({'ids': ids}, {'ids': '<a tensor with 2 axes>'})
        words = embedding(ids, @words.weight)
        norm = layer_norm(words, @norm.weight, @norm.bias, normalized_shape=(32,))
        getitem = .size(ids, 1)
        getattr_2 = getattr(ids, 'device')
        arange = arange(getitem, device=getattr_2)
        getitem_1 = unsqueeze(arange, dim=0)
        getitem_2 = unsqueeze(arange, dim=1)
        le = le(getitem_1, getitem_2)
        getitem_3 = .size(ids, 0)
        expand = expand(le, sizes=(getitem_3, 1, -1, -1))
    """)
    assert heads.count("getattr(norm, 'shape')") == 2  # of the last reshape
    assert again(manager, Canonicalize()) == []


class Reshaped(nn.Module):
    def __init__(self, checked):
        super().__init__()
        self.words, self.checked = nn.Embedding(9, 4), checked

    def forward(self, ids):
        assert not self.checked or ids.dim() == 2
        x = self.words(ids).relu()
        return x.reshape(x.shape[1] * 2, -1) if self.checked else (x, torch.arange(x.shape[1]))


@pytest.mark.parametrize("checked", [True, False])
def test_what_is_read_from_the_value_itself(checked):
    """A size that only its own value is reshaped by; and one of an input that may have more axes."""
    gm = graph(Reshaped(checked).eval(), IDS)
    (size,) = [node for node in gm.graph.nodes if node.target is getattr and node.args[1] == "shape" and node.users]
    assert size.args[0].name == "relu"


@pytest.mark.parametrize("backend", ["jit", "openvino"])
def test_attention_is_in_one_region_and_sizes_may_differ(backend, tmp_path):
    if why := unavailable(backend):
        pytest.skip(why)
    model = Encoder().eval()
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage")
    q = fxq.quantize(model, recipe, data=[IDS])
    regions = [node.name for node in q.graph.nodes if node.op == "call_module"]
    assert regions == (["words", "norm_to_out"] if backend == "jit" else ["words_to_out"])
    for ids in (IDS, IDS[:1, :2], torch.arange(8).reshape(1, 8), torch.zeros(3, 1, dtype=torch.int64)):
        assert sqnr(model(ids), q(ids)) > 25
    q.export(tmp_path / "m.onnx", dynamic={"ids": {0: "batch", 1: "length"}})
    ids = torch.arange(8).reshape(2, 4)
    assert sqnr(q(ids), fxq.read_onnx(tmp_path / "m.onnx")(ids)) > 40
