"""Calibration on several ranks and with checkpoints: the same, bit for bit, as one process that sees all of the data."""

import os
import subprocess
import sys
import time
import warnings
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

import fxq
from fxq.calibration import _graphs
from fxq.errors import CalibrationError, FxqError, InputError
from fxq.pipeline.calibration_state import observers_of
from tests.helpers import module
from tests.processes import die, dying, killed, on_ranks

ROOT = Path(__file__).parents[1]


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*layers).eval()


def data(count=11, size=3):
    """Batches of growing range, so that each of them counts."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 8, 8, generator=made) * (i + 1) for i in range(count)]


def recipe(observer="histogram", **options):
    activation = fxq.TensorSpec(observer=observer)
    return fxq.Recipe.static(activation=activation, backend="reference", optimize="coverage", **options)


def prepared(observer="histogram", model=None, **options):
    return fxq.prepare(model or network(), recipe(observer), data()[0], **options)


def seen(observed):
    """All that calibration leaves in a model."""
    found = []
    for one in _graphs(observed):
        states = {
            name: (dict(observer.named_buffers()), observer.constants, observer.block, observer.met_empty)
            for name, observer in observers_of(one).items()
        }
        found.append((states, [(b.args, dict(b.kwargs)) for b in one.manager.context.samples], one.batches_seen))
    return found


def same(a, b):
    """Whether nested values are the same, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def whole(batches, observer="histogram"):
    """What one process has seen of all of the batches."""
    return seen(fxq.calibrate(prepared(observer), batches))


def in_turns(shares):
    return [share[i] for i in range(max(map(len, shares))) for share in shares if i < len(share)]


# ---- ranks


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


SHARES = {
    "unequal": [data(9)[:5], data(9)[5:6], data(9)[6:]],
    "one rank has nothing": [[], data(9)[:4], data(9)[4:]],
    "all on one": [[], [], data(9)],
    "batches of all sizes": [[data(3, size)[2] for size in sizes] for sizes in ([7, 1, 1, 30], [1] * 40, [2, 33, 4])],
}


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


def test_a_recipe_that_calibrates_nothing_reads_the_same_samples(tmp_path):
    batches = data(40, 2)
    chosen = fxq.Recipe.weight_only(bits=4, backend="reference").insert_pass(fxq.passes.Gptq(), after="smooth")

    def quantized(given):
        qmodel = fxq.quantize(network(), chosen, data=given)
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


def test_every_backend_sees_the_data_of_all_ranks(tmp_path):
    batches, fastest = data(), fxq.Recipe.static(backend="fastest", optimize="coverage")
    results = on_ranks(
        2, tmp_path, lambda rank: seen(fxq.calibrate(fxq.prepare(network(), fastest, batches[0]), batches[rank::2]))
    )
    observed = fxq.calibrate(fxq.prepare(network(), fastest, batches[0]), batches)
    assert observed.others is not None and same(results, [seen(observed)] * 2)


def test_values_that_are_taken_off_on_one_rank_are_on_all(tmp_path):
    """With trials, an observer that meets NaN is taken off: nobody knows yet whether its value is to be integers."""
    model = module(lambda self, x: self.fc(torch.nan_to_num(torch.log(x), nan=0.0)), fc=nn.Linear(4, 4))
    batches = [torch.rand(2, 4) + 1, torch.rand(2, 4) + 1, torch.rand(2, 4) + 1, -torch.ones(2, 4)]

    def observed():
        return fxq.prepare(model, recipe(), batches[0], trials=True)

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
        "rank 1 calibrates another model or recipe than rank 0: the recipe looks at other values, or in another way",
    ),
    "other weights": (
        lambda rank: (prepared(model=network() if rank else module_with_other_weights()), data()),
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
        "rank 1: the model has seen 1 batches already",
    ),
}


def module_with_other_weights():
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] += 1
    return model


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
from tests.test_calibration import data, prepared, seen
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.save(seen(fxq.calibrate(prepared(), data()[rank::size])), {out!r} + str(rank))
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path):
    script, out = tmp_path / "script.py", str(tmp_path / "out")
    script.write_text(SCRIPT.format(root=str(ROOT), out=out), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = [torch.load(f"{out}{rank}", weights_only=False) for rank in range(2)]
    assert same(found, [whole(data())] * 2)


# ---- checkpoints


def calibrated(path, batches, observer="histogram", **options):
    return fxq.calibrate(prepared(observer), batches, checkpoint=path, every=0, **options)


@pytest.mark.parametrize("observer", ["minmax", "histogram", "percentile:99.5", "moving_average"])
def test_killed_at_a_batch_and_resumed(tmp_path, observer):
    path, batches = tmp_path / "c.safetensors", data()
    at = int(torch.randint(len(batches) + 1, ()))
    killed(lambda: calibrated(path, chain(dying(batches, at), (die() for _ in range(1))), observer))
    shown = []
    observed = calibrated(path, map(lambda b: shown.append(b) or b, batches), observer)
    assert same(seen(observed), whole(batches, observer))
    assert len(shown) == len(batches)


def test_killed_at_any_moment_and_resumed(tmp_path):
    """Also while the file is being written."""
    path, batches = tmp_path / "c.safetensors", data(400, 1)
    want = whole(batches)
    observed = prepared()
    for _ in range(8):
        killed(
            lambda: [fxq.calibrate(observed, batches, checkpoint=path, every=0), time.sleep(60)],
            behind=0.1 + float(torch.rand(())) * 0.3,
        )
    assert same(seen(fxq.calibrate(observed, batches, checkpoint=path)), want)


def test_what_was_seen_is_not_shown_again(tmp_path):
    path, batches = tmp_path / "c.safetensors", data(6)
    killed(lambda: calibrated(path, dying(batches, 4)))
    calls, observed = [], prepared()
    observed.register_forward_pre_hook(lambda *_: calls.append(1))
    fxq.calibrate(observed, batches, checkpoint=path)
    assert len(calls) == 2


@pytest.mark.parametrize("every", [0, 1e9])
def test_a_file_is_written_every_so_often(tmp_path, every):
    path, batches = tmp_path / "c.safetensors", data(5)
    killed(lambda: fxq.calibrate(prepared(), dying(batches, 4), checkpoint=path, every=every))
    calls, observed = [], prepared()
    observed.register_forward_pre_hook(lambda *_: calls.append(1))
    fxq.calibrate(observed, batches, checkpoint=path)
    assert len(calls) == (1 if every == 0 else 5)


def test_a_complete_file_is_loaded_and_no_more(tmp_path):
    path, batches = tmp_path / "c.safetensors", data()
    first = calibrated(path, batches)
    written = path.stat().st_mtime_ns

    def once():
        yield batches[0]
        raise AssertionError("no more than the first batch is looked at")

    for observed in (prepared(), first):  # another process; the same cell of a notebook again
        assert same(seen(fxq.calibrate(observed, once(), checkpoint=path)), whole(batches))
    assert path.stat().st_mtime_ns == written
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_quantize_goes_on_too(tmp_path):
    path, batches = tmp_path / "c.safetensors", data()
    killed(lambda: fxq.quantize(network(), recipe(), data=dying(batches, 7), checkpoint=path))
    assert path.exists()
    for _ in range(2):
        qmodel = fxq.quantize(network(), recipe(), data=batches, checkpoint=path)
        want = fxq.quantize(network(), recipe(), data=batches)
        assert same(dict(qmodel.state_dict()), dict(want.state_dict())) and qmodel.code == want.code


def test_after_an_error_the_same_model_goes_on(tmp_path):
    path, batches, observed = tmp_path / "c.safetensors", data(), prepared()
    broken = [*batches[:5], batches[5] * float("inf"), *batches[6:]]
    with pytest.raises(CalibrationError, match="batch 5"):
        fxq.calibrate(observed, broken, checkpoint=path, every=0)
    assert same(seen(fxq.calibrate(observed, batches, checkpoint=path)), whole(batches))


def test_ranks_that_were_killed_go_on_each_from_its_own_file(tmp_path):
    path, batches = tmp_path / "c.safetensors", data()

    def work(rank, at):
        return seen(calibrated(path, dying(batches[rank::2], at if rank else None)))

    with pytest.raises((AssertionError, FileNotFoundError)):  # the first waits for the other one, and ends
        on_ranks(2, tmp_path / "first", lambda rank: work(rank, 3), seconds=4)
    assert sorted(p.name for p in tmp_path.glob("c*")) == ["c.rank0.safetensors", "c.rank1.safetensors"]
    results = on_ranks(2, tmp_path / "again", lambda rank: work(rank, None))
    assert same(results, [whole(batches)] * 2)
    results = on_ranks(2, tmp_path / "complete", lambda rank: work(rank, None))
    assert same(results, [whole(batches)] * 2)


def test_a_file_of_another_share_is_refused(tmp_path):
    path, batches = tmp_path / "c.safetensors", data()
    on_ranks(2, tmp_path / "two", lambda rank: calibrated(path, batches[rank::2]) and None)
    first, second, third = on_ranks(3, tmp_path / "three", lambda rank: calibrated(path, batches[rank::3]))
    for raised in (first, second, third):
        assert isinstance(raised, InputError)
        assert "rank 0: " in str(raised) and "was written by rank 0 of 2, and this is rank 0 of 3" in str(raised)


def test_other_data_is_refused(tmp_path):
    path, batches = tmp_path / "c.safetensors", data(6)
    killed(lambda: calibrated(path, dying(batches, 4)))
    with pytest.raises(InputError, match=r"data, batch 2: .* was written when another batch was in this place"):
        calibrated(path, [*batches[:2], batches[3], batches[2], *batches[4:]])
    with pytest.raises(InputError, match=r"the data ended behind 3 batches, and .* was written behind 4"):
        calibrated(path, batches[:3])
    calibrated(path, batches)
    with pytest.raises(InputError, match="ended with 6 batches, and the data has 5"):
        calibrated(path, batches[:5])
    with pytest.raises(InputError, match="batch 0: .* another batch was in this place"):
        calibrated(path, batches[::-1])


REFUSED = {
    "another recipe": (lambda: prepared("minmax"), "the recipe looks at other values, or in another way"),
    "another option": (lambda: prepared("percentile:90"), "the recipe looks at other values, or in another way"),
    "other weights": (lambda: prepared(model=module_with_other_weights()), "the model has other weights"),
    "another model": (lambda: prepared(model=network().append(nn.ReLU())), "the model computes something else"),
    "trials": (lambda: prepared(trials=True), "changes its graph before calibration"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_another_model_or_recipe_is_refused(tmp_path, name):
    path = tmp_path / "c.safetensors"
    calibrated(path, data(2))
    make, why = REFUSED[name]
    with pytest.raises(InputError, match=f"is of another model or recipe: .*{why}.* Delete the file"):
        fxq.calibrate(make(), data(2), checkpoint=path)


def test_a_recipe_that_looks_at_the_same_values_is_none_other(tmp_path):
    path = tmp_path / "c.safetensors"
    calibrated(path, data())
    other = fxq.prepare(network(), recipe().without_pass("cleanup"), data()[0])
    assert same(seen(fxq.calibrate(other, data(), checkpoint=path)), whole(data()))


def test_a_model_that_has_seen_data_is_refused(tmp_path):
    observed = fxq.calibrate(prepared(), data(3))
    with pytest.raises(InputError, match="the model has seen 3 batches already. With checkpoints, or on several ranks"):
        fxq.calibrate(observed, data(), checkpoint=tmp_path / "c.safetensors")
    observed = calibrated(tmp_path / "c.safetensors", data())
    observed(data()[0])
    with pytest.raises(InputError, match="has seen 12 batches already"):
        fxq.calibrate(observed, data(), checkpoint=tmp_path / "c.safetensors")


def test_samples_that_are_no_data_are_refused_before_the_first_write_takes_place(tmp_path):
    class Config:
        pass

    model = module(lambda self, x, config=None: self.fc(x), fc=nn.Linear(4, 4))
    observed = fxq.prepare(model, recipe(), {"x": torch.rand(2, 4), "config": Config()})
    with pytest.raises(InputError, match=r"Config cannot be stored as data"):
        fxq.calibrate(observed, [{"x": torch.rand(2, 4), "config": Config()}], checkpoint=tmp_path / "c", every=0)


def test_inputs_of_any_structure_come_back(tmp_path):
    model = module(lambda self, x, more, k: self.fc(x + more["y"][0] * k), fc=nn.Linear(4, 4))
    batches = [
        {"x": torch.rand(3, 4), "more": {"y": (torch.rand(3, 4), None)}, "k": 2.0, **({} if i else {})}
        for i in range(9)
    ]
    path, observed = tmp_path / "c.safetensors", fxq.prepare(model, recipe(), batches[0])
    killed(lambda: fxq.calibrate(observed, dying(batches, 6), checkpoint=path, every=0))
    resumed = fxq.calibrate(observed, batches, checkpoint=path)
    assert same(seen(resumed), seen(fxq.calibrate(fxq.prepare(model, recipe(), batches[0]), batches)))


# ---- files of several machines


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
        ([path, half], "half.safetensors is of a calibration that has not ended: 4 batches were seen"),
        ([path, tmp_path / "." / "c.safetensors"], "c.safetensors is there twice"),
        ([], "checkpoints is empty"),
        (str(path), "give a list of the paths"),
        ([tmp_path / "none"], "cannot read .*none: No such file"),
        ([3], "named by a str or a path"),
    ):
        with pytest.raises(InputError, match=words):
            fxq.merge_calibrations(prepared(), paths)
    with pytest.raises(InputError, match="is of another model or recipe"):
        fxq.merge_calibrations(prepared("minmax"), [path])
    with pytest.raises(InputError, match="has seen 2 batches already"):
        fxq.merge_calibrations(fxq.calibrate(prepared(), batches[:2]), [path])
    with pytest.raises(InputError, match="not a Sequential"):
        fxq.merge_calibrations(network(), [path])
