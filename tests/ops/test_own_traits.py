"""Traits of registered ops that do not hold are refused, with the values of the example."""

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError
from fxq.extend import OpTraits, register_op
from fxq.ops import OPS
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
POINTWISE, LAYOUT = OpTraits("computes", pointwise=True), OpTraits("moves", layout=True)


def scaled_by_maximum(x):
    return x / x.abs().max()


def halved(x):
    return x[:, ::2] * 1.0


def turned_and_scaled(x):
    return x.flip(1) * 1.01


def turned_in_float(x):
    return x.flip(1).float()


def swapped_halves(x):
    return torch.cat([x[:, 8:], x[:, :8]], 1)


def noisy(x):
    return x + torch.rand_like(x)


def with_gain(x, gain):
    return torch.tanh(x * gain)


def shifted_in(x):
    return torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], 1)


def negated(x):
    return -x


def is_positive(x):
    return x > 0


def rounded_to_half(x):
    return x.half()


def logarithm(x):
    assert (x > -10).all() and x.isfinite().all()
    return torch.log(x + 10)


def doubled_in_place(x):
    return x.mul_(2)


def unfolded(x):
    return torch.nn.functional.unfold(x[None, None], (1, 1))[0]


def shifted_in_ones(x):
    y = torch.ones_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def joined_of_two(x, y):
    return torch.cat([x, y], 1)[:, :16]


def joined(xs):
    return torch.cat(xs, 1)


WRONG = [
    (scaled_by_maximum, POINTWISE, "elements of its output change when other elements of its input do"),
    (halved, POINTWISE, r"its output is \(8, 8\) for an input of \(8, 16\)"),
    (swapped_halves, POINTWISE, "elements of its output change"),
    (noisy, POINTWISE, "elements of its output change"),
    (turned_and_scaled, LAYOUT, "its output has values that are in none of its inputs"),
    (turned_in_float, LAYOUT, r"it returns torch\.float32 for uint8"),
    (shifted_in, LAYOUT, "its output has values that are in none of its inputs"),
    (negated, LAYOUT, "its output has values that are in none of its inputs"),
    (rounded_to_half, LAYOUT, r"it returns torch\.float16 for inputs of torch\.float32"),
]


@pytest.fixture
def quantized():
    """Function that registers an op with traits, and quantizes a network whose hidden values pass it."""
    names = []

    def quantize(function, traits, recipe=REFERENCE, call=lambda op, x: op(x)):
        names.append(function.__name__)
        op = register_op(traits=traits)(function)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.first, self.second, self.gain = nn.Linear(16, 16), nn.Linear(16, 4), nn.Parameter(torch.rand(16))

            def forward(self, x):
                y = (call(op, self.first(x)) if function is not with_gain else op(self.first(x), self.gain)).float()
                return self.second(y) if y.shape[1] == 16 else y

        return fxq.quantize(Net().eval(), recipe, data=[X])

    yield quantize
    for name in names:
        OPS.discard(name)


@pytest.mark.parametrize(("function", "traits", "why"), WRONG, ids=[case[0].__name__ for case in WRONG])
def test_traits_that_do_not_hold_are_refused(quantized, function, traits, why):
    with pytest.raises(InputError, match=f"the op '{function.__name__}' is registered with .*=True, but {why}"):
        quantized(function, traits)


@pytest.mark.parametrize("function", [scaled_by_maximum, turned_and_scaled, noisy])
def test_in_float_they_are_accepted(quantized, function):
    rows = {entry.op: entry.precision for entry in quantized(function, OpTraits("float")).ledger}
    assert rows[function.__name__] == "float" and rows["linear"] == "int8"


def test_traits_that_hold_are_accepted(quantized):
    for function, traits, precision in ((with_gain, POINTWISE, "int8"), (swapped_halves, LAYOUT, "moves")):
        rows = {entry.op: entry.precision for entry in quantized(function, traits).ledger}
        assert rows[function.__name__] == precision
    traits = OpTraits("moves", inputs=("xs",), layout=True)
    rows = {e.op: e.precision for e in quantized(joined, traits, call=lambda op, x: op([x[:, :8], x[:, 8:]])).ledger}
    assert rows["joined"] == "moves"


def test_constants_that_are_values_of_the_example_are_noticed(quantized):
    with pytest.raises(InputError, match="its output has values that are in none of its inputs"):
        quantized(shifted_in_ones, LAYOUT, call=lambda op, x: op(torch.nn.functional.hardsigmoid(4 * x)))


def test_inputs_of_two_dtypes(quantized):
    traits = OpTraits("moves", inputs=("x", "y"), layout=True)
    assert quantized(joined_of_two, traits, call=lambda op, x: op(x.bfloat16(), x))(X).isfinite().all()


def test_no_false_alarms(quantized):
    """Outputs that are no floats, ops that check their domain or change their input, and ops that take no integers."""
    for function, traits in (
        (is_positive, POINTWISE), (logarithm, POINTWISE), (doubled_in_place, POINTWISE), (unfolded, LAYOUT)
    ):  # fmt: skip
        qmodel = quantized(function, traits, call=lambda op, x: op(x * 1.0))
        assert qmodel(X).isfinite().all()
