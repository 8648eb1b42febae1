"""Import paths and places in source files."""

import sys
import types
from collections import OrderedDict

import pytest
from torch import nn

from fxq.common.source import import_name, imported, short_path, source_of, without_imports
from fxq.errors import RecipeError
from fxq.rewriting.pattern import FUSIONS


def test_import_name_finds_nested_classes():
    assert import_name("torch.nn:Conv2d", nn.Module) is nn.Conv2d
    with pytest.raises(RecipeError, match="is not a subclass of Linear"):
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


def test_without_imports_only_what_is_imported_is_found():
    sys.modules.pop("this", None)
    with without_imports():
        assert imported("collections:OrderedDict") is OrderedDict
        with pytest.raises(RecipeError, match="'this:s' needs the module 'this', and loading a file imports no code"):
            imported("this:s")
        with pytest.raises(RecipeError, match="cannot import 'collections:None'"):
            imported("collections:None")
    assert "this" not in sys.modules


def test_without_imports_a_module_is_not_asked_for_what_it_has_not(monkeypatch):
    """Some import others then."""
    lazy = types.ModuleType("lazy_for_the_test")
    lazy.__getattr__ = lambda name: OrderedDict
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    assert imported("lazy_for_the_test:any") is OrderedDict
    with without_imports(), pytest.raises(RecipeError, match="cannot import 'lazy_for_the_test:any'"):
        imported("lazy_for_the_test:any")
