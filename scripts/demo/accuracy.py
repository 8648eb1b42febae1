"""Quantize trained networks with the default recipe, and show what float and int8 reach: tables, reports, pictures.

    python -m scripts.demo.accuracy --install build/accuracy   fetch networks and pictures into a folder, then run
    python -m scripts.demo.accuracy --folder build/accuracy    run with what was fetched
    python -m scripts.demo.accuracy --only digits --only text  some of the networks; these two need nothing fetched
    python -m scripts.demo.accuracy --quick                    fewer pictures, less training: for a first look

EfficientNet-Lite0 sees what is in a photograph, MTCNN finds faces, DigitsNet reads digits, FSRCNN doubles a picture's
resolution, and a small transformer, trained here, guesses the next character of a text. Each is judged on data that it
was not calibrated on: by its accuracy where there are labels, and by its agreement with the float network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

import fxq
from scripts.bench.accuracy_data import install, scenes
from scripts.bench.accuracy_faces import detect
from scripts.bench.accuracy_subjects import Subject, digit, faces, imagenet, resolution
from scripts.bench.sequence_recipes import on_integers
from scripts.bench.timing import threads_set_to
from scripts.demo.accuracy_text import text
from scripts.demo.data import held_out_pairs
from scripts.demo.quickstart import PICTURED, draw_history, super_resolution
from scripts.demo.sequence_data import Missing, fetched
from scripts.demo.sequence_subjects import Calls

OUT = Path(__file__).resolve().parents[2] / "build" / "demo_accuracy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="fetch networks and pictures into FOLDER first")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where they were fetched before")
    parser.add_argument("--only", choices=NETWORKS, action="append", help=f"one of {', '.join(NETWORKS)}")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for reports and pictures (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer pictures, less training")
    arguments = parser.parse_args()
    fetched(arguments, install)
    console = Console()
    with threads_set_to(1), torch.no_grad():
        for name in arguments.only or NETWORKS:
            try:
                subject = NETWORKS[name](arguments.quick)
            except Missing as missing:
                print(f"{name}: {missing}", file=sys.stderr)
                continue
            show(name, subject, arguments.out / name, console)
    console.print(f"Reports and pictures are in [bold]{arguments.out}[/].", soft_wrap=True)


def show(name: str, subject: Subject, out: Path, console: Console) -> None:
    """Quantize a network; print what became of it and how good it is, write a report of each part and pictures."""
    console.rule(f"[bold]{subject.name}[/]")
    calls = [part.model for part in subject.parts]
    with console.status("float"):
        expected = subject.outputs(calls)
    qmodels = []
    for part in subject.parts:
        start = time.perf_counter()
        qmodel = fxq.quantize(part.model, data=part.data, example_inputs=part.example)
        seconds = time.perf_counter() - start
        kind = type(part.model).__name__
        console.print(f"{kind}, backend {qmodel.backend}: {seconds:.1f} s to quantize; {on_integers(qmodel)}")
        folder = out / kind if len(subject.parts) > 1 else out
        draw_history(qmodel.history, folder)
        qmodel.report(folder / "report.html", example_inputs=part.example)
        qmodels.append(qmodel)
    with console.status("int8"):
        outputs = subject.outputs(qmodels)
    console.print(quality(subject.judge(expected, expected), subject.judge(expected, outputs)))
    if name in PICTURES:
        PICTURES[name](calls, qmodels).save(out / "picture.png")


def quality(before: dict[str, float], after: dict[str, float]) -> Table:
    """Each quantity of the float network and of the quantized one."""
    table = Table("quantity", "float", "int8")
    for kind, value in after.items():
        table.add_row(kind, f"{before[kind]:.6g}", f"{value:.6g}")
    return table


# ---- pictures


def framed_faces(calls: Calls, quantized_calls: Calls) -> Image.Image:
    """A picture with the faces that float finds in wide green frames, and those of int8 in narrow red ones."""
    (picture,) = scenes(("china.jpg",), first=12, count=1)
    sheet = Image.fromarray(picture.permute(1, 2, 0).to(torch.uint8).numpy())
    for networks, colour, width in ((calls, "lime", 5), (quantized_calls, "red", 2)):
        for box in detect(networks, picture).tolist():
            ImageDraw.Draw(sheet).rectangle(box, outline=colour, width=width)
    return sheet


def doubled(calls: Calls, quantized_calls: Calls) -> Image.Image:
    """A region of a photograph in low resolution, and doubled by bicubic interpolation, in float and in int8."""
    return super_resolution(calls[0], quantized_calls[0], held_out_pairs()[PICTURED])  # type: ignore[arg-type]


NETWORKS: dict[str, Callable[[bool], Subject]] = {
    "imagenet": lambda quick: imagenet([], 28 if quick else 280),
    "faces": lambda quick: faces([], 0),
    "digits": lambda quick: digit([], 0),
    "resolution": lambda quick: resolution([], 0),
    "text": lambda quick: text(100 if quick else 600),
}
"""By name; told whether little is to be done."""
PICTURES = {"faces": framed_faces, "resolution": doubled}

if __name__ == "__main__":
    main()
