"""Report page of a model in parts: the pages of its parts in one file, and the code that stays in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxq.common.files import as_path
from fxq.ledger.comparison import Comparison
from fxq.parts.part import graphs_in
from fxq.report.graph_data import Data
from fxq.report.report import report_data, write_page


def write_parts_report(
    model: Any, path: str | os.PathLike[str], comparisons: Mapping[str, Comparison] | None = None
) -> Path:
    """Write the report of a model in parts, see `PartsModel.report`.

    Args:
        model: the model.
        path: the file.
        comparisons: comparison of each graph with its float module, by name.
    """
    return write_page(parts_data(model, comparisons or {}), as_path(path))


def parts_data(model: Any, comparisons: Mapping[str, Comparison]) -> Data:
    """Return the content of the page as plain data; `fxq/report/page/core.js` describes the format."""
    attributes, title = vars(model), type(model).__name__
    ledger = attributes["_fxq_ledger"]
    python = [f"{entry.path or 'forward'}: {entry.reason}" for entry in ledger if entry.op == "python" and entry.reason]
    parts = []
    for name, graph in graphs_in(model).items():
        data = report_data(graph, comparisons.get(name))
        parts.append({"name": name, "data": {**data, "title": f"{title}, {name}"}})
    return {
        "version": 1,
        "kind": "parts",
        "title": f"{title}, {attributes['_fxq_recipe'].preset} on {attributes['_fxq_backend']}, in parts",
        "summary": ledger._short(),
        "python": python,
        "parts": parts,
    }
