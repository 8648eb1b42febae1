"""Price table: estimated seconds of ops on each kind of CPU, linear in their sizes.

Estimates do not depend on the load of the machine. They are used where nothing is measured, or where a measurement
does not clearly contradict them (see `fxq/cost/prices.py`). `price_table.toml` holds the coefficients, which
`scripts/measure_prices.py` fits.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends import cpu
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.graph.region import UnitRegion
from fxq.graph.unit import Inner, OpCall, unit_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("price_table.toml")
Rows = Mapping[str, Sequence[float]]
_OUTPUT_LANES, _INPUT_LANES = 16, 4
"""Output and input channels that kernels process at once; other numbers are rounded up to a multiple."""


@dataclass(frozen=True)
class Work:
    """Amount of work of an op, in the units of the price table.

    Attributes:
        kind: row of the table: the op's name, such as "conv_depthwise"; "+relu" for an op fused into a kernel.
        macs: multiply-accumulates in millions, with channels rounded up to full vectors.
        elements: values that it reads and writes, without weights, in millions.
        weights: values of its weight, in millions.
    """

    kind: str
    macs: float = 0.0
    elements: float = 0.0
    weights: float = 0.0

    @property
    def sizes(self) -> tuple[float, float, float, float]:
        """Factors of the four coefficients of a row."""
        return (1.0, self.macs, self.elements, self.weights)


@dataclass(frozen=True)
class PriceTable:
    """Estimated seconds of ops on one kind of CPU, with one thread.

    Attributes:
        real: coefficients of float ops by kind of work: microseconds per call, per million multiply-accumulates, per
            million values read and written, and per million weights.
        int8: coefficients of the kernels of one backend, and of conversions.
    """

    real: Rows
    int8: Rows

    @staticmethod
    def seconds(rows: Rows, works: Sequence[Work]) -> float | None:
        """Sum of the estimates, or None if a kind of work has no row."""
        if any(work.kind not in rows for work in works):
            return None
        return 1e-6 * sum(a * b for work in works for a, b in zip(rows[work.kind], work.sizes, strict=True))

    def float_seconds(self, gm: fx.GraphModule, region: UnitRegion) -> float | None:
        """Seconds of a region's ops in float, or None if one of them has no row."""
        return self.seconds(self.real, float_works(gm, region))

    def kernel_seconds(self, gm: fx.GraphModule, region: UnitRegion) -> float | None:
        """Seconds of a region as one integer kernel, or None if one of its ops has no row."""
        return self.seconds(self.int8, kernel_works(gm, region))

    def conversion(self, kind: str, elements: int) -> float | None:
        """Seconds to "quantize", "dequantize", "requantize" or "measure" that many values."""
        return self.seconds(self.int8, (Work(kind, elements=elements / 1e6),))


def float_works(gm: fx.GraphModule, region: UnitRegion) -> tuple[Work, ...]:
    """Work of a region in float, where each op is a call."""
    shapes = _Shapes(gm, region)
    return tuple(_work(shapes, call, _kind(shapes, call)) for call in region.calls)


def kernel_works(gm: fx.GraphModule, region: UnitRegion) -> tuple[Work, ...]:
    """Work of a region as one integer kernel: its first op, and the ops that are fused to it."""
    shapes = _Shapes(gm, region)
    first, *others = region.calls
    return (
        _work(shapes, first, _kind(shapes, first) + _form(region)),
        *(_work(shapes, call, f"+{_kind(shapes, call)}") for call in others),
    )


def _form(region: UnitRegion) -> str:
    """Suffix of the kind: "_dynamic" for dynamic ranges, "_to_float" for linear layers with float output."""
    plan = info(region.node).plan
    if plan is not None and plan.reads is not None and plan.reads.range == "measured":
        return "_dynamic"
    to_float = region.calls[0].op.name == "linear" and not is_op(region.outputs[0], "quantize")
    return "_to_float" if to_float else ""


class _Shapes(fx.Interpreter):
    """Shapes of the operands and results of a region's ops. Runs a unit's body on meta tensors for those inside it."""

    def __init__(self, gm: fx.GraphModule, region: UnitRegion) -> None:
        self.calls, self.node = region.calls, region.node
        self.inner: dict[str, tuple[int, ...]] = {}
        unit = unit_of(gm, region.node)
        if unit is None:
            return
        super().__init__(unit)
        with torch.no_grad(), contextlib.suppress(Exception):  # a body that meta tensors cannot run
            self.run(*fx.node.map_arg(region.node.args, _of_shape))

    def run_node(self, n: fx.Node) -> Any:
        """Run an op of the body and record the shape of its result."""
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.inner[n.name] = tuple(value.shape)
        return value

    def __getitem__(self, value: Any) -> tuple[int, ...]:
        """Shape of an operand; that of the unit's output if it is unknown."""
        if isinstance(value, Inner):
            return self.result(self.calls[value.index])
        return info(value if isinstance(value, fx.Node) else self.node).shape or ()

    def result(self, call: OpCall) -> tuple[int, ...]:
        """Shape of an op's result."""
        return self.inner.get(call.name, info(self.node).shape or ())


def _of_shape(node: fx.Node) -> Tensor:
    about = info(node)
    return torch.empty(about.shape or (), dtype=torch.float32, device="meta")


def _weight(shapes: _Shapes, call: OpCall) -> tuple[int, ...]:
    value = call.tensors.get(call.op.quant.weight or "")
    return shapes[value] if isinstance(value, fx.Node) else ()


def _kind(shapes: _Shapes, call: OpCall) -> str:
    """Row of an op. Convolutions of all ranks share one; grouped, single-row and broadcasting ops have their own."""
    name, weight = call.op.name, _weight(shapes, call)
    groups = call.options.get("groups", 1)
    if name.startswith("conv") and isinstance(groups, int) and groups > 1 and len(weight) > 1:
        name += "_depthwise" if weight[1] == 1 else "_grouped"
    if name == "linear" and math.prod(shapes.result(call)[:-1]) == 1:
        name += "_row"
    if name in ("add", "sub", "mul") and len({shapes[value] for value in call.activations}) > 1:
        name += "_broadcast"
    return re.sub(r"[123]d", "", name)


def _work(shapes: _Shapes, call: OpCall, kind: str) -> Work:
    out, weight, macs = shapes.result(call), _weight(shapes, call), 0.0
    if call.op.macs is not None:
        operand_shapes = [shapes[value] if value is not None else None for value in call.tensors.values()]
        with contextlib.suppress(TypeError, IndexError):  # an operand is missing or has an unusual form
            macs = call.op.macs(out, *operand_shapes) * _padding(weight, kind)
    read = sum(math.prod(shapes[value]) for value in call.activations)
    return Work(kind, macs / 1e6, (read + math.prod(out)) / 1e6, math.prod(weight) / 1e6 if weight else 0.0)


def _padding(weight: tuple[int, ...], kind: str) -> float:
    """Factor by which a kernel's work grows because channels are rounded up to full vectors."""
    if len(weight) < 2 or "lstm" in kind or "gru" in kind:
        return 1.0
    outputs, inputs = weight[:2] if "transpose" not in kind else (weight[1], weight[0])
    grown = _up(outputs, _OUTPUT_LANES) / max(outputs, 1)
    return grown if "depthwise" in kind else grown * _up(inputs, _INPUT_LANES) / max(inputs, 1)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@cache
def read_table(path: Path = FILE) -> dict[str, Any]:
    """Coefficients in a file by kind of CPU, then "float" or backend, then kind of work."""
    with path.open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)
    return table


def table_for(backend: str, kind: str | None = None) -> PriceTable | None:
    """Price table of a backend on a kind of CPU, by default this CPU; None if the file has no such rows."""
    kind = kind or cpu.kind()
    table = read_table()
    rows = table.get(kind) or table[_SIMILAR_CPUS[kind]]
    kernels = backend if backend in rows else _SIMILAR_BACKENDS.get(backend)
    return PriceTable(rows["float"], rows[kernels]) if kernels is not None else None


_SIMILAR_CPUS = {"amx": "avx512_vnni", "avx2_vnni": "avx512_vnni", "neon": "avx2"}
"""Kinds of CPU without rows, each with the kind whose int8 to float ratios are expected to be closest."""
_SIMILAR_BACKENDS = {"fbgemm": "x86", "qnnpack": "x86"}
"""Backends without rows, each with the backend whose rows are used instead."""
