"""Checks of a graph's text: calls that fit their op, and no names or values that could run other code."""

from __future__ import annotations

import operator
import re
import sys
from typing import Any

from torch import fx, nn

from fxq.common.names import is_writable
from fxq.common.trees import leaves
from fxq.errors import InputError, unknown
from fxq.graph.guards import make_output
from fxq.graph.query import op_of
from fxq.graph.text.text_names import CALLS_A_MAPPER, MAKES_A_MAPPER, name_of
from fxq.graph.text.text_values import RECORDS
from fxq.graph.unit import Unit


def check_call(node: fx.Node, module: nn.Module | None) -> None:
    """Check that the op or unit takes these arguments, and that attribute and class names are allowed.

    Raises:
        InputError: they do not; the message says what was expected.
    """
    op = op_of(node)
    if op is not None:
        needed = len([name for name in op.traits.inputs if name in op.tensors])
        if not needed <= len(node.args) <= len(op.tensors):
            raise InputError(f"{op.name} takes the tensors {', '.join(op.tensors)}, not {len(node.args)} of them.")
        if any(isinstance(arg, str) for arg in node.args):
            raise InputError(f"{op.name} takes tensors, not a string.")
        for key in node.kwargs:
            if key not in op.options:
                raise InputError(f"{op.name}: {unknown('option', key, op.options)}")
    if isinstance(module, Unit) and len(node.args) != len(module.graph.find_nodes(op="placeholder")):
        needed = len(module.graph.find_nodes(op="placeholder"))
        raise InputError(f"the unit {module.kind} takes {needed} inputs, not {len(node.args)}.")
    if node.target is getattr and not (len(node.args) > 1 and re.match("[a-zA-Z]", _text(node.args[1]))):
        raise InputError("expected the name of a public attribute.")
    _check_mapper(node)
    if node.target is make_output:
        kind = _text((*node.args, "")[0])
        if kind not in _OUTPUT_CLASSES and re.split("[.:]", kind)[0] in _REFUSED_MODULES:
            raise InputError(f"expected the class of an output, `module:name` in a module of the model, not {kind!r}.")


def _check_mapper(node: fx.Node) -> None:
    """Raise `InputError` if the mapper that torchvision's poolers call is not their own, made by `_setup_scales`."""
    if node.op != "call_function" or name_of(node.target) != CALLS_A_MAPPER:
        return
    mapper: Any = (*node.args[5:], node.kwargs.get("mapper"))[0]
    is_second = isinstance(mapper, fx.Node) and mapper.target is operator.getitem and mapper.args[1:] == (1,)
    source = mapper.args[0] if is_second else None
    if not isinstance(source, fx.Node) or name_of(source.target) != MAKES_A_MAPPER:
        raise InputError("its mapper is called, and must be the second result of _setup_scales.")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


_OUTPUT_CLASSES = tuple(
    f"collections:{name}" for name in ("OrderedDict", "defaultdict", "UserDict", "ChainMap", "Counter")
)
_REFUSED_MODULES = frozenset(("", *sys.stdlib_module_names, *sys.builtin_module_names, "torch", "numpy", "fxq"))


def check_plain(arguments: Any) -> None:
    """Raise `InputError` if a record, such as a `Plan`, is among the arguments of a call. Records are facts of nodes.

    torch.fx writes arguments into generated code by their `repr`, so only plain data is allowed.
    """
    for value in leaves(arguments, is_leaf=lambda value: type(value) in RECORDS.values()):
        if type(value) in RECORDS.values():
            raise InputError(f"a {type(value).__name__} cannot be an argument of a call.")


_MODULE_ATTRIBUTES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


def check_path(path: Any) -> str:
    """Return `path` if torch.fx can store a tensor or module there, else raise `InputError`.

    Special names of Python, such as `__class__`, and attributes of `fx.GraphModule` are refused.
    """
    names = path.split(".") if isinstance(path, str) else [""]
    special = any(part.startswith("__") and part.endswith("__") for part in names)
    if not all(names) or names[0] in _MODULE_ATTRIBUTES or special or not is_writable(path):
        raise InputError(f"expected the path of a tensor or module, not {path!r}.")
    return str(path)
