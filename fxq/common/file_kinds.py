"""Recognition of model files in other formats, with advice on how to get an `nn.Module` from them."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

_ONNX = ("an ONNX model", "read it with fxq.read_onnx, or give it a name that ends in .onnx")
_ZIPS = {
    "/code/": ("a TorchScript program", "it has no Python code to trace: pass the nn.Module that it was scripted from"),
    "/models/model.json": ("a program of torch.export", 'pass the program itself: `torch.export.load("m.pt2")`'),
    "/data.pkl": (
        "a file of torch.save",
        "create the module, then load its weights: `model.load_state_dict(torch.load(path))`",
    ),
}
_FIRST = {
    b"GGUF": ("a GGUF model", "load its weights into a model, `fxq.load(path, into=model)`"),
    b"<?xml": ("an OpenVINO model, or other XML", "pass the nn.Module that it was converted from"),
    b"\x80": ("a pickle", "create the module, then load its weights"),
}


def kind_of(path: Path) -> tuple[str, str]:
    """Format of a file, and how to get a module from it; two empty strings if the format is unknown."""
    try:
        with path.open("rb") as file:
            first = file.read(64)
        if first.startswith(b"PK\3\4"):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            return next((about for part, about in _ZIPS.items() if any(part in name for name in names)), ("", ""))
    except (OSError, ValueError, zipfile.BadZipFile):
        return "", ""
    if first[:1] == b"\x08" and (
        first[2:3] == b"\x12" or path.suffix == ".onnx"
    ):  # field ir_version, then producer_name
        return _ONNX
    return next((about for start, about in _FIRST.items() if first.startswith(start)), ("", ""))


def is_onnx(value: Any) -> bool:
    """Whether a model is an ONNX model: a path that ends in .onnx, or a `ModelProto`."""
    if isinstance(value, (str, os.PathLike)):
        return Path(value).suffix == ".onnx"
    return type(value).__name__ == "ModelProto"


def no_module(value: Any) -> str:
    """Error message for a model that is the path of a file; empty if its format is not recognized."""
    if not isinstance(value, (str, os.PathLike)):
        return ""
    kind, how = kind_of(Path(value))
    return f"the model is the path of {kind}, but fxq takes an nn.Module: {how}." if kind else ""
