"""Calls that fit no program: programs that are traced when such a call comes."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.programs.test_quantized_programs import CALLS, TOKEN, X, branching
from tests.support.machine import no_warnings

pytestmark = no_warnings

TRACE = fxq.Recipe.weight_only(backend="reference", new_kinds="trace")


def growing(model, recipe=TRACE, **options):
    return fxq.quantize(model, recipe, **(options or {"example_inputs": {"prefill": CALLS["prefill"]}}))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_call_that_fits_no_program_gets_one(mode):
    """One for other sizes, where forward branches on them, and one for another input; each is traced once."""
    model = branching()
    qmodel = growing(model)
    for count in (1, 2, 3):
        with mode():
            call = list(CALLS.values())[count - 1]
            assert sqnr(model(**call).detach(), qmodel(**call).detach()) > 30
        assert len(qmodel.programs) == count
    for call in CALLS.values():
        qmodel(**call)
    assert list(qmodel.programs) == ["prefill", "program_0", "program_1"] == list(qmodel.ledger)
    first, *rest = (
        {id(tensor) for tensor in (*program.buffers(), *program.parameters()) if tensor.numel() >= 64}
        for program in qmodel.programs.values()
    )
    assert first and all(tensors == first for tensors in rest)


def test_the_first_batch_is_an_example():
    qmodel = growing(branching(), fxq.Recipe.dynamic(new_kinds="trace", backend="reference"), data=[X, X])
    assert list(qmodel.programs) == ["program_0"]
    qmodel(TOKEN)
    assert list(qmodel.programs) == ["program_0", "program_1"]


def test_threads_that_make_a_new_call_at_once_trace_it_once():
    model = branching()
    qmodel, outputs, start = growing(model), [], threading.Barrier(4)

    def call():
        start.wait()
        outputs.append(qmodel(**CALLS["masked"]).detach())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(qmodel.programs) == 2 and len(outputs) == 4
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_calls_that_the_float_model_refuses_add_nothing():
    qmodel = growing(branching())
    with pytest.raises(fxq.InputError, match="does not run on the example"):
        qmodel(torch.randn(2, 5, 9))
    assert list(qmodel.programs) == ["prefill"]


def test_copies_trace_and_files_say_that_they_cannot(tmp_path):
    qmodel = growing(branching())
    again = copy.deepcopy(qmodel)
    again(**CALLS["masked"])
    assert len(again.programs) == 2 and len(qmodel.programs) == 1
    for saved in (pickle.loads(pickle.dumps(qmodel)), fxq.load(qmodel.save(tmp_path / "m.fxq"))):
        assert torch.equal(saved(X), qmodel(X)) and saved.recipe == TRACE
        with pytest.raises(fxq.InputError, match=r"mask is a tensor, not left out.*which files do not hold"):
            saved(**CALLS["masked"])
    loaded = fxq.load(again.save(tmp_path / "two.fxq"))
    assert torch.equal(loaded(**CALLS["masked"]), again(**CALLS["masked"]))


def test_a_float_model_that_has_changed_is_not_traced():
    model = branching()
    qmodel = growing(model)
    with torch.no_grad():
        model.a.weight.mul_(2)
    with pytest.raises(fxq.InputError, match="weights of the float model have changed"):
        qmodel(TOKEN)
    assert torch.isfinite(qmodel(X)).all()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_float_model_whose_buffer_has_changed_is_not_traced(persistent):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4), persistent=persistent)

        def forward(self, x, y=None):
            x = self.layer(x - self.mean)
            return x if y is None else x + y

    model, x = Normed().eval(), torch.randn(2, 4)
    qmodel = growing(model, example_inputs=(x,))
    model.mean.add_(1)
    with pytest.raises(fxq.InputError, match="have changed since it was quantized, such as 'mean'"):
        qmodel(x, x)


def test_weights_that_were_fitted_to_data_are_named():
    recipe = fxq.Recipe.weight_only(bits=4, per=8, backend="reference", new_kinds="trace")
    wide = branching()
    wide.b = nn.Linear(8, 32).eval()
    data = [{"x": torch.randn(16, 5, 8, generator=torch.Generator().manual_seed(i))} for i in range(4)]
    qmodel = growing(wide, recipe, data=data)
    with pytest.warns(fxq.FxqWarning, match=r"program_1 was traced .* program_0 was fitted to data \(gptq\)"):
        qmodel(TOKEN)


@pytest.mark.slow
def test_many_programs_are_warned_of():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, size: str = ""):
            return self.layer(x)

    qmodel = growing(Sized().eval(), example_inputs=(torch.randn(2, 4),))
    for i in range(6):
        qmodel(torch.randn(2, 4), size=str(i))
    with pytest.warns(fxq.FxqWarning, match="8 programs"):
        qmodel(torch.randn(2, 4), size="last")


def test_calibrated_ranges_and_parts_are_refused():
    for recipe in (
        fxq.Recipe.static,
        lambda **new: fxq.Recipe.dynamic(**new).override("a", fxq.Recipe.static().config),
    ):
        with pytest.raises(fxq.RecipeError, match=r"without calibrated ranges.*example_inputs"):
            recipe(new_kinds="trace")
    with pytest.raises(fxq.RecipeError, match="parts"):
        TRACE.parts("layers.*")
    with pytest.raises(fxq.RecipeError, match="new_kinds 'traced'; did you mean 'trace'"):
        fxq.Recipe.dynamic(new_kinds="traced")


def test_recipes_keep_it_in_files(tmp_path):
    TRACE.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == TRACE == fxq.Recipe.from_dict(TRACE.to_dict())
    assert "new_kinds" not in fxq.Recipe.weight_only().to_dict()
    assert fxq.Recipe(preset="weight_only", new_kinds="trace").new_kinds == "trace"
