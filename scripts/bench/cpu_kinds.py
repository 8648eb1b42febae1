"""Measure the jit backend as it is compiled for each kind of CPU that this machine can play, side by side.

    python -m scripts.bench.cpu_kinds                                          four networks; minutes
    python -m scripts.bench.cpu_kinds --only resnet18 --kind avx512_vnni --kind avx2

Each kind has a process of its own, with `FXQ_CPU_KIND`, that reads the same quantized file. They run in turns, on one
thread. A time is the least CPU time of a call; ratios are to the first kind. Integer sums are exact on every kind, but
a value halfway between two integers may be rounded to either, which networks with random weights amplify: where
results differ, their SQNR is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tabulate import tabulate

import fxq
from scripts.bench import history
from scripts.bench.engine_cases import CASES
from scripts.bench.number import sqnr
from scripts.bench.timing import no_gc

NETWORKS = ("resnet18", "mobilenet_v2", "efficientnet_b0", "bert")
KINDS = ("avx512_vnni", "avx512", "avx_vnni", "avx2")
ROUNDS, CALLS = 10, 4


def serve(pipe: Connection, kind: str, folder: Path) -> None:
    """Send the result of the model in the folder, then for each request the least seconds of a few calls."""
    os.environ["FXQ_CPU_KIND"] = kind
    torch.set_num_threads(1)
    model, x = fxq.load(folder / "model.fxq"), torch.load(folder / "x.pt")
    with torch.no_grad(), no_gc():
        pipe.send(model(x))
        while pipe.recv():
            model(x)  # the caches are those of another process
            times = []
            for _ in range(CALLS):
                start = time.process_time()
                model(x)
                times.append(time.process_time() - start)
            pipe.send(min(times))


def measured(network: str, kinds: Sequence[str]) -> list[float]:
    """Seconds of a call of one network for each kind. Prints how much results differ from those of the first kind."""
    case, context = CASES[network](), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, pipes, results = Path(name), [], []
        fxq.quantize(case.model, fxq.Recipe.static(backend="jit"), data=case.data).save(folder / "model.fxq")
        torch.save(case.timed, folder / "x.pt")
        for kind in kinds:
            pipe, child_end = context.Pipe()
            context.Process(target=serve, args=(child_end, kind, folder), daemon=True).start()
            child_end.close()
            pipes.append(pipe)
            results.append(pipe.recv())
        for kind, result in zip(kinds, results, strict=True):
            if not torch.equal(result, results[0]):
                print(f"{network}: results on {kind} are {sqnr(results[0], result):.0f} dB from those on {kinds[0]}")
        least = [float("inf")] * len(kinds)
        for _ in range(ROUNDS):
            for k, pipe in enumerate(pipes):
                pipe.send(True)
                least[k] = min(least[k], pipe.recv())
        for pipe in pipes:
            pipe.send(False)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, help="network; default: four")
    parser.add_argument("--kind", action="append", help="kind of CPU; default: those of x86 with AVX2 at least")
    history.add_argument(parser)
    arguments = parser.parse_args()
    kinds, numbers = arguments.kind or KINDS, list[tuple[str, str, float, str]]()
    for network in arguments.only or NETWORKS:
        times = measured(network, kinds)
        rows = [(kind, 1e3 * t, t / times[0]) for kind, t in zip(kinds, times, strict=True)]
        print(tabulate(rows, (network, "ms", f"/ {kinds[0]}"), floatfmt=("", ".3f", ".2f")), flush=True)
        numbers += [(network, f"{kind}, time of {kinds[0]}", ratio, "times") for kind, _, ratio in rows[1:]]
    history.append(arguments.history, "bench.cpu_kinds", numbers)


if __name__ == "__main__":
    main()
