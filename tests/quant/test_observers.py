"""Observers against brute force and numpy, and the algebra of their state."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxq
from fxq.errors import CalibrationError, InputError, RecipeError
from fxq.quant import histogram
from fxq.quant.observer_base import Observer
from fxq.quant.observers import OBSERVERS, Entropy, Histogram, MinMax, MovingAverage, Percentile, observer_for
from fxq.quant.qparams import QParams, choose_qparams, dequantize, quantize
from fxq.quant.spec import TensorSpec
from tests.support.layouts import LAYOUTS

SPEC = TensorSpec()
EXACT = ["minmax", "histogram", "percentile", "entropy", "mse"]  # whose state does not depend on how data is batched
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
batch = st.lists(finite, min_size=1, max_size=20).map(lambda values: torch.tensor(values, dtype=torch.float32))
batches = st.lists(batch, min_size=1, max_size=5)


def observed(name: str, data: list[Tensor], axis: int | None = None, spec: TensorSpec = SPEC) -> Observer:
    observer = OBSERVERS[name](spec, axis, "x")
    for x in data:
        observer(x)
    return observer


def same_state(a: Observer, b: Observer) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def squared_errors(x: Tensor, grids: QParams) -> Tensor:
    """Summed squared error of each of the C grids on `x` (N,): float64 (C,)."""
    x, rows = x.double(), []
    for scale, zero_point in zip(grids.scale.double().reshape(-1), grids.zero_point.reshape(-1), strict=True):
        q = (torch.round(x / scale) + zero_point).clamp_(grids.qmin, grids.qmax).sub_(zero_point)
        rows.append(q.mul_(scale).sub_(x).square_().sum())
    return torch.stack(rows)


def best_error(x: Tensor, spec: TensorSpec) -> float:
    """The smallest error of any range, by trying: a coarse grid over both ends, then a fine one around its best."""
    low, high = float(x.min().clamp(max=0)), float(x.max().clamp(min=0))

    def least(lows: Tensor, highs: Tensor) -> tuple[float, Tensor, Tensor]:
        errors = squared_errors(x, choose_qparams(lows.clamp(min=low), highs.clamp(max=high), spec, 0))
        best = errors.argmin()
        return float(errors[best]), lows[best], highs[best]

    if spec.symmetric or low == 0 or high == 0:
        shrink = torch.exp2(-torch.linspace(0, 10, 500))
        ends = (-max(-low, high), max(-low, high)) if spec.symmetric else (low, high)
        return least(shrink * ends[0], shrink * ends[1])[0]
    lows, highs = torch.meshgrid(*[torch.exp2(-torch.linspace(0, 8, 25))] * 2, indexing="ij")
    _, lows, highs = least(lows.reshape(-1) * low, highs.reshape(-1) * high)
    near = torch.exp2(torch.linspace(-0.3, 0.3, 17))
    a, b = torch.meshgrid(near, near, indexing="ij")
    return least(a.reshape(-1) * lows, b.reshape(-1) * highs)[0]


def distributions() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    normal, uniform = torch.randn(8000, generator=g), torch.rand(8000, generator=g)
    laplace = normal.sign() * -torch.log(uniform.clamp(min=1e-6))
    return {
        "gaussian": normal,
        "laplace": laplace,
        "relu": normal.relu(),
        "negative": -3 * normal.relu(),
        "uniform": 3 * uniform - 1,
        "bimodal": torch.cat([0.1 * normal[:4000] - 1, 0.3 * normal[4000:] + 4]),
        "outlier": torch.cat([normal, torch.tensor([100.0])]),
        "two outliers": torch.cat([normal, torch.tensor([300.0, -20.0])]),
        "relu with outlier": torch.cat([normal.relu(), torch.tensor([50.0])]),
        "hardswish": nn.functional.hardswish(3 * normal),
        "lattice": (20 * normal).round() / 20,
        "heavy tails": torch.tan(3.1 * (uniform - 0.5)),
    }


SPECS = {
    "uint8": TensorSpec(),
    "int8 symmetric": TensorSpec(signed=True, symmetric=True),
    "uint8 symmetric": TensorSpec(symmetric=True),
    "int7": TensorSpec(bits=7, signed=True),
    "uint4": TensorSpec(bits=4),
    "int3 symmetric": TensorSpec(bits=3, signed=True, symmetric=True),
}


# --- what the observers find ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_example(name):
    x = torch.tensor([-1.0, 0.0, 1.55])
    observer = observer_for(TensorSpec(observer=name), name="x")
    assert type(observer) is OBSERVERS[name]
    assert observer(x) is x
    assert [float(end) for end in observer.range()] == [-1.0, float(x[2])]
    assert observer.qparams().z == 100


def test_minmax_per_tensor_and_per_channel():
    data = [torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    everything = np.stack([x.numpy() for x in data])
    low, high = observed("minmax", data).range()
    assert (low.item(), high.item()) == (everything.min(), everything.max())
    for axis in (0, 1, 2, -1):
        low, high = observed("minmax", data, axis).range()
        others = tuple(d for d in range(4) if d != axis % 3 + 1)
        np.testing.assert_array_equal(low, everything.min(others))
        np.testing.assert_array_equal(high, everything.max(others))
        qp = observed("minmax", data, axis, TensorSpec(signed=True, symmetric=True)).qparams()
        assert qp.axis == axis and qp.scale.shape == low.shape and not qp.zero_point.any()


def test_minmax_per_channel_of_a_vector():
    low, high = observed("minmax", [torch.tensor([1.0, -2.0])], axis=0).range()
    assert low.tolist() == high.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("axis", [None, 1])
def test_moving_average_is_the_recurrence(axis):
    data = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(50)]
    low = high = None
    for x in data:
        values = x.double().numpy()
        lows, highs = values.min(None if axis is None else 0), values.max(None if axis is None else 0)
        low = lows if low is None else 0.99 * low + 0.01 * lows
        high = highs if high is None else 0.99 * high + 0.01 * highs
    observed_range = observed("moving_average", data, axis).range()
    np.testing.assert_allclose(observed_range[0], low, rtol=1e-5)
    np.testing.assert_allclose(observed_range[1], high, rtol=1e-5)


def test_moving_average_merge_weighs_by_batches():
    ones_observer, two = observed("moving_average", [torch.ones(2)] * 3), observed("moving_average", [torch.zeros(2)])
    ones_observer.merge(two)
    assert ones_observer.range()[1].item() == pytest.approx(0.75)
    ones_observer.merge(observed("moving_average", [torch.full((2,), 3.0)] * 4))
    assert ones_observer.range()[1].item() == pytest.approx(3 / 8 + 3 / 2)


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_join_covers_both_tensors(name):
    """`merge` is of two parts of one tensor's data, `join` of two tensors: no average may cut off the larger one."""
    small, large = observed(name, [torch.linspace(-1, 1, 1000)] * 3), observed(name, [torch.linspace(0, 100, 1000)])
    untouched = copy.deepcopy(large)
    small.join(large)
    assert [end.item() for end in small.range()] == [-1, 100]
    assert same_state(large, untouched)
    small.join(observed(name, []))
    assert [end.item() for end in small.range()] == [-1, 100]
    empty = observed(name, [])
    empty.join(large)
    assert empty.range() == large.range()
    with pytest.raises(InputError, match="cannot merge"):
        small.join(observer_for(TensorSpec(bits=4, observer=name)))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("x", distributions().values(), ids=distributions())
@pytest.mark.parametrize("name", ["histogram", "mse"])
def test_least_squares_are_near_the_best_range(name, x, spec):
    error = float(squared_errors(x, observed(name, [x], spec=spec).qparams())[0])
    plain = float(squared_errors(x, observed("minmax", [x], spec=spec).qparams())[0])
    assert error <= 1.05 * best_error(x, spec)
    assert error <= 1.01 * plain


@pytest.mark.parametrize("bits", range(2, 9))
def test_histogram_keeps_the_range_of_a_lattice(bits):
    """Data that is on the grid already has no error there, so nothing may be clipped."""
    x = torch.arange(2**bits).float().repeat(3) * 0.37
    assert float(observed("histogram", [x], spec=TensorSpec(bits=bits)).qparams().high) == pytest.approx(float(x.max()))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20, unique=True))
def test_the_gap_of_a_histogram_is_the_widest_stretch_without_values(values):
    """To three bins: one on either side, and that around zero is twice as wide."""
    low, high = observed("histogram", [torch.tensor(values)]).gap()
    widest = float(torch.tensor(sorted(values), dtype=torch.float64).diff().max())
    bins = 2.0 ** histogram.exponent_for(max(map(abs, values)))
    assert high - low == pytest.approx(widest, abs=3 * bins)
    assert observed("minmax", [torch.tensor(values)]).gap() == (0.0, 0.0)


def test_percentile_is_that_of_the_values():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    observer = observed("percentile", [x])
    width = 2.0 ** int(observer.exponent)
    low, high = observer.clipped(*observer.range())
    assert abs(float(low) - np.percentile(x, 0.01)) <= width
    assert abs(float(high) - np.percentile(x, 99.99)) <= width
    assert float(observer.qparams().high) == pytest.approx(float(high), rel=0.01)


@given(data=batches, bound=st.floats(0, 4))
@settings(max_examples=15, deadline=None)
def test_the_share_of_small_values_is_an_upper_limit_to_a_bin(data, bound):
    """Exact zeros count neither as small nor as seen."""
    x = torch.cat([*data, torch.zeros(7)])
    nonzero = x[x != 0].abs().double()
    observer = observed("histogram", [x])
    width = 2.0 ** int(observer.exponent)
    share = observer.share_up_to(bound)
    exact, wider = ((nonzero <= limit).double().mean().nan_to_num() for limit in (bound, bound + width))
    assert exact <= share <= wider
    assert observed("minmax", [x]).share_up_to(bound) is None


def test_the_share_of_small_values_is_unknown_where_constants_are_small():
    """Observers do not count fill constants; and a class of the user may count nothing."""
    observer = observer_for(SPEC, constants=[0.05, 9.0])
    observer(torch.tensor([0.05, 1.0, 2.0, 9.0]))
    assert observer.share_up_to(0.04) == 0.0 and observer.share_up_to(0.05) is None
    assert Histogram(SPEC).share_up_to(1.0) is None
    observer = observed("histogram", [torch.zeros(3)])
    assert observer.share_up_to(1.0) == 0.0


def test_percentile_of_one_sided_data_clips_one_end():
    x = torch.arange(1, 100_001).float()
    low, high = observed("percentile", [x]).clipped(x.min(), x.max())
    assert float(low) == 1.0 and float(high) == pytest.approx(99_990, abs=32)
    low, high = observed("percentile", [-x]).clipped(-x.max(), -x.min())
    assert float(low) == pytest.approx(-99_990, abs=32) and float(high) == -1.0


def test_percentile_of_nearly_nothing_but_zeros_keeps_the_range():
    x = torch.zeros(100_000)
    x[7] = 5.0
    assert float(observed("percentile", [x]).qparams().high) == pytest.approx(5.0)


def test_percentile_share_is_a_class_parameter():
    class Median(Percentile):
        percent = 50.0

    observer = Median(SPEC)
    observer(torch.arange(101).float())
    assert float(observer.qparams().high) == pytest.approx(50.0, abs=0.5)


@pytest.mark.parametrize("name", list(OBSERVERS))
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3),
        torch.full((3,), 1.7),
        torch.full((3,), -1.7),
        torch.tensor(0.3),
        torch.tensor([1e-45, -1e-42]),
        torch.tensor([1e-38, 3e38]),
        torch.tensor([-3.4e38, 3.4e38]),
        torch.tensor([2.0**-126, 1.0]),
        torch.tensor([4096.0, -4096.0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_extreme_ranges(name, x, spec):
    qp = observed(name, [x], spec=spec).qparams()
    assert 0 < qp.s < float("inf") and qp.qmin <= qp.z <= qp.qmax
    low, high = float(qp.low.double()), float((qp.qmax - qp.zero_point).double() * qp.scale.double())
    assert low <= 0 <= high
    if name == "minmax":
        assert qp.s >= 1e-38 and high >= float(x.max()) - qp.s and low <= float(x.min()) + qp.s


@pytest.mark.parametrize("name", ["histogram", "percentile", "entropy"])
def test_range_may_jump(name):
    small, large = torch.linspace(-1, 1, 1000), torch.tensor([1e30])
    observer = observed(name, [small, large, small])
    assert observer.range()[1] == large
    assert int(observer.counts.sum()) == 2001
    assert same_state(observer, observed(name, [large, small, small]))


# --- the state ------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", EXACT)
@given(data=batches, seed=st.randoms())
@settings(max_examples=10, deadline=None)
def test_streaming_is_one_shot_in_any_order(name, data, seed):
    everything = torch.cat(data)
    shuffled = everything[torch.tensor(seed.sample(range(len(everything)), len(everything)))]
    streamed = observed(name, data)
    assert same_state(streamed, observed(name, [everything]))
    assert same_state(streamed, observed(name, [shuffled]))
    assert streamed.qparams().same_as(observed(name, [shuffled]).qparams())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", EXACT)
@given(a=batches, b=batches, c=batches)
@settings(max_examples=8, deadline=None)
def test_merge_is_seeing_both_and_commutes_and_associates(name, a, b, c):
    def merged(*parts: Observer) -> Observer:
        first = copy.deepcopy(parts[0])
        for part in parts[1:]:
            first.merge(part)
        return first

    x, y, z = (observed(name, part) for part in (a, b, c))
    untouched = copy.deepcopy(y)
    both = merged(x, y)
    assert same_state(both, observed(name, a + b))
    assert same_state(y, untouched)
    assert same_state(both, merged(y, x))
    assert same_state(merged(both, z), merged(x, merged(y, z)))
    nothing = observed(name, [])
    assert same_state(merged(x, nothing), x) and same_state(merged(nothing, x), x)


@given(a=batches, b=batches, c=batches)
@settings(max_examples=8, deadline=None)
def test_moving_average_merge_commutes_and_associates(a, b, c):
    data = [[x / 1e30 for x in part] for part in (a, b, c)]

    def merged(*order: int) -> Tensor:
        total = observed("moving_average", [])
        for i in order:
            total.merge(observed("moving_average", data[i]))
        return torch.stack(total.range()).double()

    tolerance = 1e-5 * max(float(x.abs().max()) for part in data for x in part) + 1e-30
    assert (merged(0, 1, 2) - merged(2, 1, 0)).abs().max() <= tolerance
    assert (merged(0, 1, 2) - merged(1, 2, 0)).abs().max() <= tolerance


@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_merge_and_load_per_channel(name):
    a, b = torch.randn(2, 3, 4), torch.randn(5, 3, 4)
    observer_a, two = observed(name, [a], axis=1), observed(name, [b], axis=1)
    observer_a.merge(two)
    assert same_state(observer_a, observed(name, [a, b], axis=1))
    empty = observed(name, [], axis=1)
    empty.merge(two)
    assert same_state(empty, two)


def test_the_least_error_per_channel_is_that_of_each_channel_alone():
    """Also: the power is an option; the larger, the less is clipped."""
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) ** 3
    for spec in SPECS.values():
        dequantized = dequantize(quantize(x, qp := observed("mse", [x], 0, spec).qparams()), qp)
        for row, values in zip(dequantized, x, strict=True):
            alone = float(squared_errors(values, observed("mse", [values], spec=spec).qparams())[0])
            assert float((row - values).double().square().sum()) == pytest.approx(alone, rel=1e-3)
    highs = []
    for power in (1, 2, 4):
        observer = observer_for(TensorSpec(bits=4, observer=f"mse:{power}"))
        observer(x)
        highs.append(float(observer.qparams().high))
    assert highs == sorted(highs) and highs[0] < 0.5 * highs[-1]


@pytest.mark.parametrize("name", [name for name in OBSERVERS if not OBSERVERS[name].keeps_data])
def test_state_does_not_grow(name):
    observer = observed(name, [torch.ones(4)])
    size = sum(t.nbytes for t in observer.state_dict().values())
    for i in range(60):
        observer(torch.randn(50) * 10.0 ** (i - 30))
    assert sum(t.nbytes for t in observer.state_dict().values()) == size <= 80_000


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_deterministic_copied_and_loaded(name):
    data = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    observer = observed(name, data)
    assert same_state(observer, observed(name, data))
    loaded = observed(name, [])
    loaded.load_state_dict(observer.state_dict())
    for duplicate in (loaded, copy.deepcopy(observer)):
        assert same_state(observer, duplicate)
        assert observer.qparams().same_as(duplicate.qparams())


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_inference_mode_and_training_mix(name):
    observer = observed(name, [torch.randn(10)])
    with torch.inference_mode():
        observer(torch.randn(10) * 100)
    x = torch.randn(10, requires_grad=True)
    observer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(10))
    assert not observer.qparams().scale.requires_grad
    merged = observed(name, [torch.randn(10)])
    merged.merge(observer)
    merged.qparams()


# --- layouts, types, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    x = layout(torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0)))
    for name in OBSERVERS:
        assert same_state(observed(name, [x]), observed(name, [x.contiguous()]))
    if x.dim() == 4:
        assert same_state(observed("minmax", [x], 1), observed("minmax", [x.contiguous()], 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", list(OBSERVERS))
def test_float_types_are_converted(name, dtype):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    observer = observed(name, [x])
    assert same_state(observer, observed(name, [x.float()]))
    assert all(end.dtype == torch.float32 for end in observer.range())


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_empty_and_meta_tensors_are_passed_over(name):
    observer = observed(name, [])
    for x in (torch.empty(0, 3), torch.empty(2, 3, device="meta")):
        assert observer(x) is x
    assert not observer.seen_only_zeros
    with pytest.raises(CalibrationError, match=r"conv1's input has seen no data\. Calibrate"):
        observer_for(TensorSpec(observer=name), name="conv1's input").qparams()
    with pytest.raises(CalibrationError, match=r"x has seen no data: all its tensors were empty, such as batches of"):
        observer.range()


@pytest.mark.parametrize("bad", [math.nan, float("inf"), float("-inf")])
@pytest.mark.parametrize("name", list(OBSERVERS))
def test_nan_and_inf_are_refused_and_leave_no_trace(name, bad):
    observer = observed(name, [torch.ones(3)])
    before = copy.deepcopy(observer)
    x = torch.randn(4, 5)
    x[2, 3] = bad
    with pytest.raises(CalibrationError, match=r"^x holds NaN or Inf.*leave out that data"):
        observer(x)
    assert same_state(observer, before)
    if name == "minmax":
        with pytest.raises(CalibrationError, match="NaN or Inf"):
            observed(name, [x], axis=1)


def test_float64_beyond_float32_is_refused():
    for name in OBSERVERS:
        with pytest.raises(CalibrationError, match="beyond float32"):
            observed(name, [torch.tensor([1e300], dtype=torch.float64)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_other_types_are_refused(dtype):
    with pytest.raises(CalibrationError, match=f"x is {dtype}.*to float"):
        observed("minmax", [torch.zeros(3, dtype=dtype)])


def test_per_channel_histogram_is_refused():
    for name in ("histogram", "percentile", "entropy"):
        with pytest.raises(RecipeError, match=f"conv1.*{name!r} observer.*observer='minmax' or 'mse'"):
            observer_for(TensorSpec(per="channel", observer=name), axis=0, name="conv1's weight")


@pytest.mark.parametrize(
    ("text", "kind", "option", "value"),
    [
        ("percentile", Percentile, "percent", 99.99),
        ("percentile:90", Percentile, "percent", 90.0),
        ("percentile:percent=90", Percentile, "percent", 90.0),
        ("fxq.quant.observers:Percentile:90", Percentile, "percent", 90.0),
        ("moving_average", MovingAverage, "momentum", 0.01),
        ("moving_average:0.5", MovingAverage, "momentum", 0.5),
    ],
)
def test_options_in_the_text(text, kind, option, value):
    observer = observer_for(TensorSpec(observer=text))
    assert type(observer) is kind and getattr(observer, option) == value
    assert getattr(copy.deepcopy(observer), option) == getattr(observer.on(TensorSpec(bits=4)), option) == value


def test_options_count():
    x = torch.arange(1001).float()
    ends = [float(observer_for(TensorSpec(observer=f"percentile:{p}"))(x).max()) for p in (90, 100)]
    assert ends == [1000.0, 1000.0]
    for percent, expected in ((90, 900.0), (100, 1000.0)):
        observer = observer_for(TensorSpec(observer=f"percentile:{percent}"))
        observer(x)
        assert float(observer.qparams().high) == pytest.approx(expected, abs=2)
    average = observer_for(TensorSpec(observer="moving_average:0.5"))
    for value in (0.0, 4.0, 8.0):
        average(torch.tensor([value]))
    assert [float(end) for end in average.range()] == [5.0, 5.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("percentile:precent=9", "unknown option of the observer Percentile 'precent'; did you mean 'percent'"),
        ("percentile:99,98", "unknown option of the observer Percentile '98'"),
        ("minmax:3", "unknown option of the observer MinMax '3'.* Known: none"),
        ("percentile:high", "percent is 'high'; it must be from 50 to 100"),
        ("percentile:nan", "percent is 'nan'; it must be from 50 to 100"),
        ("percentile:101", "percent is '101'; it must be from 50 to 100"),
        ("moving_average:2", "momentum is '2'; it must be from 0 to 1"),
        ("percentle:99", "unknown observer 'percentle'; did you mean 'percentile'"),
        ("fxq.quant.observers:Histgram", "cannot import 'fxq.quant.observers:Histgram'"),
        ("torch.nn:Linear", "'torch.nn:Linear' is not a subclass of Observer"),
    ],
)
def test_wrong_options_and_names_are_refused(text, message):
    with pytest.raises(RecipeError, match=message):
        observer_for(TensorSpec(observer=text))
    if text == "percentile:101":
        with pytest.raises(RecipeError, match="percent is 101"):
            Percentile(SPEC, percent=101)


def test_unknown_observer():
    with pytest.raises(RecipeError, match=r"unknown observer 'histgram'; did you mean 'histogram'\?"):
        observer_for(TensorSpec(observer="histgram"))


def test_channels_may_not_change():
    observer = observed("minmax", [torch.randn(2, 3)], axis=1)
    with pytest.raises(CalibrationError, match="x has 4 channels on axis 1, but had 3 before"):
        observer(torch.randn(2, 4))
    with pytest.raises(CalibrationError, match="4 channels"):
        observer.merge(observed("minmax", [torch.randn(2, 4)], axis=1))
    with pytest.raises(CalibrationError, match="no axis 1"):
        observer(torch.randn(3))


def test_merge_refuses_another_kind():
    with pytest.raises(InputError, match="cannot merge a MovingAverage observer"):
        MinMax(SPEC).merge(MovingAverage(SPEC))
    with pytest.raises(InputError, match="uint4"):
        MinMax(SPEC).merge(MinMax(TensorSpec(bits=4)))
    with pytest.raises(InputError, match="axis 1"):
        MinMax(SPEC, axis=0).merge(MinMax(SPEC, axis=1))


def test_seen_only_zeros():
    for name in OBSERVERS:
        observer = observed(name, [torch.zeros(3)])
        assert observer.seen_only_zeros and observer.qparams().s == pytest.approx(1 / 255)
        observer(torch.tensor([0.0, 1.0]))
        assert not observer.seen_only_zeros
    assert not observed("minmax", [torch.tensor([[0.0, 0.0], [0.0, 1.0]])], axis=0).seen_only_zeros


def test_runs_in_a_graph():
    graph = fx.Graph()
    graph.output(graph.call_module("observer", (graph.placeholder("x"),)))
    module = fx.GraphModule({"observer": Histogram(SPEC, name="x")}, graph)
    module(torch.linspace(-1, 1, 50))
    assert module.observer.qparams().z == pytest.approx(127, abs=1)
    assert "uint8 affine" in repr(module.observer)


# ---- one for another


COMPATIBLE_OBSERVERS = [
    ("histogram", "minmax"),
    ("histogram", "percentile:99"),
    ("percentile:95", "percentile:99"),
    ("percentile:95", "histogram"),
    ("percentile:95", "minmax"),
    ("minmax", "minmax"),
    ("moving_average:0.2", "moving_average:0.2"),
]
INCOMPATIBLE_OBSERVERS = [
    ("minmax", "histogram"),
    ("minmax", "moving_average"),
    ("histogram", "moving_average"),
    ("moving_average:0.2", "moving_average:0.3"),
    ("moving_average", "minmax"),
]


@pytest.mark.one_in(3)
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
@pytest.mark.parametrize("seen, asked", COMPATIBLE_OBSERVERS)
def test_an_observer_answers_for_one_that_keeps_no_more(seen, asked, seed):
    noise = torch.Generator().manual_seed(seed)
    data = [torch.randn(50, generator=noise) * 10 ** float(torch.rand((), generator=noise)) for _ in range(3)]
    source, target = observer_for(TensorSpec(observer=seen)), observer_for(TensorSpec(bits=5, observer=asked), name="y")
    fresh = observer_for(TensorSpec(bits=5, observer=asked))
    for x in data:
        source(x), fresh(x)
    answer = source.answer_as(target)
    assert answer.qparams().same_as(fresh.qparams())
    assert (answer.name, answer.spec, target.seen) == ("y", target.spec, False)
    source(torch.tensor([1e4, -1e4]))
    assert answer.qparams().same_as(fresh.qparams())


@pytest.mark.parametrize("seen, asked", INCOMPATIBLE_OBSERVERS)
def test_an_observer_does_not_answer_for_one_that_looks_in_another_way(seen, asked):
    source, target = observer_for(TensorSpec(observer=seen)), observer_for(TensorSpec(observer=asked))
    source(torch.randn(9))
    assert source.answer_as(target) is None


def test_an_observer_does_not_answer_for_other_channels_or_constants():
    spec = TensorSpec(observer="minmax")
    assert observer_for(spec).answer_as(observer_for(spec, axis=0)) is None
    assert observer_for(spec).answer_as(observer_for(spec, constants=(1.0,))) is None


@pytest.mark.parametrize("method", ["clipped", "range"])
@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ((torch.tensor(2.0), torch.tensor(1.0)), r"returned 2\.0 and 1\.0, no finite range"),
        ((torch.tensor(math.nan), torch.tensor(1.0)), r"returned nan and 1\.0, no finite range"),
        ((torch.tensor(0.0), torch.tensor(math.inf)), r"returned 0\.0 and inf, no finite range"),
        (3, "returned 3, and not two tensors"),
        (None, "returned None, and not two tensors"),
        ((torch.zeros(0), torch.ones(())), r"returned tensors of the shapes \[0\] and \[\], and not \[0?\]"),
    ],
)
def test_a_range_of_the_users_that_is_none(method, returned, why):
    class Own(MinMax):
        pass

    setattr(Own, method, lambda *_: returned)
    observer = Own(TensorSpec(), name="conv1's input")
    observer(torch.randn(8))
    with pytest.raises(CalibrationError, match=rf"conv1's input: {method}\(\) of the observer '.*Own' {why}"):
        observer.qparams()


class Nothing(MinMax):
    def range(self):
        return None


def test_a_range_that_is_none_is_named_when_a_model_is_quantized():
    spec = fxq.TensorSpec(observer="tests.quant.test_observers:Nothing")
    with pytest.raises(CalibrationError, match=r"range\(\) of the observer 'Nothing' returned None"):
        fxq.quantize(nn.Sequential(nn.Linear(4, 4)).eval(), fxq.Recipe.static(activation=spec), data=[torch.rand(2, 4)])


def test_a_clipped_range_has_the_shape_of_the_range():
    class Own(MinMax):
        def clipped(self, low, high):
            return low.expand(3), high.expand(3)

    observer = Own(TensorSpec())
    observer(torch.randn(8))
    with pytest.raises(CalibrationError, match=r"returned tensors of the shapes \[3\] and \[3\], and not \[\]"):
        observer.qparams()


@pytest.mark.parametrize("base", [Histogram, Entropy])
@pytest.mark.parametrize("factor", [1.2, 3.0, 1e6])
def test_a_range_wider_than_the_histogram_names_the_observer(base, factor):
    class Wide(base):
        def range(self):
            return tuple(factor * end for end in super().range())

    class WideAfterAll(Wide):
        def clipped(self, low, high):
            return low, high

    x = torch.randn(1000)
    wide, after_all = Wide(TensorSpec()), WideAfterAll(TensorSpec())
    wide(x), after_all(x)
    with pytest.raises(CalibrationError, match=r"range\(\) of the observer .*Wide'.*wider than.*override clipped"):
        wide.qparams()
    want = factor * float(x.max() - x.min()) / 255
    assert after_all.qparams().s == pytest.approx(want, rel=1e-5)
