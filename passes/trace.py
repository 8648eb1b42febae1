"""trace: the user's model as a graph, with shapes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

import fxq.errors
from fxq.alias import Watch
from fxq.data import Batch, check_fixed
from fxq.errors import FxqError, InputError, RecipeError, TraceError, nearest, words_of
from fxq.graph import info, reads_only_metadata, set_info, tensor_meta
from fxq.ops import OPS
from fxq.passbase import Pass, Stage
from fxq.pattern import short_path, source_of
from fxq.rewrite import Rewriter


@dataclass(frozen=True)
class Trace(Pass):
    """Trace the model with `torch.fx` and find the shape of every value with one batch.

    Before: nothing    After: the model's own calls, any spelling, `torch.nn` modules as leaves
    Keeps: what the model computes; its parameters are shared, not copied.  Source: Reed et al. 2022, section 4.
    """

    name: ClassVar[str] = "trace"
    needs: ClassVar[Stage] = Stage.NONE
    gives: ClassVar[Stage] = Stage.TRACED

    def run(self, rewriter: Rewriter) -> None:
        """Replace the rewriter's empty module by the traced one."""
        context = rewriter.context
        _check_leaves(context.recipe.leaf_modules, context.types)
        _check_hooks(context.model)
        known = set(vars(context.model))
        try:
            graph = _trace(context.model, context.recipe.leaf_modules, context.example)
            gm = fx.GraphModule(context.model, graph, class_name=type(context.model).__name__)
        finally:  # torch.fx leaves tensors that a forward makes (torch.zeros(8)) on the model; the graph has its own
            for name in set(vars(context.model)) - known:
                delattr(context.model, name)
        traced = Rewriter(gm, context, self.name, source_of(type(self).run))
        _check_arguments(gm, context.example)
        shapes = _Shapes(gm)
        context.outputs = shapes.run_batch(context.example)
        for node in gm.graph.nodes:
            kept = node.op == "call_module" and _is_kept(str(node.target), context.recipe.leaf_modules)
            note = "the recipe keeps this module as it is" if kept else ""
            traced.describe(node, origins=(node.name,) if _is_call(node) else (), note=note)
        _functionalize(traced, shapes.watch)
        rewriter.gm, rewriter.edits, rewriter.touched = gm, traced.edits, traced.touched


def _is_call(node: fx.Node) -> bool:
    """Whether a node stands for a call that the model makes."""
    return node.op.startswith("call") and node.target is not check_fixed


def _trace(model: nn.Module, leaves: tuple[str, ...], example: Batch) -> fx.Graph:
    """The graph. A number that is an argument by default stays an argument, unless the model branches on it."""
    try:
        return _Tracer(leaves, example).trace_model(model)
    except TraceError:
        try:
            return _Tracer(leaves, example, fix_numbers=True).trace_model(model)
        except TraceError:
            pass
        raise


class _Tracer(fx.Tracer):
    """Traces with the module path and source line of every node, and explains what it cannot trace."""

    def __init__(self, leaves: tuple[str, ...], example: Batch, fix_numbers: bool = False) -> None:
        super().__init__()
        self.leaves, self.example, self.fix_numbers = leaves, example, fix_numbers
        self.blamed: fx.Node | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """The recipe's leaf modules, torch's own modules, and what the op table knows."""
        if _is_kept(module_qualified_name, self.leaves):
            return True
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or "forward" in vars(m):
            return False  # a forward set on the object is not that of its type, so what the table says does not hold
        return super().is_leaf_module(m, module_qualified_name) or type(m) in _SPELLED_MODULES

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Forward's arguments. Those that the example fixes are given as what they are, so that forward may branch."""
        forward, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        first = int(is_module)
        fixed = {
            i: v for i, arg in enumerate(args[first:], first) if (v := self._fixed(i - first, arg.node)) != _VARIES
        }
        if fixed:
            inputs = {str(args[i].node.target): args[i].node for i in fixed}
            expected = {name: fixed[i] for name, i in zip(inputs, fixed, strict=True)}
            self.create_node("call_function", check_fixed, (inputs, expected), {})
        return forward, [fixed.get(i, arg) for i, arg in enumerate(args)]

    def _fixed(self, position: int, node: fx.Node) -> Any:
        """The value of an argument that the graph is made for: None, a flag, a string; `_VARIES` for others."""
        name = str(node.target)
        given: Any = _VARIES
        if position < len(self.example.args):
            given = self.example.args[position]
        elif name in self.example.kwargs:
            given = self.example.kwargs[name]
        elif node.args and not name.startswith("*"):
            given = node.args[0]
            if self.fix_numbers and isinstance(given, (int, float, complex)):
                return given
        return given if given is None or isinstance(given, (bool, str)) else _VARIES

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node with its module path and the line of user code that made it."""
        node = super().create_node(*args, **kwargs)
        inside = list(node.meta.get("nn_module_stack", {}).values())
        path = str(node.target) if node.op == "call_module" else str(inside[-1][0]) if inside else ""
        set_info(node, path=path, source="" if node.op in ("placeholder", "output") else _user_line())
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A branch on a traced value: remember which, for the error."""
        self.blamed = obj.node
        return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Any:
        """A loop over a traced value: remember which, for the error."""
        self.blamed = obj.node
        return super().iter(obj)

    def trace_model(self, model: nn.Module) -> fx.Graph:
        """`trace`, with errors that name the line, the value and the ways out."""
        try:
            return super().trace(model)
        except FxqError:
            raise
        except Exception as error:  # whatever the user's forward raises
            raise TraceError(self._explain(model, error)) from error

    def _explain(self, model: nn.Module, error: Exception) -> str:
        frame = error.__traceback__
        place, local, module = "", {}, None
        while frame is not None:
            code = frame.tb_frame.f_code
            if not code.co_filename.startswith(_LIBRARY):
                place = f"{short_path(code.co_filename)}:{frame.tb_lineno}"
                local = frame.tb_frame.f_locals
                owner = local.get(code.co_varnames[0]) if code.co_argcount else None
                module = owner if isinstance(owner, nn.Module) else module
            frame = frame.tb_next
        path = next((name for name, m in model.named_modules() if m is module), "") if module is not None else ""
        values = [f"{name} (%{v.node.name})" for name, v in local.items() if isinstance(v, fx.Proxy)]
        layer = f' in layer "{path}"' if path else ""
        leaf = f'recipe.leaf("{path}")' if path else 'recipe.leaf("path.of.module") for a module that holds it'
        reason = str(error).strip().partition(". ")[0].rstrip(".")
        return (
            f"cannot trace {place or type(model).__name__}{layer}: {reason}. "
            f"{_blame(self.blamed, values)}"
            "A graph has no branches or loops over values. Two ways out: write it without (torch.where, a fixed "
            f"number of iterations), or keep the module as a float leaf: {leaf}."
        )


_VARIES = "<an argument that is not fixed>"


def _blame(node: fx.Node | None, values: list[str]) -> str:
    """The value that a branch or loop depends on; else all that were traced in that function."""
    if node is not None:
        name = getattr(node.target, "__name__", node.target)
        inputs = ", ".join(f"%{n.name}" for n in node.all_input_nodes)
        made = f" = {name}({inputs}), {info(node).source}" if node.op != "placeholder" else ", an input of the model"
        return f"It depends on the value %{node.name}{made}. "
    return f"Values traced there: {', '.join(values)}. " if values else ""


_SPELLED_MODULES = frozenset(
    s.target for row in OPS for s in row.spellings if isinstance(s.target, type) and issubclass(s.target, nn.Module)
)


_LIBRARY = ("<", *(os.path.dirname(f) + os.sep for f in (torch.__file__, fxq.errors.__file__, __file__)))


def _user_line() -> str:
    """`file:line` of the innermost frame outside torch and fxq."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def _is_kept(path: str, leaves: tuple[str, ...]) -> bool:
    """Whether the recipe says that a module is not to be traced into."""
    return any(fnmatchcase(path, pattern) for pattern in leaves)


def _check_leaves(leaves: tuple[str, ...], types: Any) -> None:
    for pattern in leaves:
        if not any(fnmatchcase(path, pattern) for path in types if path):
            near = nearest(pattern, [p for p in types if p], 5)
            raise RecipeError(
                f"leaf module {pattern!r} matches no module of the model; near: {', '.join(near) or 'nothing'}. "
                "Paths are those of model.named_modules()."
            )


def _check_hooks(model: nn.Module) -> None:
    if len(model._forward_hooks) + len(model._forward_pre_hooks) > 0:
        raise TraceError(
            f"the model ({type(model).__name__}) has forward hooks of its own, which a trace of its forward does not "
            "see. Remove them (handle.remove()), or give a module that calls this one: nn.Sequential(model)."
        )


def _check_arguments(gm: fx.GraphModule, example: Batch) -> None:
    """Check that the example gives every argument without a default."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if any(str(n.target).startswith("**") for n in inputs):
        raise InputError("forward takes **keywords, which torch.fx cannot trace; name the arguments in its signature.")
    given = {str(n.target) for n in inputs[: len(example.args)]} | set(example.kwargs)
    missing = [str(n.target) for n in inputs if str(n.target).lstrip("*") not in given and not n.args]
    missing = [name for name in missing if not name.startswith("*")]
    if missing:
        raise InputError(f"the data gives {example}, but the model also needs {', '.join(missing)}.")


class _Shapes(fx.Interpreter):
    """Runs the float model once and notes the shape, dtype and memory of every value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # fxq's own messages say where
        self.watch = Watch()
        self._attributes: dict[str, Any] = {}

    def run_batch(self, batch: Batch) -> Any:
        """Run on a copy of one batch, so that nothing of the user's is changed in place; what the model returns."""
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count their changes
            values: list[Any] = [_copied(v) for v in batch.args]
            for node in inputs[len(values) :]:
                name = str(node.target)
                values.append(_copied(batch.kwargs[name]) if name in batch.kwargs else node.args[0])
            return self.run(*values)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A copy of a tensor of the model, the same one for each reader."""
        if target not in self._attributes:
            self._attributes[target] = _copied(super().get_attr(target, args, kwargs))
        return self._attributes[target]

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; errors name the layer and what it was given."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        before = self.watch.versions((args, kwargs))
        try:
            value = super().run_node(n)
        except FxqError:
            raise
        except Exception as error:
            given = ", ".join(
                f"{a.dtype} {list(a.shape)}".removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)
            )
            layer = f'layer "{info(n).path}"' if info(n).path else f"%{n.name}"
            raise InputError(
                f"the model does not run on the example: {layer} ({info(n).source}) got {given}: {words_of(error)}"
            ) from error
        changes = self.watch.changed(before)
        for node in n.all_input_nodes if changes else ():
            self.watch.see(node, self.env[node])  # unsqueeze_ changes how its input is laid out
        self.watch.see(n, value)
        shape, dtype = tensor_meta(value)
        set_info(n, shape=shape, dtype=dtype, memory=self.watch.memory(value), changes=changes)
        return value


def _copied(value: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, value)


def _functionalize(rewriter: Rewriter, watch: Watch) -> None:
    """Let every later reader of a value that an op overwrites with its result read that result instead.

    With that, the in-place spelling of a table op can be replaced by the plain one. A later reader of the same memory
    in another form (a view) cannot be helped that way: then the model has to be changed.
    """
    order = {node: i for i, node in enumerate(rewriter.graph.nodes)}
    known: dict[int, list[fx.Node]] = {}  # the values in each block, as far as later nodes can read them
    for node in rewriter.nodes():
        about = info(node)
        for block in about.changes:
            known[block] = [v for v in known.get(block, ()) if _still_read(rewriter, watch, order, node, v)]
        for block in about.memory:
            known.setdefault(block, []).append(node)


def _still_read(rewriter: Rewriter, watch: Watch, order: dict[fx.Node, int], node: fx.Node, value: fx.Node) -> bool:
    """Let the readers of `value` behind `node`, which changes its memory, read the result; whether any are left."""
    if value.op == "get_attr":
        _check_state(node, value)
    later = [u for u in value.users if order[u] > order[node]]
    if watch.same(value, node):
        if later:
            with rewriter.attributed("functionalize", _functionalize):
                rewriter.reroute(value, node, only=set(later).__contains__)
        return False
    reader = next((u for u in later if not reads_only_metadata(u)), None)
    if reader is None:
        return False
    changed = [n for n in node.all_input_nodes if set(info(n).memory) & set(info(node).changes)]
    if value in changed and not set(info(node).memory) & set(info(node).changes):
        return True  # it returns something else: whoever reads the value behind it reads what it wrote
    first = next((n for n in changed if watch.same(n, node)), changed[0])
    raise TraceError(
        f"%{node.name} ({info(node).source}) changes %{first.name} in place, and %{reader.name} "
        f"({info(reader).source}) reads the same memory through %{value.name} afterwards. Write the "
        "change out of place (x = x + y, nn.ReLU(inplace=False))."
    )


def _check_state(node: fx.Node, value: fx.Node) -> None:
    """Refuse a change of the model's own tensors: the plain spelling of the op would not make it."""
    if not str(value.target).startswith("_tensor_constant"):  # those torch.fx makes of what a forward makes anew
        raise TraceError(
            f"%{node.name} ({info(node).source}) changes {value.target!r}, a tensor of the model, in place: a graph "
            "keeps no state between calls. Keep the module as a float leaf (recipe.leaf), or return the new value."
        )
