"""`TokenProgramBuilder` turns nodes of a graph into steps, and `TokenProgram` runs them in one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxq.backends.loops.code.thread_pool import Job, code_address, run_together, usable_threads
from fxq.backends.loops.tokens.token_values import TokenValue, row_major, step_axes
from fxq.backends.plain.few_rows import FewRowsProduct
from fxq.graph.query import argument, op_of, options_of
from fxq.runtime.growing import OtherInputsError

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


class TokenProgramBuilder:
    """Builder of a program: it turns nodes, whose shapes are fixed, into steps.

    Args:
        loops: the module `fxq.backends.loops.code.token_loops`.
        shape_of: shape of a float32 node, which is the same in all calls; None for other nodes.
        resolved: value of an option, with numbers in place of nodes; raises `KeyError` if a number can change.
        constant: tensor of a node that is a weight; None for others.
        product: linear layer with a weight in integers; None for other nodes.
    """

    def __init__(
        self,
        loops: ModuleType,
        shape_of: Callable[[fx.Node], tuple[int, ...] | None],
        resolved: Callable[[Any], Any],
        constant: Callable[[fx.Node], Tensor | None],
        product: Callable[[fx.Node], TokenProduct | None],
    ) -> None:
        self.loops, self.shape_of, self.resolved = loops, shape_of, resolved
        self.constant, self.product = constant, product
        self.values: dict[fx.Node, TokenValue] = {}  # of inputs and results
        self.inputs: list[fx.Node] = []
        self.linear_count = 0
        self._inputs_at: dict[int, fx.Node] = {}
        self._sizes: list[int] = []  # of the buffers
        self._fixed: dict[int, Tensor] = {}  # constants, by buffer
        self._steps: list[tuple[int, TokenValue, Sequence[TokenValue], FewRowsProduct | None, list[int]]] = []

    @property
    def step_count(self) -> int:
        """Number of steps so far. Views of values take none."""
        return len(self._steps)

    def add(self, node: fx.Node) -> bool:
        """Add a node. Returns whether that is possible; if not, nothing has changed."""
        shape, op = self.shape_of(node), op_of(node)
        if shape is None or math.prod(shape) > MAX_VALUES or 0 in shape:
            return False
        before = len(self.inputs), len(self._sizes), len(self._steps)
        try:
            value = self._linear(node, shape) if op is None else self._value(node, op.name, shape)
        except KeyError:
            value = None
        if value is None or value.shape != shape:
            self._undo(*before)
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
        x = self._operand(argument(node, "x"))
        if x is None:
            return None
        if name in ("reshape", "unsqueeze", "contiguous", "transpose", "permute", "getitem", "cast"):
            return _view(name, x, options, shape)
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
        self._append("MEAN", out, (x,), axes[0], [*axes[1], (0, 0, 0)])
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
        self._append(code, out, operands, sizes, [*strides, *[(0, 0, 0)] * (3 - len(strides))], argument)
        return out

    def _append(
        self, code: str, out: TokenValue, operands: Sequence[TokenValue], sizes: Any, strides: Any, argument: int = 0
    ) -> None:
        fields = [*sizes, *(number for of in strides for number in of), argument]
        self._steps.append((getattr(self.loops, code), out, operands, None, fields))

    def _linear(self, node: fx.Node, shape: tuple[int, ...]) -> TokenValue | None:
        layer = self.product(node)
        x = self._operand(layer.x) if layer is not None else None
        if layer is None or x is None or not x.is_contiguous:
            return None
        out, code, rows = self._new(shape), self.loops.LINEAR, math.prod(x.shape[:-1])
        fields = [*layer.product.fields(rows), 0, shape[-1]]
        if layer.grid:
            code = self.loops.ROUNDED_LINEAR
            fields += [layer.product.ones().data_ptr(), *layer.grid]
        self._steps.append((code, out, (x,), layer.product, fields))
        self.linear_count += 1
        if not layer.function:
            return out
        flat = TokenValue(out.buffer, 0, (math.prod(shape),), (1,))
        result = self._step("FUNCTION", flat.shape, flat, argument=self.loops.FUNCTION_NAMES.index(layer.function))
        return None if result is None else result.reshaped(shape)

    def finish(self, outputs: Sequence[fx.Node]) -> TokenProgram | None:
        """Return the program that computes these values; None if no step can write one of them as a tensor."""
        shapes: list[tuple[int, ...]] = []
        of_buffer: dict[int, int] = {}  # number of the output that a buffer is
        functions = {out.buffer for code, out, *_ in self._steps if code == self.loops.FUNCTION}
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
        for row, (code, out, operands, _, fields) in zip(rows, self._steps, strict=True):
            located = [_located(places, value) for value in (out, *operands)]
            flat = [number for place in (*located, *[(0, 0)] * (3 - len(located))) for number in place]
            row[: 7 + len(fields)] = torch.tensor([code, *flat, *fields], dtype=torch.int64)
        input_shapes = [self.shape_of(node) for node in self.inputs]
        products = {k: product for k, (_, _, _, product, _) in enumerate(self._steps) if product is not None}
        return TokenProgram(self.loops, rows, input_shapes, shapes, size, products, list(self._fixed.values()))

    def _places(self, of_buffer: Mapping[int, int]) -> tuple[list[Place], int]:
        """Base and offset of each buffer, and the bytes of the workspace."""
        places, size = list[Place](), 0
        for buffer, count in enumerate(self._sizes):
            if buffer in self._fixed:
                places.append((_CONSTANTS, self._fixed[buffer].data_ptr()))
            elif buffer in self._inputs_at:
                places.append((2 + self.inputs.index(self._inputs_at[buffer]), 0))
            elif buffer in of_buffer:
                places.append((2 + len(self.inputs) + of_buffer[buffer], 0))
            else:
                places.append((_WORKSPACE, size))
                size += -(-4 * count // 64) * 64  # whole vectors
        return places, size


class TokenProgram:
    """Steps that compute some values of a graph in one call.

    It runs on as many threads as PyTorch had when it was made, or on the caller's alone while they serve another one.

    Args:
        loops: the module of the loops.
        steps: int64 (steps, fields).
        inputs: shapes of the inputs.
        outputs: shapes of the outputs.
        size: bytes of memory for values.
        products: products of linear layers, by the index of the step. Their columns are divided among threads.
        kept: further objects whose memory the steps refer to by address.
    """

    def __init__(
        self,
        loops: ModuleType,
        steps: Tensor,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        size: int,
        products: Mapping[int, FewRowsProduct],
        kept: Any,
    ) -> None:
        self._inputs, self._size, self._kept = [torch.Size(shape) for shape in inputs], size, kept
        self._outputs = [(shape, row_major(shape)) for shape in outputs]
        self._bases = ctypes.c_int64 * (2 + len(inputs) + len(outputs))
        self._loops, self._steps, self._products = loops, steps, products
        self._job, self._threads, self._tables = self._divided(usable_threads())

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the output, or a list if there are several.

        Raises:
            OtherInputsError: an input has another shape or dtype, or needs a gradient.
        """
        held = []
        for x, shape in zip(inputs, self._inputs, strict=True):
            if x.shape != shape or x.dtype is not torch.float32 or x.requires_grad:
                raise OtherInputsError
            held.append(x if x.is_contiguous() else x.contiguous())
        memory = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        outputs = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape, _ in self._outputs]
        addresses = [x.data_ptr() for x in held] + [y.data_ptr() for y in outputs]
        bases, threads = self._bases(0, memory.data_ptr(), *addresses), self._threads
        if threads == 1 or not run_together(self._job, threads, ctypes.addressof(bases), 0):
            self._loops.run(self._steps.data_ptr(), len(self._steps), bases)
        return outputs if len(outputs) > 1 else outputs[0]

    def _divided(self, threads: int) -> tuple[Job, int, Any]:
        """Divide linear layers among threads. Returns the job, its number of threads, and the memory it points to."""
        parts = {k: product.parts(threads) for k, product in self._products.items()}
        counts = torch.tensor([len(parts.get(k, [0])) for k in range(len(self._steps))], device="cpu")
        table = self._steps[:, None].repeat(1, int(counts.max()), 1)
        first = self._loops.TokenField.COLUMNS
        for k, columns in parts.items():
            table[k, : len(columns), first : first + 2] = torch.tensor(columns, device="cpu")
        of_row, count = 8 * self._loops.MAX_FIELDS, table.shape[1]
        function = code_address(self._loops.run)
        job = Job(function, table.data_ptr(), counts.data_ptr(), len(counts), count * of_row, of_row)
        return job, count, (table, counts)


def _located(places: Sequence[Place], value: TokenValue) -> Place:
    base, offset = places[value.buffer]
    return base, offset + 4 * value.offset


def _view(name: str, x: TokenValue, options: Mapping[str, Any], shape: tuple[int, ...]) -> TokenValue | None:
    """View that a layout op returns; None if the op has to move values."""
    if name in ("reshape", "unsqueeze"):
        return x.reshaped(shape)
    if name == "transpose":
        return x.transposed(options["dim0"], options["dim1"])
    if name == "permute":
        return x.permuted(options["dims"])
    if name == "getitem":
        index = options["index"]
        return x.sliced(index if isinstance(index, tuple) else (index,))
    if name == "cast":
        return x if options["dtype"] == torch.float32 else None
    return (
        x if x.is_contiguous and options["memory_format"] in (torch.contiguous_format, torch.preserve_format) else None
    )
