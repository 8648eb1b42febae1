"""Random networks through the whole pipeline: no crash, no warning, and the numbers that quantization promises.

The normal run is small and the same every time; `-m slow` draws thousands of networks. A failure prints its `Plan`,
which builds the network again.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
import zlib
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxq
from fxq.backends.cpu import has_vnni
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.common.metrics import sqnr, tensors
from fxq.cost import cache as costs
from tests.support import elsewhere
from tests.support.fuzz import Network, Plan, Step, noisy
from tests.support.fuzz_forms import FORMS, NOT_DRAWN, UNBOUNDED
from tests.support.graphs import idle
from tests.support.helpers import ops_of_fxq
from tests.support.machine import OF_THE_MACHINE, needs_x86

MARGIN = 12.0
"""dB by which an error may exceed the noise model: that has no correlated errors, and the values are few.

As much for int8 against qdq: one rounding tie is a whole step in one element, where the model has 0.3 in each.
"""

SUMMED = 1e-4
"""Rounding error of float32 in a sum that should be zero, with terms as large as in these networks."""

LOW_SQNR_WARNING = "the output is"
EXPECTED = (LOW_SQNR_WARNING, "nothing runs on integers", OF_THE_MACHINE)
"""How warnings begin that say what random networks are like; there must be no others."""

NUMBER = st.integers(0, 11)
STEPS = st.builds(
    Step,
    op=st.sampled_from(sorted(FORMS)),
    reads=st.tuples(NUMBER, NUMBER, NUMBER),
    options=st.tuples(*[NUMBER] * 9),
    spelling=NUMBER,
    shares=st.sampled_from([0, 0, 0, 1, 2]),
)


PHRASES = [
    ("linear", "masked_fill", "amax", "linear"),
    ("linear", "where", "amax", "linear"),
    ("linear", "cat", "amax", "linear"),
    ("conv1d", "masked_fill", "permute", "linear"),
    ("conv2d", "relu", "pad", "max_pool2d", "conv2d"),
    ("conv2d", "relu", "pad", "adaptive_max_pool2d", "conv2d"),
    ("conv1d", "pad", "max_pool1d", "conv1d"),
    ("conv2d", "conv2d", "cat", "getitem", "conv2d", "conv2d"),
    ("conv1d", "conv1d", "cat", "chunk", "conv1d", "conv1d"),
    ("linear", "linear", "stack", "getitem", "linear", "linear"),
    ("conv2d", "sigmoid", "mul", "conv2d"),
    ("linear", "softmax", "linear"),
]
"""Ops that quantization has to see together: constants and who reads them, coarse beside fine values, saturation."""


def phrase(ops: tuple[str, ...]) -> st.SearchStrategy[tuple[Step, ...]]:
    """These steps, each reading one of the two latest values."""
    reads = st.tuples(st.sampled_from([0, 0, 0, 1]), NUMBER, NUMBER)
    return st.tuples(*[st.builds(Step, st.just(op), reads, st.tuples(*[NUMBER] * 9), NUMBER, st.just(0)) for op in ops])


WORDS = st.one_of(STEPS.map(lambda step: (step,)), st.sampled_from(PHRASES).flatmap(phrase))
INPUTS_DRAWN = [("image",), ("sequence",), ("rows",), ("volume",), ("image", "image"), ("image", "rows")]


def plans(most: int) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        inputs=st.sampled_from(INPUTS_DRAWN),
        steps=st.lists(WORDS, min_size=1, max_size=most).map(lambda words: tuple(chain(*words))[:most]),
        seed=st.integers(0, 3),
        named=st.booleans(),
    )


def recipe(bits: int = 8) -> fxq.Recipe:
    """Everything on integers, by ranges that clip nothing: the noise model does not clip either."""
    activation = fxq.TensorSpec(bits=bits, observer="minmax")
    return fxq.Recipe.static(backend="x86", optimize="coverage", activation=activation)


WITHOUT_DATA = [preset(backend="x86", optimize="coverage") for preset in (fxq.Recipe.dynamic, fxq.Recipe.weight_only)]


def quantize(network: Network, chosen: fxq.Recipe, batch: Any) -> fxq.results.QuantizedModel:
    """The network by a recipe; dynamic and weight-only see the batch as an example."""
    return fxq.quantize(network, chosen, data=[batch] if chosen.preset == "static" else None, example_inputs=batch)


def check(plan: Plan, chosen: fxq.Recipe | None = None) -> None:
    """All that holds for every network."""
    chosen = chosen or recipe()
    network, batch = plan.build()
    if not network.lines:
        return
    given_inputs, state = copy.deepcopy(batch), copy.deepcopy(network.state_dict())
    with torch.no_grad():
        real = network(*batch)
        bounds = noise_bounds(network, batch, real)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", fxq.FxqWarning)
            try:
                observed = fxq.prepare(network, chosen, example_inputs=batch)
                if chosen.preset == "static":
                    fxq.calibrate(observed, [batch])
                quantized = fxq.convert(observed)
            except fxq.CalibrationError as error:  # a stride may step over the infinity that a pad has brought in
                assert "holds Inf. A mask may hold it, but not the input of a layer" in str(error)
                return
            qdq = fxq.convert(observed, chosen.without_pass("lower").without_pass("verify-lowering"))
        warned = [str(w.message) for w in said if issubclass(w.category, fxq.FxqWarning)]
        assert all(text.startswith(EXPECTED) for text in warned), warned
        got, exact = quantized(*batch), qdq(*batch)
        far = any(text.startswith(LOW_SQNR_WARNING) for text in warned)
        assert far or not sqnr(real, got) < 12, f"{sqnr(real, got):.1f} dB without a warning"
        assert structure(got) == structure(real)
        within(real, exact, bounds, "qdq against float")
        within(exact, got, bounds, "int8 against qdq")
        assert not quantized.history["verify-lowering"].edits
        assert not idle(quantized.history["fallback"].graph), "integers are made that no integer op reads"
        assert identical(quantized(*batch), got), "a second call, which binds the graph, gives something else"
        assert identical(quantized(*batch), got), "a third call, of the bound function, gives something else"
        assert identical(pickle.loads(pickle.dumps(quantized))(*batch), got), "the pickled model gives something else"
        part = tuple(x[:2] for x in batch)
        if takes(network, part):
            within([t[:2] for t in tensors(got)], quantized(*part), bounds, "two samples against all")
        assert identical(batch, given_inputs), "the inputs were changed"
        assert identical(network(*batch), real) and identical(state, network.state_dict()), "the model was changed"
        assert not network.training
        check_ledger(network, len(batch), quantized.ledger)
        if plan.seed == 0:
            check_state(network, chosen, batch, quantized, got)
        if plan.seed == 1:
            check_edits(batch, quantized)


def takes(network: Network, batch: Any) -> bool:
    """Whether the float model runs on a batch: where the samples have become another axis, it may need all of them."""
    try:
        network(*batch)
    except RuntimeError:
        return False
    return True


def check_state(
    network: Network, chosen: fxq.Recipe, batch: Any, quantized: fxq.results.QuantizedModel, got: Any
) -> None:
    """A state dict gives its model's numbers to one of other ranges, or is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        halved = quantize(network, chosen, tuple(x / 2 for x in batch))
    try:
        halved.load_state_dict(quantized.state_dict())
    except fxq.InputError as error:
        assert "the state dict is of another model: " in str(error)
    else:
        assert identical(halved(*batch), got), "a loaded state dict gives something else"


def check_edits(batch: Any, quantized: fxq.results.QuantizedModel) -> None:
    """A weight that is edited after calls counts as in a fresh copy, which has packed and bound nothing."""
    for kernel in [m for m in quantized.modules() if isinstance(m, LayerKernel)][:3]:
        kernel.weight_scale.mul_(0.75)
        kernel.weight = kernel.weight.flip(0)
        edited, fresh = quantized(*batch), copy.deepcopy(quantized)(*batch)
        pairs = zip(tensors(edited), tensors(fresh), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs), "an edited weight is not seen"


def noise_bounds(network: Network, batch: Any, real: Any) -> list[float]:
    """The SQNR that every output has at least, by the worst of a few draws of the noise; NaN where that is not defined.

    One draw is not enough where an op amplifies little differences: it may happen to leave their signs as they are.
    """
    draws = [
        [sqnr(a, b) for a, b in zip(tensors(real), tensors(noisy(network, batch, i)), strict=True)] for i in range(4)
    ]
    return [math.nan if any(map(math.isnan, sqnrs)) else min(sqnrs) - MARGIN for sqnrs in zip(*draws, strict=True)]


def within(reference: Any, value: Any, bounds: list[float], title: str) -> None:
    """Every output as near to the reference as the noise model says, where that is defined."""
    for i, (a, b, bound) in enumerate(zip(tensors(reference), tensors(value), bounds, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        rounding = bound == math.inf and float((a.double() - b.double()).abs().max()) < SUMMED
        assert math.isnan(bound) or rounding or sqnr(a, b) >= bound, (
            f"{title}, output {i}: {sqnr(a, b):.1f} dB, not {bound:.1f}"
        )


def identical(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def structure(value: Any) -> Any:
    """The containers and keys of a result."""
    if isinstance(value, dict):
        return {key: structure(v) for key, v in value.items()}
    return tuple(map(structure, value)) if isinstance(value, (tuple, list)) else value.shape


REMOVED = {"identity", "dropout", "contiguous"}
"""Ops that canonicalize removes where they do nothing."""
ADDED = {"pad", "full_like", "new_full", "lstm", "gru", "rnn", "transpose", "cat", "stack"}
WRITTEN_OUT = {"mul", "sigmoid", "hardsigmoid", "silu", "hardswish", "addmm", "linear", "getitem"}
"""Ops that it adds, and those that it makes of others or makes others of."""


def check_ledger(network: Network, inputs: int, ledger: fxq.results.Ledger) -> None:
    """One row for each op whose value is used, with a reason where it runs in float."""
    used, todo = set(), list(network.outputs)
    while todo:
        number = todo.pop()
        if number >= inputs and number not in used:
            used.add(number)
            todo += network.lines[number - inputs].reads
    expected = Counter(network.lines[i - inputs].op for i in used)
    rows = Counter(entry.op for entry in ledger)
    missing, more = expected - rows, rows - expected
    assert missing.keys() <= REMOVED | WRITTEN_OUT, f"no row of the ledger for {missing}"
    assert more.keys() <= ADDED | REMOVED | WRITTEN_OUT, f"rows of the ledger for no op: {more}"
    assert all(entry.reason for entry in ledger if entry.precision == "float")
    assert len({entry.name for entry in ledger}) == len(ledger)


def test_every_row_of_the_table_is_drawn_or_listed():
    rows = {op.name for op in ops_of_fxq() if op.spellings or op.traits.more_weights}
    missing = rows - FORMS.keys() - NOT_DRAWN.keys()
    assert not missing, (
        "say in tests/support/fuzz_forms.py how these are called: an entry of FORMS, or a reason in NOT_DRAWN"
    )
    assert not FORMS.keys() & NOT_DRAWN.keys()
    assert FORMS.keys() | NOT_DRAWN.keys() <= rows


@pytest.mark.parametrize("op", sorted(FORMS))
def test_every_spelling_is_drawn_somewhere(op):
    """Drawn after a layer that reads one of the inputs: every form is reachable."""
    layers = {"image": "conv2d", "sequence": "conv1d", "rows": "linear", "volume": "conv3d"}
    between = ["sigmoid"] if op in UNBOUNDED else ["einsum"] if op in ("matmul", "baddbmm") else []
    for spelling in range(len(FORMS[op].spellings)):
        steps = [(*map(Step, (layer, *between)), Step(op, spelling=spelling)) for layer in layers.values()]
        drawn = [Plan((inputs,), behind).build()[0].lines for inputs, behind in zip(layers, steps, strict=True)]
        assert any(lines[-1].op == op for lines in drawn), f"spelling {spelling} fits none of the inputs"


@needs_x86
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(12))
def test_random_networks(plan):
    check(plan)


@pytest.mark.slow
@needs_x86
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(12), chosen=st.sampled_from(WITHOUT_DATA))
def test_random_networks_without_data(plan, chosen):
    check(plan, chosen)


@needs_x86
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(12), prices=st.integers(0, 99))
def test_random_networks_at_random_prices(plan, prices):
    """Whichever ops run on integers, every quantized value has a reader."""
    network, batch = plan.build()
    if not network.lines:
        return

    class Planted(costs.Costs):
        def __contains__(self, key):
            return True

        def seconds(self, key, prepare, cold=False):
            return float(zlib.crc32(f"{prices} {key.partition(' to ')[0]}".encode()) % 5)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), torch.no_grad():
        patch.setattr(costs, "machine_costs", Planted)
        warnings.filterwarnings("ignore", message="nothing runs on integers")
        quantized = fxq.quantize(network, recipe().with_optimize("speed"), data=[batch])
        real = network(*batch)
        within(real, quantized(*batch), noise_bounds(network, batch, real), "int8 against float")
    assert not idle(quantized.history["fallback"].graph), "integers are made that no integer op reads"


@needs_x86
def test_too_large_an_error_is_seen():
    """A grid of 4 bits is 24 dB worse than the one that the noise model has."""
    plan = Plan(("image",), (Step("conv2d"), Step("relu"), Step("conv2d")))
    check(plan)
    with pytest.raises(AssertionError, match="qdq against float, output 0"):
        check(plan, recipe(bits=4))


@pytest.mark.slow
@needs_x86
@pytest.mark.parametrize("round_", range(50))
def test_many_random_networks(round_):
    recipes = [recipe()] if round_ % 5 else WITHOUT_DATA

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)
    @given(plan=plans(40 if round_ < 5 else 12), chosen=st.sampled_from(recipes))
    def many(plan, chosen):
        check(plan, chosen)

    many()


@pytest.mark.slow
@pytest.mark.skipif(not has_vnni(), reason="needs a CPU with VNNI, which can play one without")
def test_pickles_of_random_networks_on_another_cpu(tmp_path):
    """Made with VNNI, run without: right by the same measure as at home."""
    results: dict[Plan, Any] = {}
    bounds: dict[Plan, Any] = {}

    @settings(max_examples=36, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(plan=plans(12))
    def draw(plan):
        network, batch = plan.build()
        if network.lines:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore", fxq.FxqWarning)
                results[plan] = fxq.quantize(network, recipe(), data=[batch]), batch
                bounds[plan] = noise_bounds(network, batch, network(*batch))

    draw()
    torch.save(results, tmp_path / "made.pt")
    (loaded,) = elsewhere.run("AVX2", ("load", tmp_path / "made.pt", tmp_path / "results.pt"))
    assert any("quantized on another machine" in text for text in loaded["messages"])
    with torch.no_grad():
        for plan, (model, batch) in results.items():
            first, *others = loaded["values"][plan]
            within(model(*batch), first, bounds[plan], f"{plan} on another CPU")
            assert all(identical(first, result) for result in others)
