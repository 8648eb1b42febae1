"""Import paths and places in source files."""

import pytest
from torch import nn

from fxq.common.source import import_name, short_path, source_of
from fxq.errors import RecipeError
from fxq.rewriting.pattern import FUSIONS


def test_import_name_finds_nested_classes():
    assert import_name("torch.nn:Conv2d", nn.Module) is nn.Conv2d
    with pytest.raises(RecipeError, match="names no class of Linear"):
        import_name("torch.nn:Conv2d", nn.Linear)


def test_sources_say_nothing_about_the_machine():
    assert short_path("/home/someone/project/nets/resnet.py") == "nets/resnet.py"
    assert short_path("net.py") == "net.py"
    assert all(rule.source.startswith("patterns/") for rule in FUSIONS)


def test_a_class_that_is_in_no_file_is_named():
    """As one that is typed into a terminal."""
    typed = {"__name__": "__main__"}
    exec("class Typed: pass", typed)
    assert source_of(typed["Typed"]) == "__main__:Typed"
    assert source_of(nn.Conv2d).startswith("modules/conv.py:")
