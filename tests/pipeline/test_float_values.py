"""Float outputs of layers are cached in calibration, so that passes that compare with them run no layer again."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxq
from fxq.common.data import Batch, first_of
from fxq.pipeline import float_values
from fxq.pipeline.float_form import FloatForm
from fxq.pipeline.float_values import CachedFloatForm, FloatValues, LayerValues


class Residual(nn.Module):
    """Units with a layer in front, a residual, in-place spellings, a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.a(x).relu_()
        z = self.b(y)
        z += y
        return self.head(z.relu_().mean((2, 3)))


class TimeFirst(nn.Module):
    """The first axis of what the layers compute is time, and there are as many steps as samples."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x.transpose(0, 1)).relu())[-1]


class Dropping(Residual):
    """Draws random numbers."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.1, training=True))


RECIPE = fxq.Recipe.static(backend="reference", optimize="coverage")


def observed(model, data, show=True, recipe=RECIPE):
    prepared = fxq.prepare(model.eval(), recipe, example_inputs=data[0])
    if show:
        return fxq.calibrate(prepared, data)
    for x in data:
        prepared(x)
    return prepared


def images(count=3, size=4):
    torch.manual_seed(0)
    return [torch.randn(size, 3, 8, 8) for _ in range(count)]


class Count(TorchDispatchMode):
    """Counts the samples that convolutions and linear layers are run on in float."""

    def __init__(self):
        super().__init__()
        self.samples = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::convolution", "aten::addmm"):
            self.samples += len(args[0] if func.name() == "aten::convolution" else args[1])
        return func(*args, **(kwargs or {}))


def floats_of(prepared):
    return prepared.manager.context.floats.of(prepared.manager.gm, prepared.manager.context)


@pytest.mark.parametrize("show", [True, False], ids=["kept", "run again"])
def test_the_values_are_those_of_the_layers(show):
    torch.manual_seed(0)
    model, data = Residual(), images()
    cached = floats_of(observed(model, data, show))
    values = list(cached.of(Batch((data[1][1:3],))).values())
    assert len(values) == 3
    x = data[1][1:3]
    y = model.a(x).relu()
    z = model.b(y)
    wanted = [model.a(x), z, model.head((z + y).relu().mean((2, 3)))]
    for got, want in zip(values, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert cached.of(Batch((data[1][1:3] + 1,))) == {}
    assert cached.of(Batch((torch.cat([data[0][3:], data[1][:1]]),))) == {}


def test_values_that_were_kept_are_those_that_are_run_again_bit_by_bit():
    torch.manual_seed(0)
    model, data = Residual(), images()
    kept, again = (fxq.convert(observed(model, data, show)) for show in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept.state_dict().values(), again.state_dict().values(), strict=True))


def test_only_what_lies_between_layers_is_computed():
    torch.manual_seed(0)
    prepared = observed(Residual(), images())
    cached, gm = floats_of(prepared), prepared.manager.gm
    batch = first_of(prepared.manager.context.samples[0], 2)
    run = CachedFloatForm(gm, batch, cached, [gm.graph.output_node()])
    with torch.no_grad(), Count() as known_runs:
        got = run.run()
    with torch.no_grad(), Count() as plain_runs:
        want = FloatForm(gm, batch).run()
    assert (known_runs.samples, plain_runs.samples) == (0, 3 * 2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_first_axis_that_holds_no_samples_is_not_cut():
    torch.manual_seed(0)
    data = [torch.randn(4, 4, 8) for _ in range(2)]
    cached = floats_of(observed(TimeFirst(), data))
    assert cached.batches and cached.of(Batch((data[0][1:3],))) == {}
    assert len(cached.of(Batch((data[0],)))) == 2


def test_nothing_is_kept_of_what_draws_random_numbers():
    data = images()
    prepared = observed(Dropping(), data)
    assert prepared.manager.context.floats.batches == []
    assert floats_of(prepared) == LayerValues()


def test_no_more_is_kept_than_fits(monkeypatch):
    model, data = Residual(), images(4)
    batch_bytes = 4 * 4 * (2 * 8 * 64 + 4)  # bytes: 4 samples of two convolutions and a linear layer
    defaults = FloatValues.__init__.__defaults__
    monkeypatch.setattr(FloatValues.__init__, "__defaults__", (2 * batch_bytes + 1, *defaults[1:]))
    prepared = observed(model, data)
    assert len(prepared.manager.context.floats.batches) == 2
    cached = floats_of(prepared)
    assert cached.of(Batch((data[1],))) and not cached.of(Batch((data[2],)))


def test_other_weights_are_another_layer():
    prepared = observed(Residual(), images())
    with torch.no_grad():
        weight = next(p for n, p in prepared.manager.gm.named_parameters() if n == "a.weight")
        before = floats_of(prepared).of(Batch((images()[0],)))
        weight.mul_(2)
        after = floats_of(prepared).of(Batch((images()[0],)))
    first = [next(iter(values.values())) for values in (before, after)]
    assert not torch.equal(*first)


@pytest.mark.slow
def test_passes_run_no_layer_again():
    """correct-bias looks at 32 samples in three layers, keep-small-values only at histograms."""
    prepared, counted = observed(Residual(), images(8)), []
    for most in (prepared.manager.context.floats.most, 0):
        prepared.manager.context.floats.most = most
        with Count() as runs:
            fxq.convert(prepared)
        counted.append(runs.samples)
    assert counted[1] - counted[0] >= 3 * 32 - 3  # a sample is run alone, to see which axis holds samples


@pytest.mark.slow
def test_conversion_frees_the_values():
    """Up to 1 GiB stayed as long as the observed model did; and a copy of it had the same cache."""
    prepared = observed(Residual(), images())
    assert prepared.manager.context.floats.batches
    cache, twin = prepared.manager.context.floats, copy.deepcopy(prepared)
    assert twin.manager.context.floats is not cache and not twin.manager.context.floats.batches
    first = fxq.convert(prepared)
    assert not cache.batches and not prepared.manager.context.floats.batches
    x = images()[0]
    for again in (fxq.convert(prepared), fxq.convert(prepared, RECIPE), fxq.convert(twin)):
        assert torch.equal(first(x), again(x))


def test_weights_written_through_data_are_other_weights():
    """`weight.data.mul_(2)` raises no version, so that convert corrected biases by the outputs of the old weights."""
    model, data = Residual().eval(), images()
    prepared = observed(model, data)
    model.b.weight.data.mul_(2)
    *_, output = floats_of(prepared).of(Batch((data[1],))).values()
    with torch.no_grad():
        torch.testing.assert_close(output, model(data[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("free", "wanted"),
    [(None, 2**28), (0, 2**28), (2**30, 2**28), (2**32, 2**29), (2**40, 2**30)],
)
def test_the_size_of_the_cache_follows_the_free_memory(monkeypatch, free, wanted):
    monkeypatch.setattr(float_values, "free_bytes", lambda: free)
    assert FloatValues().most == wanted
