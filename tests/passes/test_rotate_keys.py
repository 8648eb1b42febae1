"""rotate-keys: keys of a cache that is stored as integers are rotated with the queries."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.passes import RotateKeys
from fxq.quant.spec import CACHE
from tests.support.graphs import expected, program, run_pass
from tests.support.helpers import REFERENCE

PLAN = f"plan=Plan(Decision('float'), state={CACHE!r})"
INPUTS = """
        past: float32[1, 2, 5, 32] = input()
        new: float32[1, 2, 3, 32] = input()
        query: float32[1, 2, 3, 32] = input()
        values: float32[1, 2, 8, 32] = input()"""


def test_an_attention():
    gm = run_pass(
        RotateKeys(),
        f"""{INPUTS}
        keys: float32[1, 2, 8, 32] = append(past, new, dim=2)  # {PLAN}
        y: float32[1, 2, 3, 32] = scaled_dot_product_attention(query, keys, values)
        return (y, keys)
        """,
    )
    assert program(gm) == expected(f"""{INPUTS}
        query_rotated: float32[1, 2, 3, 32] = rotate_rows(query)
        past_rotated: float32[1, 2, 5, 32] = rotate_rows(past)
        new_rotated: float32[1, 2, 3, 32] = rotate_rows(new)
        keys_rotated: float32[1, 2, 8, 32] = append(past_rotated, new_rotated, dim=2)
        keys: float32[1, 2, 8, 32] = rotate_rows(keys_rotated)
        y: float32[1, 2, 3, 32] = scaled_dot_product_attention(query_rotated, keys_rotated, values)
        return (y, keys)
    """)


def test_a_product_with_the_transpose():
    gm = run_pass(
        RotateKeys(),
        f"""{INPUTS}
        keys: float32[1, 2, 8, 32] = append(past, new, dim=2)  # {PLAN}
        columns: float32[1, 2, 32, 8] = transpose(keys, dim0=-1, dim1=2)
        y: float32[1, 2, 3, 8] = matmul(query, columns)
        z: float32[1, 2, 8, 8] = matmul(values, columns)
        window: float32[1, 2, 3, 32] = getitem(keys, index=(slice(None, None, None), slice(None, None, None), slice(-3, None, None)))
        return (y, z, window)
        """,  # noqa: E501
    )
    text = program(gm)
    assert "columns: float32[1, 2, 32, 8] = transpose(keys_rotated, dim0=-1, dim1=2)" in text
    assert "y: float32[1, 2, 3, 8] = matmul(query_rotated, columns)" in text
    assert "z: float32[1, 2, 8, 8] = matmul(values_rotated, columns)" in text
    assert "window: float32[1, 2, 3, 32] = getitem(keys, " in text


@pytest.mark.parametrize(
    "reads",
    [
        "y: float32[1, 2, 8, 32] = relu(keys)",
        "y: float32[1, 2, 3, 32] = scaled_dot_product_attention(query, values, keys)",
        "y: float32[1, 2, 8, 32] = scaled_dot_product_attention(keys, keys, values)",
        "t: float32[2, 1, 8, 32] = transpose(keys, dim0=0, dim1=1)\n        y: float32[2, 1, 8, 32] = relu(t)",
    ],
)
def test_keys_that_are_read_in_another_way_stay(reads):
    text = f"""{INPUTS}
        keys: float32[1, 2, 8, 32] = append(past, new, dim=2)  # {PLAN}
        {reads}
        return (y, keys)
    """
    assert "rotate_rows" not in program(run_pass(RotateKeys(), text))


def test_keys_in_float_and_short_keys_stay():
    attend = "y: float32[1, 2, 3, 32] = scaled_dot_product_attention(query, keys, values)\n        return (y, keys)"
    text = f"{INPUTS}\n        keys: float32[1, 2, 8, 32] = append(past, new, dim=2)\n        {attend}"
    assert "rotate_rows" not in program(run_pass(RotateKeys(), text))
    text = f"{INPUTS}\n        keys: float32[1, 2, 8, 32] = append(past, new, dim=2)  # {PLAN}\n        {attend}"
    assert "rotate_rows" not in program(run_pass(RotateKeys(), text.replace("32]", "48]")))


class Attention(nn.Module):
    """Attention whose keys have one channel with large values, as in language models."""

    def forward(self, query, key, value, keys, values):
        keys, values = torch.cat([keys, key * 1], 2), torch.cat([values, value * 1], 2)
        return torch.softmax(query @ keys.transpose(-1, -2) / 8, -1) @ values, keys, values


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
@pytest.mark.parametrize("bits", [4, 8])
def test_outliers_cost_less(bits):
    """The keys that are returned are the keys; the output is nearer to float's by 6 dB and more."""
    cache = fxq.QuantConfig(activation=None, weight=None, state=fxq.TensorSpec(bits=bits, per="row", range="dynamic"))
    recipe = REFERENCE.override("*", fxq.FLOAT).override(fxq.by_op("append"), cache)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 64, generator=generator) for length in (1, 20, 20))
    key[..., 5] += 30
    query[..., 5] = 0.01
    model, empty = Attention().eval(), torch.zeros(1, 2, 0, 64)
    inputs, examples = (query, key, value, empty, empty), (query, key, value, key, value)
    models = [
        fxq.quantize(model, chosen, example_inputs=examples) for chosen in (recipe, recipe.without_pass("rotate-keys"))
    ]
    want, (got, keys, _), (plain, _, _) = model(*inputs)[0], *(q(*inputs) for q in models)
    assert sqnr([want], [got]) > sqnr([want], [plain]) + 6
    assert sqnr([key], [keys.dequantize()]) > 6 * bits - 12 and keys.is_rotated  # as a grid of so many bits has


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_files_take_and_return_the_keys(tmp_path):
    """Saved, and in ONNX over several calls, where the state is float at both ends and quantized again in each call."""
    runtime = pytest.importorskip("onnxruntime")
    cache = fxq.QuantConfig(activation=None, weight=None, state=CACHE)
    recipe = REFERENCE.override("*", fxq.FLOAT).override(fxq.by_op("append"), cache)
    token = torch.randn(3, 1, 2, 1, 32)
    inputs = (*token, *torch.randn(2, 1, 2, 5, 32))
    q = fxq.quantize(Attention().eval(), recipe, example_inputs=inputs)
    q.export(tmp_path / "m.onnx", dynamic={"keys": {2: "past"}, "values": {2: "past"}})
    q.save(tmp_path / "m.fxq")
    session, loaded = runtime.InferenceSession(tmp_path / "m.onnx"), fxq.load(tmp_path / "m.fxq")
    names = [x.name for x in session.get_inputs()]
    wanted = ours = theirs = inputs
    for _ in range(30):
        wanted, ours = (*token, *q(*wanted)[1:]), (*token, *loaded(*ours)[1:])
        arrays = dict(zip(names, (x.numpy() for x in theirs), strict=True))
        theirs = (*token, *map(torch.from_numpy, session.run(None, arrays)[1:]))
        assert torch.equal(ours[3].integers, wanted[3].integers) and ours[3].is_rotated
        assert torch.allclose(theirs[3], wanted[3].dequantize(), rtol=0, atol=1e-4)  # less than a hundredth of a step


def test_keys_are_transposed_by_permute_and_read_as_a_window():
    gm = run_pass(
        RotateKeys(),
        f"""{INPUTS}
        keys: float32[1, 2, 8, 32] = append(past, new, dim=2)  # {PLAN}
        part: float32[1, 2, 3, 32] = getitem(keys, index=(slice(None, None, None), slice(None, None, None), slice(-3, None, None)))
        columns: float32[1, 2, 32, 3] = permute(part, dims=(0, 1, 3, 2))
        y: float32[1, 2, 3, 3] = matmul(query, columns)
        return (y, part)
        """,  # noqa: E501
    )
    text = program(gm)
    assert "keys: float32[1, 2, 8, 32] = rotate_rows(keys_rotated)" in text
    assert "part: float32[1, 2, 3, 32] = getitem(keys, " in text
    assert "part_dq: float32[1, 2, 3, 32] = getitem(keys_rotated, " in text
    assert "columns: float32[1, 2, 32, 3] = permute(part_dq, dims=(0, 1, 3, 2))" in text
    assert "matmul(query_rotated, columns)" in text


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_an_exported_program(tmp_path):
    cache = fxq.QuantConfig(activation=None, weight=None, state=CACHE)
    recipe = REFERENCE.override("*", fxq.FLOAT).override(fxq.by_op("append"), cache)
    inputs = (*torch.randn(3, 2, 2, 4, 32), *torch.randn(2, 2, 2, 5, 32))
    q = fxq.quantize(Attention().eval(), recipe, example_inputs=inputs)
    q.export(tmp_path / "m.pt2")
    got = torch.export.load(tmp_path / "m.pt2").module()(*inputs)
    for ours, want in zip(got, q(*inputs), strict=True):
        assert torch.allclose(ours, 1 * want, rtol=0, atol=1e-5)
