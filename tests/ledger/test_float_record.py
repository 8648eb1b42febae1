"""Record of the float model in a quantized model: distributions, inputs, size, and a weak reference to it."""

import copy
import gc
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.checksums import MAX_CHECKSUM_VALUES
from fxq.common.data import Batch
from fxq.common.metrics import nbytes
from fxq.ledger.float_record import BINS, Distribution, RecordedInput, checksums, distribution
from fxq.quant.qparams import QParams
from tests.support.helpers import PLAIN, module

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


# ---- distributions


@pytest.mark.slow
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=300))
def test_the_counts_are_those_of_equal_bins(values):
    exact = np.array(values, dtype=np.float64)
    summary = distribution(torch.tensor(values))
    assert (summary.low, summary.high) == (exact.min(), exact.max())
    assert len(summary.counts) == BINS and sum(summary.counts) == len(values)
    if summary.high > summary.low:
        inner = np.linspace(summary.low, summary.high, BINS + 1)[1:-1]
        apart = np.abs(exact[:, None] - inner[None]).min() > 1e-9 * (summary.high - summary.low)
        assume(apart)  # a value at an edge may go to either side of it
        assert list(summary.counts) == np.histogram(exact, BINS)[0].tolist()


def test_values_outside_of_the_grid():
    grid = QParams.per_tensor(0.5, 2, 0, 10)  # -1 to 4
    summary = distribution(torch.tensor([-2.0, -1.2, -1.0, 0.0, 4.2, 4.3, 9.0, 100.0]), grid)
    assert summary.clip == (-1.0, 4.0)
    assert summary.outside == 4 / 8  # -2, 4.3, 9 and 100: 4.2 is rounded to 4, and so is what it comes back as
    assert distribution(torch.tensor([1.0, 2.0])).clip is None


def test_a_constant_and_nothing():
    summary = distribution(torch.full((5,), 3.0))
    assert (summary.low, summary.high, summary.counts[0]) == (3.0, 3.0, 5)
    assert distribution(torch.empty(0)) is None
    assert distribution(torch.tensor([1, 2])) is None
    assert distribution((torch.ones(2), torch.ones(2))) is None


def test_what_is_not_finite_is_left_out():
    summary = distribution(torch.tensor([math.nan, 1.0, -math.inf, 2.0, math.inf]))
    assert (summary.low, summary.high, sum(summary.counts)) == (1.0, 2.0, 2)
    assert distribution(torch.tensor([math.nan, math.inf])) is None


def test_the_largest_floats_do_not_overflow():
    summary = distribution(torch.tensor([-3e38, 0.0, 3e38]))
    assert (summary.counts[0], summary.counts[BINS // 2], summary.counts[-1]) == (1, 1, 1)


@pytest.mark.parametrize("shape", [(1, 64, 112, 112), (4, 256, 28, 28), (1, 100_003), (2, 512, 512)])
def test_of_a_large_tensor_some_are_looked_at_from_all_channels(shape):
    channel = torch.arange(shape[1], dtype=torch.float32).reshape(1, -1, *[1] * (len(shape) - 2))
    value = channel.expand(shape).contiguous()
    summary = distribution(value)
    assert MAX_CHECKSUM_VALUES / 2 < sum(summary.counts) <= MAX_CHECKSUM_VALUES
    assert (summary.low, summary.high) == (0.0, shape[1] - 1)
    even = sum(summary.counts) / BINS
    if shape[1] % BINS == 0:
        assert all(0.9 * even < count < 1.1 * even for count in summary.counts)


def test_half_precision_and_strides():
    value = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    assert distribution(value.half()) == distribution(value) == distribution(torch.arange(24.0))


# ---- of a model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def qmodel():
    return fxq.quantize(net(), PLAIN, data=[X])


def test_every_op_has_the_distribution_of_its_float_value(qmodel):
    model = net()
    with torch.no_grad():
        conv = model.conv(X)
        norm = model.norm(conv)
        values = {"conv": conv, "norm": norm, "relu": torch.relu(norm), "mean": torch.relu(norm).mean((2, 3))}
        values["head"] = model(X)
    assert set(qmodel.record.values) == set(values) == {e.name for e in qmodel.ledger}
    for name, value in values.items():
        stored = qmodel.record.values[name]
        assert (stored.low, stored.high) == pytest.approx((float(value.min()), float(value.max())), rel=1e-5, abs=1e-6)
        assert sum(stored.counts) == value.numel()


def test_the_clip_is_that_of_the_node_that_hands_the_value_on(qmodel):
    values = qmodel.record.values
    head = qmodel.qparams()["head"]
    scale, zero = float(head.input_scale), int(head.input_zero_point)
    assert values["mean"].clip == pytest.approx((-zero * scale, (255 - zero) * scale))
    assert values["relu"].clip[0] == 0.0 and values["relu"].outside == 0.0
    assert values["conv"].clip is None  # inside a unit
    assert values["head"].clip is None  # the model returns float


def test_a_convolution_that_ends_its_unit_shows_the_value_after_its_norm():
    model = module(lambda self, x: self.conv2(self.norm(self.conv(x))), **dict(net().named_children()))
    model.conv2 = nn.Conv2d(4, 2, 1).eval()
    values = fxq.quantize(model, PLAIN, data=[X]).record.values
    assert values["conv"] == values["norm"] and values["conv"].clip is not None
    with torch.no_grad():
        assert values["conv"].high == pytest.approx(float(model.norm(model.conv(X)).max()), rel=1e-5)


def test_values_that_are_clipped_count():
    """A few large values that 16 steps are not spent on."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0)) ** 3
    recipe = fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(bits=4)).without_pass("smooth")
    observed = fxq.prepare(model, recipe, example_inputs=x)
    for part in x.split(4):  # of the first eight calls, four samples each are kept
        observed(part)
    observed.manager.context.samples[0] = Batch((x,))
    stored = fxq.convert(observed).record.values["_1"]
    with torch.no_grad():
        value = torch.relu(model[0](x))
    low, high = stored.clip
    step = (high - low) / 15
    assert high < stored.high == pytest.approx(float(value.max()), rel=1e-5)
    assert (
        stored.outside == pytest.approx(float((value > high + step / 2).double().mean()), abs=1e-3) and stored.outside
    )


def test_inputs_and_size(qmodel):
    assert qmodel.record.inputs == (RecordedInput("", (2, 3, 8, 8), torch.float32),)
    assert qmodel.record.float_bytes == nbytes(net()) == 4 * (12 + 4 + 4 * 4 + 20 + 5) + 8  # and a batch counter

    def forward(self, x, mask=None, *, scale=1.0):
        return self.a(x) * scale

    model = module(forward, a=nn.Linear(4, 2))
    example = {"x": torch.randn(3, 4), "mask": torch.ones(3, dtype=torch.int64), "scale": 2.0}
    inputs = fxq.quantize(model, PLAIN, data=[example]).record.inputs
    assert inputs == (
        RecordedInput("x", (3, 4), torch.float32),
        RecordedInput("mask", (3,), torch.int64),
        RecordedInput("scale", kind="plain", value=2.0),
    )


def test_parts_of_containers():
    model = module(lambda self, batch: self.a(batch["x"][0]), a=nn.Linear(4, 2))
    (recorded,) = fxq.quantize(model, PLAIN, data=[({"x": [torch.randn(3, 4), None]},)]).record.inputs
    inside = RecordedInput("", (3, 4), torch.float32), RecordedInput("", kind="plain")
    assert recorded == RecordedInput("", kind="dict", parts=(RecordedInput("x", kind="list", parts=inside),))


def test_a_shared_parameter_counts_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert nbytes(model) == 64


def test_copies_keep_the_record_and_hold_no_activations(qmodel):
    for duplicate in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert duplicate.record == qmodel.record
    assert isinstance(qmodel.record.values["relu"], Distribution)
    assert len(pickle.dumps(qmodel.record)) < 500 * len(qmodel.ledger)


# ---- the float model


def test_the_float_model_is_known_while_the_user_keeps_it():
    model = net()
    qmodel = fxq.quantize(model, PLAIN, data=[X])
    assert qmodel.float_model is model
    assert copy.deepcopy(qmodel).float_model is None
    assert pickle.loads(pickle.dumps(qmodel)).float_model is None
    del model
    gc.collect()
    assert qmodel.float_model is None


def test_checksums_of_odd_parameters():
    model = nn.ParameterDict(
        {"empty": torch.zeros(0, 3), "short": torch.ones(2, dtype=torch.bfloat16), "one": torch.tensor(1.0)}
    )
    assert set(checksums(model)) == {"empty", "short", "one"}
    assert checksums(model) == checksums(copy.deepcopy(model))
