"""Code that the file of a model names and does not hold: kernels and ops of other packages, hooks and leaf modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxq.backends.kernel import Kernel, known_kernels
from fxq.common.hooks import forward_hooks
from fxq.common.source import import_path, imported
from fxq.errors import InputError, unknown
from fxq.graph.query import op_of, submodule
from fxq.graph.unit import Unit
from fxq.ledger.float_record import checksums
from fxq.ledger.quantized import Quantized
from fxq.ops import OPS
from fxq.saved.other_machine import kernels_of


@dataclass(frozen=True)
class StoredLeaf:
    """Description of a leaf module, which is not in the file.

    Attributes:
        type: name of its class.
        weights: checksum of each of its parameters, by name.
    """

    type: str
    weights: Mapping[str, int]


def check_kernels(model: Quantized) -> None:
    """Raise `InputError` for kernels and hooks that run code which is not in the file."""
    for node, kernel in kernels_of(model):
        if not kernel.is_unmodified():
            raise InputError(f"{node.name}: its kernel has hooks or its own forward, and a file holds no code.")
        if known_kernels().get(kernel.described.name) is not kernel.described:
            raise InputError(
                f"{node.name}: its kernel is a {kernel.described.__name__}, which has no registered name: "
                f"{kernel.described.name!r} is another class. Give the class its own `name`."
            )
    for path, module in model.named_modules():
        if (module is model or isinstance(module, Unit)) and forward_hooks(module):
            where = f"the unit {path!r}" if path else "the model"
            raise InputError(f"{where} has hooks, and a file holds no code: remove them, and add them after fxq.load.")


def imports_of(model: Quantized) -> Iterator[tuple[str, str]]:
    """Kernels and ops that are not fxq's or torch's, each with its import path."""
    graphs: list[fx.Graph] = [model.graph]
    graphs += [module.graph for module in model.modules() if isinstance(module, Unit)]
    for _, kernel in kernels_of(model):
        kind = kernel.described
        if not _is_ours(kind):
            yield f"kernel {kind.name}", import_path(kind, f"the kernel {kind.name!r}")
        if kernel.form is not None:
            form = kernel.form.module(kernel)
            graphs += [form.graph, *(m.graph for m in form.modules() if isinstance(m, Unit))]
    for op in dict.fromkeys(op_of(node) for graph in graphs for node in graph.nodes):
        if op is not None and not _is_ours(op.target):
            yield f"op {op.name}", import_path(op.target, f"the op {op.name!r}")


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "torch").partition(".")[0] in ("fxq", "torch", *_PYTHON)


_PYTHON = ("operator", "_operator", "math", "builtins")


def check_imports(paths: Mapping[str, str]) -> None:
    """Raise `FxqError` if a kernel or op is not imported, or another one is registered under its name."""
    for kind_and_name, path in paths.items():
        kind, _, name = kind_and_name.partition(" ")
        value = imported(path)
        if kind == "kernel":
            registered = known_kernels()[name].defined_as() if name in known_kernels() else None
        else:
            registered = OPS[name].target if name in OPS else None
        if value is not registered:
            raise InputError(f"the {kind_and_name} of the file is {path}, which is not what is registered here.")


def leaves_of(model: Quantized) -> dict[str, nn.Module]:
    """Modules that the graph of a model calls and that are neither units nor kernels, by path."""
    called = ((str(n.target), submodule(model, n)) for n in model.graph.nodes if n.op == "call_module")
    return {path: module for path, module in called if module is not None and not isinstance(module, (Unit, Kernel))}


def checked_leaves(stored: Mapping[str, StoredLeaf], leaves: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return copies of the caller's leaf modules. Raises `InputError` if they are not those of the model."""
    missing = [path for path in stored if path not in leaves]
    if missing:
        named = ", ".join(f"{path!r}: ..." for path in missing)
        kinds = ", ".join(dict.fromkeys(stored[path].type for path in missing))
        raise InputError(
            f"its leaf modules ({kinds}) are not in the file; pass them: fxq.load(path, leaves={{{named}}})."
        )
    for path, leaf in leaves.items():
        if path not in stored:
            raise InputError(unknown("leaf", path, stored))
        about = StoredLeaf(type(leaf).__name__, checksums(leaf)) if isinstance(leaf, nn.Module) else None
        if about != stored[path]:
            raise InputError(
                f"the leaf {path!r} is not the module that the model was saved with, a {stored[path].type}: its class "
                "or its weights differ."
            )
    return {path: copy.deepcopy(leaf).eval() for path, leaf in leaves.items()}
