"""What a pass is made of."""

from dataclasses import dataclass

import pytest

from fxq.errors import PassError
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
    with pytest.raises(PassError, match=r"^Own: a pass is a dataclass\(frozen=True\): its options are fields"):

        class Own(Pass):
            def __init__(self, most):
                self.most = most
