"""Arithmetic on dynamic sizes of ONNX files: rounding, comparisons, and ops whose form depends on a size."""

import numpy as np
import pytest
import torch

import fxq
from tests.support.onnx_text import parsed, reference

pytest.importorskip("onnx")

SIZES = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "four": np.array([4]), "minus": np.array([-2]),
    "last": np.array([-1]), "lowest": np.array([-(2**63)]), "five": np.array([5, 1]), "pair": np.array([-1, 0]),
}  # fmt: skip


def checked(body, shapes, inputs="float[N, M] x", outputs="float[A, B] y", opset=18):
    """Compare a model with ONNX's reference implementation for several sizes of its input."""
    model = parsed(body, inputs, outputs, SIZES, opset=opset)
    read = fxq.read_onnx(model)
    for shape in shapes:
        x = torch.randn(shape)
        expected = [torch.from_numpy(np.array(part)) for part in reference(model, x)]
        results = read(x)
        for result, right in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
            torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", ["Div(less, two)", "Mod<fmod = 1>(less, four)", "Div(n, minus)", "Mod(less, minus)"])
def test_division_rounds_towards_zero(op):
    body = f"n = Shape<start = 0, end = 1>(x) less = Neg(n) q = {op} e = Neg(q) y = Slice(x, zero, e, zero)"
    checked(body, [(7, 2), (9, 2), (4, 2)])


@pytest.mark.parametrize("op", ["Less(n, four)", "Equal(n, one)", "Greater(four, n)"])
def test_comparisons_that_depend_on_a_size(op):
    """They are computed when the model runs; where the graph depends on them, the file is refused."""
    sizes = "n = Shape<start = 0, end = 1>(x)"
    checked(f"{sizes} few = {op} w = Where(few, two, four) c = Cast<to = 1>(w) y = Mul(x, c)", [(1, 2), (3, 2), (9, 2)])
    for body in (f"few = {op} e = Where(few, one, two) y = Slice(x, zero, e, zero)", f"few = {op} y = {BRANCH}"):
        with pytest.raises(fxq.FileError, match=r"computed from data \(Sizes that are dynamic in the file: N, M"):
            fxq.read_onnx(parsed(f"{sizes} {body}", "float[N, M] x", "float[A, B] y", SIZES))


BRANCH = """
If(few) <then_branch = a () => (float[A, B] p) { p = Neg(x) }, else_branch = b () => (float[A, B] q) { q = Abs(x) }>
"""


def test_comparisons_that_hold_for_all_sizes():
    body = "n = Shape<start = 0, end = 1>(x) m = Add(n, one) few = Less(m, two) y = " + BRANCH
    checked(body, [(1, 2), (5, 3)])


def test_axes_of_size_one_that_are_dynamic():
    with pytest.raises(fxq.FileError, match=r"it removes all axes of size 1, and some of its axes are dynamic"):
        fxq.read_onnx(parsed("y = Squeeze(x)", "float[1, N] x", "float[M] y"))


def test_expansion_of_a_dynamic_axis():
    checked("n = Shape(x) s = ReduceSum(x, last) y = Expand(s, n)", [(4, 3), (1, 1), (1, 5)])
    with pytest.raises(fxq.FileError, match=r"\(Expand\) cannot be read"):  # right for one row only, or for five
        fxq.read_onnx(parsed("y = Expand(x, five)", "float[N, M] x", "float[5, M] y", SIZES))


def test_indices_from_the_end_of_a_dynamic_axis():
    checked("y = Gather<axis = 1>(x, pair)", [(4, 3), (1, 6)])
    checked("y = Gather<axis = 0>(x, pair)", [(4, 3), (1, 6)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("opset", [13, 18])
def test_equal_parts_of_a_dynamic_axis(opset):
    count = ", num_outputs = 3" if opset == 18 else ""
    outputs = "float[N, A] p, float[N, B] q, float[N, C] r"
    shapes = [(2, 9), (1, 6)] + ([(2, 8)] if opset == 18 else [])
    checked(f"p, q, r = Split<axis = 1{count}>(x)", shapes, outputs=outputs, opset=opset)


def test_a_dynamic_axis_backwards():
    checked("y = Slice(x, last, lowest, one, last)", [(2, 5), (1, 3)])
    with pytest.raises(fxq.FileError, match=r"it steps backwards along a dynamic axis"):
        fxq.read_onnx(parsed("y = Slice(x, last, lowest, one, minus)", "float[N, M] x", "float[A, B] y", SIZES))
