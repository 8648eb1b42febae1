"""The report of a quantized model: one HTML file that shows the passes, the quality and the time. Page: `fxq/page`."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxq.data import as_batch, check_batch
from fxq.errors import InputError, RecipeError
from fxq.files import as_path, write_file
from fxq.latency import Latency, recorded_inputs, time_models
from fxq.page import page
from fxq.reportgraph import Nodes, Record, looks, number, passes
from fxq.reportweights import weights
from fxq.size import nbytes
from fxq.view import view

if TYPE_CHECKING:
    from fxq.model import QuantizedModel


def write_report(model: QuantizedModel, path: str | os.PathLike[str], example_inputs: Any = None) -> Path:
    """Write the report of a model: see `QuantizedModel.report`."""
    file = as_path(path)
    return write_page(report_data(model, example_inputs), file)


def write_page(data: Record, path: Path) -> Path:
    """Write the page that shows `data` to a file. Raises `RenderError` where it cannot."""
    return write_file(path, page(data).encode())


def report_data(model: QuantizedModel, example_inputs: Any = None) -> Record:
    """All that the page shows, as plain data; `fxq/page/core.js` says what stands where."""
    nodes = Nodes()
    steps = passes(model.history, nodes)
    return {
        **heading(model),
        "kind": "model",
        "title": "fxq report",
        **looks(),
        "nodes": nodes.records,
        "passes": steps,
        "ledger": ledger(model),
        "values": {},
        "weights": weights(model),
        "time": _time(model, example_inputs),
        "size": {"float_bytes": None, "int8_bytes": nbytes(model)},
    }


def heading(model: QuantizedModel) -> Record:
    """What made the model."""
    try:
        recipe = model.recipe.to_toml()
    except RecipeError as error:
        recipe = f"# This recipe has no TOML: {error}"
    return {"version": 1, "fxq": version("fxq"), "backend": model.backend, "recipe": recipe}


def ledger(model: QuantizedModel) -> Record:
    """The ledger's rows as plain data."""
    data = json.loads(model.ledger.to_json())
    return {"coverage": data["coverage"], "rows": data["ops"]}


def _time(model: QuantizedModel, example_inputs: Any) -> Record:
    try:
        if example_inputs is None:
            batch = recorded_inputs(model)
        else:
            batch = as_batch(example_inputs, model, "example_inputs")
            check_batch(batch, model, "example_inputs")
        found = time_models(model, None, batch)
    except InputError as error:
        if example_inputs is not None:
            raise
        found = Latency(why=str(error))
    views = view(model).by_name
    return {
        "float_us": found.float_us and number(found.float_us),
        "int8_us": found.int8_us and number(found.int8_us),
        "why": found.why,
        "batch": found.batch,
        "ops": [
            {"name": name, "label": views[name].label, "kind": views[name].kind, "us": number(us)}
            for name, us in found.nodes.items()
        ],
    }
