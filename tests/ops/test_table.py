import inspect
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxq.errors import FxqError
from fxq.ops import OPS
from fxq.ops.table import Op, OpTable, Spelling, spell
from fxq.ops.traits import computes, float_only, moves


def resize(x, weight=None, *, factor, mode="near", shift=0):
    """Op for tests: two tensors, a required option and two options with defaults."""


def other(x):
    """Another op for tests."""


def refuse_modes(bound):
    if bound.get("mode") == "odd":
        return "has an odd mode"
    return {**bound, "shift": 2 * bound.get("shift", 0)}


PLAIN = Spelling("resize")
ROW = Op("resize", resize, (PLAIN,), computes("x", weight="weight"))


def test_a_row_reads_its_arguments_from_the_signature():
    assert ROW.tensors == ("x", "weight")
    assert ROW.options == {"factor": inspect.Parameter.empty, "mode": "near", "shift": 0}


# ---- claims


def test_a_name_belongs_to_one_row():
    table = OpTable()
    table.add(ROW)
    with pytest.raises(FxqError, match="the name 'resize' is taken"):
        table.add(Op("resize", other, (), moves("x")))


def test_a_spelling_belongs_to_one_row():
    table = OpTable()
    table.row(nn.ReLU, "relu", traits=moves("x"))(resize)
    with pytest.raises(FxqError, match=r"'relu' is claimed by both 'resize' and 'other'"):
        table.row("relu", traits=moves("x"))(other)


def test_a_spelling_twice_in_one_row_is_an_error_too():
    with pytest.raises(FxqError, match="claimed by both 'resize' and 'resize'"):
        OpTable().add(Op("resize", resize, (PLAIN, PLAIN), moves("x")))


def test_a_refused_row_is_not_half_added():
    table = OpTable()
    table.row("relu", traits=moves("x"))(resize)
    with pytest.raises(FxqError):
        table.row("relu", traits=moves("x"))(other)
    assert "other" not in table
    assert table.of_target(other) is None
    assert [row.name for row in table] == ["resize"]


def test_the_decorator_names_the_op_after_the_function_and_returns_it():
    table = OpTable()
    assert table.row(spell(torch.relu, "x"), "relu", traits=float_only("x"))(other) is other
    row, spelling = table.of_call(torch.relu)
    assert (row.name, row.target, spelling.names) == ("other", other, ("x",))
    assert table["other"] is row and table.of_target(other) is row


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(FxqError, match=r"unknown op 'conv2'; did you mean '?conv2d|conv1d"):
        OPS["conv2"]


@pytest.mark.parametrize("target", [[], {}, "no such method", len])
def test_what_no_row_claims(target):
    assert OPS.of_call(target) is None
    assert OPS.of_target(target) is None


# ---- binding


def test_positional_arguments_in_the_ops_own_order():
    assert ROW.bind(PLAIN, ("x", "w", 2, "far"), {}) == {
        "x": "x",
        "weight": "w",
        "factor": 2,
        "mode": "far",
        "shift": 0,
    }


@given(given_by_position=st.integers(0, 5), values=st.tuples(*[st.integers()] * 5))
def test_how_arguments_are_given_does_not_matter(given_by_position, values):
    names = ("x", "weight", "factor", "mode", "shift")
    by_name = dict(zip(names, values, strict=True))
    rest = {name: by_name[name] for name in names[given_by_position:]}
    assert ROW.bind(PLAIN, values[:given_by_position], rest) == by_name


@pytest.mark.parametrize("alias", ["input", "self", "tensor"])
def test_torchs_names_for_the_first_tensor(alias):
    assert ROW.bind(PLAIN, (), {alias: "t", "factor": 1})["x"] == "t"


def test_torchs_name_for_a_list_of_tensors():
    row, spelling = OPS.of_call(torch.cat)
    assert row.bind(spelling, (), {"tensors": ["a", "b"], "dim": 1}) == {"xs": ["a", "b"], "dim": 1}


def test_a_name_that_the_spelling_uses_is_no_alias():
    row = Op("f", lambda input: input, (), float_only("input"))
    assert row.bind(spell("f", "input"), (), {"input": 1}) == {"input": 1}


@pytest.mark.parametrize("args", [("t", 0, 2, 1), ("t", (0, 2, 1)), ("t", [0, 2, 1])])
def test_star_takes_what_is_left_or_one_sequence(args):
    row, spelling = OPS.of_call("permute")
    assert row.bind(spelling, args, {}) == {"x": "t", "dims": (0, 2, 1)}


def test_star_by_keyword():
    row, spelling = OPS.of_call("permute")
    assert row.bind(spelling, ("t",), {"dims": (1, 0)}) == {"x": "t", "dims": (1, 0)}


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((1, 2, 3, 4, 5, 6), {}, "takes 5 arguments, and this call has 6"),
        ((1,), {"factor": 1, "colour": "red"}, "has no argument 'colour'"),
        ((1,), {}, "is called without 'factor'"),
    ],
)
def test_what_cannot_be_bound_says_why(args, kwargs, reason):
    assert ROW.bind(PLAIN, args, kwargs) == reason


def test_inplace_is_no_option_of_an_op():
    row, spelling = OPS.of_call(F.relu)
    assert row.bind(spelling, ("t", True), {}) == row.bind(spelling, ("t",), {"inplace": True}) == {"x": "t"}


def test_an_adapter_changes_arguments_or_refuses():
    spelling = spell("resize_", None, refuse_modes)
    assert ROW.bind(spelling, ("t",), {"factor": 1, "shift": 3})["shift"] == 6
    assert ROW.bind(spelling, ("t",), {"factor": 1, "mode": "odd"}) == "has an odd mode"


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "reason"),
    [
        (F.max_pool2d, ("t", 2), {"return_indices": True}, "returns indices"),
        (F.batch_norm, ("t", "m", "v"), {"training": True}, "normalizes with the statistics of the batch"),
        (F.batch_norm, ("t", None, None), {}, "normalizes with the statistics of the batch"),
        (torch.mean, ("t",), {}, "reduces over all axes"),
        (torch.mean, ("t", 1), {"dtype": torch.float64}, "changes the dtype"),
        (torch.clamp, ("t", torch.zeros(1)), {}, "clamps between limits that are computed at run time"),
        ("view", ("t", torch.int32), {}, "changes the dtype"),
    ],
)
def test_refusals_of_the_real_rows(function, args, kwargs, reason):
    row, spelling = OPS.of_call(function)
    assert row.bind(spelling, args, kwargs) == reason


def test_functions_of_other_packages_are_known_by_their_names():
    def stochastic_depth(input, p, mode, training=True):
        raise NotImplementedError

    assert OPS.of_call(stochastic_depth) is None
    stochastic_depth.__module__, stochastic_depth.__qualname__ = "torchvision.ops.stochastic_depth", "stochastic_depth"
    row, spelling = OPS.of_call(stochastic_depth)
    assert row.name == "dropout"
    assert row.bind(spelling, ("t", 0.2, "row", False), {}) == {"x": "t", "training": False}
    assert row.bind(spelling, ("t",), {"p": 0.0, "mode": "row"}) == {"x": "t", "training": False}
    assert row.bind(spelling, ("t", 0.2, "row"), {}) == "drops values at random (training=True)"


def test_the_canonical_call_leaves_out_what_is_default():
    bound = {"x": "t", "weight": None, "factor": 2, "mode": "near", "shift": 1}
    assert ROW.canonical(bound) == (("t",), {"factor": 2, "shift": 1})
    assert ROW.canonical({**bound, "weight": "w"}) == (("t", "w"), {"factor": 2, "shift": 1})


def test_the_canonical_call_keeps_a_hole_before_a_given_tensor():
    norm = OPS["batch_norm"]
    bound = {"x": "t", "running_mean": "m", "running_var": "v", "weight": None, "bias": "b", "eps": 1e-5}
    assert norm.canonical(bound) == (("t", "m", "v", None, "b"), {})


# ---- modules


def test_a_module_gives_its_attributes():
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    row, spelling = OPS.of_module(conv)
    bound = row.bind_module(spelling, conv, ("t",), {})
    assert row.name == "conv2d" and bound["weight"] is conv.weight and bound["bias"] is conv.bias
    assert (bound["stride"], bound["padding"], bound["groups"]) == ((2, 2), (1, 1), 2)
    assert row.bind_module(spelling, conv, (), {"input": "t"})["x"] == "t"


def test_a_module_called_with_more_than_its_inputs_is_refused():
    row, spelling = OPS.of_module(nn.ReLU())
    assert row.bind_module(spelling, nn.ReLU(), ("t", "u"), {}) == "ReLU is called with extra arguments"


class Named(nn.Conv2d):
    """Subclass that adds nothing but a name: still a conv2d."""


class OwnForward(nn.Conv2d):
    def forward(self, input):
        return super().forward(input) * 2


class OwnConvForward(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class OwnLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_a_subclass_is_claimed_unless_it_computes_something_else():
    row, _ = OPS.of_module(Named(1, 1, 1))
    assert row.name == "conv2d"
    assert OPS.of_module(OwnForward(1, 1, 1)) is None
    assert OPS.of_module(OwnConvForward(1, 1, 1)) is None
    assert OPS.of_module(OwnLinear(1, 1)) is None
    assert OPS.of_module(nn.LSTM(1, 1)) is None


# ---- the real table as a whole


@pytest.mark.parametrize("row", list(OPS), ids=lambda row: row.name)
def test_a_rows_roles_are_arguments_of_its_function(row):
    quant = row.traits
    for name in (*quant.inputs, quant.weight, quant.bias):
        assert name is None or name in row.tensors
    assert (quant.axis is not None) == (quant.weight is not None)
    assert (quant.channels is not None) == (quant.weight is not None and quant.kind == "computes")
    assert quant.surrounds is None or (quant.surrounds in row.options and quant.fill_constants)
    assert not quant.maximum or row.options.keys() >= {"kernel_size", "padding", "dilation", "ceil_mode"}
    for spelling in row.spellings:
        assert OPS.of_call(spelling.target) == (row, spelling)
    assert OPS.of_target(row.target) is row
    assert OPS.of_call(row.target) is None or OPS.of_call(row.target)[0] is row


FAMILIES = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_functions_of_a_family_are_found_by_their_names(name):
    """torch.fx and pickle refer to functions by module and name."""
    assert OPS.family(name) == (f"{name}1d", f"{name}2d", f"{name}3d")
    for op in OPS.family(name):
        target = OPS[op].target
        assert getattr(sys.modules[target.__module__], op) is target
        assert pickle.loads(pickle.dumps(target)) is target


def test_no_family_of_a_name():
    with pytest.raises(FxqError, match="unknown op 'linear1d'"):
        OPS.family("linear")


WEIGHTED = [row for row in OPS if row.traits.channels is not None and not row.traits.more_weights]


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("row", WEIGHTED, ids=lambda row: row.name)
def test_the_output_channels_of_a_layer(row, batch):
    """A bias element and a weight channel affect only their own channel of the output."""
    rank = len(row.options.get("stride", ()))
    x, weight, bias = torch.randn(*batch, 4, *[5] * rank), torch.randn(4, 4, *[3] * rank), torch.zeros(4)
    channels = row.target(x, weight, bias).movedim(row.traits.channels, 0)
    added = row.target(x, weight, torch.arange(4.0)).movedim(row.traits.channels, 0) - channels
    torch.testing.assert_close(added, torch.arange(4.0).reshape(4, *[1] * (added.dim() - 1)).expand_as(added))
    weight.select(row.traits.axis, 1).zero_()
    changed = row.target(x, weight, bias).movedim(row.traits.channels, 0) != channels
    assert changed.reshape(4, -1).any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("row", [row for row in OPS if row.commutes], ids=lambda row: row.name)
def test_an_op_that_is_said_to_commute_does(row):
    a, b = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-2, 2, 3)
    assert torch.equal(row.target(a, b), row.target(b, a))


MAX_FILES_NAMING = {"silu": 10, "hardswish": 10, "prelu": 10, "gelu": 18, "relu6": 11, "hardtanh": 11, "leaky_relu": 3}
"""Number of product files that may name an op: its row, its written-out forms, its kernels, and the writer of ONNX.

The reader of ONNX calls PyTorch's functions, which have these names."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "most"), MAX_FILES_NAMING.items())
def test_an_op_is_named_in_few_files(name, most):
    root, word = Path(__file__).parents[2], re.compile(rf"\b{name}\b")
    files = [path for folder in ("fxq", "passes", "patterns") for path in (root / folder).rglob("*.py")]
    files = [path for path in files if path.parent != root / "fxq" / "onnx" / "reading"]
    naming = sorted(str(path.relative_to(root)) for path in files if word.search(path.read_text(encoding="utf-8")))
    assert len(naming) <= most, f"use OPS.fused_after or a trait of the op's row instead of another list: {naming}"


@pytest.mark.parametrize("name", OPS.with_slopes())
def test_functions_with_slopes(name):
    op, x = OPS[name], torch.linspace(-2, 2, 7)
    is_tensor = op.traits.slopes in op.tensors
    assert is_tensor == (name in OPS.with_slopes(tensors=True))
    y = op.target(x, torch.tensor([0.3])) if is_tensor else op.target(x, **{op.traits.slopes: 0.3})
    torch.testing.assert_close(y, x.clamp(min=0) + 0.3 * x.clamp(max=0), rtol=0, atol=1e-7)


def test_which_functions_have_slopes():
    assert set(OPS.with_slopes()) == {"prelu", "leaky_relu"} and OPS.with_slopes(tensors=True) == ("prelu",)


def test_the_functions_that_are_fused_with_a_layer_come_from_the_rows():
    assert set(OPS.fused_after("conv")) == {"relu", "relu6", "hardtanh", "hardswish", "silu", "leaky_relu"}
    assert set(OPS.fused_after("linear")) == {*OPS.fused_after("conv"), "gelu", "tanh"}
    assert OPS.fused_after("gate") == ("hardsigmoid", "sigmoid") and OPS.fused_after("no_such_layer") == ()
