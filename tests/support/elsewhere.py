"""Makes a pickle of quantized networks, or loads one, in a process of its own: on a CPU that plays another one.

python -m tests.support.elsewhere (make|load pickle results [network,...])...
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import fxq
from fxq.backends.packed.quantized_tensors import has_engine
from tests.support import models

ROOT = Path(__file__).parents[2]


def run(isa, *jobs):
    """Run this file where oneDNN may use no more than `isa`; the results of the jobs.

    Args:
        isa: value of ONEDNN_MAX_CPU_ISA.
        *jobs: arguments of `main`; one process does them in turn.
    """
    command = [sys.executable, "-m", "tests.support.elsewhere"]
    for action, pickle, results, *names in jobs:
        command += [action, str(pickle), str(results), ",".join(names)]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(results, weights_only=False) for _, _, results, *_ in jobs]


BACKENDS = [name for name in ("x86", "fbgemm") if name == "x86" or has_engine(name)]


def main(action, pickle, results, *names):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if action == "make":
            batches = {(name, backend): models.batch(name) for name in names for backend in BACKENDS}
            runs = {key: (quantized(*key, batch), batch) for key, batch in batches.items()}
            torch.save(runs, pickle)
        else:
            runs = torch.load(pickle, weights_only=False)
        with torch.no_grad():
            values = {key: [models.call(model, batch) for _ in range(3)] for key, (model, batch) in runs.items()}
    messages = [str(warning.message) for warning in said if issubclass(warning.category, fxq.FxqWarning)]
    torch.save({"values": values, "messages": messages}, results)


def quantized(name, backend, batch):
    return fxq.quantize(models.build(name), fxq.Recipe.static(backend=backend, optimize="coverage"), data=[batch])


if __name__ == "__main__":
    for start in range(1, len(sys.argv), 4):
        action, pickle, results, names = sys.argv[start : start + 4]
        main(action, pickle, results, *filter(None, names.split(",")))
