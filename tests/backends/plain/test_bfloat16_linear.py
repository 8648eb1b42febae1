"""Weight-only linear layers in bfloat16, without Numba: against float64, copied and saved; and what they refuse."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.loops.code import compiler
from fxq.backends.plain import bfloat16_linear
from fxq.backends.plain.bfloat16_linear import BFloat16Linear, BFloat16Product, bfloat16_refused
from fxq.backends.plain.few_rows import MAX_ROWS
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.errors import RecipeError
from fxq.quant.packing import Packing

BFLOAT16 = torch.finfo(torch.bfloat16).eps
VECTORIZED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
pytestmark = pytest.mark.skipif(not VECTORIZED, reason="needs AVX2")


@pytest.fixture
def without_numba(monkeypatch):
    monkeypatch.setattr(compiler, "loops", lambda name: None)


def stored(outputs, columns, bits, per, signed=True, with_zero=False, seed=0):
    """Random weight with scales by group of `per` values, by row ("channel") or for all ("tensor")."""
    torch.manual_seed(seed)
    low = -(2 ** (bits - 1)) if signed else 0
    values = torch.randint(low, low + 2**bits, (outputs, columns), dtype=torch.int8 if signed else torch.uint8)
    shape = {"tensor": (), "channel": (outputs,)}.get(per) if isinstance(per, str) else (outputs, -(-columns // per))
    zero = torch.randint(low, low + 2**bits, shape, dtype=torch.int32) if with_zero else None
    axis, block = {"tensor": (None, None), "channel": (0, None)}.get(per, (1, per))
    packing = Packing.of_grid(low, low + 2**bits - 1, (columns,))
    values = values if packing is None else packing.pack(values)
    return StoredWeight(values, torch.rand(shape) + 0.5, zero, axis, block, packing)


def product(x, weight, bias):
    """Product in float64, and the magnitude of the terms that are rounded to bfloat16."""
    real = weight.floats(weight.empty()).double()
    scale = real.abs().amax() / 8 if weight.packing is not None else 0.0
    return x.double() @ real.T + bias.double(), x.double().abs() @ (real.abs() + 16 * scale).T + 1


@settings(max_examples=22, deadline=None)
@given(
    rows=st.integers(1, MAX_ROWS), form=st.sampled_from([(8, "tensor"), (8, "channel"), (4, "tensor"), (4, "channel"),
    (4, 32), (4, 64), (4, 256), (4, 512)]), signed=st.booleans(), with_zero=st.booleans(), outputs=st.integers(1, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products_are_those_of_float64_up_to_bfloat16(rows, form, signed, with_zero, outputs, seed):
    bits, per = form
    columns, outputs = (512, 16 * outputs) if bits == 4 else (48, 7 * outputs)
    weight = stored(outputs, columns, bits, per, signed or bits == 8, with_zero and bits == 4, seed)
    assert bfloat16_refused(weight) is None
    x, bias = torch.randn(rows, columns), torch.randn(outputs)
    wanted, terms = product(x, weight, bias)
    y = BFloat16Product(weight, bias)(x)
    assert y.dtype == torch.float32
    assert ((y.double() - wanted).abs() <= 2 * BFLOAT16 * terms).all()  # inputs, scales, zero points, sums: half each
    exact = StoredWeight.floats(weight, weight.empty())
    error = (y.double() - wanted).square().mean().sqrt()
    signal = (x.double() @ exact.double().T).square().mean().sqrt()
    assert error <= 2 * BFLOAT16 * signal  # roundings are independent


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_view_and_several_batch_axes(bits):
    weight = stored(32, 64, bits, "channel")
    multiply = BFloat16Product(weight, None)
    x = torch.randn(64, 2, 3).permute(1, 2, 0)
    wanted, terms = product(x.reshape(6, 64), weight, torch.zeros(32))
    assert ((multiply(x).double() - wanted.view(2, 3, 32)).abs() <= 2 * BFLOAT16 * terms.view(2, 3, 32)).all()


def test_a_weight_at_an_odd_address_is_copied():
    memory = torch.randint(-127, 128, (8 * 32 + 1,), dtype=torch.int8)
    weight = replace(stored(8, 32, 8, "channel"), values=memory[1:].view(8, 32))
    x = torch.randn(4, 32)
    wanted, terms = product(x, weight, torch.zeros(8))
    assert ((BFloat16Product(weight, None)(x).double() - wanted).abs() <= 2 * BFLOAT16 * terms).all()


def test_a_large_weight_is_packed_in_pieces(monkeypatch):
    weight = stored(208, 64, 4, 32, with_zero=True)
    whole = BFloat16Product(weight, None)
    monkeypatch.setattr(bfloat16_linear, "_PACKED_ROWS", 64)
    assert torch.equal(BFloat16Product(weight, None)._weight, whole._weight)


REFUSED = {
    "scales per block": stored(16, 64, 8, 32),
    "zero points": stored(16, 64, 8, "channel", with_zero=True),
    "no multiple of 16": stored(16, 24, 8, "channel"),
    "outputs are no multiple": stored(24, 64, 4, 32),
    "blocks of 48": stored(16, 96, 4, 48),
    "a short last block": stored(16, 80, 4, 64),
    "float16": StoredWeight(torch.zeros(16, 64, dtype=torch.float16), None),
}
REASONS = {
    "scales per block": "only symmetric weights",
    "zero points": "only symmetric weights",
    "no multiple of 16": "24 values of a row",
    "outputs are no multiple": "24 outputs are no multiple of 16",
    "blocks of 48": "cannot be divided into groups of 32, 64, 128, 256",
    "a short last block": "cannot be divided into groups",
    "float16": "not stored in contiguous integers",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_support_is_refused(name):
    assert REASONS[name] in bfloat16_refused(REFUSED[name])


def test_other_cpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "not vectorized on this machine" in bfloat16_refused(stored(16, 64, 8, "channel"))


# ---- models

FORMS = {"int8": {}, "int4": {"bits": 4}, "int4 per channel": {"bits": 4, "per": "channel"}}


def quantized(compute="bfloat16", rows=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    recipe = fxq.Recipe.weight_only(compute=compute, optimize="coverage", **options)
    return fxq.quantize(model, recipe, example_inputs=torch.randn(rows, 64))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_few_rows_are_rounded_to_bfloat16_and_more_are_not(options, without_numba, tmp_path):
    rounded, exact = quantized(**options), quantized("float32", **options)
    assert {type(kernel) for kernel in rounded.fxq_kernels.children()} == {BFloat16Linear}
    assert not rounded.ledger.where(kind="unverified")
    assert {entry.reason for entry in rounded.ledger.where(op="linear")} == {
        "computes up to 16 rows in bfloat16, more in float32"
    }
    rounded.save(tmp_path / "model.fxq")
    copies = [copy.deepcopy(rounded), pickle.loads(pickle.dumps(rounded)), fxq.load(tmp_path / "model.fxq")]
    with torch.no_grad():
        for rows in (1, MAX_ROWS, MAX_ROWS + 1):
            x = torch.randn(rows, 64)
            y, wanted = rounded(x), exact(x)
            assert torch.equal(y, wanted) == (rows > MAX_ROWS)
            assert (y - wanted).norm() <= 2 * BFLOAT16 * wanted.norm()  # two layers
            for copied in copies:
                assert torch.equal(copied(x), y)


def test_memory_and_files_hold_the_plain_integers(without_numba):
    rounded, exact = quantized(bits=4), quantized("float32", bits=4)
    rounded(torch.randn(1, 64))
    tensors = dict(exact.named_buffers())
    assert dict(rounded.named_buffers()).keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in rounded.named_buffers())


def test_edits_of_scales_count(without_numba):
    kernel = BFloat16Linear(
        op="linear", settings={}, axis=0, weight=torch.ones(2, 16, dtype=torch.int8), weight_scale=torch.ones(2)
    )
    x = torch.ones(1, 16)
    assert kernel(x).tolist() == [[16.0, 16.0]]
    kernel.weight_scale.mul_(2)
    assert kernel(x).tolist() == [[32.0, 32.0]]
    assert kernel(torch.ones(3, 0, 16)).shape == (3, 0, 2)


@pytest.mark.parametrize("rows", [2, 40])
def test_a_wrong_kernel_is_noticed_whatever_the_rows_of_the_example(rows, without_numba, monkeypatch):
    call = BFloat16Product.__call__
    monkeypatch.setattr(BFloat16Product, "__call__", lambda self, x: call(self, x) * 1.03)
    with pytest.warns(UserWarning, match="kernel is wrong on this machine"):
        assert quantized(rows=rows).ledger.where(kind="unverified")


@pytest.mark.parametrize("factor", [1.1, 3.0])
def test_a_wrong_grid_is_noticed(factor, without_numba, monkeypatch):
    make = bfloat16_linear._scales_and_zeros
    monkeypatch.setattr(bfloat16_linear, "_scales_and_zeros", lambda *args: make(*args) * factor)
    with pytest.warns(UserWarning, match="kernel is wrong on this machine"):
        assert quantized(bits=4, per=32).ledger.where(kind="unverified")


@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("bits", "per"), [(4, 32), (4, 64), (4, "channel"), (4, "tensor"), (8, "channel")])
def test_the_rounded_result_is_that_of_the_kernel(bits, per, signed, with_zero):
    weight = stored(32, 64, bits, per, signed or bits == 8, with_zero and bits == 4)
    multiply, x = BFloat16Product(weight, torch.randn(32)), torch.randn(4, 64)
    _, terms = product(x, weight, torch.zeros(32))
    apart = (multiply(x) - multiply.rounded(x)).abs()  # a sum between two values of bfloat16 may be rounded to either
    assert (apart <= BFLOAT16 * terms).all() and (apart > 1e-5 * terms).float().mean() <= 0.1


def test_a_file_is_verified_on_another_machine(without_numba, monkeypatch):
    qmodel = quantized()
    qmodel.verify()
    call = BFloat16Product.__call__
    monkeypatch.setattr(BFloat16Product, "__call__", lambda self, x: call(self, x) * 1.03)
    with pytest.raises(fxq.FxqError, match="2 of 2 kernels are wrong"):
        copy.deepcopy(qmodel).verify()


def test_on_a_machine_without_the_kernels_a_file_computes_in_float32(without_numba, monkeypatch):
    qmodel, exact, x = quantized(), quantized("float32"), torch.randn(1, 64)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert torch.equal(pickle.loads(pickle.dumps(qmodel))(x), exact(x))


def test_with_numba_layers_stay_in_float32():
    pytest.importorskip("numba")
    qmodel = quantized()
    assert {entry.reason for entry in qmodel.ledger.where(op="linear")} == {
        "computes in float32: with Numba's loops, bfloat16 is not faster"
    }
    x = torch.randn(1, 64)
    assert torch.equal(qmodel(x), quantized("float32")(x))


def test_the_ledger_says_why_a_layer_stays_in_float32(without_numba):
    model = nn.Sequential(nn.Embedding(9, 24), nn.Linear(24, 16), nn.Conv1d(3, 3, 1)).eval()
    recipe = fxq.Recipe.weight_only(compute="bfloat16", optimize="coverage")
    reasons = {e.op: e.reason for e in fxq.quantize(model, recipe, example_inputs=torch.zeros(1, 3, dtype=int)).ledger}
    assert "24 values of a row" in reasons["linear"]
    assert reasons["conv1d"] == "computes in float32: only linear layers have a kernel in bfloat16"
    assert reasons["embedding"] == ""


def test_one_layer_may_stay_in_float32(without_numba):
    exact = fxq.Recipe.weight_only().config
    recipe = fxq.Recipe.weight_only(compute="bfloat16", optimize="coverage").override("1", exact)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)).eval()
    qmodel = fxq.quantize(model, recipe, example_inputs=torch.randn(1, 32))
    assert [type(kernel).name for kernel in qmodel.fxq_kernels.children()] == [
        "weight_only.bfloat16_linear", "weight_only.linear",
    ]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rows", "named"), [(1, True), (MAX_ROWS + 1, False)])
def test_the_warning_names_bfloat16_where_it_has_a_kernel(rows, named, without_numba, monkeypatch):
    monkeypatch.setattr(compiler, "installed", lambda: "none")
    said = []
    monkeypatch.setattr("fxq.passes.fallback.slower_for_size", lambda *arguments: said.append(arguments))
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 24)).eval()
    for recipe in (fxq.Recipe.weight_only(), fxq.Recipe.weight_only(compute="bfloat16")):
        fxq.quantize(model, recipe, example_inputs=torch.randn(rows, 64))
    assert [len(nodes) for *_, nodes in said] == [2 if named else 0, 0]


# ---- recipes


def test_recipes_hold_compute():
    recipe = fxq.Recipe.weight_only(compute="bfloat16").override("head", fxq.Recipe.weight_only(bits=4).config)
    assert recipe.to_dict()["config"]["compute"] == "bfloat16"
    assert "compute" not in recipe.to_dict()["override"][0]["config"]
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    assert "compute" not in fxq.Recipe.weight_only(bits=4).to_toml()


def test_recipes_refuse_compute_without_effect():
    with pytest.raises(RecipeError, match="float16"):
        fxq.Recipe.weight_only(compute="float16")
    for config in (replace(fxq.Recipe.dynamic().config, compute="bfloat16"), replace(fxq.FLOAT, compute="bfloat16")):
        with pytest.raises(RecipeError, match=r'compute="bfloat16" is for layers with integer weights and float'):
            fxq.Recipe.static().override("0", config)
    with pytest.raises(RecipeError, match="key"):
        fxq.QuantConfig.from_dict({"computes": "bfloat16"})
