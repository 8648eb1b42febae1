"""Conversions and ops of each element: which of them a step before computes, and which have one of their own."""

import pytest
import torch

from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.program_steps import PointwiseStep
from fxq.quant.qparams import QParams
from tests.support.programs import Draft, check, check_both, kinds, plan_of, program, refused, steps_of

pytestmark = pytest.mark.any_cpu

FUNCTIONS = {
    "relu": {},
    "relu6": {},
    "hardtanh": {"min_val": -0.5, "max_val": 0.75},
    "leaky_relu": {"negative_slope": 0.3},
    "gelu": {"approximate": "none"},
    "silu": {},
    "hardswish": {},
    "sigmoid": {},
    "tanh": {},
    "hardsigmoid": {},
}


# ---- functions


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 16, 3, 4), (5, 17), (1, 3, 33)])
def test_functions_of_an_input(name, shape):
    draft = Draft()
    x = draft.input(4 * draft.normal(*shape))
    check_both(draft, draft.op(name, x, **FUNCTIONS[name]))
    check_both(draft, draft.op(name, draft.qdq(x), **FUNCTIONS[name]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("columns", [5, 16, 33])
def test_a_layer_computes_its_function(name, columns):
    draft = Draft()
    y = draft.op(name, draft.conv(draft.image(2, 16, 5, 4), columns, 3), **FUNCTIONS[name])
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    check(draft, draft.quantize(y))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_large_and_small_values(name):
    draft = Draft()
    x = torch.cat([torch.linspace(-100, 100, 401), torch.linspace(-1e-3, 1e-3, 99)])
    form = draft.form(draft.op(name, draft.input(x.view(2, -1)), **FUNCTIONS[name]))
    got = program(form, draft.inputs)(*draft.inputs)
    torch.testing.assert_close(got, form(*draft.inputs), rtol=1e-5, atol=2e-6)


def leaky_relu(draft, x):
    return draft.op("leaky_relu", x, negative_slope=0.1)


def written_as_floats(compiled):
    """Steps of a program that write leaky_relu as floats."""
    return [step.name for step in compiled.plan.steps if step.function.name == "prelu" and step.grid is None]


def test_readers_of_a_leaky_relu_compute_it():
    """Also where they subtract a value from it, as in an input that is the sum of two values of 8 bits."""
    draft = Draft()
    x = draft.op("add", draft.conv(draft.image(2, 3, 5, 4), 16), draft.conv(draft.image(2, 3, 5, 4), 16))
    y = leaky_relu(draft, x)
    coarse = draft.qdq(y)
    fine = draft.qdq(draft.op("sub", y, coarse), (0.001, 128))
    compiled = check(draft, draft.op("add", draft.conv(coarse, 16), draft.conv(fine, 16)), draft.op("add", x, coarse))
    assert written_as_floats(compiled) == []
    assert [step.applies_first for step in compiled.plan.steps if step.function.name == "prelu"] == [False, True]


@pytest.mark.parametrize(("name", "options"), [("mul", {}), ("gelu", {"approximate": "none"})])
def test_a_leaky_relu_with_other_readers_is_written_as_floats(name, options):
    draft = Draft()
    x = draft.op("mul", draft.image(2, 16, 5, 4), draft.image(2, 16, 5, 4))
    y = leaky_relu(draft, x)
    read = draft.op(name, y, *([] if options else [x]), **options)
    assert len(written_as_floats(check(draft, draft.quantize(y), read))) == 1


def test_a_second_function_is_a_step_of_its_own():
    draft = Draft()
    y = draft.op("sigmoid", draft.op("silu", draft.conv(draft.image(2, 3, 5, 4), 16)))
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep", "PointwiseStep"]


def test_a_function_of_what_is_read_twice_is_a_step_of_its_own():
    draft = Draft()
    x = draft.conv(draft.image(2, 3, 5, 4), 16)
    compiled = check(draft, draft.quantize(draft.op("mul", x, draft.op("sigmoid", x))))
    assert kinds(compiled)[:4] == ["QuantizeStep", "ProductStep", "PointwiseStep", "PointwiseStep"]


def test_slopes():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    single = draft.op("prelu", x, draft.constant(torch.tensor([0.3])))
    assert kinds(check(draft, draft.quantize(single))) == ["QuantizeStep", "PointwiseStep", "PointwiseStep"]
    y = draft.op("prelu", draft.conv(x, 33), draft.constant(torch.rand(33)))
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    per_channel = draft.op("prelu", x, draft.constant(torch.rand(16)))
    assert refused(draft, per_channel) == "its slopes differ, and no layer is before it"


@pytest.mark.parametrize("steps", [5, 16])
def test_slopes_of_another_axis_than_the_last(steps):
    """PReLU has a slope for each entry of the second axis, which of a sequence is time."""
    # Fails: each column of the layer gets one, as if the last axis had them.
    draft = Draft()
    y = draft.op("linear", draft.image(2, steps, 16), draft.weight(16, 16))
    y = draft.op("prelu", y, draft.constant(torch.rand(steps)))
    assert refused(draft, y)


def test_functions_that_are_refused():
    draft = Draft()
    x = draft.image(2, 16)
    assert refused(draft, draft.op("gelu", x, approximate="tanh")) == "its gelu is approximate"
    assert refused(draft, draft.op("prelu", x, draft.input(torch.rand(1)))) == "it has 1 axes"
    draft = Draft()
    assert refused(draft, draft.op("exp", draft.image(2, 16))) == "no step computes exp"


# ---- sub


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (5, 17), (1, 3, 33)])
def test_what_a_grid_rounds_off(shape):
    draft = Draft()
    x = draft.input(4 * draft.normal(*shape))
    check(draft, draft.op("sub", x, draft.qdq(x)))
    check(draft, draft.quantize(draft.op("sub", draft.op("relu", x), draft.qdq(x))))


def test_refused_subtractions():
    draft = Draft()
    x, y = draft.input(draft.normal(2, 5, 3, 4)), draft.input(draft.normal(2, 5, 3, 4))
    assert "it subtracts floats" in refused(draft, draft.op("sub", x, y))
    assert "alpha" in refused(draft, draft.op("sub", x, draft.qdq(y), alpha=2))


# ---- add


def test_a_layer_adds_integers_that_are_there():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    for single, second in ((draft.conv(x, 16, 3), x), (x, draft.conv(x, 16, 3))):
        compiled = check(draft, draft.quantize(draft.op("relu", draft.op("add", single, second))))
        assert kinds(compiled) == ["QuantizeStep", "ProductStep", "PointwiseStep"]
        (step,) = steps_of(compiled, ProductStep)
        assert step.residual is step.x and step.function.low == 0


def test_a_layer_does_not_add_what_is_made_later():
    """The shortcut is computed after the layer: then another step adds the two."""
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    first = draft.conv(x, 32, 3)
    shortcut = draft.qdq(draft.conv(x, 32))
    compiled = check(draft, draft.quantize(draft.op("relu", draft.op("add", first, shortcut))))
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "ProductStep", "PointwiseStep", "PointwiseStep"]
    assert [step.residual for step in steps_of(compiled, ProductStep)] == [None, None]


def test_a_layer_does_not_add_a_union_that_is_not_whole_yet():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    a = draft.quantize(draft.conv(x, 16), (0.02, 120))
    first = draft.conv(x, 32, 3)
    b = draft.quantize(draft.conv(x, 16), (0.02, 120))
    whole = draft.dequantize(draft.op("cat", [a, b], dim=1))
    compiled = check(draft, draft.quantize(draft.op("add", first, whole)))
    assert all(step.residual is None for step in steps_of(compiled, ProductStep))


def test_a_layer_adds_a_union():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    parts = [draft.quantize(draft.conv(x, 16), (0.02, 120)) for _ in range(2)]
    whole = draft.dequantize(draft.op("cat", parts, dim=1))
    compiled = check(draft, draft.quantize(draft.op("add", draft.conv(whole, 32, 3), whole)))
    assert steps_of(compiled, ProductStep)[-1].residual is not None


def test_a_layer_adds_a_value_with_a_border():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    a = draft.qdq(draft.conv(x, 16, 5))
    y = draft.qdq(draft.op("add", draft.conv(a, 16, 3), a))
    compiled = check(draft, draft.quantize(draft.conv(y, 16, 7)))
    assert steps_of(compiled, ProductStep)[1].residual.border == (1, 1, 1, 1)
    assert steps_of(compiled, ProductStep)[1].out.border == (3, 3, 3, 3)


def test_sums_of_one_value():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    y = draft.conv(x, 16, 3)
    check_both(draft, draft.op("add", y, y))
    check_both(draft, draft.op("mul", draft.op("add", x, x), x))


def test_a_layer_adds_one_residual():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    second = draft.qdq(draft.op("relu", x))
    y = draft.op("add", draft.op("add", draft.conv(x, 16), x), second)
    compiled = check(draft, draft.quantize(y))
    assert kinds(compiled) == ["QuantizeStep", "PointwiseStep", "ProductStep", "PointwiseStep", "PointwiseStep"]


def test_floats_are_added_by_a_step():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    check_both(draft, draft.op("add", draft.conv(x, 16, 3), draft.conv(x, 16)))
    check_both(draft, draft.op("add", draft.conv(x, 16, 3), draft.input(draft.normal(2, 16, 5, 4))))
    check_both(draft, draft.op("add", draft.op("silu", draft.conv(x, 16, 3)), x))


# ---- div


def test_quotients_by_a_number():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    y = draft.op("div", draft.op("add", x, draft.op("silu", x)), -3.0)
    assert kinds(check(draft, draft.quantize(draft.op("leaky_relu", y)))).count("PointwiseStep") == 4
    folded = check(draft, draft.op("div", draft.conv(x, 33, 3), 4))
    assert kinds(folded) == ["QuantizeStep", "ProductStep"]  # its scale and bias are a quarter


def test_quotients_that_are_refused():
    draft = Draft()
    x = draft.image(2, 16)
    for divisor in (x, draft.constant(torch.rand(16)), 0):
        assert refused(draft, draft.op("div", x, divisor)) == "its divisor is not a constant other than 0"
    assert refused(draft, draft.op("div", x, 3.0, rounding_mode="floor")) == "it rounds the quotient"


# ---- mul


@pytest.mark.parametrize("shape", [(), (1,), (1, 33, 1, 1), (33, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_layer_multiplies_by_constants(shape, swapped):
    draft = Draft()
    y, factor = draft.conv(draft.image(2, 3, 5, 4), 33), draft.constant(-2 * torch.rand(shape))
    y = draft.op("mul", factor, y) if swapped else draft.op("mul", y, factor)
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    check(draft, draft.quantize(y))


def test_the_order_of_factors_and_summands_stays():
    draft = Draft()
    x, factor = draft.image(2, 16, 5, 4), draft.constant(torch.rand(1, 16, 1, 1))
    y = draft.conv(x, 16, 3)
    compiled = check(draft, draft.quantize(draft.op("add", draft.op("mul", y, factor), x)))
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "PointwiseStep"]
    compiled = check(draft, draft.quantize(draft.op("mul", draft.op("add", y, x), factor)))
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "PointwiseStep", "PointwiseStep"]
    compiled = check(draft, draft.quantize(draft.op("mul", draft.op("relu", y), factor)))
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "PointwiseStep", "PointwiseStep"]


@pytest.mark.parametrize("op", ["add", "mul"])
@pytest.mark.parametrize("size", [(2, 17, 5, 4), (2, 16, 1, 1), (5, 3), (2, 4, 9)])
def test_constants_of_each_channel(op, size):
    draft = Draft()
    shape = (1, size[1], 1, 1) if len(size) == 4 else size[-1:]
    check_both(draft, draft.op(op, draft.image(*size), draft.constant(draft.normal(*shape))))
    check_both(draft, draft.op(op, draft.constant(draft.normal(*shape)), draft.input(draft.normal(*size))))


@pytest.mark.parametrize("is_float", [True, False])
def test_squeeze_and_excite(is_float):
    draft = Draft()
    x = draft.qdq(draft.op("silu", draft.conv(draft.image(2, 3, 6, 5), 40, 3)))
    pooled = draft.op("mean", x, dim=(2, 3), keepdim=True)
    if is_float:
        narrow = draft.op("conv2d", pooled, draft.constant(draft.normal(8, 40, 1, 1)), draft.vector(8))
        gate = draft.op("conv2d", draft.op("silu", narrow), draft.constant(draft.normal(40, 8, 1, 1)))
    else:
        narrow = draft.qdq(draft.op("silu", draft.conv(draft.qdq(pooled), 8)))
        gate = draft.conv(narrow, 40)
    gate = draft.op("sigmoid", gate)
    check_both(draft, draft.op("mul", x, gate if is_float else draft.qdq(gate)))
    check_both(draft, draft.op("mul", draft.op("hardsigmoid", draft.qdq(pooled)), x))


@pytest.mark.parametrize("op", ["add", "mul"])
@pytest.mark.parametrize("shape", [(2, 21, 5, 4), (1, 700, 2, 1), (2, 21, 9), (2, 9, 600), (4, 33)])
def test_one_channel_for_all(op, shape):
    """A mask of the pixels of an image, or of the places of a sequence, as floats or as integers."""
    draft = Draft()
    x, mask = draft.image(*shape), draft.input(draft.normal(shape[0], 1, *shape[2:]))
    check_both(draft, draft.op(op, x, mask))
    check_both(draft, draft.op(op, draft.qdq(mask), draft.op("relu", x)))


def test_what_is_refused_of_two_values():
    draft = Draft()
    x = draft.image(2, 5, 3, 4)
    row = draft.qdq(draft.input(draft.normal(2, 5, 1, 4)))
    assert refused(draft, draft.op("add", x, row)) == "its operands have other shapes"
    assert (
        refused(draft, draft.op("mul", x, draft.constant(draft.normal(1, 1, 3, 1))))
        == "its constant varies along other axes than the channels"
    )
    assert refused(draft, draft.op("add", x, x, alpha=2)) == "its alpha is not 1"
    assert refused(draft, draft.op("mul", x, 0.5)) == "it reads a value that the region does not compute"
    turned = draft.op("permute", draft.image(2, 4, 5, 3), dims=(0, 2, 3, 1))
    assert refused(draft, draft.op("add", x, turned)) == "its operands have their channels on other axes"


def test_one_pixel_for_all_samples_is_refused():
    draft = Draft()
    x, single = draft.image(2, 5, 3, 4), draft.image(1, 5, 1, 1)
    assert refused(draft, draft.op("mul", x, single)) == "its operands have other shapes"


@pytest.mark.parametrize("op", ["add", "mul"])
def test_constants_of_more_channels_are_refused(op):
    """The result has the channels of the constant."""
    # Fails: no NotPlannedError, but a RuntimeError of PyTorch.
    draft = Draft()
    y = draft.op(op, draft.image(2, 1, 3, 4), draft.constant(draft.normal(1, 5, 1, 1)))
    assert refused(draft, y)
    y = draft.op(op, draft.conv(draft.image(2, 3, 3, 4), 1), draft.constant(draft.normal(1, 5, 1, 1)))
    assert refused(draft, y)


# ---- conversions


def test_conversions():
    draft = Draft()
    x = draft.input(draft.normal(2, 17, 3, 4))
    q = draft.quantize(x, (0.02, 100))
    check(draft, q)
    check(draft, draft.dequantize(q))
    again = draft.quantize(draft.dequantize(q), (0.05, 60))
    check(draft, again)
    compiled = plan_of(draft, draft.quantize(draft.conv(draft.dequantize(again), 16)))
    assert compiled.steps[2].x_grid.same_as(QParams.per_tensor(0.05, 60))
    assert all(step.is_conversion for step in compiled.steps if isinstance(step, PointwiseStep))


def test_integers_that_come_in():
    draft = Draft()
    for shape in ((2, 3, 4, 5), (2, 16, 4, 5), (5, 17)):
        x = draft.input(torch.randint(0, 256, shape, dtype=torch.uint8))
        check(draft, draft.dequantize(x, (0.02, 100)))
    image = draft.dequantize(draft.input(torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)), (0.02, 100))
    check_both(draft, draft.conv(image, 16, 3))


def test_grids_of_fewer_integers():
    draft = Draft()
    y = draft.conv(draft.image(2, 16, 5, 4), 16)
    for op in ("relu", "tanh"):
        compiled = draft.op("quantize", draft.op(op, y), scale=0.01, zero_point=20, qmin=5, qmax=60)
        check(draft, compiled)


def test_conversions_that_are_refused():
    draft = Draft()
    x = draft.input(draft.normal(2, 5))
    signed = draft.op("quantize", x, scale=0.1, zero_point=0, qmin=-128, qmax=127, dtype=torch.int8)
    assert refused(draft, signed) == "its grid is not constant uint8"
    scale, zero = draft.constant(torch.rand(5) + 0.1), draft.constant(torch.zeros(5, dtype=torch.int32))
    per_channel = draft.op("quantize", x, scale=scale, zero_point=zero, axis=1)
    assert refused(draft, per_channel) == "its grid is not constant uint8"
    assert refused(draft, draft.op("dequantize", x, scale=0.1, zero_point=0)) == "it reads no integers"


def test_constants_of_another_type():
    """PyTorch computes in float64 then."""
    draft = Draft()
    y = draft.op("mul", draft.image(2, 3, 5, 5), draft.constant(draft.normal(3, 1, 1).double()))
    assert refused(draft, y) == "its constant is not float32"


# ---- sums of floats that a layer computes


@pytest.mark.parametrize("columns", [1, 5, 16, 33, 48])
def test_the_second_of_two_layers_adds_the_first(columns):
    draft = Draft()
    x, narrow = draft.image(2, 20, 5, 7), draft.image(2, 8, 5, 7)
    y = draft.op("add", draft.conv(x, columns, 3), draft.conv(narrow, columns))
    compiled = check(draft, y)
    assert kinds(compiled) == ["QuantizeStep", "QuantizeStep", "ProductStep", "ProductStep"]
    check(draft, draft.quantize(y))
    check(draft, draft.quantize(draft.op("silu", y)))
    check(draft, draft.op("relu", y))


def test_a_layer_adds_floats_that_are_read_elsewhere():
    draft = Draft()
    x = draft.image(2, 16, 5, 4)
    y = draft.op("sigmoid", draft.conv(x, 16))
    compiled = check(draft, draft.op("add", y, draft.conv(x, 16, 3)), draft.op("mul", y, y))
    assert [step.residual is not None for step in compiled.plan.steps if isinstance(step, ProductStep)] == [False, True]


def test_sums_that_layers_do_not_compute():
    """Floats of the caller may have another order in memory; a layer that runs before a value cannot add it."""
    draft = Draft()
    x, floats = draft.image(2, 16, 5, 4), draft.input(draft.normal(2, 16, 5, 4))
    early = draft.conv(x, 16)
    late = draft.op("mul", draft.op("sigmoid", x), x)
    depthwise = draft.conv(x, 16, 3, groups=16)
    for y in (
        draft.op("add", draft.conv(x, 16), floats),
        draft.op("add", early, late),
        draft.op("add", depthwise, draft.op("sigmoid", x)),
    ):
        compiled = check(draft, y)
        assert all(step.residual is None for step in compiled.plan.steps if isinstance(step, ProductStep))


@pytest.mark.parametrize(("columns", "is_added"), [(16, True), (5, False)])
def test_a_transposed_layer_adds_floats_where_its_rows_have_whole_blocks(columns, is_added):
    draft = Draft()
    x = draft.image(2, 20, 9)
    y, z = (
        draft.op("conv_transpose1d", x, draft.weight(20, columns, 4, axis=1), stride=(2,), padding=(1,)) for _ in "yz"
    )
    compiled = check(draft, draft.op("add", y, z))
    assert any(isinstance(step, PointwiseStep) and step.y is not None for step in compiled.plan.steps) != is_added
