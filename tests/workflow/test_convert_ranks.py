"""Conversion on several ranks: they divide the work of rounding, and get what one process gets, up to sums."""

import re
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FxqError, InputError
from fxq.extend import Stage
from fxq.paired.paired_run import PairedRun
from fxq.paired.reconstruction import Reconstruction
from tests.support.calibrations import same
from tests.support.processes import on_ranks

pytestmark = pytest.mark.any_cpu

NUMBER = r"\d+\.\d+(e-\d+)?"


def network():
    """A convolution in groups, layers of blocks, and one with a single row, which only one rank can round."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(8, 16, 3, groups=2), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 1)).eval()


def data(count=6, size=24):
    generator = torch.Generator().manual_seed(1)
    causes = torch.randn(8, 512, generator=generator)
    return [
        (torch.randn(size, 8, generator=generator) @ causes).view(size, 8, 8, 8)
        + 0.5 * torch.randn(size, 8, 8, 8, generator=generator)
        for _ in range(count)
    ]


def with_pass(step, **options):
    options = {"backend": "reference", "optimize": "coverage", **options}
    weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="mse")
    return fxq.Recipe.static(weight=weight, **options).insert_pass(step, after="smooth").with_min_sqnr(None)


def four_bits(**options):
    options = {"backend": "reference", "optimize": "coverage", **options}
    return fxq.Recipe.weight_only(bits=4, per=32, **options).with_min_sqnr(None)


RECIPES = {
    "blocks": four_bits(),
    "channels, with a corrected bias and patches that are held out": with_pass(fxq.passes.Gptq(trials=True)),
    "adaround": with_pass(fxq.passes.AdaRound(iterations=20)),
    "low rank": four_bits().insert_pass(fxq.passes.LowRank(rank=4), after="gptq"),
}


def quantized(recipe, batches, model=None):
    model = network() if model is None else model
    observed = fxq.calibrate(fxq.prepare(model, recipe, example_inputs=data()[0]), batches)
    return parts_of(fxq.convert(observed, group="auto"))


def parts_of(qmodel):
    """Code and tensors of a quantized model, and its error on data that it is not fitted to."""
    held_out, (first, *_) = torch.cat(data(8)[6:]), data()
    with torch.no_grad():
        error = float((network()(held_out) - qmodel(held_out)).square().mean())
        return qmodel.code, dict(qmodel.state_dict()), qmodel(first), error


def share_of_equal_integers(state, other):
    names = [name for name in state if not state[name].is_floating_point() and name != "_extra_state"]
    pairs = [(state[name], other[name]) for name in names]
    return sum(int((a == b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def check_alike(results, alone):
    """Ranks have the same model, bit for bit; it is that of one process, but for roundings that sums decide."""
    (code, state, _, error), (alone_code, alone_state, _, alone_error) = results[0], alone
    assert all(same(result, results[0]) for result in results[1:])
    assert re.sub(NUMBER, "", code) == re.sub(NUMBER, "", alone_code)
    assert share_of_equal_integers(state, alone_state) > 0.99
    assert error == pytest.approx(alone_error, rel=0.01)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_round_as_one_process(tmp_path, name):
    batches, recipe = data(), RECIPES[name]
    results = on_ranks(2, tmp_path, lambda rank: quantized(recipe, batches[rank::2]))
    check_alike(results, quantized(recipe, batches))


SHARES = {
    "one of them empty": (2, [[], data(3)]),
    "of other lengths": (3, [data()[:4], data()[4:5], data()[5:]]),
    "fewer batches than ranks": (3, [data(2)[:1], data(2)[1:], []]),
    "one batch": (2, [data(1), []]),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_any_size(tmp_path, name):
    size, shares = SHARES[name]
    recipe, batches = RECIPES["blocks"], [batch for share in shares for batch in share]
    results = on_ranks(size, tmp_path, lambda rank: quantized(recipe, shares[rank]))
    check_alike(results, quantized(recipe, batches))


SEEN = []


@dataclass(frozen=True)
class Rounded(Reconstruction):
    """Rounds to nearest, and notes which rows it gets, with how many patches of inputs; may fail."""

    fails_at: str = field(default="", repr=False)
    scales: bool = False

    name = "rounded"
    needs = gives = Stage.QDQ

    def choose(self, layer, error):
        SEEN.append((layer.weight, error.inputs.count))
        if self.fails_at == "choose":
            raise OSError("the disk is full of sand")
        return layer, layer.nearest() + 1


def test_each_rank_runs_its_samples_and_rounds_its_rows(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 1)).eval()
    batches, runs, start = [torch.rand(8, 32) for _ in range(5)], [], PairedRun.with_float_form

    def noting(gm, batches, *args, **options):
        runs.append([batch.args[0] for batch in batches])
        return start(gm, batches, *args, **options)

    monkeypatch.setattr(PairedRun, "with_float_form", noting)
    recipe = four_bits().without_pass("gptq").insert_pass(Rounded(), after="insert-qdq")

    def work(rank):
        observed = fxq.calibrate(fxq.prepare(model, recipe, example_inputs=batches[0]), batches[rank::2])
        fxq.convert(observed, group="auto")
        return runs, [weight for weight, _ in SEEN], {count for _, count in SEEN}

    (run, first, counts), (other_run, second, other_counts) = on_ranks(2, tmp_path, work)
    weights = model[0].weight.detach(), model[2].weight.detach()
    assert same(run, [batches[::2]]) and same(other_run, [batches[1::2]])
    assert same(first, [weights[0][None, :3]]) and same(second, [weights[0][None, 3:], weights[1][None]])
    assert counts == other_counts == {40}


def test_without_a_group_each_rank_works_alone(tmp_path):
    batches, recipe = data(), RECIPES["blocks"]

    def work(rank):
        observed = fxq.calibrate(fxq.prepare(network(), recipe, example_inputs=batches[0]), batches[rank::2])
        return parts_of(fxq.convert(observed)) if rank == 1 else None

    _, result = on_ranks(2, tmp_path, work)
    assert same(result, parts_of(fxq.quantize(network(), recipe, data=batches)))


def test_quantize_converts_together(tmp_path):
    batches, recipe = data(3), RECIPES["blocks"]
    results = on_ranks(2, tmp_path, lambda rank: parts_of(fxq.quantize(network(), recipe, data=batches[rank::2])))
    check_alike(results, parts_of(fxq.quantize(network(), recipe, data=batches)))


@dataclass(frozen=True)
class Fails(fxq.extend.Pass):
    """Fails."""

    name = "fails"
    needs = gives = Stage.QDQ

    def run(self, rewriter):
        raise OSError("the disk is full of sand")


class FailsLater(nn.Module):
    """Leaf that fails in a pass that runs samples."""

    fails = False

    def forward(self, x):
        if FailsLater.fails:
            raise OSError("the disk is full of sand")
        return x * 1.0


FAILURES = {
    "before": lambda recipe: recipe.insert_pass(Fails(), after="insert-qdq"),
    "in between": lambda recipe: recipe.insert_pass(Rounded(fails_at="choose"), after="insert-qdq"),
    "after": lambda recipe: recipe.insert_pass(Fails(), after="gptq"),
    "in a run": lambda recipe: recipe,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_on_one_rank_fails_on_all(tmp_path, name):
    batches = [torch.rand(8, 32) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 32), FailsLater(), nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    plain = four_bits().leaf("1")

    def work(rank):
        observed = fxq.calibrate(fxq.prepare(model, plain, example_inputs=batches[0]), batches[rank::2])
        FailsLater.fails = name == "in a run" and rank == 1
        recipe = plain.insert_pass(Rounded(), after="insert-qdq") if name == "in between" else plain
        return fxq.convert(observed, FAILURES[name](plain) if rank == 1 else recipe, group="auto") and None

    for raised in on_ranks(2, tmp_path, work):
        assert isinstance(raised, FxqError)
        assert "rank 1: " in str(raised) and "OSError: the disk is full of sand" in str(raised)


@pytest.mark.parametrize(
    "recipes",
    [
        (RECIPES["blocks"], RECIPES["blocks"].override("4", fxq.FLOAT)),
        (with_pass(fxq.passes.Gptq()), with_pass(fxq.passes.Gptq(trust=0.1))),
    ],
)
def test_ranks_with_other_layers_or_options_are_an_error(tmp_path, recipes):
    def work(rank):
        observed = fxq.calibrate(fxq.prepare(network(), recipes[0], example_inputs=data()[0]), data()[rank::2])
        return fxq.convert(observed, recipes[rank], group="auto") and None

    for rank, raised in enumerate(on_ranks(2, tmp_path, work)):
        assert type(raised) is InputError and f"ranks do different things: rank {rank} is at gptq" in str(raised)


@pytest.mark.parametrize("differs", ["samples", "weights", "ranges"])
def test_ranks_that_calibrated_alone_do_not_convert_together(tmp_path, differs):
    """They may have other samples, other weights, or ranges of later data than the samples that are kept."""
    later = {"samples": data(), "weights": data(), "ranges": [*data(), data()[0] * 9]}[differs]

    def work(rank):
        model = network()
        if differs == "weights" and rank == 1:
            model[4].weight.data.mul_(-1.2)
        observed = fxq.prepare(model, with_pass(fxq.passes.Gptq(samples=24)), example_inputs=data()[0])
        batches = {"samples": later[rank::2], "weights": later, "ranges": later[: len(later) - rank]}[differs]
        return fxq.convert(fxq.calibrate(observed, batches, group=None), group="auto") and None

    for raised in on_ranks(2, tmp_path, work):
        assert type(raised) is InputError and "the conversion of the weights, ranges and samples" in str(raised)


def test_a_trained_model_is_converted_by_each_rank(tmp_path):
    def work(rank):
        trained = fxq.prepare(nn.Sequential(nn.Linear(4, 4)), fxq.Recipe.qat(), example_inputs=torch.rand(2, 4))
        return fxq.convert(trained, group="auto")

    for raised in on_ranks(2, tmp_path, work):
        assert type(raised) is InputError and "group is for a calibrated model of one graph" in str(raised)
