"""Tools that trace a quantized model, and invalid inputs: they work, or a message says what to do."""

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import nn

import fxq
from fxq import errors
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.errors import InputError
from tests.support.helpers import module
from tests.support.machine import needs_x86
from tests.support.processes import in_new_python

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
KERNELS = [
    pytest.param("x86", marks=needs_x86),
    pytest.param("fbgemm", marks=pytest.mark.skipif(not has_engine("fbgemm"), reason="needs fbgemm")),
]


@cache
def quantized_once(backend, **options):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    model = nn.Sequential(*layers).eval()
    return fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage", **options), data=[X])


def quantized(backend, **options):
    """A copy of the quantized model, bound to the kind of `X`."""
    qmodel = copy.deepcopy(quantized_once(backend, **options))
    for _ in range(3):
        qmodel(X)
    return qmodel


TOOLS = {
    "torch.jit.trace": lambda q: torch.jit.trace(q, X),
    "torch.export": lambda q: torch.export.export(q, (X,)).module(),
    "torch.func.vmap": lambda q: lambda x: torch.func.vmap(lambda image: q(image[None])[0])(x),
    "make_fx": lambda q: torch.fx.experimental.proxy_tensor.make_fx(q, tracing_mode="fake")(X),
    "torch.fx": torch.fx.symbolic_trace,
    "jacrev": lambda q: torch.func.jacrev(lambda x: q(x).sum())(X),
}
IN_THE_REFERENCE = [name for name in TOOLS if name not in ("make_fx", "jacrev")]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("check_inputs", [False, True])
def test_a_tool_that_looks_into_kernels_is_refused(backend, tool, check_inputs):
    qmodel = quantized(backend, check_inputs=check_inputs)
    before = qmodel(X)
    with pytest.raises(InputError, match='Quantize with backend="reference"'):
        TOOLS[tool](qmodel)(X)
    assert torch.equal(qmodel(X), before) and torch.equal(type(qmodel).forward.__wrapped__(qmodel, X), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("tool", IN_THE_REFERENCE)
def test_the_reference_goes_through(tool):
    qmodel = quantized("reference")
    expected = qmodel(X)
    assert torch.equal(TOOLS[tool](qmodel)(X), expected) and torch.equal(qmodel(X), expected)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recipe", [fxq.Recipe.static(), fxq.Recipe.dynamic(), fxq.Recipe.weight_only()])
def test_recurrent_layers(recipe):
    x, more = torch.rand(2, 5, 8), torch.rand(3, 5, 8)
    batch = {"x": {0: torch.export.Dim("batch")}}
    plain = fxq.quantize(Recurrent().eval(), recipe.with_backend("reference"), data=[x])
    packed = fxq.quantize(Recurrent().eval(), recipe.with_optimize("coverage"), data=[x])
    for traced in (torch.jit.trace(plain, x), torch.export.export(plain, (x,), dynamic_shapes=batch).module()):
        assert torch.equal(traced(x), plain(x)) and torch.equal(traced(more), plain(more))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(plain, backend="eager", fullgraph=True)(x), plain(x))
    torch._dynamo.reset()
    with pytest.raises(InputError, match='Quantize with backend="reference"'):
        torch.jit.trace(packed, x)
    with pytest.raises(InputError, match='Quantize with backend="reference"'):
        torch.export.export(packed, (x,), dynamic_shapes=batch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_scripts_are_refused(backend):
    with pytest.raises(InputError, match=r"torch\.jit\.script needs Python source.*torch\.jit\.trace"):
        torch.jit.script(quantized(backend))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_the_onnx_exporter_of_torch_is_not_the_way(tmp_path):
    with (
        pytest.warns(fxq.FxqWarning, match=r'qmodel\.export\("m\.onnx"\) writes the model'),
        pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="fxq::quantize"),
    ):
        torch.onnx.export(quantized("reference"), (X,), tmp_path / "m.onnx", dynamo=False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", [*KERNELS, "reference"])
def test_a_compiled_model_runs_as_it_is(backend):
    qmodel = quantized(backend)
    expected, part = qmodel(X), qmodel(X[:1])
    around = module(lambda self, x: self.inner(x * 2 / 2).relu() + 1, inner=qmodel)
    torch._dynamo.reset()
    try:
        compiled, inside = torch.compile(qmodel, backend="eager"), torch.compile(around, backend="aot_eager")
        for _ in range(3):
            assert torch.equal(compiled(X), expected) and torch.equal(compiled(X[:1]), part)
            torch.testing.assert_close(inside(X), expected.relu() + 1, rtol=0, atol=0)
        if backend != "reference":
            torch._dynamo.reset()
            with pytest.raises(Exception, match='Quantize with backend="reference"'):
                torch.compile(qmodel, backend="eager", fullgraph=True)(X)
    finally:
        torch._dynamo.reset()
    assert torch.equal(qmodel(X), expected)


WRONG = {"int": 3, "NoneType": None, "list": [X], "ndarray": X.numpy(), "str": "image.png"}


@pytest.mark.parametrize("backend", [*KERNELS, "reference"])
@pytest.mark.parametrize("kind", WRONG)
def test_an_input_that_is_no_tensor_is_named(backend, kind):
    qmodel = quantized(backend)
    for _ in range(3):
        with pytest.raises(InputError, match=rf"input 'input' is a {kind}, but the model takes a tensor") as said:
            qmodel(WRONG[kind])
    assert ("torch.from_numpy" in str(said.value)) == (kind == "ndarray")
    with pytest.raises(InputError, match="input 'input' is a "):
        qmodel(input=WRONG[kind])


def test_inputs_with_defaults_may_be_anything():
    def forward(self, x, mask=None):
        y = self.fc(x)
        return y if mask is None else y * mask

    qmodel = fxq.quantize(
        module(forward, fc=nn.Linear(4, 4)), fxq.Recipe.static(backend="reference"), data=[torch.rand(3, 4)]
    )
    assert torch.equal(qmodel(torch.ones(3, 4)), qmodel(torch.ones(3, 4), None))


@pytest.mark.parametrize("backend", [*KERNELS, "reference"])
def test_an_optional_tensor_that_the_graph_was_made_with_is_needed(backend):
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage")
    model = module(lambda self, x, z=None: self.b(self.a(x) + z), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    qmodel = fxq.quantize(model, recipe, data=[{"x": torch.rand(3, 4), "z": torch.rand(3, 4)}])
    for args, words in (((), "left out"), ((None,), "a NoneType"), ((3,), "a int")):
        with pytest.raises(InputError, match=f"input 'z' is {words}, but the model takes a tensor"):
            qmodel(torch.rand(3, 4), *args)
    assert qmodel(torch.rand(3, 4), z=torch.rand(3, 4)).shape == (3, 4)


# ---- what a user sees of fxq


def test_dir_lists_what_is_public():
    shown = {name for name in dir(fxq) if not name.startswith("_")}
    assert shown == set(fxq.__all__) and "quantize" in shown and "binding" not in shown
    assert all(hasattr(fxq, name) for name in dir(fxq))


def test_a_warning_points_at_the_users_line():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        errors.warn("from here")
        fxq.quantize(nn.Sequential(nn.Tanh()).eval(), fxq.Recipe.static(backend="reference"), data=[X])
    assert [warning.filename for warning in said] == [__file__, __file__]


@pytest.mark.slow
@needs_x86
def test_a_cpu_without_vnni_is_told_once():
    """In a process of its own, and of the user's line."""
    code = (
        "import warnings, torch, fxq\n"
        "warnings.simplefilter('always')\n"
        "for _ in range(3):\n"
        "    fxq.quantize(torch.nn.Linear(8, 8).eval(), fxq.Recipe.static(backend='x86'), data=[torch.rand(4, 8)])\n"
    )
    done = in_new_python(code, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "no VNNI" in line]
    assert len(lines) == 1 and lines[0].startswith("<string>:4: FxqWarning")


BAD_CALLS = [
    ((torch.rand(3, 8),), {}, "layer takes 4 dimensions|does not run on"),
    ((torch.rand(2, 4, 8, 8),), {}, "takes 3|does not run on"),
    ((torch.rand(2, 3, 8, 8).to_sparse(),), {}, "sparse_coo tensor; pass a dense one"),
    ((torch.nested.nested_tensor([torch.rand(3, 8, 8)] * 2),), {}, "nested tensor; pass a dense one"),
    ((), {}, r"does not run on \(\): it also needs input"),
    ((torch.rand(2, 3, 8, 8), 1), {}, "it takes 1 input: input"),
    ((torch.rand(2, 3, 8, 8),), {"z": 1}, "it has no input 'z'"),
]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_inputs_of_another_kind_are_refused_before_and_after_binding(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.rand(2, 3, 8, 8)
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
    for _ in range(2):
        for args, kwargs, words in BAD_CALLS:
            with pytest.raises(fxq.InputError, match=words):
                qmodel(*args, **kwargs)
        for _ in range(3):
            qmodel(x)


def test_kernels_take_no_tensor_without_values():
    """It ended the process."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[torch.rand(2, 3, 8, 8)])
    if any(getattr(m, "opaque", False) for m in qmodel.modules()):
        with pytest.raises(fxq.InputError, match="on the meta device, so it has no values"):
            qmodel(torch.rand(2, 3, 8, 8, device="meta"))
