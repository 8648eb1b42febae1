"""Measure the report: time to write it, its size, how it moves in a browser, and what it costs in `quantize`.

    python -m scripts.bench.report                     everything, some minutes
    python -m scripts.bench.report --network resnet50  one network

`chain` is a chain of 2,000 ops, all of which run on integers. Steps are from pass to pass, each timed in the page from
the call to the painted frame; the first visit lays the graph out, the second finds it laid out. They need Playwright
and Chromium, and are left out where these are missing.

What `quantize` spends on it is read off a profile, which makes Python slower than it is: at most these shares.
`history` are the snapshots and the rules that almost matched, `evidence` the SQNRs, the histograms of values, and
running each layer on the float model's values. On the chain that has no target: each of its layers takes a few
microseconds, less than any look at its values.
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import pstats
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor, nn

import fxq
from scripts.bench import history
from scripts.bench.cases import CASES
from scripts.bench.number import Number, table
from scripts.bench.timing import no_gc, threads_set_to
from scripts.networks.generated import Chain

WORK = {
    "history": (("view.py", "view"), ("near.py", "note"), ("near.py", "took"), ("near.py", "all")),
    "evidence": (
        ("record.py", "distribution"),
        ("numeric.py", "sqnr"),
        ("sidebyside.py", "step"),
        ("sidebyside.py", "put"),
    ),
}
"""The functions that do it, by file and name; none of them calls another."""
FXQ = str(Path(inspect.getfile(fxq.quantize)).parent)
STEPS = """async () => {
    const seconds = { first: [], again: [] };
    for (const visit of ["first", "again"])
        for (let i = 0; i < fxq.data.passes.length; i++) {
            await fxq.painted();
            const start = performance.now();
            fxq.step(i);
            await fxq.painted();
            seconds[visit].push(performance.now() - start);
        }
    return seconds;
}"""
"""Milliseconds of every step, in the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, action="append", help="only this one; may be repeated")
    history.add_argument(parser)
    arguments = parser.parse_args()
    chosen = arguments.network or list(NETWORKS)
    numbers = []
    with threads_set_to(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in chosen:
            numbers += measure(name)
            print(f"{name} done", file=sys.stderr)
    print(table(numbers))
    history.append(arguments.history, "bench.report", [(n.subject, n.quantity, n.value, "") for n in numbers])
    failed = sum(number.passed is False for number in numbers)
    print(f"{failed} of {sum(number.passed is not None for number in numbers)} targets missed")
    sys.exit(failed > 0)


def measure(name: str) -> Iterator[Number]:
    """The numbers of one network."""
    model, data, recipe = NETWORKS[name]()
    fxq.quantize(model, recipe, data=data)  # pays for imports, and for measuring costs
    start = time.perf_counter()
    qmodel = fxq.quantize(model, recipe, data=data)
    seconds = time.perf_counter() - start
    share = shares(model, data, recipe)
    yield Number(name, "history, % of quantize", share["history"], most=5, detail=f"{seconds:.1f} s")
    bound = None if name == "chain" else 5
    yield Number(name, "history and evidence, %", share["history"] + share["evidence"], most=bound)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = qmodel.report(Path(folder) / "report.html")
        written, ops = time.perf_counter() - start, f"{len(qmodel.ledger)} ops"
        yield Number(name, "time to write, s", written, most=5, detail=ops)
        yield Number(name, "file, MB", path.stat().st_size / 1e6, most=3 if name == "resnet50" else None, detail=ops)
        yield from in_the_browser(name, path)


def shares(model: nn.Module, data: list[Tensor], recipe: fxq.Recipe) -> dict[str, float]:
    """Percent of the time of `quantize` that goes to each kind of work."""
    profile = cProfile.Profile()
    with no_gc():  # a collection would be counted for the function that it happens in
        profile.runcall(fxq.quantize, model, recipe, data=data)
    stats = pstats.Stats(profile)
    seconds = {(Path(file).name, name): stat[3] for (file, _, name), stat in stats.stats.items() if FXQ in file}
    return {
        task: 100 * sum(seconds.get(f, 0.0) for f in functions) / stats.total_tt for task, functions in WORK.items()
    }


def in_the_browser(name: str, path: Path) -> Iterator[Number]:
    """Milliseconds to open the page, and from pass to pass."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        print("no steps: Playwright is not installed (pip install playwright)", file=sys.stderr)
        return
    with sync_playwright() as playwright:
        executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        try:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except Error as error:
            print(f"no steps: Chromium does not start: {error.message}", file=sys.stderr)
            return
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        page.evaluate("fxq.painted()")
        yield Number(name, "to open the page, ms", 1e3 * (time.perf_counter() - start))
        steps = page.evaluate(STEPS)
        browser.close()
    for visit, times in steps.items():
        detail = f"median {statistics.median(times):.0f} ms of {len(times)}"
        yield Number(name, f"slowest step, {visit}, ms", max(times), most=60, detail=detail)


Network = tuple[nn.Module, list[Tensor], fxq.Recipe]
"""The float network, calibration data, and the recipe."""


def picture_network(name: str) -> Network:
    case = CASES[name]()
    return case.model, case.data, fxq.Recipe.static()


def chain() -> Network:
    model = Chain(2000)
    return model, [model.example], fxq.Recipe.static(optimize="coverage")


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet18": lambda: picture_network("resnet18"),
    "resnet50": lambda: picture_network("resnet50"),
    "chain": chain,
}


if __name__ == "__main__":
    main()
