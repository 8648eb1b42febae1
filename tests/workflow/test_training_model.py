"""The model that is trained, as a module: modes, freezing, state, copies, autocast, checkpointing, compilation."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import CalibrationError, FxqWarning, InputError
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight
from fxq.quant.qparams import quantize
from tests.support.models import batch, build
from tests.support.trainings import QAT, prepared, trained

LEARNED = fxq.Recipe.qat(backend="reference", learned=True)
BATCHES = [batch("residual", seed=seed) for seed in range(6)]


def residual(recipe=QAT):
    return prepared(build("residual"), BATCHES[0], recipe)


def ranges(model):
    return [(float(m.low), float(m.high)) for m in model.modules() if isinstance(m, FakeQuantizeValue)]


def test_ranges_move_in_train_mode_alone():
    model = residual()
    trained(model, BATCHES[:2])
    before, steps = ranges(model), model.steps
    model.eval()
    with torch.no_grad():
        model(10 * BATCHES[0])
    assert (ranges(model), model.steps) == (before, steps) == (before, 2)
    model.train()
    model(10 * BATCHES[0])
    assert ranges(model) != before


def test_the_first_forward_rounds_weights_alone_and_the_next_one_all():
    model = residual()
    first, second = model(BATCHES[0]), model(BATCHES[0])
    assert not torch.equal(first, second)


def test_training_in_eval_mode_is_told():
    model = residual()
    trained(model, BATCHES[:1])
    model.eval()
    with pytest.warns(
        FxqWarning, match=r"trained in eval mode, so ranges and batch norms do not change: call model.train"
    ):
        model(BATCHES[0]).sum().backward()


def test_ranges_are_frozen_by_the_recipe():
    recipe = fxq.Recipe.qat(backend="reference", freeze_ranges_after=2)
    model = residual(recipe)
    trained(model, BATCHES[:2])
    before = ranges(model)
    trained(model, BATCHES[2:4])
    assert ranges(model) == before
    with pytest.raises(InputError, match="the ranges are frozen already, by freeze_ranges"):
        model.freeze_ranges()


def test_ranges_are_frozen_by_hand():
    model = residual()
    with pytest.raises(CalibrationError, match="there are no ranges to freeze: call the model on a batch"):
        model.freeze_ranges()
    trained(model, BATCHES[:1])
    model.freeze_ranges()
    before = ranges(model)
    trained(model, BATCHES[1:3])
    assert ranges(model) == before
    assert fxq.convert(model).ledger.count("int8")


@pytest.mark.parametrize("by_hand", [False, True])
def test_statistics_of_batch_norms_are_frozen(by_hand):
    model = residual(QAT if by_hand else fxq.Recipe.qat(backend="reference", freeze_norms_after=1))
    trained(model, BATCHES[:1])
    if by_hand:
        model.freeze_norms()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [(m.running_mean.clone(), m.weight.detach().clone()) for m in norms]
    trained(model.train(), BATCHES[1:3])
    assert norms
    assert not any(m.training for m in norms)
    assert all(torch.equal(m.running_mean, mean) for m, (mean, _) in zip(norms, before, strict=True))
    assert any(not torch.equal(m.weight, weight) for m, (_, weight) in zip(norms, before, strict=True))
    with pytest.raises(InputError, match="the norms are frozen already"):
        model.freeze_norms()


def test_batch_norms_that_others_have_taken_the_place_of():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(residual())
    model.freeze_norms()
    norms = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    assert norms
    assert not any(m.training for m in norms)


def test_without_batch_norms_there_is_nothing_to_freeze():
    with pytest.raises(InputError, match="has no batch norm whose statistics could be frozen"):
        prepared(nn.Linear(2, 2).eval(), torch.rand(1, 2)).freeze_norms()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [QAT, LEARNED], ids=["ranges", "learned"])
@pytest.mark.parametrize("steps", [1, 3])
def test_its_state_goes_out_and_in(recipe, steps):
    model = residual(recipe)
    trained(model, BATCHES[:steps])
    state = copy.deepcopy(model.state_dict())
    wanted = trained(model, BATCHES[3:])
    again = residual(recipe)
    again.load_state_dict(state)
    assert again.steps == steps
    assert trained(again, BATCHES[3:]) == wanted


def test_what_is_frozen_is_part_of_its_state():
    model = residual()
    trained(model, BATCHES[:1])
    model.freeze_norms()
    model.freeze_ranges()
    again = residual()
    again.load_state_dict(model.state_dict())
    assert not any(m.training for m in again.modules() if isinstance(m, nn.BatchNorm2d))
    before = ranges(again)
    trained(again, BATCHES[1:2])
    assert ranges(again) == before


def test_its_parameters_go_by_the_names_of_the_float_model():
    model, own = residual(), build("residual")
    trained(model, BATCHES[:1])
    missing, _ = own.load_state_dict(model.state_dict(), strict=False)
    assert missing == []


@pytest.mark.parametrize("recipe", [QAT, LEARNED], ids=["ranges", "learned"])
def test_a_copy_trains_as_the_original(recipe):
    model = residual(recipe)
    trained(model, BATCHES[:2])
    duplicate = copy.deepcopy(model)
    assert trained(duplicate, BATCHES[2:]) == trained(model, BATCHES[2:])
    assert duplicate.steps == 6
    assert {id(p) for p in duplicate.parameters()}.isdisjoint({id(p) for p in model.parameters()})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [QAT, LEARNED], ids=["ranges", "learned"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_that_are_computed_again_for_gradients(recipe, reentrant):
    """Checkpointing gives the same losses; ranges and statistics count each forward once."""
    model, twin = residual(recipe), residual(recipe)
    wanted = trained(model, BATCHES)
    losses = trained(twin, BATCHES, run=lambda x: checkpoint(twin, x.requires_grad_(), use_reentrant=reentrant))
    assert losses == wanted
    assert twin.steps == 6
    for (name, mine), its in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, its), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_frozen_while_a_forward_is_computed_again(reentrant):
    recipe = fxq.Recipe.qat(backend="reference", freeze_norms_after=2, freeze_ranges_after=3)
    model, twin = residual(recipe), residual(recipe)
    wanted = trained(model, BATCHES)
    assert trained(twin, BATCHES, run=lambda x: checkpoint(twin, x.requires_grad_(), use_reentrant=reentrant)) == wanted


def test_batch_norms_are_those_of_the_user():
    """A momentum that the user sets, and statistics that PyTorch recomputes, take effect."""
    model = residual()
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.momentum = 1.0
    seen = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].mean((0, 2, 3))))
    model(BATCHES[0])
    torch.testing.assert_close(norm.running_mean, seen[0], rtol=1e-4, atol=1e-6)
    torch.optim.swa_utils.update_bn(BATCHES[:3], model)
    torch.testing.assert_close(norm.running_mean, sum(seen[1:]) / 3, rtol=1e-4, atol=1e-6)
    assert norm.momentum == 1.0


# ---- weights that are frozen


W3 = fxq.TensorSpec(bits=3, signed=True, symmetric=True, per="channel", observer="minmax")


def with_weights_to_freeze(learned=False, rate=0.3, steps=30):
    """A model after steps that are so large that weights oscillate; the batches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    batches = [torch.randn(8, 3, 8, 8) for _ in range(2 * steps)]
    recipe = fxq.Recipe.qat(backend="reference", weight=W3, learned=learned, freeze_weights_over=steps)
    model = prepared(net, batches[0], recipe)
    trained(model, batches[:steps], rate)
    return model, batches[steps:], lambda: prepared(net, batches[0], recipe)


def integers(model):
    """Of each layer's weight: what is frozen, and all integers."""
    model.use_ranges()
    frozen_weights = []
    for node in model.graph.nodes:
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, FakeQuantizeWeight):
            weight = model.get_parameter(node.args[0].target).detach()
            frozen_weights.append((module.oscillation.frozen.clone(), quantize(weight, module.qparams_of(weight))))
    return frozen_weights


@pytest.mark.one_in(2)
@pytest.mark.parametrize("learned", [False, True])
def test_weights_that_go_back_and_forth_are_frozen(learned):
    model, batches, _ = with_weights_to_freeze(learned)
    before = integers(model)
    trained(model, batches, rate=0.3)
    for (frozen, old), (later, new) in zip(before, integers(model), strict=True):
        assert frozen.any()
        assert not later.all()
        assert torch.equal(old[frozen], new[frozen])
    assert any(not torch.equal(old, new) for (_, old), (_, new) in zip(before, integers(model), strict=True))
    with torch.no_grad():
        wanted = model.eval()(batches[0])
    assert sqnr(wanted, fxq.convert(model)(batches[0])) > 60  # float rounding, and no step of a grid


@pytest.mark.one_in(2)
@pytest.mark.parametrize("learned", [False, True])
def test_frozen_weights_are_part_of_its_state_and_of_its_copies(learned):
    model, batches, make = with_weights_to_freeze(learned)
    copied, loaded, recomputed = copy.deepcopy(model), make(), copy.deepcopy(model)
    loaded.load_state_dict(copy.deepcopy(model.state_dict()))
    wanted = trained(model, batches, rate=0.3)
    assert trained(copied, batches, rate=0.3) == wanted
    assert trained(loaded, batches, rate=0.3) == wanted
    again = trained(recomputed, batches, 0.3, lambda x: checkpoint(recomputed, x.requires_grad_(), use_reentrant=False))
    assert again == wanted


def test_two_forwards_before_one_backward():
    model, batches, _ = with_weights_to_freeze(learned=True)
    (model(batches[0]) - model(batches[1])).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_that_two_layers_round_in_their_own_ways_are_not_frozen():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.own = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.own(self.second(self.first(x)))

    recipe = fxq.Recipe.qat(backend="reference", freeze_weights_over=5)
    recipe = recipe.override("second", fxq.QuantConfig(recipe.config.activation, W3))
    model = prepared(Tied().eval(), torch.randn(2, 4), recipe)
    trained(model, [torch.randn(2, 4) for _ in range(3)])
    assert list(model._freezing) == ["own.weight"]


# ---- where it runs


def test_under_autocast():
    model, twin = residual(), residual()
    wanted = trained(model, BATCHES)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return twin(x)

    assert trained(twin, BATCHES, run=run) == pytest.approx(wanted, rel=0.03)
    assert fxq.convert(twin).ledger.count("int8")


def test_on_another_device():
    model = residual().to("meta")
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [QAT, LEARNED], ids=["ranges", "learned"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_types_than_it_was_prepared_with(recipe, dtype):
    model = residual(recipe).to(dtype)
    with pytest.raises(InputError, match=rf"is {dtype}, but was torch.float32 when the model was prepared"):
        model(BATCHES[0].to(dtype))


def test_in_double_precision_inputs():
    model = residual()
    assert model(BATCHES[0].double()).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [QAT, LEARNED], ids=["ranges", "learned"])
def test_compiled(recipe):
    model, twin = residual(recipe), residual(recipe)
    wanted, compiled = trained(model, BATCHES), torch.compile(twin)
    assert trained(twin, BATCHES, run=compiled) == pytest.approx(wanted, rel=1e-4)
    assert twin.steps == 6
    x = BATCHES[0]
    assert fxq.common.metrics.sqnr(fxq.convert(model)(x), fxq.convert(compiled)(x)) > 40


def test_it_is_neither_pickled_nor_copied_in_part():
    with pytest.raises(InputError, match=r"cannot be pickled: .* Save its state_dict\(\)"):
        pickle.dumps(residual())
    with pytest.raises(InputError, match=r"use copy\.deepcopy"):
        copy.copy(residual())


def test_its_history_has_all_passes():
    assert [snapshot.name for snapshot in residual().history][-3:] == [
        "propagate",
        "fallback",
        "insert-fake-quantizers",
    ]
