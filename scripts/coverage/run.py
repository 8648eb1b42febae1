"""Put what people use through the whole pipeline: 30 torchvision, 80 timm, 13 HuggingFace architectures.

    python -m scripts.coverage.run                        everything that is installed, about an hour
    python -m scripts.coverage.run --suite torchvision    one suite
    python -m scripts.coverage.run --only 'timm/res*'     models by name or glob
    python -m scripts.coverage.run --static               the static preset alone, in half of the time
    python -m scripts.coverage.run --backend openvino     through an engine, or onnxruntime, jit
    python -m scripts.coverage.run --backend reference    SQNR of the static preset in exact arithmetic, no more
    python -m scripts.coverage.run --onnx                 which can be written as ONNX files, and what the others lack
    python -m scripts.coverage.run --json coverage.json   the results as data too

Random weights, so that nothing is downloaded; batch-norm statistics and layer scales as in a trained network. Each
model runs in a process of its own: one that crashes or takes too long is a row like any other. It needs, beside fxq:

    pip install --no-deps torchvision==0.28.0 timm     (--no-deps: they would bring another build of torch)
    pip install transformers huggingface_hub safetensors pyyaml

Three presets: static, and without data dynamic and weight-only. A row: leaves (modules that torch.fx cannot trace and
that stay as they are), the share of multiply-accumulates that run on integers, SQNR of int8 against float, the same
without smooth and correct-bias, SQNR of the int8 kernels against their qdq reference, seconds to quantize.
With an engine or ONNX, the static preset alone. Of an engine: in how many regions it runs the model, how many ops stay
in PyTorch, and the most frequent reason for that. An ONNX file counts where ONNX Runtime without optimizations computes
each of its integers within a rounding step.
Where SQNR is below 20 dB, the same model is quantized by torch.ao (its reference graph, where it traces the model), and
by rounding the input and weight of each layer alone: a network whose random weights amplify noise is lost to all.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from scripts.coverage.measure import ENGINES, EXACT, MIN_SQNR_DB, Result, measure
from scripts.coverage.models import SUBJECTS, SUITES, Subject, load


def run(subject: Subject, options: dict[str, str], further: Sequence[str], timeout: float, context: Any) -> Result:
    """Measure one model in a process of its own."""
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(str(subject), options, further, sender), daemon=True)
    worker.start()
    sender.close()
    result, end = Result(subject.name, subject.suite), time.monotonic() + timeout
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            result = receiver.recv()
        worker.kill()
        result.error = f"Timeout: after {timeout:.0f} s"
    except EOFError:  # it has ended
        worker.join()
        if result.stage != "done" and not result.error:
            result.error = f"Crash: the process ended with exit code {worker.exitcode}"
    worker.join()
    receiver.close()
    return result


def _work(name: str, options: dict[str, str], further: Sequence[str], sender: Connection) -> None:
    subject = next(subject for subject in SUBJECTS if str(subject) == name)
    measure(subject, options, further, sender.send)


def installed(suites: Sequence[str], demanded: bool) -> list[str]:
    """The suites whose package is there; it is imported. `demanded`: one that is missing ends the script."""
    results = []
    for suite in suites:
        try:
            load(suite)
            results.append(suite)
        except SystemExit as error:
            if demanded:
                raise
            print(f"left out: {error}", file=sys.stderr)
    return results


def row(result: Result) -> dict[str, str]:
    """One row of the table, as text, by column."""
    passed = result.stage == "done"
    engine = result.regions is not None
    own = (
        {"regions": str(result.regions), "outside": str(sum(result.outside.values()))}
        if engine
        else {"dynamic dB": decibels(result.dynamic), "weights dB": decibels(result.weight_only)}
    )
    return {
        "model": f"{result.suite}/{result.model}",
        "verdict": result.verdict,
        "leaves": str(len(result.leaves)) if result.ops else "",
        "int8 MACs": "" if result.macs is None else f"{100 * result.macs:.0f} %",
        "SQNR dB": decibels(result.sqnr),
        "plain dB": decibels(result.plain),
        "to qdq dB": decibels(result.kernels),
        **own,
        "s": "" if result.seconds is None else f"{result.seconds:.1f}",
        "remark": remark(result) if passed else result.error.partition("\n")[0][:100],
    }


def decibels(value: float | None) -> str:
    """A number of decibels as text; `exact` where nothing differs."""
    if value is None:
        return ""
    return "exact" if value == math.inf else f"{value:.1f}"


def remark(result: Result) -> str:
    """Why there is no ONNX file; how other quantizers do; with an engine, what most often stays outside."""
    if result.onnx:
        return f"no ONNX: {result.onnx[:100]}"
    baselines = {"torch.ao": result.torch_ao, "rounding alone": result.rounding}
    others = [f"{name} {decibels(value)}" for name, value in baselines.items() if value is not None]
    return ", ".join([*others, *(reason[:100] for reason in list(result.outside)[:1])])


def summary(results: Sequence[Result]) -> str:
    """One row per suite, for the README."""
    rows = []
    for suite in SUITES:
        some = [r for r in results if r.suite == suite]
        done = [r for r in some if r.stage == "done"]
        if not some:
            continue
        macs = [100 * r.macs for r in done if r.macs is not None]
        rows.append(
            {
                "suite": suite,
                "models": len(some),
                "quantized": len(done),
                "without leaves": sum(not r.leaves for r in done),
                "int8 MACs, median": f"{median(macs):.0f} %" if macs else "",
                "wrong kernels": sum(len(r.put_back) for r in done),
                f"SQNR ≥ {MIN_SQNR_DB:.0f} dB": _enough(r.sqnr for r in done),
                "median dB": f"{median(r.sqnr or 0.0 for r in done):.1f}" if done else "",
                "plain": f"{median(r.plain or 0.0 for r in done):.1f}" if done else "",
                **({"ONNX": sum(r.onnx == "" for r in done)} if any(r.onnx is not None for r in done) else {}),
                "0.5 dB below plain": sum((r.sqnr or 0.0) < (r.plain or 0.0) - 0.5 for r in done),
                "ill-conditioned": sum(r.verdict == "ill-conditioned" for r in done),
                "inaccurate": sum(r.verdict == "inaccurate" for r in done),
                **(
                    {"whole in one region": sum(r.whole for r in done)}
                    if any(r.regions is not None for r in done)
                    else {
                        f"dynamic ≥ {MIN_SQNR_DB:.0f} dB": _enough(r.dynamic for r in done),
                        f"weight-only ≥ {MIN_SQNR_DB:.0f} dB": _enough(r.weight_only for r in done),
                    }
                ),
                "seconds, median": f"{median(r.seconds or 0.0 for r in done):.1f}" if done else "",
            }
        )
    return tabulate(rows, headers="keys", tablefmt="github")


def _enough(values: Iterable[float | None]) -> int:
    return sum(value is not None and value >= MIN_SQNR_DB for value in values)


def reasons(results: Sequence[Result]) -> str:
    """With an engine: why ops stay outside, with how many ops and models, most models first."""
    ops: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for result in results:
        ops.update(result.outside)
        models.update(result.outside.keys())
    return tabulate(
        [[reason, models[reason], ops[reason]] for reason, _ in models.most_common()],
        headers=["outside", "models", "ops"],
        tablefmt="github",
    )


def selected(suites: Sequence[str], globs: Sequence[str]) -> list[Subject]:
    """The subjects of these suites whose name, with or without the suite, fits one of the globs."""
    return [
        s
        for s in SUBJECTS
        if s.suite in suites and (not globs or any(fnmatchcase(name, g) for name in (s.name, str(s)) for g in globs))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="only this suite (may be repeated)")
    parser.add_argument("--only", action="append", metavar="GLOB", default=[], help="only models of this name")
    parser.add_argument(
        "--backend", choices=("auto", EXACT, *ENGINES), default="auto", help="auto (the default): PyTorch's best"
    )
    parser.add_argument(
        "--optimize",
        choices=("coverage", "speed"),
        default="coverage",
        help="coverage (the default): all that can run on integers does; speed: not where float is faster here",
    )
    parser.add_argument("--static", action="store_true", help="leave out the dynamic and the weight-only preset")
    parser.add_argument("--onnx", action="store_true", help="write each as an ONNX file, which is checked")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each model (default %(default).0f)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to this file too")
    arguments = parser.parse_args()
    suites = installed(arguments.suite or SUITES, demanded=arguments.suite is not None)
    subjects = selected(suites, arguments.only)
    if not subjects:
        parser.error(f"no model is called {' or '.join(arguments.only)}; they are {', '.join(map(str, SUBJECTS))}")
    # A fork has the packages imported already; beside Linux it is not safe, or not there.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    options = {"backend": arguments.backend, "optimize": arguments.optimize}
    alone = arguments.static or arguments.onnx or arguments.backend in (EXACT, *ENGINES)
    further = ("onnx",) * arguments.onnx + (() if alone else ("dynamic", "weight_only"))
    results: list[Result] = []
    for i, subject in enumerate(subjects, 1):
        print(f"[{i}/{len(subjects)}] {subject} ...", end=" ", file=sys.stderr, flush=True)
        result = run(subject, options, further, arguments.timeout, context)
        results.append(result)
        print("  ".join(part for part in list(row(result).values())[1:] if part), file=sys.stderr, flush=True)
        if arguments.json is not None:
            data = [{**asdict(r), "verdict": r.verdict} for r in results]
            arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(tabulate([row(r) for r in results], headers="keys", disable_numparse=True))
    print(f"\n{summary(results)}")
    if any(r.outside for r in results):
        print(f"\n{reasons(results)}")
    lacking = [(f"{r.suite}/{r.model}", r.onnx) for r in results if r.onnx]
    if lacking:
        print("\n" + tabulate(lacking, headers=("not written as ONNX", "because"), tablefmt="github"))


if __name__ == "__main__":
    main()
