"""Decoders, and attention called as a function. Encoders and modules of attention: tests/passes/test_decompose.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from tests.support.graphs import graph, until
from tests.support.models import call, settled

E, H, N, L, S = 16, 4, 3, 5, 7
DYNAMIC = fxq.Recipe.dynamic(backend="reference", optimize="coverage")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def check(model, inputs):
    """Check that no module is left, the values are equal, and every linear layer runs on integers."""
    gm = until(model, inputs, "decompose").gm
    assert not [n for n in gm.graph.nodes if n.op == "call_module"]
    torch.testing.assert_close(call(gm, inputs), call(model, inputs), rtol=1e-5, atol=1e-5)
    qmodel = fxq.quantize(model, DYNAMIC, example_inputs=inputs)
    linears = [row for row in qmodel.ledger if row.op == "linear"]
    assert linears and all(row.precision == "int8" for row in linears) and qmodel.output_sqnr > 30
    return [row.path for row in linears]


class Decoded(nn.Module):
    def __init__(self, decoder, **options):
        super().__init__()
        self.decoder, self.options = decoder, options

    def forward(self, x, memory):
        return self.decoder(x, memory, **self.options)


def layer(**options):
    return nn.TransformerDecoderLayer(E, H, 24, batch_first=True, **options)


DECODERS = {"layer": layer, "layers": lambda **o: nn.TransformerDecoder(layer(**o), 2, nn.LayerNorm(E))}
PARTS = ("self_attn.in_proj", "self_attn.out_proj", "multihead_attn.q_proj", "multihead_attn.kv_proj")
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
GIVEN = {
    "no mask": {},
    "causal": {"tgt_mask": CAUSAL, "tgt_is_causal": True},
    "all masks": {
        "tgt_mask": CAUSAL,
        "memory_mask": drawn(L, S),
        "tgt_key_padding_mask": torch.arange(L).expand(N, L) >= 4,
        "memory_key_padding_mask": torch.arange(S).expand(N, S) >= 5,
    },
}


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("options", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, norm_first, options):
    model = settled(lambda: Decoded(DECODERS[name](norm_first=norm_first), **options))
    paths = check(model, (drawn(N, L, E), drawn(N, S, E)))
    prefix = "decoder." if name == "layer" else "decoder.layers.1."
    assert {prefix + part for part in (*PARTS, "multihead_attn.out_proj", "linear1", "linear2")} <= set(paths)


def test_a_whole_transformer():
    model = settled(lambda: nn.Transformer(E, H, 1, 1, 24, batch_first=True))
    assert len(check(model, (drawn(N, S, E), drawn(N, L, E)))) == 11


def test_a_layer_of_another_class_stays():
    class Own(nn.TransformerDecoderLayer):
        pass

    model = settled(lambda: Decoded(nn.TransformerDecoder(Own(E, H, 24, batch_first=True), 1)))
    gm = graph(model, (drawn(N, L, E), drawn(N, S, E)), "decompose")
    assert "its layers are Own" in info(next(n for n in gm.graph.nodes if n.op == "call_module")).traced.kept.text


OWN_KEYS = {"add_bias_kv": True, "add_zero_attn": True}


class Alone(nn.Module):
    """Attention for one sample without a batch axis. `per_head`: whether it returns weights for each head."""

    def __init__(self, per_head=False, **options):
        super().__init__()
        self.own, self.per_head = nn.MultiheadAttention(E, H, **options), per_head

    def forward(self, q, k, v, mask, padding):
        return self.own(q, k, v, attn_mask=mask, key_padding_mask=padding, average_attn_weights=not self.per_head)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("options", [{}, {"per_head": True, "batch_first": True}, {"kdim": 6, "vdim": 10}, OWN_KEYS])
@pytest.mark.parametrize("masks", [(None, None), (drawn(L, S), None), (drawn(H, L, S), torch.arange(S) >= 5)])
def test_attention_without_a_batch_axis(options, masks):
    inputs = (drawn(L, E), drawn(S, options.get("kdim", E)), drawn(S, options.get("vdim", E)), *masks)
    check(settled(lambda: Alone(**options)), inputs)


def test_a_decoder_layer_without_a_batch_axis():
    check(settled(lambda: Decoded(layer())), (drawn(L, E), drawn(S, E)))


class Called(nn.Module):
    """Call of the attention function with a module's weights. `scaled`: whether a weight is computed in each call."""

    def __init__(self, scaled=False, split=False, **options):
        super().__init__()
        self.own = nn.MultiheadAttention(E, H, **options)
        if split:  # three weights of the same shape
            for name, weight in zip("qkv", self.own.in_proj_weight.detach().chunk(3), strict=True):
                setattr(self.own, f"{name}_proj_weight", nn.Parameter(weight.clone()))
            self.own.in_proj_weight = None
        self.scaled = scaled

    def forward(self, q, k, v, mask):
        own = self.own
        weight = own.out_proj.weight * (q.mean() if self.scaled else 1.0)
        y, weights = F.multi_head_attention_forward(
            q, k, v, E, H, own.in_proj_weight, own.in_proj_bias, own.bias_k, own.bias_v, False, 0.0, weight,
            own.out_proj.bias, training=False, attn_mask=mask, use_separate_proj_weight=own.in_proj_weight is None,
            q_proj_weight=own.q_proj_weight, k_proj_weight=own.k_proj_weight, v_proj_weight=own.v_proj_weight,
        )  # fmt: skip
        return y + weights.sum()


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "options",
    [{}, {"kdim": 6, "vdim": 10}, {"bias": False}, {"split": True}, {"add_bias_kv": True}],
    ids=["one", "apart", "no bias", "apart, alike", "keys of its own"],
)
def test_attention_as_a_function(options):
    model = settled(lambda: Called(**options))
    before = list(model.state_dict())
    check(
        model, (drawn(L, N, E), drawn(S, N, options.get("kdim", E)), drawn(S, N, options.get("vdim", E)), drawn(L, S))
    )
    assert list(model.state_dict()) == before and len(list(model.modules())) == 3


def test_weights_that_are_computed_stay_in_the_function():
    inputs = (drawn(L, N, E), drawn(S, N, E), drawn(S, N, E), drawn(L, S))
    model = settled(lambda: Called(scaled=True))
    gm = graph(model, inputs, "decompose")
    assert any(n.target is F.multi_head_attention_forward for n in gm.graph.nodes)
    torch.testing.assert_close(call(gm, inputs), call(model, inputs))


class Both(nn.Module):
    """Attention with `add_bias_kv` and `add_zero_attn`, time axis first, and a linear layer. Returns both results."""

    def __init__(self, **options):
        super().__init__()
        self.own, self.head, self.options = nn.MultiheadAttention(E, H, **OWN_KEYS), nn.Linear(E, 4), options

    def forward(self, x):
        y, weights = self.own(x, x, x, **self.options)
        return self.head(y), weights


def test_attention_that_stays_a_module_may_return_both_outputs():
    model, x = settled(lambda: Both(attn_mask=CAUSAL, is_causal=True)), drawn(L, N, E)
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    assert qmodel(x)[1].shape == model(x)[1].shape
    assert set(qmodel.qparams()) == {"head"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["reference", "x86"])
@pytest.mark.parametrize("preset", ["static", "dynamic"])
def test_keys_of_its_own_on_integers(preset, backend):
    """Batches of other sizes than the example's work as well."""
    model, x = settled(lambda: Both(attn_mask=CAUSAL)), drawn(L, N, E)
    recipe = getattr(fxq.Recipe, preset)(backend=backend, optimize="coverage")
    qmodel = fxq.quantize(model, recipe, data=[x])
    assert set(qmodel.qparams()) == {"own.in_proj", "own.out_proj", "head"}
    for batch in (x, x[:, :1]):
        for got, expected in zip(call(qmodel, batch), call(model, batch), strict=True):
            assert got.shape == expected.shape and sqnr(expected, got) > 30


@pytest.mark.parametrize(("example", "other"), [((5, 8), (2, 5, 8)), ((2, 5, 8), (5, 8))])
def test_inputs_with_another_number_of_axes_are_refused(example, other):
    """The module would compute something else with them."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    recipe = fxq.Recipe.weight_only(backend="reference")
    qmodel = fxq.quantize(Attention().eval(), recipe, example_inputs=torch.randn(example))
    with pytest.raises(fxq.InputError, match=f"traced for x=a tensor with {len(example)} axes"):
        qmodel(torch.randn(other))
