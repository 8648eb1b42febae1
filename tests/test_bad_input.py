"""The bad-input table: an error of fxq that says what, where, why and what to do, and the user's model untouched."""

import contextlib
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxq
from tests.support.graphs import equal
from tests.support.helpers import REFERENCE, module

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.body(self.act(self.stem(x))))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        if y.mean() > 100:  # BRANCH
            return y
        return -y


def net(change=None):
    torch.manual_seed(0)
    model = Net().eval()
    if change is not None:
        with torch.no_grad():
            change(model)
    return model


def two_inputs():
    return module(lambda self, x, y: self.conv(x) + y, conv=nn.Conv2d(3, 3, 1))


def state(model):
    """Everything of a model that fxq must not touch."""
    modules = [
        (path, id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
        for path, m in model.named_modules()
    ]
    tensors = [(n, id(t), t.requires_grad) for n, t in (*model.named_parameters(), *model.named_buffers())]
    return modules, tensors


@contextlib.contextmanager
def untouched(model):
    """The model has the same modules, flags, hooks, tensors and values afterwards."""
    before, values = state(model), copy.deepcopy(model.state_dict())
    yield
    assert state(model) == before
    for name, value in model.state_dict().items():
        if not value.is_meta:
            assert torch.equal(value.nan_to_num(), values[name].nan_to_num()), name


def refused(model, error, *words, data=(X,), recipe=REFERENCE, **options):
    """`fxq.quantize` raises exactly this error, whose message has all the words."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, nn.Module):
            stack.enter_context(untouched(model))
        with pytest.raises(fxq.FxqError) as info:
            fxq.quantize(model, recipe, data=list(data) if isinstance(data, tuple) else data, **options)
    assert type(info.value) is error
    missing = [w for w in words if w not in str(info.value)]
    assert not missing, f"{missing} not in: {info.value}"
    return str(info.value)


# ---- the model


def test_train_mode():
    model = nn.Sequential(Net(), nn.Dropout())
    refused(model, fxq.InputError, "in train mode", "model.eval()")
    assert model.training


def test_one_submodule_in_train_mode():
    model = net()
    model.body[1] = nn.RReLU()
    refused(model, fxq.InputError, "'body.1'", "in train mode", "model.eval()")
    assert model.body[1].training and not model.head.training


@pytest.mark.parametrize(
    ("model", "kind"), [(torch.relu, "builtin"), (lambda x: x, "function"), ("resnet18", "str"), (Net, "type")]
)
def test_no_module(model, kind):
    refused(model, fxq.InputError, f"model is a {kind}", "not an nn.Module", "Wrap it")


def fake(name, where):
    """A module that looks as if it came from another package."""
    return type(name, (nn.Module,), {"__module__": where, "forward": lambda self, x: x})()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Conv2d", "torch.ao.nn.quantized.modules.conv"),
        ("Linear", "torch.ao.nn.quantized.dynamic.modules.linear"),
        ("ConvReLU2d", "torch.ao.nn.intrinsic.quantized.modules.conv_relu"),
        ("ConvBn2d", "torch.ao.nn.intrinsic.qat.modules.conv_fused"),
        ("FakeQuantize", "torch.ao.quantization.fake_quantize"),
    ],
)
def test_a_model_quantized_by_torch(name, where):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(fake(name, where))).eval()
    refused(model, fxq.InputError, "quantized already", "1.0", name, "Give the float model")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "make", [lambda m: fxq.quantize(m, REFERENCE, data=[X]), lambda m: fxq.prepare(m, REFERENCE, example_inputs=X)]
)
def test_a_model_that_fxq_has_made(make, inside):
    changed_model = make(net())
    model = nn.Sequential(changed_model).eval() if inside else changed_model
    refused(model, fxq.InputError, type(changed_model).__name__, "already", "the float model")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_model():
    refused(torch.jit.trace(net(), X), fxq.InputError, "TorchScript", "Pass the nn.Module that it was scripted from")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_without_a_shape():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LazyConv2d(4, 3)).eval()
    with pytest.raises(fxq.InputError, match=r"1\.weight has no values and no shape yet: run the float model once"):
        fxq.quantize(model, REFERENCE, data=[X])
    assert isinstance(model[1], nn.LazyConv2d)


def test_a_layer_without_values():
    refused(net(lambda m: m.head.to("meta")), fxq.InputError, "head.weight", "meta device", "load the model's weights")


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "in", "class"])
def test_a_name_that_cannot_be_written(name):
    refused(net(lambda m: m.body.add_module(name, nn.ReLU().eval())), fxq.InputError, repr(f"body.{name}"), "rename it")


class Named(nn.Module):
    """A convolution, then a module or a buffer of any name."""

    def __init__(self, name, thing):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.add_module(name, thing) if isinstance(thing, nn.Module) else self.register_buffer(name, thing)
        self.name = name

    def forward(self, x):
        thing, y = getattr(self, self.name), self.conv(x)
        return y * thing if isinstance(thing, torch.Tensor) else thing(y.flatten(1, 2))[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", ["graph", "code", "meta", "history", "manager", "recompile", "ledger", "report", "recipe"]
)
@pytest.mark.parametrize("make", [lambda: torch.rand(4, 1, 1), lambda: nn.LSTM(6, 6)], ids=["buffer", "lstm"])
def test_a_name_that_a_graph_module_has_itself(name, make):
    taken = Named(name, make()).eval()
    x, recipe = torch.rand(2, 3, 8, 8), REFERENCE.without_pass("correct-bias")  # biases stay where they are
    with pytest.raises(fxq.InputError, match=f"called '{name}', a name that torch.fx or fxq needs.*wrap the model"):
        fxq.quantize(taken, recipe, data=[x])
    assert fxq.quantize(nn.Sequential(taken).eval(), recipe, data=[x])(x).shape == taken(x).shape


def test_odd_names_that_can_be_written():
    models = [net(lambda m, name=name: m.body.add_module(name, nn.ReLU().eval())) for name in ("a'b c-d", "plain")]
    odd, plain = (fxq.quantize(model, REFERENCE, data=[X]) for model in models)
    assert torch.equal(odd(X), plain(X))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("layer", "tensor"), [("stem", "weight"), ("body.0", "bias"), ("head", "weight")])
def test_values_of_a_layer_that_are_not_finite(layer, tensor, value):
    model = net(lambda m: m.get_submodule(layer).get_parameter(tensor).view(-1)[1].fill_(value))
    refused(
        model, fxq.InputError, f'layer "{layer}"', "test_bad_input.py:", f"{layer}.{tensor} holds NaN or Inf",
        "set the layer to float",
    )  # fmt: skip


# ---- the data


def used_up():
    data = iter([X])
    next(data)
    return data


@pytest.mark.parametrize("data", [[], used_up(), (x for x in ())], ids=["list", "iterator", "generator"])
def test_empty_data(data):
    refused(net(), fxq.InputError, "data is empty", "at least one batch", data=data)


def test_no_data():
    refused(net(), fxq.InputError, "'static' needs data", "data=loader", data=None)


@pytest.mark.parametrize(("data", "kind"), [(X, "Tensor"), ({"x": X}, "dict"), ("images/", "str"), (7, "int")])
def test_data_that_is_no_iterable_of_batches(data, kind):
    refused(net(), fxq.InputError, f"data is a {kind}", "DataLoader", "data=[x]", data=data)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), ("a.png", "str"), (X.numpy(), "ndarray")])
def test_a_batch_of_the_wrong_type(value, kind, batch):
    data = [X, X]
    data[batch] = value
    refused(net(), fxq.InputError, f"data, batch {batch}: {kind}", "pass a tensor, a tuple or list", data=data)


def test_none_among_the_inputs():
    refused(net(), fxq.InputError, 'layer "stem"', "NoneType", data=[(None,)])


@pytest.mark.parametrize(
    ("value", "shown", "why"),
    [
        (X[:, :2], "float32[2, 2, 8, 8]", "to have 3 channels, but got 2"),
        (X[0, 0, 0], "float32[8]", "3D (unbatched) or 4D (batched)"),
        (X.double(), "float64[2, 3, 8, 8]", "should be the same"),
        (X.int(), "int32[2, 3, 8, 8]", "should be the same"),
    ],
)
def test_the_first_batch_does_not_fit(value, shown, why):
    refused(net(), fxq.InputError, 'layer "stem"', "test_bad_input.py:", shown, why, data=[value, X])


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (X[:, :2], fxq.InputError, ["(float32[2, 2, 8, 8])", "3 channels, but got 2"]),
        (X.double(), fxq.InputError, ["(float64[2, 3, 8, 8])", "should be the same"]),
        (X.int(), fxq.CalibrationError, ["int32", "only floating point"]),
    ],
)
def test_a_later_batch_does_not_fit(value, error, words):
    refused(net(), error, "data, batch 2", *words, data=[X, X, value])


def test_too_many_inputs():
    refused(net(), fxq.InputError, "batch 0: 3 inputs, but forward takes 1 (x)", data=[(X, X, X)])


@pytest.mark.parametrize("batch", [X, (X,), {"x": X}])
def test_too_few_inputs(batch):
    by_name = "by name: {'x': ..., 'y': ...}"
    refused(two_inputs(), fxq.InputError, "[2, 3, 8, 8]", "the model also needs y", by_name, data=[batch])


def test_too_few_inputs_in_a_later_batch():
    refused(two_inputs(), fxq.InputError, "data, batch 1", "missing", "'y'", data=[(X, X), (X,)])


def test_a_keyword_that_forward_does_not_have():
    refused(two_inputs(), fxq.InputError, "batch 1", "no argument 'z'", "it has x, y", data=[(X, X), {"x": X, "z": X}])


def test_a_keyword_that_the_example_does_not_have():
    model = module(lambda self, **inputs: self.conv(inputs["x"]), conv=nn.Conv2d(3, 3, 1))
    refused(model, fxq.InputError, "batch 1", "unexpected keyword", "'y'", data=[{"x": X}, {"x": X, "y": X}])
    refused(model, fxq.InputError, "data, batch 1", "traced for x=a tensor", data=[{"x": X}, {}])


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("value", [NAN, INF])
def test_data_that_is_not_finite(value, batch):
    data = [X, X, X]
    data[batch] = X.clone()
    data[batch][1, 0, 3, 3] = value
    words = f"data, batch {batch}: input 0 float32[2, 3, 8, 8] holds NaN or Inf"
    refused(net(), fxq.CalibrationError, words, "clean the data", data=data)


@pytest.mark.parametrize("batch", [0, 1])
def test_overflow_inside_a_layer(batch):
    data = [X, X]
    data[batch] = X * 1e30
    model = net(lambda m: m.body[0].weight.mul_(1e20))
    refused(
        model, fxq.CalibrationError, f"data, batch {batch}", 'layer "body.0"', "test_bad_input.py:", "NaN or Inf",
        "set that layer to float", data=data,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [0, 1])
def test_data_on_another_device(batch):
    data = [X, X]
    data[batch] = X.to("meta")
    refused(net(), fxq.InputError, f"batch {batch}: input 0 is on meta, the model on cpu", ".to(...)", data=data)


def test_sparse_data():
    refused(net(), fxq.InputError, "batch 0", "sparse", ".to_dense()", data=[X.to_sparse()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_data():
    nested = torch.nested.nested_tensor([X[0], X[1]])
    refused(net(), fxq.InputError, "batch 0", "nested", ".to_padded_tensor", data=[nested])


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_an_input_that_is_always_zero(backend, caplog):
    """No error: the grid of values up to 1, noted."""
    model, zeros = net(), torch.zeros_like(X)
    with untouched(model), caplog.at_level("WARNING", logger="fxq"):
        qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[zeros])
    assert qmodel.qparams()["stem"].input_scale in (pytest.approx(1 / 255), pytest.approx(1 / 127))
    assert "%x (the input): calibration saw only zeros; its grid is that of values up to 1." in caplog.text
    assert torch.allclose(qmodel(zeros), model(zeros), atol=0.02)


# ---- control flow


def branching():
    return nn.Sequential(nn.Conv2d(3, 4, 1), Branch(), nn.Conv2d(4, 2, 1)).eval()


@pytest.fixture
def branch_line():
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, text in enumerate(file, 1) if "# BRANCH" in text)


def test_control_flow_where_tracing_is_strict(branch_line):
    refused(
        branching(), fxq.TraceError, f"test_bad_input.py:{branch_line}", 'layer "1"', "%gt = gt(%mean)", "torch.where",
        'recipe.leaf("1")', recipe=fxq.Recipe.static(strict_trace=True),
    )  # fmt: skip


def test_control_flow_of_the_model_itself(branch_line):
    refused(
        Branch().eval(),
        fxq.TraceError,
        f"test_bad_input.py:{branch_line}",
        "torch.where",
        recipe=fxq.Recipe.static(strict_trace=True),
        data=[X[:, :1].expand(-1, 4, -1, -1)],
    )


def test_control_flow_in_a_module(branch_line):
    model = branching()
    with (
        untouched(model),
        pytest.warns(fxq.FxqWarning, match=rf'layer "1" \(Branch\) .*test_bad_input.py:{branch_line}'),
    ):
        qmodel = fxq.quantize(model, REFERENCE, data=[X])
    assert [e.precision for e in qmodel.ledger] == ["int8", "float", "int8"]
    assert f"test_bad_input.py:{branch_line}: a branch on a value that depends on the data" in qmodel.ledger[1].reason
    assert torch.allclose(qmodel(X), model(X), atol=0.05)


def test_the_second_remedy_works():
    model = branching()
    with untouched(model):
        qmodel = fxq.quantize(model, REFERENCE.leaf("1"), data=[X])
    assert [e.precision for e in qmodel.ledger] == ["int8", "float", "int8"]
    assert "keeps this module" in qmodel.ledger[1].reason
    assert torch.allclose(qmodel(X), model(X), atol=0.05)


def test_any_error_in_forward_names_its_line():
    model = module(lambda self, x: self.conv(x) * (1 / 0), conv=nn.Conv2d(3, 3, 1))
    refused(model, fxq.InputError, "does not run on the example", "test_bad_input.py:", "division by zero")


# ---- the recipe


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.override("bodi.*", fxq.FLOAT), ["'bodi.*'", "selects nothing", "body"]),
        (lambda r: r.override("steam", fxq.FLOAT), ["'steam'", "near: stem"]),
        (lambda r: r.override(fxq.by_op("linear"), fxq.FLOAT), ["fxq.by_op('linear')", "conv2d, relu"]),
        (lambda r: r.override(nn.Linear, fxq.FLOAT), ["Linear", "Conv2d, ReLU"]),
        (lambda r: r.leaf("heat"), ["'heat'", "near: head"]),
    ],
)
def test_a_selector_that_matches_nothing(change, words):
    refused(net(), fxq.RecipeError, *words, "model.named_modules()", recipe=change(REFERENCE))


def test_an_unknown_name_in_a_recipe():
    refused(net(), fxq.RecipeError, "unknown preset 'statik'", "did you mean 'static'", recipe="statik")
    refused(net(), fxq.RecipeError, "unknown backend 'x68'", "did you mean 'x86'", recipe={"backend": "x68"})
    refused(net(), fxq.RecipeError, "nowhere.toml", "No such file", recipe="nowhere.toml")
    refused(net(), fxq.RecipeError, "'bakend'", "did you mean 'backend'", recipe={"bakend": "x86"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: REFERENCE.without_pass("fus"), "unknown pass 'fus'; did you mean 'fuse'"),
        (lambda: fxq.by_op("conv3"), "unknown op 'conv3'; did you mean 'conv3d' or 'conv2d'"),
        (lambda: fxq.Recipe.static(activation=fxq.TensorSpec(observer="histgram")), "did you mean 'histogram'"),
        (
            lambda: fxq.extend.run_passes(net(), REFERENCE, example_inputs=X, until="lowr"),
            "unknown pass 'lowr'; did you mean 'lower'",
        ),
    ],
)
def test_an_unknown_name(make, words):
    with pytest.raises(fxq.RecipeError) as info:
        make()
    assert words in str(info.value)


def test_a_pattern_whose_replacement_has_another_arity():
    def two(op, x):
        return op.relu(x), op.tanh(x)

    with pytest.raises(fxq.PatternError) as info:

        @fxq.extend.rewrite
        def both(op, x):
            return two(op, x)

        @both.becomes
        def one(op, m):
            return op.relu(m.x)

        model = module(lambda self, x: (torch.relu(x), torch.tanh(x)))
        fxq.quantize(model, REFERENCE.insert_pass(Apply(both), after="canonicalize"), data=[X])
    assert "both" in str(info.value) and "2" in str(info.value) and "1" in str(info.value)


@dataclass(frozen=True)
class Apply(fxq.Pass):
    """Apply a rule."""

    rule: object = None
    name = "apply-a-rule"
    needs = gives = fxq.extend.Stage.CANONICAL

    def run(self, rewriter):
        rewriter.apply(self.rule)


@dataclass(frozen=True)
class Misspells(fxq.Pass):
    """Writes an op as no canonical graph may."""

    name = "misspells"
    needs = gives = fxq.extend.Stage.CANONICAL

    def run(self, rewriter):
        (node,) = [n for n in rewriter.nodes() if n.name == "act"]
        rewriter.update(node, torch.relu, node.args, {}, op="call_function")


@dataclass(frozen=True)
class Cuts(fxq.Pass):
    """Leaves a reader of a node that is gone."""

    name = "cuts"
    needs = gives = fxq.extend.Stage.CANONICAL

    def run(self, rewriter):
        act = next(n for n in rewriter.gm.graph.nodes if n.name == "act")
        act.append(stem := next(n for n in rewriter.gm.graph.nodes if n.name == "stem"))
        assert stem.prev is act


@pytest.mark.parametrize(("broken", "words"), [(Misspells(), ["%act", "relu", 'layer "act"']), (Cuts(), ["stem"])])
def test_a_pass_that_leaves_an_invalid_graph(broken, words):
    recipe = REFERENCE.insert_pass(broken, after="canonicalize")
    refused(net(), fxq.PassError, f"after {broken.name}", *words, recipe=recipe)


def test_batches_of_size_0():
    refused(net(), fxq.CalibrationError, "(the input) has seen no data: all its tensors were empty", data=[X[:0]] * 2)


# ---- the quantized model

TYPES = (torch.uint8, torch.int64, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("backend", ["auto", "fbgemm", "reference"])
def test_an_input_of_another_type(backend):
    """Bytes of 0 to 255 would saturate silently."""
    model = net()
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[X])
    for dtype in TYPES:
        x = X.abs().to(dtype)
        with pytest.raises(RuntimeError):
            model(x)
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(fxq.InputError, match=rf"is {name}, of shape \(2, 3, 8, 8\); .*: x\.float\(\), and"):
            qmodel(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(qmodel(X.bfloat16()).float(), qmodel(X.bfloat16().float()).float())


def test_an_input_of_another_type_where_a_prelu_comes_first():
    model = nn.Sequential(nn.PReLU(), nn.Conv2d(3, 4, 1)).eval()
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="auto", optimize="coverage"), data=[X])
    for dtype in TYPES:
        for refusing in (model, qmodel):
            with pytest.raises((fxq.InputError, RuntimeError)):
                refusing(X.abs().to(dtype))


# ---- the steps


def test_converting_without_calibration():
    """The observed model stays as it was: calibrated, it converts."""
    model = net()
    observed = fxq.prepare(model, REFERENCE, example_inputs=X)
    with untouched(model), pytest.raises(fxq.CalibrationError, match=r"%x \(the input\) has seen no data. Calibrate"):
        fxq.convert(observed)
    expected = fxq.quantize(model, REFERENCE, data=[X])(X)
    assert torch.equal(fxq.convert(fxq.calibrate(observed, [X]))(X), expected)


@pytest.mark.parametrize("step", [fxq.convert, lambda m: fxq.calibrate(m, [X])])
def test_a_float_model_where_an_observed_one_is_meant(step):
    model = net()
    with untouched(model), pytest.raises(fxq.InputError, match=r"the model that fxq.prepare returned, not a Net"):
        step(model)


def test_no_example_inputs():
    with pytest.raises(fxq.InputError, match="example_inputs is missing: one batch of inputs"):
        fxq.prepare(net(), REFERENCE)


def test_an_example_that_does_not_fit():
    with pytest.raises(fxq.InputError, match=r"example_inputs: forward has no argument 'y'; it has x"):
        fxq.prepare(net(), REFERENCE, example_inputs={"y": X})
    refused(net(), fxq.InputError, 'layer "stem"', "to have 3 channels", example_inputs=X[:, :1])


# ---- NaN and Inf in the inputs of the quantized model


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, pair, index, *, scale=None):
        y = self.a(x) + self.b(pair[0]) + pair[1]["z"]
        return y[index] if scale is None else y[index] * scale


def several():
    """Inputs of `Several`."""
    return (torch.rand(8, 4), [torch.rand(8, 4), {"z": torch.rand(8, 4)}], torch.arange(3)), {"scale": torch.rand(3, 4)}


def test_without_a_check_nan_gives_finite_numbers():
    """As documented; the option exists for this reason."""
    qmodel = fxq.quantize(net(), fxq.Recipe.static(optimize="coverage"), data=[X])
    assert bool(qmodel(torch.full_like(X, NAN)).isfinite().all())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_checked_inputs_are_finite_at_every_call(value, backend):
    """The first calls, those of a graph bound to the kind, those of copies and after a pickle."""
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", check_inputs=True)
    qmodel = fxq.quantize(net(), recipe, data=[X])
    expected = fxq.quantize(net(), fxq.Recipe.static(backend=backend, optimize="coverage"), data=[X])(X)
    broken = X.clone()
    broken[1, 2, 3, 4] = value
    for model in (qmodel, copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        for _ in range(4):
            assert torch.equal(model(X), expected)
            for args, kwargs in [((broken,), {}), ((), {"x": broken})]:
                with pytest.raises(fxq.InputError, match=r"the input x .*2, 3, 8, 8.* holds NaN or Inf.*check_inputs"):
                    model(*args, **kwargs)


@pytest.mark.parametrize("name", ["x", "pair", "z", "scale"])
def test_a_checked_input_is_named_wherever_it_stands(name):
    args, kwargs = several()
    recipe = fxq.Recipe.static(backend="reference", check_inputs=True)
    qmodel = fxq.quantize(Several().eval(), recipe, data=[{"x": args[0], "pair": args[1], "index": args[2], **kwargs}])
    qmodel(*args, **kwargs)
    tensor = {"x": args[0], "pair": args[1][0], "z": args[1][1]["z"], "scale": kwargs["scale"]}[name]
    tensor.view(-1)[-1] = NAN
    with pytest.raises(fxq.InputError, match=f"the input {'pair' if name == 'z' else name} "):
        qmodel(*args, **kwargs)


def test_what_a_check_of_inputs_lets_pass():
    """Large numbers, whose sum is infinite; no numbers at all; and -Inf, as masks hold it."""
    model = net()
    checked, unchecked = (
        fxq.quantize(model, fxq.Recipe.static(backend="reference", check_inputs=checks), data=[X])
        for checks in (True, False)
    )
    for x in (torch.full_like(X, 3e38), X[:0], X.masked_fill(X > 0.5, -INF)):
        assert equal(checked(x), unchecked(x))


def test_check_inputs_in_a_file():
    recipe = fxq.Recipe.static(check_inputs=True)
    assert recipe.to_dict() == {"preset": "static", "check_inputs": True}
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(fxq.RecipeError, match="'check_inputs' has a value of the wrong type"):
        fxq.Recipe.from_dict({"check_inputs": "yes"})
