"""Editor of a graph. Each edit is recorded with its rule and source line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

from torch import Tensor, fx, nn
from typing_extensions import TypeVar

from fxq.common.source import source_of
from fxq.errors import PassError
from fxq.graph.guards import check_fixed
from fxq.graph.info import TracedInfo, info, set_info
from fxq.graph.query import is_pure, merge_origins, op_of, swapped, tensor_meta
from fxq.graph.run import Typed, infer
from fxq.ops import OPS
from fxq.rewriting.match import Matcher
from fxq.rewriting.near_miss import NearMisses

if TYPE_CHECKING:
    from fxq.rewriting.computed import TrainableConstant

DATA = "fxq_data"
KERNELS = "fxq_kernels"


@dataclass(frozen=True)
class Edit:
    """Edit of a graph: the rule, its `file:line`, and the names of the nodes that were removed and added."""

    rule: str
    source: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class EditContext(Protocol):
    """Context that edits of a graph need. The context of the pipeline has more, which passes read.

    Attributes:
        units: path of the unit module for each kind and body, so that equal bodies share one.
        computed: how constants are computed from parameters, by path; only if the recipe trains.
        trains: whether the recipe trains.
    """

    units: dict[str, str]
    computed: dict[str, TrainableConstant]

    @property
    def trains(self) -> bool: ...


ContextT = TypeVar("ContextT", bound=EditContext, covariant=True, default=EditContext)


class Editor(Generic[ContextT]):
    """Edits one graph for one pass. Its type has that of its context: `Editor[Context]`.

    Attributes:
        gm: module whose graph is edited.
        context: context of the pass: recipe, backend, example inputs and more (`fxq/pipeline/context.py`).
        name: name of the pass. Edits outside any rule are attributed to it.
        edits: edits so far, in order.
        near_misses: rules that almost matched so far.
        touched: nodes that were made or changed.
        matcher: matches rules in the graph.
        names: names of the nodes.
    """

    def __init__(self, gm: fx.GraphModule, context: ContextT | None, name: str = "", source: str = "") -> None:
        self.gm = gm
        self.context = cast(ContextT, context)  # None only for a pass that reads none
        self.name = name
        self.edits: list[Edit] = []
        self.near_misses = NearMisses()
        self.touched: set[fx.Node] = set()
        self.matcher = Matcher(gm)
        self.names = {node.name for node in gm.graph.nodes}
        self._rule = (name, source)  # outside rules, the pass itself
        self._open: Edit | None = None
        self._constants = {str(n.target): n for n in gm.graph.nodes if n.op == "get_attr"}

    @property
    def graph(self) -> fx.Graph:
        """Graph that is edited."""
        return self.gm.graph

    def nodes(self, *ops: str) -> list[fx.Node]:
        """Nodes that call one of these ops, in execution order; all nodes if none is named."""
        if not ops:
            return list(self.graph.nodes)
        rows = {OPS[op] for op in ops}
        return [n for n in self.graph.nodes if op_of(n) in rows]

    # ---- edits

    def update(
        self, node: fx.Node, target: Any = None, args: Any = None, kwargs: Any = None, op: str | None = None
    ) -> fx.Node:
        """Change the op, target or arguments of a node; its name, metadata and users stay."""
        if op is not None:
            node.op = op
        if target is not None:
            node.target = target
        if args is not None:
            node.args = args
        if kwargs is not None:
            node.kwargs = kwargs
        self._count([node], [node])
        self._attribute(node)
        return node

    def describe(self, node: fx.Node, **changes: Any) -> None:
        """Change fields of a node's metadata (see `NodeInfo`). This does not count as an edit."""
        set_info(node, **changes)
        self.touched.add(node)

    def call(
        self,
        op: str,
        *args: Any,
        like: fx.Node | Sequence[fx.Node] = (),
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        name: str | None = None,
        typed: Typed | None = None,
        **options: Any,
    ) -> fx.Node:
        """Add a canonical call of an op of the table.

        Args:
            op: name of the op.
            *args: its tensor arguments (nodes, or None).
            like: node or nodes that it replaces: module path, source line and origins are copied from them.
            before: node to insert it before; default: the first node of `like`, else the insertion point.
            after: node to insert it after.
            name: name of the node, if it is free.
            typed: shape and dtype of its value; default: inferred.
            **options: its options; those equal to the default are left out.
        """
        row = OPS[op]
        plain, kwargs = row.canonical({**dict(zip(row.tensors, args, strict=False)), **row.options, **options})
        return self.node(
            "call_function",
            row.target,
            plain,
            kwargs,
            like=like,
            before=before,
            after=after,
            name=name or op,
            typed=typed,
        )

    def node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        like: fx.Node | Sequence[fx.Node] = (),
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        name: str | None = None,
        typed: Typed | None = None,
    ) -> fx.Node:
        """Add any node (see `call`). Shape and dtype are inferred for functions only; pass `typed` for modules."""
        sources = [like] if isinstance(like, fx.Node) else list(like)
        place = (
            before
            if before is not None
            else _place_after(after)
            if after is not None
            else sources[0]
            if sources
            else None
        )
        with self.graph.inserting_before(place) if place is not None else nullcontext():
            node = self.graph.create_node(op, target, args, kwargs or {}, name)
        first = info(sources[0]) if sources else None
        if typed is None:
            typed = infer(node) if op == "call_function" else (None, None)
        set_info(
            node,
            path=first.path if first else "",
            source=first.source if first else "",
            origins=merge_origins(sources),
            traced=TracedInfo(tuple(dict.fromkeys(b for source in sources for b in info(source).traced.memory))),
            plan=first.plan if first else None,
            shape=typed[0],
            dtype=typed[1],
        )
        if sources and sources[0].stack_trace:
            node.stack_trace = sources[0].stack_trace
        if sources and "nn_module_stack" in sources[0].meta:
            node.meta["nn_module_stack"] = sources[0].meta["nn_module_stack"]
        self.names.add(node.name)
        self._count([], [node])
        self._attribute(node)
        return node

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node the name of an erased node that it replaces."""
        self.names.discard(node.name)
        self.names.add(name)
        node.name = name
        self.touched.add(node)
        self.touched.update(node.users)

    def replace(self, old: fx.Node, new: Any) -> None:
        """Let all users of `old` read `new`, a node or a plain value, and erase `old`."""
        self.reroute(old, new)
        self.erase(old)

    def reroute(self, old: fx.Node, new: Any, only: Callable[[fx.Node], bool] | None = None) -> None:
        """Let the users of `old` (those for which `only` is true) read `new` instead.

        The check of the inputs is no such user: it keeps reading the inputs themselves.
        """
        users = [u for u in old.users if u is not new and u.target is not check_fixed and (only is None or only(u))]
        for user in users:
            if isinstance(new, fx.Node):
                user.replace_input_with(old, new)
            else:
                user.args, user.kwargs = swapped(user.args, {old: new}), swapped(user.kwargs, {old: new})
            self.touched.add(user)
            self.matcher.update(user)
        if users:
            self._count([old], [new] if isinstance(new, fx.Node) else [])

    def erase(self, node: fx.Node) -> None:
        """Erase a node without users.

        Raises:
            PassError: the node has users.
        """
        if node.users:
            raise PassError(f"{self.name}: cannot erase %{node.name}: %{next(iter(node.users)).name} reads it.")
        if node.op == "get_attr":
            self._constants.pop(str(node.target), None)
        self._count([node], [])
        self.names.discard(node.name)
        self.graph.erase_node(node)

    def erase_unused(self) -> None:
        """Erase all nodes that have no users and no side effects."""
        for node in reversed(self.nodes()):
            if not node.users and node.op not in ("placeholder", "output") and is_pure(self.gm, node):
                self.erase(node)

    # ---- weights and modules

    def constant(
        self, tensor: Tensor, name: str, before: fx.Node | None = None, like: fx.Node | Sequence[fx.Node] = ()
    ) -> fx.Node:
        """Add a buffer with this tensor and a `get_attr` node that reads it. `name` is made unique."""
        holder = self._holder(DATA)
        key = _unique_name(holder, name)
        holder.register_buffer(key, tensor.detach())
        return self.read(f"{DATA}.{key}", tensor, before=before, like=like)

    def read(
        self, path: str, tensor: Tensor, before: fx.Node | None = None, like: fx.Node | Sequence[fx.Node] = ()
    ) -> fx.Node:
        """Return the `get_attr` node of an attribute: an existing one, or a new one."""
        existing = self._constants.get(path)
        if existing is not None and (before is None or existing < before):
            return existing
        name = path.removeprefix(f"{DATA}.").replace(".", "_")
        node = self.node("get_attr", path, (), like=like, before=before, name=name)
        shape, dtype = tensor_meta(tensor)
        set_info(node, shape=shape, dtype=dtype, origins=(), plan=None, traced=TracedInfo())
        self._constants[path] = node
        return node

    def module(self, module: nn.Module, name: str, folder: str = KERNELS) -> str:
        """Add a submodule to the graph's module and return its path. `name` is made unique."""
        holder = self._holder(folder)
        key = _unique_name(holder, name)
        holder.add_module(key, module)
        return f"{folder}.{key}"

    @contextmanager
    def attributed(self, rule: str, source: str | Callable[..., Any]) -> Iterator[None]:
        """Context whose edits count as one edit of a rule.

        Args:
            rule: name of the rule.
            source: `file:line` of the rule, or its function or class.
        """
        source = source if isinstance(source, str) else source_of(source)
        outer, self._rule = self._rule, (rule, source)
        enclosing, self._open = self._open, Edit(rule, source, (), ())
        try:
            yield
        finally:
            done, self._open, self._rule = self._open, enclosing, outer
            if done.before or done.after:
                self.edits.append(
                    Edit(rule, source, tuple(dict.fromkeys(done.before)), tuple(dict.fromkeys(done.after)))
                )

    def _count(self, before: Sequence[fx.Node], after: Sequence[fx.Node]) -> None:
        removed, added = tuple(n.name for n in before), tuple(n.name for n in after)
        if self._open is not None:
            self._open = Edit(*self._rule, self._open.before + removed, self._open.after + added)
        else:
            self.edits.append(Edit(*self._rule, removed, added))

    def _attribute(self, node: fx.Node) -> None:
        """Record the pass and rule that made or changed a node."""
        rule, source = self._rule
        name = self.name if rule == self.name else f"{self.name}: {rule}"
        set_info(node, made_by=f"{name} ({source})" if source else name)
        self.touched.add(node)
        self.matcher.update(node)

    def _holder(self, folder: str) -> nn.Module:
        if not hasattr(self.gm, folder):
            self.gm.add_module(folder, nn.Module())
        return self.gm.get_submodule(folder)


def _place_after(node: fx.Node) -> fx.Node:
    """Return the node before which to insert a user of `node`: inputs and their check stay first in a graph."""
    place = node.next
    while node.op == "placeholder" and (place.op == "placeholder" or place.target is check_fixed):
        place = place.next
    return place


def _unique_name(holder: nn.Module, name: str) -> str:
    key = base = name.replace(".", "_")
    count = 0
    while hasattr(holder, key):
        count += 1
        key = f"{base}_{count}"
    return key
