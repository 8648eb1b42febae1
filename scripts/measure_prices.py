"""Measure the price table: coefficients for estimating the seconds of ops on this kind of CPU, on one thread.

    python scripts/measure_prices.py                                  measure, and update fxq/cost/price_table.toml
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python scripts/measure_prices.py      emulate an older CPU
    python scripts/measure_prices.py --errors                         measure, update, and print the errors of estimates

The script quantizes networks of `scripts/` and small models with every common op, and times each op as an integer
kernel and in float, in CPU time. It fits the coefficients of each kind of work (see `fxq/cost/price_table.py`) by
non-negative least squares on relative errors. Rows of other kinds of CPU are kept. It takes a few minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from networks import load_demo_networks
from networks_mobile import efficientnet_b0, mobilenet_v2, mobilenet_v3_large
from networks_resnet import resnet18
from networks_small import ConvNeXt, UNet
from torch import Tensor, nn

import fxq
from fxq.backends import cpu
from fxq.backends.by_name import unavailable
from fxq.cost import cache
from fxq.cost.cache import Costs
from fxq.cost.price_table import FILE, PriceTable, Work, float_works, kernel_works, read_table
from fxq.cost.probe import Prober
from fxq.passes import fallback

BACKENDS = ("x86", "fbgemm")
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU,
    nn.Mish, nn.Softplus,
)  # fmt: skip
POOLS = (nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=2))


Samples = dict[tuple[Work, ...], float]
SAMPLES: dict[str, Samples] = defaultdict(dict)
"""Measured seconds by "float" or backend, then by the work that was timed."""


def note(name: str, works: tuple[Work, ...], seconds: float) -> None:
    """Record a measurement; the shortest counts for equal work."""
    SAMPLES[name][works] = min(seconds, SAMPLES[name].get(works, math.inf))


class Recorder(Prober):
    """Prober that records its measurements in `SAMPLES`."""

    def kernel(self, gm: Any, region: Any, ops: int | None = None) -> float:
        """Seconds of the first `ops` ops of a region as an integer kernel, see `Prober.kernel`."""
        seconds = super().kernel(gm, region, ops)
        if ops is None and self.own is None:
            note(self.backend.name, kernel_works(gm, region), seconds)
        return seconds

    def real(self, gm: Any, region: Any) -> float:
        """Seconds of a region in float, see `Prober.real`."""
        seconds = super().real(gm, region)
        if self.own is None:
            note("float", float_works(gm, region), seconds)
        return seconds

    def _conversion(self, op: str, elements: int) -> float:
        seconds = super()._conversion(op, elements)
        note(self.backend.name, (Work(op, elements=elements / 1e6),), seconds)
        return seconds

    def measure(self, gm: Any, quantize: Any) -> float:
        """Seconds to compute a dynamic range, see `Prober.measure`."""
        seconds = super().measure(gm, quantize)
        elements = math.prod(fallback.info(quantize).shape)
        note(self.backend.name, (Work("measure", elements=elements / 1e6),), seconds)
        return seconds


class Both(nn.Module):
    """Two convolutions, an op that joins their results, and a convolution after it."""

    def __init__(self, channels: int, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.join = nn.Conv2d(3, channels, 1), nn.Conv2d(3, channels, 3, padding=1), join
        self.head = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, channels, H, W)."""
        return self.head(self.join(torch.relu(self.a(x)), self.b(x)))


class Product(nn.Module):
    """Self-attention: two products of activations between linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(N, rows, width) -> (N, rows, width)."""
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return self.out(torch.softmax(scores, -1) @ self.v(x))


def convs(inputs: int, outputs: int, size: int, **options: Any) -> tuple[nn.Module, Tensor]:
    """Convolution after a 1x1 convolution, and an example input (1, 3, size, size)."""
    first = nn.Conv2d(3, inputs, 1)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(inputs, outputs, **options), nn.ReLU()), torch.randn(
        1, 3, size, size
    )


def models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Networks, and single layers at many sizes, to quantize statically: name, model, example input."""
    torch.manual_seed(0)
    fsrcnn, digits = load_demo_networks()
    yield "digits", digits, torch.rand(1, 1, 8, 8)
    yield "digits of 32", digits, torch.rand(32, 1, 8, 8)
    yield "fsrcnn", fsrcnn, torch.rand(1, 1, 32, 32)
    for make in (resnet18, mobilenet_v2, mobilenet_v3_large, efficientnet_b0):
        for size in (64, 224):
            yield f"{make.__name__} {size}", make(), torch.randn(1, 3, size, size)
    yield "convnext", ConvNeXt(), torch.randn(1, 3, 64, 64)
    yield "unet", UNet(), torch.randn(1, 3, 64, 64)
    for inputs, outputs, size in ((3, 16, 16), (8, 8, 8), (16, 32, 28), (64, 64, 14), (64, 128, 56), (256, 256, 7)):
        for kernel in (1, 3, 5):
            yield f"conv {kernel}", *convs(inputs, outputs, size, kernel_size=kernel, padding=kernel // 2)
        yield "strided", *convs(inputs, outputs, size, kernel_size=3, stride=2)
        yield "grouped", *convs(4 * inputs, 4 * outputs, size, kernel_size=3, groups=4)
        yield "depthwise", *convs(outputs, outputs, size, kernel_size=3, groups=outputs, padding=1)
        up = nn.Sequential(nn.Conv2d(3, inputs, 1), nn.ConvTranspose2d(inputs, outputs, 2, stride=2))
        yield "transposed", up, torch.randn(1, 3, size, size)
        length = torch.randn(1, 16, 4 * size)
        yield "conv1d", nn.Sequential(nn.Conv1d(16, inputs, 1), nn.Conv1d(inputs, outputs, 5, padding=2)), length
    for rows in (1, 4, 16, 64, 256):
        for width in (16, 64, 256, 768):
            layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            yield "linear", layers, torch.randn(rows, width)
            yield "product", Product(width), torch.randn(1, rows, width)
    for channels, size in ((8, 8), (32, 28), (64, 56)):
        x = torch.randn(1, 3, size, size)
        for act in ACTIVATIONS:
            yield act.__name__, nn.Sequential(nn.Conv2d(3, channels, 3), act(), nn.Conv2d(channels, 8, 1)), x
            pooled = nn.Sequential(nn.Conv2d(3, channels, 3), nn.MaxPool2d(2), act(), nn.Conv2d(channels, 8, 1))
            yield act.__name__, pooled, x
        for pool in POOLS:
            yield "pool", nn.Sequential(nn.Conv2d(3, channels, 3), pool, nn.Conv2d(channels, 8, 1)), x
        for join in (torch.add, torch.mul, torch.sub):
            yield "join", Both(channels, join), x
        yield "cat", Both(channels, lambda a, b: torch.cat([a, b], 1)[:, : a.shape[1]]), x


def sequences() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Models to quantize dynamically: name, model, example input."""
    torch.manual_seed(0)
    for rows in (1, 8, 64):
        for width in (64, 256, 768):
            layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 64))
            yield "linear", layers, torch.randn(rows, width)


def record(backend: str, only: str = "") -> None:
    """Quantize all models with a backend and record the measurements in `SAMPLES`."""
    cache.PATIENCE, cache.AGREE, cache.NEAR = 0.0, 10, 1.1  # one round with more runs
    rounds: dict[str, list[float]] = {}

    class Measured(Costs):
        has_table = False

    def fresh_costs() -> Costs:
        costs = Measured()
        costs.rounds = rounds
        return costs

    fallback.costs.machine_costs = fresh_costs
    fallback.Prober = Recorder
    recipes = ((models, fxq.Recipe.static(backend=backend)), (sequences, fxq.Recipe.dynamic(backend=backend)))
    for networks, recipe in recipes:
        for name, model, x in networks():
            if only and not name.startswith(only):
                continue
            plain = recipe.without_pass("correct-bias").without_pass("verify-lowering")
            try:
                fxq.quantize(model.eval(), plain, data=[x], progress=False)
            except fxq.FxqError as error:
                print(f"{name}: {error}", file=sys.stderr)


def fit(samples: Samples) -> dict[str, list[float]]:
    """Coefficients by kind of work that minimize the relative errors of estimates."""
    kinds = sorted({work.kind for works in samples for work in works})
    place = {kind: 4 * i for i, kind in enumerate(kinds)}
    matrix = np.zeros((len(samples), 4 * len(kinds)))
    for row, (works, seconds) in zip(matrix, samples.items(), strict=True):
        for work in works:
            row[place[work.kind] : place[work.kind] + 4] += np.array(work.sizes) / (1e6 * seconds)
    coefficients = nonnegative(matrix)
    return {kind: [float(f"{value:.3g}") for value in coefficients[place[kind] : place[kind] + 4]] for kind in kinds}


def nonnegative(matrix: Any, rounds: int = 500) -> Any:
    """Non-negative x, (columns,), for which `matrix @ x` is close to 1: coordinate descent with Huber weights."""
    size = matrix.max(0)
    scaled = matrix / np.where(size > 0, size, 1.0)
    x, weight = np.zeros(matrix.shape[1]), np.ones(len(matrix))
    for _ in range(6):
        gram, aim = scaled.T @ (weight[:, None] * scaled), scaled.T @ weight
        for _ in range(rounds):
            for i in np.flatnonzero(np.diag(gram) > 0):
                x[i] = max(0.0, x[i] + (aim[i] - gram[i] @ x) / gram[i, i])
        weight = 1 / np.maximum(1.0, np.abs(scaled @ x - 1.0) / 0.1)
    return x / np.where(size > 0, size, 1.0)


def errors(rows: Mapping[str, Any], samples: Samples) -> None:
    """Print the median error of estimates, as log2 of estimate / measured, and the three worst, by kind of work."""
    table, off = PriceTable(rows, rows), defaultdict(list)
    for works, seconds in samples.items():
        estimate = table.seconds(rows, works)
        assert estimate is not None  # the rows were fitted to these samples
        off[works[0].kind].append((math.log2(max(estimate, 1e-9) / seconds), 1e6 * seconds, works))
    for kind, errors_of_kind in sorted(off.items()):
        median = np.median([abs(error) for error, *_ in errors_of_kind])
        print(f"{kind:20} {len(errors_of_kind):5}  median {median:.2f}")
        for error, us, works in sorted(errors_of_kind, key=lambda e: -abs(e[0]))[:3]:
            print(f"    {error:+.2f} of {us:.1f} us: {'; '.join(map(str, works))}")


def main() -> None:
    """Measure, fit the coefficients, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="print log2 of estimate / measured")
    parser.add_argument("--only", default="", help="measure only models whose name starts with this; writes no file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    emulated = "ONEDNN_MAX_CPU_ISA" in os.environ  # fbgemm ignores it
    for backend in BACKENDS[:1] if emulated else BACKENDS:
        if unavailable(backend) is None:
            record(backend, arguments.only)
    rows = {name: fit(samples) for name, samples in SAMPLES.items()}
    for name, samples in SAMPLES.items():
        if arguments.errors:
            print(f"{name}, log2 of estimate / measured:")
            errors(rows[name], samples)
    if not arguments.only:
        measured = read_table() if FILE.exists() else {}
        FILE.write_text(HEADER + "\n".join(written({**measured, cpu.kind(): rows})), encoding="utf-8")


def written(table: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Iterator[str]:
    """Lines of the TOML file."""
    for kind, parts in sorted(table.items()):
        for part, rows in sorted(parts.items()):
            yield f"[{kind}.{part}]"
            yield from (f'"{name}" = {list(row)}' for name, row in sorted(rows.items()))
            yield ""


HEADER = """\
# Costs of ops by kind of CPU, "float" or backend, and kind of work; written by scripts/measure_prices.py.
# Coefficients: microseconds per call, per million multiply-accumulates, per million values, per million weights.

"""

if __name__ == "__main__":
    main()
