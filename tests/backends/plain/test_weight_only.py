"""Weight-only layers: against float64, in odd shapes, copied and saved."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.plain import weight_only
from fxq.backends.plain.weight_only import WeightOnlyKernel, WeightOnlyLinear
from fxq.common.metrics import nbytes
from fxq.errors import InputError
from fxq.quant.packing import Packing
from fxq.quant.qparams import dequantize
from tests.support.processes import in_new_python

BITS8, BITS4 = fxq.Recipe.weight_only(optimize="coverage"), fxq.Recipe.weight_only(bits=4, optimize="coverage")
ALL_BITS4 = BITS4.override("*", BITS4.config)  # embeddings, too
RECIPES = {
    "int8": BITS8,
    "per tensor": fxq.Recipe.weight_only(per="tensor"),
    "int4": BITS4,
    "blocks of 32": fxq.Recipe.weight_only(bits=4, per=32),
    "int4 per channel": fxq.Recipe.weight_only(bits=4, per="channel"),
    "int8 blocks": fxq.Recipe.weight_only(per=128),
    "int3": fxq.Recipe.weight_only(bits=3, optimize="coverage"),
    "int6": fxq.Recipe.weight_only(bits=6, optimize="coverage"),
    "float16": fxq.Recipe.weight_only(dtype=torch.float16),
}


def quantized(model, recipe, *inputs):
    """Return the quantized model, and check that no kernel failed verification."""
    qmodel = fxq.quantize(model.eval(), recipe, example_inputs=inputs)
    assert not qmodel.ledger.where(kind="unverified")
    return qmodel


def rounded(model, qmodel):
    """Copy of the float model in float64, with the dequantized weights."""
    wanted = copy.deepcopy(model)
    for path, layer in qmodel.qparams().items():
        weight = next(iter(layer.weights.values()))
        real = (
            weight.values.float() if weight.stored.dtype == torch.float16 else dequantize(weight.values, weight.qparams)
        )
        wanted.get_submodule(path).weight.data = real
    return wanted.double()


def of_float64(x):
    return tuple(v.double() if v is not None and v.is_floating_point() else v for v in x)


LAYERS = {
    "linear": (nn.Linear(130, 33), (5, 130)),
    "linear without bias": (nn.Linear(64, 1, bias=False), (1, 64)),
    "linear of one": (nn.Linear(1, 3), (2, 1)),
    "conv1d": (nn.Conv1d(6, 10, 3, stride=2, padding=1), (2, 6, 9)),
    "conv2d": (nn.Conv2d(20, 9, 3, padding=1), (1, 20, 5, 6)),
    "conv2d in groups": (nn.Conv2d(6, 4, 3, groups=2, bias=False), (2, 6, 5, 5)),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 5, 5)),
    "reflected": (nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), (1, 3, 5, 5)),
    "conv3d": (nn.Conv3d(3, 5, 2), (1, 3, 3, 4, 3)),
    "conv_transpose1d": (nn.ConvTranspose1d(5, 4, 3, stride=2), (1, 5, 4)),
    "conv_transpose2d": (nn.ConvTranspose2d(70, 6, 2, groups=2, stride=2), (1, 70, 3, 3)),
    "conv_transpose3d": (nn.ConvTranspose3d(3, 4, 2), (1, 3, 2, 3, 2)),
    "one sample": (nn.Conv2d(3, 40, 3), (3, 4, 4)),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_float_arithmetic_on_the_weights_that_the_integers_stand_for(name, recipe):
    layer, shape = LAYERS[name]
    model = nn.Sequential(layer)
    x = torch.randn(shape)
    qmodel = quantized(model, recipe, x)
    assert [e.precision for e in qmodel.ledger if e.op != "pad"] == [
        "weight-only"
    ] and qmodel.ledger.weight_coverage == 1.0
    assert isinstance(next(iter(qmodel.fxq_kernels.children())), WeightOnlyKernel)
    with torch.no_grad():
        wanted = rounded(model, qmodel)(x.double())
        for _ in range(2):  # the second call is bound
            torch.testing.assert_close(qmodel(x).double(), wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 5), inputs=st.integers(1, 90), outputs=st.integers(1, 70), bias=st.booleans(),
    bits=st.integers(2, 8), per=st.sampled_from(["tensor", "channel", 1, 32, 64]),
)  # fmt: skip
def test_linear_layers_of_any_size(rows, inputs, outputs, bias, bits, per):
    model, x = nn.Sequential(nn.Linear(inputs, outputs, bias)), torch.randn(rows, inputs)
    qmodel = quantized(model, fxq.Recipe.weight_only(bits=bits, per=per, optimize="coverage"), x)
    with torch.no_grad():
        torch.testing.assert_close(qmodel(x).double(), rounded(model, qmodel)(x.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", [BITS8, BITS4, RECIPES["float16"]])
def test_a_large_weight_becomes_floats_in_pieces(monkeypatch, recipe):
    monkeypatch.setattr(weight_only, "_PIECE_ELEMENTS", 100)
    model, x = nn.Sequential(nn.Linear(40, 33)), torch.randn(2, 3, 40)
    qmodel = quantized(model, recipe, x)
    with torch.no_grad():
        torch.testing.assert_close(qmodel(x).double(), rounded(model, qmodel)(x.double()), rtol=1e-4, atol=1e-5)


class Text(nn.Module):
    """Model whose embedding table is also the weight of its last layer."""

    def __init__(self, **bags):
        super().__init__()
        self.words, self.bags = nn.Embedding(300, 70), nn.EmbeddingBag(50, 70, **bags)
        self.last = nn.Linear(70, 300, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x, y, offsets=None, weights=None):
        return self.last(self.words(x).mean(1) + self.bags(y, offsets, weights))


X = torch.randint(0, 300, (2, 5))
BAGS = {
    "mean": (dict(mode="mean"), (torch.randint(0, 50, (2, 7)),)),
    "padded": (dict(mode="mean", padding_idx=3), (torch.tensor([[3, 1, 2], [3, 3, 4]]),)),
    "padded from the end": (dict(mode="max", padding_idx=-1), (torch.tensor([[49, 1, 2], [49, 5, 4]]),)),
    "max": (dict(mode="max"), (torch.randint(0, 50, (2, 7), dtype=torch.int32),)),
    "offsets": (dict(mode="sum"), (torch.randint(0, 50, (9,)), torch.tensor([0, 4]))),
    "an empty bag": (dict(mode="mean"), (torch.randint(0, 50, (9,)), torch.tensor([0, 9]))),
    "the last offset": (
        dict(mode="sum", include_last_offset=True),
        (torch.randint(0, 50, (9,)), torch.tensor([0, 4, 9])),
    ),
    "weights": (dict(mode="sum"), (torch.randint(0, 50, (2, 7)), None, torch.rand(2, 7))),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("recipe", [BITS8, BITS4, RECIPES["float16"]], ids=["int8", "int4", "float16"])
@pytest.mark.parametrize(("options", "inputs"), BAGS.values(), ids=BAGS)
def test_embeddings_and_bags(options, inputs, recipe):
    model = Text(**options)
    inputs = (X, *inputs)
    qmodel = quantized(model, recipe, *inputs)
    assert {e.op for e in qmodel.ledger.where(precision="weight-only")} == {"embedding", "embedding_bag", "linear"}
    with torch.no_grad():
        wanted = rounded(model, qmodel)(*of_float64(inputs))
        torch.testing.assert_close(qmodel(*inputs).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("recipe", "most"), [(BITS8, 0.27), (ALL_BITS4, 0.16), (RECIPES["float16"], 0.51)])
def test_a_table_that_two_layers_share_is_kept_once(recipe, most):
    model = Text()
    qmodel = quantized(model, recipe, X, X % 50)
    kernels = qmodel.fxq_kernels
    assert kernels.words.weight.data_ptr() == kernels.last.weight.data_ptr()
    assert nbytes(qmodel) < (most + 0.03) * nbytes(model)  # 70 values are a block and a short one
    again = copy.deepcopy(qmodel)
    assert again.fxq_kernels.words.weight.data_ptr() == again.fxq_kernels.last.weight.data_ptr()


def saved(value):
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("recipe", "most"), [(BITS8, 0.27), (ALL_BITS4, 0.16)], ids=["int8", "int4"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_weights_are_as_small_in_memory_in_state_dicts_and_in_files(recipe, most, backend):
    model, x = nn.Sequential(nn.Embedding(2000, 256), nn.Linear(256, 512), nn.Linear(512, 256)), X
    qmodel = quantized(model, recipe.with_backend(backend), x)
    assert nbytes(qmodel) <= most * nbytes(model)
    assert sum(t.nbytes for t in qmodel.state_dict().values()) <= most * nbytes(model)
    assert len(saved(qmodel.state_dict())) <= (most + 0.01) * nbytes(model)
    assert len(saved(qmodel)) <= (most + 0.03) * nbytes(model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", [BITS8, BITS4, RECIPES["float16"]], ids=["int8", "int4", "float16"])
def test_copies_and_files_give_the_same(recipe):
    model = Text()
    inputs = (X, X % 50)
    qmodel = quantized(model, recipe, *inputs)
    with torch.no_grad():
        wanted = qmodel(*inputs)
        for copied in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
            assert torch.equal(copied(*inputs), wanted)
        fresh = quantized(Text(), recipe, *inputs)
        assert not torch.equal(fresh(*inputs), wanted)
        fresh.load_state_dict(qmodel.state_dict(), strict=True)
        assert torch.equal(fresh(*inputs), wanted)


@pytest.mark.slow
def test_a_file_in_a_fresh_process(tmp_path):
    x = torch.randn(3, 70)
    qmodel = quantized(nn.Sequential(nn.Linear(70, 9)), BITS4, x)
    torch.save({"model": qmodel, "x": x, "y": qmodel(x)}, tmp_path / "model.pt")
    code = (
        "import torch, sys; held = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(held['model'](held['x']), held['y'])"
    )
    done = in_new_python(code, tmp_path / "model.pt")
    assert done.returncode == 0, done.stderr


def test_threads():
    inputs = [torch.randn(4, 300) for _ in range(16)]
    qmodel = quantized(nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 7)), BITS4, inputs[0])
    with torch.no_grad():
        wanted = [qmodel(x) for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda x: torch.no_grad()(qmodel)(x), inputs))
    assert all(map(torch.equal, results, wanted))


def test_weights_that_are_written_to_count():
    x = torch.randn(2, 8)
    qmodel = quantized(nn.Sequential(nn.Linear(8, 3, bias=False)), BITS8, x)
    with torch.no_grad():
        qmodel(x)
        before = qmodel(x)
        next(qmodel.fxq_kernels.children()).weight_scale.mul_(2)
        torch.testing.assert_close(qmodel(x), 2 * before)


def ones():
    weight, scale = torch.ones(2, 3, dtype=torch.int8), torch.ones(2)
    return WeightOnlyLinear(weight=weight, weight_scale=scale, op="linear", settings={}, axis=0)


def test_a_kernel_takes_float32_alone():
    kernel = ones()
    assert torch.equal(kernel(torch.ones(1, 3)), torch.full((1, 2), 3.0))
    with pytest.raises(InputError, match="is float64"):
        kernel(torch.ones(1, 3, dtype=torch.float64))


def test_an_input_that_wants_gradients():
    kernel = ones()
    assert not kernel(torch.ones(1, 3, requires_grad=True)).requires_grad


def test_a_kernel_of_its_config():
    weight = Packing((6,), 4, False).pack(torch.randint(0, 16, (4, 6)).to(torch.uint8))
    kernel = WeightOnlyLinear(
        weight=weight, weight_scale=torch.rand(4, 2), weight_zero_point=torch.randint(0, 16, (4, 2)).to(torch.uint8),
        bias=torch.rand(4), op="linear", settings={}, axis=1, block=4, packed=((6,),), signed=False,
    )  # fmt: skip
    again = WeightOnlyLinear.from_config(kernel.config(), dict(kernel.named_buffers()))
    x = torch.randn(2, 6)
    assert torch.equal(again(x), kernel(x))
    real = torch.cat([weight & 15, weight >> 4], 1).float()
    scale = kernel.weight_scale.repeat_interleave(4, 1)[:, :6]
    zero = kernel.weight_zero_point.repeat_interleave(4, 1)[:, :6]
    torch.testing.assert_close(kernel(x), F.linear(x, (real - zero) * scale, kernel.bias))


class Kept(nn.Module):
    """Embedding bag whose offsets are a buffer of the model."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 70, mode="sum")
        self.register_buffer("offsets", torch.tensor([0, 4]))

    def forward(self, x):
        return self.bag(x, self.offsets)


def test_offsets_that_are_constants_are_kept_in_the_kernel():
    x, model = torch.randint(0, 50, (9,)), Kept()
    qmodel = fxq.quantize(model, BITS8, example_inputs=x)
    assert qmodel.ledger.count("weight-only") == 1
    with torch.no_grad():
        torch.testing.assert_close(qmodel(x), model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("per", ["channel", 16, 20], ids=["rows", "blocks", "a short last block"])
def test_lookups_are_bound_to_the_shape_of_their_indices(per, affine):
    spec = fxq.TensorSpec(signed=not affine, symmetric=not affine, per=per, observer="minmax")
    table = nn.Embedding(30, 48)
    recipe = BITS8.override("*", fxq.QuantConfig(activation=None, weight=spec))
    (kernel,) = quantized(table, recipe, torch.arange(30)).fxq_kernels.children()
    for x in (torch.tensor(7), torch.tensor([3, 3]), torch.randint(0, 30, (2, 5)).int(), torch.zeros(2, 0).long()):
        bound = kernel.callable_for(x)
        assert (bound == kernel.forward) == (per == 20)
        assert torch.equal(bound(x), kernel(x)) and bound(x).shape == (*x.shape, 48)
    with pytest.raises(IndexError):
        kernel.callable_for(torch.tensor([1]))(torch.tensor([30]))


def test_no_rows_of_a_table():
    """An empty batch, and only empty bags, also with packed weights."""
    table, bags = nn.Embedding(11, 7), nn.EmbeddingBag(11, 7)
    none, first = torch.zeros(0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    kept = fxq.quantize(table, ALL_BITS4, example_inputs=torch.arange(3))
    assert kept(none).shape == (0, 7)
    example = {"input": torch.arange(3), "offsets": torch.tensor([0, 1])}
    kept = fxq.quantize(bags, ALL_BITS4, example_inputs=example)
    assert torch.equal(kept(none, first), torch.zeros(2, 7))
