"""Linear layers with dynamic ranges in the jit backend."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.loops.jit_units import JitLinear

pytestmark = pytest.mark.any_cpu
pytest.importorskip("numba")
WEIGHTS = {
    "8 bits": fxq.Recipe.dynamic().config.weight,
    "4 bits in blocks": fxq.Recipe.weight_only(bits=4).config.weight,
}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 320), nn.GELU(), nn.Linear(320, 64), nn.ReLU()).eval()


def kernels(qmodel):
    return [type(kernel) for name, kernel in qmodel.named_modules() if name.startswith("fxq_kernels.")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_results_are_those_of_the_reference_backend(weight, rows):
    model, x = mlp(), torch.randn(rows, 192)
    quantized = [
        fxq.quantize(model, fxq.Recipe.dynamic(backend=backend, weight=WEIGHTS[weight], optimize="coverage"),
                     example_inputs=x)
        for backend in ("jit", "reference")
    ]  # fmt: skip
    assert kernels(quantized[0]).count(JitLinear) == 2
    got, wanted = (qmodel(x).double() for qmodel in quantized)
    # a sum that rounds the other way changes one step of the second layer's input, about 1/255 of its range
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


def test_a_file_computes_equal_results(tmp_path):
    x = torch.randn(5, 192)
    qmodel = fxq.quantize(mlp(), fxq.Recipe.dynamic(backend="jit", optimize="coverage"), example_inputs=x)
    qmodel.save(tmp_path / "m.fxq")
    loaded = fxq.load(tmp_path / "m.fxq")
    assert JitLinear in kernels(loaded)
    assert torch.equal(loaded(x), qmodel(x))


def test_static_layers_stay_steps_of_a_program():
    x = [torch.randn(8, 192) for _ in range(4)]
    recipe = fxq.Recipe.static(backend="jit", optimize="coverage")
    qmodel = fxq.quantize(mlp(), recipe.override("2", fxq.Recipe.dynamic().config), data=x)
    names = [kernel.__name__ for kernel in kernels(qmodel)]
    assert names.count("JitLinear") == 1 and "JitKernel" in names


def test_embeddings_keep_integer_tables():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).eval()
    words = [torch.randint(0, 500, (4, 16)) for _ in range(4)]
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="jit", optimize="coverage"), data=words)
    assert [kernel.__name__ for kernel in kernels(qmodel)] == ["WeightOnlyEmbedding", "JitKernel"]


@pytest.mark.parametrize(
    ("columns", "weight", "why"),
    [
        (190, WEIGHTS["8 bits"], "is not a multiple of 4 values"),
        (24, WEIGHTS["8 bits"], "has fewer than 32 values"),
        (192, replace(WEIGHTS["4 bits in blocks"], per=16), "is not a multiple of 32"),
        (192, replace(WEIGHTS["8 bits"], signed=False, symmetric=False), "are unsigned or have zero points"),
    ],
)
def test_layers_that_no_loop_can_read_stay_in_float(columns, weight, why):
    recipe = fxq.Recipe.dynamic(backend="jit", weight=weight, optimize="coverage")
    with pytest.warns(fxq.FxqWarning):
        qmodel = fxq.quantize(nn.Linear(columns, 64).eval(), recipe, example_inputs=torch.randn(3, columns))
    (row,) = (row for row in qmodel.ledger if row.op == "linear")
    assert row.precision == "float" and why in row.reason


def test_a_pickle_computes_equal_results():
    x = torch.randn(5, 192)
    qmodel = fxq.quantize(mlp(), fxq.Recipe.dynamic(backend="jit", optimize="coverage"), example_inputs=x)
    assert torch.equal(pickle.loads(pickle.dumps(qmodel))(x), qmodel(x))


def test_weights_alone():
    qmodel = fxq.quantize(
        mlp(), fxq.Recipe.weight_only(backend="jit", optimize="coverage"), example_inputs=torch.randn(3, 192)
    )
    assert [kernel.__name__ for kernel in kernels(qmodel)] == ["WeightOnlyLinear", "WeightOnlyLinear"]
