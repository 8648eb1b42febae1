"""Quantization parameters of a model as a mapping, a table, a dict or a file."""

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
    """Quantization parameters and integer weights of every layer, by module path. `print` shows a row for each weight.

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
        """Return plain data and tensors by layer, see `LayerQParams.to_dict`."""
        return {path: layer.to_dict() for path, layer in self.items()}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save all parameters to a `.npz` or `.safetensors` file, and return its path.

        Every tensor and number is an array. Its name is the layer's path and the key in `to_dict`, joined by a dot:
        `numpy.load("p.npz")["layer1.conv.weight_scale"]`. Texts and the rows of gates are JSON by layer: the array
        `layers` of a `.npz` file, the metadata entry `layers` of a `.safetensors` file.

        Args:
            path: the file. Missing folders are created.

        Raises:
            InputError: `path` is not a path.
            RenderError: the suffix is another one, or the file cannot be written.
        """
        path = as_path(path)
        suffix = path.suffix.lower()
        if suffix not in _WRITERS:
            suffixes = " or ".join(_WRITERS)
            raise RenderError(f"cannot save to {path.name!r}: its suffix selects the format, and must be {suffixes}.")
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        texts: dict[str, dict[str, Any]] = {}
        for layer, entry in self.to_dict().items():
            numbers = {key: value for key, value in entry.items() if isinstance(value, (Tensor, int, float))}
            arrays |= {f"{layer}.{key}": _array(value) for key, value in numbers.items()}
            texts[layer] = {key: value for key, value in entry.items() if key not in numbers and value is not None}
        return write_file(path, _WRITERS[suffix](arrays, json.dumps(texts)))

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
    """Table rows of a layer, one for each weight; the first also has the columns of the whole layer."""
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
    """Scale and zero point as text; `instead` replaces a scale of None."""
    shown = instead if scale is None else f"{scale:.3g}"
    return shown if zero_point is None else f"{shown}, {zero_point}"


def _ends(values: Tensor, form: str) -> str:
    """Smallest and largest value as text; one number if they are equal."""
    if not values.numel():
        return ""
    low, high = (format(float(end), form) for end in values.aminmax())
    return low if low == high else f"{low}..{high}"


def _per(grid: QParams) -> str:
    """Part of the tensor that has its own scale: the tensor, a channel or a block."""
    if grid.axis is None:
        return "tensor"
    return f"{'channel' if grid.block is None else f'block of {grid.block}'}, axis {grid.axis}"


def _array(value: Tensor | float) -> np.ndarray[Any, Any]:
    """Convert a tensor or number to an array; numbers become int64 or float64."""
    array: np.ndarray[Any, Any] = value.contiguous().numpy() if isinstance(value, Tensor) else np.array(value)
    return array


def _npz(arrays: Mapping[str, np.ndarray[Any, Any]], texts: str) -> bytes:
    file = io.BytesIO()
    np.savez(file, layers=np.array(texts), **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
    return file.getvalue()


def _safetensors(arrays: Mapping[str, np.ndarray[Any, Any]], texts: str) -> bytes:
    return bytes(save(dict(arrays), {"layers": texts}))


_WRITERS = {".npz": _npz, ".safetensors": _safetensors}
