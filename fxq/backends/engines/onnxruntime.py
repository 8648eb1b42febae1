"""The onnxruntime backend: regions run in ONNX Runtime."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends import cpu
from fxq.backends.engines.engine import EngineBackend, EngineKernel, imported, repeated
from fxq.backends.engines.request import Request
from fxq.graph.info import EngineLayer
from fxq.graph.unit import Calls
from fxq.onnx.writer import onnx_type
from fxq.ops import OPS


class OnnxruntimeKernel(EngineKernel):
    """A region as ONNX Runtime compiles it for the CPU."""

    name: ClassVar[str] = "onnxruntime.region"

    @classmethod
    def compiled(cls, model: Any, threads: int) -> Callable[[], Request]:
        """As in `EngineKernel`. A session runs in several threads; each has a binding of its own to memory."""
        return partial(OnnxruntimeRequest, session_of(model, threads))

    @classmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor]) -> Iterable[EngineLayer]:
        """As in `EngineKernel`: from the file that a session writes when it is told to."""
        with tempfile.TemporaryDirectory() as folder:
            session = session_of(model, torch.get_num_threads(), profile=str(Path(folder, "profile")))
            given = {arg.name: x.numpy() for arg, x in zip(session.get_inputs(), inputs, strict=True)}
            for _ in repeated():
                session.run(None, given)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        times: dict[str, list[float]] = {}
        about: dict[str, Any] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(_TIME):
                times.setdefault(event["name"].removesuffix(_TIME), []).append(event["dur"])
                about[event["name"].removesuffix(_TIME)] = event["args"]
        for name, found in times.items():
            op, dtype = about[name]["op_name"], _computes_in(about[name]["input_type_shape"])
            converts = op in ("QuantizeLinear", "DequantizeLinear")
            kind: Any = "convert" if converts else "int8" if dtype in _INTEGERS else "float"
            yield EngineLayer((name,), op, dtype, kind, min(found))


def session_of(model: Any, threads: int, profile: str = "") -> Any:
    """A session that runs an `onnx.ModelProto`. On CPUs without VNNI it is told to add products exactly.

    Args:
        model: the model.
        threads: on how many threads.
        profile: what the name of a file begins with, where it writes what it has done; empty: nowhere.
    """
    ort = imported("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    if not cpu.has_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class OnnxruntimeRequest(Request):
    """A session, bound to memory."""

    def __init__(self, session: Any) -> None:
        self.session, self.binding = session, session.io_binding()
        self.reads, self.makes = ([arg.name for arg in args] for args in (session.get_inputs(), session.get_outputs()))

    def set_input(self, i: int, x: Tensor) -> None:
        """As in `Request`."""
        self.binding.bind_input(self.reads[i], "cpu", 0, onnx_type(x.dtype), tuple(x.shape), x.data_ptr())

    def set_output(self, i: int, y: Tensor) -> None:
        """As in `Request`."""
        self.binding.bind_output(self.makes[i], "cpu", 0, onnx_type(y.dtype), tuple(y.shape), y.data_ptr())

    def run(self) -> None:
        """As in `Request`."""
        self.session.run_with_iobinding(self.binding)


_TIME = "_kernel_time"
_INTEGERS = ("uint8", "int8", "uint4", "int4")


def _computes_in(inputs: Sequence[dict[str, Sequence[int]]]) -> str:
    """The type that a node computes in, of the types and shapes that it reads: that of integers, scalars aside."""
    types = [(kind, shape) for one in inputs for kind, shape in one.items()]
    found = next((kind for kind, shape in types if shape and kind in _INTEGERS), types[0][0] if types else "")
    return {"float": "float32", "double": "float64"}.get(found, found)


class Onnxruntime(EngineBackend):
    """ONNX Runtime's CPU provider. uint8 activations, int8 per-channel weights."""

    name: ClassVar[str] = "onnxruntime"
    package: ClassVar[str] = "onnxruntime"
    kernel: ClassVar[type[EngineKernel]] = OnnxruntimeKernel
    layers: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), "linear"})
    others: ClassVar[frozenset[str]] = frozenset({"add", "mul", "mean", *OPS.family("adaptive_avg_pool")})
    rounding: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), *others})

    def fuses(self, calls: Calls) -> bool:
        """Where all but the first op are clamps, which the rounding behind them covers."""
        return all(call.op.name in ("relu", "relu6", "hardtanh") for call in calls[1:])
