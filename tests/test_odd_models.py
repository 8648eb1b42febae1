"""Models that are meant to break fxq: each went wrong once, or easily could."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import module
from tests.support.machine import no_warnings

BACKENDS = ("x86", "reference")


def conv(inputs=3, outputs=8, size=3, **options):
    options.setdefault("padding", size // 2)
    return nn.Conv2d(inputs, outputs, size, **options)


def images(n=4, channels=3, size=12):
    return torch.randn(n, channels, size, size)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(model, *inputs, at_least=25.0, recipe=None):
    """The model quantized with x86; both backends must come within `at_least` dB of float on the calibration data."""
    model = model.eval()
    with torch.no_grad():
        expected = model(*inputs)
    for backend in reversed(BACKENDS):
        chosen = recipe or fxq.Recipe.static()
        chosen = fxq.Recipe.from_dict({**chosen.to_dict(), "backend": backend})
        qmodel = fxq.quantize(model, chosen, data=[inputs])
        with torch.no_grad():
            got = qmodel(*inputs)
        assert sqnr(expected, got) >= at_least, backend
    return qmodel


# ---- values that an op which only moves data makes itself


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [3.7, -2.0])
@pytest.mark.parametrize("before", [torch.relu, torch.sigmoid])
def test_padding_with_a_value_outside_the_range(value, before):
    """The pad took the scale of what it pads: 3.7 silently became the largest value of a relu, 8 dB."""
    model = module(lambda self, x: self.b(F.pad(before(self.a(x)), (1, 1, 1, 1), value=value)), a=conv(), b=conv(8, 4))
    close(model, images(), at_least=28.0)


@pytest.mark.parametrize("value", [-float("inf"), -1e9])
def test_padding_for_max_pooling(value):
    """The pad value of max pooling must not widen the grid."""
    model = module(
        lambda self, x: self.b(F.max_pool2d(F.pad(self.a(x), (1, 1, 1, 1), value=value), 3)), a=conv(), b=conv(8, 4)
    )
    close(model, images())


def test_padding_with_infinity_for_a_convolution_is_refused():
    model = module(lambda self, x: self.a(F.pad(x, (1, 1), value=float("inf"))), a=conv())
    with pytest.raises(fxq.CalibrationError, match=r"input %pad holds Inf. A mask may hold it"):
        fxq.quantize(model, data=[images()])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bounds", [(3, 4), (-4, -1), (0.5, -0.5)])
def test_clamp_to_an_interval_without_zero(bounds):
    """The clamp took the scale of its input, whose range may end before the interval begins: 0.7 dB."""
    model = module(lambda self, x: self.b(F.max_pool2d(self.a(x).relu(), 2).clamp(*bounds)), a=conv(), b=conv(8, 4))
    close(model, images(), at_least=30.0)


def test_clamp_with_its_bounds_the_wrong_way_round():
    """torch.clamp gives the maximum then; the fused kernel raised, and was called wrong."""
    close(module(lambda self, x: self.b(self.a(x).clamp(0.5, -0.5)), a=conv(), b=conv(8, 4)), images())


# ---- effects of forward that torch.fx does not see, or does not undo


def test_a_tensor_made_in_forward_is_not_left_on_the_model():
    model = module(lambda self, x: self.a(x) + torch.ones(8, 1, 1), a=conv())
    before = set(vars(model))
    close(model, images())
    assert set(vars(model)) == before


def test_a_tensor_made_in_a_forward_that_cannot_be_traced_is_not_left_either():
    def forward(self, x):
        y = self.a(x) + torch.ones(8, 1, 1)
        return y if y.sum() > 0 else x

    model = module(forward, a=conv())
    before = set(vars(model))
    with pytest.raises(fxq.TraceError):
        fxq.quantize(model, fxq.Recipe.static(strict_trace=True), data=[images()])
    assert set(vars(model)) == before


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_the_whole_model(register):
    """The trace does not see them: their effect was missing."""
    model = nn.Sequential(conv(), nn.ReLU()).eval()
    hook = {"register_forward_hook": lambda m, i, o: 2 * o, "register_forward_pre_hook": lambda m, i: (2 * i[0],)}
    getattr(model, register)(hook[register])
    with pytest.raises(fxq.TraceError, match=r"model \(Sequential\) has forward hooks.*nn.Sequential\(model\)"):
        fxq.quantize(model, data=[images()])
    close(nn.Sequential(model), images())


def test_hooks_of_layers_and_blocks():
    layer, block = conv(), nn.Sequential(conv(8, 8), nn.ReLU())
    layer.register_forward_hook(lambda m, i, o: 2 * o)
    block.register_forward_pre_hook(lambda m, i: (i[0] + 10,))
    close(nn.Sequential(layer, block, conv(8, 4)), images())


def test_a_forward_set_on_the_object():
    """The op table knew the type's forward, not this one: silently wrong, 1 dB."""
    layer = conv()
    layer.forward = lambda x: F.conv2d(x, layer.weight, layer.bias, padding=1) * 7
    close(nn.Sequential(layer, nn.ReLU(), conv(8, 4)), images())


# ---- the first axis need not be one of samples


@pytest.mark.parametrize(
    ("forward", "shape"),
    [
        (lambda self, x: self.a(self.a(x).T), (8, 8)),
        (lambda self, x: F.linear(x, self.w) + self.w, (8, 8)),
        (lambda self, x: self.a(torch.relu(self.a(x))), (8,)),
    ],
)
def test_inputs_that_cannot_be_cut_into_samples(forward, shape):
    """Kernels are verified on a few samples, which were no input of the model at all here."""
    close(module(forward, a=nn.Linear(8, 8), w=torch.randn(8, 8)), torch.randn(shape))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_inputs(count):
    """Kernels were verified on the first of them alone, and that failed."""
    model = module(lambda self, *xs: self.b(F.relu(self.a(xs[0]) + self.a(xs[-1]))), a=conv(), b=conv(8, 4))
    close(model, *(images() for _ in range(count)))
    close(model, *(images() for _ in range(count)), recipe=fxq.Recipe.static(backend="reference"))


# ---- numbers of a layer


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(8, 8, 4), (4, 6, 2), (4, 4, 4)])
def test_groups_of_a_transposed_convolution_share_scales(inputs, outputs, groups):
    """Its weight is (inputs, outputs / groups, ...): the bias has more channels than there are scales."""
    layer = nn.ConvTranspose2d(inputs, outputs, 3, stride=2, groups=groups)
    qmodel = close(nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(), conv(outputs, 4)), images(2, inputs, 6))
    numbers = qmodel.qparams()["0"]
    assert numbers.weight_scale.shape == (outputs // groups,)
    assert numbers.bias.shape == numbers.bias_scale.shape == (outputs,)


# ---- the quantized model and the float model it came from


class Mixture(nn.Module):
    """Int8 layers, an op in float, a module that stays a leaf, a parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.a, self.p, self.b, self.norm = conv(), nn.PReLU(8), conv(8, 8), nn.GroupNorm(2, 8)
        self.w = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        return self.norm(self.b(self.p(self.a(x)))) * self.w + self.w


@pytest.mark.parametrize("backend", BACKENDS)
def test_neither_model_changes_through_the_other(backend):
    """Biases, slopes and leaf modules were shared: training on, or loading a state into either, changed the other."""
    model, x = Mixture().eval(), images()
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[x])
    before, qbefore = model(x), qmodel(x)
    with torch.no_grad():
        for tensor in (*qmodel.parameters(), *qmodel.buffers()):
            tensor.zero_()
    qmodel.train().requires_grad_(False)
    assert torch.equal(model(x), before)
    assert not any(m.training for m in model.modules()) and all(p.requires_grad for p in model.parameters())
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[x])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1)
    assert torch.equal(qmodel(x), qbefore)


def test_a_leaf_that_cannot_be_copied_stays_shared():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = __import__("threading").Lock()

        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    recipe = fxq.Recipe.static().leaf("1")
    close(nn.Sequential(conv(), Locked(), conv(8, 4)), images(), recipe=recipe)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [12, 160])
def test_the_quantized_model_under_autocast_and_another_default_dtype(size):
    """PReLU came out in bfloat16, and the buffer of a long conversion in float64: both were an error."""
    model, x = nn.Sequential(conv(), nn.PReLU(8), conv(8, 8), nn.Hardsigmoid(), conv(8, 4)).eval(), images(2, 3, size)
    qmodel = fxq.quantize(model, "static", data=[x])
    expected = qmodel(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sqnr(expected, qmodel(x).float()) > 30.0
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(qmodel(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- changes in place


@pytest.mark.one_in(2)
@pytest.mark.parametrize("view", [lambda h: h[:, 0], lambda h: h.flatten(1), lambda h: h.mT, lambda h: h])
def test_a_read_is_not_moved_after_a_change_through_a_view(view):
    """The unit of b and relu was placed at the relu, after the fill: -23 dB."""

    def forward(self, x):
        h = self.a(x)
        part = view(h)
        y = self.b(h)
        part.fill_(50.0)
        return F.relu(y)

    close(module(forward, a=conv(), b=conv(8, 4)), images())


def test_a_value_that_is_changed_through_a_view_afterwards():
    def forward(self, x):
        h = torch.relu(self.a(x))
        part = h[:, 0]
        y = self.b(h)
        part.fill_(50.0)
        return y

    qmodel = close(module(forward, a=conv(), b=conv(8, 4)), images())
    assert [e.precision for e in qmodel.ledger if e.path == "b"] == ["int8"]


# ---- arguments that the example leaves out, or that are no tensors


def with_options(self, x, relu=True, scale=None, *, gain=2.0, mode="plain"):
    y = self.a(x)
    if relu:
        y = F.relu(y)
    if mode == "negative":
        y = -y
    return (y if scale is None else y * scale) * gain if gain > 1 else y


def test_arguments_left_out_are_what_they_are_by_default():
    """`if relu` was refused, and `scale is None` was never true."""
    model = module(with_options, a=conv())
    qmodel = close(model, images())
    assert [e.op for e in qmodel.ledger] == ["conv2d", "relu", "mul"]
    x = images()
    with torch.no_grad():
        assert torch.equal(qmodel(x), qmodel(x=x, relu=True))
        assert sqnr(model(x, gain=3.0), qmodel(x, gain=3.0)) > 25  # a number that takes the same branch
        with pytest.raises(
            fxq.InputError, match=r"traced with .* `.*if gain > 1 else y` is True, but here it is False"
        ):
            qmodel(x, gain=0.5)
        for arguments in ({"relu": False}, {"scale": torch.ones(1)}, {"mode": "negative"}):
            (name,) = arguments
            with pytest.raises(fxq.InputError, match=f"traced for {name}=.*Quantize the model again with {name}"):
                qmodel(x, **arguments)


@pytest.mark.parametrize("relu", [True, False])
def test_flags_that_the_example_gives(relu):
    model = module(with_options, a=conv())
    example = {"x": images(), "scale": torch.full((1, 1, 1, 1), 3.0), "relu": relu, "mode": "negative"}
    qmodel = fxq.quantize(model, data=[example])
    with torch.no_grad():
        assert sqnr(model(**example), qmodel(**example)) > 25
        assert (qmodel(**example) > 0).any() == (not relu)
    with pytest.raises(fxq.InputError, match=f"traced for relu={relu}"):
        qmodel(**{**example, "relu": not relu})


def test_a_later_batch_with_another_flag_is_named():
    model = module(with_options, a=conv())
    with pytest.raises(fxq.InputError, match="traced for relu=True, as in the example, but got bool False"):
        fxq.quantize(model, data=[images(), {"x": images(), "relu": False}])


def test_fixed_arguments_survive_saving(tmp_path):
    model = module(with_options, a=conv())
    qmodel = fxq.quantize(model, data=[images()])
    torch.save(qmodel, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = images()
    with torch.no_grad():
        assert torch.equal(loaded(x), qmodel(x))
    with pytest.raises(fxq.InputError, match="traced for relu=True"):
        loaded(x, relu=False)


# ---- weights that are not finite


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_statistics_of_a_batch_norm_that_are_not_finite(name, bad):
    """The message was about fxq_data.0_weight_folded."""
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with torch.no_grad():
        getattr(model[1], name)[3] = bad
    if bad < 0 and name != "running_var":
        close(model, images())
        return
    with pytest.raises(fxq.InputError, match=rf'batch_norm, layer "1".*: 1\.{name} holds (NaN or Inf|a negative)'):
        fxq.quantize(model, data=[images()])


def test_a_parametrized_weight_that_is_not_finite():
    layer = nn.utils.parametrizations.weight_norm(conv())
    with torch.no_grad():
        layer.parametrizations.weight.original0[0] = float("nan")
    with pytest.raises(fxq.InputError, match=r"0\.weight holds NaN or Inf"):
        fxq.quantize(nn.Sequential(layer).eval(), data=[images()])


@no_warnings
@pytest.mark.parametrize("shape", [(8, 8), (8, 4)])
def test_a_transposed_weight_has_a_kernel(shape):
    """Tied to that of an encoder, or loaded from a file of another framework. oneDNN packs it wrongly."""
    torch.manual_seed(0)
    layer = nn.Linear(*shape)
    layer.weight = nn.Parameter(torch.randn(shape).t())
    model, x = nn.Sequential(layer).eval(), torch.randn(64, 8)
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[x])
    assert qmodel.ledger.count("int8") == 1
    with torch.no_grad():
        assert sqnr(model(x), qmodel(x)) > 35


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_copied_script_module_is_a_float_leaf():
    inner = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = copy.deepcopy(module(lambda self, x: self.fc(self.inner(x)), inner=inner, fc=nn.Linear(8, 4)))
    assert fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[torch.randn(4, 8)]).output_sqnr > 25


@pytest.mark.parametrize(
    "recipe",
    [
        fxq.Recipe.weight_only(bits=4),
        fxq.Recipe.dynamic(),
        fxq.Recipe.static(optimize="coverage").insert_pass(fxq.passes.AdaRound(iterations=20), after="smooth"),
    ],
    ids=["gptq", "dynamic", "adaround"],
)
def test_weights_fitted_to_data_where_new_tensors_are_float64(recipe):
    """The default dtype of new tensors is that of the user, not of the model."""
    model, x = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)).eval(), torch.randn(32, 64)
    torch.set_default_dtype(torch.float64)
    try:
        qmodel = fxq.quantize(model, recipe.with_backend("reference"), data=[x, 2 * x])
        y = qmodel(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == torch.float32 and sqnr(model(x), y) > 15  # dB: 4 bits


def test_synthetic_data_where_new_tensors_are_float64():
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU()).eval()
    torch.set_default_dtype(torch.float64)
    try:
        (batch,) = fxq.synthetic(model, (2, 3, 16, 16), batches=1, steps=2, progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert batch.dtype == torch.float32 and batch.isfinite().all()
