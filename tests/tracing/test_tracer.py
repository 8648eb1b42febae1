"""Tracing with the example's values: what sizes decide is decided and checked, what data decides becomes a leaf."""

import functools
import math
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.tracing.tracer import Tracer
from tests.graphs import after, expected, text
from tests.helpers import REFERENCE, module
from tests.machine import no_warnings

X = torch.linspace(-1, 1, 768).reshape(4, 3, 8, 8)
pytestmark = no_warnings


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def conv(inputs=3, outputs=3):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def close(model, *inputs, **named):
    """The quantized model; it is within 30 dB of the float model on these inputs."""
    model = model.eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[Batch(inputs, named)])
    with torch.no_grad():
        assert sqnr(model(*inputs, **named), qmodel(*inputs, **named)) > 30
    return qmodel


# ---- plain values


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y / np.sqrt(8.0),
        lambda y: np.sqrt(2.0) * y,
        lambda y: np.float32(1) - y,
        lambda y: y + np.int64(1),
        lambda y: F.leaky_relu(y, np.float64(0.1)),
        lambda y: F.interpolate(y, scale_factor=np.float64(2.0)),
        lambda y: torch.clamp(y, -1, np.float64(1.0)),
        lambda y: y.reshape(y.shape[0], np.prod(y.shape[1:])),
    ],
    ids=["div", "in front", "float32", "int64", "slope", "scale", "bound", "size"],
)
def test_numbers_of_numpy_are_numbers(use):
    close(module(lambda self, x: use(self.a(x)), a=conv()), X)


# ---- what sizes decide


def test_arithmetic_on_sizes_stays_in_the_graph():
    model = module(lambda self, x: self.a(x).view(x.size(0), -1), a=conv())
    assert text(after(model, X, "trace")) == expected("""
        x = input
        a = module Conv2d(x)
        size = .size(x, 0)
        view = .view(a, size, -1)
        return view
    """)
    assert close(model, X)(X[:1]).shape == (1, 192)


def by_channels(self, x):
    if x.shape[1] == 3:
        x = x * 2
    return self.a(x)


def test_a_branch_on_a_size_is_checked():
    gm = after(module(by_channels, a=nn.Conv2d(3, 4, 1)), X, "trace")
    assert "check_same(eq, True, how='bool'" in text(gm)
    qmodel = (
        close(module(by_channels, a=nn.Identity(), b=conv()), X) if False else close(module(by_channels, a=conv()), X)
    )
    with pytest.raises(
        fxq.InputError, match=r"test_tracer\.py:\d+: .*`if x.shape\[1\] == 3:` is True, and here it is Fal"
    ):
        qmodel(torch.rand(2, 4, 8, 8))
    assert qmodel(X[:2]).shape == (2, 3, 8, 8)


def unpacked(self, x):
    n, c, h, w = x.shape
    return self.a(x).reshape(n, c * h, w)


def looped(self, x):
    for i in range(x.shape[2] // 4):
        x = self.a(x) + i
    return x


def chunks(self, x):
    total = 0
    for part in x.chunk(3, 1):
        total = total + part
    for part in x.split(1, dim=1):
        total = total + part
    for part in torch.unbind(x, 1):
        total = total + part.unsqueeze(1)
    return self.a(total + x)


def questions(self, x):
    if x.dim() == 4 and x.dtype == torch.float32 and x.is_floating_point() and isinstance(x, torch.Tensor):
        return self.a(x) * len(x)
    return x


def numbers(self, x):
    size = int(x.shape[2] // 2), round(x.shape[3] / 3)
    return F.interpolate(self.a(x), size=size) * math.sqrt(x.shape[1]) * max(x.shape[2], 4) * float(x.shape[2])


def masks(self, x):
    n, s = x.shape[0], x.shape[2]
    mask = torch.ones(n, 1, s, s, device=x.device).tril().to(x.dtype)
    if mask.dim() == 4:
        mask = (1 - mask) * torch.finfo(x.dtype).min
    position = torch.arange(s, device=x.device).expand(n, -1)
    return torch.softmax(self.a(x) + mask, -1) + position[:, None, None, :] + self.table[:, :s]


FORWARDS = [(unpacked, True), (looped, True), (chunks, True), (questions, False), (numbers, True), (masks, True)]


@pytest.mark.parametrize(("forward", "any_batch"), FORWARDS)
def test_what_sizes_decide_goes_through(forward, any_batch):
    model = module(forward, a=conv())
    model.register_buffer("table", torch.randn(8, 16))
    qmodel = close(model, X)
    if any_batch:
        with torch.no_grad():
            assert sqnr(model(X[:3]), qmodel(X[:3])) > 30
    else:
        with pytest.raises(fxq.InputError, match="is 4, and here it is 3"):
            qmodel(X[:3])


@pytest.mark.parametrize("forward", [looped, chunks, numbers])
def test_another_size_is_an_error_or_right(forward):
    model = module(forward, a=conv())
    qmodel = close(model, X)
    with pytest.raises(fxq.InputError, match="the graph was made for an input for which"):
        qmodel(torch.rand(4, 4 if forward is chunks else 3, 12, 12))


def test_checks_do_not_stop_quantization_around_them():
    def forward(self, x):
        x = self.a(x)
        if x.shape[1] == 3:
            x = self.b(x)
        return self.c(x)

    qmodel = close(module(forward, a=conv(), b=conv(), c=conv()), X)
    assert [e.fate for e in qmodel.ledger] == ["int8"] * 3
    quantized = [n for n in qmodel.history["insert-qdq"].graph if n.label == "quantize"]
    assert len(quantized) == 3


class AssertingNorm(nn.BatchNorm2d):
    """As timm writes it."""

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        assert len(x.shape) == x.dim()
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def test_ranks_are_no_nodes_that_stand_between_ops():
    model = module(lambda self, x: F.relu(self.norm(self.a(x))), a=conv(), norm=AssertingNorm(3))
    assert text(after(model, X, "fold-batch-norm")) == expected("""
        x = input
        check_fixed = check_fixed({'x': x}, {'x': '<a tensor with 4 axes>'})
        a = conv2d(x, @fxq_data.a_weight_folded, @fxq_data.a_bias_folded, padding=(1, 1))
        relu = relu(a)
        return relu
    """)


def test_another_rank_than_the_example_has_is_refused():
    model = module(lambda self, x: self.a(x) if x.dim() == 2 else self.a(x).mean(1), a=nn.Linear(8, 3))
    qmodel = close(model, X[0, 0])
    with pytest.raises(fxq.InputError, match=r"x=a tensor with 2 axes, .* got a tensor of float32 with 3 axes"):
        qmodel(X[0])


@pytest.mark.parametrize("squeezed", [lambda x: x.squeeze(), lambda x: torch.squeeze(x, 0)])
def test_ranks_behind_a_squeeze_depend_on_sizes_and_are_checked(squeezed):
    def forward(self, x):
        y = squeezed(self.a(x))
        return y.flatten(1) if y.dim() == 4 else y.flatten()

    qmodel = close(module(forward, a=conv()), X)
    with pytest.raises(fxq.InputError, match=r"bool of a value in `.*y.dim\(\) == 4.*` is True"):
        qmodel(X[:1])


def test_dtypes_that_decide_are_checked():
    qmodel = close(module(lambda self, x: self.a(x) if x.dtype == torch.float32 else x, a=conv()), X)
    with pytest.raises(
        fxq.InputError, match="made for x=a tensor of float32, as its example has it, and got a tensor of"
    ):
        qmodel(X.double())


def test_kernels_are_verified_where_samples_cannot_be_cut():
    """A few samples are recorded for that: another number of rows than the graph was made for."""
    model = module(lambda self, x: self.a(x) * len(x), a=conv(3, 16))
    x = torch.rand(9, 3, 8, 8)
    qmodel = fxq.quantize(model, "static", data=[x])
    with torch.no_grad():
        assert sqnr(model(x), qmodel(x)) > 30
    with pytest.raises(fxq.InputError, match="is 9, and here it is 2"):
        qmodel(x[:2])


# ---- what data decides


class Data(nn.Module):
    """Asks `ask` of a value that depends on the data."""

    def __init__(self, ask):
        super().__init__()
        self.a, self.ask = conv(), ask

    def forward(self, x):
        return self.ask(self.a(x))


def caught(y):
    try:
        return y + int(y.sum())
    except TypeError:
        return y
    except Exception:
        return y + 1


def overwritten(y):
    z = y * 2
    view = z.view(-1)
    z.relu_()
    return z + view.view_as(z)


def assigned(y):
    z = y.clone()
    z[:, 0] = 0
    return z


ASKS = {
    "branch": (lambda y: y if y.mean() > 9 else -y, "a branch on a value that depends on the data"),
    "rows": (lambda y: y + sum(row for row in y), "a loop over the rows of a tensor"),
    "int": (lambda y: y + int(y.sum()), r"int\(\) of a value that depends on the data"),
    "numpy": (lambda y: torch.from_numpy(y.detach().numpy() * 2), "np.ndarray"),
    "caught": (caught, r"int\(\) of a value that depends"),
    "in place": (overwritten, "reads the same memory"),
    "assigned": (assigned, "an assignment to a part of a tensor"),
    "type": (lambda y: y if type(y) is torch.Tensor else y + 1, "does not compute what the model computes"),
}


@pytest.mark.parametrize("name", ASKS)
def test_the_smallest_module_stays_in_float(name):
    ask, why = ASKS[name]
    model = nn.Sequential(conv(), nn.Sequential(nn.Sequential(Data(ask), nn.ReLU()), conv())).eval()
    with pytest.warns(fxq.FxqWarning, match=rf'1 module .*layer "1.0.0" \(Data\) cannot be traced: .*{why}'):
        qmodel = close(model, X)
    assert [(e.path, e.fate) for e in qmodel.ledger] == [
        ("0", "int8"), ("1.0.0", "float"), ("1.0.1", "float"), ("1.1", "int8")
    ]  # fmt: skip
    assert "cannot be traced" in qmodel.ledger[1].reason
    assert "cannot be traced" in qmodel.history["trace"].graph["_1_0_0"].note
    with torch.no_grad():
        assert sqnr(model(X[:2]), qmodel(X[:2])) > 30


@pytest.mark.parametrize("name", ASKS)
def test_strict_tracing_refuses(name):
    ask, why = ASKS[name]
    with pytest.raises(fxq.TraceError, match=why):
        fxq.prepare(nn.Sequential(conv(), Data(ask)).eval(), fxq.Recipe.static(strict_trace=True), X)


def test_a_leaf_may_return_anything():
    def ask(y):
        return y, {"twice": y * 2 if y.sum() < 1e9 else y, "none": None, "three": 3}

    def forward(self, x):
        y, more = self.t(x)
        return self.c(y) + more["twice"] * more["three"] + (0 if more["none"] is None else 1)

    with pytest.warns(fxq.FxqWarning, match=r'layer "t" \(Data\)'):
        close(module(forward, t=Data(ask), c=conv()), X)


def test_one_warning_for_many_modules():
    blocks = [Data(ASKS["branch"][0]) for _ in range(6)]
    with pytest.warns(
        fxq.FxqWarning, match=r"6 modules of the model cannot be traced.*and 3 more, see the ledger"
    ) as seen:
        close(nn.Sequential(*blocks, conv()), X)
    assert len(seen) == 1


@pytest.mark.parametrize("make", [lambda: Data(overwritten), lambda: Counts()], ids=["in place", "buffer"])
def test_many_modules_cost_one_more_trace(make, monkeypatch):
    traces = []
    trace_model = Tracer.trace_model
    monkeypatch.setattr(Tracer, "trace_model", lambda self, model: traces.append(1) or trace_model(self, model))
    with pytest.warns(fxq.FxqWarning, match="6 modules of the model cannot be traced"):
        fxq.prepare(nn.Sequential(*[make() for _ in range(6)], conv()).eval(), REFERENCE, X)
    assert len(traces) == 2


def test_a_loop_of_the_model_itself_is_unrolled():
    """There is no smaller module to keep in float."""
    qmodel = close(module(lambda self, x: sum(self.a(row[None]) for row in x), a=conv()), X)
    with pytest.raises(fxq.InputError, match="is 4, and here it is 3"):
        qmodel(X[:3])


def test_a_branch_of_the_model_itself_is_refused():
    def helper(y):
        return y if y.sum() > 0 else -y

    with pytest.raises(fxq.TraceError, match=r"test_tracer\.py:\d+: a branch on .*%gt = gt\(%sum_1\).*Two ways out"):
        close(module(lambda self, x: helper(self.a(x)), a=conv()), X)


# ---- the user's model


class Keeps(nn.Module):
    """Leaves something behind on itself."""

    def __init__(self):
        super().__init__()
        self.a, self.last, self.all, self.calls = conv(), None, [], 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.last = self.a(x)
        self.all.append(self.last)
        self.calls += 1
        return self.last


class Counts(Keeps):
    def forward(self, x):
        self.count.add_(1)
        return self.a(x)


def test_what_a_forward_leaves_on_the_model_is_taken_off():
    model = nn.Sequential(Keeps(), conv())
    fxq.prepare(model.eval(), REFERENCE, X)
    assert (model[0].last, model[0].all, model[0].calls) == (None, [], 0)


def test_a_buffer_that_is_changed_without_a_trace():
    model = nn.Sequential(Counts(), conv()).eval()
    with pytest.warns(fxq.FxqWarning, match=r"layer \"0\".*changes the buffer '0.count' in place"):
        fxq.prepare(model, REFERENCE, X)
    assert float(model[0].count) == 0
    with pytest.raises(fxq.TraceError, match="changes the buffer 'count' in place"):
        fxq.prepare(Counts().eval(), REFERENCE, X)


class Remembers(Keeps):
    """Sets a buffer, a number and a list, and reads them again."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        if self.what == "count":
            self.count = self.count + 1
            return x * self.count
        if self.what == "calls":
            self.calls += 1
            return x * self.calls
        self.all.append(x.amax())
        return x + torch.stack(self.all).sum()


@pytest.mark.parametrize("what", ["count", "calls", "all"])
def test_a_module_that_remembers_is_no_graph(what):
    """Traced, it would be as it is in the first call for ever."""
    model = nn.Sequential(conv(), Remembers(what), conv()).eval()
    words = f"sets '{what}' and returns something else when it runs again"
    with pytest.warns(fxq.FxqWarning, match=rf'layer "1".*{words}'):
        qmodel = fxq.quantize(model, REFERENCE, data=[X, X])
    assert (float(model[1].count), model[1].calls, model[1].all) == (0, 0, [])
    for _ in range(2):
        assert sqnr(model(X), qmodel(X)) > 30
    with pytest.raises(fxq.TraceError, match=words):
        fxq.prepare(Remembers(what).eval(), REFERENCE, X)


def test_a_leaf_that_counts_is_left_as_it_was():
    model = nn.Sequential(Counts(), conv()).eval()
    with pytest.warns(fxq.FxqWarning, match="changes the buffer"):
        qmodel = fxq.quantize(model, REFERENCE, data=[X, X])
    assert float(model[0].count) == 0 and float(qmodel.get_submodule("0").count) == 0


def test_a_cache_is_no_memory():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.grid, self.by_size = conv(), None, {}

        def forward(self, x):
            if self.grid is None:
                self.grid = torch.linspace(0, 1, 8)
            self.by_size.setdefault(x.shape[1], x)
            return self.a(x + self.grid)

    close(Caches(), X)


def test_torch_is_what_it_was_afterwards():
    """Replacing Tensor.__getitem__ for a while would make tensors sequences for the rest of the process."""
    scale, shift = torch.tensor(2.0), torch.tensor(1.0)
    close(module(lambda self, x: self.a(x) * torch.tensor([x.mean(), x.std()])[1], a=conv()), X)
    assert torch.tensor([scale, shift]).tolist() == [2.0, 1.0]
    assert "__getitem__" not in vars(torch.Tensor)


def test_a_shape_that_sizes_make():
    close(module(lambda self, x: (lambda y: F.layer_norm(y, y.shape[1:]))(self.a(x)), a=conv()), X)


def test_a_tensor_of_the_model_with_a_traced_index():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.rand(9, 5))
            self.a = nn.Linear(5, 3)

        def forward(self, x):
            return self.a(self.table[x] + self.table[None, : x.shape[1]])

    model, x = Model(), torch.tensor([[1, 8, 0], [4, 3, 2]])
    qmodel = close(model, x)
    with torch.no_grad():
        assert sqnr(model(x[:, :2]), qmodel(x[:, :2])) > 25


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

    made = make_output("nowhere:Class", {"a": 1})
    assert made.a == made["a"] == 1
    with pytest.raises(AttributeError, match="b"):
        made.b  # noqa: B018


def nested(self, inputs, scale=None):
    y = self.a(inputs["x"])
    for extra in inputs["list"]:
        y = y + extra
    if inputs["flag"] and "no" not in inputs:
        y = y * inputs["number"]
    return y if scale is None else y * scale


def nest(x, n=2, flag=True):
    return {"x": x, "list": [x] * n, "flag": flag, "number": 3}


def test_nested_inputs():
    model = module(nested, a=conv())
    qmodel = close(model, nest(X))
    with torch.no_grad():
        other = {**nest(X[:1]), "number": 5.0}
        assert sqnr(model(other), qmodel(other)) > 30
    for wrong, words in [
        (nest(X, 3), r"inputs\['list'\]=\[a tensor, a tensor\]"),
        (nest(X, flag=False), r"inputs\['flag'\]=True, as its example has it, and got"),
        ({"x": X}, "made for inputs={'x': a tensor, 'list'"),
    ]:
        with pytest.raises(fxq.InputError, match=f"{words}.*Quantize the model again with inputs"):
            qmodel(wrong)
    assert close(model, nest(X), scale=torch.ones(1))(nest(X), torch.ones(1)).shape == X.shape


def test_keywords_that_a_signature_does_not_name():
    model = module(lambda self, x, **named: self.a(x) * named.get("gain", 1) + len(named), a=conv())
    assert [n.name for n in close(model, X, gain=torch.ones(1)).graph.nodes if n.op == "placeholder"] == ["x", "gain"]
    with pytest.raises(TypeError, match="gain"):
        close(model, X)(X, gain=torch.ones(1))


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_inputs_is_checked(count):
    qmodel = close(module(lambda self, *xs: self.a(sum(xs)), a=conv()), *[X] * count)
    with pytest.raises(fxq.InputError, match="made for xs="):
        qmodel(*[X] * (count + 1))


def with_mode(self, x, mode, gain=2, *, flag=True):
    y = self.a(x) if mode == "plain" else -self.a(x)
    return y * gain if flag else y


def test_concrete_arguments():
    model = module(with_mode, a=conv())
    recipe = REFERENCE.fix_args(mode="negative", gain=3, flag=False)
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    qmodel = fxq.quantize(model, recipe, data=[{"x": X}])
    with torch.no_grad():
        assert sqnr(model(X, "negative", 3, flag=False), qmodel(X)) > 30
    for wrong in ({"mode": "plain"}, {"mode": "negative", "gain": 2}, {"mode": "negative", "flag": True}):
        with pytest.raises(fxq.InputError, match="the graph was made for"):
            qmodel(X, **wrong)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"mod": "plain"}, "unknown argument in concrete_args 'mod'; did you mean 'mode'"),
        ({"mode": "plain", "x": X}, "concrete_args: x is a Tensor, not a plain value"),
        ({"mode": "plain", "gain": 3}, "concrete_args fixes gain=3, and the data gives 5"),
    ],
)
def test_concrete_arguments_that_do_not_fit(fixed, words):
    with pytest.raises(fxq.RecipeError, match=words):
        fxq.quantize(module(with_mode, a=conv()), REFERENCE.fix_args(**fixed), data=[{"x": X, "gain": 5}])


# ---- random numbers


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: torch.rand(1),
        lambda x: torch.randn(3, 1, 1),
        lambda x: torch.rand_like(torch.zeros(1)),
        lambda x: torch.randperm(3).float()[:, None, None],
        lambda x: torch.normal(0.0, 1.0, (1,)),
        lambda x: torch.empty(1).uniform_(-1, 1),
        lambda x: torch.zeros(3, 1, 1).normal_().mul(2),
        lambda x: filled(torch.empty(1)),
        lambda x: nn.init.normal_(torch.empty(1)),
    ],
    ids=["rand", "randn", "rand_like", "randperm", "normal", "uniform_", "normal_", "filled before", "init"],
)
def test_random_numbers_are_drawn_in_every_call(noise):
    model = module(lambda self, x: self.a(x + noise(x)), a=conv()).eval()
    traced = after(model, X, "trace")
    with torch.no_grad():
        wanted, got = drawn(model), drawn(traced)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted, got, strict=True))
    assert not torch.allclose(*got, atol=1e-2)


def filled(tensor):
    """The tensor itself, not what the method returns."""
    tensor.exponential_()
    return tensor


def drawn(model):
    """What two calls return that start at the same seed."""
    torch.manual_seed(1)
    return [model(X), model(X)]


@pytest.mark.parametrize("noise", [lambda: torch.empty(1).uniform_(1, 9), lambda: filled(torch.empty(1))])
def test_random_numbers_are_drawn_in_every_call_of_the_quantized_model(noise):
    """Nothing takes the numbers of the example for a constant that a kernel could hold."""
    model = module(lambda self, x: self.b(self.a(x) * noise()), a=conv(), b=nn.Conv2d(3, 4, 1)).eval()
    recipe = fxq.Recipe.static(optimize="coverage").with_min_sqnr(None)  # calibration sees other numbers
    qmodel = fxq.quantize(model, recipe, data=[X])
    with torch.no_grad():
        torch.manual_seed(1)
        assert not torch.allclose(qmodel(X), qmodel(X), atol=1e-2)


def test_models_run_and_are_traced_in_several_threads_at_once():
    """Of a trace another thread sees nothing, and two traces leave torch as it was."""
    model, other, results, errors = nn.Sequential(conv(), nn.ReLU(), conv()).eval(), conv(), [], []
    with torch.no_grad():
        want = other(X)

    def forward(self, x):
        thread = threading.Thread(target=lambda: results.append(torch.equal(other(X), want)))
        thread.start()
        thread.join()
        return self.other(x)

    def work():
        try:
            for _ in range(3):
                fxq.compare(model, fxq.quantize(model, REFERENCE, data=[X]), [X])
        except BaseException as error:
            errors.append(error)

    after(module(forward, other=other).eval(), X, "trace")
    assert results and all(results)
    call, threads = nn.Module.__call__, [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and nn.Module.__call__ is call


def test_another_thread_draws_numbers_of_its_own():
    drawn_beside = []

    def forward(self, x):
        beside = threading.Thread(target=lambda: drawn_beside.append(torch.rand(1)))
        beside.start()
        beside.join()
        return self.a(x)

    after(module(forward, a=conv()).eval(), X, "trace")
    assert {type(value) for value in drawn_beside} == {torch.Tensor}


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


@pytest.mark.parametrize("masked", [True, False])
def test_an_encoder(masked):
    model, other = Encoder().eval(), words(2, 6, masked)
    with torch.no_grad():
        qmodel = close(model, **words(4, 9, masked))
        assert [e.path for e in qmodel.ledger if e.fate == "int8" and e.op == "linear"] == ["query", "output"]
        got, wanted = qmodel(**other), model(**other)
        traced = fxq.run_passes(model, REFERENCE, words(4, 9, masked), until="trace")(**other)
    assert torch.allclose(traced.a, wanted.a, atol=1e-5) and sqnr(wanted, got) > 20
    assert isinstance(got, Named) and got.a.shape == got["b"].shape == (2, 6, 8)
    with pytest.raises(fxq.InputError, match="made for return_dict=True"):
        qmodel(**other, return_dict=False)


def words(n, length, masked):
    ids = torch.arange(n * length).reshape(n, length) % 30
    return {"input_ids": ids, **({"attention_mask": (ids > 2).long()} if masked else {})}


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
    assert [e.fate for e in qmodel.ledger.where(op="linear")].count("int8") == (1 if call is CALLS["of data"] else 2)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_leaf_is_not_called_with_other_weights():
    inner = module(CALLS["parameter"], l=nn.Linear(8, 8), w=torch.randn(8, 8))
    with pytest.raises(fxq.TraceError, match=r'layer "l" is called with weights .* a leaf is called with its own'):
        fxq.quantize(inner, REFERENCE.leaf("l"), data=[torch.randn(4, 8)])
    outer = module(lambda self, x: self.o(self.inner(x)), inner=inner, o=nn.Linear(8, 4))
    with pytest.warns(fxq.FxqWarning, match='layer "inner" .* cannot be traced'):
        qmodel = fxq.quantize(outer, REFERENCE.leaf("inner.l"), data=[x := torch.randn(4, 8)])
    assert [(e.path, e.fate) for e in qmodel.ledger] == [("inner", "float"), ("o", "int8")]
    with torch.no_grad():
        assert sqnr(outer(x), qmodel(x)) > 30


class Cache:
    """What a decoder returns besides its output: no container that a graph knows."""


@pytest.mark.parametrize(
    ("forward", "way"),
    [
        (lambda self, x, use_cache=True: (self.l(x), Cache()) if use_cache else self.l(x), "fix_args(use_cache=False)"),
        (lambda self, x: (self.l(x), Cache()), "return tensors, and tuples, lists, dicts and dataclasses of them"),
    ],
)
def test_an_object_that_no_graph_holds(forward, way):
    """The message told to write a cache without torch.where."""
    model = module(forward, l=nn.Linear(8, 4))
    with pytest.raises(fxq.TraceError, match="an object of type Cache is returned") as caught:
        fxq.quantize(model, REFERENCE, data=[(torch.randn(4, 8),)])
    assert way in str(caught.value) and "torch.where" not in str(caught.value)
    if "use_cache" in way:
        assert fxq.quantize(model, REFERENCE.fix_args(use_cache=False), data=[(torch.randn(4, 8),)])


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
