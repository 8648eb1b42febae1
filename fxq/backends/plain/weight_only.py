"""Weight-only kernels: layers that compute in float with weights stored in integers or float16. They run on any CPU.

A weight is converted in pieces that stay in the cache, so that memory traffic is that of the stored weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel, decode, refuse
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.few_rows import MAX_ROWS, FewRowsProduct, chunks_refused, refused
from fxq.backends.plain.panel_product import PanelProduct
from fxq.backends.plain.split_product import SplitProduct, split_refused
from fxq.backends.plain.stored_weight import StoredWeight, float_input
from fxq.graph.unit import OpCall
from fxq.ops import OPS
from fxq.quant.packing import Packing

if TYPE_CHECKING:
    from typing_extensions import Self

_PIECE_ELEMENTS = 1 << 18
"""Weights that are converted at once: 1 MiB as float32, which fits the L2 cache of a core."""
_COMPILED_PIECE_ELEMENTS = 1 << 20
"""Weights that a compiled loop converts at once: less time goes into calls, and into joining their results."""
VERIFIED_ROWS = 5
"""Rows on which the compiled product is verified: a full tile of rows, and a single one."""


class WeightOnlyKernel(Kernel):
    """Op that computes in float with stored weights.

    Args:
        op: name of the op.
        settings: the op's options.
        takes: names of the op's tensors with which the kernel is called, in order; all others are constants.
        axis, block: as in `QParams`, for all weights.
        packed: shape of a row of each weight if the values are packed into bytes; else None.
        signed, bits: of packed values, as in `Packing`.
        tensors: constants by the names of the op's tensors: a weight as it is stored, with its scale and zero point as
            `weight_scale` and `weight_zero_point` (see `StoredWeight`); others in float32.
    """

    options: ClassVar[tuple[str, ...]] = ("op", "settings", "takes", "axis", "block", "packed", "signed", "bits")
    bias: Tensor | None

    def __init__(
        self,
        *,
        op: str,
        settings: Mapping[str, Any],
        takes: Sequence[str] = ("x",),
        axis: int | None = None,
        block: int | None = None,
        packed: Sequence[Sequence[int]] | None = None,
        signed: bool = True,
        bits: int = 4,
        **tensors: Tensor | None,
    ) -> None:
        super().__init__()
        weights = [name for name in OPS[op].tensors if OPS[op].traits.role(name) == "weight"]
        constants = [name for name in OPS[op].tensors if name not in (*weights, *takes)]
        for name in (*(f"{weight}{part}" for weight in weights for part in _PARTS), *constants):
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.op, self.settings = op, {key: decode(value) for key, value in settings.items()}
        self.takes, self.axis, self.block, self.signed, self.bits = tuple(takes), axis, block, signed, bits
        self.packed = None if packed is None else tuple(map(tuple, packed))
        self._weights, self._constants = weights, constants

    @classmethod
    def of(
        cls,
        call: OpCall,
        takes: Sequence[str],
        weights: Mapping[str, StoredWeight],
        constants: Mapping[str, Tensor],
    ) -> Self:
        """Return the kernel of an op with weights of the qdq graph.

        Args:
            call: the op.
            takes: names of the tensors with which the kernel is called, in order.
            weights: weights by the names of the op's tensors. All have the same axis, block and packing.
            constants: other constant tensors, such as the bias, by name.

        Raises:
            BackendError: the weights are packed with different widths.
        """
        tensors: dict[str, Any] = dict(constants)
        for name, weight in weights.items():
            parts = zip(_PARTS, (weight.values, weight.scale, weight.zero_point), strict=True)
            tensors |= {f"{name}{part}": tensor for part, tensor in parts if tensor is not None}
        first, packings = next(iter(weights.values())), [weight.packing for weight in weights.values()]
        widths = {None if packing is None else (packing.bits, packing.signed) for packing in packings}
        refuse(cls.name, "its weights are packed with different widths" if len(widths) > 1 else None)
        rows = [weight.row for weight in weights.values()]
        return cls(
            **tensors, op=call.op.name, settings=call.options, takes=takes, axis=first.axis, block=first.block,
            **packing_options(first.packing, rows),
        )  # fmt: skip

    @property
    def stored(self) -> dict[str, StoredWeight]:
        """Weights by name, with the current tensors."""
        weights: dict[str, StoredWeight] = self._cached("", self._stored_weights)
        return weights

    def _stored_weights(self) -> dict[str, StoredWeight]:
        weights: dict[str, StoredWeight] = {}
        for name in self._weights:
            values, scale, zero_point = (self._buffers[f"{name}{part}"] for part in _PARTS)
            if values is not None:
                row = None if self.packed is None else self.packed[len(weights)]
                packing = None if row is None else Packing(row, self.bits, self.signed)
                weights[name] = StoredWeight(values, scale, zero_point, self.axis, self.block, packing)
        return weights

    def stored_weight(self) -> StoredWeight:
        """Return the weight of an op that has only one."""
        return self.stored["weight"]

    def arguments(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the inputs and the constants other than weights, by the names of the op's tensors."""
        constants = {name: tensor for name in self._constants if (tensor := self._buffers[name]) is not None}
        return constants | dict(zip(self.takes, inputs, strict=True))


_PARTS = ("", "_scale", "_zero_point")


def packing_options(packing: Packing | None, rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Options of a kernel for the packing of its weights, whose rows have these shapes."""
    return {} if packing is None else {"packed": rows, "signed": packing.signed, "bits": packing.bits}


class WeightOnlyLinear(WeightOnlyKernel):
    """Linear layer, in a compiled loop where there is one: `FewRowsProduct`, and `PanelProduct` for many rows.

    Otherwise it converts some rows of the weight at a time. Per-channel scales are applied to the result.
    """

    name: ClassVar[str] = "weight_only.linear"

    def bind(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function for inputs like these. See `Bindable.bind`."""
        product = self.few_rows(x) or self.many_rows(x)
        if product is None:
            return self.forward
        return product if x.dtype == torch.float32 else lambda x: product(float_input(x))

    def forward(self, x: Tensor) -> Tensor:
        """float32 (..., K) -> float32 (..., O)."""
        x, product = float_input(x), self.few_rows(x)
        return self.of_many_rows(x) if product is None else product(x)

    def at_other_sizes(self, *inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Inputs with few rows if there are many, and the reverse, since another kernel runs then."""
        (x,) = inputs
        rows = x.reshape(-1, x.shape[-1])
        if len(rows):
            yield (rows[:VERIFIED_ROWS],) if len(rows) > MAX_ROWS else (rows[:1].repeat(MAX_ROWS + 1, 1),)

    def few_rows(self, x: Tensor) -> FewRowsProduct | None:
        """Compiled product for inputs like these; None if it is not faster, or there is none."""
        stored = self.stored_weight()
        columns = math.prod(stored.row)
        if x.shape[-1:] != (columns,) or not 0 < x.numel() <= MAX_ROWS * columns:
            return None
        return self._product(x, 0)

    def many_rows(self, x: Tensor) -> PanelProduct | SplitProduct | None:
        """Compiled product for inputs like these; None if there are few rows, if it is not faster, or there is none."""
        stored = self.stored_weight()
        columns = math.prod(stored.row)
        few = self._product(x, 0) if x.shape[-1:] == (columns,) and x.numel() > MAX_ROWS * columns else None
        return None if few is None else self._cached("many_rows_of_floats", lambda: _product_of_many_rows(stored, few))

    def of_many_rows(self, x: Tensor) -> Tensor:
        """float32 (..., K) -> float32 (..., O), for more rows than those of `few_rows`."""
        product = self.many_rows(x)
        return self._in_pieces(x) if product is None else product(x)

    def _product(self, x: Tensor, elements: int) -> FewRowsProduct | None:
        """Compiled product of the weight; None if there is none for tensors like x. `elements`: as of `loops_for`."""
        loops = loops_for("few_rows_loops", elements, x, *self._buffers.values())
        return None if loops is None else self._cached("few_rows", lambda: self._few_rows_product(loops))

    def _few_rows_product(self, loops: ModuleType) -> FewRowsProduct | None:
        stored = self.stored_weight()
        return FewRowsProduct(loops, stored, self.bias) if refused(stored) is None else None

    def _in_pieces(self, x: Tensor) -> Tensor:
        product = self._product(x, self.stored_weight().numel)
        if product is not None:
            return self._converted(x, product)
        pieces, scale, shape = self._cached("pieces", self._pieces)
        convert = StoredWeight.floats if scale is None else StoredWeight.integers
        bias = self.bias if scale is None else None
        if len(pieces) == 1:
            y = F.linear(x, convert(pieces[0], pieces[0].empty()), bias)
        else:
            buffer = torch.empty(shape, dtype=torch.float32, device=x.device)
            y = torch.cat([F.linear(x, convert(p, buffer[: len(p.values)])) for p in pieces], -1)
            y = y if bias is None else y.add_(bias)
        if scale is None:
            return y
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale, out=y)

    def _converted(self, x: Tensor, product: FewRowsProduct) -> Tensor:
        """Product with pieces of the weight that a compiled loop converts."""
        outputs, columns = len(self.stored_weight().values), self.stored_weight().row[0]
        rows = max(_COMPILED_PIECE_ELEMENTS // columns, 1)
        buffer = torch.empty(min(rows, outputs), columns, dtype=torch.float32, device="cpu")
        if rows >= outputs:
            return F.linear(x, product.floats(0, buffer), self.bias)
        starts = range(0, outputs, rows)
        y = torch.cat([F.linear(x, product.floats(i, buffer[: outputs - i])) for i in starts], -1)
        return y if self.bias is None else y.add_(self.bias)

    def _pieces(self) -> tuple[list[StoredWeight], Tensor | None, tuple[int, int]]:
        """The weight in pieces of some rows, the scale for the result or None, and the shape of the largest piece."""
        stored = self.stored_weight()
        rows, size = max(_PIECE_ELEMENTS // stored.row[0], 1), len(stored.values)
        pieces = [stored.some(lambda t, i=i: t[i : i + rows]) for i in range(0, size, rows)]  # type: ignore[misc]
        return pieces, stored.scale if stored.scales_results else None, (min(rows, size), stored.row[0])


def _product_of_many_rows(stored: StoredWeight, few: FewRowsProduct) -> PanelProduct | SplitProduct | None:
    """Fastest compiled product of many rows of floats with a weight; None if none is faster than PyTorch's."""
    if chunks_refused(stored) is not None:
        return None
    loops = loops_for("panel_loops", 0)
    of_panels = PanelProduct(loops, few) if loops is not None and loops.IS_FASTER else None
    loops = loops_for("split_float_loops", 0)
    if of_panels is not None and loops is not None and loops.IS_FASTER and split_refused(stored) is None:
        return SplitProduct(loops, stored, few, of_panels)
    return of_panels


class WeightOnlyExperts(WeightOnlyKernel):
    """Linear layers of experts. It reads the weights of those experts only that have rows."""

    name: ClassVar[str] = "weight_only.experts"

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """float32 (M, K) and the ends of the rows of each expert, int32 (E,) -> float32 (M, N)."""
        x, ends = float_input(x), offs.tolist()
        outputs = len(self.stored_weight().values) // len(ends)
        y, start = torch.zeros(len(x), outputs, dtype=torch.float32, device=x.device), 0
        for expert, end in enumerate(ends):
            if end > start:
                y[start:end] = self._expert(expert, outputs)(x[start:end])
            start = end
        return y

    def _expert(self, expert: int, outputs: int) -> WeightOnlyLinear:
        def make() -> WeightOnlyLinear:
            return stored_linear(self.stored_weight().some(lambda t: t[outputs * expert : outputs * (expert + 1)]))

        kernel: WeightOnlyLinear = self._cached(("expert", expert), make)
        return kernel


class WeightOnlyConv(WeightOnlyKernel):
    """Convolution or transposed convolution. Scales are applied to the weight or to the result, if that is faster."""

    name: ClassVar[str] = "weight_only.conv"

    def forward(self, x: Tensor) -> Tensor:
        """float32 (N, C, *size) -> float32 (N, O, *size')."""
        x, stored, run = float_input(x), self.stored_weight(), OPS[self.op].target
        scales_result = stored.scales_results and stored.scale is not None and x.numel() < stored.numel
        weight = stored.integers(stored.empty()) if scales_result else stored.floats(stored.empty())
        if not scales_result:
            return run(x, weight, self.bias, **self.settings)
        y: Tensor = run(x, weight, None, **self.settings)
        ones, scale = [1] * (weight.dim() - 2), stored.scale
        assert scale is not None  # implied by `scales_result`
        if self.axis == 1:
            scale = scale.repeat(self.settings["groups"])
        if scale.dim():
            scale = scale.view(-1, *ones)
        y.mul_(scale)
        return y if self.bias is None else y.add_(self.bias.view(-1, *ones))


class WeightOnlyEmbedding(WeightOnlyKernel):
    """Embedding. It gathers rows of integers, and converts only these."""

    name: ClassVar[str] = "weight_only.embedding"

    def forward(self, x: Tensor) -> Tensor:
        """Integers, any shape -> float32 (*shape, D)."""
        return _rows(self.stored_weight(), x).view(*x.shape, *self.stored_weight().row)

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        """Return a function for indices of this shape, see `Bindable.bind`.

        Unpacked tables with whole blocks take few ops; others use `forward`.
        """
        stored = self.stored_weight()
        values, scale, zero = stored.values, stored.scale, stored.zero_point
        block = min(stored.block or stored.row[0], stored.row[0])
        is_by_row = stored.axis == 0 if stored.block is None else stored.axis == 1
        is_plain = stored.packing is None and values.dim() == 2
        if scale is None or not is_by_row or not is_plain or stored.row[0] % block:
            return self.forward
        return _lookup(values.unflatten(1, (-1, block)), scale, zero, (*x.shape, *stored.row))


class WeightOnlyBag(WeightOnlyKernel):
    """Embedding bag: sums, means or maxima of rows of an embedding. It converts only the rows that it reads."""

    name: ClassVar[str] = "weight_only.embedding_bag"

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Integers (B, N), or (N,) with offsets (B,) -> float32 (B, D). Per-sample weights have the shape of x."""
        arguments = self.arguments(x, *others)
        offsets, per_sample_weights = arguments.get("offsets"), arguments.get("per_sample_weights")
        rows, settings = _rows(self.stored_weight(), x), dict(self.settings)
        indices = torch.arange(x.numel(), device=x.device).view(x.shape)  # into `rows`
        padding_idx = settings.pop("padding_idx")
        if padding_idx is not None:
            padding_idx %= len(self.stored_weight().values)
            rows = F.pad(rows, (0, 0, 0, 1))  # one row for all padding
            indices = indices.masked_fill(x == padding_idx, x.numel())
            settings["padding_idx"] = x.numel()
        if offsets is not None:
            offsets = offsets.to(indices.dtype)
        return OPS[self.op].target(indices, rows, offsets, per_sample_weights, **settings)


def stored_linear(stored: StoredWeight, bias: Tensor | None = None) -> WeightOnlyLinear:
    """Linear layer with a stored weight."""
    return WeightOnlyLinear(
        op="linear", settings={}, axis=stored.axis, block=stored.block, weight=stored.values,
        weight_scale=stored.scale, weight_zero_point=stored.zero_point, bias=bias,
        **packing_options(stored.packing, [stored.row]),
    )  # fmt: skip


def _lookup(values: Tensor, scale: Tensor, zero: Tensor | None, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Function that looks up rows of a table and converts them to float32 of a shape.

    Args:
        values: stored integers, (N, blocks, block).
        scale: of each block, with N * blocks elements.
        zero: zero points in the shape of `scale`, or None.
        shape: shape of the result.
    """
    scale = scale.view(*values.shape[:2], 1)
    if zero is None:

        def scaled(x: Tensor) -> Tensor:
            x = x.reshape(-1)
            return values.index_select(0, x).to(torch.float32).mul_(scale.index_select(0, x)).view(shape)

        return scaled
    zero = zero.view(scale.shape)

    def shifted(x: Tensor) -> Tensor:
        x = x.reshape(-1)
        zeros = zero.index_select(0, x).to(torch.float32)
        rows = values.index_select(0, x).to(torch.float32).sub_(zeros)
        return rows.mul_(scale.index_select(0, x)).view(shape)

    return shifted


def _rows(stored: StoredWeight, indices: Tensor) -> Tensor:
    """Rows of a weight as float32 (n, ...), by their indices: integers of any shape with n elements."""
    rows = stored.some(lambda t: t.index_select(0, indices.reshape(-1)))
    return rows.floats(rows.empty())
