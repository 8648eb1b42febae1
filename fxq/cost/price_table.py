"""The price table: what ops take on each kind of CPU, estimated from their sizes by a few measured coefficients.

An estimate is the same in every process, however busy the machine is. It stands for a price where nothing is measured,
and where a measurement does not clearly contradict it (see `fxq/cost/prices.py`). `price_table.toml` holds the
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

import torch
from torch import Tensor, fx

from fxq.backends import cpu
from fxq.graph.info import info
from fxq.graph.query import is_op, op_of
from fxq.graph.region import UnitRegion
from fxq.graph.unit import InnerValue, OpCall, unit_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("price_table.toml")
Rows = Mapping[str, Sequence[float]]
_LANES, _SUMMED = 16, 4
"""Kernels compute so many output channels at once, and add so many products at once: other numbers are rounded up."""


@dataclass(frozen=True)
class Work:
    """What an op has to do, as the price table counts it.

    Attributes:
        kind: its row: the op's name, of convolutions with their groups; "+name" for an op in the kernel of another.
        macs: multiply-accumulates in millions, channels rounded up to what kernels compute at once.
        elements: values that it reads and makes, weights left out, in millions.
        weights: values of its weight, in millions.
        gathered: values under the windows of a convolution, at all its positions, in millions.
    """

    kind: str
    macs: float = 0.0
    elements: float = 0.0
    weights: float = 0.0
    gathered: float = 0.0

    @property
    def sizes(self) -> tuple[float, float, float, float, float]:
        """What the coefficients of a row are multiplied with."""
        return (1.0, self.macs, self.elements, self.weights, self.gathered)


@dataclass(frozen=True)
class PriceTable:
    """Estimated seconds of ops on one kind of CPU, with one thread.

    Attributes:
        real: coefficients by kind of work for float ops: microseconds for a call, for a million multiply-accumulates,
            for a million values read and made, for a million weights, for a million values gathered.
        int8: the same for the kernels of one backend, and for conversions.
    """

    real: Rows
    int8: Rows

    @staticmethod
    def seconds(rows: Rows, works: Sequence[Work]) -> float | None:
        """The sum over works; None where there is no row for one."""
        if any(work.kind not in rows for work in works):
            return None
        return 1e-6 * sum(a * b for work in works for a, b in zip(rows[work.kind], work.sizes, strict=True))

    def float_seconds(self, gm: fx.GraphModule, region: UnitRegion) -> float | None:
        """Seconds of the ops of a region in float; None: the table does not know one of them."""
        return self.seconds(self.real, float_works(gm, region))

    def kernel_seconds(self, gm: fx.GraphModule, region: UnitRegion) -> float | None:
        """Seconds of a region as one integer kernel; None: the table does not know one of its ops."""
        return self.seconds(self.int8, kernel_works(gm, region))

    def conversion(self, kind: str, elements: int) -> float | None:
        """Seconds to "quantize", "dequantize" or "measure" so many values."""
        return self.seconds(self.int8, (Work(kind, elements=elements / 1e6),))


def float_works(gm: fx.GraphModule, region: UnitRegion) -> tuple[Work, ...]:
    """What the ops of a region do in float: each is a call of its own."""
    shapes = _Shapes(gm, region)
    return tuple(_work(shapes, call, _kind(shapes, call)) for call in region.calls)


def kernel_works(gm: fx.GraphModule, region: UnitRegion) -> tuple[Work, ...]:
    """What an integer kernel does: its first op is the call, the others work on what that made."""
    shapes = _Shapes(gm, region)
    first, *others = region.calls
    return (
        _work(shapes, first, _kind(shapes, first) + _form(region)),
        *(_work(shapes, call, f"+{_kind(shapes, call)}") for call in others),
    )


def _form(region: UnitRegion) -> str:
    """What the kind of a layer ends in that measures ranges, or of a linear layer that emits floats: other kernels."""
    plan = info(region.node).plan
    if plan is not None and plan.reads is not None and plan.reads.range == "dynamic":
        return "_dynamic"
    to_float = region.calls[0].op.name == "linear" and not is_op(region.outputs[0], "quantize")
    return "_to_float" if to_float else ""


class _Shapes(fx.Interpreter):
    """The shapes of what the ops of a region read and make: of those inside a unit as its body makes them of shapes."""

    def __init__(self, gm: fx.GraphModule, region: UnitRegion) -> None:
        self.calls, self.node = region.calls, region.node
        self.inner: dict[str, tuple[int, ...]] = {}
        unit = unit_of(gm, region.node)
        if unit is None:
            return
        super().__init__(unit)
        with torch.no_grad(), contextlib.suppress(Exception):  # a body that shapes are not enough for
            self.run(*fx.node.map_arg(region.node.args, _of_shape))

    def run_node(self, n: fx.Node) -> Any:
        """Run an op of the body."""
        op = op_of(n)
        if op is not None and (op.traits.pointwise or op.traits.narrows) and len(op.traits.inputs) == 1:
            # not run: on the meta device some of them, such as relu, import torch._dynamo, which takes a second
            value = self.fetch_args_kwargs_from_env(n)[0][0]
        else:
            value = super().run_node(n)
        if isinstance(value, Tensor):
            self.inner[n.name] = tuple(value.shape)
        return value

    def __getitem__(self, value: Any) -> tuple[int, ...]:
        """The shape of an argument of an op; of what is not known, that of the unit's output."""
        if isinstance(value, InnerValue):
            return self.made(self.calls[value.index])
        return info(value if isinstance(value, fx.Node) else self.node).shape or ()

    def made(self, call: OpCall) -> tuple[int, ...]:
        """The shape of what an op makes."""
        return self.inner.get(call.name, info(self.node).shape or ())


def _of_shape(node: fx.Node) -> Tensor:
    about = info(node)
    return torch.empty(about.shape or (), dtype=torch.float32, device="meta")


def _weight(shapes: _Shapes, call: OpCall) -> tuple[int, ...]:
    value = call.tensors.get(call.op.traits.weight or "")
    return shapes[value] if isinstance(value, fx.Node) else ()


def _kind(shapes: _Shapes, call: OpCall) -> str:
    """The row of an op: its name, and what else makes other kernels of it or of its parts.

    Convolutions of all ranks share a row. Groups, a single tap, channels that fill one vector at most, broadcasting and
    one row of a linear layer make others.
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
        given = [shapes[value] if value is not None else None for value in call.tensors.values()]
        with contextlib.suppress(TypeError, IndexError):  # written in a way of its own
            macs = call.op.macs(out, *given) / 1e6
            gathered = macs / max(weight[0], 1) if len(weight) > 2 else 0.0
    read = sum(math.prod(shapes[value]) for value in call.activations)
    values = math.prod(weight) if weight else 0
    return Work(kind, macs * _padding(weight, kind), (read + math.prod(out)) / 1e6, values / 1e6, gathered)


def _padding(weight: tuple[int, ...], kind: str) -> float:
    """How much more a kernel computes than it has to, as it computes several channels at once."""
    if len(weight) < 2 or "lstm" in kind or "gru" in kind:
        return 1.0
    outputs, inputs = weight[:2] if "transpose" not in kind else (weight[1], weight[0])
    grown = _up(outputs, _LANES) / max(outputs, 1)
    return grown if "depthwise" in kind else grown * _up(inputs, _SUMMED) / max(inputs, 1)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@cache
def read_table(path: Path = FILE) -> dict[str, Any]:
    """The coefficients in a file, by kind of CPU, then by "float" or backend, then by kind of work."""
    with path.open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)
    return found


def table_for(backend: str, kind: str | None = None) -> PriceTable | None:
    """The table of a backend's kernels on a kind of CPU, by default this one; None: nobody has measured any."""
    kind = kind or cpu.kind()
    table = read_table()
    rows = table.get(kind) or table[_MEASURED_LIKE[kind]]
    kernels = backend if backend in rows else _LIKE.get(backend)
    return PriceTable(rows["float"], rows[kernels]) if kernels is not None else None


_MEASURED_LIKE = {"amx": "avx512_vnni", "avx2_vnni": "avx512_vnni", "neon": "avx2"}
"""Kinds of CPU that are not measured yet, with the one whose ratios of int8 to float are likely the nearest."""
_LIKE = {"fbgemm": "x86", "qnnpack": "x86"}
"""Backends that are not measured on each kind of CPU, with the one that stands for them."""
