"""What a pass is made of."""

import pytest

from fxq.recipe.pass_base import Pass


def test_a_pass_is_abstract_without_run():
    with pytest.raises(TypeError):
        type("Nothing", (Pass,), {"name": "nothing"})()
