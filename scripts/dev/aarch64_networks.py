"""Small networks that this machine quantizes, and another kind of CPU loads and quantizes anew; see `aarch64.py`.

    python -m scripts.dev.aarch64_networks write FOLDER        quantize them here, and write files and results
    python -m scripts.dev.aarch64_networks check FOLDER        on the other machine: exit with 1 if results differ

Results of the other machine are compared with those of the reference backend on both machines. They may differ where a
float lies halfway between two integers, and then by the effect of one step of an activation.
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

MAX_ERROR = 2e-3
"""Largest relative error, in the Euclidean norm, that a few activations of another integer cause."""
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


_FEW, _MANY = 3, 40
"""Numbers of rows that different loops compute."""
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., fxq.Recipe], dict[str, Any], tuple[int, ...]]] = {
    "convolutions": (Block, fxq.Recipe.static, {}, (2, 3, 20, 20)),
    "few rows, dynamic": (_layers, fxq.Recipe.dynamic, {}, (_FEW, 192)),
    "many rows, dynamic": (_layers, fxq.Recipe.dynamic, {}, (_MANY, 192)),
    "few rows, weights of 4 bits": (_layers, fxq.Recipe.weight_only, {"bits": 4}, (_FEW, 192)),
    "many rows, weights of 4 bits": (_layers, fxq.Recipe.weight_only, {"bits": 4}, (_MANY, 192)),
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
        quantized(name, "jit", model, x).save(file)
        wanted = quantized(name, "reference", model, x)(x)
        torch.save({"state": model.state_dict(), "x": x, "wanted": wanted}, file.with_suffix(".pt"))


def check(folder: Path) -> int:
    """Load and quantize the networks; return how many are wrong."""
    log.info("%s\n%s", fxq.doctor(), "-" * 80)
    wrong = 0
    for index, (name, (make, *_)) in enumerate(CASES.items()):
        start, stored = time.process_time(), torch.load(folder / f"{index}.pt")
        model, x, wanted = make(), stored["x"], stored["wanted"]
        model.load_state_dict(stored["state"])
        loaded, anew = fxq.load(folder / f"{index}.fxq"), quantized(name, "jit", model, x)
        results = {"loaded": loaded(x), "quantized": anew(x), "reference": quantized(name, "reference", model, x)(x)}
        errors = {key: ((y - wanted).norm() / wanted.norm()).item() for key, y in results.items()}
        equal = {key: (y == wanted).double().mean().item() for key, y in results.items()}
        kernels = [
            sorted({type(m).__name__ for _, m in q.named_modules() if "Jit" in type(m).__name__})
            for q in (loaded, anew)
        ]
        is_right = max(errors.values()) <= MAX_ERROR and kernels[0] == kernels[1] and kernels[0]
        wrong += not is_right
        numbers = ", ".join(f"{key} {errors[key]:.1e} ({equal[key]:.0%} equal)" for key in results)
        log.info(
            "%s %s: %s; %s; %.0f s",
            "ok   " if is_right else "WRONG",
            name,
            numbers,
            *kernels,
            time.process_time() - start,
        )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    warnings.simplefilter("ignore", UserWarning)
    if options.action == "write":
        write(options.folder)
    else:
        sys.exit(min(check(options.folder), 1))


if __name__ == "__main__":
    main()
