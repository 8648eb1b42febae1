import operator

import pytest
import torch

from fxq.graph.guards import check_same
from fxq.graph.text.text_names import FUNCTIONS, METHODS, function_of, is_taken, name_of
from fxq.ops import OPS

pytestmark = pytest.mark.any_cpu


def test_every_name_gives_a_function_that_has_a_name():
    for name, function in FUNCTIONS.items():
        assert function_of(name) is function and function_of(name_of(function)) == function  # hsmm is hspmm


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("getattr", getattr),
        ("operator.getitem", operator.getitem),
        ("check_same", check_same),
        ("torch.svd_lowrank", torch.svd_lowrank),
        ("torch.linalg.norm", torch.linalg.norm),
        ("torch.ops.aten.sym_size.int", torch.ops.aten.sym_size.int),
        ("torch.ops.aten._to_copy.default", torch.ops.aten._to_copy.default),
    ],
)
def test_some_names(name, function):
    assert function_of(name) is function and name_of(function) == name


def test_the_rest_has_none():
    for function in (eval, exec, open, torch.load, torch.save, torch.ops.aten.from_file.default, operator.attrgetter):
        assert name_of(function) is None
    for name in ("eval", "torch.load", "torch.ops.aten.from_file.default", "torch.ops.prims.add.default", "os.system"):
        assert function_of(name) is None
    assert not {name for name in METHODS if name.startswith("_")} | METHODS & {"apply_", "register_hook"}


def test_no_function_goes_by_the_name_of_an_op():
    assert [name for name in FUNCTIONS if name in OPS] == []
    assert all(map(is_taken, ("relu", "tensor", "getattr", "class", "a b"))) and not is_taken("conv2d_relu")
