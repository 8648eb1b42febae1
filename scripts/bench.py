"""Measure fxq against its targets: latency, accuracy, size, time to quantize, cost of calibration.

    python scripts/bench.py                      everything, a few minutes
    python scripts/bench.py --only resnet18      one subject
    python scripts/bench.py --json numbers.json  the numbers as data too

All times are medians of interleaved runs on one thread, so the ratios hold on a busy machine too. Float is eager mode
with weights and inputs in channels-last. The networks have random weights with realistic batch-norm statistics.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from demo_data import digits, held_out_pairs, psnr, training_pairs
from generated import Chain
from networks import load_demo_networks, mobilenet_v2, realistic, resnet18
from tabulate import tabulate
from timing import float_against_int8, interleaved, size, threads
from torch import Tensor, nn

import fxq

IMAGE = (1, 3, 224, 224)


@dataclass(frozen=True)
class Number:
    """One measured number.

    Attributes:
        subject: what was measured: a network, or a part of the pipeline.
        what: the quantity, with its unit.
        value: the number.
        least, most: the bounds that it must keep, where it has a target.
        detail: what it was computed from.
    """

    subject: str
    what: str
    value: float
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @property
    def target(self) -> str:
        """The bound as text; empty where there is none."""
        if self.least is not None:
            return f"≥ {self.least:g}"
        return f"≤ {self.most:g}" if self.most is not None else ""

    @property
    def passed(self) -> bool | None:
        """Whether it keeps its bound; None where there is none."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


Subject = Callable[[float], Iterator[Number]]
"""Measures one subject, each latency for so many seconds."""


def imagenet(name: str, make: Callable[[], nn.Module], targets: dict[str, float]) -> Subject:
    """A network of ImageNet size: latency at batch 1 and 8, SQNR, time to quantize, size."""

    def measure(seconds: float) -> Iterator[Number]:
        torch.manual_seed(0)
        model = realistic(make(), IMAGE)
        batches = [torch.randn(8, *IMAGE[1:]) for _ in range(8)]
        qmodel = fxq.quantize(model, "static", data=batches)
        with threads(1):  # again: the first one also pays for imports
            again = fxq.quantize(model, "static", data=batches[:1])
        passes = sum(snapshot.seconds for snapshot in again.history)
        yield Number(name, "quantize without calibration, s", passes, most=targets.get("quantize"))
        fresh = torch.randn(8, *IMAGE[1:])
        with torch.no_grad():
            noise = sqnr(model(fresh), qmodel(fresh))
        yield Number(name, "SQNR of int8, dB", noise, least=targets.get("sqnr"), detail="8 new random pictures")
        yield from compression(name, model, qmodel)
        for batch in (1, 8):
            yield speed(name, model, qmodel, f"batch {batch}", fresh[:batch], targets.get(f"batch {batch}"), seconds)

    return measure


def fsrcnn(seconds: float) -> Iterator[Number]:
    """The demo's super-resolution network: PSNR on the held-out regions, latency, size."""
    model, _ = load_demo_networks()
    low = training_pairs().low
    qmodel = fxq.quantize(model, "static_corrected", data=low[:: len(low) // 320].split(16))
    pairs = held_out_pairs()
    with torch.no_grad():
        losses = {name: psnr(model(low), high) - psnr(qmodel(low), high) for name, (low, high) in pairs.items()}
    detail = ", ".join(f"{name} {loss:.2f}" for name, loss in losses.items())
    yield Number("fsrcnn", "PSNR loss, dB", sum(losses.values()) / len(losses), most=0.15, detail=detail)
    yield from compression("fsrcnn", model, qmodel)
    yield speed("fsrcnn", model, qmodel, "held-out picture", pairs["petals"].low, 1.0, seconds)


def digits_net(seconds: float) -> Iterator[Number]:
    """The demo's classifier: accuracy on the test split, latency, size."""
    _, model = load_demo_networks()
    data = digits()
    qmodel = fxq.quantize(model, "static", data=data.train_images.split(64))
    with torch.no_grad():
        right = [float((net(data.test_images).argmax(1) == data.test_labels).float().mean()) for net in (model, qmodel)]
    detail = f"{100 * right[0]:.2f} % → {100 * right[1]:.2f} %"
    yield Number("digits", "accuracy loss, points", 100 * (right[0] - right[1]), most=0.5, detail=detail)
    yield from compression("digits", model, qmodel)
    yield speed("digits", model, qmodel, "batch 64", data.test_images[:64], 1.0, seconds)
    yield speed("digits", model, qmodel, "batch 1", data.test_images[:1], None, seconds)


def calibration(seconds: float) -> Iterator[Number]:
    """What observers cost: a calibration forward of resnet18 against the float forward."""
    torch.manual_seed(0)
    model = realistic(resnet18(), IMAGE)
    x = torch.randn(8, *IMAGE[1:])
    models: dict[str, nn.Module] = {"float": model}
    for observer in ("minmax", "histogram"):
        recipe = fxq.Recipe.static(activation=fxq.TensorSpec(observer=observer))
        models[observer] = fxq.prepare(model, recipe, x)
    with threads(1):
        medians = interleaved({name: lambda m=m: m(x) for name, m in models.items()}, 3 * seconds)  # type: ignore[misc]
    for observer, most in (("minmax", 1.25), ("histogram", 1.6)):
        detail = f"{1e3 * medians['float']:.0f} ms → {1e3 * medians[observer]:.0f} ms, resnet18, batch 8"
        yield Number(
            "calibration", f"{observer}, times float", medians[observer] / medians["float"], None, most, detail
        )


def chain(seconds: float) -> Iterator[Number]:
    """Time to quantize 800 Linear and 800 ReLU, calibration with one batch included."""
    torch.manual_seed(0)
    model = Chain(1600)
    with threads(1):
        start = time.perf_counter()
        qmodel = fxq.quantize(model, "static", data=[model.example])
        whole = time.perf_counter() - start
    slowest = sorted(qmodel.history, key=lambda snapshot: -snapshot.seconds)[:3]
    detail = ", ".join(f"{snapshot.name} {snapshot.seconds:.1f}" for snapshot in slowest)
    yield Number("chain of 800", "quantize, s", whole, most=8.0, detail=detail)


def speed(
    name: str, model: nn.Module, qmodel: fxq.QuantizedModel, what: str, x: Tensor, least: float | None, seconds: float
) -> Number:
    """How many times faster int8 is than float."""
    before, after = float_against_int8(model, qmodel, x, seconds)
    detail = f"{1e3 * before:.2f} ms → {1e3 * after:.2f} ms"
    return Number(name, f"times faster, {what}", before / after, least=least, detail=detail)


def compression(name: str, model: nn.Module, qmodel: nn.Module) -> Iterator[Number]:
    """How many times smaller int8 is than float."""
    before, after = size(model), size(qmodel)
    yield Number(name, "times smaller", before / after, detail=f"{before / 1e6:.2f} MB → {after / 1e6:.2f} MB")


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise in dB: 10 log10(sum(reference^2) / sum((reference - other)^2))."""
    noise = (reference.double() - other.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


SUBJECTS: dict[str, Subject] = {
    "resnet18": imagenet("resnet18", resnet18, {"batch 1": 3.6, "batch 8": 3.8, "sqnr": 27.0, "quantize": 2.0}),
    "mobilenet_v2": imagenet("mobilenet_v2", mobilenet_v2, {"batch 1": 2.2, "batch 8": 4.5}),
    "fsrcnn": fsrcnn,
    "digits": digits_net,
    "calibration": calibration,
    "chain": chain,
}


def table(numbers: list[Number]) -> str:
    marks = {True: "pass", False: "FAIL", None: ""}
    rows = [[n.subject, n.what, n.value, n.target, marks[n.passed], n.detail] for n in numbers]
    return tabulate(rows, headers=["subject", "quantity", "measured", "target", "", "from"], floatfmt=".2f")


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    isa = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu, "isa": isa, "torch": torch.__version__, "fxq": fxq.__version__, "threads": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=SUBJECTS, action="append", metavar="NAME", help=f"one of {', '.join(SUBJECTS)}"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers to this file too")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how long to time each latency (default %(default)s)"
    )
    arguments = parser.parse_args()
    numbers = []
    for name in arguments.only or SUBJECTS:
        found = list(SUBJECTS[name](arguments.seconds))
        print(table(found) + "\n", flush=True)
        numbers += found
    judged = [n for n in numbers if n.passed is not None]
    about = machine()
    print(f"{sum(n.passed is True for n in judged)} of {len(judged)} targets met. {', '.join(about.values())} thread.")
    if arguments.json is not None:
        data = {"machine": about, "numbers": [{**asdict(n), "passed": n.passed} for n in numbers]}
        arguments.json.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
