"""Measure fxq against its targets: latency, accuracy, size, time to quantize, cost of calibration.

    python -m scripts.bench.networks                      everything, a quarter of an hour
    python -m scripts.bench.networks --only resnet18      one subject
    python -m scripts.bench.networks --only torch-ao      fxq against torch.ao's engines; --network for one network
    python -m scripts.bench.networks --json numbers.json  the numbers as data too

All times are medians of interleaved runs on one thread, so the ratios hold on a busy machine too. Float is eager mode
with weights and inputs in channels-last. The networks have random weights with realistic batch-norm statistics.

Each subject has a process of its own, as a network that is put to use has: the allocator keeps more memory the more
was freed before, and a float network at batch 8 depends on it (mobilenet_v2: 158 ms and 20,000 page faults alone,
140 ms and 9,000 in a process in which resnet50 has run; int8 has none and takes 29 ms in both).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import fxq
from scripts.bench import history
from scripts.bench.cases import CASES
from scripts.bench.number import Number, Subject, sqnr, table
from scripts.bench.timing import float_against_int8, interleaved, threads_set_to
from scripts.bench.torch_ao import against_torch_ao
from scripts.demo.data import digits, held_out_pairs, psnr
from scripts.networks.demo import load_demo_networks
from scripts.networks.generated import Chain


def picture_network(name: str, targets: dict[str, float]) -> Subject:
    """A network of pictures: latency at batch 1 and 8, SQNR, time to quantize, size."""

    def measure(seconds: float) -> Iterator[Number]:
        case = CASES[name]()
        qmodel = made_for(case.fresh, case.model, "static", case.data)
        again = made_for(case.fresh, case.model, "static", case.data[:1])  # the first also pays for imports
        passes = sum(snapshot.seconds for snapshot in again.history)
        detail = "costs of this machine known"
        yield Number(name, "quantize without calibration, s", passes, most=targets.get("quantize"), detail=detail)
        with torch.no_grad():
            noise = sqnr(case.model(case.fresh), qmodel(case.fresh))
        yield Number(name, "SQNR of int8, dB", noise, least=targets.get("sqnr"), detail="8 new random pictures")
        yield from compression(name, case.model, qmodel)
        for batch in (1, 8):
            x, least = case.fresh[:batch], targets.get(f"batch {batch}")
            yield speed(
                name, case.model, made_for(x, case.model, "static", case.data), f"batch {batch}", x, least, seconds
            )

    return measure


def fsrcnn(seconds: float) -> Iterator[Number]:
    """The demo's super-resolution network: PSNR on the held-out regions, latency, size."""
    case = CASES["fsrcnn"]()
    model = case.model
    qmodel = made_for(case.timed, model, "static", case.data)
    pairs = held_out_pairs()
    with torch.no_grad():
        losses = {name: psnr(model(low), high) - psnr(qmodel(low), high) for name, (low, high) in pairs.items()}
    detail = ", ".join(f"{name} {loss:.2f}" for name, loss in losses.items())
    yield Number("fsrcnn", "PSNR loss, dB", sum(losses.values()) / len(losses), most=0.15, detail=detail)
    yield from compression("fsrcnn", model, qmodel)
    yield speed("fsrcnn", model, qmodel, "held-out picture", case.timed, 1.0, seconds)


def digits_net(seconds: float) -> Iterator[Number]:
    """The demo's classifier: accuracy on the test split, latency, size."""
    _, model = load_demo_networks()
    data = digits()
    images = data.test_images
    batches = data.train_images.split(64)
    qmodel = made_for(images[:64], model, "static", batches)
    with torch.no_grad():
        right = [float((net(images).argmax(1) == data.test_labels).float().mean()) for net in (model, qmodel)]
    detail = f"{100 * right[0]:.2f} % → {100 * right[1]:.2f} %"
    yield Number("digits", "accuracy loss, points", 100 * (right[0] - right[1]), most=0.5, detail=detail)
    yield from compression("digits", model, qmodel)
    for batch in (64, 1):
        x = images[:batch]
        yield speed("digits", model, made_for(x, model, "static", batches), f"batch {batch}", x, 1.0, seconds)


def calibration(seconds: float) -> Iterator[Number]:
    """Cost of observers: a calibration forward of resnet18 relative to the float forward."""
    case = CASES["resnet18"]()
    model, x = case.model, case.fresh
    models: dict[str, nn.Module] = {"float": model}
    for observer in ("minmax", "histogram"):
        recipe = fxq.Recipe.static(activation=fxq.TensorSpec(observer=observer))
        models[observer] = fxq.prepare(model, recipe, example_inputs=x)
    with threads_set_to(1):
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
    with threads_set_to(1):
        start = time.perf_counter()
        qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[model.example])
        whole = time.perf_counter() - start
    slowest = sorted(qmodel.history, key=lambda snapshot: -snapshot.seconds)[:3]
    detail = ", ".join(f"{snapshot.name} {snapshot.seconds:.1f}" for snapshot in slowest)
    yield Number("chain of 800", "quantize, s", whole, most=8.0, detail=detail)


def made_for(
    x: Tensor, model: nn.Module, recipe: str | fxq.Recipe, data: Sequence[Tensor]
) -> fxq.results.QuantizedModel:
    """The model quantized for inputs like `x` on one thread: both decide what is faster in float."""
    with threads_set_to(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # that nothing pays as int8 for a single digit
        return fxq.quantize(model, recipe, data=data, example_inputs=x)


def speed(
    name: str,
    model: nn.Module,
    qmodel: fxq.results.QuantizedModel,
    quantity: str,
    x: Tensor,
    least: float | None,
    seconds: float,
) -> Number:
    """How many times faster int8 is than float."""
    before, after = float_against_int8(model, qmodel, x, seconds)
    detail = f"{1e3 * before:.2f} ms → {1e3 * after:.2f} ms"
    return Number(name, f"times faster, {quantity}", before / after, least=least, detail=detail)


def compression(name: str, model: nn.Module, qmodel: nn.Module) -> Iterator[Number]:
    """How many times smaller int8 is than float."""
    before, after = fxq.results.nbytes(model), fxq.results.nbytes(qmodel)
    yield Number(name, "times smaller", before / after, detail=f"{before / 1e6:.2f} MB → {after / 1e6:.2f} MB")


SUBJECTS: dict[str, Subject] = {
    "resnet18": picture_network("resnet18", {"batch 1": 3.6, "batch 8": 3.8, "sqnr": 27.0, "quantize": 2.0}),
    "resnet50": picture_network("resnet50", {"batch 1": 1.0}),
    "mobilenet_v2": picture_network("mobilenet_v2", {"batch 1": 2.2, "batch 8": 4.5}),
    "mobilenet_v3_large": picture_network("mobilenet_v3_large", {"batch 1": 1.0}),
    "efficientnet_b0": picture_network("efficientnet_b0", {"batch 1": 1.0}),
    "iresnet18": picture_network("iresnet18", {"batch 1": 1.0}),
    "fsrcnn": fsrcnn,
    "digits": digits_net,
    "calibration": calibration,
    "chain": chain,
    "torch-ao": against_torch_ao,
}


def measured(name: str, seconds: float, networks: Sequence[str]) -> list[Number]:
    """All numbers of a subject; `networks`: those to compare with torch.ao, all where there are none."""
    return list(against_torch_ao(seconds, networks) if name == "torch-ao" else SUBJECTS[name](seconds))


def as_data(number: Number) -> dict[str, object]:
    """A number for JSON, which has no infinity: null for the time of what did not run."""
    value = number.value if math.isfinite(number.value) else None
    return {**asdict(number), "value": value, "passed": number.passed}


def machine() -> dict[str, str]:
    """Description of the machine that the numbers belong to."""
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
    parser.add_argument(
        "--network", choices=CASES, action="append", metavar="NAME", help=f"torch-ao only: one of {', '.join(CASES)}"
    )
    history.add_argument(parser)
    arguments = parser.parse_args()
    numbers = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as alone:
        for name in arguments.only or SUBJECTS:
            results = alone.apply(measured, (name, arguments.seconds, arguments.network or ()))
            print(table(results) + "\n", flush=True)
            numbers += results
    judged = [n for n in numbers if n.passed is not None]
    about = machine()
    print(f"{sum(n.passed is True for n in judged)} of {len(judged)} targets met. {', '.join(about.values())} thread.")
    history.append(arguments.history, "bench.networks", [(n.subject, n.quantity, n.value, "") for n in numbers])
    if arguments.json is not None:
        data = {"machine": about, "numbers": [as_data(n) for n in numbers]}
        arguments.json.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
