"""The list of passes that a recipe holds: how it is edited, read and printed."""

import pytest

from fxq.errors import RecipeError
from fxq.passes import PASSES, Fuse, VerifyLowering
from fxq.recipe.recipe import Recipe
from tests.support.helpers import Scale

NAMES = [p.name for p in PASSES]


def names(recipe):
    return [p.name for p in recipe.pipeline]


def test_a_pass_is_inserted_after_or_before():
    at = NAMES.index("fuse")
    assert names(Recipe.static().insert_pass(Scale(), after="fuse")) == [*NAMES[: at + 1], "scale", *NAMES[at + 1 :]]
    assert names(Recipe.static().insert_pass(Scale(), before="fuse")) == [*NAMES[:at], "scale", *NAMES[at:]]


def test_edits_apply_in_order():
    recipe = (
        Recipe.static().insert_pass(Scale(), after="fuse").without_pass("scale").insert_pass(Scale(2), before="fuse")
    )
    assert recipe.pipeline["scale"] == Scale(2) and names(recipe).index("scale") == NAMES.index("fuse")


def test_a_pass_is_replaced_by_removing_it_first():
    recipe = Recipe.static().without_pass("verify-lowering").insert_pass(VerifyLowering(tolerance=0.02), after="lower")
    assert names(recipe) == NAMES and recipe.pipeline["verify-lowering"].tolerance == 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.without_pass("fues"), "unknown pass 'fues'; did you mean 'fuse'"),
        (lambda r: r.insert_pass(Scale(), after="propogate"), "unknown pass 'propogate'; did you mean 'propagate'"),
        (lambda r: r.without_pass("fuse").without_pass("fuse"), "unknown pass 'fuse'"),
        (lambda r: r.insert_pass(Scale()), "exactly one of after= and before="),
        (lambda r: r.insert_pass(Scale(), after="fuse", before="fuse"), "exactly one of after= and before="),
        (lambda r: r.insert_pass(Scale, after="fuse"), "takes an instance of a fxq.Pass subclass"),
        (lambda r: r.insert_pass(Fuse(), after="lower"), "the pipeline has a pass called 'fuse' already"),
    ],
)
def test_a_wrong_change_of_the_pipeline(change, message):
    with pytest.raises(RecipeError, match=message):
        change(Recipe.static())


def test_the_pipeline_prints_its_passes_with_stages_and_options():
    lines = str(Recipe.static().insert_pass(Scale(0.5), after="fuse").pipeline).splitlines()
    assert len(lines) == len(NAMES) + 1
    assert lines[0].split()[:4] == ["1.", "trace", "none", "->"]
    (line,) = [line for line in lines if "scale(" in line]
    assert "scale(factor=0.5)" in line and "canonical" in line and "A pass of the user's, with an option." in line


def test_a_pass_is_found_by_name_and_number():
    pipeline = Recipe.static().pipeline
    assert pipeline["fuse"] is pipeline[NAMES.index("fuse")] and len(pipeline) == len(NAMES)
    assert [p.name for p in pipeline[:2]] == ["trace", "canonicalize"]
