"""Measure weight-only linear layers for few rows against float32, and against reading the bytes of their weights.

    python -m scripts.bench.few_rows                        12 layers with 138 M weights, one row; about a minute
    python -m scripts.bench.few_rows --rows 4 --layers 2

CPU time on one thread, in turns of random order; of each call the least. A call runs all layers once, so that no weight
is in a cache if they are larger than it. "times" is how many times as long float32 takes. "of a read" is the bandwidth
that the layer reaches on the bytes of its weight, scales included, relative to adding up these bytes as int64. Layers
that are "rounded" read rows of integers with dynamic scales, as `Recipe.dynamic` has them; rounding is not included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from fxq.backends.loops.code import compiler
from fxq.backends.plain.weight_only import WeightOnlyLinear, packing_options
from fxq.quant.packing import Packing
from scripts.bench.timing import interleaved, threads_set_to

FORMS: dict[str, tuple[int, int | None, bool]] = {
    "int8 per channel": (8, None, False),
    "int4 per channel": (4, None, False),
    "int4 groups of 128": (4, 128, False),
    "int4 groups of 64, zero points": (4, 64, True),
    "int4 groups of 32": (4, 32, False),
    "int2 groups of 64, zero points": (2, 64, True),
    "int3 groups of 64, zero points": (3, 64, True),
    "int6 per channel": (6, None, False),
}
"""Bits, size of the groups, and whether there are zero points, by name."""


def random_layer(outputs: int, columns: int, form: tuple[int, int | None, bool]) -> WeightOnlyLinear:
    """Weight-only layer with random integers."""
    bits, block, with_zero = form
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, (outputs, columns), dtype=torch.int8)
    packing = Packing.of_grid(-limit, limit - 1, (columns,))
    shape = (outputs,) if block is None else (outputs, -(-columns // block))
    return WeightOnlyLinear(
        op="linear", settings={}, axis=0 if block is None else 1, block=block,
        **packing_options(packing, [(columns,)]), weight=values if packing is None else packing.pack(values),
        weight_scale=torch.rand(shape) * 1e-2,
        weight_zero_point=torch.randint(-limit, limit, shape, dtype=torch.int32) if with_zero else None,
    )  # fmt: skip


def all_of(calls: Sequence[Callable[..., object]], *inputs: Tensor) -> Callable[[], object]:
    """One call that makes all the calls."""
    return lambda: [call(*inputs) for call in calls]


def measured(rows: int, layers: int, outputs: int, columns: int, seconds: float) -> list[list[Any]]:
    """Table rows: name, milliseconds, ratio to float32, GB/s, share of the bandwidth of a read."""
    x, results = torch.randn(rows, columns), []
    floats = [torch.randn(outputs, columns) for _ in range(layers)]
    rounded = torch.randint(256, (rows, columns), dtype=torch.uint8), torch.rand(rows, 1), torch.full((rows, 1), 128.0)
    for name, form in FORMS.items():
        kernels = [random_layer(outputs, columns, form) for _ in range(layers)]
        products = [product for kernel in kernels if (product := kernel.few_rows(x)) is not None]
        tensors = [t for kernel in kernels for t in kernel.buffers()]
        stored = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
        stored = stored[: len(stored) // 8 * 8].view(torch.int64)
        calls = {
            "float32": lambda: [F.linear(x, weight) for weight in floats],
            name: all_of([kernel.bind(x) for kernel in kernels], x),
            "read": stored.sum,
        }
        if products:
            calls[f"{name}, rounded"] = all_of([product.of_integers for product in products], *rounded)
        times = interleaved(calls, seconds, min, time.thread_time)
        size = 8 * len(stored)
        for of_layers in (call for call in calls if call.startswith(name)):
            results.append(
                [
                    of_layers,
                    f"{1e3 * times[of_layers]:.2f}",
                    f"{times['float32'] / times[of_layers]:.2f}",
                    f"{size / times[of_layers] / 1e9:.1f}",
                    f"{times['read'] / times[of_layers]:.0%}",
                    f"{size / times['read'] / 1e9:.1f}",
                ]
            )
    return results


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--outputs", type=int, default=2816)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each form of the weight")
    arguments = parser.parse_args()
    print(compiler.description())
    with threads_set_to(1):
        table = measured(**vars(arguments))
    print(tabulate(table, ["weight", "ms", "times", "GB/s", "of a read", "read GB/s"]))


if __name__ == "__main__":
    main()
