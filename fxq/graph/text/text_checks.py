"""What a text may not say: calls that no op takes, ways around the names that are allowed, and into generated code."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import fx, nn

from fxq.common.names import is_writable
from fxq.common.trees import leaves
from fxq.errors import InputError, unknown
from fxq.graph.guards import make_output
from fxq.graph.query import op_of
from fxq.graph.text.text_values import RECORDS
from fxq.graph.unit import Unit


def check_call(node: fx.Node, module: nn.Module | None) -> None:
    """Refuse arguments that the op or unit does not take, and names that lead out of the graph.

    Raises:
        InputError: says what was expected.
    """
    op = op_of(node)
    if op is not None:
        needed = len([name for name in op.traits.inputs if name in op.tensors])
        if not needed <= len(node.args) <= len(op.tensors):
            raise InputError(f"{op.name} takes the tensors {', '.join(op.tensors)}, not {len(node.args)} of them.")
        if any(isinstance(arg, str) for arg in node.args):
            raise InputError(f"{op.name} takes tensors, and no text.")
        for key in node.kwargs:
            if key not in op.options:
                raise InputError(f"{op.name}: {unknown('option', key, op.options)}")
    if isinstance(module, Unit) and len(node.args) != len(module.graph.find_nodes(op="placeholder")):
        raise InputError(f"the unit {module.kind} takes other inputs than these {len(node.args)}.")
    if node.target is getattr and not (len(node.args) > 1 and re.match("[a-zA-Z]", _text(node.args[1]))):
        raise InputError("expected the name of a public attribute.")
    if node.target is make_output:
        kind = _text((*node.args, "")[0])
        if kind not in _OUTPUTS and re.split("[.:]", kind)[0] in _NO_OUTPUTS:
            raise InputError(f"expected the class of an output, `module:name` of a model's own, not {kind!r}.")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


_OUTPUTS = tuple(f"collections:{name}" for name in ("OrderedDict", "defaultdict", "UserDict", "ChainMap", "Counter"))
_NO_OUTPUTS = frozenset(("", *sys.stdlib_module_names, *sys.builtin_module_names, "torch", "numpy", "fxq"))


def check_plain(arguments: Any) -> None:
    """Refuse records among the arguments of a call: they say what is known of a node, and no function takes them.

    torch.fx writes arguments into code by their `repr`: nothing else than plain data may get there.
    """
    for value in leaves(arguments, is_leaf=lambda value: type(value) in RECORDS.values()):
        if type(value) in RECORDS.values():
            raise InputError(f"a {type(value).__name__} is no argument of a call.")


_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


def check_path(path: Any) -> str:
    """A path that torch.fx can keep a tensor or module at. Raises `InputError` for another one.

    Names of Python's own, as `__class__`, end with two underscores as well.
    """
    parts = path.split(".") if isinstance(path, str) else [""]
    own = any(part.startswith("__") and part.endswith("__") for part in parts)
    if not all(parts) or parts[0] in _TAKEN or own or not is_writable(path):
        raise InputError(f"expected the path of a tensor or module, not {path!r}.")
    return str(path)
