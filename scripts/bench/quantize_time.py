"""CPU time of quantizing resnet18, in float passes over the calibration data.

    python -m scripts.bench.quantize_time                           32, 16 and 8 images of 96 x 96 and 224 x 224
    python -m scripts.bench.quantize_time --samples 8 --sizes 96

CPU time of one thread; random weights, `Recipe.static()`. "cold" quantizes in a new process with an empty cache of
prices, "first" in a new process that reads the prices, "again" once more in that process. Both of the first two
include imports. "passes" is "again" in units of "pass", the least time of the float model over the data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from tabulate import tabulate

import fxq
from scripts.bench.timing import threads_set_to
from scripts.networks.resnet import resnet18

BATCH = 8
ROUNDS = 3


def seconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measured(samples: int, size: int) -> list[float]:
    """Seconds of a float pass, of quantizing for the first time in this process, and of quantizing once more."""
    torch.manual_seed(0)
    model, data = resnet18().eval(), torch.randn(samples, 3, size, size).split(BATCH)

    def float_pass() -> None:
        with torch.no_grad():
            for batch in data:
                model(batch)

    with warnings.catch_warnings(), threads_set_to(1):
        warnings.simplefilter("ignore", fxq.FxqWarning)
        float_pass()
        least = min(seconds(float_pass) for _ in range(ROUNDS))
        return [least, *(seconds(lambda: fxq.quantize(model, fxq.Recipe.static(), data=data)) for _ in range(2))]


def in_new_process(samples: int, size: int, cache: str) -> list[float]:
    """Results of `measured` in a new process with this folder for prices."""
    command = [sys.executable, "-m", "scripts.bench.quantize_time", "--one", str(samples), str(size)]
    environment = {**os.environ, "FXQ_CACHE": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[32, 16, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[96, 224])
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*arguments.one)))
        return
    rows = []
    for size in arguments.sizes:
        for samples in arguments.samples:
            with tempfile.TemporaryDirectory() as cache:
                _, cold, _ = in_new_process(samples, size, cache)
                least, first, again = in_new_process(samples, size, cache)
            times = (f"{value:.2f}" for value in (least, cold, first, again))
            rows.append([f"{samples} x {size} x {size}", *times, f"{again / least:.1f}"])
    print(tabulate(rows, ["images", "pass", "cold", "first", "again", "passes"]))


if __name__ == "__main__":
    main()
