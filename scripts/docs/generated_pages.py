"""Write the pages of the documentation that are made of the code: what each pass does, with pictures, and the ops.

    python scripts/docs/generated_pages.py FOLDER

`scripts/docs/build` calls it. Each pass is shown on the first of a few small networks that it changes.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import fxq
from fxq.ops import OPS
from fxq.ops.table import Op

STATIC = fxq.Recipe.static(optimize="coverage", backend="x86").with_min_sqnr(None)


class Residual(nn.Module):
    """A convolution with batch norm and ReLU, a PReLU, a skip connection and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.next, self.slope = nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From (N, 3, H, W) to (N, 4)."""
        y = torch.relu(self.norm(self.conv(x)))
        y = y + self.slope(self.next(y))
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From (N, L, 8) to (N, L, 4)."""
        logits: Tensor = self.head(self.inner(x, x, x, need_weights=False)[0])
        return logits


class Depthwise(nn.Module):
    """A convolution whose channels differ in size, and a depthwise convolution that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
        self.first.weight.data.mul_(torch.logspace(-2, 1, 8).view(-1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x)))
        return out


def pictures() -> list[Tensor]:
    """Inputs of networks of images."""
    return [torch.rand(4, 3, 8, 8) for _ in range(4)]


def outliers() -> list[Tensor]:
    """Inputs of which two channels are far larger than the others."""
    return [torch.randn(64, 4, 8) * torch.tensor([1.0, 1, 60, 1, 1, 1, 30, 1]) for _ in range(4)]


def powers() -> list[Tensor]:
    """Inputs of many sizes: 8 bits make zeros of most of them."""
    return [10 ** (6 * torch.rand(64, 8) - 5) for _ in range(4)]


def sounds() -> list[Tensor]:
    """Sounds of which the second half is quiet."""
    loudness = torch.ones(2048)
    loudness[1024:] = 0.004
    return [torch.randn(1, 2, 2048) * loudness for _ in range(4)]


Subject = tuple[fxq.Recipe, Callable[[], nn.Module], Callable[[], list[Tensor]]]
SUBJECTS: tuple[Subject, ...] = (
    (STATIC, Residual, pictures),
    (STATIC, Attention, lambda: [torch.randn(4, 6, 8) for _ in range(4)]),
    (STATIC, lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), outliers),
    (STATIC, lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4)), powers),
    (STATIC.without_pass("keep-small-values"), Depthwise, lambda: [torch.randn(8, 3, 16, 16) for _ in range(4)]),
    (STATIC, lambda: nn.Sequential(nn.Conv1d(2, 4, 3, bias=False), nn.ReLU(), nn.Conv1d(4, 1, 3, bias=False)), sounds),
    (
        STATIC.insert_pass(fxq.passes.Equalize(), after="fold-batch-norm").insert_pass(
            fxq.passes.AdaRound(), after="smooth"
        ),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        pictures,
    ),
    (
        STATIC.insert_pass(fxq.passes.Gptq(), after="smooth"),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        lambda: [torch.randn(64, 8) for _ in range(4)],
    ),
    (fxq.Recipe.qat(backend="x86"), Residual, pictures),
)


def histories() -> Iterator[tuple[fxq.Recipe, fxq.results.History]]:
    """The recipe and the history of each subject."""
    for recipe, make, inputs in SUBJECTS:
        torch.manual_seed(0)
        model, data = make(), inputs()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
        if not recipe.trains:
            yield recipe, fxq.quantize(model.eval(), recipe, data=data, progress=False).history
            continue
        trained = fxq.prepare(model, recipe, example_inputs=data[0])
        for x in data:
            trained(x)
        yield recipe, trained.history


def shown() -> dict[str, tuple[fxq.Pass, fxq.results.Diff]]:
    """Each pass, in order, with the difference that it makes to a graph: the first that is one, else an empty one."""
    diffs: dict[str, tuple[fxq.Pass, fxq.results.Diff]] = {}
    for recipe, history in histories():
        names = [snapshot.name for snapshot in history]
        for i, name in enumerate(names):
            if i == 0 or name not in [step.name for step in recipe.pipeline]:
                continue
            difference = fxq.diff(history[i - 1], history[i])
            if name not in diffs or (difference and not diffs[name][1]):
                diffs[name] = (recipe.pipeline[name], difference)
    return diffs


def told(step: fxq.Pass) -> str:
    """The docstring of a pass up to its arguments, as Markdown."""
    doc = inspect.cleandoc(type(step).__doc__ or "").partition("\n\nArgs:")[0]
    return re.sub(r"(?:^|\s)(Before|After|Keeps|Also|Refuses|Source): ", r"\n\n**\1:** ", doc) + "\n"


def write_passes(folder: Path) -> None:
    """A page for all passes, with pictures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# What each pass does",
        "",
        "Each pass with the difference that it makes to a small network. Passes without a picture change weights only, "
        "or nothing in these networks, or they check.",
        "",
    ]
    for name, (step, difference) in shown().items():
        lines += [f"## {name}", "", told(step)]
        if difference:
            difference.render(folder / f"{name}.svg")
            lines += [f"![What {name} changes]({name}.svg)", ""]
    (folder / "index.md").write_text("\n".join(lines))


def meaning(op: Op) -> str:
    """First sentence of the docstring of an op."""
    return " ".join((inspect.getdoc(op.target) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def write_ops(path: Path) -> None:
    """A table of the ops that fxq knows."""
    rows = [f"| `{op.name}` | {meaning(op)} |" for op in sorted(OPS, key=lambda op: op.name)]
    head = ["# Ops", "", "The ops of the op table, by the names that `fxq.by_op` and patterns take.", ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, "| op | what it computes |", "|---|---|", *rows, ""]))


def main() -> None:
    """Write the pages into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    warnings.simplefilter("ignore", fxq.FxqWarning)
    write_passes(folder / "passes")
    write_ops(folder / "reference" / "ops.md")
    print(f"pages are in {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
