"""What kind of model a file holds that is none of fxq's, by its first bytes, and how a module is made of it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

_ONNX = (
    "an ONNX model",
    'a converter makes a module of it: `pip install onnx2torch`, then `onnx2torch.convert("m.onnx").eval()`',
)
_ZIPS = {
    "/code/": ("a TorchScript program", "it has no Python code to trace: take the module that it was made of"),
    "/models/model.json": ("a program of torch.export", 'give the program itself: `torch.export.load("m.pt2")`'),
    "/data.pkl": (
        "a file of torch.save",
        "make the module, and load its weights: `model.load_state_dict(torch.load(path))`",
    ),
}
_FIRST = {
    b"GGUF": ("a GGUF model", "make the module, and load the float weights that it was made of"),
    b"<?xml": ("an OpenVINO model, or other XML", "take the module that it was made of"),
    b"\x80": ("a pickle", "make the module, and load its weights"),
}


def kind_of(path: Path) -> tuple[str, str]:
    """What a file is, and how to come to a module that fxq takes; two empty strings where that is not known."""
    try:
        with path.open("rb") as file:
            first = file.read(64)
        if first.startswith(b"PK\3\4"):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            return next((about for part, about in _ZIPS.items() if any(part in name for name in names)), ("", ""))
    except (OSError, ValueError, zipfile.BadZipFile):
        return "", ""
    if first[:1] == b"\x08" and (first[2:3] == b"\x12" or path.suffix == ".onnx"):  # its version, then who made it
        return _ONNX
    return next((about for start, about in _FIRST.items() if first.startswith(start)), ("", ""))


def no_module(value: Any) -> str:
    """What to say of a model that is a path or an object of another library; empty where nothing is known of it."""
    if type(value).__name__ == "ModelProto":
        kind, how = _ONNX
        return f"the model is {kind}, and fxq takes modules: {how}."
    if not isinstance(value, (str, os.PathLike)):
        return ""
    kind, how = kind_of(Path(value))
    if Path(value).suffix == ".onnx":
        kind, how = _ONNX
    return f"the model is the path of {kind}, and fxq takes modules: {how}." if kind else ""
