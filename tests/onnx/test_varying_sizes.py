"""Dynamic sizes: the model computes what Python computes, and restrictions of the sizes are reported."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.varying_sizes import VaryingSizes, varies
from fxq.onnx.writer import Value, Writer
from tests.support.onnx_runs import onnx, run_onnxruntime, same

pytestmark = pytest.mark.any_cpu


def computed(function, example=(4, 6)):
    """A model that returns the sizes that a function computes from the shape (N, T) of its input, and the writer."""
    sizes = VaryingSizes()
    w = Writer(sizes=sizes, portable=True)
    shape = [sizes.axis(name, "x", i, n) for i, (name, n) in enumerate(zip("nt", example, strict=True))]
    w.input("x", sizes.empty(shape, torch.float32))
    numbers = list(function(*shape))
    return w.model([Value(w.emit("Identity", w.ints(numbers)), torch.empty(len(numbers), dtype=torch.int64))]), w


FORMS = [
    lambda n, t: [n, t],
    lambda n, t: [n * t + 3, n - t, 2 * t * t],
    lambda n, t: [t // 2, -(-t // 2), (t - 1) // 3 + 1, (n * t) // 4],
    lambda n, t: [n % 3, (n + t) % 5, 7],
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 50), t=st.integers(1, 50))
def test_what_is_computed_of_sizes(form, n, t):
    model, _ = computed(form)
    (got,) = run_onnxruntime(model, [torch.zeros(n, t)])
    assert got.tolist() == form(n, t)


def test_one_axis_is_read_once():
    model, _ = computed(lambda n, t: [n, 2 * n, n + 1])
    assert [node.op_type for node in model.graph.node].count("Shape") == 1


def test_a_size_whose_value_is_needed_is_reported():
    sizes = VaryingSizes()
    n = sizes.axis("batch", "x", 0, 4)
    assert varies(n) and not varies(4) and sizes.assumed() is None
    assert n > 1 and sizes.assumed() is None  # holds for all sizes
    assert n != 7
    assert "batch" in sizes.assumed()


LOWER_BOUNDS = [
    lambda n, t: n >= 3,
    lambda n, t: n - 2 != 1,
    lambda n, t: 2 * ((t - 1) // 2) + 1 > 2,
    lambda n, t: torch.sym_max(n - 2, 1) * torch.sym_max(t - 2, 1) != 1,
    lambda n, t: n + t - 4 >= 1,
    lambda n, t: ((n - 1) // 2 + 1) ** 2 != 1,
    lambda n, t: t < n * t,
    lambda n, t: (t - 1) // 2 + 1 < ((n - 1) // 2 + 1) * ((t - 1) // 2 + 1),
]
RESTRICTIONS = [
    lambda n, t: n == 4,
    lambda n, t: n <= 7,
    lambda n, t: n - t <= 0,
    lambda n, t: n - t != 1,
    lambda n, t: (n - 3) * (t - 8) != 1,
    lambda n, t: n % 2 != 1,
    lambda n, t: t <= 2 * n,
    lambda n, t: n < t * t,
    lambda n, t: n != 2,
]


@pytest.mark.parametrize("asked", [*LOWER_BOUNDS, *RESTRICTIONS])
def test_lower_bounds_of_sizes_are_not_reported(asked):
    sizes = VaryingSizes()
    assert asked(sizes.axis("n", "x", 0, 4), sizes.axis("t", "x", 1, 6)) or asked is RESTRICTIONS[-1]
    assert (sizes.assumed() is None) == (asked in LOWER_BOUNDS)


def test_axes_of_one_name_have_one_size():
    sizes = VaryingSizes()
    assert sizes.axis("batch", "x", 0, 4) is sizes.axis("batch", "y", 1, 9)


def test_a_form_that_onnx_has_not_is_refused():
    with pytest.raises(NotInOnnx, match=r"no ONNX form of the size "):
        computed(lambda n, t: [torch.sym_int(torch.sym_sqrt(n))])


@pytest.mark.parametrize("shape", [lambda n, t: (n, t, 2, 4), lambda n, t: (n * t, 8), lambda n, t: (t, n, 8)])
def test_reshapes(shape):
    sizes = VaryingSizes()
    w = Writer(sizes=sizes, portable=True)
    n, t = (sizes.axis(name, "x", i, size) for i, (name, size) in enumerate({"n": 3, "t": 5}.items()))
    x = w.input("x", sizes.empty((n, t, 8), torch.float32))
    out = shape(n, t)
    model = w.model([Value(w.reshaped(x, out), sizes.empty(out, torch.float32))])
    onnx.checker.check_model(model, full_check=True)
    image = torch.randn(2, 7, 8)
    same(run_onnxruntime(model, [image])[0], image.reshape(shape(2, 7)), rtol=0)
