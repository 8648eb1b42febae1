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
    "regions.js",
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
    "tuning.js",
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
    licences = {file: _read(f"vendor/{name}.LICENSE.txt").strip() for name, file in LIBRARIES.items()}
    libraries = [f"<script>/*\n{text}\n*/\n{_read(f'vendor/{file}')}</script>" for file, text in licences.items()]
    own = "\n".join(map(_read, SCRIPTS))
    parts = {
        "style": "\n".join(map(_read, STYLES)),
        "libraries": "\n".join(libraries),
        "script": f'<script>\n"use strict";\n(() => {{\n{own}\n}})();\n</script>',
    }
    return Template(_read("index.html")).safe_substitute(
        {name: part.replace("$", "$$") for name, part in parts.items()}
    )


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
