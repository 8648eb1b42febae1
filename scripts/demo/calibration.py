"""Calibrate MobileNetV2 in 1, 2 and 4 processes, each with a share of the data: the time it takes, and the same result.

    python -m scripts.demo.calibration                 starts the processes itself, one thread each
    python -m scripts.demo.calibration --batches 64    more data
    python -m torch.distributed.run --nproc-per-node 2 scripts/demo/calibration.py    of these processes, one row

Times are what a process had of the CPU, the most of all processes: what they wait for one another is left out. "ideal"
is the time of the forwards in one process, over their number. More processes than cores share caches, which slows them.
What 64 machines would take is computed: from the bytes that each sends, the speed of the network, and the time that the
rest takes for each process here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

import fxq
from scripts.networks.mobile import mobilenet_v2

MACHINES = 64
SAMPLES = 64
"""Images that are kept for the passes that look at some."""


@dataclass
class Run:
    """Measurements of one process.

    Attributes:
        forwards: seconds of the CPU to show its share to the observers.
        rest: the same for all else: to compare models, to send and to merge what was seen.
        state: bytes of what the observers know.
        seen: a hash of all that the observers know.
    """

    forwards: float
    rest: float
    state: int
    seen: str


def batches(numbers: range, size: int, marks: list[float]) -> Iterator[Tensor]:
    """Images that stand for data; notes when the first is asked for, and when there are no more."""
    marks.append(time.process_time())
    for number in numbers:
        yield torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(number)) * (1 + number % 7)
    marks.append(time.process_time())


def measured(count: int, size: int, rank: int = 0, ranks: int = 1) -> Run:
    """Calibrate with a share of so many batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe, example = fxq.Recipe.static(backend="reference"), torch.rand(1, 3, size, size)
    observed = fxq.prepare(mobilenet_v2().eval(), recipe, example_inputs=example)
    marks: list[float] = []
    start = time.process_time()
    fxq.calibrate(observed, batches(range(rank, count, ranks), size, marks))
    total, forwards = time.process_time() - start, marks[1] - marks[0]
    buffers = [buffer for m in observed.modules() if isinstance(m, fxq.extend.Observer) for buffer in m.buffers()]
    seen = hashlib.sha256(b"".join(buffer.contiguous().numpy().tobytes() for buffer in buffers)).hexdigest()
    state = sum(buffer.nbytes for buffer in buffers)
    return Run(forwards, total - forwards, state, seen)


def started(ranks: int, count: int, size: int) -> list[Run]:
    """Measurements of this many processes, started here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *("--module", "scripts.demo.calibration"),
            *("--batches", str(count), "--size", str(size), "--file", str(file)),
        ]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        return [Run(**run) for run in json.loads(file.read_text(encoding="utf-8"))]


def row(runs: list[Run], alone: Run) -> list[str]:
    """A line of the table."""
    forwards, rest = max(run.forwards for run in runs), max(run.rest for run in runs)
    ideal = alone.forwards / len(runs)
    same = all(run.seen == alone.seen for run in runs)
    times = f"{forwards:.2f}", f"{rest:.2f}", f"{ideal:.2f}", f"{(forwards + rest) / ideal:.2f}"
    return [str(len(runs)), *times, f"{rest / forwards:.1%}", "bit for bit" if same else "NOT THE SAME"]


def on_paper(runs: list[Run], size: int, gigabits: float) -> str:
    """Time of 64 machines besides the forwards, and the data for which it is a fifth of them."""
    samples = SAMPLES * 3 * size * size * 4  # bytes, of float32
    first_run, hops = runs[0], math.ceil(math.log2(MACHINES))  # a broadcast goes along a tree
    megabytes = (MACHINES * first_run.state + samples) / 1e6
    mean_rest = max(run.rest for run in runs) / len(runs)
    sending, merging = hops * megabytes * 8e-3 / gigabits, MACHINES * mean_rest
    return (
        f"{MACHINES} machines, on paper: {megabytes:.0f} MB to all of them, {first_run.state / 1e6:.1f} MB from each, "
        f"and the samples: {hops} hops at {gigabits:g} Gbit/s take {sending:.1f} s. The rest takes {merging:.1f} s, "
        f"{1e3 * mean_rest:.0f} ms for each.\nWithin 1.2x of ideal where each has {5 * (sending + merging):.0f} s of "
        "forwards or more."
    )


def main() -> None:
    """Parse the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=16, help="batches of 8 images, of all processes together")
    parser.add_argument("--size", type=int, default=224, help="height and width of an image")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="numbers of processes, besides 1")
    parser.add_argument("--gigabits", type=float, default=10.0, help="per second, of the network of 64 machines")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    count, size = chosen.batches, chosen.size
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, asdict(measured(count, size, rank, ranks)))
        dist.destroy_process_group()
        if rank == 0 and chosen.file is not None:
            chosen.file.write_text(json.dumps(gathered), encoding="utf-8")
        if rank > 0 or chosen.file is not None:
            return
        runs = [[Run(**run) for run in gathered]]
    else:
        runs = [started(ranks, count, size) for ranks in chosen.processes]
    alone = measured(count, size)
    headers = ["processes", "forwards s", "the rest s", "ideal s", "times ideal", "rest / forwards", "observers"]
    print(tabulate([row(some, alone) for some in [[alone], *runs]], headers, stralign="right"))
    print(on_paper(runs[-1], size, chosen.gigabits))


if __name__ == "__main__":
    main()
