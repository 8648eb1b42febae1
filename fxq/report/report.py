"""Report pages of quantized models and comparisons: one HTML file with passes, accuracy and latency."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fxq.common.files import as_path, write_file
from fxq.common.metrics import nbytes
from fxq.display.queryable import Rows
from fxq.errors import InputError, RecipeError
from fxq.ledger.comparison import Comparison
from fxq.ledger.quantized import Quantized
from fxq.report.graph_data import Data, NodeRecords, graph_records, looks, number, passes
from fxq.report.latency import Latency, batch_for, time_models
from fxq.report.page import page
from fxq.report.value_data import values, weights


@runtime_checkable
class Tuning(Protocol):
    """Result of `fxq.search` or `fxq.sensitivity`."""

    def tables(self) -> Mapping[str, Rows[Any]]:
        """Return its tables, by name: "search", "sensitivity"."""


def write_report(
    model: Quantized,
    path: str | os.PathLike[str],
    comparison: Comparison | None = None,
    example_inputs: Any = None,
    tuning: Tuning | None = None,
) -> Path:
    """Write the report of a model, see `QuantizedModel.report`."""
    file = as_path(path)
    return write_page(report_data(model, comparison, example_inputs, tuning), file)


def write_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page of a comparison, see `Comparison.report`."""
    if len(comparison.models) == 1:
        return write_report(comparison.models[0], path, comparison)
    return write_page(comparison_data(comparison), as_path(path))


def write_page(data: Data, path: Path) -> Path:
    """Write the page that shows `data` to a file. Raises `RenderError` if it cannot be written."""
    return write_file(path, page(data).encode())


def report_data(
    model: Quantized,
    comparison: Comparison | None = None,
    example_inputs: Any = None,
    tuning: Tuning | None = None,
) -> Data:
    """Return the content of the page as plain data; `fxq/report/page/core.js` describes the format."""
    _check_comparison(model, comparison)
    if tuning is not None and not isinstance(tuning, Tuning):
        raise InputError(f"tuning is a {type(tuning).__name__}; give what fxq.search or fxq.sensitivity returned.")
    tables = tuning.tables() if tuning is not None else {}
    nodes = NodeRecords()
    steps = passes(model.history, nodes)
    return {
        **heading(model),
        "kind": "model",
        **looks(),
        "nodes": nodes.records,
        "passes": steps,
        "ledger": ledger(model) if comparison is None else _with_comparison(ledger(model), comparison),
        "measured": "recorded calibration samples" if comparison is None else _batches(comparison),
        "values": values(model.record.values),
        "weights": weights(model),
        "time": _time(model, example_inputs),
        "size": {"float_bytes": model.record.float_bytes, "int8_bytes": nbytes(model)},
        "tuning": {name: json.loads(table.to_json()) for name, table in tables.items()} or None,
    }


def comparison_data(comparison: Comparison) -> Data:
    """Return the content of the page of two quantized models: traced graph, final graphs, and layers side by side."""
    models = dict(zip("ab", comparison.models, strict=True))
    nodes = NodeRecords()
    graphs = [("traced", models["a"].history[0]), *((name, model.history[-1]) for name, model in models.items())]
    table = json.loads(comparison.to_json())
    return {
        "version": 1,
        "fxq": version("fxq"),
        "kind": "compare",
        "title": f"{models['b'].record.name}: {' against '.join(f'{k} ({_way(m)})' for k, m in models.items())}",
        **looks(),
        "nodes": nodes.records,
        "passes": list(graph_records(graphs, nodes)),
        "sides": [{"name": name, **heading(model), "ledger": ledger(model)} for name, model in models.items()],
        "rows": table["layers"],
        "output_sqnr": table["output_sqnr"],
        "measured": _batches(comparison),
    }


def heading(model: Quantized) -> Data:
    """Return title, versions, backend and recipe of a model."""
    try:
        recipe = model.recipe.to_toml()
    except RecipeError as error:
        recipe = f"# This recipe has no TOML: {error}"
    return {"version": 1, "title": _title(model), "fxq": version("fxq"), "backend": model.backend, "recipe": recipe}


def _title(model: Quantized) -> str:
    return f"{model.record.name}, {_way(model)}"


def _way(model: Quantized) -> str:
    return f"{model.recipe.preset} on {model.backend}"


def _batches(comparison: Comparison) -> str:
    return f"{comparison.batches} batch{'' if comparison.batches == 1 else 'es'}"


def ledger(model: Quantized) -> Data:
    """Return the rows of a model's ledger as plain data."""
    data = json.loads(model.ledger.to_json())
    return {"coverage": data["coverage"], "output_sqnr": data["output_sqnr"], "rows": data["ops"]}


def _check_comparison(model: Quantized, comparison: Any) -> None:
    if comparison is None:
        return
    if not isinstance(comparison, Comparison):
        raise InputError(f"comparison is a {type(comparison).__name__}; give what fxq.compare returned.")
    if len(comparison.models) != 1 or comparison.models[0] is not model:
        whose = "two quantized models" if len(comparison.models) > 1 else "another model"
        raise InputError(
            f"the comparison is of {whose}; pass a comparison of this model with its float model: "
            "fxq.compare(float_model, qmodel, data)."
        )


def _with_comparison(data: Data, comparison: Comparison) -> Data:
    """Replace the errors in a ledger by those of a comparison; rows that it does not have get None."""
    table = json.loads(comparison.to_json())
    layers = {row["name"]: row for row in table["layers"]}
    rows = [{**row, **{key: layers.get(row["name"], {}).get(key) for key in _ERROR_KEYS}} for row in data["rows"]]
    return {**data, "output_sqnr": table["output_sqnr"], "rows": rows}


_ERROR_KEYS = ("sqnr", "own_sqnr", "cosine", "max_error")


def _time(model: Quantized, example_inputs: Any) -> Data:
    try:
        latency = time_models(model, model.float_model, batch_for(model, example_inputs))
    except InputError as error:
        if example_inputs is not None:
            raise
        latency = Latency(why=str(error))
    return {
        "float_us": latency.float_us and number(latency.float_us),
        "int8_us": latency.int8_us and number(latency.int8_us),
        "why": latency.why,
        "batch": latency.profile.batch,
        "ops": [
            {"name": row.node, "layer": row.layer, "label": row.op, "kind": row.kind, "us": number(row.us)}
            for row in latency.profile
        ],
    }
