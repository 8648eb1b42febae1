"""State of a calibration as data: of which model it is, and which samples of several shares are recorded."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.calibration.calibration_state import (
    batches_from,
    difference,
    fingerprint,
    in_turns,
    keep_in_turns,
    part_of,
    restore,
    samples_as_data,
    seen_by,
    sizes_of,
)
from fxq.common.data import Batch
from fxq.common.stored_data import pack, unpack
from fxq.pipeline.samples import has_enough, record
from tests.support.calibrations import data, network, other_weights, prepared, same, seen
from tests.support.helpers import PLAIN, context

pytestmark = pytest.mark.any_cpu


def printed(observed):
    return [fingerprint(observed, observed.manager.context)]


def test_a_model_is_told_from_others():
    ours = printed(prepared())
    assert difference(ours, printed(prepared())) is None
    assert difference(ours, printed(fxq.calibrate(prepared(), data()))) is None
    norm = network().insert(1, nn.BatchNorm2d(8)).eval()
    with_norm = network().insert(1, nn.BatchNorm2d(8)).eval()
    with_norm[1].running_mean.fill_(0.1)
    strided = network()
    strided[0].stride = (1, 2)
    strided[4] = nn.Linear(96, 4)
    assert "other weights" in difference(ours, printed(prepared(model=other_weights())))
    assert "other weights" in difference(printed(prepared(model=norm)), printed(prepared(model=with_norm)))
    assert "computes something else" in difference(ours, printed(prepared(model=strided)))
    assert "observes other values" in difference(ours, printed(prepared("percentile:99")))
    assert "graphs for 2 backends, not for 1" in difference(ours * 2, ours)


def test_a_state_is_taken_over_by_a_fresh_model():
    observed = fxq.calibrate(prepared(), data())
    stored = unpack(pack(seen_by(observed, observed.manager.context)))
    fresh = fxq.calibrate(prepared(), [batch * 100 for batch in data()])
    restore(fresh, fresh.manager.context, stored)
    assert same(seen(fresh), seen(observed))
    fresh(data()[0])
    observed(data()[0])
    assert same(seen(fresh), seen(observed))


def test_in_turns():
    assert list(in_turns([])) == list(in_turns([[], []])) == []
    assert list(in_turns([[None, 0], [], [1, 2, 3]])) == [None, 1, 0, 2, 3]


SIZE = st.integers(1, 6) | st.integers(0, 40) | st.none()
SIZES = st.lists(SIZE, max_size=30) | st.builds(lambda size, count: [size] * count, SIZE, st.integers(0, 40))


@pytest.mark.slow
@settings(deadline=None, max_examples=45)
@given(st.lists(SIZES, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_the_samples_of_all_shares_are_those_of_one_process(shares, divisible, few):
    """Whatever sizes batches have; `None`: one whose tensors have no first axis in common."""
    number = iter(range(10**6))

    def batch(size):
        if size is None:
            return Batch((torch.tensor(float(next(number))), torch.zeros(2), torch.zeros(3)))
        return Batch((torch.arange(size) + 100 * next(number),), {"y": {"z": torch.zeros(size, 2)}})

    given_batches = [[batch(size) for size in share] for share in shares]
    own_context = replace(context(network(), data()[0], recipe=PLAIN), divisible=divisible)

    def shown(batches):
        shown_context = replace(own_context, samples=[])
        for given_batch in batches:
            if not (few and has_enough(shown_context)):
                record(shown_context, given_batch)
        return shown_context.samples

    whole = [{"samples": samples_as_data(shown(share))} for share in given_batches]
    sizes = [sizes_of(state) for state in whole]
    parts = [part_of(state, sizes, share, own_context, few) for share, state in enumerate(whole)]
    merged = replace(own_context, samples=[])
    keep_in_turns(merged, [batches_from(part["samples"]) for part in parts], few)
    want = shown(in_turns(given_batches))
    assert same(samples_as_data(merged.samples), samples_as_data(want))
    # nothing is sent that is not kept
    assert sum(len(part["samples"]) for part in parts) == len(want)
