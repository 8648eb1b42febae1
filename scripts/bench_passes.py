"""Time per node of every pass, and of matching, as the graph grows: nothing may be quadratic in the number of nodes.

    python scripts/bench_passes.py                    all networks at 2,000, 5,000 and 20,000 ops
    python scripts/bench_passes.py --network chain    one of them
    python scripts/bench_passes.py --profile lower    where one pass spends its time, at the largest size

The table has microseconds per traced op, medians over `--rounds` rounds that go through all sizes in turns. Python's
cyclic garbage collector is off while a pass runs (`--gc` leaves it on): what it costs depends on all that lives in the
process. The backend is x86; `matching` is a pass that matches every fusion pattern everywhere and takes none;
`around the passes` is the checks and snapshots after each pass, and making the modules.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from generated import NETWORKS, Generated
from tabulate import tabulate
from timing import no_gc, threads

import fxq

SIZES = (2_000, 5_000, 20_000)
MOST_GROWTH = 1.3
AROUND = "around the passes"


@dataclass(frozen=True)
class MatchAll(fxq.Pass):
    """Match every fusion pattern everywhere, and refuse what matches. Keeps: the graph."""

    name: ClassVar[str] = "matching"
    needs: ClassVar[fxq.Stage] = fxq.Stage.CANONICAL
    gives: ClassVar[fxq.Stage] = fxq.Stage.CANONICAL

    def run(self, rewriter: fxq.Rewriter) -> None:
        rewriter.fuse(fxq.FUSIONS.largest_first(), refuse=lambda match: True)


@dataclass(frozen=True)
class Profiled(fxq.Pass):
    """Another pass under the profiler, which it prints."""

    inner: fxq.Pass
    name: ClassVar[str] = "profiled"
    needs: ClassVar[fxq.Stage] = fxq.Stage.NONE
    gives: ClassVar[fxq.Stage] = fxq.Stage.NONE

    def run(self, rewriter: fxq.Rewriter) -> None:
        profile = cProfile.Profile()
        profile.runcall(self.inner.run, rewriter)
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile).sort_stats(order).print_stats(25)


def recipe() -> fxq.Recipe:
    return fxq.Recipe.static(backend="x86").insert_pass(MatchAll(), before="fuse")


def seconds_per_pass(model: Generated, chosen: fxq.Recipe, collect: bool = False) -> dict[str, float]:
    """Seconds of every pass, by name, in order; one calibration batch, left out."""
    with torch.no_grad(), nullcontext() if collect else no_gc():
        start = time.perf_counter()
        observed = fxq.prepare(model, chosen, model.example)
        prepared = time.perf_counter() - start
        observed(model.example)
        start = time.perf_counter()
        history = fxq.convert(observed).history
        converted = time.perf_counter() - start
    seconds = {snapshot.name: snapshot.seconds for snapshot in history}
    return {**seconds, AROUND: prepared + converted - sum(seconds.values())}


def measure(network: str, sizes: tuple[int, ...], rounds: int, collect: bool) -> dict[str, list[float]]:
    """Median microseconds per op, for every pass one number a size. The smallest graphs run twice a round."""
    models = [NETWORKS[network](ops) for ops in sizes]
    seconds_per_pass(NETWORKS[network](100), recipe())  # imports and first calls
    runs: list[list[dict[str, float]]] = [[] for _ in sizes]
    for _ in range(rounds):
        for model, ops, found in zip(models, sizes, runs, strict=True):
            for _ in range(2 if ops < sizes[-1] // 5 else 1):
                found.append(seconds_per_pass(model, recipe(), collect))
    return {
        name: [
            1e6 * statistics.median(run[name] for run in found) / ops for ops, found in zip(sizes, runs, strict=True)
        ]
        for name in runs[0][0]
    }


def table(network: str, sizes: tuple[int, ...], medians: dict[str, list[float]]) -> tuple[str, list[str]]:
    """The table of one network, and the names of the passes that grow more than they may."""
    totals = [sum(column) for column in zip(*medians.values(), strict=True)]
    growths = {name: values[-1] / values[0] for name, values in {**medians, "all": totals}.items()}
    rows = [
        [name, *values, f"{growths[name]:.2f}×", "pass" if growths[name] < MOST_GROWTH else "FAIL"]
        for name, values in {**medians, "all": totals}.items()
    ]
    headers = [f"{network}, µs per op", *(f"{ops:,} ops" for ops in sizes), "growth", f"< {MOST_GROWTH}×"]
    return tabulate(rows, headers=headers, floatfmt=".2f"), [n for n, g in growths.items() if g >= MOST_GROWTH]


def profile(network: str, ops: int, name: str) -> None:
    """Print where one pass spends its time."""
    chosen = recipe()
    inner = chosen.pipeline[name]
    model = NETWORKS[network](ops)
    Profiled.name = name
    Profiled.needs, Profiled.gives = inner.needs, inner.gives
    line = [step.name for step in chosen.pipeline]
    chosen = chosen.without_pass(name)
    at = line.index(name)
    profiled = Profiled(inner)
    chosen = (
        chosen.insert_pass(profiled, after=line[at - 1]) if at else chosen.insert_pass(profiled, before=line[at + 1])
    )
    seconds_per_pass(model, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, action="append", help="default: all")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ops (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on")
    parser.add_argument("--profile", metavar="PASS", help="profile this pass instead")
    arguments = parser.parse_args()
    sizes, slow = tuple(arguments.sizes), []
    with threads(1):
        for network in arguments.network or NETWORKS:
            torch.manual_seed(0)
            if arguments.profile:
                profile(network, sizes[-1], arguments.profile)
                continue
            text, failed = table(network, sizes, measure(network, sizes, arguments.rounds, arguments.gc))
            print(text + "\n", flush=True)
            slow += [f"{name} on {network}" for name in failed]
    if not arguments.profile:
        print(f"Growing {MOST_GROWTH}× or more from {sizes[0]:,} to {sizes[-1]:,} ops: {', '.join(slow) or 'nothing'}.")


if __name__ == "__main__":
    main()
