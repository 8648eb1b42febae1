"""Writer: names, constants, and nodes that are left out."""

from __future__ import annotations

import pytest
import torch

from fxq.onnx.onnx_objects import INT4, UINT4, NotInOnnx, onnx_type
from fxq.onnx.writer import Value, Writer
from tests.support.onnx_runs import onnx, run_onnxruntime

pytestmark = pytest.mark.any_cpu

LIKE = torch.empty(3)


def test_names_are_unique():
    """Also if inputs are named like nodes, constants or outputs."""
    w = Writer()
    names = ["constant", "Relu", "output_0", "x"]
    values = [w.input(name, LIKE) for name in names]
    first = w.emit("Add", values[0], torch.ones(3))
    with w.scoped("x"), w.scoped("inner"):
        second = w.emit("Relu", first)
        third = w.emit("Relu", second)
    assert (first, second, third) == ("/Add", "x/Relu", "x/Relu_1")
    model = w.model([Value(third, LIKE)])
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.output[0].name == "x/Relu_1"
    (got,) = run_onnxruntime(model, [torch.zeros(3)] * len(model.graph.input))
    assert torch.equal(got, torch.ones(3))


def test_nodes_that_no_output_needs_are_left_out():
    w = Writer()
    x = w.input("x", LIKE)
    w.emit("Add", x, torch.ones(3))
    clamped = w.emit("Clip", x, None, torch.tensor(1.0), extra=None)
    model = w.model([Value(clamped, LIKE)])
    assert [node.op_type for node in model.graph.node] == ["Clip"]
    assert list(model.graph.node[0].input) == ["x", "", "/constant_1"]
    assert len(model.graph.initializer) == 1 and not model.graph.node[0].attribute


def test_a_tensor_is_one_constant():
    w = Writer()
    tensor = torch.arange(3)
    assert w.constant(tensor) == w.constant(tensor) != w.constant(tensor.clone())
    assert w.constant_of(w.constant(tensor)) is tensor
    assert w.cached_constant("key", tensor.clone) is w.cached_constant("key", tensor.clone)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
     torch.int64, torch.bool],
)  # fmt: skip
def test_constants_of_each_type(dtype):
    w = Writer()
    tensor = torch.tensor([[0, 1, 2], [3, 4, 0]]).to(dtype).t()  # with gaps
    real = w.cast(tensor, torch.float32)
    model = w.model([Value(real, torch.empty(3, 2))])
    assert model.graph.initializer[0].data_type == onnx_type(dtype)
    assert torch.equal(run_onnxruntime(model, [])[0], tensor.float())


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4), ()])
@pytest.mark.parametrize("kind", [INT4, UINT4])
def test_constants_of_four_bits(kind, shape):
    w = Writer()
    low = -8 if kind == INT4 else 0
    values = torch.randint(low, low + 16, shape, generator=torch.Generator().manual_seed(2))
    values = values.to(torch.int8 if low else torch.uint8)
    real = w.emit("Cast", w.constant(values, kind), to=onnx_type(torch.float32))
    model = w.model([Value(real, torch.empty(shape))])
    onnx.checker.check_model(model, full_check=True)
    assert torch.equal(run_onnxruntime(model, [])[0], values.float())


def test_types_that_onnx_has_not():
    with pytest.raises(NotInOnnx, match=r"ONNX has no type for values of torch.complex64"):
        Writer().constant(torch.zeros(2, dtype=torch.complex64))


def test_scopes_end_with_what_is_refused():
    w = Writer()
    with pytest.raises(NotInOnnx), w.scoped("a"):
        raise NotInOnnx("it is so")
    assert w.emit("Relu", w.input("x", LIKE)) == "/Relu"
