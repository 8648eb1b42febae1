"""Quantize two trained networks and show what happened: tables here, reports and pictures in build/demo/.

FSRCNN doubles the resolution of a photograph and has a PReLU after every convolution; DigitsNet is a small residual
classifier. Both are calibrated on training data and judged on data that neither training nor calibration has seen.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxq
from scripts.bench.rivals import saved
from scripts.bench.timing import float_against_int8, threads_set_to
from scripts.demo.data import Pair, bicubic, digits, held_out_pairs, psnr, training_pairs
from scripts.networks.demo import DigitsNet, load_demo_networks

OUT = Path(__file__).resolve().parents[2] / "build" / "demo"
PICTURED = "petals"
"""The held-out region that is shown as a picture."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        batches: calibration batches for each network.
        seconds: how long each latency is measured.
    """

    batches: int
    seconds: float


FULL, QUICK = Effort(batches=20, seconds=3.0), Effort(batches=4, seconds=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for reports and pictures (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="less calibration and shorter timing: for a first look")
    arguments = parser.parse_args()
    run(arguments.out, QUICK if arguments.quick else FULL, Console())


def run(out: Path, effort: Effort, console: Console) -> None:
    """The whole demo; reports and pictures go to `out`."""
    start = time.perf_counter()
    torch.manual_seed(0)
    fsrcnn, digits_net = load_demo_networks()
    with threads_set_to(1):  # as the latencies are measured: what pays as int8 depends on the number of threads
        show_fsrcnn(fsrcnn, out / "fsrcnn", effort, console)
        show_digits(digits_net, out / "digits", effort, console)
    console.rule(style="dim")
    console.print(
        f"Done in {time.perf_counter() - start:.0f} s. Reports and pictures are in [bold]{out}[/]:", soft_wrap=True
    )
    console.print("  <network>/report.html      every pass, quality and time: for a browser", markup=False)
    console.print("  <network>/NN-<pass>        the graph after each pass", markup=False)
    console.print("  <network>/NN-<pass>.diff   what the pass changed", markup=False)
    console.print("  fsrcnn/super-resolution.png   low resolution, bicubic, float, int8")
    if not has_dot():
        console.print(
            "Graphviz's [bold]dot[/] is not installed, so the graphs are .dot text and not pictures. To get pictures, "
            "install graphviz (apt-get, dnf or brew install graphviz) and run the demo again."
        )


# ---- the two networks


@torch.no_grad()
def show_fsrcnn(model: nn.Module, out: Path, effort: Effort, console: Console) -> None:
    """Super-resolution: PSNR on the held-out regions, latency on one of them."""
    console.rule("[bold]FSRCNN[/]: super-resolution ×2, a PReLU after every convolution")
    low = training_pairs().low
    held_out = held_out_pairs()
    patches = low[:: len(low) // (effort.batches * 16)].split(16)
    qmodel = quantize(model, "static", patches, held_out[PICTURED].low, effort, console)
    console.print(quality_of_pictures(model, qmodel, held_out))
    inputs = {f"{PICTURED} {shape_of(held_out[PICTURED].low)}": held_out[PICTURED].low}
    console.print(latencies(model, qmodel, inputs, effort), sizes(model, qmodel))
    draw_history(qmodel.history, out)
    qmodel.report(out / "report.html", example_inputs=held_out[PICTURED].low)
    super_resolution(model, qmodel, held_out[PICTURED]).save(out / "super-resolution.png")


@torch.no_grad()
def show_digits(model: DigitsNet, out: Path, effort: Effort, console: Console) -> None:
    """Classification: accuracy on the test split, latency for a batch and for a single digit."""
    console.rule("[bold]DigitsNet[/]: residual classifier of 8×8 digits")
    data = digits()
    batches = data.train_images.split(64)
    qmodel = quantize(model, "static", batches, batches[0], effort, console)
    table = Table("test digits", "float %", "int8 %", "loss, points", "same answer %", title="Accuracy")
    answers = {name: net(data.test_images).argmax(1) for name, net in (("float", model), ("int8", qmodel))}
    right = {name: percent(answer == data.test_labels) for name, answer in answers.items()}
    same = percent(answers["float"] == answers["int8"])
    loss = right["float"] - right["int8"]
    table.add_row(
        str(len(data.test_labels)), f"{right['float']:.2f}", f"{right['int8']:.2f}", f"{loss:+.2f}", f"{same:.2f}"
    )
    console.print(table)
    images = data.test_images
    inputs = {"batch of 64": images[:64], "batch of 1": images[:1]}
    console.print(latencies(model, qmodel, inputs, effort))
    console.print("(An 8×8 digit alone is little arithmetic: there the overhead of each call decides.)\n", style="dim")
    console.print(sizes(model, qmodel))
    print(qmodel.qparams(), end="\n\n")
    console.print(bias_as_integer(model, qmodel))
    draw_history(qmodel.history, out)
    qmodel.report(out / "report.html", example_inputs=images[:64])


def quantize(
    model: nn.Module,
    recipe: str,
    data: Sequence[Tensor],
    example: Tensor,
    effort: Effort,
    console: Console,
) -> fxq.results.QuantizedModel:
    """Calibrate on `data`, be fast at the size of `example`; print what every pass did and what became of every op."""
    batches = data[: effort.batches]
    start = time.perf_counter()
    qmodel = fxq.quantize(model, recipe, data=batches, example_inputs=example, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    console.print(
        f"Calibrated on {len(batches)} batches of {shape_of(batches[0])}, backend {qmodel.backend}: {seconds:.1f} s\n"
    )
    print(qmodel.history, qmodel.ledger, sep="\n\n", end="\n\n")
    return qmodel


# ---- tables


def quality_of_pictures(model: nn.Module, qmodel: nn.Module, pairs: Mapping[str, Pair]) -> Table:
    """PSNR against the original, region by region, and their mean."""
    table = Table("held-out region", "bicubic dB", "float dB", "int8 dB", "loss dB", title="Quality (PSNR)")
    rows = {
        name: [psnr(bicubic(low), high), psnr(model(low), high), psnr(qmodel(low), high)]
        for name, (low, high) in pairs.items()
    }
    rows["mean"] = [sum(column) / len(rows) for column in zip(*rows.values(), strict=True)]
    for name, (plain, before, after) in rows.items():
        if name == "mean":
            table.add_section()
        table.add_row(name, f"{plain:.2f}", f"{before:.2f}", f"{after:.2f}", f"{before - after:+.3f}")
    return table


def latencies(
    model: nn.Module, qmodel: fxq.results.QuantizedModel, inputs: Mapping[str, Tensor], effort: Effort
) -> Table:
    """Time of the float model (eager, channels-last) and of the int8 model, in turns on one thread."""
    table = Table("input", "float ms", "int8 ms", "int8 is", title="Latency (one thread; float: eager, channels-last)")
    for name, x in inputs.items():
        before, after = float_against_int8(model, qmodel, x, effort.seconds)
        times = before / after
        speed = f"[green]{times:.2f}× faster[/]" if times >= 1 else f"[yellow]{1 / times:.2f}× slower[/]"
        table.add_row(name, f"{1e3 * before:.2f}", f"{1e3 * after:.2f}", speed)
    return table


def sizes(model: nn.Module, qmodel: nn.Module) -> Table:
    """Bytes in memory, and of the state dict in a file."""
    table = Table("size", "float kB", "int8 kB", "int8 is", title="Size")
    rows = {
        "parameters and buffers": (fxq.results.nbytes(model), fxq.results.nbytes(qmodel)),
        "state dict in a file": (saved(model), saved(qmodel)),
    }
    for name, (before, after) in rows.items():
        table.add_row(name, f"{before / 1e3:.1f}", f"{after / 1e3:.1f}", f"{before / after:.1f}× smaller")
    return table


def bias_as_integer(model: DigitsNet, qmodel: fxq.results.QuantizedModel) -> Table:
    """How the float bias of the first convolution, its folded batch norm's, enters the int32 accumulator.

    `correct-bias` has fitted it to the data before: that is what the integer stands for.
    """
    table = Table("stem.0, channel 0", "number", title="How a float bias enters the int32 accumulator")
    layer, norm = qmodel.qparams().get("stem.0"), model.stem[1]
    bias = norm.bias - norm.running_mean * norm.weight / torch.sqrt(norm.running_var + norm.eps)
    table.add_row("float bias, batch norm folded", f"{float(bias[0]):.6f}")
    if layer is None or layer.bias is None or layer.bias_scale is None or layer.input_scale is None:
        table.add_row("the layer runs in float here, where that is faster", "")
        return table
    integer, step = int(layer.bias[0]), float(layer.bias_scale[0])
    kernel = next(node.target for node in qmodel.graph.nodes if node.name == layer.node)
    fitted = dict(qmodel.named_buffers()).get(f"{kernel}.bias")
    if fitted is not None:  # else the backend's kernels hold the integers alone
        table.add_row("b, as correct-bias fits it", f"{float(fitted[0]):.6f}")
    table.add_row("scale of the input s_x", f"{layer.input_scale:.6g}")
    table.add_row("scale of the weight s_w", f"{float(layer.weight_scale[0]):.6g}")
    table.add_row("a step of the accumulator s_x · s_w", f"{step:.6g}")
    table.add_row("integer bias: b / (s_x · s_w), rounded", str(integer))
    table.add_row("what that stands for", f"{integer * step:.6f}")
    return table


def percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def shape_of(x: Tensor) -> str:
    return "×".join(map(str, x.shape))


# ---- pictures


def draw_history(history: fxq.results.History, out: Path) -> None:
    """One picture of the graph after each pass, and one of what the pass changed; older ones are removed first."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("[0-9][0-9]-*.svg"), *out.glob("[0-9][0-9]-*.dot")):
        old.unlink()
    ending = "svg" if has_dot() else "dot"
    for i, snapshot in enumerate(history):
        snapshot.render(out / f"{i + 1:02}-{snapshot.name}.{ending}")
        if i > 0:
            fxq.diff(history[i - 1], snapshot).render(out / f"{i + 1:02}-{snapshot.name}.diff.{ending}")


def has_dot() -> bool:
    return shutil.which("dot") is not None


def super_resolution(model: nn.Module, qmodel: nn.Module, pair: Pair) -> Image.Image:
    """Low resolution (its pixels as squares), bicubic, float and int8, side by side at twice their size."""
    low, high = pair
    times = high.shape[2] // low.shape[2]
    squares = low.repeat_interleave(times, 2).repeat_interleave(times, 3)
    panels = {"low resolution": squares, "bicubic": bicubic(low), "float": model(low), "int8": qmodel(low)}
    height, width, gap, line = 2 * high.shape[2], 2 * high.shape[3], 16, 20
    sheet = Image.new("L", (len(panels) * (width + gap) - gap, height + line), "white")
    for i, (name, panel) in enumerate(panels.items()):
        pixels = (panel[0, 0].clamp(0, 1) * 255).round().to(torch.uint8)
        left = i * (width + gap)
        sheet.paste(Image.fromarray(np.asarray(pixels)).resize((width, height), Image.Resampling.NEAREST), (left, 0))
        quality = "" if panel is squares else f", {psnr(panel, high):.2f} dB"
        ImageDraw.Draw(sheet).text((left, height + 4), name + quality, fill="black")
    return sheet


if __name__ == "__main__":
    main()
