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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxq

MAX_ERRORS = {"jit": 2e-3, "reference": 1e-2}
"""Largest relative error, in the Euclidean norm, against the result of a backend here. A few activations of another
integer cause one; the reference runs recurrent layers otherwise."""
MAX_LOSS = 1.2
"""Largest distance from the float model's result of a network that is quantized on the other machine, as a multiple of
that of the network quantized here. Where columns of a weight compensate the errors of earlier ones, the rounding of one
number changes all later ones."""
log = logging.getLogger("aarch64_networks")


class Block(nn.Module):
    """Convolution, depthwise convolution, a residual sum, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.by_channel = nn.Conv2d(3, 32, 3, stride=2), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.mix, self.last = nn.Conv2d(32, 32, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = torch.relu(self.mix(torch.relu(self.by_channel(y))) + y)
        return self.last(y.mean((2, 3)))


class Words(nn.Module):
    """LSTM, and a linear layer of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(24, 40, batch_first=True), nn.Linear(40, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(192, 320), nn.GELU(), nn.Linear(320, 64), nn.ReLU())


_FEW_ROWS, _MANY_ROWS = 3, 40
"""Numbers of rows that different loops compute."""
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., fxq.Recipe], dict[str, Any], tuple[int, ...]]] = {
    "convolutions": (Block, fxq.Recipe.static, {}, (2, 3, 20, 20)),
    "few rows, dynamic": (_layers, fxq.Recipe.dynamic, {}, (_FEW_ROWS, 192)),
    "many rows, dynamic": (_layers, fxq.Recipe.dynamic, {}, (_MANY_ROWS, 192)),
    "few rows, weights of 4 bits": (_layers, fxq.Recipe.weight_only, {"bits": 4}, (_FEW_ROWS, 192)),
    "many rows, weights of 4 bits": (_layers, fxq.Recipe.weight_only, {"bits": 4}, (_MANY_ROWS, 192)),
    "LSTM": (Words, fxq.Recipe.static, {}, (3, 5, 24)),
    "LSTM, dynamic": (Words, fxq.Recipe.dynamic, {}, (3, 5, 24)),
}
"""By name: the network, its recipe with options, and the shape of the input."""


def quantized(name: str, backend: str, model: nn.Module, x: Tensor) -> Any:
    """The network of a case, quantized for a backend."""
    _, preset, options, _ = CASES[name]
    recipe = preset(backend=backend, optimize="coverage", **options).with_min_sqnr(None)
    return fxq.quantize(model.eval(), recipe, data=[x], example_inputs=x, progress=False)


def write(folder: Path) -> None:
    """Write each network as a file of the jit backend; its weights, input and result; and the reference's result."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, (make, *_, shape)) in enumerate(CASES.items()):
        torch.manual_seed(index)
        model, x = make(), torch.randn(shape)
        file = folder / f"{index}.fxq"
        qmodel, reference = (quantized(name, backend, model, x) for backend in ("jit", "reference"))
        qmodel.save(file)
        results = {"jit": qmodel(x), "reference": reference(x), "float": model(x).detach()}
        torch.save({"state": model.state_dict(), "x": x, **results}, file.with_suffix(".pt"))


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
    for index, (name, (make, *_)) in enumerate(CASES.items()):
        if not name.startswith(only):
            continue
        start, stored = time.process_time(), torch.load(folder / f"{index}.pt")
        model, x = make(), stored["x"]
        model.load_state_dict(stored["state"])
        loaded, anew = fxq.load(folder / f"{index}.fxq"), quantized(name, "jit", model, x)
        results, kernels = [loaded(x), anew(x)], [_kernels(q) for q in (loaded, anew)]
        torch.set_num_threads(3)
        same = torch.equal(loaded(x), results[0])
        torch.set_num_threads(1)
        errors = {key: _error(results[0], stored[key]) for key in MAX_ERRORS}
        losses = [_error(y, stored["float"]) for y in (stored["jit"], results[1])]
        is_right = all(errors[key] <= most for key, most in MAX_ERRORS.items()) and same
        is_right = is_right and losses[1] <= MAX_LOSS * losses[0]
        is_right = is_right and kernels[0] == kernels[1] and bool(kernels[0])
        wrong += not is_right
        log.info(
            "%s %s: loaded, errors of %s; quantized, at %.3e from float, there %.3e", "right" if is_right else "WRONG",
            name, ", ".join(f"{error:.1e} ({key})" for key, error in errors.items()), losses[1], losses[0],
        )  # fmt: skip
        seconds = time.process_time() - start
        log.info("      %s%s; %.0f s", kernels, "" if same else ", other results on 3 threads", seconds)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="how the names of the networks to check start")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    warnings.simplefilter("ignore", UserWarning)
    if options.action == "write":
        write(options.folder)
    else:
        sys.exit(min(check(options.folder, options.only), 1))


if __name__ == "__main__":
    main()
