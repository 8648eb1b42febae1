"""Quantize trained networks of sequences, and compare each with its float form: one table.

    python -m scripts.demo.sequence --install build/sequence    fetch networks and data into a folder, then run
    python -m scripts.demo.sequence                             run with what is installed
    python -m scripts.demo.sequence --only speech --only words  some of the networks

MiniLM encodes sentences (attention), Resemblyzer's encoder voices (LSTM), g2p-en spells out how words are spoken (GRU).
None was trained here, and no label is used: what is measured is agreement with the float network, on data that was not
used to calibrate. Beside fxq stand torch.ao, torchao and ONNX Runtime where they are installed.

Times are for one thread and a batch of one: what the thread had of the CPU, the least of interleaved runs, so that the
ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from tabulate import tabulate

import fxq
from scripts.bench.rivals import Made, Make, restored_engine, rivals, saved
from scripts.bench.sequence_recipes import RECIPES, on_integers
from scripts.bench.timing import interleaved, threads_set_to
from scripts.demo.sequence_data import Missing, fetched, install
from scripts.demo.sequence_subjects import SUBJECTS, Part, Subject

FLOAT_QUANTIZER = "float"
GPTQ = fxq.passes.Gptq(samples=512)
WITH_DATA: dict[str, Callable[[], fxq.Recipe]] = {
    "fxq dynamic, data": lambda: fxq.Recipe.dynamic(),
    "fxq dynamic, gptq": lambda: fxq.Recipe.dynamic().insert_pass(GPTQ, after="smooth"),
    "fxq static, gptq": lambda: fxq.Recipe.static().insert_pass(GPTQ, before="correct-bias"),
    "fxq int4 weights, gptq": lambda: fxq.Recipe.weight_only(bits=4).insert_pass(GPTQ, after="smooth"),
}
"""Given data, whatever the recipe: inputs are smoothed on it, and with gptq the integers of weights are chosen."""


@dataclass(frozen=True)
class Row:
    """Result of one quantizer on one network.

    Attributes:
        network, quantizer: their names.
        agreement: with the float network, by kind; empty where it failed.
        nbytes: size in a file.
        calls: the quantized parts.
        note: how much runs on integers, or why it failed.
        is_float: whether nothing was found to be faster on integers, so that it agrees for free.
    """

    network: str
    quantizer: str
    agreement: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    calls: tuple[Callable[..., object], ...] = ()
    note: str = ""
    is_float: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--install", type=Path, metavar="FOLDER", help="fetch networks, tools and data into FOLDER first"
    )
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where they were fetched before")
    parser.add_argument("--only", choices=SUBJECTS, action="append", help=f"one of {', '.join(SUBJECTS)}")
    parser.add_argument(
        "--quantizer", action="append", metavar="NAME", help="what its name starts with: 'fxq', 'torch'"
    )
    parser.add_argument(
        "--coverage", action="store_true", help="all that can runs on integers, also where float is faster"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="how long each network is timed (default %(default)s)"
    )
    parser.add_argument(
        "--count", type=int, default=500, help="sentences, prompts, words to judge (default %(default)s)"
    )
    arguments = parser.parse_args()
    folders = fetched(arguments, install)
    rows = []
    with threads_set_to(1), torch.no_grad(), restored_engine():
        for name in arguments.only or SUBJECTS:
            try:
                subject = SUBJECTS[name](folders, arguments.count)
            except Missing as missing:
                print(f"{name}: {missing}", file=sys.stderr)
                continue
            wanted = tuple(arguments.quantizer or ("",))
            makers = quantizers(arguments.coverage)
            makes = {k: make for k, make in makers.items() if k.startswith(wanted)}
            rows += list(measured(subject, makes, arguments.seconds))
    print(tabulate(rows, headers=HEADERS, floatfmt=".2f"))


def quantizers(coverage: bool) -> dict[str, Callable[[Part], tuple[Made, str]]]:
    """Every way to quantize a part of a network, by name."""
    own = {name: by_fxq(recipe, coverage, name in WITH_DATA) for name, recipe in (RECIPES | WITH_DATA).items()}
    return own | {name: by_rival(make) for name, make in rivals().items()}


def by_fxq(recipe: Callable[[], fxq.Recipe], coverage: bool, with_data: bool) -> Callable[[Part], tuple[Made, str]]:
    def make(part: Part) -> tuple[Made, str]:
        chosen = recipe().with_optimize("coverage" if coverage else "speed").with_min_sqnr(None)
        data = part.data if with_data or chosen.preset == "static" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxq.FxqWarning)  # what is slower on integers stays in float
            qmodel = fxq.quantize(part.model, chosen, data=data, example_inputs=part.example, progress=False)
        return Made(qmodel, saved(qmodel), qmodel.ledger.coverage), on_integers(qmodel)

    return make


def by_rival(make: Make) -> Callable[[Part], tuple[Made, str]]:
    return lambda part: (make(part.model, part.example), "")


HEADERS = ("network", "quantizer", "agreement with float", "goal", "MB", "ms", "times faster", "")


def measured(
    subject: Subject, makes: dict[str, Callable[[Part], tuple[Made, str]]], seconds: float
) -> Iterator[tuple[object, ...]]:
    """The table's rows for one network: float first."""
    models = tuple(part.model for part in subject.parts)
    expected = subject.outputs(models)
    rows = [Row(subject.name, FLOAT_QUANTIZER, nbytes=sum(map(saved, models)), calls=models)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, make in progress.track(list(makes.items()), description=subject.name):
            rows.append(judged(subject, name, make, expected))
    runs = {row.quantizer: (lambda calls=row.calls: subject.timed(calls)) for row in rows if row.calls}  # type: ignore[misc]
    times = interleaved(runs, seconds * len(runs), statistic=min, clock=time.thread_time)
    for row in rows:
        taken = times.get(row.quantizer)
        speed = (1e3 * taken, times[FLOAT_QUANTIZER] / taken) if taken else ("", "")
        size = row.nbytes / 1e6 if row.nbytes else ""
        yield row.network, row.quantizer, shown(row.agreement), goals(subject, row), size, *speed, row.note


def judged(subject: Subject, name: str, make: Callable[[Part], tuple[Made, str]], expected: object) -> Row:
    """Quantize a network and judge the result; a failure is a result, too."""
    try:
        quantized = [make(part) for part in subject.parts]
        calls = tuple(model.call for model, _ in quantized)
        agreement = subject.agreement(expected, subject.outputs(calls))
    except Exception as error:  # it fails in many ways; each is a result
        return Row(subject.name, name, note=f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    note = "; ".join(note for _, note in quantized if note)
    is_float = all(model.macs == 0 for model, _ in quantized)
    return Row(subject.name, name, agreement, sum(model.nbytes for model, _ in quantized), calls, note, is_float)


def shown(agreement: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.4f}" for kind, value in agreement.items())


def goals(subject: Subject, row: Row) -> str:
    """The least values that fxq is to reach, and whether it does."""
    wanted = subject.goals.get(row.quantizer, {})
    missed = [kind for kind, least in wanted.items() if not row.agreement.get(kind, 0.0) >= least]
    text = ", ".join(f"{kind} ≥ {least:g}" for kind, least in wanted.items())
    met = "met, in float" if row.is_float else "met"
    return f"{text}: {'MISSED' if missed else met}" if wanted else ""


if __name__ == "__main__":
    main()
