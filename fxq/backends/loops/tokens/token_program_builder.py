"""`TokenProgramBuilder` turns nodes of a graph into the steps of a `TokenProgram`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxq.backends.loops.tokens.rotation_product import rotation_product
from fxq.backends.loops.tokens.stored_states import state_node, stored_state
from fxq.backends.loops.tokens.token_attention import MAX_QUERIES, CacheAttention
from fxq.backends.loops.tokens.token_program import GROWING_AXIS, GrowingInputs, MaskForm, StateForm, TokenProgram
from fxq.backends.loops.tokens.token_values import TokenValue, step_axes, view_of
from fxq.backends.plain.column_jobs import column_parts
from fxq.backends.plain.few_rows import FewRowsProduct
from fxq.graph.query import argument, is_op, op_of, options_of
from fxq.quant.rotation import rotation_size

MAX_VALUES = 1 << 17
"""Maximum number of values of a result in a program. Larger results do not stay in the second-level cache."""
_BINARY = {"add": "ADD", "sub": "SUBTRACT", "mul": "MULTIPLY"}
_UNARY = {"neg": "NEGATE", "rsqrt": "RSQRT"}
_CONSTANTS, _WORKSPACE = 0, 1
"""Numbers of base addresses; those of the inputs and outputs are next."""

Place = tuple[int, int]


class TokenProduct(NamedTuple):
    """Linear layer of a program.

    Attributes:
        x: node of its input, float32.
        product: product with its weight.
        grid: how each row of the input is rounded to integers: arguments of `row_loops.quantize`; empty: not at all.
        function: name of the activation function after it; empty: none.
    """

    x: Any
    product: FewRowsProduct
    grid: tuple[int, ...] = ()
    function: str = ""


@dataclass
class _Step:
    """Step of a program.

    Attributes:
        code: what it computes, such as `token_loops.ADD`.
        out: where it writes; None for a step that appends to a state.
        operands: what it reads.
        fields: further integers, by `token_loops.TokenField`.
        parts: parts for a number of threads, see `TokenProgram`; None: it is not divided.
        states: indices of its states.
        mask: index of its mask, or None.
    """

    code: int
    out: TokenValue | None
    operands: Sequence[TokenValue]
    fields: Mapping[int, int]
    parts: Callable[[int], Sequence[tuple[int, int]]] | None = None
    states: tuple[int, ...] = ()
    mask: int | None = None


class TokenProgramBuilder:
    """Builder of a program: it turns nodes into steps. Their shapes are fixed, but for states and masks.

    Args:
        loops: the module `fxq.backends.loops.code.token_loops`.
        shape_of: shape of a float32 node, which is the same in all calls; None for other nodes.
        resolved: value of an option, with numbers in place of nodes; raises `KeyError` if a number can change.
        constant: tensor of a node that is a weight; None for others.
        product: linear layer with a weight in integers; None for other nodes.
        attention: attention to a cache whose options a step supports; None for other nodes. Without it, steps neither
            compute attentions nor append to states.

    Attributes:
        values: inputs of fixed shape, and results, by node.
        inputs: nodes of the inputs of fixed shape.
        pasts: nodes of the states that the program appends to.
        states: index of each state, by the node that appends to it.
        masks: nodes of the masks.
        linear_count: number of linear layers.
    """

    def __init__(
        self,
        loops: ModuleType,
        shape_of: Callable[[fx.Node], tuple[int, ...] | None],
        resolved: Callable[[Any], Any],
        constant: Callable[[fx.Node], Tensor | None],
        product: Callable[[fx.Node], TokenProduct | None],
        attention: Callable[[fx.Node], CacheAttention | None] | None = None,
    ) -> None:
        self.loops, self.shape_of, self.resolved = loops, shape_of, resolved
        self.constant, self.product, self.attention = constant, product, attention
        self.values: dict[fx.Node, TokenValue] = {}
        self.inputs: list[fx.Node] = []
        self.pasts: list[fx.Node] = []
        self.states: dict[fx.Node, int] = {}
        self.masks: list[fx.Node] = []
        self.linear_count = 0
        self._growing = GrowingInputs()
        self._kept: list[Any] = []  # objects whose memory steps refer to by address
        self._inputs_at: dict[int, fx.Node] = {}
        self._sizes: list[int] = []  # of the buffers
        self._fixed: dict[int, Tensor] = {}  # constants, by buffer
        self._steps: list[_Step] = []

    @property
    def step_count(self) -> int:
        """Number of steps so far. Views of values take none."""
        return len(self._steps)

    def new_entries(self, node: fx.Node) -> int:
        """Number of entries that a node appends to a state."""
        return self._growing.states[self.states[node]].new

    def add(self, node: fx.Node) -> bool:
        """Add a node. Returns whether that is possible; if not, nothing has changed."""
        before = len(self.inputs), len(self._sizes), len(self._steps)
        try:
            is_added = self._append(node) if is_op(node, "append", "quantized_rows") else self._add_value(node)
        except KeyError:
            is_added = False
        if not is_added:
            self._undo(*before)
        return is_added

    def _add_value(self, node: fx.Node) -> bool:
        """Add a node whose shape is the same in all calls."""
        shape, op = self.shape_of(node), op_of(node)
        if shape is None or math.prod(shape) > MAX_VALUES or 0 in shape:
            return False
        value = self._linear(node, shape) if op is None else self._value(node, op.name, shape)
        if value is None or value.shape != shape:
            return False
        self.values[node] = value
        return True

    def _undo(self, inputs: int, buffers: int, steps: int) -> None:
        for node in self.inputs[inputs:]:
            del self.values[node]
        del self.inputs[inputs:], self._steps[steps:], self._sizes[buffers:]
        for table in (self._fixed, self._inputs_at):
            for buffer in [buffer for buffer in table if buffer >= buffers]:
                del table[buffer]

    def _buffer(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _new(self, shape: Sequence[int]) -> TokenValue:
        return TokenValue.contiguous(self._buffer(math.prod(shape)), shape)

    def _operand(self, read: Any) -> TokenValue | None:
        """Value of an operand: an earlier one, an input, a weight or a number."""
        if isinstance(read, fx.Node):
            if read in self.states:
                return None
            if read in self.values:
                return self.values[read]
            shape, fixed = self.shape_of(read), self.constant(read)
            if fixed is not None:
                return self._constant(fixed)
            if shape is None or math.prod(shape) > MAX_VALUES or 0 in shape:
                read = self.resolved(read)
            else:
                value = self.values[read] = self._new(shape)
                self.inputs.append(read)
                self._inputs_at[value.buffer] = read
                return value
        return self._constant(torch.tensor(float(read), device="cpu")) if type(read) in (int, float) else None

    def _constant(self, tensor: Tensor) -> TokenValue | None:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.requires_grad:
            return None
        value = self._new(tensor.shape)
        self._fixed[value.buffer] = tensor
        return value

    def _value(self, node: fx.Node, name: str, shape: tuple[int, ...]) -> TokenValue | None:
        """Value of an op; None if no step computes it."""
        options = {key: self.resolved(value) for key, value in options_of(node).items()}
        if name == "cat":
            return self._cat(node, options["dim"], shape)
        if name == "scaled_dot_product_attention":
            return self._attend(node, shape)
        x = self._operand(argument(node, "x"))
        if x is None:
            return None
        if name in ("reshape", "unsqueeze", "contiguous", "transpose", "permute", "getitem", "cast"):
            return view_of(name, x, options, shape)
        if name == "rotate_rows":
            return self._rotate(x, options["size"] or rotation_size(x.shape[-1]))
        if name in _BINARY:
            y = self._operand(argument(node, "other"))
            is_plain = options.get("alpha", 1) == 1 and len(shape) > 0
            return self._step(_BINARY[name], shape, x, y) if y is not None and is_plain else None
        if name == "pow" and options["exponent"] == 2:
            return self._step("MULTIPLY", shape, x, x)
        if name in _UNARY:
            return self._step(_UNARY[name], shape, x)
        if name in self.loops.FUNCTIONS_OF_X and options.get("approximate", "none") == "none" and x.is_contiguous:
            flat = TokenValue(x.buffer, x.offset, (math.prod(shape),), (1,))
            result = self._step("FUNCTION", flat.shape, flat, argument=self.loops.FUNCTION_NAMES.index(name))
            return None if result is None else result.reshaped(shape)
        return self._mean(x, options, shape) if name == "mean" else None

    def _mean(self, x: TokenValue, options: Mapping[str, Any], shape: tuple[int, ...]) -> TokenValue | None:
        dim = options["dim"]
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if dim not in (-1, len(x.shape) - 1) or not options["keepdim"]:
            return None
        out = self._new(shape)
        axes = step_axes(x.shape, out, x)
        if axes is None or axes[0][2] != x.shape[-1] or axes[1][1][2] != 1:
            return None
        self._add_step("MEAN", out, (x,), axes[0], [*axes[1], (0, 0, 0)])
        return out

    def _cat(self, node: fx.Node, dim: int, shape: tuple[int, ...]) -> TokenValue | None:
        reads: Any = node.args[0]
        parts, out, first = [self._operand(read) for read in reads], self._new(shape), 0
        for part in parts:
            if part is None:
                return None
            index: list[Any] = [slice(None)] * len(shape)
            index[dim] = slice(first, first + part.shape[dim])
            target = out.sliced(index)
            if target is None or self._step("COPY", part.shape, part, out=target) is None:
                return None
            first += part.shape[dim]
        return out

    def _step(
        self, code: str, shape: Sequence[int], *operands: TokenValue, out: TokenValue | None = None, argument: int = 0
    ) -> TokenValue | None:
        out = self._new(shape) if out is None else out
        axes = step_axes(shape, out, *operands)
        if axes is None:
            return None
        sizes, strides = axes
        if len(operands) == 1 and sizes[2] > 1 and strides[1][2] != 1:
            return None
        self._add_step(code, out, operands, sizes, [*strides, *[(0, 0, 0)] * (3 - len(strides))], argument)
        return out

    def _add_step(
        self, code: str, out: TokenValue, operands: Sequence[TokenValue], sizes: Any, strides: Any, argument: int = 0
    ) -> None:
        numbers = [*sizes, *(number for of in strides for number in of), argument]
        self._steps.append(_Step(getattr(self.loops, code), out, operands, self._fields(SIZES=numbers)))

    def _fields(self, **numbers: Sequence[int]) -> dict[int, int]:
        """Fields of a step: numbers in order, from each named field on."""
        of_names = self.loops.TokenField
        return {of_names[name] + k: number for name, of in numbers.items() for k, number in enumerate(of)}

    def _append(self, node: fx.Node) -> bool:
        """Add a step that writes new entries (samples, heads, count, depth) to a state. Returns whether it can."""
        stored, is_floats = stored_state(node), is_op(node, "append")
        if self.attention is None or (stored is None and not is_floats):
            return False
        past, new = (argument(node, "past"), argument(node, "new")) if stored is None else (stored.past, stored.new)
        if is_op(past, "state_integers", "state_scale", "state_zero_point"):
            return False
        x, dim = self._operand(new), options_of(node)["dim"] if stored is None else stored.dim
        is_long = x is not None and len(x.shape) == 4 and dim in (GROWING_AXIS, GROWING_AXIS - 4)
        if x is None or not is_long or not isinstance(past, fx.Node) or past in self.values or past in self.states:
            return False
        samples, heads, count, depth = x.shape
        is_stored = stored is None or (depth % self.loops.TILE_COLUMNS == 0 and stored.bits in (4, 8))
        if (depth > 1 and x.strides[3] != 1) or not is_stored:
            return False
        self.states[node] = len(self.pasts)
        self.pasts.append(past)
        packing, blocks = (None, 1) if stored is None else (stored.packing, depth // (stored.block or depth))
        form = StateForm(samples, heads, depth, count, stored is not None, packing, blocks)
        self._growing.states.append(form)
        fields = self._fields(SIZES=(samples, heads, count), X_STRIDES=x.strides[:3], ARGUMENT=(depth,))
        code = self.loops.APPEND
        if stored is not None:
            code = self.loops.APPEND_INTEGERS
            fields |= self._fields(BITS=(form.bits, form.blocks), LEVELS=(stored.steps, stored.qmax))
        self._steps.append(_Step(code, None, (x,), fields, states=(self.states[node],)))
        return True

    def _attend(self, node: fx.Node, shape: tuple[int, ...]) -> TokenValue | None:
        attention = None if self.attention is None else self.attention(node)
        nodes = () if attention is None else (state_node(attention.key), state_node(attention.value))
        if attention is None or not self.states.keys() >= set(nodes):
            return None
        query, states = self._operand(attention.query), tuple(self.states[node] for node in nodes)
        form, of_values = (self._growing.states[state] for state in states)
        if query is None or len(query.shape) != 4 or query.strides[3] != 1 or query.shape[2] > MAX_QUERIES:
            return None
        samples, heads, queries, depth = query.shape
        sizes = samples, heads, depth
        if not (form[:3] == of_values[:3] == sizes and form[4:] == of_values[4:]):  # `new` may differ
            return None
        if depth % self.loops.TILE_COLUMNS:
            return None
        self._growing.must_be_equal(*states)
        mask = (
            None if attention.mask is None else self._mask(attention.mask, MaskForm(samples, heads, queries, states[0]))
        )
        factor = torch.tensor(attention.factor_for(depth), dtype=torch.float32, device="cpu")
        self._kept.append(factor)
        fields = self._fields(
            SIZES=(samples, heads, queries), X_STRIDES=query.strides[:3], ARGUMENT=(depth,),
            FACTOR=(factor.data_ptr(),), COLUMNS=(0, samples * heads), BITS=(form.bits, form.blocks),
        )  # fmt: skip
        out = self._new(shape)
        parts = partial(_head_parts, samples * heads)
        code = self.loops.ATTEND_TO_INTEGERS if form.in_integers else self.loops.ATTEND
        self._steps.append(_Step(code, out, (query,), fields, parts, states, mask))
        return out

    def _mask(self, node: fx.Node, form: MaskForm) -> int:
        """Index of a mask of the program."""
        for index, (mask, mask_form) in enumerate(zip(self.masks, self._growing.masks, strict=True)):
            if mask is node and mask_form[:3] == form[:3]:
                self._growing.must_be_equal(mask_form.state, form.state)
                return index
        self.masks.append(node)
        self._growing.masks.append(form)
        return len(self.masks) - 1

    def _linear(self, node: fx.Node, shape: tuple[int, ...]) -> TokenValue | None:
        layer = self.product(node)
        x = self._operand(layer.x) if layer is not None else None
        if layer is None or x is None or not x.is_contiguous:
            return None
        out, code, rows = self._new(shape), self.loops.LINEAR, math.prod(x.shape[:-1])
        fields = self._fields(WEIGHT=layer.product.fields(rows), COLUMNS=(0, shape[-1]))
        if layer.grid:
            code = self.loops.ROUNDED_LINEAR
            fields |= self._fields(ONES=(layer.product.ones().data_ptr(),), GRID=layer.grid)
        self._steps.append(_Step(code, out, (x,), fields, layer.product.parts))
        self.linear_count += 1
        if not layer.function:
            return out
        flat = TokenValue(out.buffer, 0, (math.prod(shape),), (1,))
        result = self._step("FUNCTION", flat.shape, flat, argument=self.loops.FUNCTION_NAMES.index(layer.function))
        return None if result is None else result.reshaped(shape)

    def _rotate(self, x: TokenValue, size: int) -> TokenValue | None:
        product = rotation_product(size)
        values = x if x.is_contiguous else self._step("COPY", x.shape, x)
        if product is None or values is None:
            return None
        self._kept.append(product)
        out, rows = self._new(x.shape), math.prod(x.shape) // size
        fields = self._fields(WEIGHT=product.fields(rows), COLUMNS=(0, size))
        self._steps.append(_Step(self.loops.LINEAR, out, (values,), fields, product.parts))
        return out

    def finish(self, outputs: Sequence[fx.Node]) -> TokenProgram | None:
        """Return the program that computes these values; None if no step can write one of them as a tensor."""
        shapes: list[tuple[int, ...]] = []
        of_buffer: dict[int, int] = {}  # number of the output that a buffer is
        functions = {step.out.buffer for step in self._steps if step.out and step.code == self.loops.FUNCTION}
        for node in outputs:
            value = self.values[node]
            is_own = value.is_contiguous and value.offset == 0 and math.prod(value.shape) == self._sizes[value.buffer]
            taken = {*of_buffer, *self._fixed, *self._inputs_at, *functions}
            if not is_own or value.buffer in taken:
                copy = self._step("COPY", value.shape, value)
                if copy is None:
                    return None
                value = copy
            of_buffer[value.buffer] = len(shapes)
            shapes.append(value.shape)
        places, size = self._places(of_buffer)
        rows = torch.zeros(len(self._steps), self.loops.MAX_FIELDS, dtype=torch.int64, device="cpu")
        for row, step in zip(rows, self._steps, strict=True):
            numbers = {self.loops.TokenField.CODE: step.code, **step.fields, **self._indices(step, len(shapes))}
            for at, place in zip(("OUT", "X", "Y"), (step.out, *step.operands), strict=False):
                numbers |= {} if place is None else self._fields(**{at: _located(places, place)})
            row[list(numbers)] = torch.tensor(list(numbers.values()), dtype=torch.int64)
        inputs = [self.shape_of(node) for node in self.inputs]
        parts = {k: step.parts for k, step in enumerate(self._steps) if step.parts is not None}
        kept = [*self._fixed.values(), *self._kept]
        return TokenProgram(self.loops, rows, inputs, self._growing, shapes, size, parts, kept)

    def _indices(self, step: _Step, outputs: int) -> dict[int, int]:
        """Where the integers of the states and of the mask of a step are among the bases."""
        first, size, masks = 2 + len(self.inputs) + outputs, self.loops.VARYING, len(self.masks)
        states = [first + size * (masks + self._growing.tensors_before(state)) for state in step.states]
        return self._fields(STATE=states, MASK=() if step.mask is None else (first + size * step.mask,))

    def _places(self, of_buffer: Mapping[int, int]) -> tuple[list[Place], int]:
        """Base and offset of each buffer, and the bytes of the workspace."""
        placed = {*of_buffer, *self._fixed, *self._inputs_at}
        touched = [{v.buffer for v in (step.out, *step.operands) if v} - placed for step in self._steps]
        offsets, size = workspace_offsets(self._sizes, touched)
        places = list[Place]()
        for buffer in range(len(self._sizes)):
            if buffer in self._fixed:
                places.append((_CONSTANTS, self._fixed[buffer].data_ptr()))
            elif buffer in self._inputs_at:
                places.append((2 + self.inputs.index(self._inputs_at[buffer]), 0))
            elif buffer in of_buffer:
                places.append((2 + len(self.inputs) + of_buffer[buffer], 0))
            else:
                places.append((_WORKSPACE, offsets.get(buffer, 0)))
        return places, size


def workspace_offsets(sizes: Sequence[int], touched: Sequence[set[int]]) -> tuple[dict[int, int], int]:
    """Offset of each buffer in a workspace, and its bytes. A buffer takes memory that no later step needs.

    Args:
        sizes: number of values of each buffer.
        touched: buffers that each step reads or writes.
    """
    last = {buffer: k for k, buffers in enumerate(touched) for buffer in buffers}
    offsets, free, end = dict[int, int](), dict[int, list[int]](), 0
    for k, buffers in enumerate(touched):
        for buffer in sorted(buffers - offsets.keys()):
            size = -(-4 * sizes[buffer] // 64) * 64  # whole vectors
            if free.get(size):
                offsets[buffer] = free[size].pop()
            else:
                offsets[buffer], end = end, end + size
        for buffer in sorted(buffer for buffer in buffers if last[buffer] == k):
            free.setdefault(-(-4 * sizes[buffer] // 64) * 64, []).append(offsets[buffer])
    return offsets, end


def _head_parts(heads: int, threads: int) -> list[tuple[int, int]]:
    """Heads of an attention that each of some threads computes."""
    return column_parts(heads, min(threads, heads), 1)


def _located(places: Sequence[Place], value: TokenValue) -> Place:
    base, offset = places[value.buffer]
    return base, offset + 4 * value.offset
