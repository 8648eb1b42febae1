"""The report page: one HTML file out of the files in this folder and the data of a model.

`fxq/report/report.py` makes the data. The scripts are plain JavaScript without a build step: they are
joined, in the order of `SCRIPTS`, inside one function.
"""

from __future__ import annotations

import html
import json
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).parent
LIBRARIES = {"d3": "d3.min.js", "dagre": "dagre.min.js", "plot": "plot.umd.min.js"}
SCRIPTS = (
    "core.js",
    "charts.js",
    "model.js",
    "diff.js",
    "groups.js",
    "boxes.js",
    "scene.js",
    "layout.js",
    "columns.js",
    "arrange.js",
    "paintbox.js",
    "paint.js",
    "minimap.js",
    "pane.js",
    "timeline.js",
    "rewrites.js",
    "panel.js",
    "search.js",
    "keys.js",
    "toolbar.js",
    "graph.js",
    "quality.js",
    "ledger.js",
    "time.js",
    "compare.js",
    "main.js",
)
"""The page's own scripts; one may use what those before it define, and `main.js` starts it all."""
STYLES = ("style.css", "tabs.css")


def page(data: dict[str, Any]) -> str:
    """The page that shows `data`, as the text of an HTML file that needs no other file and no network.

    Args:
        data: what `core.js` describes at its top; only values that JSON knows.

    Raises:
        ValueError: a number is infinite or not a number, which JSON cannot say.
    """
    # "<" is written as an escape: "</script>" in the name of a module must not end the data.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(_static()).substitute(title=html.escape(str(data["title"])), data=text)


@cache
def _static() -> str:
    """The page without title and data; `$` of the scripts is doubled, as `Template` wants it."""
    libraries = "\n".join(f"<script>/*\n{_licence(name)}\n*/\n{_library(name)}</script>" for name in LIBRARIES)
    own = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'<script>\n"use strict";\n(() => {{\n{own}\n}})();\n</script>'
    parts = {
        "style": "\n".join((HERE / name).read_text(encoding="utf-8") for name in STYLES),
        "libraries": libraries,
        "script": script,
    }
    return Template((HERE / "index.html").read_text(encoding="utf-8")).safe_substitute(
        {name: part.replace("$", "$$") for name, part in parts.items()}
    )


def _library(name: str) -> str:
    return (HERE / "vendor" / LIBRARIES[name]).read_text(encoding="utf-8")


def _licence(name: str) -> str:
    return (HERE / "vendor" / f"{name}.LICENSE.txt").read_text(encoding="utf-8").strip()
