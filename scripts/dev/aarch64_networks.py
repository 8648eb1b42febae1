"""Small networks that this machine quantizes, and another kind of CPU loads and quantizes anew; see `aarch64.py`.

    python -m scripts.dev.aarch64_networks write FOLDER        quantize them here, and write files and results
    python -m scripts.dev.aarch64_networks check FOLDER --only LSTM        on the other machine: 1 if results differ

Results of the files are compared with those of both backends here. They may differ where a float lies halfway between
two integers, and then by the effect of one step of an activation.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fxq
from fxq.common.timed_calls import threads_set_to
from scripts.dev.aarch64_cases import CASES, MAX_LOSS, Case

log = logging.getLogger("aarch64_networks")


def write(folder: Path) -> None:
    """Write each network as a file of the jit backend; its weights, input and results; and the count of loop calls."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, case) in enumerate(CASES.items()):
        log.info("quantizing here: %s", name)
        torch.manual_seed(index)
        model, x = case.make(), torch.randn(case.shape)
        file = folder / f"{index}.fxq"
        qmodel, reference = (case.quantized(backend, model, x) for backend in ("jit", "reference"))
        qmodel.save(file)
        y, calls = _called(case, qmodel, x)
        results = {"jit": y, "reference": case.call(reference, x), "float": case.call(model, x).detach()}
        torch.save({"state": model.state_dict(), "x": x, "calls": calls, **results}, file.with_suffix(".pt"))


def _called(case: Case, model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Result of a network, and how many times it called loops of the case's class."""
    if case.loops is None:
        return case.call(model, x), 0
    with patch.object(case.loops, "__call__", autospec=True, side_effect=case.loops.__call__) as spy:
        return case.call(model, x), spy.call_count


def _error(y: Tensor, wanted: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return ((y - wanted).norm() / wanted.norm()).item()


def _kernels(model: nn.Module) -> list[str]:
    """Names of the classes of the kernels."""
    kernels = [module for name, module in model.named_modules() if name.startswith("fxq_kernels.")]
    return sorted({type(module).__name__ for module in kernels if type(module).__module__.startswith("fxq.backends")})


def check(folder: Path, only: str = "") -> int:
    """Load and quantize the networks whose names start with `only`; return how many are wrong."""
    log.info("%s", fxq.doctor([], progress=False))
    wrong = 0
    for index, (name, case) in enumerate(CASES.items()):
        if not name.startswith(only):
            continue
        log.info("%s", name)
        start = time.process_time()
        faults = _faults(case, folder / f"{index}.fxq")
        wrong += bool(faults)
        verdict = f"WRONG: {'; '.join(faults)}" if faults else "right"
        log.info("      %s; %.0f s", verdict, time.process_time() - start)
    return wrong


def _faults(case: Case, file: Path) -> list[str]:
    """Faults of the network of a file, and of the same network quantized here."""
    stored = torch.load(file.with_suffix(".pt"))
    model, x = case.make(), stored["x"]
    model.load_state_dict(stored["state"])
    loaded, anew = fxq.load(file), case.quantized("jit", model, x)
    (y, calls), (y_anew, calls_anew) = (_called(case, qmodel, x) for qmodel in (loaded, anew))
    kernels, kernels_anew = _kernels(loaded), _kernels(anew)
    with threads_set_to(3):
        is_same = torch.equal(case.call(loaded, x), y)
    errors = {backend: _error(y, stored[backend]) for backend in case.max_errors._fields}
    loss, loss_there = _error(y_anew, stored["float"]), _error(stored["jit"], stored["float"])
    log.info("      loaded, errors of %s", ", ".join(f"{error:.1e} ({name})" for name, error in errors.items()))
    log.info("      quantized, at %.3e from float, there %.3e", loss, loss_there)
    log.info("      %s%s", kernels, f", {calls} calls of {case.loops.__name__}" if case.loops else "")
    is_right = {
        "result of the file": all(errors[name] <= most for name, most in case.max_errors._asdict().items()),
        "result of the file on 3 threads": is_same,
        "distance of the quantized network from float": loss <= MAX_LOSS * loss_there,
        f"kernels of the quantized network: {kernels_anew}": bool(kernels) and kernels == kernels_anew,
        f"calls of loops: {calls} and {calls_anew}, there {stored['calls']}": calls == calls_anew == stored["calls"]
        and (case.loops is None or calls > 0),
    }
    return [name for name, right in is_right.items() if not right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="how the names of the networks to check start")
    options = parser.parse_args()
    if not any(name.startswith(options.only) for name in CASES):
        parser.error(f"no network has a name that starts with {options.only!r}: {', '.join(CASES)}")
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    warnings.simplefilter("ignore", UserWarning)
    if options.action == "write":
        write(options.folder)
    else:
        sys.exit(min(check(options.folder, options.only), 1))


if __name__ == "__main__":
    main()
