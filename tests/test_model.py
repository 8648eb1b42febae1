import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.kernel import Kernel
from fxq.errors import FxqWarning, InputError
from fxq.model import QuantizedModel
from tests.support.graphs import full_text
from tests.support.helpers import REFERENCE, filed

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
BACKENDS = ["reference", "auto"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).eval()


@pytest.fixture(scope="module", params=BACKENDS)
def qmodel(request):
    return fxq.quantize(network(), fxq.Recipe.static(backend=request.param), data=[X])


def deepcopied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def twice(model):
    return copy.deepcopy(pickled(copy.deepcopy(model)))


COPIES = [deepcopied, pickled, saved, twice, filed]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_computes_the_same(qmodel, copied):
    second = copied(qmodel)
    assert isinstance(second, QuantizedModel) and isinstance(second, torch.fx.GraphModule)
    assert torch.equal(second(X), qmodel(X))
    assert not second.training


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_keeps_what_is_known(qmodel, copied):
    second = copied(qmodel)
    assert str(second.history) == str(qmodel.history) and second.history["fuse"].graph == qmodel.history["fuse"].graph
    assert (second.ledger, second.recipe, second.backend) == (qmodel.ledger, qmodel.recipe, qmodel.backend)
    assert list(second.qparams()) == list(qmodel.qparams()) == ["0", "3", "6"]
    for name, layer in qmodel.qparams().items():
        assert torch.equal(second.qparams()[name].weight, layer.weight)
        assert second.qparams()[name].input_scale == layer.input_scale
    assert full_text(second) == full_text(qmodel)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_shares_no_tensor(qmodel, copied):
    """Changes of the copy do not reach the original."""
    second = copied(qmodel)
    want = qmodel(X)
    mine = {t.data_ptr() for t in (*qmodel.parameters(), *qmodel.buffers()) if t.numel()}
    theirs = [t for t in (*second.parameters(), *second.buffers()) if t.numel()]
    assert theirs and not mine & {t.data_ptr() for t in theirs}
    with torch.no_grad():
        for tensor in theirs:
            tensor.zero_()
    assert torch.equal(qmodel(X), want)


def doubled(model, args, output):
    return 2 * output


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copied", [deepcopied, pickled, saved, twice])
def test_a_copy_has_the_hooks(qmodel, copied):
    own = copy.deepcopy(qmodel)
    own.register_forward_hook(doubled)
    for _ in range(3):
        assert torch.equal(copied(own)(X), 2 * qmodel(X))
    assert not qmodel._forward_hooks


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copied", [copy.copy, *COPIES])
def test_a_copy_has_what_the_user_has_set(qmodel, copied):
    own = copy.deepcopy(qmodel)
    own.stride, own.names, own.meta["epoch"] = torch.tensor([8.0, 16.0]), {0: "cat"}, 3
    own.register_buffer("anchors", torch.arange(4.0))
    own.register_buffer("grid", torch.arange(3), persistent=False)
    own.gain = nn.Parameter(torch.ones(2), requires_grad=False)
    own.get_submodule("6" if "6" in own._modules else "").register_buffer("inner", torch.zeros(2))
    second = copied(own)
    assert type(second).__name__ == "QuantizedModel" and torch.equal(second(X), qmodel(X))
    assert torch.equal(second.stride, own.stride) and second.names == {0: "cat"}
    assert second.meta == ({} if copied is filed else {"epoch": 3})
    assert second.state_dict().keys() == own.state_dict().keys() and "grid" not in own.state_dict()
    assert {name for name, _ in second.named_parameters()} == {name for name, _ in own.named_parameters()}
    for name, buffer in own.named_buffers():
        assert torch.equal(second.get_buffer(name), buffer)
    assert isinstance(second.gain, nn.Parameter) and not second.gain.requires_grad
    second.register_buffer("more", torch.zeros(1))
    assert not hasattr(own, "more")
    again = copied(second)
    assert torch.equal(again.anchors, own.anchors) and torch.equal(again(X), qmodel(X))


def test_modules_of_the_user_are_copied_and_no_file_holds_them(qmodel):
    own = copy.deepcopy(qmodel)
    own.head, own.notes = nn.Sequential(nn.Linear(2, 2)), object
    for copied in (copy.copy, deepcopied, pickled, saved, twice):
        assert torch.equal(copied(own).head[0].weight, own.head[0].weight) and copied(own).notes is object
    with pytest.warns(FxqWarning, match="does not contain head, notes: a file holds only plain data and tensors"):
        reloaded = filed(own)
    assert torch.equal(reloaded(X), own(X)) and not hasattr(reloaded, "head") and not hasattr(reloaded, "notes")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_after_it_was_traced(copied):
    """torch.fx leaves its constants in what it traces."""
    own = fxq.quantize(network(), REFERENCE, data=[X])
    traced = torch.fx.symbolic_trace(own)
    assert torch.equal(traced(X), own(X)) and torch.equal(copied(own)(X), own(X))


def test_a_copy_of_a_copied_graph_can_be_edited(qmodel):
    second = copy.deepcopy(qmodel)
    last = second.graph.output_node().args[0]
    with second.graph.inserting_after(last):
        doubled = second.graph.call_function(torch.mul, (last, 2.0))
    second.graph.output_node().args = (doubled,)
    second.recompile()
    assert torch.equal(second(X), 2 * qmodel(X))


def test_a_model_inside_another_is_copied_with_it(qmodel):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    second = copy.deepcopy(Wrapper(qmodel).eval())
    assert torch.equal(second(X), qmodel(X) + 1) and second.inner.history.names == qmodel.history.names


def test_a_quantized_model_is_a_graph_module(qmodel):
    assert isinstance(qmodel, torch.fx.GraphModule) and not qmodel.training
    assert "def forward(self, input" in qmodel.code
    assert qmodel.backend in ("reference", "x86")


def test_quantizing_again_is_refused(qmodel):
    with pytest.raises(InputError, match="QuantizedModel already; quantize the float model it came from"):
        fxq.quantize(qmodel, data=[X])
    with pytest.raises(InputError, match="already"):
        fxq.quantize(nn.Sequential(qmodel).eval(), data=[X])


# ---- the observed model


def test_no_gradient_comes_out():
    """Float parts keep their weights, but no gradient passes integer ops: layers before them cannot be trained."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)
            self.factor = nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x):
            return torch.erf(self.norm(self.conv(x)) * self.factor)

    model, x = Model().eval(), torch.randn(2, 3, 4, 4)
    assert not fxq.quantize(model, "static", data=[x])(x).requires_grad
    assert all(p.requires_grad for p in model.parameters())


# ---- moving and converting


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float64),
        lambda m: m.type(torch.float16),
        lambda m: nn.Sequential(m).half(),
    ],
)
def test_other_dtypes_are_refused(qmodel, change):
    want = qmodel(X)
    with pytest.raises(InputError, match="the tensors of a quantized model keep their dtypes, and this makes"):
        change(qmodel)
    assert torch.equal(qmodel(X), want)


@pytest.mark.parametrize("change", [lambda m: m.float(), lambda m: m.cpu(), lambda m: m.to("cpu", torch.float32)])
def test_what_changes_nothing_is_allowed(qmodel, change):
    want = qmodel(X)
    assert change(qmodel) is qmodel
    assert torch.equal(qmodel(X), want)


def test_devices(qmodel):
    second = copy.deepcopy(qmodel)
    if qmodel.backend == "reference":  # it runs anywhere
        assert {t.device.type for t in (*second.to("meta").parameters(), *second.buffers())} == {"meta"}
    else:
        with pytest.raises(InputError, match=r"run on cpu only, not on meta\. .*backend=\"reference\""):
            second.to("meta")
        assert torch.equal(second(X), qmodel(X))


class Every(nn.Module):
    """Kernels of every kind, large enough to be walked through in steps."""

    def __init__(self):
        super().__init__()
        self.stem, self.act, self.pool = nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.AvgPool2d(2)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Linear(8, 5)
        self.slopes = nn.Parameter(torch.linspace(-1, 2, 8))

    def forward(self, x):
        y = self.act(self.stem(x))
        z = self.up(torch.tanh(self.pool(y)))
        z = nn.functional.prelu(y + z, self.slopes) * torch.sigmoid(z)
        return self.head((z * z.mean((2, 3), keepdim=True)).mean((2, 3)))


@pytest.fixture
def bfloat16():
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["auto", "fbgemm", "reference"])
def test_the_default_device_and_dtype_do_not_matter(backend, bfloat16):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 130, 130)
    qmodel = fxq.quantize(Every().eval(), fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
    expected = qmodel(x)
    bfloat16()
    with torch.device("meta"):
        assert torch.equal(copy.deepcopy(qmodel)(x), expected)
        for name, kernel in list(qmodel.named_modules()):
            if isinstance(kernel, Kernel):
                qmodel.set_submodule(name, type(kernel).from_config(kernel.config(), dict(kernel.named_buffers())))
        assert torch.equal(qmodel(x), expected)


def test_autocast_changes_nothing():
    """Under autocast every layer hands on bfloat16, which no integer op reads."""
    want = fxq.quantize(network(), REFERENCE, data=[X])
    with torch.autocast("cpu", torch.bfloat16):
        got = fxq.quantize(network(), REFERENCE, data=[X])
        observed = fxq.calibrate(fxq.prepare(network(), REFERENCE, example_inputs=X), [X])
        stepped = fxq.convert(observed)
    precisions = [[(e.precision, e.reason, e.sqnr) for e in model.ledger] for model in (got, want, stepped)]
    assert precisions[0] == precisions[1] == precisions[2] and got.ledger.count("int8") > 3
    assert torch.equal(got(X), want(X)) and torch.equal(stepped(X), want(X))


class Tied(nn.Module):
    """Embedding whose weight is that of the last layer, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_a_tied_weight_is_pickled_once():
    ids = torch.arange(6)[None]
    qmodel = fxq.quantize(Tied().eval(), fxq.Recipe.weight_only(backend="reference"), example_inputs=ids)
    data = pickle.dumps(qmodel)
    assert torch.equal(pickle.loads(data)(ids), qmodel(ids))
    assert 500 * 64 < len(data) < 2 * 500 * 64  # int8


def test_pickling_leaves_the_tensors_of_the_model():
    ids = torch.arange(6)[None]
    qmodel = fxq.quantize(Tied().eval(), fxq.Recipe.weight_only(backend="reference"), example_inputs=ids)
    qmodel.train_alone = nn.Parameter(torch.ones(4))
    qmodel.frozen = nn.Parameter(qmodel.train_alone.data, requires_grad=False)
    tensors = dict(qmodel.named_buffers(remove_duplicate=False)) | dict(qmodel.named_parameters(remove_duplicate=False))
    loaded = pickle.loads(pickle.dumps(qmodel))
    after = dict(qmodel.named_buffers(remove_duplicate=False)) | dict(qmodel.named_parameters(remove_duplicate=False))
    assert after.keys() == tensors.keys() and all(after[name] is tensors[name] for name in tensors)
    assert loaded.train_alone.requires_grad and not loaded.frozen.requires_grad
    assert loaded.state_dict().keys() == qmodel.state_dict().keys()
