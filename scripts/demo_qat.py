"""Train with fake quantization: what it wins back of what quantization after training loses, at 8 and at 4 bits.

    python scripts/demo_qat.py                           all networks, three seeds each
    python scripts/demo_qat.py --only fashion --seeds 1  some
    python scripts/demo_qat.py --folder out              where pictures, reports and data go

Each network is trained in float. Then, from these weights: int8 and 4-bit weights after training (with all that fxq has
for it: rounding that is learned, corrected biases), and the same by training on with fake quantizers. "trained on" is
the float network with the same further training. Numbers are of pictures that neither training nor any choice has seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from demo_data import digits, held_out_pairs, psnr, training_pairs
from demo_qat_data import Part, Split, fashion
from networks import DigitsNet, load_demo_networks
from tabulate import tabulate
from torch import Tensor, nn

import fxq

matplotlib.use("svg")
from matplotlib import pyplot

BITS4 = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
CALIBRATION = 512
"""Pictures that quantization after training looks at."""


class ClothesNet(nn.Module):
    """Classifier of depthwise separable convolutions: (N, 1, 28, 28) in [0, 1] to (N, 10) logits.

    Source: Howard et al. 2017, "MobileNets", section 3.1 and table 1, at the size of Fashion-MNIST.
    """

    BLOCKS = ((16, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1))

    def __init__(self) -> None:
        super().__init__()
        layers = [*_conv(1, 16, 3)]
        for inputs, outputs, stride in self.BLOCKS:
            layers += [*_conv(inputs, inputs, 3, stride, inputs), *_conv(inputs, outputs, 1)]
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.dropout(self.features(x).mean((2, 3))))
        return y


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


@dataclass(frozen=True)
class Task:
    """A network, and how it is trained and judged.

    Attributes:
        make: the network, with first weights; already trained where `epochs` is 0.
        train: pictures to train with, and what is to come out.
        score: of a network, on pictures that nothing has seen; larger is better.
        chooses: the same on others, for the curves.
        unit: of the score.
        epochs: passes over the pictures in float, and then with fake quantizers.
        rates: the largest learning rates of both.
        batch: pictures in a step.
    """

    make: Callable[[], nn.Module]
    train: Part
    score: Callable[[nn.Module], float]
    chooses: Callable[[nn.Module], float]
    loss: Callable[[Tensor, Tensor], Tensor]
    unit: str
    epochs: tuple[int, int]
    rates: tuple[float, float]
    batch: int
    agreement: Callable[[nn.Module, nn.Module], float] | None = None


@dataclass
class Result:
    """What one seed gave.

    Attributes:
        scores: by contender.
        curves: by contender, the score on the pictures for choices behind every pass over the data.
        same: the share of the pictures on which the model that was trained and the converted one have the same class.
    """

    scores: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    same: dict[str, float] = field(default_factory=dict)


def accuracy(part: Part) -> Callable[[nn.Module], float]:
    """The share of the pictures that a network has right, in percent."""

    def of(network: nn.Module) -> float:
        return 100 * float((predicted(network, part.images) == part.labels).float().mean())

    return of


def predicted(network: nn.Module, images: Tensor) -> Tensor:
    """The class of each picture."""
    mode = network.training
    with torch.no_grad():
        found = torch.cat([network.eval()(some).argmax(1) for some in images.split(500)])
    network.train(mode)
    return found


def sharpness(network: nn.Module) -> float:
    """The mean PSNR of the held-out regions of the photographs, dB."""
    mode = network.training
    with torch.no_grad():
        found = statistics.mean(psnr(network.eval()(pair.low), pair.high) for pair in held_out_pairs().values())
    network.train(mode)
    return found


def tasks(folder: Path, only: list[str]) -> Iterator[tuple[str, Task]]:
    """The networks by name."""
    if "fashion" in only:
        split = fashion(folder)
        yield "fashion", _classifier(ClothesNet, split, (8, 4), (1e-2, 2e-3), 128)
    if "digits" in only:
        data = digits()
        some = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(0))
        train, choose = some[200:], some[:200]
        parts = (Part(data.train_images[chosen], data.train_labels[chosen]) for chosen in (train, choose))
        split = Split(*parts, Part(data.test_images, data.test_labels))
        yield "digits", _classifier(DigitsNet, split, (30, 20), (3e-3, 1e-3), 64)
    if "fsrcnn" in only:
        pairs = training_pairs()
        yield (
            "fsrcnn",
            Task(
                lambda: load_demo_networks()[0],
                Part(pairs.low, pairs.high),
                sharpness,
                sharpness,
                F.mse_loss,
                "dB",
                (0, 4),
                (0.0, 5e-4),
                16,
            ),
        )


def _classifier(
    make: Callable[[], nn.Module], split: Split, epochs: tuple[int, int], rates: tuple[float, float], batch: int
) -> Task:
    def same(a: nn.Module, b: nn.Module) -> float:
        return 100 * float((predicted(a, split.test.images) == predicted(b, split.test.images)).float().mean())

    return Task(
        make,
        split.train,
        accuracy(split.test),
        accuracy(split.validation),
        F.cross_entropy,
        "%",
        epochs,
        rates,
        batch,
        same,
    )


def train(network: nn.Module, task: Task, epochs: int, rate: float, seed: int) -> list[float]:
    """Train in place: AdamW, one-cycle learning rate. The score on the pictures for choices behind every epoch."""
    torch.manual_seed(seed)
    images, wanted = task.train.images, task.train.labels
    steps = len(images) // task.batch
    scales = [p for name, p in network.named_parameters() if name.endswith("scale")]
    others = [p for name, p in network.named_parameters() if not name.endswith("scale")]
    groups = [{"params": others}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=max(epochs * steps, 1))
    curve = []
    for _ in range(epochs):
        network.train()
        for chosen in torch.randperm(len(images)).split(task.batch)[:steps]:
            optimizer.zero_grad()
            task.loss(network(images[chosen]), wanted[chosen]).backward()
            optimizer.step()
            schedule.step()
        curve.append(task.chooses(network))
    network.eval()
    return curve


def one_seed(name: str, task: Task, seed: int, folder: Path) -> Result:
    """Train and quantize one network."""
    found = Result()
    torch.manual_seed(seed)
    network = task.make().eval()
    example = task.train.images[:64]
    if task.epochs[0]:
        train(network, task, task.epochs[0], task.rates[0], seed)
    found.scores["float"] = task.score(network)
    further, steps = copy.deepcopy(network), task.epochs[1] * (len(task.train.images) // task.batch)
    found.curves["float, trained on"] = train(further, task, task.epochs[1], task.rates[1], seed)
    found.scores["float, trained on"] = task.score(further)
    data = list(task.train.images[:CALIBRATION].split(32))
    for bits, weight in ((8, fxq.quant.spec.WEIGHT), (4, BITS4)):
        for how, recipe in after_training(bits, weight).items():
            found.scores[how] = task.score(fxq.quantize(network, recipe, data=data, progress=False))
        recipe = fxq.Recipe.qat(weight=weight, learned=bits == 4, freeze_norms_after=2 * steps // 3)
        trained = fxq.prepare(network, recipe, example)
        how = f"{bits} bits, trained"
        found.curves[how] = train(trained, task, task.epochs[1], task.rates[1], seed)
        converted = fxq.convert(trained)
        found.scores[how] = task.score(converted)
        if task.agreement is not None:
            found.same[how] = task.agreement(trained, converted)
        converted.report(folder / f"{name}_{bits}bits_seed{seed}.html")
    return found


def after_training(bits: int, weight: fxq.TensorSpec) -> dict[str, fxq.Recipe]:
    """Recipes of quantization after training."""
    plain = fxq.Recipe.static(weight=weight, optimize="coverage")
    if bits == 8:
        return {"8 bits, after training": plain}
    rounding = plain.insert_pass(fxq.passes.AdaRound(), before="correct-bias")
    return {"4 bits, after training": plain, "4 bits, after training, adaround": rounding}


def table(task: Task, results: list[Result]) -> str:
    """Mean and extremes of every contender, and what of the loss at 4 bits is won back."""
    rows = []
    for how in results[0].scores:
        scores = [result.scores[how] for result in results]
        same = [result.same[how] for result in results if how in result.same]
        told = f"{statistics.mean(same):.2f} %" if same else ""
        spread = f"{min(scores):.2f} to {max(scores):.2f}"
        rows.append((how, f"{statistics.mean(scores):.2f} {task.unit}", spread, told))
    return tabulate(rows, ("", "mean", "seeds", "same class as what was trained"), tablefmt="github")


def won_back(results: list[Result]) -> str:
    """The share of what 4 bits lose after training, at best, that training wins back."""
    mean = {how: statistics.mean(r.scores[how] for r in results) for how in results[0].scores}
    after = max(score for how, score in mean.items() if how.startswith("4 bits, after"))
    if after >= mean["float"]:
        return "4 bits lose nothing after training: there is nothing to win back"
    share = (mean["4 bits, trained"] - after) / (mean["float"] - after)
    return f"of what 4 bits lose after training, training wins back {100 * share:.0f} %"


def draw(name: str, task: Task, results: list[Result], path: Path) -> None:
    """The curves of all seeds."""
    colours = {"float, trained on": "#6b7280", "8 bits, trained": "#0969da", "4 bits, trained": "#bc4c00"}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for how, colour in colours.items():
        for i, result in enumerate(results):
            epochs = range(1, len(result.curves[how]) + 1)
            axes.plot(epochs, result.curves[how], color=colour, marker="o", markersize=3, label=how if not i else None)
    for how, style in (("float", "-"), ("4 bits, after training, adaround", ":")):
        level = statistics.mean(result.scores[how] for result in results)
        axes.axhline(level, color="#1f2328", linestyle=style, linewidth=1, label=f"{how} (on the last part)")
    axes.set(title=name, xlabel="passes over the data, from the float network's weights", ylabel=task.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Train, quantize, print tables, draw curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=("fashion", "digits", "fsrcnn"), default=["fashion", "digits", "fsrcnn"]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("demo_qat"))
    given = parser.parse_args()
    warnings.simplefilter("ignore", fxq.FxqWarning)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, task in tasks(given.folder, given.only):
        results: list[Result] = []
        for seed in range(given.seeds):
            start = time.perf_counter()
            results.append(one_seed(name, task, seed, given.folder))
            print(f"{name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
            (given.folder / f"{name}.json").write_text(json.dumps([asdict(r) for r in results], indent=1))
        draw(name, task, results, given.folder / f"{name}.svg")
        print(table(task, results))
        print(f"{name}: {won_back(results)}\n")
    print(f"curves, reports and numbers are in {given.folder}/")


if __name__ == "__main__":
    main()
