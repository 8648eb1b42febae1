"""Nested data as bytes and back: what comes back is the same, and what is no data is refused."""

import math
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.common.stored_data import pack, unpack
from fxq.common.trees import leaves
from fxq.errors import InputError

pytestmark = pytest.mark.any_cpu

ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())


@given(
    st.recursive(
        ATOMS, lambda of: st.lists(of) | st.lists(of).map(tuple) | st.dictionaries(KEYS, of) | st.builds(slice, of)
    )
)
def test_plain_data_comes_back(value):
    assert repr(unpack(pack(value))) == repr(value)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_bit_for_bit(shape, dtype):
    tensor = (torch.rand(shape) * 3).to(dtype)
    (same,) = unpack(pack((tensor,)))
    assert same.dtype == dtype and same.shape == tensor.shape and torch.equal(same, tensor)


def test_tensors_of_any_layout_and_those_that_share_memory():
    x = torch.rand(2, 3, 4, 4, requires_grad=True)
    stored = {"strided": x[:, 1:, ::2], "last": x.to(memory_format=torch.channels_last), "same": x, "one": x.sum()}
    stored["expanded"] = torch.zeros(()).expand(5)
    same = unpack(pack(stored))
    assert list(same) == list(stored)
    for name, tensor in stored.items():
        assert torch.equal(same[name], tensor) and same[name].is_contiguous() and not same[name].requires_grad


def test_nan_and_infinities_come_back():
    same = unpack(pack([math.nan, math.inf, -math.inf, -0.0, torch.tensor([math.nan, -0.0])]))
    assert repr(same[:4]) == "[nan, inf, -inf, -0.0]"
    assert same[4][0].isnan() and math.copysign(1, same[4][1]) == -1


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j, namedtuple("Pair", "a b")(1, 2), OrderedDict(a=1)])
def test_what_is_no_plain_data_is_refused(value):
    with pytest.raises(InputError, match=f"a {type(value).__name__} cannot be stored as data"):
        pack({"x": [value]})


def test_bytes_of_something_else_are_refused():
    whole = pack({"x": torch.rand(10)})
    for data in (b"", b"x" * 100, whole[:-1], whole[: len(whole) // 2], whole[:9]):
        with pytest.raises(InputError, match=r"bytes are not data of fxq, or incomplete: "):
            unpack(data)


def test_a_safetensors_file_of_another_library_is_refused():
    save = pytest.importorskip("safetensors.torch").save
    with pytest.raises(InputError, match="not data of fxq"):
        unpack(save({"x": torch.rand(2)}))


def test_tensors_are_put_on_a_device():
    assert [leaf.is_meta for leaf in leaves(unpack(pack([torch.rand(2)]), "meta"))] == [True]
