"""Variables that the code of a model names outside of its modules, and which of them it reads."""

import argparse
import ast
import dis
import inspect
import types

import pytest
from torch import nn

from fxq.common import code_state
from fxq.common.code_state import CodeState

pytestmark = pytest.mark.any_cpu
COUNT, TABLE = 0, {"n": 0}


def helper(x, memo=[]):  # noqa: B006 - the default is the state
    memo.append(x)
    return TABLE["n"] + x


def module_of(enclosed):
    class Module(nn.Module):
        shared = 3

        def forward(self, x):
            global COUNT
            COUNT += 1
            self.calls += 1
            self.steps = self.steps + 1
            self.table["n"] += 1
            if self.phase % 2:
                enclosed[0] = x
            return helper(x)

    return Module()


def test_variables_are_found_by_what_they_are_called():
    code = CodeState.of(module_of([1]))
    values = {name: value for _, bindings in code.bindings for name, value in bindings.read().items()}
    assert values["global COUNT"] == 0 and values["global TABLE"] is TABLE and values["default of helper: memo"] == []
    assert values["class attribute Module.shared"] == 3
    assert values["variable of an enclosing function: enclosed"] == [1]


def test_writing_gives_values_back():
    global COUNT
    code = CodeState.of(module_of([1]))
    kept = [(bindings, bindings.read()) for _, bindings in code.bindings]
    COUNT = 5
    for bindings, values in kept:
        bindings.write(values)
    assert COUNT == 0


@pytest.mark.parametrize(
    ("name", "read"), [("calls", False), ("steps", False), ("COUNT", False), ("table", False), ("phase", True)]
)
def test_a_count_is_read_only_where_it_decides_something(name, read):
    assert CodeState.of(module_of([1])).reads(name) is read


hits = 0


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.hits, self.log, self.window = 0, [], []

    def forward(self, x):
        self.log.append(x)
        self.window.append(x)
        return x if self.hits == 0 and len(self.window) < 5 else -x


def test_a_global_with_the_name_of_an_attribute_is_none_of_the_model():
    names = {name for _, bindings in CodeState.of(Attribute()).bindings for name in bindings.read()}
    assert "global hits" not in names


def test_adding_to_a_list_is_not_reading_it():
    code = CodeState.of(Attribute())
    assert code.reads("window") and not code.reads("log")


def test_a_hook_that_only_adds_to_a_list_does_not_read_it():
    outputs, shown = [], []
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, result: outputs.append(result))
    model[0].register_forward_hook(lambda module, args, result: shown[0].append(len(shown)))
    code = CodeState.of(model)
    assert not code.reads("outputs") and code.reads("shown")


MANY_NAMES = "def f(x):\n" + "".join(f"    global n{i}\n    x.a{i} = m{i}\n    n{i} = x\n" for i in range(300))


def functions_of(module):
    """Code of the functions of a module, and of the methods of its classes."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    values = [value for holder in (module, *classes) for value in vars(holder).values()]
    return [value.__code__ for value in values if isinstance(value, types.FunctionType)]


@pytest.mark.parametrize("code", [argparse, ast, inspect, code_state, nn.modules.module, MANY_NAMES])
def test_instructions_are_those_that_dis_decodes(code):
    """More than 256 names need arguments of several bytes."""
    codes = functions_of(code) if isinstance(code, types.ModuleType) else [compile(code, "", "exec").co_consts[0]]
    assert codes
    for of_function in codes:
        decoded = [(step.opcode, step.argval) for step in dis.get_instructions(of_function)]
        wanted = [step for step in decoded if step[0] in code_state._NAMING]
        assert list(code_state._naming_instructions(of_function)) == wanted
