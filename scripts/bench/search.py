"""Results and cost of `fxq.search` on EfficientNet-Lite0: layers in float, candidates, milliseconds.

    python -m scripts.bench.search --install build/accuracy    fetch the network and pictures, then run: half an hour
    python -m scripts.bench.search --folder build/accuracy     run with what was fetched
    python -m scripts.bench.search --drop 2 --crops 100        a lower target, judged on fewer crops: quicker

The search asks for the same top class as float on all crops but so many points. What it finds is judged on crops that
neither calibration nor the search has seen, in exact arithmetic; the times are of this CPU's kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxq
from scripts.bench.accuracy_data import PHOTOGRAPHS, crops_of, efficientnet_lite, install
from scripts.bench.accuracy_subjects import agreement
from scripts.bench.timing import interleaved, threads_set_to
from scripts.demo.sequence_data import fetched

OUT = Path(__file__).resolve().parents[2] / "build" / "bench_search"
HEADERS = ("", "layers in float", "agreement", "SQNR", "batch 1")


class Agreement:
    """How often the top class of a model is that of the float model, in percent: a metric for `fxq.search`."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.batches = images.split(25)
        self.classes = torch.cat([logits.argmax(1) for logits in self.logits(model)])

    def __call__(self, model: nn.Module) -> float:
        classes = torch.cat([logits.argmax(1) for logits in self.logits(model)])
        return 100 * float((classes == self.classes).double().mean())

    def logits(self, model: nn.Module) -> list[Tensor]:
        """Logits of a model for each batch."""
        with torch.no_grad():
            return [model(batch) for batch in self.batches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="fetch the network and pictures first")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where they were fetched before")
    parser.add_argument("--drop", type=float, default=1.0, help="points of agreement that may be lost (%(default)s)")
    parser.add_argument("--crops", type=int, default=250, help="crops that candidates are judged on (%(default)s)")
    parser.add_argument("--fresh", type=int, default=1000, help="crops that the result is judged on (%(default)s)")
    arguments = parser.parse_args()
    fetched(arguments, install)
    model = efficientnet_lite()
    data = crops_of(PHOTOGRAPHS, 112, "calibration").split(8)
    start = time.perf_counter()
    with threads_set_to(1):
        metric = Agreement(model, crops_of(PHOTOGRAPHS, arguments.crops, "search"))
        result = fxq.search(model, "static", data, metric, target=arguments.drop)
    print(result)
    print(f"the search took {time.perf_counter() - start:.0f} s")
    print(tabulate(judged(model, result, data, crops_of(PHOTOGRAPHS, arguments.fresh, "judged")), HEADERS))
    print(f"candidates are drawn in {result.render(OUT / 'search.svg')}")


def judged(
    model: nn.Module, result: fxq.results.SearchResult, data: Sequence[Tensor], fresh: Tensor, seconds: float = 10.0
) -> list[tuple[str, ...]]:
    """Float, the default recipe and the one that was found: on crops that nothing has seen, and on this CPU's kernels.

    All layers that the search left on integers run so, whether that is faster or not.
    """
    judge = Agreement(model, fresh)
    recipes = {"default": fxq.Recipe.static(optimize="coverage"), "found": result.recipe.with_optimize("coverage")}
    kernels = {name: fxq.quantize(model, recipe, data=data) for name, recipe in recipes.items()}
    exact = {name: fxq.quantize(model, recipe.with_backend("reference"), data=data) for name, recipe in recipes.items()}
    x = data[0][:1].to(memory_format=torch.channels_last)
    plain = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with threads_set_to(1):
        times = interleaved({name: lambda m=m: m(x) for name, m in {"float": plain, **kernels}.items()}, seconds)
    expected = torch.cat(judge.logits(model))
    rows = []
    for name, median in times.items():
        numbers = agreement(expected, torch.cat(judge.logits(exact.get(name, model))))
        floats = len(result.floats) if name == "found" else result.layers if name == "float" else 0
        told = f"{numbers['agreement, %']:.1f} ± {numbers['± points']:.1f} %", f"{numbers['SQNR, dB']:.1f} dB"
        rows.append((name, f"{floats} of {result.layers}", *told, f"{1e3 * median:.1f} ms"))
    return rows


if __name__ == "__main__":
    main()
