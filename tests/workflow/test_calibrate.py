"""Calibration on several ranks: the same, bit for bit, as one process that sees all of the data; files of machines."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import engine
from fxq.calibration.calibration_state import observers_of
from fxq.errors import CalibrationError, FxqError, InputError
from tests.support.calibrations import (
    SHARES,
    calibrated,
    data,
    in_turns,
    network,
    other_weights,
    prepared,
    recipe,
    same,
    seen,
    whole,
)
from tests.support.helpers import module
from tests.support.processes import dying, killed, on_ranks

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).parents[2]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("observer", ["minmax", "histogram", "percentile:99.5", "entropy"])
def test_two_ranks_see_what_one_process_sees(tmp_path, observer):
    batches = data()

    def work(rank):
        observed = fxq.calibrate(prepared(observer), batches[rank::2])
        qmodel = fxq.convert(observed)
        return seen(observed), qmodel.code, dict(qmodel.state_dict()), qmodel(batches[0])

    first, second = on_ranks(2, tmp_path, work)
    observed = fxq.calibrate(prepared(observer), batches)
    qmodel = fxq.convert(observed)
    assert same(first, (seen(observed), qmodel.code, dict(qmodel.state_dict()), qmodel(batches[0])))
    assert same(second, first)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_any_size(tmp_path, name):
    shares = SHARES[name]
    results = on_ranks(3, tmp_path, lambda rank: seen(fxq.calibrate(prepared(), shares[rank])))
    want = whole(in_turns(shares))
    assert all(same(result, want) for result in results)


def test_quantize_takes_the_first_batch_there_is_for_an_example(tmp_path):
    shares = [[], data(6, 4), data(5, 2)]

    def work(rank):
        qmodel = fxq.quantize(network(), recipe(), data=iter(shares[rank]))
        return qmodel.code, dict(qmodel.state_dict()), qmodel.record.inputs[0].shape

    results = on_ranks(3, tmp_path, work)
    qmodel = fxq.quantize(network(), recipe(), data=in_turns(shares))
    want = qmodel.code, dict(qmodel.state_dict()), qmodel.record.inputs[0].shape
    assert all(same(result, want) for result in results) and want[2][0] == 4


@pytest.mark.slow
def test_a_recipe_that_calibrates_nothing_reads_the_same_samples(tmp_path):
    batches = data(40, 2)
    chosen = fxq.Recipe.weight_only(bits=4, backend="reference").insert_pass(fxq.passes.Gptq(), after="smooth")

    def quantized(batches):
        qmodel = fxq.quantize(network(), chosen, data=batches)
        return qmodel.code, dict(qmodel.state_dict())

    results = on_ranks(2, tmp_path, lambda rank: quantized(batches[rank::2]))
    assert same(results, [quantized(batches)] * 2)


def test_a_moving_average_is_the_mean_weighted_by_batches(tmp_path):
    batches = data(5)
    results = on_ranks(2, tmp_path, lambda rank: seen(fxq.calibrate(prepared("moving_average"), batches[rank::2])))
    assert same(results[0], results[1])
    alone = [whole(batches[rank::2], "moving_average")[0][0] for rank in range(2)]
    for name, (buffers, *_) in results[0][0][0].items():
        (first, *_), (second, *_) = alone[0][name], alone[1][name]
        want = (3 * first["maximum"] + 2 * second["maximum"]) / 5
        torch.testing.assert_close(buffers["maximum"], want)  # float32: 1.3e-6 relative
        assert int(buffers["batches"]) == 5


def test_every_backend_sees_the_data_of_all_ranks(tmp_path, monkeypatch):
    """Without engines: threads of one that ran before would not be in the processes, which are forked."""
    monkeypatch.setattr(engine, "find_spec", lambda package: None)
    batches, fastest = data(), fxq.Recipe.static(backend="fastest", optimize="coverage")
    results = on_ranks(
        2,
        tmp_path,
        lambda rank: seen(fxq.calibrate(fxq.prepare(network(), fastest, example_inputs=batches[0]), batches[rank::2])),
    )
    observed = fxq.calibrate(fxq.prepare(network(), fastest, example_inputs=batches[0]), batches)
    assert observed.others is not None and same(results, [seen(observed)] * 2)


def test_values_that_are_taken_off_on_one_rank_are_on_all(tmp_path):
    """With trials, an observer that meets NaN is removed: whether its value becomes integers is decided later."""
    model = module(lambda self, x: self.fc(torch.nan_to_num(torch.log(x), nan=0.0)), fc=nn.Linear(4, 4))
    batches = [torch.rand(2, 4) + 1, torch.rand(2, 4) + 1, torch.rand(2, 4) + 1, -torch.ones(2, 4)]

    def observed():
        return fxq.prepare(model, recipe(), example_inputs=batches[0], observe_all=True)

    results = on_ranks(2, tmp_path, lambda rank: seen(fxq.calibrate(observed(), batches[rank::2])))
    want = fxq.calibrate(observed(), batches)
    assert len(observers_of(want)) < len(observers_of(observed()))
    assert same(results, [seen(want)] * 2)


def test_a_rank_may_work_alone(tmp_path):
    batches = data()

    def work(rank):
        return seen(fxq.calibrate(prepared(), batches[:3], group=None)) if rank == 0 else None

    assert same(on_ranks(2, tmp_path, work)[0], whole(batches[:3]))


def broken_data(rank):
    def batches():
        yield from data(2)
        if rank == 1:
            raise OSError("the disk is full of sand")
        yield from data(3)

    return prepared(), batches()


FAILURES = {
    "NaN": (
        lambda rank: (prepared(), [*data(2), data()[0] * (float("nan") if rank == 1 else 1.0)]),
        CalibrationError,
        "rank 1: data, batch 2: input 0 float32[3, 3, 8, 8] holds NaN or Inf",
    ),
    "a shape that the model rejects": (
        lambda rank: (prepared(), [*data(2), torch.rand(1, 3, 8, 8 + rank)]),
        InputError,
        "rank 1: data, batch 2 (float32[1, 3, 8, 9]): the model does not run on it",
    ),
    "the user's loader": (broken_data, CalibrationError, "rank 1: OSError: the disk is full of sand"),
    "no batches": (lambda rank: (prepared(), []), InputError, "data is empty"),
    "data on none": (lambda rank: (prepared(), 3 if rank else data()), InputError, "rank 1: data is a int"),
    "another recipe": (
        lambda rank: (prepared("minmax" if rank else "histogram"), data()),
        InputError,
        "rank 1 calibrates another model or recipe than rank 0: the recipe observes other values, or with other "
        "observers",
    ),
    "other weights": (
        lambda rank: (prepared(model=network() if rank else other_weights()), data()),
        InputError,
        "rank 1 calibrates another model or recipe than rank 0: the model has other weights",
    ),
    "another model": (
        lambda rank: (prepared(model=network() if rank else network().append(nn.ReLU())), data()),
        InputError,
        "rank 1 calibrates another model or recipe than rank 0: the model computes something else",
    ),
    "data that was seen before": (
        lambda rank: (fxq.calibrate(prepared(), data(rank), group=None) if rank else prepared(), data()),
        InputError,
        "rank 1: the model has already seen 1 batches",
    ),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_on_one_rank_fails_on_all(tmp_path, name):
    make, kind, words = FAILURES[name]
    for raised in on_ranks(2, tmp_path, lambda rank: fxq.calibrate(*make(rank)) and None):
        assert type(raised) is kind
        assert words in str(raised)


def test_a_model_that_cannot_be_quantized_on_one_rank(tmp_path):
    def work(rank):
        model = network() if rank else module(lambda self, x: x if x.sum() > 0 else -x)
        return fxq.quantize(model, recipe(), data=data())

    for raised in on_ranks(2, tmp_path, work):
        assert isinstance(raised, FxqError) and str(raised).startswith("rank 0: ")


SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
import fxq
from tests.workflow.test_calibrate import data, prepared, seen
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.save(seen(fxq.calibrate(prepared(), data()[rank::size])), {out!r} + str(rank))
dist.destroy_process_group()
"""


@pytest.mark.slow  # `test_two_ranks_see_what_one_process_sees` has the same ranks in forks, which import nothing
def test_under_torchrun(tmp_path):
    script, out = tmp_path / "script.py", str(tmp_path / "out")
    script.write_text(SCRIPT.format(root=str(ROOT), out=out), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = [torch.load(f"{out}{rank}", weights_only=False) for rank in range(2)]
    assert same(loaded, [whole(data())] * 2)


# ---- files of several machines


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SHARES)
def test_files_are_merged(tmp_path, name):
    shares = [share for share in SHARES[name] if share]
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(shares))]
    for path, share in zip(paths, shares, strict=True):
        calibrated(path, share)
    merged = fxq.merge_calibrations(prepared(), paths)
    assert same(seen(merged), whole(in_turns(shares)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fxq.convert(merged).ledger.count("int8")


def test_what_cannot_be_merged(tmp_path):
    path, half, batches = tmp_path / "c.safetensors", tmp_path / "half.safetensors", data()
    calibrated(path, batches)
    killed(lambda: calibrated(half, dying(batches, 4)))
    for paths, words in (
        ([path, half], "half.safetensors is of a calibration that is not finished: it has seen 4 batches"),
        ([path, tmp_path / "." / "c.safetensors"], "c.safetensors twice"),
        ([], "checkpoints is empty"),
        (str(path), "give a list of paths"),
        ([tmp_path / "none"], "cannot read .*none: No such file"),
        ([3], "named by a str or a path"),
    ):
        with pytest.raises(InputError, match=words):
            fxq.merge_calibrations(prepared(), paths)
    with pytest.raises(InputError, match="is of another model or recipe"):
        fxq.merge_calibrations(prepared("minmax"), [path])
    with pytest.raises(InputError, match="has already seen 2 batches"):
        fxq.merge_calibrations(fxq.calibrate(prepared(), batches[:2]), [path])
    with pytest.raises(InputError, match="not a Sequential"):
        fxq.merge_calibrations(network(), [path])
