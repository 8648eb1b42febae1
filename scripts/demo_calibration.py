"""Calibrate MobileNetV2 in 1, 2 and 4 processes, each with a share of the data: the time it takes, and the same scales.

    python scripts/demo_calibration.py                   starts the processes itself, one thread each
    python scripts/demo_calibration.py --batches 64      more data
    torchrun --nproc-per-node 2 scripts/demo_calibration.py    one row, of these processes

Times are what a process had of the CPU, the most of all processes, so that more of them than there are cores give the
same; what they wait for one another is left out. "ideal" is the time of the forwards in one process, over their number.
What 64 machines would take is computed: from the bytes that each sends, the speed of the network, and the time to merge
one state.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from networks_mobile import mobilenet_v2
from tabulate import tabulate
from torch import Tensor

import fxq
from fxq.common.stored_data import pack, unpack
from fxq.pipeline.calibration_state import merge_parts, observers_of, seen_by
from fxq.pipeline.ranks import Ranks

MACHINES = 64


@dataclass
class Run:
    """What one process measured; seconds are those of the CPU.

    Attributes:
        forwards: to show its share to the observers.
        rest: for all else: to compare models, to send and to merge what was seen.
        merging: to read and to merge the state of one process.
        state: bytes of what the observers of one process have seen.
        samples: bytes of the samples that are kept of all processes.
        scales: of all values.
    """

    forwards: float
    rest: float
    merging: float
    state: int
    samples: int
    scales: dict[str, float] = field(repr=False)


def batches(numbers: range, size: int, marks: list[float]) -> Iterator[Tensor]:
    """Images that stand for data; notes when the first is asked for, and when there are no more."""
    marks.append(time.process_time())
    for number in numbers:
        yield torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(number)) * (1 + number % 7)
    marks.append(time.process_time())


def measured(count: int, size: int) -> Run:
    """Calibrate with this rank's share of so many batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    recipe = fxq.Recipe.static(backend="reference")
    observed = fxq.prepare(mobilenet_v2().eval(), recipe, torch.rand(1, 3, size, size))
    marks: list[float] = []
    start = time.process_time()
    fxq.calibrate(observed, batches(range(rank, count, ranks), size, marks))
    total = time.process_time() - start
    forwards = marks[1] - marks[0]
    seen = seen_by(observed, observed.manager.context)
    state, several = pack({**seen, "samples": []}), 8
    into = copy.deepcopy(observed)
    start = time.process_time()
    merge_parts(into, into.manager.context, (unpack(state) for _ in range(several)))
    merging = (time.process_time() - start) / several
    scales = {name: observer.qparams().s for name, observer in observers_of(observed).items()}
    return Run(forwards, total - forwards, merging, len(state), len(pack(seen["samples"])), scales)


def started(ranks: int, count: int, size: int) -> list[Run]:
    """What so many processes measured that are started here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__),
            *("--batches", str(count), "--size", str(size), "--file", str(file)),
        ]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        return [Run(**run) for run in json.loads(file.read_text(encoding="utf-8"))]


def row(runs: list[Run], alone: Run) -> list[str]:
    """A line of the table."""
    forwards, rest = max(run.forwards for run in runs), max(run.rest for run in runs)
    ideal = alone.forwards / len(runs)
    same = all(run.scales == alone.scales for run in runs)
    times = f"{forwards:.2f}", f"{rest:.2f}", f"{ideal:.2f}", f"{(forwards + rest) / ideal:.2f}"
    return [str(len(runs)), *times, "bit for bit" if same else "OTHER SCALES"]


def on_paper(run: Run, gigabits: float) -> str:
    """What 64 machines take beside the forwards, and how much data makes it a fifth of them."""
    hops = math.ceil(math.log2(MACHINES))  # a broadcast goes along a tree
    megabytes = (MACHINES * run.state + run.samples) / 1e6
    sending, merging = hops * megabytes * 8e-3 / gigabits, MACHINES * run.merging
    return (
        f"{MACHINES} machines, on paper: {megabytes:.0f} MB go to all of them, {run.state / 1e6:.1f} MB from each, and "
        f"the samples: {hops} hops at {gigabits:g} Gbit/s take {sending:.1f} s. To merge takes {merging:.1f} s, "
        f"{1e3 * run.merging:.0f} ms for each.\nWithin 1.2x of ideal where each has {5 * (sending + merging):.0f} s of forwards or more."
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
        found = list(Ranks.of().exchanged(lambda: asdict(measured(count, size))))
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if is_first and chosen.file is not None:
            chosen.file.write_text(json.dumps(found), encoding="utf-8")
        if chosen.file is not None or not is_first:
            return
        runs = [[Run(**run) for run in found]]
    else:
        runs = [started(ranks, count, size) for ranks in chosen.processes]
    alone = measured(count, size)
    headers = ["processes", "forwards s", "the rest s", "ideal s", "times ideal", "scales"]
    print(tabulate([row(some, alone) for some in [[alone], *runs]], headers, stralign="right"))
    print(on_paper(runs[-1][0], chosen.gigabits))


if __name__ == "__main__":
    main()
