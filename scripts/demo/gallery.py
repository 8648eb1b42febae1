"""Quantize trained networks, each in one call, beside the quantizers of NNCF and ONNX Runtime.

    python -m scripts.demo.gallery --install build/gallery     fetch networks, data and tools, then run
    python -m scripts.demo.gallery --folder build/gallery      run with what was fetched
    python -m scripts.demo.gallery --only faces --only texts   some of the networks

Every tool has its own defaults; fxq has backend="fastest". Quality is that of the kernels of this machine, on data that
calibrated nothing. Milliseconds are the least of several calls on one thread, of all parts of a network on one input.
Seconds to quantize are those of the CPU, with the export to ONNX where there is one. What fails has its reason in place
of numbers. The rows go to `scripts/docs/gallery.json`, a picture of each network to `scripts/docs/static/gallery`; then
`python -m scripts.docs.gallery_page` writes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import fxq
from scripts.bench.accuracy import machine
from scripts.bench.accuracy_contenders import float_onnx, nncf_file, onnxruntime_file, quiet
from scripts.bench.accuracy_subjects import Subject
from scripts.bench.rivals import Made, onnx_call, onnx_session
from scripts.bench.timing import threads_set_to
from scripts.demo.gallery_subjects import EXHIBITS, install
from scripts.demo.sequence_data import Missing, fetched
from scripts.demo.sequence_subjects import Part

DOCS = Path(__file__).resolve().parents[1] / "docs"
CALLS, LONGEST = 20, 2.0
"""Calls that a latency is the least of, and the seconds after which no further call is made."""

Tool = Callable[[Part, bool], Made]
"""Quantizes a part, told whether it is a transformer."""


def own(part: Part, is_transformer: bool) -> Made:
    """fxq, in one call."""
    recipe = fxq.Recipe.static(backend="fastest")
    qmodel = fxq.quantize(part.model, recipe, data=part.data, example_inputs=part.example, progress=False)
    return Made(qmodel, fxq.results.nbytes(qmodel), qmodel.ledger.coverage)


def by_file(make: Callable[[Part, bool], bytes]) -> Tool:
    """A tool that makes an ONNX file, which ONNX Runtime runs."""

    def run(part: Part, is_transformer: bool) -> Made:
        content = make(part, is_transformer)
        return Made(onnx_call(onnx_session(content)), len(content))

    return run


def float_file(part: Part, is_transformer: bool) -> bytes:
    """ONNX file of the float part."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, quiet():
        return float_onnx(part, folder).read_bytes()


def as_it_is(part: Part, is_transformer: bool) -> Made:
    """The float part in PyTorch."""
    return Made(part.model, sum(t.nbytes for t in part.model.state_dict().values()))


TOOLS: dict[str, Tool] = {
    "float, PyTorch": as_it_is,
    "float, ONNX Runtime": by_file(float_file),
    "int8, fxq": own,
    "int8, NNCF": by_file(nncf_file),
    "int8, ONNX Runtime": by_file(lambda part, is_transformer: onnxruntime_file(part)),
}


def milliseconds(subject: Subject, calls: Sequence[Callable[..., Any]]) -> float:
    """Least milliseconds in which all parts of a network run on their examples."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < CALLS and sum(times) < LONGEST):
        start = time.process_time()  # of all threads, of which there is one: other programs do not count
        for part, call in zip(subject.parts, calls, strict=True):
            call(*part.example)
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def row(subject: Subject, name: str, tool: Tool, expected: Any) -> tuple[dict[str, Any], Any]:
    """Row of one tool, and its outputs; None if it fails."""
    start = time.process_time()
    try:
        parts = [tool(part, subject.is_transformer) for part in subject.parts]
        seconds = time.process_time() - start
        calls = [part.call for part in parts]
        outputs = subject.outputs(calls)
        quality = subject.judge(expected, outputs)
        facts = {
            "quality": {kind: value if math.isfinite(value) else None for kind, value in quality.items()},
            "ms": milliseconds(subject, calls),
            "bytes": sum(part.nbytes for part in parts),
            "seconds": seconds,
            "int8_macs": [part.macs for part in parts if part.macs is not None],
            "backends": [backend for call in calls if (backend := getattr(call, "backend", None))],
        }
        return {"tool": name, **facts}, outputs
    except Exception as error:  # tools fail in many ways; each is a result
        words = (str(error).strip().splitlines() or [""])[0][:160]
        return {"tool": name, "why": f"{type(error).__name__}: {words}"}, None


def shown(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Table of one network for the terminal."""
    kinds = next((list(entry["quality"]) for entry in rows if "quality" in entry), [])
    cells = []
    for entry in rows:
        quality = [entry.get("quality", {}).get(kind) for kind in kinds]
        size = entry.get("bytes", 0) / 1e6 or None
        cells.append([entry["tool"], *quality, entry.get("ms"), size, entry.get("seconds"), entry.get("why", "")])
    return tabulate(cells, headers=(name, *kinds, "ms", "MB", "to quantize, s", ""), floatfmt=".4g")


def store(path: Path, key: str, exhibit: dict[str, Any]) -> None:
    """Write the rows of a network into the file, in place of those that it had."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored[key] = exhibit
    text = json.dumps({name: stored[name] for name in EXHIBITS if name in stored}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Run the gallery, and write its JSON and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="fetch networks and tools into FOLDER first")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="where they were fetched before")
    parser.add_argument("--only", choices=EXHIBITS, action="append", help=f"one of {', '.join(EXHIBITS)}")
    parser.add_argument("--crops", type=int, default=280, metavar="N", help="pictures to judge (default %(default)s)")
    parser.add_argument("--json", type=Path, default=DOCS / "gallery.json", metavar="PATH", help="file of the rows")
    parser.add_argument("--pictures", type=Path, default=DOCS / "static" / "gallery", metavar="FOLDER")
    arguments = parser.parse_args()
    folders = fetched(arguments, install)
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    for key in arguments.only or EXHIBITS:
        exhibit = EXHIBITS[key]
        try:
            subject = exhibit.subject(folders, arguments.crops)
        except Missing as missing:
            print(f"{key}: {missing}", file=sys.stderr)
            continue
        about = {key: getattr(exhibit, key) for key in ("source", "shows", "note")}
        about |= {"name": subject.name, "machine": machine()}
        results: list[dict[str, Any]] = []
        with threads_set_to(1), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = subject.outputs([part.model for part in subject.parts])
            for name, tool in TOOLS.items():
                result, outputs = row(subject, name, tool, expected)
                results.append(result)
                store(arguments.json, key, {**about, "rows": results})  # each row at once: one can take many minutes
                if tool is own and outputs is not None:
                    picture = exhibit.picture(subject, expected, outputs)
                    picture.save(arguments.pictures / f"{key}.png", optimize=True)
        print(shown(subject.name, results), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
