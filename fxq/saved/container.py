"""Safetensors file of a model: tensors and texts with checksums; large files are memory-mapped.

It is not written by safetensors, which does not align tensors. Torch aligns memory to 64 bytes, and sums of floats that
are aligned differently may round differently.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn

from fxq.common.file_kinds import kind_of
from fxq.common.files import replacing
from fxq.errors import FileError, InputError
from fxq.graph.text.text_values import type_text
from fxq.saved.mapped_file import MappedFile
from fxq.saved.records import from_plain, to_plain

FORMAT, VERSION = "fxq model", 1
"""Name and version of the format. Files of a higher version are refused."""
_CONTAINER_TEXTS = ("format", "version", "tensors", "checksum")
"""Names of the texts that belong to the container itself."""


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a file.

    Attributes:
        type: dtype and shape.
        checksum: CRC-32 of its bytes in the file.
        stride: its strides; empty if it is contiguous.
        same_as: name of another tensor of the file whose memory it shares; it has no data of its own then.
        is_one: whether it is the same tensor object as `same_as`.
        trained: whether a parameter requires a gradient; None if it is not a parameter.
    """

    type: str
    checksum: int = 0
    stride: tuple[int, ...] = ()
    same_as: str = ""
    is_one: bool = False
    trained: bool | None = None


def write_container(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write a file. An existing file is replaced when the new one is complete.

    Args:
        path: the file.
        tensors: tensors by name.
        texts: texts by name.

    Raises:
        InputError: safetensors does not support the layout or dtype of a tensor.
        RenderError: the file cannot be written.
    """
    stored: dict[str, StoredTensor] = {}
    flat: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES or tensor.is_meta:
            raise InputError(
                f"the tensor {name!r} is {tensor.layout}, {tensor.dtype}: a file holds plain tensors only."
            )
        about = type_text(tuple(tensor.shape), tensor.dtype)
        trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
        same_as = first.setdefault((tensor.data_ptr(), tensor.stride(), about), name)
        if same_as != name and tensor.numel():
            is_one = tensors[same_as] is tensor
            stored[name] = StoredTensor(about, same_as=same_as, is_one=is_one, trained=trained)
            continue
        stride, flat[name] = _laid_out(tensor.detach().cpu())
        stored[name] = StoredTensor(about, _checksum(flat[name]), stride, trained=trained)
    metadata = {"format": FORMAT, "version": str(VERSION), "tensors": json.dumps(to_plain(stored)), **texts}
    header = _header(flat, {**metadata, "checksum": str(_checksum_of(metadata))})
    with replacing(path) as file:
        file.write(header)
        for name in _by_alignment(flat):
            file.write(_bytes(flat[name]))


def _header(flat: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """Header of a file: its length, as 8 bytes, and the description of the tensors and texts, as JSON."""
    header: dict[str, Any] = {"__metadata__": texts}
    end = 0
    for name in _by_alignment(flat):
        tensor, begin = flat[name], end
        end += tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise InputError(
            f"the texts of the model, with its history, take more than {MAX_HEADER_BYTES >> 20} MiB, the limit of "
            "safetensors."
        )
    return len(text).to_bytes(8, "little") + text


_ALIGNMENT, MAX_HEADER_BYTES = 64, 100_000_000
"""Bytes to which torch aligns memory, and the largest header that safetensors reads."""
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
}


def _by_alignment(flat: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors in an order that aligns most: first those whose size is a multiple of the alignment."""
    return sorted(flat, key=lambda name: flat[name].nbytes % _ALIGNMENT != 0)


@dataclass(frozen=True)
class Container:
    """Content of a model file.

    Attributes:
        tensors: tensors by name.
        texts: texts by name.
        mapped: the open file if the tensors are mapped from it, else None.
    """

    tensors: dict[str, Tensor]
    texts: dict[str, str]
    mapped: MappedFile | None


MAX_COPIED_BYTES = 256 << 20
"""Size up to which a file is read into memory. Larger files are mapped, so that processes share memory."""


def read_container(path: Path) -> Container:
    """Read a file.

    Raises:
        FileError: the file is missing, holds no model, is damaged, or was written by a newer fxq.
    """
    try:
        if path.is_dir():
            raise InputError("it is a folder.")
        if path.stat().st_size <= MAX_COPIED_BYTES:
            return _read(*_copied(path.read_bytes()), None)
        mapped = MappedFile(path)
        container = _read(*_mapped(path), mapped)
        mapped.check()
        return container
    except (OSError, MemoryError, SafetensorError, InputError, ValueError, RuntimeError, LookupError) as error:
        kind, _ = kind_of(path)
        if kind:
            raise FileError(
                f"cannot load {str(path)!r}: it is {kind}, but fxq.load reads only files of qmodel.save."
            ) from None
        raise FileError(f"cannot load {str(path)!r}: {error}") from None


def _copied(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Texts and tensors of a file that was read into memory."""
    tensors = load(data)
    header = read_json(data[8 : 8 + int.from_bytes(data[:8], "little")].decode())
    return dict(header.get("__metadata__") or {}), {name: tensors.pop(name).clone() for name in list(tensors)}


def _mapped(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Texts and tensors of a file, with tensors mapped copy-on-write."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {}), {name: _aligned(file.get_tensor(name)) for name in list(file.keys())}


def _read(texts: Mapping[str, str], flat: Mapping[str, Tensor], mapped: MappedFile | None) -> Container:
    _check_texts(texts)
    stored = from_plain(dict[str, StoredTensor], read_json(texts["tensors"]))
    names = {name for name, about in stored.items() if not about.same_as}
    if flat.keys() != names:
        raise InputError(f"its tensors are not those that its header lists: {sorted(names ^ flat.keys())[:3]}.")
    tensors: dict[str, Tensor] = {}
    for name, about in stored.items():
        first = tensors.get(about.same_as) if about.is_one else None
        tensors[name] = _tensor(name, stored, flat) if first is None else first
    return Container(tensors, {name: text for name, text in texts.items() if name not in _CONTAINER_TEXTS}, mapped)


def _check_texts(texts: Mapping[str, str]) -> None:
    version = texts.get("version", "")
    if texts.get("format") != FORMAT or not (version.isascii() and version.isdigit() and len(version) < 9):
        raise InputError("it is not a model file of fxq, which qmodel.save(path) writes.")
    if int(version) > VERSION:
        raise InputError(
            f"it has version {version} of the format, and this fxq reads version {VERSION}: install a newer fxq."
        )
    if texts.get("checksum") != str(_checksum_of(texts)) or "tensors" not in texts:
        raise InputError("it is damaged: the checksum of its header is wrong.")


def _tensor(name: str, stored: Mapping[str, StoredTensor], flat: Mapping[str, Tensor]) -> Tensor:
    about, source = stored[name], stored.get(stored[name].same_as or name)
    if source is None or source.same_as:
        raise InputError(f"the tensor {name!r} refers to {about.same_as!r}, which is missing.")
    tensor = flat[about.same_as or name].detach()
    if source is about and _checksum(tensor) != about.checksum:
        raise InputError(f"it is damaged: the checksum of the tensor {name!r} is wrong.")
    if source.stride:
        if len(source.stride) != tensor.dim():
            raise InputError(f"the tensor {name!r} cannot have the strides {source.stride}.")
        order = _order(source.stride)
        shape = [tensor.shape[order.index(axis)] for axis in range(tensor.dim())]
        tensor = tensor.as_strided(shape, source.stride)
    if type_text(tuple(tensor.shape), tensor.dtype) != about.type:
        raise InputError(f"the tensor {name!r} is {type_text(tuple(tensor.shape), tensor.dtype)}, not {about.type}.")
    return tensor if about.trained is None else nn.Parameter(tensor, about.trained)


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor, copied if it has floats and is not aligned like torch's memory."""
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % _ALIGNMENT else tensor


def _laid_out(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the strides of a tensor if it is not contiguous, else (), and its values in the order of memory."""
    order = _order(tensor.stride())
    dense = tensor.numel() and tensor.permute(order).is_contiguous()
    values = tensor.permute(order) if dense else tensor.contiguous()
    plain = torch.empty(tensor.shape, device="meta").stride()
    return (tensor.stride() if dense and tensor.stride() != plain else ()), values


def _order(stride: Sequence[int]) -> list[int]:
    """Axes by decreasing stride, the order of the values in memory."""
    return sorted(range(len(stride)), key=lambda axis: -stride[axis])


def _bytes(tensor: Tensor) -> Any:
    """Bytes of a tensor in the order of memory, as a buffer."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor))


def _checksum_of(texts: Mapping[str, str]) -> int:
    rest = {name: text for name, text in texts.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def read_json(text: str) -> Any:
    """Parse JSON. Raises `InputError` if it is invalid, nested too deeply, or has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_table)
    except (ValueError, RecursionError) as error:
        raise InputError(f"its JSON is invalid: {error}.") from None


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise InputError("a table has a key twice.")
    return table
