"""The price table: estimated times of ops on each kind of CPU, from their sizes and a few measured coefficients.

An estimate is the same in every process, however busy the machine is. It is used as the price if nothing is measured,
or if a measurement does not clearly contradict it (see `fxq/cost/prices.py`). `price_table.toml` holds the
coefficients; `scripts/dev/measure_prices.py` measures them.
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

from torch import fx

from fxq.backends import cpu
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.graph.region import Region
from fxq.graph.run import infer_ops
from fxq.graph.unit import InnerValue, OpCall, unit_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("price_table.toml")
Rows = Mapping[str, Sequence[float]]
_LANES, _SUMMED_PRODUCTS = 16, 4
"""Output channels and products that kernels process at once; channel counts are rounded up to multiples of these."""


@dataclass(frozen=True)
class Work:
    """Amount of work of an op, as the price table counts it.

    Attributes:
        kind: row of the table: the op's name, with suffixes for special cases; "+name" for an op fused into a kernel.
        macs: multiply-accumulates in millions, with channels rounded up to what kernels process at once.
        elements: values read and computed, without weights, in millions.
        weights: values of the weight, in millions.
        gathered: values under the windows of a convolution, over all its positions, in millions.
    """

    kind: str
    macs: float = 0.0
    elements: float = 0.0
    weights: float = 0.0
    gathered: float = 0.0

    @property
    def sizes(self) -> tuple[float, float, float, float, float]:
        """Factors of the coefficients of a row: 1 for the call, then the sizes."""
        return (1.0, self.macs, self.elements, self.weights, self.gathered)


@dataclass(frozen=True)
class PriceTable:
    """Estimated seconds of ops on one kind of CPU, with one thread.

    Attributes:
        real: coefficients of float ops by kind of work: microseconds per call, per million multiply-accumulates, per
            million values read and computed, per million weights, and per million gathered values.
        int8: coefficients of the kernels of one backend, and of conversions.
    """

    real: Rows
    int8: Rows

    @staticmethod
    def seconds(rows: Rows, works: Sequence[Work]) -> float | None:
        """Return the sum of seconds over `works`; None if a kind has no row."""
        if any(work.kind not in rows for work in works):
            return None
        return 1e-6 * sum(a * b for work in works for a, b in zip(rows[work.kind], work.sizes, strict=True))

    def float_seconds(self, gm: fx.GraphModule, region: Region) -> float | None:
        """Return the seconds of the ops of a region in float; None if one of them is not in the table."""
        return self.seconds(self.real, float_works(gm, region))

    def kernel_seconds(self, gm: fx.GraphModule, region: Region) -> float | None:
        """Return the seconds of a region as one integer kernel; None if one of its ops is not in the table."""
        return self.seconds(self.int8, kernel_works(gm, region))

    def conversion(self, kind: str, elements: int) -> float | None:
        """Return the seconds to "quantize", "dequantize" or "measure" a number of values; None if not in the table."""
        return self.seconds(self.int8, (Work(kind, elements=elements / 1e6),))


def float_works(gm: fx.GraphModule, region: Region) -> tuple[Work, ...]:
    """Work of the ops of a region in float, each a separate call."""
    shapes = _Shapes(gm, region)
    return tuple(_work(shapes, call, _kind(shapes, call)) for call in region.calls)


def kernel_works(gm: fx.GraphModule, region: Region) -> tuple[Work, ...]:
    """Work of a region as one integer kernel: its first op is the call, the others are fused into it."""
    shapes = _Shapes(gm, region)
    first, *others = region.calls
    return (
        _work(shapes, first, _kind(shapes, first) + _form(region)),
        *(_work(shapes, call, f"+{_kind(shapes, call)}") for call in others),
    )


def _form(region: Region) -> str:
    """Suffix of the kind of a layer with a dynamic range, or of a linear layer with float output."""
    plan = info(region.node).plan
    if plan is not None and plan.reads is not None and plan.reads.range == "dynamic":
        return "_dynamic"
    to_float = region.calls[0].op.name == "linear" and not is_op(region.outputs[0], "quantize")
    return "_to_float" if to_float else ""


class _Shapes:
    """Shapes of the values that the ops of a region read and compute."""

    def __init__(self, gm: fx.GraphModule, region: Region) -> None:
        self.calls, self.node = region.calls, region.node
        unit = unit_of(gm, region.node)
        types = () if unit is None else infer_ops(unit.graph, region.node.args)
        self.inner = {call.name: shape for call, (shape, _) in zip(self.calls, types, strict=False) if shape}

    def __getitem__(self, value: Any) -> tuple[int, ...]:
        """Shape of an argument of an op; if it is unknown, the shape of the unit's output."""
        if isinstance(value, InnerValue):
            return self.made(self.calls[value.index])
        return info(value if isinstance(value, fx.Node) else self.node).shape or ()

    def made(self, call: OpCall) -> tuple[int, ...]:
        """Shape of the output of an op."""
        return self.inner.get(call.name, info(self.node).shape or ())


def _weight(shapes: _Shapes, call: OpCall) -> tuple[int, ...]:
    value = call.tensors.get(call.op.traits.weight or "")
    return shapes[value] if isinstance(value, fx.Node) else ()


def _kind(shapes: _Shapes, call: OpCall) -> str:
    """Row of the price table for an op: its name, with a suffix if it has special kernels.

    Convolutions of all ranks share a row. Suffixes mark groups, depthwise and 1x1 convolutions, convolutions with at
    most 16 channels, broadcasting, and linear layers with one row.
    """
    name, weight = call.op.name, _weight(shapes, call)
    groups = call.options.get("groups", 1)
    if name.startswith("conv") and isinstance(groups, int) and groups > 1 and len(weight) > 1:
        name += "_depthwise" if weight[1] == 1 else "_grouped"
    elif name.startswith("conv") and len(weight) > 1:
        name += "_1x1" if math.prod(weight[2:]) == 1 else "_narrow" if max(weight[:2]) <= _LANES else ""
    if name == "linear" and math.prod(shapes.made(call)[:-1]) == 1:
        name += "_row"
    if name in ("add", "sub", "mul") and len({shapes[value] for value in call.activations}) > 1:
        name += "_broadcast"
    return re.sub(r"[123]d", "", name)


def _work(shapes: _Shapes, call: OpCall, kind: str) -> Work:
    out, weight, macs, gathered = shapes.made(call), _weight(shapes, call), 0.0, 0.0
    if call.op.macs is not None:
        input_shapes = [shapes[value] if value is not None else None for value in call.tensors.values()]
        with contextlib.suppress(TypeError, IndexError):  # calls with unusual arguments
            macs = call.op.macs(out, *input_shapes) / 1e6
            gathered = macs / max(weight[0], 1) if len(weight) > 2 else 0.0
    read = sum(math.prod(shapes[value]) for value in call.activations)
    values = math.prod(weight) if weight else 0
    return Work(kind, macs * _padding(weight, kind), (read + math.prod(out)) / 1e6, values / 1e6, gathered)


def _padding(weight: tuple[int, ...], kind: str) -> float:
    """Ratio of the computed to the necessary multiply-accumulates, since kernels process several channels at once."""
    if len(weight) < 2 or "lstm" in kind or "gru" in kind:
        return 1.0
    outputs, inputs = weight[:2] if "transpose" not in kind else (weight[1], weight[0])
    ratio = _rounded_up(outputs, _LANES) / max(outputs, 1)
    return ratio if "depthwise" in kind else ratio * _rounded_up(inputs, _SUMMED_PRODUCTS) / max(inputs, 1)


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


@cache
def read_table(path: Path = FILE) -> dict[str, Any]:
    """Return the coefficients in a file, by kind of CPU, then by "float" or backend, then by kind of work."""
    with path.open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)
    return table


def table_for(backend: str, kind: str | None = None) -> PriceTable | None:
    """Return the table of a backend's kernels on a kind of CPU, by default this one; None if there is none."""
    kind = kind or cpu.kind()
    table = read_table()
    rows = table.get(kind) or table[_SIMILAR_CPUS[kind]]
    kernels = backend if backend in rows else _SIMILAR_BACKENDS.get(backend)
    return PriceTable(rows["float"], rows[kernels]) if kernels is not None else None


_SIMILAR_CPUS = {"amx": "avx512_vnni", "avx2_vnni": "avx512_vnni", "neon": "avx2"}
"""Measured kind of CPU whose coefficients are used for a kind that is not measured."""
_SIMILAR_BACKENDS = {"fbgemm": "x86", "qnnpack": "x86"}
"""Backend whose coefficients are used for a backend that is not measured."""
