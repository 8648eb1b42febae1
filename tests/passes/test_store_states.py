"""store-states: caches in integers, between calls as well; and states that grow in all models."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.by_name import unavailable
from fxq.common.metrics import sqnr
from fxq.errors import InputError, RecipeError
from fxq.passes import StoreStates
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.quantized_rows import QuantizedRows
from fxq.quant.rotation import rotated
from fxq.quant.spec import CACHE, CACHE_TEXT
from tests.support.graphs import expected, program, run_pass
from tests.support.helpers import REFERENCE, filed, module

PLAN = f"plan=Plan(Decision('float'), state={CACHE!r})"
WINDOW = "index=(slice(None, None, None), slice(None, None, None), slice(-3, None, None))"


class Attention(nn.Module):
    """Attention with its cache, in (1, length, 32), keys and values (1, 2, past, 16), as arguments and results."""

    def __init__(self, window=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.window = window

    def forward(self, x, keys, values):
        q, k, v = (layer(x).unflatten(-1, (2, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], -2)
        y = torch.softmax(q @ keys.transpose(-1, -2) / 4, -1) @ values
        if self.window is not None:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        return self.o(y.transpose(1, 2).flatten(2)), keys, values


def quantized(model, recipe, batch=1):
    generator = torch.Generator().manual_seed(0)
    x, past = (torch.randn(*shape, generator=generator) for shape in ((batch, 3, 32), (batch, 2, 5, 16)))
    data = [(x, past, past)] if recipe.preset == "static" else None
    return fxq.quantize(model, recipe, data=data, example_inputs=(x, past, past))


def empty(batch=1):
    return torch.zeros(batch, 2, 0, 16), torch.zeros(batch, 2, 0, 16)


def run(model, tokens, state):
    """Outputs for tokens one by one, and the state after them."""
    outputs = []
    with torch.no_grad():
        for i in range(tokens.shape[1]):
            y, *state = model(tokens[:, i : i + 1], *state)
            outputs.append(y)
    return torch.cat(outputs, 1), state


def test_text_before_and_after():
    gm = run_pass(
        StoreStates(),
        f"""
        past: float32[1, 2, 5, 16] = input()
        new: float32[1, 2, 3, 16] = input()
        cat: float32[1, 2, 8, 16] = append(past, new, dim=2)  # {PLAN}
        window: float32[1, 2, 3, 16] = getitem(cat, {WINDOW})
        y: float32[1, 2, 8, 16] = relu(cat)
        return (y, window)
        """,
    )
    assert program(gm) == expected(f"""
        past: float32[1, 2, 5, 16] = input()
        new: float32[1, 2, 3, 16] = input()
        past_scale: float32[1, 2, 5, 1] = state_scale(past, steps=254)
        past_zero_point: uint8[1, 2, 5, 1] = state_zero_point(past, past_scale)
        past_q: uint8[1, 2, 5, 16] = state_integers(past, past_scale, past_zero_point)
        new_scale: float32[1, 2, 3, 1] = choose_scale(new, steps=254, axis=-1, symmetric=False)
        new_zero_point: uint8[1, 2, 3, 1] = state_zero_point(new, new_scale)
        new_q: uint8[1, 2, 3, 16] = quantize(new, scale=new_scale, zero_point=new_zero_point)
        cat_scale: float32[1, 2, 8, 1] = append(past_scale, new_scale, dim=2)
        cat_zero_point: uint8[1, 2, 8, 1] = append(past_zero_point, new_zero_point, dim=2)
        cat_q: uint8[1, 2, 8, 16] = append(past_q, new_q, dim=2)
        cat: float32[1, 2, 8, 16] = quantized_rows(cat_q, cat_scale, cat_zero_point)
        cat_dq: float32[1, 2, 8, 16] = dequantize(cat_q, scale=cat_scale, zero_point=cat_zero_point)
        window: float32[1, 2, 3, 16] = getitem(cat, {WINDOW})
        y: float32[1, 2, 8, 16] = relu(cat_dq)
        return (y, window)
    """)


def test_text_of_a_slice_that_is_returned_and_read():
    gm = run_pass(
        StoreStates(),
        f"""
        past: float32[1, 2, 5, 16] = input()
        new: float32[1, 2, 3, 16] = input()
        cat: float32[1, 2, 8, 16] = append(past, new, dim=2)  # {PLAN}
        window: float32[1, 2, 3, 16] = getitem(cat, {WINDOW})
        y: float32[1, 2, 3, 16] = relu(window)
        return (y, window)
        """,
    )
    _, _, after = program(gm).partition("append(past_q, new_q, dim=2)")
    assert after.strip() == expected(f"""
        cat: float32[1, 2, 8, 16] = quantized_rows(cat_q, cat_scale, cat_zero_point)
        cat_dq: float32[1, 2, 8, 16] = dequantize(cat_q, scale=cat_scale, zero_point=cat_zero_point)
        window: float32[1, 2, 3, 16] = getitem(cat, {WINDOW})
        window_dq: float32[1, 2, 3, 16] = getitem(cat_dq, {WINDOW})
        y: float32[1, 2, 3, 16] = relu(window_dq)
        return (y, window)
    """)


class WindowAttention(nn.Module):
    """Attention to the last `window` keys, which are also the values and the state."""

    def __init__(self, window):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.window = window

    def forward(self, x, keys):
        keys = torch.cat([keys, self.k(x)], 1)[:, -self.window :]
        return torch.softmax(self.q(x) @ keys.transpose(-1, -2), -1) @ keys, keys


@pytest.mark.parametrize("backend", ["reference", "jit"])
def test_a_window_that_is_also_read_is_stored_as_integers(backend):
    if unavailable(backend):
        pytest.skip(f"{backend} does not run here")
    model, past = WindowAttention(8).eval(), torch.randn(2, 8, 16)
    recipe = fxq.Recipe.weight_only(backend=backend, state=CACHE)
    q = fxq.quantize(model, recipe, example_inputs=(torch.randn(2, 1, 16), past))
    tokens = torch.randn(2, 20, 16)
    (got, (state,)), (want, (floats,)) = run(q, tokens, [past]), run(model, tokens, [past])
    assert isinstance(state, QuantizedRows) and state.shape == (2, 8, 16)
    assert sqnr([want], [got]) > 35 and sqnr([floats], [state.dequantize()]) > 35  # weights and state have 8 bits
    assert [(e.precision, e.decided_by) for e in q.ledger if e.op == "append"] == [("moves", "store-states")]


def test_text_of_packed_integers_in_blocks():
    spec = fxq.TensorSpec(bits=4, per=8, range="dynamic")
    gm = run_pass(
        StoreStates(),
        f"""
        past: float32[1, 2, 5, 16] = input()
        new: float32[1, 2, 3, 16] = input()
        cat: float32[1, 2, 8, 16] = append(past, new, dim=2)  # plan=Plan(Decision('float'), state={spec!r})
        y: float32[1, 2, 8, 16] = relu(cat)
        return (y, cat)
        """,
    )
    rest = "qmax=15, axis=-1, block=8"
    assert program(gm) == expected(f"""
        past: float32[1, 2, 5, 16] = input()
        new: float32[1, 2, 3, 16] = input()
        past_scale: float32[1, 2, 5, 2] = state_scale(past, steps=14, block=8, bits=4)
        past_zero_point: uint8[1, 2, 5, 2] = state_zero_point(past, past_scale, block=8, bits=4)
        past_q: uint8[1, 2, 5, 8] = state_integers(past, past_scale, past_zero_point, qmax=15, block=8, bits=4)
        new_scale: float32[1, 2, 3, 2] = choose_scale(new, steps=14, axis=-1, symmetric=False, block=8)
        new_zero_point: uint8[1, 2, 3, 2] = state_zero_point(new, new_scale, block=8, bits=4)
        new_values: uint8[1, 2, 3, 16] = quantize(new, scale=new_scale, zero_point=new_zero_point, {rest})
        new_q: uint8[1, 2, 3, 8] = pack_rows(new_values, bits=4)
        cat_scale: float32[1, 2, 8, 2] = append(past_scale, new_scale, dim=2)
        cat_zero_point: uint8[1, 2, 8, 2] = append(past_zero_point, new_zero_point, dim=2)
        cat_q: uint8[1, 2, 8, 8] = append(past_q, new_q, dim=2)
        cat: float32[1, 2, 8, 16] = quantized_rows(cat_q, cat_scale, cat_zero_point, size=16, bits=4)
        cat_values: uint8[1, 2, 8, 16] = unpack_rows(cat_q, size=16, bits=4)
        cat_dq: float32[1, 2, 8, 16] = dequantize(cat_values, scale=cat_scale, zero_point=cat_zero_point, {rest})
        y: float32[1, 2, 8, 16] = relu(cat_dq)
        return (y, cat)
    """)


@pytest.mark.parametrize(
    ("make", "shape", "why"),
    [
        (lambda x, past: torch.cat([past, x], -1), (2, 3), "do not grow"),
        (lambda x, past: torch.cat([past, (10 * x).int()], 0), (2, 3), "of float32"),
    ],
)
def test_states_without_rows_of_floats_stay_as_they_are(make, shape, why):
    model = module(lambda self, x, past: (self.layer(x), make(x, past)), layer=nn.Linear(3, 3))
    x = torch.randn(shape)
    past = torch.ones(shape, dtype=torch.int32 if why == "of float32" else torch.float32)
    q = fxq.quantize(model, fxq.Recipe.weight_only(state=CACHE), example_inputs=(x, past))
    assert torch.equal(q(x, past)[1], make(x, past))
    (entry,) = (entry for entry in q.ledger if entry.op == "append")
    assert entry.precision == "float" and why in entry.reason


def test_the_ledger_says_how_to_store_a_state_as_integers():
    q = quantized(Attention().eval(), fxq.Recipe.weight_only())
    assert {e.reason for e in q.ledger if e.op == "append"} == {
        f"its state is in float; as integers: state={CACHE_TEXT}"
    }
    assert eval(CACHE_TEXT) == CACHE
    stored = quantized(Attention().eval(), fxq.Recipe.weight_only(state=eval(CACHE_TEXT)))
    entries = [e for e in stored.ledger if e.op == "append"]
    assert [(e.precision, e.decided_by) for e in entries] == [("moves", "store-states")] * 2
    assert all(40 < e.sqnr < 60 for e in entries)  # int8 per row of 16 values


def recipes(state):
    return {
        "weight_only": fxq.Recipe.weight_only(state=state),
        "reference": fxq.Recipe.weight_only(backend="reference", state=state),
        "dynamic": fxq.Recipe.dynamic(state=state, optimize="coverage"),
        "static": fxq.Recipe.static(state=state, optimize="coverage"),
        "cache alone": REFERENCE.override("*", fxq.FLOAT).override(
            fxq.by_op("append"), fxq.QuantConfig(activation=None, weight=None, state=state)
        ),
        **{
            name: fxq.Recipe.static(state=state, backend=name, optimize="coverage")  # what is fast differs with it
            for name in ("openvino", "onnxruntime", "jit")
        },
    }


BLOCKS = fxq.TensorSpec(bits=4, per=8, range="dynamic")


def as_stored(rows, like=None):
    """Float values that a state's integers stand for: of rotated keys, or of rows as they are."""
    if isinstance(rows, QuantizedRows):
        return (rows.rotated() if rows.is_rotated else rows).dequantize()
    return rotated(rows) if like.is_rotated else rows


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
@pytest.mark.parametrize(("spec", "least"), [(CACHE, 35), (BLOCKS, 20)], ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("name", recipes(CACHE))
def test_an_integer_cache_agrees_with_a_float_one(name, spec, least):
    recipe = recipes(spec)[name]
    if unavailable(recipe.backend):
        pytest.skip(f"{recipe.backend} does not run here")
    model = Attention().eval()
    in_float = quantized(model, fxq.Recipe.from_dict({**recipe.to_dict()}).override(fxq.by_op("append"), fxq.FLOAT))
    q, tokens = quantized(model, recipe), torch.randn(1, 40, 32)
    (got, state), (want, floats) = run(q, tokens, empty()), run(in_float, tokens, empty())
    assert all(isinstance(part, QuantizedRows) for part in state)
    assert sqnr([want], [got]) > least  # by the bits of the state; the layers are those of the other model
    for part, float_part in zip(state, floats, strict=True):
        error = (as_stored(part) - as_stored(float_part, part)).abs()
        steps = error / part.scale.repeat_interleave(16 // part.blocks, -1)
        assert float(steps.max()) < (0.51 if recipe.preset == "weight_only" or name == "cache alone" else 20)


def test_entries_are_quantized_once():
    """Later calls do not change the integers of earlier entries."""
    q = quantized(Attention().eval(), fxq.Recipe.weight_only(state=CACHE))
    tokens = torch.randn(1, 100, 32)
    _, (early, _) = run(q, tokens[:, :10], empty())
    integers = early.integers.clone()
    _, (late, _) = run(q, tokens[:, 10:], (early, run(q, tokens[:, :10], empty())[1][1]))
    assert torch.equal(late.integers[:, :, :10], integers)


@pytest.mark.parametrize("state", [None, CACHE], ids=["float", "int8"])
@pytest.mark.parametrize("window", [None, 8])
def test_the_work_per_token_does_not_grow(state, window):
    """Over 640 tokens, whole states are copied so rarely that all copies add up to a few final sizes."""
    q = quantized(
        Attention(window).eval(),
        REFERENCE.override("*", fxq.FLOAT).override(
            fxq.by_op("append"), fxq.QuantConfig(activation=None, weight=None, state=state)
        ),
    )
    x, past, copied, memory = torch.randn(1, 1, 32), empty(), 0, None
    with torch.no_grad():
        for _ in range(640):
            _, *past = q(x, *past)
            keys = past[0].integers if state is not None else past[0]
            copied += keys.shape[2] if keys.untyped_storage().data_ptr() != memory else 0
            memory = keys.untyped_storage().data_ptr()
    assert past[0].shape[2] == (640 if window is None else 8)
    assert copied < 4 * (640 if window is None else 8 * 640 / 64)


@pytest.mark.parametrize("state", [None, CACHE, BLOCKS], ids=["float", "int8", "int4"])
def test_continuations_crops_and_reorders(state):
    recipe = fxq.Recipe.weight_only(backend="reference", state=state)
    q, tokens = quantized(Attention().eval(), recipe, batch=2), torch.randn(2, 30, 32)
    _, past = run(q, tokens[:, :20], empty(2))

    def alone(chosen, first, rest):
        """Outputs of a run from the start: `first` tokens of the chosen samples, then `rest`."""
        return run(q, rest, run(q, tokens[chosen, :first], empty(2))[1])[0]

    order, later = torch.tensor([1, 1]), torch.randn(2, 5, 32)
    changes = {
        "one continuation": (past, [0, 1], 20),
        "another": (past, [0, 1], 20),
        "crop": ([part[:, :, :15] for part in past], [0, 1], 15),
        "reorder": ([part.index_select(0, order) for part in past], [1, 1], 20),
        "copy": (copy.deepcopy(past), [0, 1], 20),
    }
    started = {name: run(q, later[:, :1], begun)[1] for name, (begun, _, _) in changes.items()}  # interleaved
    for name, (_, chosen, first) in changes.items():
        got = run(q, later[:, 1:], started[name])[0]
        want = alone(chosen, first, later)[:, 1:]
        assert torch.allclose(got, want, rtol=0, atol=1e-5), name  # the sums of attention have another order at most


def test_size_of_an_integer_cache():
    """A quarter, and 5 bytes for each row of 64 values: 0.27 of a float cache."""
    past, new = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 1, 64)
    model = module(lambda self, x, past: torch.cat([past, self.layer(x)], 2), layer=nn.Linear(64, 64))
    state = fxq.quantize(model, fxq.Recipe.weight_only(state=CACHE), example_inputs=(new, past))(new, past)
    assert state.nbytes / (4 * state.numel()) == pytest.approx(0.25 + 5 / 256)


@pytest.mark.parametrize("recipe", ["cache alone", "weight_only"])
@pytest.mark.parametrize(("bits", "per"), [(8, "row"), (8, 4), (4, "row"), (4, 4), (4, 16), (3, 8), (6, 2), (7, 8)])
def test_blocks_and_bits(bits, per, recipe):
    """Each block has the values of a row of its own, and few bits take as much memory as they should."""
    recipe = recipes(fxq.TensorSpec(bits=bits, per=per, range="dynamic"))[recipe]
    model, tokens = Attention().eval(), torch.randn(1, 10, 32)
    q, in_float = (quantized(model, chosen) for chosen in (recipe, recipe.override(fxq.by_op("append"), fxq.FLOAT)))
    state = run(q, tokens, empty())[1]
    grid, block = DynamicGrid(0, 2**bits - 1, torch.uint8, -1, symmetric=False), 16 if per == "row" else per
    for part, floats in zip(state, run(in_float, tokens, empty())[1], strict=True):
        want = grid.rounded(as_stored(floats, part).unflatten(-1, (16 // block, block))).flatten(-2)
        assert torch.equal(as_stored(part), want)
        assert 2**bits - 2 <= int(part.integers.max()) < 2**bits
        assert part.parts[0].nbytes == part.numel() * (bits if bits < 7 else 8) / 8
        assert part.scale.shape == (1, 2, 10, 16 // block)
    reasons = {entry.reason for entry in q.ledger if entry.op == "append"}
    unpacked = f"its integers of {bits} bits are unpacked in each call; compiled loops read 8 and 4 bits"
    assert reasons == {unpacked if bits in (3, 6) else ""}


def test_a_block_that_does_not_divide_a_row():
    spec = fxq.TensorSpec(bits=4, per=5, range="dynamic")
    with pytest.raises(RecipeError, match="rows of 16 values, which blocks of 5 do not divide"):
        quantized(Attention().eval(), fxq.Recipe.weight_only(state=spec))


def test_a_state_of_another_form_is_quantized_again():
    """A state that a model with another spec has returned is taken by its values, never by its integers."""
    model, tokens, specs = Attention().eval(), torch.randn(1, 10, 32), [CACHE, BLOCKS, replace(BLOCKS, per="row")]
    models = [quantized(model, recipes(spec)["reference"]) for spec in specs]
    states = [run(q, tokens[:, :5], empty())[1] for q in models]
    for q in models:
        for state in states:
            want, _ = run(q, tokens[:, 5:], [1 * part for part in state])
            got, after = run(q, tokens[:, 5:], state)
            assert torch.allclose(got, want, rtol=0, atol=1e-5)
            assert after[0].shape == (1, 2, 10, 16)


@pytest.mark.parametrize("spec", [CACHE, BLOCKS], ids=["8 bits", "4 bits"])
def test_files_copies_and_recipes(spec):
    recipe = fxq.Recipe.weight_only().override(fxq.by_op("append"), fxq.QuantConfig(None, None, state=spec))
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    q, tokens = quantized(Attention().eval(), recipe), torch.randn(1, 10, 32)
    want, state = run(q, tokens, empty())
    for copied in (filed(q), copy.deepcopy(q)):
        got, copied_state = run(copied, tokens, empty())
        assert torch.equal(got, want) and torch.equal(copied_state[0].integers, state[0].integers)
    with pytest.raises(RecipeError, match="takes no state"):
        fxq.Recipe.qat(state=CACHE)


def test_a_state_cannot_be_changed_in_place():
    q = quantized(Attention().eval(), fxq.Recipe.weight_only(state=CACHE))
    _, (keys, _) = run(q, torch.randn(1, 3, 32), empty())
    with pytest.raises(InputError, match="dequantize"):
        keys *= 0.5


@pytest.mark.parametrize("spec", [CACHE, BLOCKS], ids=["8 bits", "4 bits"])
def test_onnx_keeps_the_state_in_float(tmp_path, spec):
    """In ONNX, the state is float at both ends, and quantized again in each call."""
    runtime = pytest.importorskip("onnxruntime")
    q = quantized(Attention().eval(), fxq.Recipe.weight_only(backend="reference", state=spec))
    q.export(tmp_path / "m.onnx")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(tmp_path / "m.onnx", options)
    x, keys, values = torch.randn(1, 3, 32), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    outputs = session.run(None, {"x": x.numpy(), "keys": keys.numpy(), "values": values.numpy()})
    for got, want in zip(outputs, q(x, keys, values), strict=True):
        assert torch.allclose(torch.from_numpy(got), 1 * want, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_the_hidden_state_of_a_recurrent_layer_stays_symmetric(layer):
    """The spec of a cache, for a model that has recurrent layers, too: these keep their default grid."""
    model, x = module(lambda self, x: self.layer(x)[0], layer=layer(16, 16)).eval(), torch.randn(5, 2, 16)
    cached, plain = (
        fxq.quantize(model, fxq.Recipe.dynamic(optimize="coverage", **options), example_inputs=x)
        for options in ({"state": CACHE}, {})
    )
    assert torch.equal(cached(x), plain(x))
    assert any("symmetric" in entry.reason for entry in cached.ledger)
