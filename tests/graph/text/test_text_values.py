import ast
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.errors import InputError
from fxq.graph.info import Cost, Decision, Edge, Plan
from fxq.graph.text.text_values import dotted, parsed, read_value, type_text, value_text
from fxq.quant.qparams import QParams
from fxq.quant.spec import TensorSpec

pytestmark = pytest.mark.any_cpu
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(...),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(text):
    return read_value(ast.parse(text, mode="eval").body, {})


@given(PLAIN)
def test_plain_data(value):
    text = value_text(value)
    got = read(text)
    assert got == value and value_text(got) == text and len(text.splitlines()) <= 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.uint8, "torch.uint8"),
        (torch.channels_last, "torch.channels_last"),
        (torch.strided, "torch.strided"),
        (torch.device("cpu"), "torch.device('cpu')"),
        (slice(1, None, -2), "slice(1, None, -2)"),
        (-math.inf, "-inf"),
        (torch.Size([2, 3]), "(2, 3)"),
        (TensorSpec(bits=7, signed=True), "TensorSpec(bits=7, signed=True)"),
        (
            Plan(Decision("int8"), reads={"x": TensorSpec()}),
            "Plan(decision=Decision(precision='int8'), reads={'x': TensorSpec()})",
        ),
        (Edge(TensorSpec(), 3, True), "Edge(spec=TensorSpec(), group=3, source=True)"),
        (Cost(1.5), "Cost(float_us=1.5)"),
    ],
)
def test_values_that_have_a_name(value, text):
    assert value_text(value) == text and read(text) == value


def test_grids():
    for qp in (
        QParams.per_tensor(0.1, 3),
        QParams(torch.rand(3), torch.zeros(3, dtype=torch.int32), -127, 127, torch.int8, 0),
    ):
        assert qp.same_as(read(value_text(qp)))


@pytest.mark.parametrize(
    "text",
    [
        "QParams(0.5, 3, 0, 255, torch.uint8)",
        "QParams([0.5, 1.0], zero_point=[0, 0], qmin=0, qmax=255, dtype=torch.uint8, axis=0)",
    ],
)
def test_a_grid_by_position(text):
    grid = read(text)
    assert (grid.scale.dtype, grid.zero_point.dtype) == (torch.float32, torch.int32)
    assert grid.same_as(read(value_text(grid)))
    with pytest.raises(InputError, match="these fields do not fit QParams"):
        read("QParams('wide', 3, 0, 255, torch.uint8)")


def test_nan_and_what_has_no_name():
    assert math.isnan(read(value_text(math.nan)))
    for value in ({1}, object(), 1j, b"x", torch.ones(2, 2), range(3)):
        with pytest.raises(InputError, match=f"holds a {type(value).__name__}"):
            value_text(value)


def test_people_read_six_digits():
    assert value_text([0.1234567891, torch.float32], exact=False) == "[0.123457, float32]"


@pytest.mark.parametrize(
    "text", ["1j", "b''", "-'a'", "1 + 2", "x", "torch.nn", "{**x}", "len(3)", "[*x]", "slice(1, 2, 3, 4)"]
)
def test_refused(text):
    with pytest.raises(InputError):
        read(text)


def test_pieces():
    assert type_text((), torch.int64) == "int64[()]" and type_text((2,), torch.uint8) == "uint8[2]"
    assert dotted(ast.parse("a.b.c", mode="eval").body) == "a.b.c"
    assert parsed("x = f('ü')  # 'a # b'")[1] == "'a # b'"
