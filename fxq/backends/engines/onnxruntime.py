"""The onnxruntime backend: regions run in ONNX Runtime."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends import cpu
from fxq.backends.base import Support
from fxq.backends.engine import EngineKernel, import_engine, profile_runs
from fxq.backends.engine_layers import kind_of
from fxq.backends.engines.onnx_engine import OnnxBackend, OnnxKernel
from fxq.backends.engines.request import Request
from fxq.graph.info import EngineLayer
from fxq.graph.query import constant
from fxq.graph.unit import Calls, OpCall
from fxq.onnx.graph import OnnxGraph
from fxq.onnx.onnx_objects import THREADS, onnx_type
from fxq.ops import OPS
from fxq.quant.spec import QuantConfig, TensorSpec


class OnnxruntimeKernel(OnnxKernel):
    """A region as ONNX Runtime compiles it for the CPU."""

    name: ClassVar[str] = "onnxruntime.region"

    @classmethod
    def written(cls, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> OnnxGraph:
        """ONNX form of a region, with ConvInteger for convolutions whose result stays in float, see `OnnxKernel`."""
        return super().written(gm, inputs, integer_conv=True, **options)

    @classmethod
    def compiled(cls, model: Any, threads: int, **options: Any) -> Callable[[], Request]:
        """As in `OnnxKernel`. A session runs in several threads; each has a binding of its own to memory."""
        return partial(OnnxruntimeRequest, session_of(model, threads))

    @classmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor], **options: Any) -> Iterable[EngineLayer]:
        """As in `OnnxKernel`: from the file that a session writes when it is told to."""
        with tempfile.TemporaryDirectory() as folder:
            session = session_of(model, torch.get_num_threads(), profile=str(Path(folder, "profile")))
            feeds = {arg.name: x.numpy() for arg, x in zip(session.get_inputs(), inputs, strict=True)}
            for _ in profile_runs():
                session.run(None, feeds)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        times: dict[str, list[float]] = {}
        about: dict[str, Any] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(_TIME):
                times.setdefault(event["name"].removesuffix(_TIME), []).append(event["dur"])
                about[event["name"].removesuffix(_TIME)] = event["args"]
        scaled = {name.rpartition("/")[0] for name in times if about[name]["op_name"] == "ConvInteger"}
        for name, durations in times.items():
            op = about[name]["op_name"]
            dtype = "uint8" if op in _QUANTIZING else _computes_in(about[name]["input_type_shape"])
            is_scaling = op in _SCALING and name.rpartition("/")[0] in scaled
            kind = "convert" if op in _CONVERTING or is_scaling else kind_of(dtype)
            yield EngineLayer((name,), op, dtype, kind, min(durations))


def session_of(model: Any, threads: int, profile: str = "") -> Any:
    """A session that runs an `onnx.ModelProto`. On CPUs without VNNI it is told to add products exactly.

    Args:
        model: the model.
        threads: on how many threads; on fewer where the model says so.
        profile: what the name of a file begins with, where it writes what it has done; empty: nowhere.
    """
    ort = import_engine("onnxruntime")
    options = ort.SessionOptions()
    most = next((int(entry.value) for entry in model.metadata_props if entry.key == THREADS), threads)
    options.intra_op_num_threads, options.log_severity_level = min(threads, most), 4  # it raises what it would log
    if not cpu.has_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER
    )


SLOWER = ["SkipLayerNormFusion"]
"""What ONNX Runtime would join although, in version 1.31, the whole takes several times as long as its parts."""


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
_CONVERTING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_QUANTIZING = ("DynamicQuantizeMatMul", "DynamicQuantizeLSTM")
"""What reads floats and computes with integers."""
_SCALING = ("Cast", "Mul", "Add", "Relu", "Clip")
"""Ops that scale the sums of a ConvInteger to float and clamp them."""
_INTEGERS = ("uint8", "int8", "uint4", "int4")


def _computes_in(inputs: Sequence[dict[str, Sequence[int]]]) -> str:
    """The type that a node computes in, of the types and shapes that it reads: that of integers, scalars aside."""
    types = [(kind, shape) for one in inputs for kind, shape in one.items()]
    found = next((kind for kind, shape in types if shape and kind in _INTEGERS), types[0][0] if types else "")
    return {"float": "float32", "double": "float64"}.get(found, found)


def _is_measured(config: QuantConfig) -> bool:
    return config.activation is not None and config.activation.range == "dynamic"


_WHOLE = TensorSpec(range="dynamic")
"""One range of all values."""


_EVEN = 1.12
"""How many times as large the power of the rounding error may become by one scale for all rows: 0.5 dB."""


def _is_even(weight: Tensor) -> bool:
    """Whether the rows of a weight, (R, C), have much the same range."""
    squares = weight.abs().amax(1).square()
    return bool(squares.max() <= _EVEN * squares.mean())


class Onnxruntime(OnnxBackend):
    """ONNX Runtime's CPU provider. uint8 activations, int8 weights per channel; of some LSTMs, per tensor."""

    name: ClassVar[str] = "onnxruntime"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnx")
    kernel: ClassVar[type[EngineKernel]] = OnnxruntimeKernel
    layers: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), "linear"})
    other_ops: ClassVar[frozenset[str]] = frozenset({"add", "mul", "mean", *OPS.family("adaptive_avg_pool")})
    rounded_ops: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), *other_ops})
    float_output_ops: ClassVar[frozenset[str]] = frozenset(OPS.family("conv"))
    dynamic_layers: ClassVar[frozenset[str]] = frozenset({"linear", "lstm"})
    table_ops: ClassVar[frozenset[str]] = frozenset({"embedding"})

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: Calls) -> QuantConfig:
        """As in `Backend`: an LSTM measures one range of its input, and one of each step's state, with zero points.

        They are those of all samples together, so that what a sample gives depends a little on the others.

        A scale for each row of the weight that the state is multiplied with takes longer. So there is one for all rows
        of its weights where they have much the same range, of both: they are quantized alike.
        """
        if calls[0].op.name != "lstm" or config.activation is None or config.state is None:
            return config
        weights = [constant(gm, calls[0].tensors[name]) for name in ("weight_ih", "weight_hh")]
        spec = config.weight
        if spec is not None and spec.per == "channel" and all(w is not None and _is_even(w) for w in weights):
            spec = replace(spec, per="tensor")
        return replace(config, activation=_WHOLE, weight=spec, state=_WHOLE)

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """As in `Backend`; with measured ranges, what ONNX Runtime has a quick kernel for that measures so."""
        reason = self._unmeasured(calls[0], config) if _is_measured(config) else None
        return super().supports(gm, node, calls, config) if reason is None else Support(0, f"{self.name} {reason}")

    def _unmeasured(self, call: OpCall, config: QuantConfig) -> str | None:
        """Why no kernel runs a layer whose input has a measured range; None: one does, or it is none of `measures`."""
        if config.weight is not None and not config.weight.symmetric:
            return "measures ranges beside symmetric weights only"
        is_float = call.op.name == "lstm" and config.state is None
        return "reads the state of an LSTM as integers" if is_float else None

    def fuses(self, calls: Calls) -> bool:
        """Where all but the first op are clamps, which the rounding behind them covers."""
        return all(call.op.name in ("relu", "relu6", "hardtanh") for call in calls[1:])
