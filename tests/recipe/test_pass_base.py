"""Base class of passes."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

import fxq
from fxq.errors import PassError, RecipeError
from fxq.recipe.pass_base import Pass


def test_a_pass_is_abstract_without_run():
    with pytest.raises(TypeError):
        type("Nothing", (Pass,), {"name": "nothing"})()


def test_options_are_fields():
    """Written as an __init__, they were lost in a saved recipe."""

    @dataclass(frozen=True, slots=True)
    class Fields(Pass):
        most: int = 3

        def run(self, rewriter):
            """Nothing."""

    assert Fields(4).changed_options == {"most": 4}
    with pytest.raises(PassError, match=r"^Own: a pass cannot define __init__"):

        class Own(Pass):
            def __init__(self, most):
                self.most = most


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            {"latest": "canonical"},
            r"^Wrong: latest is 'canonical'; it must be a stage, such as fxq\.extend\.Stage\.CANONICAL",
        ),
        ({"needs": None}, "^Wrong: needs is None; it must be a stage"),
        ({"gives": 3}, "^Wrong: gives is 3; it must be a stage"),
        ({"needs": fxq.extend.Stage.FUSED}, "^Wrong: gives is canonical, before fused, which the pass needs"),
        ({"name": 3}, "^Wrong: name is 3; it must be a string"),
        (
            {"needs": fxq.extend.Stage.FUSED, "gives": fxq.extend.Stage.QDQ, "latest": fxq.extend.Stage.CANONICAL},
            "^Wrong: latest is canonical, before fused, which",
        ),
    ],
)
def test_stages_that_are_none_or_in_the_wrong_order(stages, message):
    with pytest.raises(PassError, match=message):
        type("Wrong", (Pass,), {"name": "wrong", **stages})
    type(
        "Right", (Pass,), {"name": "right", "gives": property(lambda self: self.needs), "latest": fxq.extend.Stage.QDQ}
    )


def test_options_out_of_bounds_are_refused_by_name():
    @dataclass(frozen=True)
    class Bounded(Pass):
        rounds: int = 3
        share: float = 0.5

        name = "bounded"
        bounds: ClassVar = {"rounds": (1, 10), "share": (0.0, 0.9)}

        def run(self, rewriter):
            """Nothing."""

    assert (Bounded(10, 0).rounds, Bounded(1, 0.9).share) == (10, 0.9)
    for wrong in (0, 11, 2.0, True, "3", None):
        with pytest.raises(RecipeError, match=r"^bounded: rounds is .*; it must be an integer from 1 to 10\.$"):
            Bounded(wrong)
    for wrong in (-0.1, 0.91, float("nan"), True, "x"):
        with pytest.raises(RecipeError, match=r"^bounded: share is .*; it must be a number from 0 to 0\.9\.$"):
            Bounded(3, wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fxq.passes.AdaRound(warm=1.0),
        lambda: fxq.passes.AdaRound(samples=0),
        lambda: fxq.passes.Gptq(damping=-1),
        lambda: fxq.passes.Gptq(trust=-1.0),
        lambda: fxq.passes.CorrectBias(samples=0),
        lambda: fxq.passes.Equalize(rounds=0),
        lambda: fxq.passes.KeepSmallValues(most=2.0),
        lambda: fxq.passes.Smooth(rows=0),
        lambda: fxq.passes.VerifyLowering(tolerance=-0.1),
    ],
)
def test_every_pass_refuses_what_it_cannot_work_with(make):
    with pytest.raises(RecipeError, match=r"it must be a"):
        make()


@pytest.mark.parametrize("step", [getattr(fxq.passes, name)() for name in fxq.passes.__all__ if "PASSES" not in name])
def test_defaults_are_within_bounds_and_every_number_has_some(step):
    numbers = {key for key, value in step.options.items() if type(value) in (int, float)}
    assert numbers == set(step.bounds)
