"""`TokenBinder` binds a graph with states that grow, and runs its ops as `TokenProgram`s, of which each is one call."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.tokens.program_check import (
    MIN_AGREEMENT_DB,
    MIN_JOINED_AGREEMENT_DB,
    MIN_ROUNDED_AGREEMENT_DB,
    ProgramCheck,
)
from fxq.backends.loops.tokens.stored_states import state_node, stored_state
from fxq.backends.loops.tokens.token_attention import CacheAttention, TokenAttention, cache_attention
from fxq.backends.loops.tokens.token_program import TokenProgram
from fxq.backends.loops.tokens.token_program_builder import MAX_VALUES, TokenProduct, TokenProgramBuilder
from fxq.backends.plain.dynamic_quantize import DynamicQuantize
from fxq.backends.plain.weight_only import WeightOnlyKernel, WeightOnlyLinear
from fxq.backends.table.dynamic_layer import DynamicLayer
from fxq.backends.table.dynamic_linear import DynamicLinear
from fxq.common.data import Batch
from fxq.common.trees import mapped
from fxq.graph.query import constant, is_op, op_of, submodule
from fxq.quant.stored_grids import PLAIN_TENSORS
from fxq.runtime.binding import Binder, BoundForward, BoundLine
from fxq.runtime.growing import OtherInputsError
from fxq.runtime.stable_kinds import may_have_side_effects

_MIN_STEPS = 5
"""Minimum number of steps of a program without a linear layer. A call takes as long as a few of PyTorch's."""
_ATTENTION = "scaled_dot_product_attention"
_METADATA = ("shape", "device", "dtype", "ndim")
_PLAIN = (int, bool, float, str, slice, torch.dtype, torch.device, type(None))

RecordedKind = tuple[str, Any]
"""Kind of a value: ("tensor", (shape, dtype)), ("plain", value), or ("", None) for other types."""


def value_kind(value: Any) -> RecordedKind:
    """Kind of a value. Two calls are compared by the kinds of their values."""
    if type(value) in PLAIN_TENSORS:
        return "tensor", (tuple(value.shape), value.dtype)
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
        return "plain", value
    return "", None


@dataclass
class _Segment:
    """Ops that become one program.

    Attributes:
        builder: builder with the steps of the ops.
        lines: lines of these ops in the bound function.
        waiting: lines of other ops that read values of the segment, so they follow its program.
    """

    builder: TokenProgramBuilder
    lines: dict[fx.Node, BoundLine] = field(default_factory=dict)
    waiting: dict[fx.Node, BoundLine] = field(default_factory=dict)


class TokenBinder(Binder):
    """Binder that puts programs in place of the float ops on a few tokens.

    A value that had the same shape in both calls, and that a program reads, is checked to have it in every call. The
    results of programs are compared with those of the graph, and a call whose values have other shapes runs the graph
    from its begin. Graphs with calls that must not run twice therefore get no programs.

    Args:
        gm: the module.
        batch: the inputs.
        open_inputs: names of inputs whose kind may change.
        earlier: kinds of the values of an earlier call.
    """

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, open_inputs: frozenset[str], earlier: Mapping[fx.Node, RecordedKind]
    ) -> None:
        super().__init__(gm, batch, open_inputs)
        self.open_inputs, self.earlier = open_inputs, earlier
        self.kinds = {node: value_kind(value) for node, value in self.values.items()}
        self.products: dict[fx.Node, TokenProduct] = {}
        self.known: dict[fx.Node, Any] = {}  # numbers and the like that are the same in all calls
        self.checks: dict[str, ProgramCheck] = {}  # of programs, by the name of their constant
        self.joins = False  # whether attentions, and appending to their states, become part of programs
        self.rounds = False  # whether a program rounds inputs of layers or entries of states
        self._results: dict[fx.Node, Tensor] = {}  # that a program may compute
        self._repeated: dict[str, fx.Node] = {}  # first node of each repetition, by its code
        self._first: dict[fx.Node, fx.Node] = {}  # first node that repeats what a node repeats
        self._of_graph: list[BoundLine] = []  # lines without programs
        stored = {node: state for node in gm.graph.nodes if (state := stored_state(node)) is not None}
        self._stored = stored  # states in integers, by the node of their rows
        self._parts = {part: (node, k) for node, of in stored.items() for k, part in enumerate(of.appends)}
        self._inner = {part for state in stored.values() for part in state.inner}
        self.checked: set[fx.Node] = set()  # whose shape is the same in all calls
        self._is_repeatable = True  # whether no call has side effects or draws random numbers

    @property
    def uses_loops(self) -> bool:
        """Whether compiled loops compute some of the values, once the graph has run."""
        computes_in_float32 = not torch.is_autocast_enabled("cpu")
        return self._is_repeatable and computes_in_float32 and loops("token_loops") is not None

    def run(self) -> Any:
        """Run the graph, and note whether it draws random numbers."""
        state = torch.get_rng_state()
        value = super().run()
        self._is_repeatable = self._is_repeatable and torch.equal(state, torch.get_rng_state())
        return value

    def compute(self, node: fx.Node) -> Any:
        """Run a node and write its line, and note its kind, and the product of a linear layer."""
        kernel = submodule(self.gm, node)
        self._is_repeatable = self._is_repeatable and not may_have_side_effects(self.gm, node)
        product = self._product(node, kernel)
        if product is not None:
            self.products[node] = product
        value = super().compute(node)
        self.kinds[node] = value_kind(value)
        if isinstance(value, Tensor) and (
            value.numel() <= MAX_VALUES or is_op(node, _ATTENTION, "append", "quantized_rows")
        ):
            self._results[node] = value
        return value

    def _product(self, node: fx.Node, kernel: Any) -> TokenProduct | None:
        """Linear layer that a program can compute; None for other nodes."""
        reads = node.args
        if not isinstance(kernel, Kernel) or not kernel.is_unmodified() or not isinstance(reads[0], fx.Node):
            return None
        if type(kernel) is WeightOnlyLinear and len(reads) == 1:
            x = self.values[reads[0]]
            product = kernel.few_rows(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else None
            return None if product is None else TokenProduct(reads[0], product)
        if not isinstance(kernel, (DynamicLayer, DynamicLinear)):
            return None
        source = _rounding_before(node)
        if source is None:
            return None
        rounding, post = submodule(self.gm, source), kernel.post
        function = "" if post is None else post.name
        if not isinstance(rounding, DynamicQuantize) or not rounding.is_unmodified() or rounding.axis != -1:
            return None
        if post is not None and (post.args or post.algorithm not in ("", "none") or not self._has_function(function)):
            return None
        product = kernel.few_rows(self.values[reads[0]])
        return None if product is None else TokenProduct(source.args[0], product, rounding.row_grid, function)

    def _has_function(self, name: str) -> bool:
        module = loops("token_loops")
        return module is not None and name in module.FUNCTIONS_OF_X

    def body(self) -> list[str]:
        """Code of all lines, those of programs included."""
        if self.uses_loops:
            self._of_graph = self._of_graph or self.lines
            self.lines, self.checks = self._of_graph, {}
            self.checked = {node for node in self.fixed if self._is_same(node, "tensor")}
            self.lines = self._without_unread(list(self._with_programs()))
        return super().body()

    def joined(self) -> BoundForward | None:
        """Function whose programs also append to states and attend to them; None if no attention becomes a step."""
        self.joins = True
        self._forget(self.checks)
        for line in self._of_graph:
            if line.node in self.known:
                del self.constants[line.writes[0]]
        self.known = {}
        joined = self.written()
        attend = any(
            isinstance(check.program, TokenProgram) and check.program.attends for check in self.checks.values()
        )
        return joined if attend else None

    def _without_unread(self, lines: list[BoundLine]) -> list[BoundLine]:
        """Lines without those that round inputs of layers, or entries of states, if programs do it."""
        kept, read = list[BoundLine](), set[str]()
        for line in reversed(lines):
            is_rounding = self._is_inner(line.node) or state_node(line.node) is not line.node
            is_rounding = is_rounding or is_op(line.node, "unpack_rows")
            if not is_rounding or not read.isdisjoint(line.writes):
                kept.append(line)
                read.update(line.reads)
        return kept[::-1]

    def _is_same(self, node: fx.Node, kind: str) -> bool:
        """Whether a value was of this kind, and the same in both calls."""
        return self.kinds.get(node, ("", None))[0] == kind and self.kinds[node] == self.earlier.get(node)

    def _with_programs(self) -> Iterator[BoundLine]:
        """Lines of the graph, with one line for each program.

        A program takes the place of its last op. Ops that read its values wait until then, as long as further ops
        become part of it. What may have side effects keeps its place.
        """
        segment = _Segment(self._builder())
        for line in self.lines:
            node, reads = line.node, set(line.node.all_input_nodes)
            if self._is_known(node, segment):
                self.known[node] = self.kinds[node][1]
                self.constants[line.writes[0]] = self.known[node]
                continue
            is_movable = self._is_movable(node)
            needs = self._needs(node, reads)
            if not is_movable or (not needs.isdisjoint(segment.waiting) and self._is_step(node)):
                yield from self._closed(segment)
                segment = _Segment(self._builder())
            if not is_movable:
                yield line
            elif needs.isdisjoint(segment.waiting) and self._add(node, segment):
                segment.lines[node] = line
            elif reads.isdisjoint(segment.lines) and reads.isdisjoint(segment.waiting):
                yield self._attending(line)
            else:
                segment.waiting[node] = self._attending(line)
        yield from self._closed(segment)

    def _needs(self, node: fx.Node, reads: set[fx.Node]) -> set[fx.Node]:
        """Nodes whose values or states a program needs to compute this node."""
        if node in self.products:
            return {self.products[node].x}
        if node in self._stored:
            return {self._stored[node].new}
        attention = self._cache_attention(node) if self.joins and is_op(node, _ATTENTION) else None
        if attention is None:
            return reads
        of_states = {state_node(attention.key), state_node(attention.value)}
        return {attention.query, *of_states, *([] if attention.mask is None else [attention.mask])}

    def _add(self, node: fx.Node, segment: _Segment) -> bool:
        """Add a node to the program of a segment, if that is possible.

        A state in integers is not added if a line before the program has appended to it.
        """
        state = self._stored.get(node)
        return (state is None or segment.waiting.keys() >= set(state.appends)) and segment.builder.add(node)

    def _is_movable(self, node: fx.Node) -> bool:
        """Whether a node may run later: an op of the table, a kernel of float activations, or a function of numbers."""
        is_kernel = isinstance(submodule(self.gm, node), (WeightOnlyKernel, DynamicLayer))
        is_kernel = is_kernel or _is_rounding(self.gm, node)
        is_op = op_of(node) is not None or (node.target is getattr and node.op == "call_function")
        return is_op or is_kernel or self.kinds.get(node, ("", None))[0] == "plain"

    def _is_step(self, node: fx.Node) -> bool:
        """Whether a node may become part of a program that begins with it."""
        return node not in self._stored and self._builder().add(node)

    def _builder(self) -> TokenProgramBuilder:
        module = loops("token_loops")
        assert module is not None  # checked by `body`
        attention = self._cache_attention if self.joins else None
        return TokenProgramBuilder(
            module, self._shape_of, self._resolved, self._constant_of, self.products.get, attention
        )

    def _cache_attention(self, node: fx.Node) -> CacheAttention | None:
        """Attention that a step can compute, with the first of equal masks; None for other nodes."""
        attention = cache_attention(node)
        if attention is None or attention.mask is None:
            return attention
        kind, dtype = self.kinds[attention.mask][0], self.kinds[attention.mask][1]
        is_bool = kind == "tensor" and dtype[1] == torch.bool
        return attention._replace(mask=self._first.get(attention.mask, attention.mask)) if is_bool else None

    def _is_known(self, node: fx.Node, segment: _Segment) -> bool:
        """Whether a node computes a number or the like that is the same in all calls."""
        if node.op != "call_function" or not self._is_same(node, "plain"):
            return False
        if node.target is getattr:
            read, name = node.args[0], node.args[1]
            return name in _METADATA and (read in segment.builder.values or read in self.checked)
        is_arithmetic = getattr(node.target, "__module__", "") in ("_operator", "operator")
        return is_arithmetic and all(read in self.known or self._is_fixed_number(read) for read in node.all_input_nodes)

    def _is_fixed_number(self, node: fx.Node) -> bool:
        return node in self.fixed and self._is_same(node, "plain")

    def _shape_of(self, node: fx.Node) -> tuple[int, ...] | None:
        """Shape of a float32 tensor, other than a state, if it was the same in both calls."""
        if node.op == "get_attr" or is_op(node, "append") or not self._is_same(node, "tensor"):
            return None
        shape, dtype = self.kinds[node][1]
        return shape if dtype == torch.float32 else None

    def _resolved(self, value: Any) -> Any:
        """Option with numbers in place of nodes. Raises `KeyError` if one can change."""

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            return self.kinds[leaf][1] if self._is_fixed_number(leaf) else self.known[leaf]

        return mapped(value, number)

    def _constant_of(self, node: fx.Node) -> Tensor | None:
        return constant(self.gm, node) if node.op == "get_attr" else None

    def _closed(self, segment: _Segment) -> Iterator[BoundLine]:
        """The line of a program, or those of its ops if these are too few; then all that waited for it."""
        builder, nodes = segment.builder, segment.lines
        outputs = [
            node
            for node in nodes
            if node in builder.values and any(not self._is_covered(user, nodes) for user in node.users)
        ]
        pays = builder.linear_count or builder.step_count >= _MIN_STEPS
        results = [*outputs, *builder.states]
        program = builder.finish(outputs) if pays and results else None
        if program is not None:
            reads = tuple(self.names[node] for node in (*builder.inputs, *builder.pasts, *builder.masks))
            writes = tuple(self.names[node] for node in results)
            rounds = any(node in self.products and self.products[node].grid for node in nodes)
            stores = any(node in self._stored for node in nodes)
            self.rounds = self.rounds or rounds or stores
            least = MIN_ROUNDED_AGREEMENT_DB if rounds or stores else MIN_AGREEMENT_DB
            name = self._checked(program, results, MIN_JOINED_AGREEMENT_DB if rounds and program.attends else least)
            self.checks[name].new = [*[None] * len(outputs), *(builder.new_entries(node) for node in builder.states)]
            text = f"{', '.join(writes)} = {name}({', '.join(reads)})"
            yield BoundLine(results[-1], text, reads, writes)
            yield from (self._read_part(line, nodes) for line in segment.waiting.values())
        else:
            unchecked = [node for node in builder.inputs if node not in self.checked]
            shapes = tuple(torch.Size(self.kinds[node][1][0]) for node in unchecked)
            if shapes:
                reads = tuple(self.names[node] for node in unchecked)
                text = f"{self._constant(check_shapes)}({self._constant(shapes)}, {', '.join(reads)})"
                yield BoundLine(unchecked[-1], text, reads)
            # layers of the segment may read roundings that wait
            lines = {node: self._attending(line) for node, line in nodes.items()} | segment.waiting
            yield from (lines[line.node] for line in self.lines if line.node in lines)
        self.checked.update(builder.inputs, (node for node in nodes if node not in builder.states))

    def _is_covered(self, user: fx.Node, nodes: Mapping[fx.Node, BoundLine]) -> bool:
        """Whether a reader of a value needs no tensor if a program computes these nodes."""
        if user in nodes or _reads_metadata(user) or (user in self._parts and self._parts[user][0] in nodes):
            return True
        return self._is_inner(user) and all(self._is_covered(reader, nodes) for reader in user.users)

    def _is_inner(self, node: fx.Node) -> bool:
        """Whether a node only rounds inputs of layers, or entries of states, or reads a part of the result."""
        return node in self._inner or _is_rounding(self.gm, node)

    def _read_part(self, line: BoundLine, nodes: Mapping[fx.Node, BoundLine]) -> BoundLine:
        """Line that reads a part of a state in integers which a program of these nodes returns; other lines stay."""
        state, part = self._parts.get(line.node, (None, 0))
        if state is None or state not in nodes:
            return line
        return BoundLine(
            line.node, f"{line.writes[0]} = {self.names[state]}.parts[{part}]", (self.names[state],), line.writes
        )

    def _attending(self, line: BoundLine) -> BoundLine:
        """Line of an attention that a loop computes, if its options allow; otherwise the line as it is.

        Attentions that repeat one mask share the result.
        """
        node = line.node
        if is_op(node, "repeat"):
            first = self._repeated.setdefault(line.text.partition(" = ")[2], node)
            is_read_only = all(is_op(user, _ATTENTION) for user in node.users)
            if first is not node and is_read_only:
                self._first[node] = first
                return BoundLine(node, f"{line.writes[0]} = {self.names[first]}", (self.names[first],), line.writes)
        if not is_op(node, _ATTENTION):
            return line
        attention, module = cache_attention(node), loops("token_loops")
        if attention is None or module is None:
            return line
        reads: Any = node.args
        texts = [self._text(read) for read in reads]
        name = self._checked(TokenAttention(module, attention.scale), [node])
        return BoundLine(node, f"{line.writes[0]} = {name}({', '.join(texts)})", line.reads, line.writes)

    def _checked(self, program: Any, nodes: Sequence[fx.Node], least: float = MIN_AGREEMENT_DB) -> str:
        """Name of a program that computes the values of these nodes, and is checked with them."""
        name = self._constant(program)
        self.checks[name] = ProgramCheck(
            program, [str(node) for node in nodes], [self._results[n] for n in nodes], least
        )
        return name


def check_shapes(shapes: tuple[torch.Size, ...], *values: Tensor) -> None:
    """Raise `OtherInputsError` if values have other shapes."""
    if any(value.shape != shape for value, shape in zip(values, shapes, strict=True)):
        raise OtherInputsError


def _rounding_before(node: fx.Node) -> fx.Node | None:
    """Node that rounds the input of a layer, if the layer reads integers, scale and zero point of it, in order."""
    pairs = [read.args for read in node.args if isinstance(read, fx.Node) and read.target is operator.getitem]
    sources = {source for source, _ in pairs}
    in_order = len(pairs) == len(node.args) and [index for _, index in pairs] in ([1, 0], [2, 0, 1])
    source = sources.pop() if len(sources) == 1 and in_order else None
    return source if isinstance(source, fx.Node) else None


def _is_rounding(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node rounds the input of layers to integers, or reads a part of the result."""
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return isinstance(submodule(gm, node), DynamicQuantize)


def _reads_metadata(user: fx.Node) -> bool:
    return user.target is getattr and user.op == "call_function" and user.args[1] in _METADATA
