"""The integers of a model as what a person takes away: a mapping, a table, a dict, and a file."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text
from safetensors.numpy import save
from torch import Tensor

from fxq.common.files import as_path, write_file
from fxq.display.printed import Printed
from fxq.display.queryable import layer_text
from fxq.display.tables import Column, Part, Table, line, row, text
from fxq.errors import RenderError
from fxq.ledger.layer_qparams import LayerQParams
from fxq.quant.qparams import QParams


class ModelQParams(Printed, Mapping[str, LayerQParams]):
    """The integers of every layer, by module path. `print` shows them as a table, a row for each weight.

    Example:
        >>> qmodel = fxq.quantize(nn.Sequential(nn.Linear(4, 2)).eval(), data=[torch.rand(8, 4)])
        >>> layers = qmodel.qparams()
        >>> layers["0"].weight.dtype, layers["0"].bias.dtype
        (torch.int8, torch.int32)
        >>> sorted(layers.to_dict()["0"])[:4]
        ['bias', 'bias_scale', 'float_bias_reason', 'gates']
    """

    def __init__(self, layers: Mapping[str, LayerQParams]) -> None:
        self._layers = dict(layers)

    def __getitem__(self, path: str) -> LayerQParams:
        return self._layers[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data and tensors, layer by layer: see `LayerQParams.to_dict`."""
        return {path: layer.to_dict() for path, layer in self.items()}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything to a `.npz` or a `.safetensors` file; the path. Folders that are missing are made.

        Every tensor and number is an array, called by the layer's path and its key in `to_dict`, with a dot between
        them: `numpy.load("p.npz")["layer1.conv.weight_scale"]`. What is text, and the rows of gates, is JSON by layer:
        the array `layers` of a `.npz`, the entry `layers` of the metadata of a `.safetensors` file.

        Raises:
            InputError: `path` is no path.
            RenderError: its ending is another, or the file cannot be written.
        """
        path = as_path(path)
        ending = path.suffix.lower()
        if ending not in _WRITERS:
            known = " or ".join(_WRITERS)
            raise RenderError(f"cannot save to {path.name!r}: its ending says the format, and must be {known}.")
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        texts: dict[str, dict[str, Any]] = {}
        for layer, entry in self.to_dict().items():
            numbers = {key: value for key, value in entry.items() if isinstance(value, (Tensor, int, float))}
            arrays |= {f"{layer}.{key}": _array(value) for key, value in numbers.items()}
            texts[layer] = {key: value for key, value in entry.items() if key not in numbers and value is not None}
        return write_file(path, _WRITERS[ending](arrays, json.dumps(texts)))

    def _short(self) -> str:
        return f"{len(self)} layers"

    def _parts(self) -> list[Part]:
        weights = [weight for layer in self.values() for weight in layer.weights.values()]
        size = sum(weight.values.numel() * weight.qparams.bits / 8 for weight in weights)
        layers = f"{len(self)} layer{'' if len(self) == 1 else 's'} with integer weights"
        parts: list[Part] = [line(text(layers, "strong"), f": {size / 1e3:.1f} kB without scales and biases")]
        return [*parts, Table(_COLUMNS, [r for path in self for r in _rows(path, self[path])])] if weights else parts


_COLUMNS = (
    Column("layer", give="start"),
    Column("weight"),
    Column("scale"),
    Column("zero point", drop=2),
    Column("per", drop=1),
    Column("bias"),
    Column("input"),
    Column("output"),
)


def _rows(path: str, layer: LayerQParams) -> Iterator[list[Text]]:
    """A row for each weight of a layer; what belongs to the whole layer stands in the first."""
    bias = "" if layer.bias is None else str(layer.bias.dtype).removeprefix("torch.")
    if layer.float_bias_reason:
        bias += f": {layer.float_bias_reason}"
    reads = _grid(layer.input_scale, layer.input_zero_point, layer.reads)
    common = [bias, reads, _grid(layer.output_scale, layer.output_zero_point, "float")]
    for i, (name, weight) in enumerate(layer.weights.items()):
        grid = weight.qparams
        shape = "×".join(map(str, weight.values.shape))
        number = "float" if grid.dtype.is_floating_point else "int" if grid.qmin < 0 else "uint"
        kind = f"{number}{grid.bits} {shape}"
        kind = kind if name == "weight" else f"{name} {kind}"
        cells = [kind, _ends(grid.scale, ".3g"), _ends(grid.zero_point, ".0f"), _per(grid)]
        yield row(layer_text(layer.node, path) if i == 0 else "", *cells, *(common if i == 0 else [""] * len(common)))


def _grid(scale: float | None, zero_point: int | None, instead: str) -> str:
    """Scale and zero point, or what stands in the place of a scale."""
    shown = instead if scale is None else f"{scale:.3g}"
    return shown if zero_point is None else f"{shown}, {zero_point}"


def _ends(values: Tensor, form: str) -> str:
    """The smallest and the largest of some numbers; one where they are the same."""
    if not values.numel():
        return ""
    low, high = (format(float(end), form) for end in values.aminmax())
    return low if low == high else f"{low}..{high}"


def _per(grid: QParams) -> str:
    """What has a scale of its own."""
    if grid.axis is None:
        return "tensor"
    return f"{'channel' if grid.block is None else f'block of {grid.block}'}, axis {grid.axis}"


def _array(value: Tensor | float) -> np.ndarray[Any, Any]:
    """A number is int64 or float64."""
    array: np.ndarray[Any, Any] = value.contiguous().numpy() if isinstance(value, Tensor) else np.array(value)
    return array


def _npz(arrays: Mapping[str, np.ndarray[Any, Any]], texts: str) -> bytes:
    file = io.BytesIO()
    np.savez(file, layers=np.array(texts), **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
    return file.getvalue()


def _safetensors(arrays: Mapping[str, np.ndarray[Any, Any]], texts: str) -> bytes:
    return bytes(save(dict(arrays), {"layers": texts}))


_WRITERS = {".npz": _npz, ".safetensors": _safetensors}
