"""Measure the price table: coefficients from which fxq estimates what ops take on this kind of CPU, with one thread.

    python -m scripts.dev.measure_prices                                  measure, and write fxq/cost/price_table.toml
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m scripts.dev.measure_prices      as an older CPU would be
    python -m scripts.dev.measure_prices --errors                         measure, and print how far estimates are off

Networks of `scripts/` and small ones with every common op are quantized; each op is timed as an integer kernel and in
float, in CPU time. Coefficients are fitted by non-negative least squares of relative errors, a row for each kind of
work (see `fxq/cost/price_table.py`). Rows of other kinds of CPU in the file stay as they are. It takes a few minutes.
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
from torch import Tensor, nn

import fxq
from fxq.backends import cpu
from fxq.backends.by_name import unavailable
from fxq.cost import cache
from fxq.cost.cache import Costs
from fxq.cost.price_table import FILE, PriceTable, Work, float_works, kernel_works, read_table
from fxq.cost.probe import Prober
from fxq.passes import fallback
from scripts.networks.demo import load_demo_networks
from scripts.networks.mobile import efficientnet_b0, mobilenet_v2, mobilenet_v3_large
from scripts.networks.resnet import resnet18
from scripts.networks.small import ConvNeXt, UNet

BACKENDS = ("x86", "fbgemm")
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU,
    nn.Mish, nn.Softplus,
)  # fmt: skip
SIZES = (
    (3, 16, 16), (8, 8, 8), (12, 12, 32), (12, 12, 8), (24, 40, 28), (10, 20, 14), (20, 20, 56), (16, 32, 28),
    (64, 64, 14), (64, 128, 56), (32, 32, 56), (256, 256, 7), (512, 512, 4),
)  # fmt: skip
"""Channels in and out, and pixels of each side."""
SIZED = len(Work("").sizes)
POOLS = (nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=2))


Samples = dict[tuple[Work, ...], float]
SAMPLES: dict[str, Samples] = defaultdict(dict)
"""By "float" or backend: what was done, and the seconds that it took."""


def note(name: str, works: tuple[Work, ...], seconds: float) -> None:
    """Keep a measurement; of the same work, the quickest."""
    SAMPLES[name][works] = min(seconds, SAMPLES[name].get(works, math.inf))


class Recorder(Prober):
    """A prober that notes what it measures, by "float" or the backend's name."""

    def kernel(self, gm: Any, region: Any, ops: int | None = None) -> float:
        """Override of the method of `Prober`."""
        seconds = super().kernel(gm, region, ops)
        if ops is None and self.own is None:
            note(self.backend.name, kernel_works(gm, region), seconds)
        return seconds

    def real(self, gm: Any, region: Any) -> float:
        """Override of the method of `Prober`."""
        seconds = super().real(gm, region)
        if self.own is None:
            note("float", float_works(gm, region), seconds)
        return seconds

    def _conversion(self, op: str, elements: int) -> float:
        seconds = super()._conversion(op, elements)
        note(self.backend.name, (Work(op, elements=elements / 1e6),), seconds)
        return seconds

    def measure(self, gm: Any, quantize: Any) -> float:
        """Override of the method of `Prober`."""
        seconds = super().measure(gm, quantize)
        elements = math.prod(fallback.info(quantize).shape)
        note(self.backend.name, (Work("measure", elements=elements / 1e6),), seconds)
        return seconds


class Both(nn.Module):
    """Two layers and what joins them."""

    def __init__(self, channels: int, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.join = nn.Conv2d(3, channels, 1), nn.Conv2d(3, channels, 3, padding=1), join
        self.head = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, channels, H, W), or what the join makes of it."""
        return self.head(self.join(torch.relu(self.a(x)), self.b(x)))


class Product(nn.Module):
    """Attention's two products of activations, between layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(N, rows, width) -> (N, rows, width)."""
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return self.out(torch.softmax(scores, -1) @ self.v(x))


def convs(inputs: int, outputs: int, size: int, **options: Any) -> tuple[nn.Module, Tensor]:
    """A convolution between two others."""
    first = nn.Conv2d(3, inputs, 1)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(inputs, outputs, **options), nn.ReLU()), torch.randn(
        1, 3, size, size
    )


NamedModels = Iterator[tuple[str, nn.Module, Tensor]]
"""Names, models and example inputs."""


def models() -> NamedModels:
    """Return networks, and layers and functions at many sizes, to measure."""
    torch.manual_seed(0)
    for group in (networks, convolutions, products, functions):
        yield from group()


def networks() -> NamedModels:
    """Return whole networks."""
    fsrcnn, digits = load_demo_networks()
    yield "digits", digits, torch.rand(1, 1, 8, 8)
    yield "digits of 32", digits, torch.rand(32, 1, 8, 8)
    yield "fsrcnn", fsrcnn, torch.rand(1, 1, 32, 32)
    for make in (resnet18, mobilenet_v2, mobilenet_v3_large, efficientnet_b0):
        for size in (64, 224):
            yield f"{make.__name__} {size}", make(), torch.randn(1, 3, size, size)
    yield "convnext", ConvNeXt(), torch.randn(1, 3, 64, 64)
    yield "unet", UNet(), torch.randn(1, 3, 64, 64)


def convolutions() -> NamedModels:
    """Return convolutions of all kinds at all `SIZES`."""
    for inputs, outputs, size in SIZES:
        for kernel in (1, 3, 5):
            yield f"conv {kernel}", *convs(inputs, outputs, size, kernel_size=kernel, padding=kernel // 2)
        yield "strided", *convs(inputs, outputs, size, kernel_size=3, stride=2)
        yield "grouped", *convs(4 * inputs, 4 * outputs, size, kernel_size=3, groups=4)
        yield "depthwise", *convs(outputs, outputs, size, kernel_size=3, groups=outputs, padding=1)
        up = nn.Sequential(nn.Conv2d(3, inputs, 1), nn.ConvTranspose2d(inputs, outputs, 2, stride=2))
        yield "transposed", up, torch.randn(1, 3, size, size)
        length = torch.randn(1, 16, 4 * size)
        yield "conv1d", nn.Sequential(nn.Conv1d(16, inputs, 1), nn.Conv1d(inputs, outputs, 5, padding=2)), length


def products() -> NamedModels:
    """Return linear layers and products of activations."""
    for rows in (1, 4, 16, 64, 256):
        for width in (16, 64, 256, 768):
            layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            yield "linear", layers, torch.randn(rows, width)
            yield "product", Product(width), torch.randn(1, rows, width)


def functions() -> NamedModels:
    """Return activation functions, pooling, and ops that join two values, after convolutions."""
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


def sequences() -> NamedModels:
    """Layers that are quantized dynamically, too."""
    torch.manual_seed(0)
    for rows in (1, 8, 64):
        for width in (64, 256, 768):
            layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 64))
            yield "linear", layers, torch.randn(rows, width)


def record(backend: str, only: str = "") -> None:
    """Quantize all of it with a backend; `SAMPLES` has what that took."""
    cache.MAX_EXTRA_SECONDS, cache.AGREEING_RUNS, cache.MAX_RUN_RATIO = 0.0, 10, 1.1  # one round, of more runs
    rounds: dict[str, list[float]] = {}

    class Measured(Costs):
        has_table = False

    def known() -> Costs:
        costs = Measured()
        costs.rounds = rounds
        return costs

    fallback.costs.machine_costs = known
    fallback.Prober = Recorder
    recipes = ((models, fxq.Recipe.static(backend=backend)), (sequences, fxq.Recipe.dynamic(backend=backend)))
    for quantized, recipe in recipes:
        for name, model, x in quantized():
            if only and not name.startswith(only):
                continue
            plain = recipe.without_pass("correct-bias").without_pass("verify-lowering")
            try:
                fxq.quantize(model.eval(), plain, data=[x], progress=False)
            except fxq.FxqError as error:
                print(f"{name}: {error}", file=sys.stderr)


def fit(samples: Samples) -> dict[str, list[float]]:
    """Coefficients by kind of work, with which estimates have the least relative error."""
    kinds = sorted({work.kind for works in samples for work in works})
    place = {kind: SIZED * i for i, kind in enumerate(kinds)}
    matrix = np.zeros((len(samples), SIZED * len(kinds)))
    for row, (works, seconds) in zip(matrix, samples.items(), strict=True):
        for work in works:
            row[place[work.kind] : place[work.kind] + SIZED] += np.array(work.sizes) / (1e6 * seconds)
    coefficients = nonnegative(matrix)
    return {
        kind: [float(f"{value:.3g}") for value in coefficients[place[kind] : place[kind] + SIZED]] for kind in kinds
    }


def nonnegative(matrix: Any, rounds: int = 2000) -> Any:
    """Non-negative x with which the logarithm of `matrix @ x` is near 0, by coordinate descent.

    Least squares, weighted anew in each turn by how far the last one was off: a half counts as twice does, and what is
    further off than that counts less, as by Huber.
    """
    size = matrix.max(0)
    scaled = matrix / np.where(size > 0, size, 1.0)
    solution, weight = np.zeros(matrix.shape[1]), np.ones(len(matrix))
    for _ in range(8):
        gram, aim = scaled.T @ (weight[:, None] * scaled), scaled.T @ weight
        for _ in range(rounds):
            for i in np.flatnonzero(np.diag(gram) > 0):
                solution[i] = max(0.0, solution[i] + (aim[i] - gram[i] @ solution) / gram[i, i])
        ratio = np.maximum(scaled @ solution, 0.01)
        off = np.where(np.abs(ratio - 1.0) < 1e-6, 1.0, np.log(ratio) / (ratio - 1.0 + 1e-12))
        weight = off**2 / np.maximum(1.0, np.abs(np.log(ratio)) / math.log(2.0))
    return solution / np.where(size > 0, size, 1.0)


def errors(rows: Mapping[str, Any], samples: Samples) -> None:
    """Print, by the kind of the first work, how far estimates are off, and the worst."""
    table, off = PriceTable(rows, rows), defaultdict(list)
    for works, seconds in samples.items():
        estimate = table.seconds(rows, works)
        assert estimate is not None  # its rows are those of the samples
        off[works[0].kind].append((math.log2(max(estimate, 1e-9) / seconds), 1e6 * seconds, works))
    for kind, errors in sorted(off.items()):
        median = np.median([abs(error) for error, *_ in errors])
        print(f"{kind:20} {len(errors):5}  median {median:.2f}")
        for error, us, works in sorted(errors, key=lambda e: -abs(e[0]))[:3]:
            print(f"    {error:+.2f} of {us:.1f} us: {'; '.join(map(str, works))}")


def main() -> None:
    """Measure, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="print how far estimates are off, in powers of two")
    parser.add_argument("--only", default="", help="models whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    played = "ONEDNN_MAX_CPU_ISA" in os.environ  # which fbgemm does not read
    for backend in BACKENDS[:1] if played else BACKENDS:
        if unavailable(backend) is None:
            record(backend, arguments.only)
    rows = {name: fit(samples) for name, samples in SAMPLES.items()}
    for name, samples in SAMPLES.items():
        if arguments.errors:
            print(f"{name}, log2 of estimate / measured:")
            errors(rows[name], samples)
    if not arguments.only:
        table = read_table() if FILE.exists() else {}
        FILE.write_text(HEADER + "\n".join(written({**table, cpu.kind(): rows})), encoding="utf-8")


def written(table: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Iterator[str]:
    """The lines of the file: a row of the table on each."""
    for kind, parts in sorted(table.items()):
        for part, rows in sorted(parts.items()):
            yield f"[{kind}.{part}]"
            yield from (f'"{name}" = {list(row)}' for name, row in sorted(rows.items()))
            yield ""


HEADER = """\
# What ops take, by kind of CPU, "float" or backend, and kind of work; written by scripts/dev/measure_prices.py.
# Coefficients: microseconds for a call, a million multiply-accumulates, values, weights, and values gathered.

"""

if __name__ == "__main__":
    main()
