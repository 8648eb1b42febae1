"""Train with fake quantization: what it wins back of what quantization after training loses, at 8 and at 4 bits.

    python -m scripts.demo.qat                           all networks, three seeds each
    python -m scripts.demo.qat --only fashion --seeds 1  some
    python -m scripts.demo.qat --folder out              where pictures, reports and data go

Each network is trained in float, in two rounds. Quantization after training takes what that gives, and has all that
fxq has for it (rounding that is learned, corrected biases). Training with fake quantizers goes on from the same one;
so does training in float, for as long, to compare. W4A8 is weights of 4 bits and activations of 8. Numbers are of
pictures that neither training nor any choice has seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxq
from scripts.demo.data import digits, held_out_pairs, psnr, training_pairs
from scripts.demo.qat_data import Part, Split, fashion
from scripts.networks.demo import DigitsNet, load_demo_networks

matplotlib.use("svg")
from matplotlib import pyplot

BITS4 = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
KINDS = {
    "int8": (fxq.TensorSpec(), replace(BITS4, bits=8)),
    "W4A8": (fxq.TensorSpec(), BITS4),
    "W4A4": (fxq.TensorSpec(bits=4), BITS4),
}
"""Specs of activations and of weights."""
CALIBRATION = 512
"""Pictures that quantization after training looks at."""


class ClothesNet(nn.Module):
    """Classifier of depthwise separable convolutions: (N, 1, 28, 28) in [0, 1] to (N, 10) logits.

    Source: Howard et al. 2017, "MobileNets", section 3.1 and table 1, at the size of Fashion-MNIST.
    """

    BLOCKS = ((8, 16, 2), (16, 32, 1), (32, 32, 2), (32, 64, 1))

    def __init__(self) -> None:
        super().__init__()
        layers = [*_conv(1, 8, 3)]
        for inputs, outputs, stride in self.BLOCKS:
            layers += [*_conv(inputs, inputs, 3, stride, inputs), *_conv(inputs, outputs, 1)]
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(64, 10)

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
        epochs: passes over the pictures in both rounds in float, and then with fake quantizers.
        rates: the largest learning rates of the three.
        batch: pictures in a step.
        changed: a batch as it is shown in training, such as moved by some pixels.
        agreement: the share of pictures of which two networks say the same, in percent.
    """

    make: Callable[[], nn.Module]
    train: Part
    score: Callable[[nn.Module], float]
    chooses: Callable[[nn.Module], float]
    loss: Callable[[Tensor, Tensor], Tensor]
    unit: str
    epochs: tuple[int, int, int]
    rates: tuple[float, float, float]
    batch: int
    changed: Callable[[Tensor], Tensor] = lambda images: images
    agreement: Callable[[nn.Module, nn.Module], float] | None = None


@dataclass
class Result:
    """Result of one seed.

    Attributes:
        scores: by contender.
        curves: by contender, the score on the pictures for choices after every pass over the data.
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
        classes = torch.cat([network.eval()(some).argmax(1) for some in images.split(500)])
    network.train(mode)
    return classes


def sharpness(network: nn.Module) -> float:
    """The mean PSNR of the held-out regions of the photographs, dB."""
    mode = network.training
    with torch.no_grad():
        score = statistics.mean(psnr(network.eval()(pair.low), pair.high) for pair in held_out_pairs().values())
    network.train(mode)
    return score


def tasks(folder: Path, only: list[str]) -> Iterator[tuple[str, Task]]:
    """The networks by name."""
    if "fashion" in only:
        split = fashion(folder)
        yield "fashion", _classifier(ClothesNet, split, (12, 12, 24), (1e-2, 2e-3, 5e-4), 128, moved)
    if "digits" in only:
        data = digits()
        some = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(0))
        train, choose = some[200:], some[:200]
        parts = (Part(data.train_images[chosen], data.train_labels[chosen]) for chosen in (train, choose))
        split = Split(*parts, Part(data.test_images, data.test_labels))
        yield "digits", _classifier(DigitsNet, split, (30, 20, 20), (3e-3, 1e-3, 1e-3), 64, noisy)
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
                (0, 0, 16),
                (0.0, 0.0, 2e-3),
                16,
            ),
        )


def _classifier(
    make: Callable[[], nn.Module],
    split: Split,
    epochs: tuple[int, int, int],
    rates: tuple[float, float, float],
    batch: int,
    changed: Callable[[Tensor], Tensor],
) -> Task:
    def same(a: nn.Module, b: nn.Module) -> float:
        return 100 * float((predicted(a, split.test.images) == predicted(b, split.test.images)).float().mean())

    scores = accuracy(split.test), accuracy(split.validation)
    return Task(make, split.train, *scores, F.cross_entropy, "%", epochs, rates, batch, changed, same)


def moved(images: Tensor) -> Tensor:
    """A batch, moved by up to two pixels and perhaps flipped, all of it alike."""
    down, right, flip = (int(number) for number in torch.randint(0, 5, (3,)))
    padded = F.pad(images, (2, 2, 2, 2))[..., down : down + images.shape[2], right : right + images.shape[3]]
    return padded.flip(3) if flip % 2 else padded


def noisy(images: Tensor) -> Tensor:
    """A batch with light noise."""
    return images + 0.05 * torch.randn(images.shape)


def train(network: nn.Module, task: Task, epochs: int, rate: float, seed: int) -> list[float]:
    """Train in place: AdamW, one-cycle learning rate. The score on the pictures for choices after every epoch."""
    torch.manual_seed(seed)
    images, wanted = task.train.images, task.train.labels
    steps = len(images) // task.batch
    factors = [p for name, p in network.named_parameters() if name.endswith("factor")]
    others = [p for name, p in network.named_parameters() if not name.endswith("factor")]
    groups = [{"params": others}, {"params": factors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=1e-3)
    total = max(epochs * steps, 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total, pct_start=0.1, cycle_momentum=False)
    curve = []
    for _ in range(epochs):
        network.train()
        for chosen in torch.randperm(len(images)).split(task.batch)[:steps]:
            optimizer.zero_grad()
            task.loss(network(task.changed(images[chosen])), wanted[chosen]).backward()
            optimizer.step()
            schedule.step()
        curve.append(task.chooses(network))
    network.eval()
    return curve


def one_seed(name: str, task: Task, seed: int, folder: Path, kinds: list[str]) -> Result:
    """Train and quantize one network."""
    result = Result()
    torch.manual_seed(seed)
    network, steps = task.make().eval(), task.epochs[2] * (len(task.train.images) // task.batch)
    rounds = zip(task.epochs[:2], task.rates[:2], strict=True)
    result.curves["float"] = [
        score for epochs, rate in rounds if epochs for score in train(network, task, epochs, rate, seed)
    ]
    result.scores["float"] = task.score(network)
    further = copy.deepcopy(network)
    train(further, task, task.epochs[2], task.rates[2], seed)
    result.scores["float, trained on"] = task.score(further)
    data = list(task.train.images[:CALIBRATION].split(32))
    for kind in kinds:
        activation, weight = KINDS[kind]
        plain = fxq.Recipe.static(activation=activation, weight=weight, optimize="coverage")
        result.scores[f"{kind} after training"] = task.score(fxq.quantize(network, plain, data=data, progress=False))
        if weight.bits < 8:
            rounding = plain.insert_pass(fxq.passes.AdaRound(), before="correct-bias")
            quantized = fxq.quantize(network, rounding, data=data, progress=False)
            result.scores[f"{kind} after training, adaround"] = task.score(quantized)
        specs = {"activation": replace(activation, observer="moving_average"), "weight": weight}
        few = weight.bits < 8
        frozen = {"freeze_norms_after": 2 * steps // 3, "freeze_weights_over": steps if few else 0}
        recipe = fxq.Recipe.qat(**specs, learned=few, **frozen)
        trained = fxq.prepare(network, recipe, example_inputs=task.train.images[:256])
        result.curves[f"{kind} trained"] = train(trained, task, task.epochs[2], task.rates[2], seed)
        converted = fxq.convert(trained)
        result.scores[f"{kind} trained"] = task.score(converted)
        if task.agreement is not None:
            result.same[f"{kind} trained"] = task.agreement(trained, converted)
        converted.report(folder / f"{name}_{kind}_seed{seed}.html")
    return result


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


def won_back(results: list[Result]) -> Iterator[str]:
    """The share of what each kind of integers loses after training, at best, that training wins back."""
    mean = {how: statistics.mean(r.scores[how] for r in results) for how in results[0].scores}
    for kind in (kind for kind in KINDS if f"{kind} trained" in mean):
        after = max(score for how, score in mean.items() if how.startswith(f"{kind} after"))
        lost, left = mean["float"] - after, mean["float"] - mean[f"{kind} trained"]
        share = f": {100 * (1 - left / lost):.0f} % won back" if lost > max(left, 0) else ""
        yield f"{kind}: {lost:.2f} lost after training, {left:.2f} when it is trained{share}"


def draw(name: str, task: Task, results: list[Result], path: Path) -> None:
    """The curves of all seeds."""
    colours = {"float": "#6b7280", "int8 trained": "#0969da", "W4A8 trained": "#bc4c00", "W4A4 trained": "#8250df"}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for how, colour in colours.items():
        if how not in results[0].curves:
            continue
        for i, result in enumerate(results):
            before = 0 if how == "float" else len(result.curves["float"])
            epochs = range(before + 1, before + len(result.curves[how]) + 1)
            axes.plot(epochs, result.curves[how], color=colour, marker="o", markersize=3, label=how if not i else None)
    axes.set(
        title=name,
        xlabel="passes over the data; with fake quantizers after those in float",
        ylabel=f"{task.unit}, on the pictures for choices",
    )
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
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one pass over the data: to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("demo_qat"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", fxq.FxqWarning)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, task in tasks(arguments.folder, arguments.only):
        if arguments.quick:
            task = replace(task, epochs=(min(task.epochs[0], 1), 0, 1))
        results: list[Result] = []
        for seed in range(arguments.seeds):
            start = time.perf_counter()
            results.append(one_seed(name, task, seed, arguments.folder, arguments.kinds))
            print(f"{name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
            (arguments.folder / f"{name}.json").write_text(json.dumps([asdict(r) for r in results], indent=1))
        draw(name, task, results, arguments.folder / f"{name}.svg")
        print(table(task, results))
        print("\n".join(won_back(results)), "\n")
    print(f"curves, reports and numbers are in {arguments.folder}/")


if __name__ == "__main__":
    main()
