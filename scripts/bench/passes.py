"""Time per op of every pass, and of matching, as the graph grows: nothing may be quadratic in the number of ops.

    python -m scripts.bench.passes                    all networks at 2,000 and 20,000 ops
    python -m scripts.bench.passes --network chain    one of them
    python -m scripts.bench.passes --profile lower    where one pass spends its time, at the largest size
    python -m scripts.bench.passes --optimize speed   the same with fallback pricing what it finds: float is faster on
                                                      these tiny tensors, and the passes after it have less to do

The time is that of the thread on the CPU, the least of `--rounds` rounds. A round takes each size in turn, in a process
of its own: a graph made where others were before finds memory that is there already, a larger one does not. The
cyclic garbage collector is off, since what it costs depends on all that lives in the process.

Calls are those of Python functions, counted at a quarter of the sizes. They are the same in every run and on every
machine: what grows in time and not in calls is work inside an operator, or the caches of the CPU. `bare walk` is
what those cost: a pass that looks at the metadata of every node of the qdq graph and does nothing. `matching` matches
every fusion pattern everywhere and takes none; `around the passes` is checks and snapshots, and making the modules.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tabulate import tabulate

import fxq
from scripts.bench.timing import no_gc, threads_set_to
from scripts.networks.generated import NETWORKS, Generated

SIZES = (2_000, 20_000)
MAX_GROWTH = 1.3
MIN_WALKS = 8
COUNTED_SHARE = 4
AROUND, ALL = "around the passes", "all"
RULE = (
    f"PASS: the time per op grows less than {MAX_GROWTH}×. A pass that takes less than {MIN_WALKS} bare walks is "
    "bound by the\ncaches, and judged by its calls, with the same bound."
)
Meter = Callable[[str, Callable[[], Any]], Any]
"""Runs a pass, given by its name, and measures it."""


@dataclass(frozen=True)
class MatchAll(fxq.Pass):
    """Match every fusion pattern everywhere, and refuse what matches. Keeps: the graph."""

    name: ClassVar[str] = "matching"
    needs: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.CANONICAL
    gives: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.CANONICAL

    def run(self, rewriter: fxq.extend.Rewriter) -> None:
        rewriter.fuse(fxq.extend.FUSIONS.largest_first(), refuse=lambda match: "to match all of them")


@dataclass(frozen=True)
class BareWalk(fxq.Pass):
    """Look at every node, and do nothing. Keeps: the graph."""

    name: ClassVar[str] = "bare walk"
    needs: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.QDQ
    gives: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.QDQ

    def run(self, rewriter: fxq.extend.Rewriter) -> None:
        for node in rewriter.nodes():
            _ = node.op, node.meta["fxq"].plan


def metered(step: fxq.Pass, meter: Meter) -> fxq.Pass:
    """Timed copy of a pass. It counts as fxq's own: after a user's pass, the whole graph is run and checked again."""

    def run(self: fxq.Pass, rewriter: fxq.extend.Rewriter) -> None:
        meter(step.name, lambda: step.run(rewriter))

    about = {"name": step.name, "needs": step.needs, "gives": step.gives, "__module__": "fxq.passes.measured"}
    timed_pass: fxq.Pass = type(type(step).__name__, (fxq.Pass,), {**about, "run": run})()
    return timed_pass


def recipe(meter: Meter, optimize: str) -> fxq.Recipe:
    """The static recipe for x86, with matching and a bare walk, every pass measured."""
    chosen = fxq.Recipe.static(backend="x86", optimize=optimize).insert_pass(MatchAll(), before="fuse")
    chosen = chosen.insert_pass(BareWalk(), before="propagate")
    steps = list(chosen.pipeline)
    for step, behind in zip(reversed(steps), [None, *reversed(steps)], strict=False):
        chosen = chosen.without_pass(step.name)
        place = {"before": behind.name} if behind is not None else {"after": steps[-2].name}
        chosen = chosen.insert_pass(metered(step, meter), **place)
    return chosen


def quantize(model: Generated, chosen: fxq.Recipe, meter: Meter) -> None:
    """Quantize with one batch, whose forward is left out."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # with optimize="speed": nothing runs on integers
        observed = meter(ALL, lambda: fxq.prepare(model, chosen, example_inputs=model.example))
        observed(model.example)
        meter(ALL, lambda: fxq.convert(observed))


def measured(network: str, ops: int, optimize: str, clock: Callable[[], float]) -> dict[str, float]:
    """Time of every pass by this clock, per op, by name and in order."""
    taken: dict[str, float] = {}

    def meter(name: str, work: Callable[[], Any]) -> Any:
        start = clock()
        result = work()
        taken[name] = taken.get(name, 0.0) + clock() - start
        return result

    quantize(NETWORKS[network](100), recipe(lambda name, work: work(), optimize), meter)  # imports and first calls
    taken.clear()
    with no_gc():
        quantize(NETWORKS[network](ops), recipe(meter, optimize), meter)
    total = taken.pop(ALL)
    return {name: value / ops for name, value in {**taken, AROUND: total - sum(taken.values()), ALL: total}.items()}


@contextmanager
def counting_calls() -> Iterator[Callable[[], float]]:
    """A clock that goes one step with every call of a function."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield lambda: counted
    finally:
        sys.setprofile(None)


def measure_here(network: str, ops: int, optimize: str, quantity: str) -> dict[str, float]:
    """Microseconds or calls per op, by pass."""
    gc.collect()
    with threads_set_to(1):
        torch.manual_seed(0)
        if quantity == "calls":
            with counting_calls() as clock:
                return measured(network, ops, optimize, clock)
        taken = measured(network, ops, optimize, time.thread_time)
    return {name: 1e6 * seconds for name, seconds in taken.items()}


def measure(network: str, ops: int, optimize: str, quantity: str) -> dict[str, float]:
    """Result of `measure_here` in a separate process."""
    command = [
        sys.executable,
        "-m",
        "scripts.bench.passes",
        "--measure",
        quantity,
        "--network",
        network,
        "--sizes",
        str(ops),
    ]
    command += ["--optimize", optimize]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def table(network: str, sizes: tuple[int, int], optimize: str, rounds: int) -> tuple[str, list[str]]:
    """The table of one network, and the names of the passes that grow more than they may."""
    runs = [[measure(network, ops, optimize, "time") for ops in sizes] for _ in range(rounds)]
    times = [{name: min(run[i][name] for run in runs) for name in runs[0][0]} for i in range(2)]
    calls = [measure(network, max(ops // COUNTED_SHARE, 1), optimize, "calls") for ops in sizes]
    rows, failed = [], []
    for name in times[0]:
        (small, large), (few, many) = [t[name] for t in times], [c[name] for c in calls]
        by_calls = small < MIN_WALKS * times[0][BareWalk.name]
        growth = many / few if by_calls else large / small
        verdict = ("PASS" if growth < MAX_GROWTH else "FAIL") + (" by calls" if by_calls else "")
        if name == BareWalk.name:
            verdict = "floor"
        elif growth >= MAX_GROWTH:
            failed.append(name)
        rows.append([name, small, large, f"{large / small:.2f}×", many, f"{many / few:.2f}×", verdict])
    sized = [f"{ops:,} ops" for ops in sizes]
    headers = [f"{network}, per op", *(f"µs at {s}" for s in sized), "growth", "calls", "growth", f"< {MAX_GROWTH}×"]
    return tabulate(rows, headers=headers, floatfmt=".1f"), failed


def profile(network: str, ops: int, optimize: str, wanted: str) -> None:
    """Print where one pass spends its time."""
    profiler = cProfile.Profile()

    def meter(name: str, work: Callable[[], Any]) -> Any:
        return profiler.runcall(work) if name == wanted else work()

    quantize(NETWORKS[network](ops), recipe(meter, optimize), meter)
    for order in ("cumulative", "tottime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, action="append", help="default: all")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="a small and a large number of ops")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--optimize", choices=("coverage", "speed"), default="coverage", help="default %(default)s")
    parser.add_argument("--profile", metavar="PASS", help="profile this pass instead")
    parser.add_argument("--measure", choices=("time", "calls"), help="print the numbers of one size as JSON")
    arguments = parser.parse_args()
    sizes, slow = arguments.sizes, []
    for network in arguments.network or NETWORKS:
        if arguments.measure:
            print(json.dumps(measure_here(network, sizes[-1], arguments.optimize, arguments.measure)))
        elif arguments.profile:
            with threads_set_to(1):
                profile(network, sizes[-1], arguments.optimize, arguments.profile)
        else:
            text, failed = table(network, (sizes[0], sizes[-1]), arguments.optimize, arguments.rounds)
            print(text + "\n", flush=True)
            slow += [f"{name} on {network}" for name in failed]
    if not arguments.measure and not arguments.profile:
        print(f"{RULE}\nGrowing more from {sizes[0]:,} to {sizes[-1]:,} ops: {', '.join(slow) or 'nothing'}.")


if __name__ == "__main__":
    main()
