"""The report of a quantized model: one HTML file that shows the passes, the quality and the time. Page: `fxq/page`."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxq.data import as_batch, check_batch, device_of
from fxq.errors import InputError, RecipeError
from fxq.files import as_path, write_file
from fxq.latency import Latency, recorded_inputs, time_models
from fxq.page import page
from fxq.reportgraph import Data, Nodes, looks, number, passes
from fxq.reportvalues import values, weights
from fxq.size import nbytes
from fxq.view import view

if TYPE_CHECKING:
    from fxq.model import QuantizedModel


def write_report(model: QuantizedModel, path: str | os.PathLike[str], example_inputs: Any = None) -> Path:
    """Write the report of a model: see `QuantizedModel.report`."""
    file = as_path(path)
    return write_page(report_data(model, example_inputs), file)


def write_page(data: Data, path: Path) -> Path:
    """Write the page that shows `data` to a file. Raises `RenderError` where it cannot."""
    return write_file(path, page(data).encode())


def report_data(model: QuantizedModel, example_inputs: Any = None) -> Data:
    """All that the page shows, as plain data; `fxq/page/core.js` says what stands where."""
    nodes = Nodes()
    steps = passes(model.history, nodes)
    return {
        **heading(model),
        "kind": "model",
        **looks(),
        "nodes": nodes.records,
        "passes": steps,
        "ledger": ledger(model),
        "values": values(model.record.values),
        "weights": weights(model),
        "time": _time(model, example_inputs),
        "size": {"float_bytes": model.record.float_bytes, "int8_bytes": nbytes(model)},
    }


def heading(model: QuantizedModel) -> Data:
    """What made the model."""
    try:
        recipe = model.recipe.to_toml()
    except RecipeError as error:
        recipe = f"# This recipe has no TOML: {error}"
    title = f"{model.record.name}, {model.recipe.preset} on {model.backend}"
    return {"version": 1, "title": title, "fxq": version("fxq"), "backend": model.backend, "recipe": recipe}


def ledger(model: QuantizedModel) -> Data:
    """The ledger's rows as plain data."""
    data = json.loads(model.ledger.to_json())
    return {"coverage": data["coverage"], "rows": data["ops"]}


def _time(model: QuantizedModel, example_inputs: Any) -> Data:
    try:
        if example_inputs is None:
            batch = recorded_inputs(model.record.inputs, device_of(model))
        else:
            batch = as_batch(example_inputs, model, "example_inputs")
            check_batch(batch, model, "example_inputs")
        found = time_models(model, model.float_model, batch)
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
