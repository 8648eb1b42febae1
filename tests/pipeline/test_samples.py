"""Which calibration inputs are kept for passes."""

from dataclasses import dataclass

import torch
from torch import nn

import fxq
from fxq.pipeline.samples import BATCHES, SAMPLES
from tests.support.helpers import PLAIN

X = torch.rand(2, 3, 8, 8)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def test_as_many_samples_of_each_batch_are_kept():
    observed = fxq.prepare(network(), PLAIN, example_inputs=X)
    batches = [torch.rand(7, 3, 8, 8) for _ in range(BATCHES)]
    for batch in batches:
        observed(batch)
    observed(X)
    kept = [sample.args[0] for sample in observed.manager.context.samples]
    assert len(kept) == BATCHES
    for batch, sample in zip(batches, kept, strict=True):
        assert torch.equal(sample, batch[: SAMPLES // BATCHES])


def test_of_batches_of_one_sample_more_are_kept():
    observed = fxq.prepare(network(), PLAIN, example_inputs=X)
    for _ in range(SAMPLES + 3):
        observed(X[:1])
    assert len(observed.manager.context.samples) == SAMPLES


def test_no_fewer_of_each_are_kept_of_more_batches():
    """So what is kept of the first batches does not depend on how many there are."""
    observed = fxq.prepare(network(), PLAIN, example_inputs=X)
    for _ in range(SAMPLES):
        observed(torch.rand(3, 3, 8, 8))
    sizes = [len(sample.args[0]) for sample in observed.manager.context.samples]
    assert sizes == [3] * 11 and sum(sizes[:-1]) < SAMPLES


def test_a_pass_may_ask_for_more_samples():
    @dataclass(frozen=True)
    class Reads(fxq.Pass):
        """Nothing is changed."""

        name = "reads"
        needs = gives = fxq.extend.Stage.QDQ

        @property
        def samples_read(self):
            return 2 * SAMPLES

        def run(self, rewriter):
            assert sum(len(batch.args[0]) for batch in rewriter.context.samples) == 2 * SAMPLES

    recipe = PLAIN.insert_pass(Reads(), after="insert-qdq")
    fxq.quantize(network(), recipe, data=[torch.rand(2, 3, 8, 8) for _ in range(3 * SAMPLES)])
