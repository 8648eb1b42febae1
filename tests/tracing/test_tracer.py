"""Tracing with the example's values: branches on sizes are traced and checked, those on data make a leaf."""

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.tracing.tracer import Tracer
from fxq.workflow.fastest import prepared_for_recipe
from tests.support.helpers import REFERENCE, module
from tests.support.machine import no_warnings
from tests.support.traced import Counts, Data, X, close, conv, resized, words

pytestmark = no_warnings


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- plain values


# ---- what sizes decide


def test_kernels_are_verified_where_samples_cannot_be_cut():
    """The graph runs on recorded samples, with another number of rows than the example."""
    model = module(lambda self, x: self.a(x) * len(x), a=conv(3, 16))
    x = torch.rand(9, 3, 8, 8)
    qmodel = fxq.quantize(model, "static", data=[x])
    with torch.no_grad():
        assert sqnr(model(x), qmodel(x)) > 30
    with pytest.raises(fxq.InputError, match="is 9, but here it is 2"):
        qmodel(x[:2])


# ---- what data decides


def test_a_leaf_may_return_anything():
    def ask(y):
        return y, {"twice": y * 2 if y.sum() < 1e9 else y, "none": None, "three": 3}

    def forward(self, x):
        y, more = self.t(x)
        return self.c(y) + more["twice"] * more["three"] + (0 if more["none"] is None else 1)

    with pytest.warns(fxq.FxqWarning, match=r'layer "t" \(Data\)'):
        close(module(forward, t=Data(ask), c=conv()), X)


@pytest.mark.parametrize("make", [lambda: Data(resized), lambda: Counts()], ids=["resized", "buffer"])
def test_many_modules_cost_one_more_trace(make, monkeypatch):
    traces = []
    trace_model = Tracer.trace_model
    monkeypatch.setattr(Tracer, "trace_model", lambda self, model: traces.append(1) or trace_model(self, model))
    with pytest.warns(fxq.FxqWarning, match="6 modules of the model cannot be traced"):
        prepared_for_recipe(nn.Sequential(*[make() for _ in range(6)], conv()).eval(), REFERENCE, Batch((X,), {}))
    assert len(traces) == 2


def test_a_loop_of_the_model_itself_is_unrolled():
    """There is no smaller module to keep in float."""
    qmodel = close(module(lambda self, x: sum(self.a(row[None]) for row in x), a=conv()), X)
    with pytest.raises(fxq.InputError, match="is 4, but here it is 3"):
        qmodel(X[:3])


# ---- the user's model


def test_a_buffer_that_is_changed_without_a_trace():
    model = nn.Sequential(Counts(), conv()).eval()
    with pytest.warns(fxq.FxqWarning, match=r"layer \"0\".*changes the buffer '0.count' in place"):
        fxq.prepare(model, REFERENCE, example_inputs=X)
    assert float(model[0].count) == 0
    with pytest.raises(fxq.TraceError, match="changes the buffer 'count' in place"):
        fxq.prepare(Counts().eval(), replace(REFERENCE, strict_trace=True), example_inputs=X)


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = nn.Sequential(conv(), nn.BatchNorm2d(3), nn.ReLU())
    close(model, X)


# ---- inputs and outputs

Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    a: torch.Tensor
    b: torch.Tensor | None = None


class Named(OrderedDict):
    """A mapping with attributes, as of a well-known library."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    "kind", [lambda a, b: (a, b), lambda a, b: {"a": a, "b": [b]}, Pair, Output, lambda a, b: Named(a=a, b=b)]
)
def test_outputs_are_of_their_own_kind(kind):
    model = module(lambda self, x: kind(self.a(x), x), a=conv())
    got, wanted = close(model, X)(X), model(X)
    assert type(got) is type(wanted)
    if hasattr(wanted, "a"):
        assert torch.equal(got.b, wanted.b)


def test_outputs_of_a_class_that_is_not_there():
    from fxq.graph.guards import make_output

    output = make_output("nowhere:Class", {"a": 1})
    assert output.a == output["a"] == 1
    with pytest.raises(AttributeError, match="b"):
        output.b  # noqa: B018


# ---- random numbers


# ---- an encoder as a well-known library writes it


def decorated(forward):
    """A wrapper that sets keywords of its own, and so does not take them by position."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **{**kwargs, "use_cache": False})

    return wrapper


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(30, 8), nn.Embedding(16, 8), nn.Embedding(2, 8)
        self.query, self.output = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("positions", torch.arange(16).expand(1, -1))
        self.register_buffer("kinds", torch.zeros(1, 16, dtype=torch.long))

    @decorated
    def forward(self, input_ids=None, attention_mask=None, embeds=None, use_cache=None, return_dict=True, **kwargs):
        if (input_ids is None) == (embeds is None):
            raise ValueError("give one of input_ids and embeds")
        shape = input_ids.size()
        n, length = shape
        x = self.word(input_ids) + self.place(self.positions[:, :length])
        x = x + self.kind(self.kinds[:, :length].expand(n, -1)) + self.kind(self.kinds.expand(n, -1)[:, :length])
        mask = attention_mask if attention_mask is not None else torch.ones(shape, device=x.device)
        if mask.dim() == 2:
            mask = mask[:, None, None, :].to(dtype=x.dtype)
        q = self.query(x).view(*shape, 2, -1).transpose(1, 2)
        scores = q @ q.transpose(-1, -2) + (1.0 - mask) * torch.finfo(x.dtype).min
        y = (scores.softmax(-1) @ q).transpose(1, 2).reshape(n, length, -1).contiguous().view(x.shape)
        return Named(a=self.output(y), b=x) if return_dict else (y,)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("masked", [True, False])
def test_an_encoder(masked):
    model, inputs = Encoder().eval(), words(2, 6, masked)
    with torch.no_grad():
        qmodel = close(model, **words(4, 9, masked))
        assert [e.path for e in qmodel.ledger if e.precision == "int8" and e.op == "linear"] == ["query", "output"]
        got, wanted = qmodel(**inputs), model(**inputs)
        traced = fxq.extend.run_passes(model, REFERENCE, example_inputs=words(4, 9, masked), until="trace")(**inputs)
    assert torch.allclose(traced.a, wanted.a, atol=1e-5) and sqnr(wanted, got) > 20
    assert isinstance(got, Named) and got.a.shape == got["b"].shape == (2, 6, 8)
    with pytest.raises(fxq.InputError, match="traced for return_dict=True"):
        qmodel(**inputs, return_dict=False)


# ---- what a graph holds, and what it does not


CALLS = {
    "own": lambda self, x: functional_call(self.l, dict(self.l.named_parameters()), (x,)),
    "parameter": lambda self, x: functional_call(self.l, {"weight": self.w, "bias": self.l.bias}, x),
    "computed": lambda self, x: functional_call(self.l, {"weight": torch.tanh(self.w)}, x),
    "of data": lambda self, x: functional_call(self.l, {"bias": x.mean(0)}, x),
    "nested": lambda self, x: functional_call(self.s, {"0.weight": self.w}, x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_functional_call(call):
    """A layer that is called with other weights is no leaf: "__hash__ method should return an integer"."""
    layers = {"l": nn.Linear(8, 8), "s": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "o": nn.Linear(8, 4)}
    model = module(lambda self, x: self.o(call(self, x)), w=torch.randn(8, 8), **layers)
    x = torch.randn(4, 8)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    qmodel = close(model, x)
    assert [e.precision for e in qmodel.ledger.where(op="linear")].count("int8") == (
        1 if call is CALLS["of data"] else 2
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_leaf_is_not_called_with_other_weights():
    inner = module(CALLS["parameter"], l=nn.Linear(8, 8), w=torch.randn(8, 8))
    with pytest.raises(fxq.TraceError, match=r'layer "l" is called with weights .* a leaf is called with its own'):
        fxq.quantize(inner, REFERENCE.leaf("l"), data=[torch.randn(4, 8)])
    outer = module(lambda self, x: self.o(self.inner(x)), inner=inner, o=nn.Linear(8, 4))
    with pytest.warns(fxq.FxqWarning, match='layer "inner" .* cannot be traced'):
        qmodel = fxq.quantize(outer, REFERENCE.leaf("inner.l"), data=[x := torch.randn(4, 8)])
    assert [(e.path, e.precision) for e in qmodel.ledger] == [("inner", "float"), ("o", "int8")]
    with torch.no_grad():
        assert sqnr(outer(x), qmodel(x)) > 30


class Cache:
    """Cache that a decoder returns besides its output, of a class that a graph cannot construct."""


@pytest.mark.parametrize(
    ("forward", "way"),
    [
        (lambda self, x, use_cache=True: (self.l(x), Cache()) if use_cache else self.l(x), "fix_args(use_cache=False)"),
        (lambda self, x: (self.l(x), Cache()), "return tensors, or tuples, lists, dicts and dataclasses of tensors"),
    ],
)
def test_an_object_that_no_graph_holds(forward, way):
    """Once, the message suggested torch.where for a cache."""
    model = module(forward, l=nn.Linear(8, 4))
    with pytest.raises(fxq.TraceError, match="an object of type Cache is returned") as caught:
        fxq.prepare(model, replace(REFERENCE, strict_trace=True), example_inputs=(torch.randn(4, 8),))
    assert way in str(caught.value) and "torch.where" not in str(caught.value)
    if "use_cache" in way:
        assert fxq.quantize(model, REFERENCE.fix_args(use_cache=False), data=[(torch.randn(4, 8),)])


class Values(Mapping):
    """Mapping whose constructor takes keyword arguments, not a mapping."""

    def __init__(self, **values):
        self.values_by_name = values

    def __getitem__(self, name):
        return self.values_by_name[name]

    def __iter__(self):
        return iter(self.values_by_name)

    def __len__(self):
        return len(self.values_by_name)


class Negated(dict):
    """Dict whose constructor changes the values."""

    def __init__(self, values):
        super().__init__({name: -value for name, value in values.items()})


@pytest.mark.parametrize(
    ("construct", "why"),
    [
        (lambda y: Values(y=y), r"type Values is returned or .* its fields or items: .*positional argument"),
        (lambda y: Negated({"y": y}), "type Negated is returned or .*: its constructor changes them"),
    ],
)
def test_a_container_that_cannot_be_made_of_its_items(construct, why):
    """Once, the message said that the model does not run on the example, or the output was changed twice."""
    model = module(lambda self, x: construct(self.l(x)), l=nn.Linear(8, 4))
    with pytest.raises(fxq.TraceError, match=why):
        fxq.prepare(model, replace(REFERENCE, strict_trace=True), example_inputs=torch.ones(4, 8))


def test_nothing_is_printed_where_a_graph_is_tried_on_one_sample(capsys):
    """torch.fx prints what goes wrong in a graph module's call: 24 lines of a quantization that worked."""

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(self.l(x), [5, 4, 3], batch_first=True)
        return self.o(nn.utils.rnn.pad_packed_sequence(self.r(packed)[0], batch_first=True)[0])

    model = module(forward, l=nn.Linear(8, 8), r=nn.LSTM(8, 8, batch_first=True), o=nn.Linear(8, 4))
    close(model, torch.randn(3, 5, 8))
    assert capsys.readouterr() == ("", "")
    with pytest.raises(fxq.InputError, match=r"data, batch 1 .*the model does not run on it"):
        fxq.quantize(model, REFERENCE, data=[torch.randn(3, 5, 8), torch.randn(3, 5, 9)])
    assert capsys.readouterr() == ("", "")
