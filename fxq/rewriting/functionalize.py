"""Functionalization of a traced graph: in-place ops become ops that return the new value.

It works like the functionalization of `torch.export`. Each storage has a tree of views. A write to a view gives new
values to the views above it, up to the tensor that owns the storage; other views are regenerated from these when a
later node reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from torch import fx

from fxq.graph.analysis.memory import KEEP_STATE_REMEDY, MemoryWatch
from fxq.graph.guards import own_copy
from fxq.graph.info import TracedInfo, info
from fxq.graph.query import reads_only_metadata, swapped
from fxq.ops import OPS
from fxq.rewriting.aliases import Alias, Block
from fxq.rewriting.assignments import assigned, cast
from fxq.rewriting.in_place import (
    RESHAPING,
    RESIZING,
    dtype_of_call,
    fills_several,
    name_in_place,
    out_of_place,
    written_by,
)
from fxq.rewriting.view_inverse import cut_along, written_back

if TYPE_CHECKING:
    from fxq.rewriting.rewriter import Rewriter


class CannotTrace(Exception):
    """Behavior of a module that a graph cannot reproduce. `path` is that of the innermost module that contains it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


class Functionalization:
    """Rewrites a traced graph so that no node changes a value that another node reads.

    Leaf modules and in-place ops without an out-of-place form write to private copies.

    Attributes:
        rewriter: edits the graph.
        watch: which values share memory.
        new_constants: attribute paths of constants that the forward creates in each call, and so may change.
        blocks: storages by number.
        aliases: traced tensors in these storages, and tuples of views, by node.
        containers: nodes whose values hold several tensors, each with the versions of their storages when it ran.
        spots: first tensor with each position and layout in memory.
        rewritten: nodes that now return the new value, or do nothing any more.
        present: aliases of which the current node reads a new value, by the node of that value.
        only_whole: whether all writes so far were elementwise ops of the op table on whole tensors.
    """

    def __init__(self, rewriter: Rewriter, watch: MemoryWatch, new_constants: Collection[str]) -> None:
        self.rewriter, self.watch, self.new_constants = rewriter, watch, new_constants
        self.blocks: dict[int, Block] = {}
        self.aliases: dict[fx.Node, Alias] = {}
        self.containers: dict[fx.Node, dict[Block, int]] = {}
        self.spots: dict[Any, Alias] = {}
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
        read = {arg: self._read(arg, node) for arg in node.all_input_nodes}
        new = {arg: now for arg, now in read.items() if now is not arg}
        first: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(new.get(first), list):
            part = self.aliases[first]
            self.aliases[node] = Alias(node, part.block, part, False, new[first][node.args[1]], part.version)
            return
        self.present = {now: self.aliases[arg] for arg, now in new.items() if isinstance(now, fx.Node)}
        if new:
            self.rewriter.update(node, args=swapped(node.args, new), kwargs=swapped(node.kwargs, new))
        if info(node).traced.changes:
            self._write(node)
        elif info(node).is_tensor or not reads_only_metadata(node):  # ones_like reads only a shape, but makes a tensor
            self._register(node, read)

    # ---- reading

    def _read(self, arg: fx.Node, node: fx.Node) -> Any:
        """Node with the current value of an argument."""
        alias = self.aliases.get(arg)
        if alias is not None:
            return alias.node if reads_only_metadata(node) else self._now(alias, node)
        taken = node.target is operator.getitem and node.args[0] is arg
        for block, version in self.containers.get(arg, {}).items() if not taken else ():
            if block.version != version:
                raise self._stale(block, node, arg)
        return arg

    def _now(self, alias: Alias, before: fx.Node) -> Any:
        """Current value of an alias, regenerated if its storage was written to since."""
        if alias.version != alias.block.version:
            if alias.changed is not None:
                alias.now = self._parent_value(alias.changed, alias.now, self._now(alias.changed, before), before)
            elif alias.parent is not None:
                alias.now = self._regenerated(alias, self._now(alias.parent, before), before)
            else:
                raise self._stale(alias.block, before, alias.node)
            alias.changed, alias.version = None, alias.block.version
        return alias.now

    def _regenerated(self, alias: Alias, whole: Any, before: fx.Node) -> Any:
        view, parent = alias.node, alias.parent
        assert parent is not None
        if alias.same:
            return whole
        if isinstance(whole, list):  # views of a tuple
            return whole[_place(view)]
        about, new = info(view), {alias.slot or parent.node: whole}
        args, kwargs = swapped(view.args, new), swapped(view.kwargs, new)
        typed = about.shape, about.dtype
        again = self.rewriter.node(view.op, view.target, args, kwargs, like=view, before=before, typed=typed)
        self.aliases[again] = alias
        return again

    def _stale(self, block: Block, reader: fx.Node, value: fx.Node) -> CannotTrace:
        writer = block.writer
        assert writer is not None
        return CannotTrace(
            around(writer, reader),
            f"%{writer.name} ({info(writer).source}) writes to memory in place, and %{reader.name} "
            f"({info(reader).source}) reads it through %{value.name} afterwards. Write the "
            "change out of place (x = x + y, nn.ReLU(inplace=False)).",
        )

    # ---- values

    def _block(self, number: int) -> Block:
        return self.blocks.setdefault(number, Block())

    def _register(self, node: fx.Node, read: dict[fx.Node, Any]) -> None:
        """Register the result of a node that writes nothing."""
        about = info(node)
        cut = cut_along(node) if not about.is_tensor and about.traced.memory else None
        if not about.is_tensor and cut is None:
            if about.traced.memory:
                self.containers[node] = {b: b.version for b in map(self._block, about.traced.memory)}
        elif len(about.traced.memory) == 1:
            block = self._block(about.traced.memory[0])
            spot, parent, slot = self.watch.spot(node), None, None
            for arg, now in read.items():
                if parent is None and (alias := self.aliases.get(arg)) is not None and alias.block is block:
                    parent, slot = alias, now if isinstance(now, fx.Node) else arg
            same = parent is not None and self.watch.same(parent.node, node)
            if parent is None and spot in self.spots:
                parent, same = self.spots[spot], True
            version = block.version if slot is not None else 0
            self.aliases[node] = Alias(node, block, parent, same, node, version, slot)
            if spot is not None:
                self.spots.setdefault(spot, self.aliases[node])

    # ---- writing

    def _write(self, node: fx.Node) -> None:
        """Make a node that writes to memory return the new value instead."""
        blocks, named = {self._block(number) for number in info(node).traced.changes}, written_by(node)
        args = [a for a in node.all_input_nodes if self._shares(a, blocks)]
        written = [named] if named is not None and named in args else args
        aliases = []
        for arg in written:
            alias = self._alias(arg)
            if alias is None:
                raise self._refused(node, arg, "a call returns it together with other values")
            aliases.append(alias)
            self._check_state(node, alias)
        if len({alias.block for alias in aliases}) != len(aliases) or not aliases:
            raise self._refused(node, (written or [node])[0], "the op takes more than one view of that memory")
        name = name_in_place(node)
        if name in RESIZING and node.op != "call_module":
            raise self._refused(node, written[0], "the op changes its size or storage")
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
            self._set_value(alias, new, node)
        if node not in self.aliases and info(node).traced.memory:
            self._register(node, {})

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
                raise self._refused(node, written, why)

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
                raise self._refused(node, written, why)

    def _alias(self, value: fx.Node) -> Alias | None:
        """Alias of an argument of the current node."""
        return self.present.get(value) or self.aliases.get(value)

    def _shares(self, value: fx.Node, blocks: set[Block]) -> bool:
        """Whether a value has memory in one of these storages."""
        alias = self._alias(value)
        own_blocks = [alias.block] if alias is not None else self.containers.get(value, ())
        return not blocks.isdisjoint(own_blocks)

    def _refused(self, node: fx.Node, value: fx.Node, why: str) -> CannotTrace:
        return CannotTrace(
            around(node),
            f"%{node.name} ({info(node).source}) changes %{value.name} in place: {why}. Write the change out of place "
            "(x = x + y, nn.ReLU(inplace=False)).",
        )

    def _reshape(self, node: fx.Node, alias: Alias) -> None:
        """Rewrite a call such as `x.unsqueeze_(0)`: later nodes that read x read another view of the same memory."""
        self.rewriter.update(node, target=str(node.target)[:-1])
        self.rewriter.describe(node, traced=info(node).traced._replace(changes=()))
        new = Alias(node, alias.block, alias, False, node, alias.block.version, alias.now)
        for value in [value for value in self.aliases if self.watch.same_object(value, node)]:
            self.aliases[value] = new
        self.aliases[node] = new

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
            raise self._refused(node, alias.node, "out= may resize it")
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
                raise self._refused(node, out, "out= may resize it")
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

    def _set_value(self, alias: Alias, value: fx.Node, node: fx.Node) -> None:
        """Set the current value of an alias, and mark its parents as outdated."""
        alias.block.version += 1
        alias.block.writer = node
        alias.now, alias.version = value, alias.block.version
        self.aliases.setdefault(value, alias)
        while alias.parent is not None:
            alias.parent.changed = alias
            alias = alias.parent

    def _parent_value(self, alias: Alias, whole: Any, value: Any, before: fx.Node) -> Any:
        """New value of an alias's parent, from its old value and the new value of the alias."""
        view, parent = alias.node, alias.parent
        assert parent is not None
        if alias.same:
            return value
        if not info(parent.node).is_tensor:
            parts = whole if isinstance(whole, list) else self._parts(parent.node, whole, before)
            return [value if i == _place(view) % len(parts) else part for i, part in enumerate(parts)]
        if isinstance(value, list):
            name, dim = cut_along(view) or ("cat", 0)
            typed = info(parent.node).shape, info(parent.node).dtype
            return self.rewriter.call(name, value, dim=dim, like=view, before=before, typed=typed)
        result = written_back(self.rewriter, whole, view, value, before)
        if result is None:
            assert alias.block.writer is not None
            raise self._refused(alias.block.writer, view, "fxq cannot write through this view")
        return result

    def _parts(self, cut: fx.Node, whole: fx.Node, before: fx.Node) -> list[Any]:
        """Nodes for the single views of a tuple."""
        make, shapes = self.rewriter.node, self.watch.parts[cut]
        return [
            make("call_function", operator.getitem, (whole, i), like=cut, before=before, typed=typed)
            for i, typed in enumerate(shapes)
        ]


def _assigns(node: fx.Node) -> bool:
    """Whether a call is an assignment: `x[i] = y`, `copy_` or `index_put_`."""
    name = name_in_place(node)
    is_put = name == "index_put_" and len(node.args) > 2 and not any((*node.args[3:], *node.kwargs.values()))
    return node.target is operator.setitem or name == "copy_" or is_put


def _place(part: fx.Node) -> int:
    """Index of the tuple item that a node takes."""
    place: Any = part.args[1]
    return int(place)


def _takes(view: fx.Node, index: Any) -> bool:
    """Whether a view is `x[index]`."""
    return view.target is operator.getitem and bool(view.args[1] == index)


def around(*nodes: fx.Node) -> str:
    """Path of the innermost module whose forward contains all of these nodes; empty for the model itself."""
    stacks = [[path for path, _ in n.meta.get("nn_module_stack", {}).values()] for n in nodes]
    stacks = [stack[:-1] if n.op == "call_module" else stack for n, stack in zip(nodes, stacks, strict=True)]
    same = takewhile(lambda paths: len(set(paths)) == 1, zip(*stacks, strict=False))
    return next((str(paths[0]) for paths in reversed(list(same))), "")
