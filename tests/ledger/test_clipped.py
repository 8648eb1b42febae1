"""Counts of clipped values: equal to those of numpy, on every backend, in parts and in programs."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import fxq
from tests.programs.test_quantized_programs import EXAMPLE, KeyCache, decoder, tokens

pytestmark = pytest.mark.filterwarnings("ignore::fxq.FxqWarning")


class Branching(nn.Module):
    """Model with a branch on values, so that it is quantized in parts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.last = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        y = self.first(x)
        return self.last(y if float(y.mean()) > 0 else -y)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def samples(scale=1.0):
    return [scale * torch.randn(64, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def quantized(backend):
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=fxq.TensorSpec(observer="minmax"))
    return fxq.quantize(layers(), recipe, data=samples())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["reference", "x86", "jit"])
def test_the_counts_are_those_of_numpy(backend):
    qmodel, data = quantized(backend), samples(1.5)
    table = qmodel.clipped(data)
    first = table[0]
    x, seen = torch.cat(data).numpy(), torch.cat(samples()).numpy()
    low, high = seen.min(), seen.max()  # the range of a minmax observer
    step = (high - low) / 255
    below, above = (x < low - step).mean(), (x > high + step).mean()  # rounding may move an end by half a step
    assert first.values == x.size and first.name == "input" and 0 < below <= first.below < below + 0.005
    assert 0 < above <= first.above < above + 0.005 and first.share == first.below + first.above
    assert first.reach == pytest.approx(max(low - x.min(), x.max() - high) / (high - low), abs=2 / 255)
    assert table.batches == 3 and table.dynamic == 0 and table.worst.share >= first.share
    assert len(table) == 2 and np.isclose(table.share, np.average([r.share for r in table], weights=[512, 1024]))
    assert "clipped" in str(table) and "most at" in str(table)
    assert qmodel.clipped(samples()).share == 0 and "none anywhere" in str(qmodel.clipped(samples()))


def test_a_loaded_model_counts_as_the_saved_one(tmp_path):
    qmodel = quantized("x86")
    assert fxq.load(qmodel.save(tmp_path / "m.fxq")).clipped(samples(2)) == qmodel.clipped(samples(2))


def test_no_hook_stays():
    qmodel = quantized("reference")
    qmodel.clipped(samples())
    with pytest.raises(fxq.InputError, match="batch 1"):
        qmodel.clipped([samples()[0], torch.zeros(3, 5)])
    assert not qmodel._forward_hooks and not qmodel._forward_pre_hooks


def test_dynamic_ranges_clip_nothing():
    qmodel = fxq.quantize(layers(), fxq.Recipe.dynamic(backend="reference"), example_inputs=samples()[0])
    table = qmodel.clipped(samples(100))
    assert len(table) == 0 and table.dynamic == 2 and table.share == 0 and table.worst is None
    assert "nothing is clipped: no grid has a fixed range (2 have ranges computed at run time)" in str(table)


def test_the_grids_of_parts():
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    qmodel = fxq.quantize(Branching().eval(), recipe, data=samples())
    table = qmodel.clipped(samples(3))
    assert {row.name.partition(":")[0] for row in table} == set(qmodel.parts) == {"first", "last"}
    assert table[0].share > 0.1 and all(row.values for row in table)


@pytest.mark.slow
def test_the_grids_of_programs():
    calls = [EXAMPLE, {**EXAMPLE, "with_cache": True}]
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    qmodel = fxq.quantize(decoder(), recipe, example_inputs=calls, data=calls)
    far = {"ids": tokens(2, 1), "cache": KeyCache(100 * torch.randn(2, 5, 16))}
    table = qmodel.clipped([far])
    assert {row.name.partition(":")[0] for row in table} == set(qmodel.programs)
    served = [row for row in table if row.name.startswith("program_0")]
    assert max(row.share for row in served) > 0.5
    assert all(row.values == 0 for row in table if row not in served)  # the other program ran on no batch
    assert far["cache"].keys.shape == (2, 6, 16)  # the call changes its cache, as any call


@pytest.mark.slow
def test_calls_of_other_threads_do_not_count():
    model, data = layers(), [torch.randn(16, 8) for _ in range(4)]
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=data)
    counts, output = qmodel.clipped(data), qmodel(data[0])

    def call(i):
        return torch.equal(qmodel(data[0]), output) if i % 2 else qmodel.clipped(data) == counts

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))
