"""Weights that are read when they are used: tensors of safetensors files, mapped into memory page by page."""

from __future__ import annotations

import ctypes
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_COPY, PAGESIZE, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxq.checkpoints.tensor_files import files_of
from fxq.errors import FileError, InputError, words_of

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
_INTERVAL = 0.005
"""Seconds between two looks at the pages in memory."""


class MappedWeights(Mapping[str, Tensor]):
    """Tensors of a safetensors file or folder by name, each mapped into memory.

    A page is read when it is used, and `bounded` drops pages again, so that the tensors are never in memory as a whole.
    Tensors that are wanted in another dtype, such as float32 for bfloat16, are converted one by one into a temporary
    file, which is mapped. Tensors stay valid while they are referenced. They must not be written to.

    Args:
        path: the file or folder.
        dtype: function that returns the dtype in which a tensor is wanted, from its name and its dtype.

    Attributes:
        path: the file or folder.

    Raises:
        FileError: a file is missing or damaged, or the temporary file cannot be written.
    """

    def __init__(self, path: Path, dtype: Callable[[str, torch.dtype], torch.dtype]) -> None:
        self.path = path
        self._maps: list[mmap] = []
        self._tensors: dict[str, Tensor] = {}
        files = files_of(path)
        for file in dict.fromkeys(files.values()):
            self._tensors |= {name: tensor for name, tensor in self._mapped(file).items() if files.get(name) == file}
        wanted = {name: dtype(name, tensor.dtype) for name, tensor in self._tensors.items()}
        self._convert({name: kind for name, kind in wanted.items() if kind != self._tensors[name].dtype})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _mapped(self, path: Path) -> dict[str, Tensor]:
        """Tensors of one file, whose header `files_of` has checked. Each has a storage of its own."""
        try:
            with path.open("rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(start - 8))
                self._maps.append(mmap(file.fileno(), 0, access=ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise FileError(f"cannot read {str(path)!r}: {words_of(error)}") from error
        header.pop("__metadata__", None)
        for name, about in header.items():
            if about["dtype"] not in _DTYPES:
                raise FileError(f"cannot read {str(path)!r}: {name} is {about['dtype']}, which is no plain dtype.")
        return {
            name: _tensor(self._maps[-1], _DTYPES[about["dtype"]], about["shape"], start + about["data_offsets"][0])
            for name, about in header.items()
        }

    def _convert(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Replace tensors by converted ones in a temporary file, one after another."""
        if not dtypes:
            return
        try:
            with tempfile.TemporaryFile() as file:
                starts: dict[str, int] = {}
                for name, dtype in dtypes.items():
                    starts[name] = file.tell()
                    values = self._tensors[name].to(dtype).contiguous()
                    file.write(values.flatten().view(torch.uint8).numpy().data)
                    file.write(bytes(-file.tell() % 64))
                    self.release()
                file.flush()
                self._maps.append(mmap(file.fileno(), 0, access=ACCESS_COPY))
        except OSError as error:
            raise FileError(
                f"cannot convert the weights of {str(self.path)!r} in {tempfile.gettempdir()!r}: {words_of(error)}. "
                "The environment variable TMPDIR names another folder."
            ) from error
        for name, dtype in dtypes.items():
            self._tensors[name] = _tensor(self._maps[-1], dtype, self._tensors[name].shape, starts[name])

    def release(self) -> None:
        """Drop all pages from memory, which are read again when they are used; return freed memory to the system."""
        for mapped in self._maps:
            if hasattr(mapped, "madvise"):  # Windows drops pages itself, when other programs need memory
                from mmap import MADV_DONTNEED

                mapped.madvise(MADV_DONTNEED)
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # glibc keeps what temporary tensors of some MB leave

    @contextmanager
    def bounded(self, model: nn.Module) -> Iterator[None]:
        """Context in which pages are dropped once those in memory are more than the largest tensor has.

        Args:
            model: the model that has the tensors as parameters.

        Raises:
            InputError: a parameter was written to: dropping its pages may have lost what was written.
        """
        versions = {name: parameter._version for name, parameter in model.named_parameters()}
        limit = _bytes_of_files() + max((tensor.nbytes for tensor in self.values()), default=0)
        stop = threading.Event()

        def drop() -> None:
            while not stop.wait(_INTERVAL):
                if _bytes_of_files() > limit:
                    self.release()

        thread = threading.Thread(target=drop, name="fxq-mapped-weights", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.release()
        written = [name for name, p in model.named_parameters() if p._version != versions.get(name, p._version)]
        if written:
            raise InputError(
                f"{type(model).__name__} writes to its parameter {written[0]!r} when it is called, and parameters that "
                "are read from files cannot be written to. Load the weights into the model, and quantize that."
            )


def _tensor(mapped: mmap, dtype: torch.dtype, shape: Any, start: int) -> Tensor:
    """Tensor that lies in a mapped file, from a byte on."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).reshape(tuple(shape))


def _bytes_of_files() -> float:
    """Bytes of mapped files in this process's memory; infinite where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * float(PAGESIZE)
    except (OSError, IndexError, ValueError):
        return math.inf


def with_parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Turn a model on the meta device into one with tensors, in place. Tied parameters stay tied. Returns the model.

    Parameters are the tensors themselves, and buffers are copies, since a forward may write to them.

    Args:
        model: the model; tensors that have values stay as they are.
        weights: tensors by name.

    Raises:
        FileError: a tensor is missing, or has another shape.
    """
    places = list(_meta_tensors(model))
    filled: dict[int, Tensor] = {}
    for _, _, name, old in places:
        if name in weights:
            new = weights[name]
            if new.shape != old.shape:
                raise FileError(
                    f"{name!r} is {list(new.shape)} in the files, and {list(old.shape)} in {type(model).__name__}."
                )
            is_parameter = isinstance(old, nn.Parameter)
            filled[id(old)] = nn.Parameter(new, old.requires_grad) if is_parameter else new.clone()
    for module, leaf, name, old in places:
        if id(old) not in filled:
            is_computed = leaf in module._non_persistent_buffers_set
            hint = ", which its constructor computes: create it on the CPU" if is_computed else ""
            raise FileError(f"the files have no weight for {name!r} of {type(model).__name__}{hint}.")
        own: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
        own[leaf] = filled[id(old)]
    return model


def _meta_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yield each parameter and buffer without values: its module, its name there, its path, and itself."""
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:
                yield module, leaf, f"{path}.{leaf}".lstrip("."), tensor
