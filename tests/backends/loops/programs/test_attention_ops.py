"""Which step computes attention, on values that are split into heads in any way, and blocks of transformers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxq.backends.loops.programs.layer_steps import AttentionStep
from fxq.common.metrics import sqnr
from tests.support.models import settled
from tests.support.programs import (
    Draft,
    check,
    check_both,
    kinds,
    plan_of,
    program,
    quantized,
    refused,
    regions,
    steps_of,
    whole,
)

pytestmark = pytest.mark.any_cpu


def attend(draft, query, key, value, *mask, **about):
    return draft.op("scaled_dot_product_attention", query, key, value, *mask, **about)


def split(draft, x, heads):
    """(N, L, C) as (N, heads, L, C / heads)."""
    return draft.op("transpose", draft.op("unflatten", x, dim=-1, sizes=(heads, -1)), dim0=1, dim1=2)


def joined(draft, x):
    """The inverse."""
    return draft.op("flatten", draft.op("transpose", x, dim0=1, dim1=2), start_dim=2)


def layer(draft, x, columns):
    return draft.op("linear", x, draft.weight(columns, draft.values[x].shape[-1]), draft.vector(columns))


def projected(draft, x, heads, *others):
    """Query of a value, key and value of another one, each made by a layer and split."""
    channels = draft.values[x].shape[-1]
    return [split(draft, layer(draft, y, channels), heads) for y in (x, *(others or (x,)) * 2)]


# ---- values


@settings(deadline=None, max_examples=10)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 20), others=st.integers(1, 20), heads=st.sampled_from([1, 2, 3]),
    depth=st.sampled_from([1, 5, 16, 24, 32, 33, 64]), is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.2, 1.0]), is_float=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention(batch, length, others, heads, depth, is_causal, scale, is_float, seed):
    """Of floats, and of integers on a grid."""
    draft = Draft(seed)
    shapes = [(batch, count, heads * depth) for count in (length, others, others)]
    inputs = [draft.input(draft.normal(*s)) if is_float else draft.image(*s) for s in shapes]
    y = attend(draft, *(split(draft, x, heads) for x in inputs), is_causal=is_causal, scale=scale)
    check_both(draft, joined(draft, y))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_layers(is_causal):
    draft = Draft()
    parts = projected(draft, draft.image(2, 9, 48), 3)
    y = draft.quantize(joined(draft, attend(draft, *parts, is_causal=is_causal)))
    assert kinds(check(draft, y)) == ["QuantizeStep", *["ProductStep"] * 3, "AttentionStep", "PointwiseStep"]
    (step,) = steps_of(plan_of(draft, y), AttentionStep)
    assert (step.heads, step.is_causal, step.scale) == (3, is_causal, 0.25) and step.grid is not None
    check(draft, layer(draft, draft.qdq(joined(draft, attend(draft, *parts, is_causal=is_causal))), 32))


def test_a_decoder_reads_what_an_encoder_made():
    draft = Draft()
    x, y = draft.image(2, 5, 32), draft.image(2, 12, 32)
    check_both(draft, joined(draft, attend(draft, *projected(draft, x, 2, y))))


def test_integers_become_floats():
    """A step makes them floats, and they need no grid in common."""
    draft = Draft()
    parts = [split(draft, draft.qdq(layer(draft, draft.image(2, 9, 32), 32)), 2) for _ in range(3)]
    y = draft.quantize(joined(draft, attend(draft, *parts)))
    compiled = check(draft, y)
    assert kinds(compiled).count("PointwiseStep") == 4 and kinds(compiled).count("AttentionStep") == 1


def test_one_value_of_heads_is_read_by_several():
    draft = Draft()
    x = split(draft, layer(draft, draft.image(2, 9, 32), 32), 2)
    y = attend(draft, x, x, x)
    check(draft, joined(draft, y), x, draft.op("transpose", y, dim0=1, dim1=2), y)
    z = attend(draft, y, x, y, is_causal=True)
    compiled = check(draft, draft.quantize(joined(draft, z)), draft.quantize(joined(draft, y)))
    assert kinds(compiled).count("AttentionStep") == 2


@pytest.mark.parametrize("function", ["relu", "gelu"])
def test_a_function_of_what_it_makes(function):
    """The step computes none: another one does."""
    draft = Draft()
    y = draft.op(function, joined(draft, attend(draft, *projected(draft, draft.image(2, 9, 32), 2))))
    check_both(draft, y)
    assert kinds(plan_of(draft, y))[4:] == ["AttentionStep", "PointwiseStep"]


# ---- integers that are turned and joined


def test_integers_are_turned_and_joined():
    """They stay where they are: the step writes them, and the layer reads them."""
    draft = Draft()
    y = draft.quantize(attend(draft, *projected(draft, draft.image(2, 9, 32), 4)))
    y = layer(draft, draft.dequantize(joined(draft, y)), 16)
    assert kinds(check(draft, y)) == ["QuantizeStep", *["ProductStep"] * 3, "AttentionStep", "ProductStep"]
    check(draft, draft.quantize(y))


def test_integers_are_split():
    draft = Draft()
    x = draft.quantize(layer(draft, draft.image(2, 9, 32), 32))
    parts = [draft.dequantize(split(draft, x, 4)) for _ in range(3)]
    check_both(draft, joined(draft, attend(draft, *parts)))


# ---- regions that take and return heads


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_float", [True, False])
@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize(("heads", "length", "depth"), [(4, 7, 8), (1, 5, 17), (3, 1, 16), (2, 20, 33)])
def test_heads_that_come_in(is_float, is_turned, heads, length, depth):
    """As (N, heads, L, D), or as (N, L, heads, D)."""
    draft = Draft()
    shape = (2, heads, length, depth) if is_turned else (2, length, heads, depth)
    inputs = [draft.input(draft.normal(*shape)) if is_float else draft.image(*shape) for _ in range(3)]
    parts = inputs if is_turned else [draft.op("transpose", x, dim0=2, dim1=1) for x in inputs]
    y = attend(draft, *parts)
    assert kinds(check(draft, joined(draft, y))).count("MoveStep") == 3
    check(draft, draft.quantize(joined(draft, y)))


def test_integers_of_heads_that_come_in():
    draft = Draft()
    inputs = [draft.input(torch.randint(0, 256, (2, 4, 7, 8), dtype=torch.uint8)) for _ in range(3)]
    parts = [draft.dequantize(x, (0.03, zero)) for x, zero in zip(inputs, (0, 100, 255), strict=True)]
    check_both(draft, joined(draft, attend(draft, *parts)))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("depth", [5, 16])
def test_heads_that_are_returned(heads, depth):
    """Turned or not; as floats, and as integers."""
    draft = Draft()
    y = attend(draft, *projected(draft, draft.image(2, 9, heads * depth), heads))
    back = draft.op("transpose", y, dim0=1, dim1=2)
    check_both(draft, y)
    check_both(draft, back)
    check(draft, draft.op("transpose", draft.quantize(y), dim0=1, dim1=2))
    q = draft.quantize(y)
    check(draft, y, back, q, draft.dequantize(q), joined(draft, q))


# ---- what is refused


def test_attention_that_is_refused():
    draft = Draft()
    parts = [split(draft, draft.image(2, 6, 32), 4) for _ in range(3)]
    assert refused(draft, attend(draft, *parts, dropout_p=0.5)) == "it drops values"


def test_places_that_attend_by_themselves():
    """The heads of each place, which are not its second axis: values are moved."""
    draft = Draft()
    plain = [draft.op("unflatten", draft.image(2, 4, 32), dim=2, sizes=(8, 4)) for _ in range(3)]
    check_both(draft, draft.op("flatten", attend(draft, *plain), start_dim=2))


@pytest.mark.parametrize("query", [(2, 6, 32), (6, 32)])
def test_attention_without_heads_is_refused(query):
    draft = Draft()
    parts = [draft.image(*query) for _ in range(3)]
    assert refused(draft, attend(draft, *parts)) == "its input has no heads"


def test_heads_that_differ_are_refused():
    """Fewer of keys, as with enable_gqa, one for all samples, and values of another depth."""
    draft = Draft()
    query, fewer = split(draft, draft.image(2, 6, 32), 4), split(draft, draft.image(2, 6, 16), 2)
    single, deeper = split(draft, draft.image(1, 6, 32), 4), split(draft, draft.image(2, 6, 64), 4)
    reason = "its heads differ"
    assert refused(draft, attend(draft, query, fewer, fewer, enable_gqa=True)) == reason
    assert refused(draft, attend(draft, query, single, single)) == reason
    assert refused(draft, attend(draft, query, query, deeper)) == reason


def test_integers_with_no_grid_are_refused():
    draft = Draft()
    x = split(draft, draft.input(torch.randint(0, 256, (2, 6, 32), dtype=torch.uint8)), 4)
    draft.values[x] = draft.values[x].float()
    assert refused(draft, attend(draft, x, x, x)) == "it computes with integers"


# ---- blocks of transformers


def by_view(x, heads):
    return x.view(x.size(0), x.size(1), heads, x.size(2) // heads).transpose(1, 2)


def by_reshape(x, heads):
    return x.reshape(x.shape[0], x.shape[1], heads, -1).permute(0, 2, 1, 3)


def by_unflatten(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2).contiguous()


class Block(nn.Module):
    """A block of width 32, whose heads are split in one of these ways, and joined as it goes with them."""

    way = staticmethod(by_view)
    is_causal = False

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x):
        y = self.first(x)
        parts = [self.way(part(y), 4) for part in (self.q, self.k, self.v)]
        compiled = F.scaled_dot_product_attention(*parts, is_causal=self.is_causal).transpose(1, 2)
        compiled = compiled.flatten(2) if self.is_causal else compiled.contiguous().view(x.shape[0], x.shape[1], -1)
        x = x + self.out(compiled)
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("way", [by_view, by_reshape, by_unflatten])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_block_is_one_region(way, is_causal, monkeypatch):
    monkeypatch.setattr(Block, "way", staticmethod(way))
    monkeypatch.setattr(Block, "is_causal", is_causal)
    model, x = settled(Block), torch.randn(2, 11, 32)
    q, form = whole(model, x)
    compiled = program(form, [x])
    assert (
        torch.equal(q(x), compiled(x))
        and kinds(compiled).count("AttentionStep") == 1
        and "MoveStep" not in kinds(compiled)
    )
    assert sqnr(form(x), q(x)) > 45 and sqnr(model(x), q(x)) > 20
    for shape in ((1, 11, 32), (2, 5, 32)):
        second = torch.randn(shape)
        assert sqnr(form(second), program(form, [second])(second)) > 45


def test_two_blocks_are_one_region():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Block(), Block()

        def forward(self, x):
            return self.other(self.one(x))

    model, x = settled(Two), torch.randn(2, 11, 32)
    q, form = whole(model, x)
    assert sqnr(form(x), q(x)) > 45 and kinds(program(form, [x])).count("AttentionStep") == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_layer_of_pytorch_is_one_region(norm_first):
    """One layer makes its queries, keys and values, which are cut."""
    model = settled(lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first))
    x = torch.randn(4, 9, 32)
    q = quantized(model, x)
    (kernel,) = regions(q)
    assert "scaled_dot_product_attention" in str(kernel.form.module(kernel).graph)
    assert [node.op for node in q.graph.nodes if node.op == "call_module"] == ["call_module"]
    assert sqnr(model(x), q(x)) > 30
