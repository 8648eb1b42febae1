"""Module that runs an exported program (`torch.export`), with the signature and module paths of the user's model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxq.common.data import Batch
from fxq.common.source import import_name, short_path
from fxq.errors import InputError, RecipeError
from fxq.graph.guards import check_sizes
from fxq.graph.query import arguments_of
from fxq.graph.run import Runner
from fxq.tracing.dependence import function_name
from fxq.tracing.proxies import is_value

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ASSERTIONS = ("_assert", "sym_constrain_range")


class Exported(nn.Module):
    """Module that runs an exported program. Tracing it gives the program's own nodes.

    Attributes:
        types: module types by path, as far as the program records them.
        at: the node of the program that runs now. Traced nodes get its path and source line.
    """

    at: fx.Node | None

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        inner = program.module(check_guards=False)  # `check_sizes` checks them, with clearer messages
        _check(inner.graph)
        for registry in ("_modules", "_parameters", "_buffers"):
            getattr(self, registry).update(getattr(inner, registry))
        for module in self.modules():
            module.training = False
        self.at = None
        self.types: dict[str, type[nn.Module]] = {"": nn.Module, **_types(inner.graph)}
        self.forward = _Forward(self, inner, _sizes(inner.graph, program.range_constraints))

    def place(self) -> tuple[str, str]:
        """Module path and `file:line` of the node that runs."""
        return (_path(self.at), _line(self.at)) if self.at is not None else ("", "")


class _Forward:
    """Forward of an exported program, with the signature of the exported model."""

    def __init__(self, owner: Exported, inner: fx.GraphModule, sizes: list[Any]) -> None:
        self.owner, self.inner, self.sizes = owner, inner, sizes
        codegen: Any = inner.graph._codegen
        self.spec: Any = codegen.pytree_info
        positional, named = self.spec.in_spec.children()
        self.keywords: list[str] = list(named.context or ())
        first = [*self.spec.orig_args][: positional.num_children]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.keywords]
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs).arguments
        named = {name: bound.pop(name) for name in self.keywords}
        flat, spec = pytree.tree_flatten((tuple(bound.values()), named))
        if spec != self.spec.in_spec:
            raise InputError(f"the program was exported for inputs of the form {self.spec.in_spec}, but got {spec}.")
        for value, (name, sizes) in zip(flat, self.sizes, strict=True):
            if is_value(value) and sizes:
                value.tracer.create_proxy("call_function", check_sizes, (value, name, sizes), {})
            elif isinstance(value, Tensor) and sizes:
                check_sizes(value, name, sizes)
        try:
            return pytree.tree_unflatten(_ProgramRunner(self.inner, self.owner, flat).run(), self.spec.out_spec)
        finally:
            self.owner.at = None


class _ProgramRunner(Runner):
    """Runs the program's graph, and tells its owner which node runs."""

    def __init__(self, inner: fx.GraphModule, owner: Exported, inputs: list[Any]) -> None:
        super().__init__(inner, Batch(tuple(inputs)))
        self.owner = owner

    def compute(self, node: fx.Node) -> Any:
        """Value of a node; None for the exporter's assertions, since sizes are checked at the inputs."""
        self.owner.at, name = node, function_name(node.target) if node.op == "call_function" else ""
        if name.startswith(_ASSERTIONS):
            return None
        if name == "wrap_with_set_grad_enabled":
            args, _ = arguments_of(node, self.values)
            return args[1](*args[2:])
        return super().compute(node)


def _check(graph: fx.Graph) -> None:
    """Refuse programs that change the model's tensors or inputs in place, or that were exported in train mode."""
    changed = [n for n in graph.nodes if n.op == "call_function" for n in _overwritten(n) if n.op != "call_function"]
    if changed:
        raise InputError(
            f"the exported program changes {', '.join(str(n.target) for n in changed)} in place, but a quantized graph "
            "keeps no state between calls. Export the model in eval mode, without such changes, or pass the model."
        )
    for node in graph.nodes:
        at = _TRAINING.get(function_name(node.target)) if node.op == "call_function" else None
        if at is not None and node.args[at : at + 1] == (True,):
            raise InputError(
                f"the program was exported in train mode ({node.name}, {_line(node)}). Call model.eval() before "
                "torch.export.export."
            )


_TRAINING = {"dropout": 2, "feature_dropout": 2, "alpha_dropout": 2, "batch_norm": 5}
"""Position of the argument that says whether an aten op runs in train mode."""


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """Arguments that a node of the program changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [v for a, v in zip(schema.arguments, node.args, strict=False) if a.alias_info and a.alias_info.is_write]
    return [v for v in written if isinstance(v, fx.Node)]


def _path(node: fx.Node) -> str:
    """Module path of a node of the program."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return _plain(stack[-1][0]) if stack else ""


def _plain(path: str) -> str:
    if path.startswith("_empty_nn_module_stack"):
        return ""
    path = re.sub(r"@\d+$", "", path).removeprefix("L['self']")
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).strip(".")


def _line(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside torch that a node comes from; empty if none is recorded."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in places if "/torch/" not in file.replace("\\", "/")]
    return f"{short_path(own[-1][0])}:{own[-1][1]}" if own else ""


def _types(graph: fx.Graph) -> dict[str, type[nn.Module]]:
    types: dict[str, type[nn.Module]] = {}
    for node in graph.nodes:
        for path, kind in node.meta.get("nn_module_stack", {}).values():
            if _plain(path) and _plain(path) not in types:
                types[_plain(path)] = _type(kind)
    return types


def _type(kind: Any) -> type[nn.Module]:
    if isinstance(kind, type):
        return kind
    module, _, name = str(kind).rpartition(".")
    try:
        cls: type[nn.Module] = import_name(f"{module}:{name}", nn.Module)
    except RecipeError:  # a class local to a function
        return nn.Module
    return cls


def _sizes(graph: fx.Graph, ranges: Mapping[Any, Any]) -> list[tuple[str, list[Any]]]:
    """Name and sizes of each flat input. A size is a number if it is fixed, else its bounds [least, most or None]."""
    inputs = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = [_size(s, ranges) for s in value.shape] if isinstance(value, Tensor) else []
        inputs.append((str(node.target), sizes))
    return inputs


def _size(size: Any, ranges: Mapping[Any, Any]) -> Any:
    if isinstance(size, int):
        return size
    bounds = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
    if bounds is None:
        return [0, None]
    return [int(bounds.lower), int(bounds.upper) if bounds.upper < 2**31 else None]
