"""Checkpoints: a calibration that was killed goes on with the same result; files of something else are refused."""

import time
from itertools import chain

import pytest
import torch
from torch import nn

import fxq
from fxq.calibration.checkpoint import FORMAT
from fxq.common.stored_data import pack, unpack
from fxq.errors import CalibrationError, InputError, RenderError
from tests.support.calibrations import calibrated, data, network, other_weights, prepared, recipe, same, seen, whole
from tests.support.helpers import module
from tests.support.processes import die, dying, killed, on_ranks

pytestmark = pytest.mark.any_cpu


@pytest.mark.one_in(4)
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
    path, batches = tmp_path / "c.safetensors", data(200, 1)
    want = whole(batches)
    observed = prepared()
    for _ in range(3):
        killed(
            lambda: [fxq.calibrate(observed, batches, checkpoint=path, every=0), time.sleep(60)],
            seconds=0.1 + float(torch.rand(())) * 0.3,
        )
    assert same(seen(fxq.calibrate(observed, batches, checkpoint=path)), want)


def test_what_was_seen_is_not_shown_again(tmp_path):
    path, batches = tmp_path / "c.safetensors", data(6)
    killed(lambda: calibrated(path, dying(batches, 4)))
    calls, observed = [], prepared()
    observed.register_forward_pre_hook(lambda *_: calls.append(1))
    fxq.calibrate(observed, batches, checkpoint=path)
    assert len(calls) == 2


@pytest.mark.one_in(2)
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


@pytest.mark.slow
def test_a_recipe_that_calibrates_nothing_goes_on_too(tmp_path):
    """Also if it was killed after the last batch, before the file was complete."""
    path, batches = tmp_path / "c.safetensors", data(40, 2)
    chosen = fxq.Recipe.weight_only(bits=4, backend="reference").insert_pass(fxq.passes.Gptq(), after="smooth")
    want = fxq.quantize(network(), chosen, data=batches)
    for _ in range(2):
        qmodel = fxq.quantize(network(), chosen, data=batches, checkpoint=path)
        assert same(dict(qmodel.state_dict()), dict(want.state_dict()))
        edited(path, lambda content: content.update(complete=False))
    assert len(unpack(path.read_bytes())["checksums"]) == 32


def test_after_an_error_the_same_model_goes_on(tmp_path):
    path, batches, observed = tmp_path / "c.safetensors", data(), prepared()
    broken = [*batches[:5], batches[5] * float("inf"), *batches[6:]]
    with pytest.raises(CalibrationError, match="batch 5"):
        fxq.calibrate(observed, broken, checkpoint=path, every=0)
    assert same(seen(fxq.calibrate(observed, batches, checkpoint=path)), whole(batches))


@pytest.mark.slow
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


@pytest.mark.slow
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
    with pytest.raises(InputError, match=r"the data ended after 3 batches, and .* was written after 4"):
        calibrated(path, batches[:3])
    calibrated(path, batches)
    with pytest.raises(InputError, match="ended with 6 batches, and the data has 5"):
        calibrated(path, batches[:5])
    with pytest.raises(InputError, match=r"batch 0: .* another batch was in this place"):
        calibrated(path, batches[::-1])


REFUSED = {
    "another recipe": (lambda: prepared("minmax"), "the recipe observes other values, or with other observers"),
    "another option": (lambda: prepared("percentile:90"), "the recipe observes other values, or with other observers"),
    "other weights": (lambda: prepared(model=other_weights()), "the model has other weights"),
    "another model": (lambda: prepared(model=network().append(nn.ReLU())), "the model computes something else"),
    "trials": (lambda: prepared(observe_all=True), "changes its graph before calibration"),
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
    uncleaned = fxq.prepare(network(), recipe().without_pass("cleanup"), example_inputs=data()[0])
    assert same(seen(fxq.calibrate(uncleaned, data(), checkpoint=path)), whole(data()))


def test_a_model_that_has_seen_data_is_refused(tmp_path):
    observed = fxq.calibrate(prepared(), data(3))
    with pytest.raises(InputError, match="the model has already seen 3 batches"):
        fxq.calibrate(observed, data(), checkpoint=tmp_path / "c.safetensors")
    observed = calibrated(tmp_path / "c.safetensors", data())
    observed(data()[0])
    with pytest.raises(InputError, match="has already seen 12 batches"):
        fxq.calibrate(observed, data(), checkpoint=tmp_path / "c.safetensors")


def test_samples_that_are_no_data_are_refused_before_the_first_write_takes_place(tmp_path):
    class Config:
        pass

    model = module(lambda self, x, config=None: self.fc(x), fc=nn.Linear(4, 4))
    observed = fxq.prepare(model, recipe(), example_inputs={"x": torch.rand(2, 4), "config": Config()})
    with pytest.raises(InputError, match=r"Config cannot be stored as data"):
        fxq.calibrate(observed, [{"x": torch.rand(2, 4), "config": Config()}], checkpoint=tmp_path / "c", every=0)


def test_inputs_of_any_structure_come_back(tmp_path):
    model = module(lambda self, x, more, k: self.fc(x + more["y"][0] * k), fc=nn.Linear(4, 4))
    batches = [{"x": torch.rand(3, 4), "more": {"y": (torch.rand(3, 4), None)}, "k": 2.0} for _ in range(9)]
    path, observed = tmp_path / "c.safetensors", fxq.prepare(model, recipe(), example_inputs=batches[0])
    killed(lambda: fxq.calibrate(observed, dying(batches, 6), checkpoint=path, every=0))
    resumed = fxq.calibrate(observed, batches, checkpoint=path)
    assert same(seen(resumed), seen(fxq.calibrate(fxq.prepare(model, recipe(), example_inputs=batches[0]), batches)))


def edited(path, change):
    content = unpack(path.read_bytes())
    change(content)
    path.write_bytes(pack(content))


def test_a_damaged_file_is_refused(tmp_path):
    path, batches = tmp_path / "c.safetensors", data(3)
    calibrated(path, batches)
    whole_file = path.read_bytes()
    for broken in (b"", whole_file[:4], whole_file[: len(whole_file) // 2], whole_file[:-1], b"PK" + whole_file):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"c.safetensors is no checkpoint of a calibration, or damaged: .* Delete"):
            calibrated(path, batches)
    for content in (pack([1, 2]), pack({"x": torch.rand(2)})):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"c.safetensors is no checkpoint of a calibration\. Delete"):
            calibrated(path, batches)


def test_a_file_of_a_later_version_is_refused(tmp_path):
    path, batches = tmp_path / "c.safetensors", data(3)
    calibrated(path, batches)
    edited(path, lambda content: content.update(format=FORMAT + 1))
    with pytest.raises(InputError, match=f"by a later version of fxq, in format {FORMAT + 1}; this one reads {FORMAT}"):
        calibrated(path, batches)


def test_a_file_that_cannot_be_written_is_an_error_before_the_data_is_shown(tmp_path):
    (tmp_path / "file").write_text("")
    observed = prepared()
    with pytest.raises(RenderError, match="cannot write"):
        fxq.calibrate(observed, data(), checkpoint=tmp_path / "file" / "c.safetensors")
    assert observed.batches_seen == 0
    with pytest.raises(InputError, match="named by a str or a path"):
        fxq.calibrate(observed, data(), checkpoint=3)


def test_what_a_batch_is_made_of_counts(tmp_path):
    """Its dtype, its shape and its plain values, not only the values of its tensors."""
    model = module(lambda self, x, k=1.0: self.fc(x.float()) * k, fc=nn.Linear(4, 4))
    x = torch.ones(2, 4)
    path = tmp_path / "c.safetensors"
    fxq.calibrate(fxq.prepare(model, recipe(), example_inputs=x), [{"x": x, "k": 1.0}], checkpoint=path)
    for batch in ({"x": x, "k": 2.0}, {"x": x[:1], "k": 1.0}, {"x": x.double(), "k": 1.0}, {"x": x * 2, "k": 1.0}):
        with pytest.raises(InputError, match=r"batch 0: .* another batch was in this place"):
            fxq.calibrate(fxq.prepare(model, recipe(), example_inputs=x), [batch], checkpoint=path)
    fxq.calibrate(fxq.prepare(model, recipe(), example_inputs=x), [{"x": x.clone(), "k": 1.0}], checkpoint=path)
