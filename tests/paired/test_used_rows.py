"""Rows that reach the output: padding does not."""

import math

import pytest
import torch
from torch import nn

import fxq
from fxq.common.data import as_batch
from fxq.common.metrics import sqnr
from fxq.graph.program import IsolatedGraph
from fxq.paired.used_rows import may_hold_padding, used_rows
from tests.support.graphs import until
from tests.support.helpers import REFERENCE, module


class Pooled(nn.Module):
    """Attention, a layer, and the mean of the tokens that a mask keeps: (N, L, 16), (N, L) bool to (N, 8)."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, keep):
        y, _ = self.attention(x, x, x, key_padding_mask=~keep, need_weights=False)
        z = self.down(self.up(x + y).relu())
        return (z * keep[..., None]).sum(1) / keep.sum(1)[:, None]


def padded(seed=0, size=1.0, samples=4):
    torch.manual_seed(seed)
    x, keep = torch.randn(samples, 10, 16), torch.arange(10) < torch.randint(3, 11, (samples, 1))
    keep[0] = torch.arange(10) < 4
    return torch.where(keep[..., None], x, size * torch.ones(16)), keep


def layers(manager):
    """The nodes of the layers of a qdq graph."""
    ops = [n for n in manager.gm.graph.nodes if n.name.startswith(("up", "down"))]
    return [n for n in ops if not n.name.endswith(("_q", "_dq", "_weight_dq"))]


def found_in(manager, inputs, at_once=None):
    """Which rows of the layers' values are used, in a batch."""
    batch = as_batch(inputs, manager.context.model, "x")
    return used_rows(IsolatedGraph(manager.gm, manager.gm.graph), batch, layers(manager), at_once)


def test_padding_is_not_used():
    torch.manual_seed(0)
    x, keep = padded()
    manager = until(Pooled().eval(), (x, keep), "insert-qdq", REFERENCE)
    used = found_in(manager, (x, keep))
    assert len(used) >= 2
    for rows in used.values():
        assert torch.equal(rows.view(4, 10), keep)


def test_all_rows_of_a_batch_without_padding_and_no_gradients_of_the_model():
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(4, 10, 16)
    inputs = x, torch.ones(4, 10, dtype=torch.bool)
    manager = until(model, inputs, "insert-qdq", REFERENCE)
    assert found_in(manager, inputs) == {}
    assert all(p.grad is None for p in model.parameters())


CHOICES = {
    "argmax": lambda z, k: (z[:, 0] * k[:, None], z.argmax(-1)),
    "maximum": lambda z, k: z.amax(1) * k[:, None],
    "topk": lambda z, k: z.topk(2, dim=1).values.sum(1) * k[:, None],
    "clamp": lambda z, k: z.clamp(0, 0.01) * k[:, None, None],
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_not_chosen_this_time_is_no_padding(name):
    """Most tokens have no gradients here, and each counts."""
    torch.manual_seed(0)
    model = module(lambda self, x, k: CHOICES[name](self.up(x), k), up=nn.Linear(16, 2))
    inputs = torch.randn(4, 12, 16), torch.ones(4)
    manager = until(model, inputs, "insert-qdq", REFERENCE)
    assert found_in(manager, inputs) == {}


def test_the_first_token_alone():
    """Tokens that a network always drops are not used, whatever its reason."""
    torch.manual_seed(0)
    model = module(lambda self, x, k: self.up(x)[:, 0] * k[:, None], up=nn.Linear(16, 2))
    inputs = torch.randn(4, 12, 16), torch.ones(4)
    manager = until(model, inputs, "insert-qdq", REFERENCE)
    (rows,) = found_in(manager, inputs).values()
    assert torch.equal(rows, (torch.arange(12) == 0).expand(4, 12))


def test_what_has_no_gradients_counts_whole():
    model = module(lambda self, x, k: self.up(x).argmax(-1) + k, up=nn.Linear(16, 8))
    inputs = torch.randn(2, 3, 16), torch.ones(2, 3, dtype=torch.int64)
    manager = until(model, inputs, "insert-qdq", REFERENCE)
    assert found_in(manager, inputs) == {}


def test_what_is_fitted_to_values_does_not_see_padding():
    """Whatever stands in the padding, biases are the same."""
    torch.manual_seed(0)
    model, spec = Pooled().eval(), fxq.TensorSpec(observer="minmax")
    recipe = fxq.Recipe.static(backend="reference", activation=spec).override("attention", fxq.FLOAT)
    fitted = [fxq.quantize(model, recipe, data=[padded(n, size) for n in range(8)]) for size in (0.5, -0.5)]
    plain = fxq.quantize(model, recipe.without_pass("correct-bias"), data=[padded(n) for n in range(8)])
    bias, bias_of_padded, before = (q.qparams()["up"].bias for q in (*fitted, plain))
    torch.testing.assert_close(bias, bias_of_padded, rtol=0, atol=1e-6)
    assert (bias - before).abs().max() > 1e-4


class Counted(nn.Module):
    """Keeps how often it was called."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_units_that_return_less_than_their_layer_and_modules_that_keep_something():
    """A convolution with pooling after it, a layer for one value, and a leaf."""
    torch.manual_seed(0)
    children = {"conv": nn.Conv2d(3, 8, 3), "pool": nn.MaxPool2d(2), "fc": nn.Linear(8, 1), "leaf": Counted()}
    model = module(
        lambda self, x, k: self.fc(self.leaf(self.pool(self.conv(x).relu()).mean((2, 3)))).flatten() * k, **children
    )
    data = [(torch.randn(4, 3, 8, 8), torch.tensor([1.0, 0.0, 1.0, 1.0])) for _ in range(8)]
    recipe = REFERENCE.leaf("leaf")
    qmodel = fxq.quantize(model, recipe, data=data)
    assert qmodel.history["correct-bias"].edits
    assert model.leaf.calls == 0
    again = fxq.quantize(model, recipe, data=data)
    assert torch.equal(qmodel.qparams()["conv"].bias, again.qparams()["conv"].bias)


def test_smooth_does_not_see_padding():
    """Padding that is 100 times as large would ask for a grid for each token."""
    torch.manual_seed(0)
    model = Pooled().eval()
    step = fxq.passes.Smooth(least=1)
    recipe = REFERENCE.without_pass("smooth").insert_pass(step, after="insert-qdq").override("attention", fxq.FLOAT)
    large = fxq.quantize(model, recipe.without_pass("correct-bias"), data=[padded(n, 100.0) for n in range(8)])
    hidden = [(x.masked_fill(~keep[..., None], 0.0), keep) for x, keep in (padded(n) for n in range(8))]
    observed = fxq.prepare(model, recipe.without_pass("correct-bias"), example_inputs=hidden[0])
    fxq.calibrate(observed, hidden)
    qmodel = fxq.convert(observed)
    assert [str(edit.rule) for edit in qmodel.history["smooth"].edits] == []
    assert large.history["smooth"].edits  # its calibrated grid reaches to the padding, and tokens lose by that
    with torch.no_grad():
        fresh = padded(99, 100.0, samples=64)
        assert sqnr(model(*fresh), large(*fresh)) > 25  # dB


class Refuses(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("not differentiable")


def looked_up(z, k):
    """The first token, and an entry of a table where a token's size says which: other sizes are out of range."""
    which = z.detach().abs().mean(-1).long().clamp(max=100 if float(z.detach().abs().max()) < 50 else 10**6)
    return z[:, 0] * k[:, None] + 0 * torch.zeros(100)[which].sum()


@pytest.mark.parametrize("last", [lambda z, k: Refuses.apply(z)[:, 0] * k[:, None], looked_up])
def test_models_that_take_no_gradients_and_no_other_numbers(last):
    torch.manual_seed(0)
    model = module(lambda self, x, k: last(self.up(x), k), up=nn.Linear(16, 2))
    inputs = 30 * torch.randn(4, 12, 16), torch.ones(4)
    manager = until(
        module(lambda self, x, k: self.up(x)[:, 0] * k[:, None], up=model.up), inputs, "insert-qdq", REFERENCE
    )
    assert found_in(manager, inputs) != {}
    qmodel = fxq.quantize(
        module(lambda self, x, k: self.tail(self.up(x), k), up=model.up, tail=Tail(last)),
        REFERENCE.leaf("tail"),
        data=[inputs],
    )
    assert qmodel.output_sqnr > 30


class Tail(nn.Module):
    """A leaf."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def forward(self, z, k):
        return self.last(z, k)


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_some_samples_at_a_time(at_once):
    """Samples without padding among others: all of their tokens are used."""
    torch.manual_seed(0)
    x, keep = padded(samples=7)
    keep[3:6] = True
    manager = until(Pooled().eval(), (x, keep), "insert-qdq", REFERENCE)
    used, whole = found_in(manager, (x, keep), at_once), found_in(manager, (x, keep))
    assert used.keys() == whole.keys() and len(used) >= 2
    for node, rows in used.items():
        assert torch.equal(rows, whole[node]) and torch.equal(rows.view(7, 10), keep)


MASKS = {
    "-inf": lambda scores, keep: scores.masked_fill(~keep[:, None], -math.inf),
    "least float": lambda scores, keep: scores + (1 - keep[:, None].float()) * torch.finfo(torch.float32).min,
    "-1e9": lambda scores, keep: scores + (1 - keep[:, None].float()) * -1e9,
}


class Written(Pooled):
    """Attention written out, with two heads, which are folded into the first axis if `folded`."""

    def __init__(self, mask, folded=False):
        super().__init__()
        self.mask, self.folded, self.qkv = mask, folded, nn.Linear(16, 48)

    def attention(self, x, *_, key_padding_mask, **__):
        q, k, v = (torch.cat(y.chunk(2, -1)) if self.folded else y for y in self.qkv(x).chunk(3, -1))
        keep = ~key_padding_mask
        scores = self.mask(q @ k.transpose(1, 2) / 4, torch.cat([keep, keep]) if self.folded else keep)
        y = scores.softmax(-1) @ v
        return torch.cat(y.chunk(2), -1) if self.folded else y, None


WRITTEN = [Pooled, *(lambda mask=mask: Written(mask) for mask in MASKS.values()), lambda: Written(MASKS["-inf"], True)]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("samples", [4, 20])
@pytest.mark.parametrize("make", WRITTEN, ids=["module", *MASKS, "folded heads"])
def test_what_pads_a_text_is_not_compared(make, samples):
    """Padding far outside of all ranges changes no output: it is no error of a layer, for the ledger and `compare`."""
    torch.manual_seed(0)
    model, (x, keep) = make().eval(), padded(size=1000.0, samples=samples)
    real = torch.where(keep[..., None], x, 0.0)
    qmodel = fxq.quantize(model, REFERENCE.without_pass("smooth"), data=[(real, keep)])
    ours, without = (
        {row.name: row for row in fxq.compare(model, qmodel, [(tokens, keep)]) if row.op in ("linear", "relu")}
        for tokens in (x, real)
    )
    assert len(ours) == 3
    for name, row in ours.items():
        assert min(row.sqnr, row.own_sqnr) > 25  # dB
        assert row.own_sqnr == pytest.approx(without[name].own_sqnr, abs=0.01)  # dB


def test_padding_that_calibrates_does_not_count_in_the_ledger():
    torch.manual_seed(0)
    model, (x, keep) = Pooled().eval(), padded(size=30.0)
    recipe = REFERENCE.without_pass("smooth").without_pass("correct-bias")
    qmodel = fxq.quantize(model, recipe, data=[(x, keep)])
    compared = {row.name: row for row in fxq.compare(model, qmodel, [(x, keep)]) if row.op in ("linear", "relu")}
    assert len(compared) == 3
    for name, row in compared.items():
        (entry,) = qmodel.ledger.where(name=name)
        assert entry.own_sqnr == pytest.approx(row.own_sqnr, abs=0.01)  # dB


def test_an_axis_that_counts_something_else_is_not_cut():
    """The first axis is that of the tokens, and the output is that of the first one alone."""
    torch.manual_seed(0)
    model = module(
        lambda self, x, k: self.down(self.up(x).relu())[0] * k[0], up=nn.Linear(8, 16), down=nn.Linear(16, 4)
    )
    inputs = torch.randn(20, 3, 8), torch.ones(20, 3, 1)
    x = inputs[0].clone()
    x[8:] *= 1000
    qmodel = fxq.quantize(model, REFERENCE.without_pass("smooth"), data=[inputs])
    assert min(row.sqnr for row in fxq.compare(model, qmodel, [(x, inputs[1])])) > 25  # dB


class Growing(nn.Module):
    """Module that adds a value that grows with every call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + 0.01 * self.calls


def test_a_module_that_keeps_something_from_call_to_call():
    torch.manual_seed(0)
    x, keep = padded()
    whole = module(lambda self, x, keep: self.inner(self.counted(x), keep), inner=Pooled().eval(), counted=Growing())
    manager = until(whole, (x, keep), "insert-qdq", REFERENCE.leaf("counted"))
    program, batch = IsolatedGraph(manager.gm, manager.gm.graph), as_batch((x, keep), whole, "x")
    nodes = [n for n in manager.gm.graph.nodes if n.name.startswith("inner_down")]
    first, again = (used_rows(program, batch, nodes) for _ in range(2))
    assert first and first.keys() == again.keys()


@pytest.mark.parametrize(
    ("inputs", "may"),
    [
        ([torch.rand(2, 3, 4)], False),
        ([torch.rand(2, 3, 4), torch.rand(2, 1, 3)], True),
        ([torch.tensor([[5, 7, 5], [8, 2, 8]]), torch.rand(2, 0, 4), torch.rand(2, 0, 4)], False),  # texts, no cache
        ([torch.tensor([[5, 7, 6], [8, 0, 0]])], True),
        ([torch.tensor([[5, 7, 6], [0, 0, 8]])], True),
        ([torch.tensor([[5, 7, 5, 6], [8, 9, 5, 5]])], False),  # a text that ends with a repeated word
        ([torch.tensor([[5, 7, 6]]), torch.ones(1, 3, dtype=torch.bool)], False),  # a mask that hides nothing
        ([torch.rand(1, 3, 4), torch.tensor([[1, 0, 1]])], True),
        ([torch.rand(2, 3, 4), torch.tensor([3, 3])], True),  # lengths
        ([torch.rand(0, 3, 4), torch.zeros(0, 3, dtype=torch.int64)], False),
    ],
)
def test_which_inputs_may_mark_padding(inputs, may):
    assert may_hold_padding(inputs) == may
