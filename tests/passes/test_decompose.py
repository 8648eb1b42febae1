"""decompose: attention and encoder layers as ops, with the numbers of torch.nn."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.passes import Decompose
from tests.support.graphs import again, expected, graph, text, until
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled

E, H, N, L, S = 16, 4, 3, 5, 7


class Attention(nn.Module):
    """An attention between two layers; `forward(self, x)` from outside may read what it likes of it."""

    def __init__(self, forward=None, **options):
        super().__init__()
        self.before, self.attend = nn.Linear(E, E), nn.MultiheadAttention(E, H, **{"batch_first": True, **options})
        self.last = nn.Linear(E, 4)
        self.body = forward or (lambda self, x: self.attend(x, x, x)[0])
        self.register_buffer("causal", torch.ones(L, L, dtype=torch.bool).triu(1))
        self.register_buffer("added", torch.randn(L, L))
        self.register_buffer("each", torch.rand(N * H, L, L) > 0.8)
        self.register_buffer("padding", torch.arange(L).expand(N, L) >= torch.tensor([[L], [3], [4]]))
        self.register_buffer("memory", torch.randn(N, S, E))
        self.register_buffer("keys", torch.randn(N, S, 6))

    def forward(self, x):
        return self.last(self.body(self, self.before(x)))


def data(*shape):
    return torch.randn(shape or (N, L, E), generator=torch.Generator().manual_seed(2))


def check(model, x, others=()):
    """The graph holds no module, computes the same, also for other sizes, and is left alone by a second run."""
    manager = until(model, x, "decompose")
    assert not [n for n in manager.gm.graph.nodes if n.op == "call_module"]
    for example in (x, *others):
        torch.testing.assert_close(call(manager.gm, example), call(model, example), rtol=1e-5, atol=1e-5)
    assert again(manager, Decompose()) == []
    return manager


def test_text_before_and_after():
    manager = check(settled(Attention), data(), [data(1, 2, E)])
    assert "attend = module MultiheadAttention(before, before, before)" in text(manager.history["canonicalize"].graph)
    assert text(manager.gm) == expected("""
        x = input
        check_fixed = check_fixed({'x': x}, {'x': '<a tensor with 3 axes>'})
        before = linear(x, @before.weight, @before.bias)
        attend_in_proj = linear(before, @attend.in_proj_weight, @attend.in_proj_bias)
        chunk = chunk(attend_in_proj, chunks=3, dim=-1)
        chunk_1 = chunk(attend_in_proj, chunks=3, dim=-1, index=1)
        chunk_2 = chunk(attend_in_proj, chunks=3, dim=-1, index=2)
        unflatten = unflatten(chunk, dim=-1, sizes=(4, -1))
        transpose = transpose(unflatten, dim0=1, dim1=2)
        unflatten_1 = unflatten(chunk_1, dim=-1, sizes=(4, -1))
        transpose_1 = transpose(unflatten_1, dim0=1, dim1=2)
        unflatten_2 = unflatten(chunk_2, dim=-1, sizes=(4, -1))
        transpose_2 = transpose(unflatten_2, dim0=1, dim1=2)
        scaled_dot_product_attention = scaled_dot_product_attention(transpose, transpose_1, transpose_2)
        transpose_3 = transpose(scaled_dot_product_attention, dim0=1, dim1=2)
        flatten = flatten(transpose_3, start_dim=-2)
        attend_out_proj = linear(flatten, @attend.out_proj.weight, @attend.out_proj.bias)
        last = linear(attend_out_proj, @last.weight, @last.bias)
        return last
    """)


@torch.fx.wrap
def sum_of(values):
    return values[0] + values[1].sum()


FORMS = {
    "sequence first": (None, {"batch_first": False}),
    "no bias": (None, {"bias": False}),
    "cross": (lambda self, x: self.attend(x, self.memory, self.memory)[0], {}),
    "three inputs": (lambda self, x: self.attend(x, x * 2, value=x + 1)[0], {}),
    "key of another width": (lambda self, x: self.attend(x, self.keys, self.memory)[0], {"kdim": 6}),
    "causal": (lambda self, x: self.attend(x, x, x, attn_mask=self.causal)[0], {}),
    "causal hint": (
        lambda self, x: self.attend(x, x, x, attn_mask=self.causal, is_causal=True, need_weights=False)[0],
        {},
    ),
    "added": (lambda self, x: self.attend(x, x, x, attn_mask=self.added)[0], {}),
    "a mask for each head": (lambda self, x: self.attend(x, x, x, attn_mask=self.each)[0], {}),
    "padding": (lambda self, x: self.attend(x, x, x, key_padding_mask=self.padding)[0], {}),
    "both masks": (
        lambda self, x: self.attend(x, x, x, key_padding_mask=self.padding, attn_mask=self.causal)[0],
        {},
    ),
    "weights": (lambda self, x: self.attend(x, x, x)[1] @ x, {}),
    "weights of masked heads": (
        lambda self, x: self.attend(x, x, x, attn_mask=self.added, average_attn_weights=False)[1].mean(1) @ x,
        {},
    ),
    "both results": (lambda self, x: (lambda y, w: y + w @ x)(*self.attend(x, x, x)), {}),
    "keys of its own": (lambda self, x: self.attend(x, self.memory, self.memory)[0], {"add_bias_kv": True}),
    "a key of zeros": (lambda self, x: self.attend(x, x, x, key_padding_mask=self.padding)[0], {"add_zero_attn": True}),
    "both, masked": (
        lambda self, x: self.attend(x, x, x, key_padding_mask=self.padding, attn_mask=self.added)[0],
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": E},
    ),
    "both, a mask for each head": (
        lambda self, x: self.attend(x, x, x, attn_mask=self.each, need_weights=False)[0],
        {"add_bias_kv": True, "add_zero_attn": True},
    ),
    "weights of keys of its own": (lambda self, x: self.attend(x, x, x)[1][..., 1:] @ x, {"add_bias_kv": True}),
    "as a whole": (lambda self, x: sum_of(self.attend(x, x, x)), {}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMS)
def test_attention(name):
    forward, options = FORMS[name]
    check(settled(lambda: Attention(forward, **options)), data())


ENCODERS = {
    "layer": lambda **o: nn.TransformerEncoderLayer(E, H, 24, batch_first=True, **o),
    "layers": lambda **o: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 24, batch_first=True, **o), 2, nn.LayerNorm(E), enable_nested_tensor=False
    ),
}


class Encoded(nn.Module):
    def __init__(self, encoder, **options):
        super().__init__()
        self.before, self.encoder, self.given = nn.Linear(E, E), encoder, options

    def forward(self, x):
        return self.encoder(self.before(x), **self.given)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()], ids=["relu", "gelu", "silu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, norm_first, activation):
    model = settled(lambda: Encoded(ENCODERS[name](norm_first=norm_first, activation=activation)))
    check(model, data(), [data(2, 9, E)])


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_with_masks(name):
    causal, padding = torch.ones(L, L, dtype=torch.bool).triu(1), torch.arange(L).expand(N, L) >= 4
    mask = "src_mask" if name == "layer" else "mask"
    check(settled(lambda: Encoded(ENCODERS[name](), **{mask: causal, "src_key_padding_mask": padding})), data())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "x86"])
def test_linears_run_on_integers_under_the_paths_of_their_layers(backend):
    model, x = settled(lambda: Encoded(ENCODERS["layers"]())), data(8, L, E)
    quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
    assert sqnr(call(model, x), call(quantized, x)) > 25
    paths = [
        f"encoder.layers.{i}.{part}"
        for i in (0, 1)
        for part in ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    ]
    assert set(quantized.qparams()) == {"before", *paths}
    entries = [e for e in quantized.ledger if e.op == "linear"]
    assert [(e.path, e.precision) for e in entries] == [(path, "int8") for path in ("before", *paths)]
    others = {e.op: e.reason for e in quantized.ledger if e.precision == "float" and "form" in e.reason}
    assert others["layer_norm"] == "layer_norm has no integer form"


def test_a_selector_reaches_a_layer_inside():
    model, x = settled(lambda: Encoded(ENCODERS["layer"]())), data()
    recipe = REFERENCE.override("encoder.linear1", fxq.FLOAT)
    quantized = fxq.quantize(model, recipe, data=[x])
    assert {e.path: e.precision for e in quantized.ledger if e.op == "linear"}["encoder.linear1"] == "float"
    with pytest.raises(fxq.RecipeError, match="selects nothing"):
        graph(model, x, "decompose", REFERENCE.override("encoder.linear9", fxq.FLOAT))


REFUSED = {
    "it adds keys of its own": lambda: Attention(FORMS["causal hint"][0], add_bias_kv=True),
    "its attention adds keys of its own": lambda: Encoded(with_own_keys(ENCODERS["layer"]())),
    "its norm is a OwnNorm": lambda: Encoded(with_own_norm(ENCODERS["layer"]())),
    "its activation erfinv is not in the op table": lambda: Encoded(ENCODERS["layer"](activation=torch.erfinv)),
    "it has forward hooks": lambda: Encoded(hooked(ENCODERS["layers"]())),
}


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def with_own_norm(layer):
    layer.norm1 = OwnNorm(E)
    return layer


def with_own_keys(layer):
    layer.self_attn = nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True)
    return layer


def hooked(encoder):
    encoder.layers[0].linear1.register_forward_hook(lambda module, inputs, y: y + 1)
    return encoder


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason):
    model, x = settled(REFUSED[reason]), data().clamp(-0.1, 0.1)
    gm = graph(model, x, "decompose")
    left = next(n for n in gm.graph.nodes if n.op == "call_module")
    assert reason in info(left).traced.kept.text
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_zeroed_padding_is_not_left_out():
    """Its fast path sets what the mask leaves out to zero; the ops would not."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, batch_first=True), 1)
    model = settled(lambda: Encoded(encoder, src_key_padding_mask=torch.arange(L).expand(N, L) >= 4))
    gm = graph(model, data(), "decompose")
    assert "enable_nested_tensor" in info(next(n for n in gm.graph.nodes if n.op == "call_module")).traced.kept.text
