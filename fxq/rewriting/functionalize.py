"""Functionalization of a traced graph: in-place ops become ops that return the new value.

It works like the functionalization of `torch.export`. Each storage has a tree of views. A write to a view gives new
values to the views above it, up to the tensor that owns the storage; other views are regenerated from these when a
later node reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import fx

from fxq.graph.analysis.memory import KEEP_STATE_REMEDY, MemoryWatch
from fxq.graph.guards import own_copy
from fxq.graph.info import TracedInfo, info
from fxq.graph.query import reads_only_metadata, swapped
from fxq.ops import OPS
from fxq.rewriting.aliases import Alias, Aliases, Block
from fxq.rewriting.assignments import assigned, cast
from fxq.rewriting.cannot_trace import CannotTrace, around, cannot_change
from fxq.rewriting.in_place import (
    RESHAPING,
    RESIZING,
    dtype_of_call,
    fills_several,
    name_in_place,
    out_of_place,
    written_by,
)

if TYPE_CHECKING:
    from fxq.rewriting.rewriter import Rewriter


class Functionalization:
    """Rewrites a traced graph so that no node changes a value that another node reads.

    Leaf modules and in-place ops without an out-of-place form write to private copies.

    Attributes:
        rewriter: edits the graph.
        watch: which values share memory.
        new_constants: attribute paths of constants that the forward creates in each call, and so may change.
        aliases: traced tensors by the storages that they share.
        rewritten: nodes that now return the new value, or do nothing any more.
        present: aliases of which the current node reads a new value, by the node of that value.
        only_whole: whether all writes so far were elementwise ops of the op table on whole tensors.
    """

    def __init__(self, rewriter: Rewriter, watch: MemoryWatch, new_constants: Collection[str]) -> None:
        self.rewriter, self.watch, self.new_constants = rewriter, watch, new_constants
        self.aliases = Aliases(rewriter, watch)
        self.rewritten: set[fx.Node] = set()
        self.present: dict[fx.Node, Alias] = {}
        self.only_whole = True

    def run(self) -> list[CannotTrace]:
        """Rewrite the graph. Returns the obstacles, at most one per storage; with any, the graph is unusable."""
        breaks: list[CannotTrace] = []
        if not any(info(node).traced.changes for node in self.rewriter.graph.nodes):
            return breaks
        before = set(self.rewriter.graph.nodes)
        broken: set[int] = set()
        with self.rewriter.attributed("functionalize", Functionalization):
            for node in self.rewriter.nodes():
                about = info(node)
                try:
                    if not broken.intersection(about.traced.memory + about.traced.changes):
                        self._node(node)
                except CannotTrace as stop:
                    broken.update(about.traced.memory + about.traced.changes)
                    breaks.append(stop)
            for node in reversed(self.rewriter.nodes()) if not breaks else ():
                if not node.users and (node not in before or node in self.rewritten) and node.op != "output":
                    self.rewriter.erase(node)
        return breaks

    def _node(self, node: fx.Node) -> None:
        read = {arg: self.aliases.read(arg, node) for arg in node.all_input_nodes}
        new = {arg: now for arg, now in read.items() if now is not arg}
        first: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(new.get(first), list):
            part = self.aliases.by_node[first]
            self.aliases.by_node[node] = Alias(node, part.block, part, False, new[first][node.args[1]], part.version)
            return
        self.present = {now: self.aliases.by_node[arg] for arg, now in new.items() if isinstance(now, fx.Node)}
        if new:
            self.rewriter.update(node, args=swapped(node.args, new), kwargs=swapped(node.kwargs, new))
        if info(node).traced.changes:
            self._write(node)
        elif info(node).is_tensor or not reads_only_metadata(node):  # ones_like reads only a shape, but makes a tensor
            self.aliases.register(node, read)

    # ---- writing

    def _write(self, node: fx.Node) -> None:
        """Make a node that writes to memory return the new value instead."""
        blocks, named = {self.aliases.block(number) for number in info(node).traced.changes}, written_by(node)
        args = [a for a in node.all_input_nodes if self._shares(a, blocks)]
        written = [named] if named is not None and named in args else args
        aliases = []
        for arg in written:
            alias = self._alias(arg)
            if alias is None:
                raise cannot_change(node, arg, "a call returns it together with other values")
            aliases.append(alias)
            self._check_state(node, alias)
        if len({alias.block for alias in aliases}) != len(aliases) or not aliases:
            raise cannot_change(node, (written or [node])[0], "the op takes more than one view of that memory")
        name = name_in_place(node)
        if name in RESIZING and node.op != "call_module":
            raise cannot_change(node, written[0], "the op changes its size or storage")
        if name in RESHAPING and node.op == "call_method":
            self._reshape(node, aliases[0])
            return
        for alias in aliases:
            self._check_overlap(node, alias)
        self._check_read_overlap(node, args, aliases)
        self.only_whole &= self._is_elementwise(node) and all(alias.parent is None or alias.same for alias in aliases)
        news = self._filled(node) if fills_several(node) else None
        if news is None:
            functional = self._functional(node, aliases[0]) if len(aliases) == 1 else None
            news = [functional] if functional is not None else self._on_copies(node, aliases)
        for alias, new in zip(aliases, news, strict=True):
            self.aliases.set_value(alias, new, node)
        if node not in self.aliases.by_node and info(node).traced.memory:
            self.aliases.register(node, {})

    def _is_elementwise(self, node: fx.Node) -> bool:
        """Whether a node calls an elementwise op of the op table."""
        if node.op == "call_module":
            row = OPS.of_module(self.rewriter.gm.get_submodule(str(node.target)))
        else:
            row = OPS.of_call(node.target)
        return row is not None and (row[0].traits.pointwise or row[0].traits.narrows)

    def _check_state(self, node: fx.Node, alias: Alias) -> None:
        """Raise `CannotTrace` for a write to a tensor of the model, as a graph keeps none across calls."""
        while alias.parent is not None:
            alias = alias.parent
        if alias.node.op == "get_attr" and alias.node.target not in self.new_constants:
            of, why = f"{alias.node.target!r}, a tensor of the model,", KEEP_STATE_REMEDY
            if str(alias.node.target).startswith("_tensor_constant"):  # named by the trace, in no module
                of = "a tensor that the graph stores as a constant, since no traced call makes it (torch.from_numpy),"
                why = "a graph keeps no state between calls. Make it with torch (torch.zeros, torch.tensor)."
            raise CannotTrace(around(node), f"%{node.name} ({info(node).source}) changes {of} in place: {why}")

    def _check_overlap(self, node: fx.Node, alias: Alias) -> None:
        """Refuse a change of a view with elements that share memory, which a copy would not share."""
        written, above = alias.node, [alias]
        while above[-1].parent is not None:
            above.append(above[-1].parent)
        for part in above:
            if self.watch.overlaps(part.node):
                of = "" if part is alias else f"part of %{part.node.name}, and "
                why = f"{of}elements of %{part.node.name} ({info(part.node).source}) share memory, as after expand"
                raise cannot_change(node, written, why)

    def _check_read_overlap(self, node: fx.Node, args: list[fx.Node], aliases: list[Alias]) -> None:
        """Refuse a write to elements that the same call still has to read: `x[1:] = x[:-1]`."""
        if len(aliases) != 1 or len(args) < 2 or self._is_read_back(node):
            return
        written, place = aliases[0].node, node.args[1] if node.target is operator.setitem else ...
        for arg in args:
            read = self._alias(arg)
            if read is not None and read is not aliases[0] and self.watch.overwrites(written, place, read.node):
                why = (
                    f"it reads %{read.node.name} ({info(read.node).source}), which shares some of these elements, and "
                    "PyTorch does not define whether it reads them before or after the write. Read from a copy: "
                    "x[1:] = x[:-1].clone()"
                )
                raise cannot_change(node, written, why)

    def _alias(self, value: fx.Node) -> Alias | None:
        """Alias of an argument of the current node."""
        return self.present.get(value) or self.aliases.by_node.get(value)

    def _shares(self, value: fx.Node, blocks: set[Block]) -> bool:
        """Whether a value has memory in one of these storages."""
        alias = self._alias(value)
        own_blocks = [alias.block] if alias is not None else self.aliases.containers.get(value, ())
        return not blocks.isdisjoint(own_blocks)

    def _reshape(self, node: fx.Node, alias: Alias) -> None:
        """Rewrite a call such as `x.unsqueeze_(0)`: later nodes that read x read another view of the same memory."""
        self.rewriter.update(node, target=str(node.target)[:-1])
        self.rewriter.describe(node, traced=info(node).traced._replace(changes=()))
        new = Alias(node, alias.block, alias, False, node, alias.block.version, alias.now)
        for value in [value for value in self.aliases.by_node if self.watch.same_object(value, node)]:
            self.aliases.by_node[value] = new
        self.aliases.by_node[node] = new

    def _functional(self, node: fx.Node, alias: Alias) -> fx.Node | None:
        """Turn a node into a call that returns the new value; None if torch has no out-of-place form."""
        x, dtype = alias.now, info(alias.node).dtype
        if self._stays(node, alias):
            return node
        if node.op == "call_module":
            return None
        if _assigns(node):
            return self._assigned(node, x)
        call = out_of_place(node)
        if call is None or written_by(node) is not x:
            return None
        if "out" in node.kwargs and not self._fills_out(node, call):
            raise cannot_change(node, alias.node, "out= may resize it")
        self.rewritten.add(node)
        if dtype_of_call(call) in (None, dtype):
            self.rewriter.update(node, call.target, call.args, call.kwargs, op=call.kind)
        else:
            typed = info(alias.node).shape, dtype_of_call(call)
            result = self.rewriter.node(
                call.kind, call.target, call.args, call.kwargs, like=node, before=node, typed=typed
            )
            self.rewriter.update(node, "to", (result, dtype), {}, op="call_method")
        self.rewriter.describe(node, traced=info(node).traced._replace(memory=(), changes=()))
        return node

    def _filled(self, node: fx.Node) -> list[fx.Node]:
        """Turn `torch.sort(x, out=(v, i))` into a call that returns its values. Returns them in the order of `out`."""
        outs: Any = node.kwargs["out"]
        kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        result = self.rewriter.node(node.op, node.target, node.args, kwargs, like=node, before=node)
        self.rewriter.describe(result, traced=TracedInfo())
        news: list[fx.Node] = []
        for i, ((shape, dtype), out) in enumerate(zip(self.watch.parts[node], outs, strict=True)):
            if shape != info(out).shape:
                raise cannot_change(node, out, "out= may resize it")
            part = self.rewriter.node(
                "call_function", operator.getitem, (result, i), like=node, before=node, typed=(shape, dtype)
            )
            news.append(part)
        self.rewriter.reroute(node, result)
        self.rewritten.add(node)
        return news

    def _stays(self, node: fx.Node, alias: Alias) -> bool:
        """Whether a node may stay in place, as `canonicalize` will replace it and its operand owns its storage."""
        owns = alias.parent is None and alias.now is alias.node and alias.node.op != "get_attr"
        if not owns or not self.watch.same(alias.node, node):
            return False
        if node.op == "call_module":
            module = self.rewriter.gm.get_submodule(str(node.target))
            return OPS.of_module(module) is not None and info(node).traced.kept is None
        call = out_of_place(node)
        in_table = OPS.of_call(node.target) is not None and node.args[:1] == (alias.node,) and "out" not in node.kwargs
        return in_table and call is not None and dtype_of_call(call) == info(alias.node).dtype

    def _fills_out(self, node: fx.Node, call: Any) -> bool:
        out: Any = node.kwargs["out"]
        return info(node).shape == info(out).shape

    def _assigned(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """Replace an assignment by a node with the new value of its target, and return that node."""
        name = name_in_place(node)
        args: Any = node.args
        if name == "copy_":
            value: Any = args[1] if len(args) > 1 else node.kwargs["src"]
            value = cast(self.rewriter, value, info(x).dtype, node, node)
            result = self.rewriter.call(
                "expand_as", value, x, like=node, before=node, typed=(info(x).shape, info(x).dtype)
            )
        elif name == "index_put_":
            index = tuple(slice(None) if part is None else part for part in args[1])
            result = assigned(self.rewriter, x, index, args[2], node, node)
        else:
            _, place, value = args
            done = self._is_read_back(node)  # x[i] += 1 ends in x[i] = x[i], and x is updated already
            result = x if done else assigned(self.rewriter, x, place, value, node, node)
        self.rewriter.reroute(node, result)
        self.watch.replaced(node, result)
        self.rewritten.add(node)
        return result

    def _is_read_back(self, node: fx.Node) -> bool:
        """Whether a node is an assignment `x[i] = x[i]`."""
        if node.target is not operator.setitem or not isinstance(node.args[2], fx.Node):
            return False
        source, target = self._alias(node.args[2]), self._alias(node.args[0])  # type: ignore[arg-type]
        return source is not None and source.parent is target and _takes(source.node, node.args[1])

    def _on_copies(self, node: fx.Node, aliases: list[Alias]) -> list[fx.Node]:
        """Make a node write to private copies, which become the new values."""
        copies = {}
        for alias in aliases:
            about = info(alias.node)
            copied = self.rewriter.node(
                "call_function", own_copy, (alias.now,), like=alias.node, before=node, typed=(about.shape, about.dtype)
            )
            self.rewriter.describe(copied, traced=TracedInfo(memory=(self.watch.new_block(),)), origins=())
            copies[alias.now] = copied
        whole = next((alias for alias in aliases if self.watch.same(alias.node, node)), None)
        self.rewriter.update(node, args=swapped(node.args, copies), kwargs=swapped(node.kwargs, copies))
        blocks = tuple(info(copied).traced.memory[0] for copied in copies.values())
        written = set().union(*(info(alias.node).traced.memory for alias in aliases))
        memory = tuple(block for block in info(node).traced.memory if block not in written)
        memory = info(copies[whole.now]).traced.memory if whole is not None else memory
        self.rewriter.describe(node, traced=info(node).traced._replace(memory=memory, changes=blocks))
        return [node if alias is whole else copies[alias.now] for alias in aliases]


def _assigns(node: fx.Node) -> bool:
    """Whether a call is an assignment: `x[i] = y`, `copy_` or `index_put_`."""
    name = name_in_place(node)
    is_put = name == "index_put_" and len(node.args) > 2 and not any((*node.args[3:], *node.kwargs.values()))
    return node.target is operator.setitem or name == "copy_" or is_put


def _takes(view: fx.Node, index: Any) -> bool:
    """Whether a view is `x[index]`."""
    return view.target is operator.getitem and bool(view.args[1] == index)
