"""Quantize trained networks, each in one call, beside the quantizers of NNCF and ONNX Runtime.

    python -m scripts.demo.gallery --install build/gallery     fetch networks, data and tools, then run
    python -m scripts.demo.gallery --folder build/gallery      run with what was fetched
    python -m scripts.demo.gallery --only faces --only texts   some of the networks

Every tool has its own defaults; fxq has backend="fastest", unless a note says otherwise. What NNCF makes runs in
OpenVINO: once in float32 apart from the integers, and once as OpenVINO does by default, where that is bfloat16. Of
language models, the weights alone are quantized, to 8 bits or to 4 in blocks of 64, by fxq with its default backend.
fxq also quantizes them dynamically: weights to 8 bits, and the inputs of linear layers at each call.
Models of fxq are saved, and loaded by another process, which cannot import the packages of the networks; "file" says
whether its outputs are equal, bit for bit.
Quality is that of the kernels of this machine, on data that calibrated nothing. Milliseconds are the least of several
calls on one thread, of all parts of a network on one input; the tools of a network are called in turns. Seconds to
quantize are those of the CPU, with the export to ONNX where there is one. What fails has its reason in place of
numbers. The rows go to `scripts/docs/gallery.json`, a picture of each network to `scripts/docs/static/gallery`; then
`python -m scripts.docs.gallery_page` writes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tabulate import tabulate
from torch.utils._pytree import tree_leaves

import fxq
from scripts.bench.accuracy import machine
from scripts.bench.accuracy_contenders import float_onnx, nncf_model, onnxruntime_file, openvino_model, quiet
from scripts.bench.accuracy_subjects import Subject
from scripts.bench.rivals import Made, onnx_call, onnx_session, openvino_bytes, openvino_call
from scripts.bench.timing import threads_set_to
from scripts.demo.gallery_subjects import EXHIBITS, Exhibit, install
from scripts.demo.sequence_data import Missing, fetched
from scripts.demo.sequence_subjects import Part

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = 64
"""Weights of a language model that share a scale."""
ROUNDS, ROUND_CALLS, ROUND_S = 12, 50, 0.1
"""Rounds in which the tools are called in turns; the calls of a tool in each at most, and the seconds that end them."""

Tool = Callable[[Part, bool], Made]
"""Quantizes a part, told whether it is a transformer."""


def own(backend: str) -> Tool:
    """fxq, in one call."""
    recipe = fxq.Recipe.static(backend=backend)
    return lambda part, is_transformer: quantized(part, recipe)


def own_weights(bits: int) -> Tool:
    """fxq, weights alone, in one call: 4 bits in blocks, 8 bits per channel."""
    recipe = fxq.Recipe.weight_only(bits=bits, per=BLOCK) if bits == 4 else fxq.Recipe.weight_only(bits=bits)
    return lambda part, is_transformer: quantized(part, recipe)


def own_dynamic(part: Part, is_transformer: bool) -> Made:
    """fxq, in one call: weights of 8 bits, activations of 8 bits with ranges that are computed for each token."""
    return quantized(part, fxq.Recipe.dynamic(backend="fastest"))


def quantized(part: Part, recipe: fxq.Recipe) -> Made:
    """fxq with a recipe."""
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
    with tempfile.TemporaryDirectory() as folder, quiet():
        return float_onnx(part, folder).read_bytes()


def as_it_is(part: Part, is_transformer: bool) -> Made:
    """The float part in PyTorch."""
    return Made(part.model, sum(t.nbytes for t in part.model.state_dict().values()))


def by_nncf(name: str, make: Callable[[Part, bool], Any]) -> dict[str, Tool]:
    """Tools that make an `openvino.Model`, by name: OpenVINO runs it in each of the precisions that it would choose."""

    def in_precision(precision: str) -> Tool:
        def run(part: Part, is_transformer: bool) -> Made:
            with quiet():
                model = make(part, is_transformer)
            return Made(openvino_call(model, precision), openvino_bytes(model))

        return run

    of_cpu = {"float32": "f32", "bfloat16": "bf16"} if has_bfloat16() else {"float32": "f32"}
    return {f"{name}, {precision}": in_precision(hint) for precision, hint in of_cpu.items()}


def has_bfloat16() -> bool:
    """Whether OpenVINO computes in bfloat16 on this CPU by default."""
    if find_spec("openvino") is None:
        return False
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def nncf_weights(bits: int) -> Callable[[Part, bool], Any]:
    """NNCF's `compress_weights`: 4 bits in blocks, 8 bits per channel."""

    def make(part: Part, is_transformer: bool) -> Any:
        import nncf

        mode = nncf.CompressWeightsMode.INT4_SYM if bits == 4 else nncf.CompressWeightsMode.INT8_SYM
        sizes = {"group_size": BLOCK} if bits == 4 else {}
        return nncf.compress_weights(openvino_model(part), mode=mode, **sizes)

    return make


def onnxruntime_weights(bits: int) -> Tool:
    """ONNX file that ONNX Runtime's `MatMulNBitsQuantizer` makes of a part, in blocks."""

    def make(part: Part, is_transformer: bool) -> bytes:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        with quiet():
            model = onnx.load_from_string(float_file(part, is_transformer))
            quantizer = MatMulNBitsQuantizer(model, bits=bits, block_size=BLOCK)
            quantizer.process()
        content: bytes = quantizer.model.model.SerializeToString()
        return content

    return by_file(make)


FLOAT_TOOLS: dict[str, Tool] = {"float, PyTorch": as_it_is, "float, ONNX Runtime": by_file(float_file)}


def tools_for(exhibit: Exhibit) -> dict[str, Tool]:
    """The tools for a network, by name: those for weights and activations, or those for weights alone."""
    tools = dict(FLOAT_TOOLS)
    if not exhibit.weight_bits:
        tools["int8, fxq"] = own(exhibit.backend)
        tools |= by_nncf("int8, NNCF", nncf_model)
        tools["int8, ONNX Runtime"] = by_file(lambda part, is_transformer: onnxruntime_file(part))
    for bits in exhibit.weight_bits:
        tools[f"int{bits}, fxq"] = own_weights(bits)
        tools |= by_nncf(f"int{bits}, NNCF", nncf_weights(bits))
        tools[f"int{bits}, ONNX Runtime"] = onnxruntime_weights(bits)
    if exhibit.weight_bits:
        tools["int8 dynamic, fxq"] = own_dynamic
    return tools


def is_own(name: str) -> bool:
    """Whether a tool of this name is fxq."""
    return name.endswith(", fxq")


ALONE = """\
import sys, torch, fxq
from torch.utils._pytree import tree_leaves
torch.set_num_threads(1)
torch.set_grad_enabled(False)
model, (inputs, expected) = fxq.load(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
outputs = tree_leaves(model(*inputs))
assert len(outputs) == len(expected) and all(map(torch.equal, outputs, expected))
"""
"""Program that loads a model and compares its outputs with those in a file."""


def same_in_file(subject: Subject, models: Sequence[Any]) -> bool:
    """Whether the models can be saved, and another process loads them and computes the same outputs, bit for bit.

    The process runs in an empty folder, and can import only what is installed with fxq.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        for part, model in zip(subject.parts, models, strict=True):
            path = Path(folder, "model.fxq")
            try:
                model.save(path)
            except fxq.FxqError as error:
                print(f"{subject.name}: {error}", file=sys.stderr)
                return False
            torch.save((part.example, tree_leaves(model(*part.example))), numbers := Path(folder, "numbers.pt"))
            command = [sys.executable, "-c", ALONE, str(path), str(numbers)]
            result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if result.returncode:
                print(f"{subject.name}: {(result.stderr.strip().splitlines() or [''])[-1]}", file=sys.stderr)
                return False
    return True


Calls = Sequence[Callable[..., Any]]
"""Functions that run the parts of a network."""


def milliseconds(subject: Subject, tools: Mapping[str, Calls]) -> dict[str, float]:
    """Least milliseconds in which each tool runs all parts of a network on their examples.

    The tools are called in turns, since the speed of a machine changes from minute to minute. All of them are in memory
    then.
    """
    least = dict.fromkeys(tools, math.inf)
    for _ in range(ROUNDS):
        for name, calls in tools.items():
            spent, count = 0.0, 0
            while count < ROUND_CALLS and spent < ROUND_S:
                start = time.process_time()  # of all threads, of which there is one: other programs do not count
                for part, call in zip(subject.parts, calls, strict=True):
                    call(*part.example)
                spent, count = spent + (took := time.process_time() - start), count + 1
                least[name] = min(least[name], took)
    return {name: 1e3 * seconds for name, seconds in least.items()}


def row(subject: Subject, name: str, tool: Tool, expected: Any) -> tuple[dict[str, Any], Any, Calls | None]:
    """Row of one tool, its outputs, and the functions that run the parts; None if it fails."""
    start = time.process_time()
    try:
        parts = [tool(part, subject.is_transformer) for part in subject.parts]
        seconds = time.process_time() - start
        calls = [part.call for part in parts]
        outputs = subject.outputs(calls)
        for part, call in zip(subject.parts, calls, strict=True):
            call(*part.example)  # as when it is timed: what fails there fails here
        quality = subject.judge(expected, outputs)
        facts = {
            "quality": {kind: value if math.isfinite(value) else None for kind, value in quality.items()},
            "bytes": sum(part.nbytes for part in parts),
            "seconds": seconds,
            "int8_macs": [part.macs for part in parts if part.macs is not None],
            "backends": [backend for call in calls if (backend := getattr(call, "backend", None))],
        }
        if is_own(name):
            facts["same_in_file"] = same_in_file(subject, calls)
        return {"tool": name, **facts}, outputs, calls
    except Exception as error:  # tools fail in many ways; each is a result
        words = (str(error).strip().splitlines() or [""])[0][:160]
        return {"tool": name, "why": f"{type(error).__name__}: {words}"}, None, None


def shown(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Table of one network for the terminal."""
    kinds = next((list(entry["quality"]) for entry in rows if "quality" in entry), [])
    cells = []
    for entry in rows:
        quality = [entry.get("quality", {}).get(kind) for kind in kinds]
        size = entry.get("bytes", 0) / 1e6 or None
        file = {True: "equal", False: "differs", None: ""}[entry.get("same_in_file")]
        cells.append([entry["tool"], *quality, entry.get("ms"), size, entry.get("seconds"), file, entry.get("why", "")])
    return tabulate(cells, headers=(name, *kinds, "ms", "MB", "to quantize, s", "file", ""), floatfmt=".4g")


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
        running: dict[str, Calls] = {}
        with threads_set_to(1), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = subject.outputs([part.model for part in subject.parts])
            for name, tool in tools_for(exhibit).items():
                result, outputs, calls = row(subject, name, tool, expected)
                results.append(result)
                running |= {} if calls is None else {name: calls}
                store(arguments.json, key, {**about, "rows": results})  # each row at once: one can take many minutes
                if is_own(name) and outputs is not None:
                    picture = exhibit.picture(subject, expected, outputs)
                    small = picture.quantize(128, dither=Image.Dither.NONE)
                    small.save(arguments.pictures / f"{key}.png", optimize=True)
            times = milliseconds(subject, running)
        results = [entry | ({"ms": times[entry["tool"]]} if entry["tool"] in times else {}) for entry in results]
        store(arguments.json, key, {**about, "rows": results})
        print(shown(subject.name, results), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
