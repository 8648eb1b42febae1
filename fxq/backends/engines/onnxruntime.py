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
    """Kernel of a region that ONNX Runtime compiles for the CPU."""

    name: ClassVar[str] = "onnxruntime.region"

    @classmethod
    def written(cls, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> OnnxGraph:
        """Return the ONNX form of a region, with ConvInteger for convolutions whose result stays in float."""
        return super().written(gm, inputs, integer_conv=True, **options)

    @classmethod
    def compiled(cls, model: Any, threads: int, **options: Any) -> Callable[[], Request]:
        """Compile a model. One session serves several threads; each thread has its own binding to memory."""
        return partial(OnnxruntimeRequest, session_of(model, threads))

    @classmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor], **options: Any) -> Iterable[EngineLayer]:
        """Yield the layers of the profile that a session writes."""
        with tempfile.TemporaryDirectory() as folder:
            session = session_of(model, torch.get_num_threads(), profile=str(Path(folder, "profile")))
            feeds = {arg.name: x.numpy() for arg, x in zip(session.get_inputs(), inputs, strict=True)}
            for _ in profile_runs():
                session.run(None, feeds)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        times: dict[str, list[float]] = {}
        attributes: dict[str, Any] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(_TIME_SUFFIX):
                times.setdefault(event["name"].removesuffix(_TIME_SUFFIX), []).append(event["dur"])
                attributes[event["name"].removesuffix(_TIME_SUFFIX)] = event["args"]
        scaled = {name.rpartition("/")[0] for name in times if attributes[name]["op_name"] == "ConvInteger"}
        for name, durations in times.items():
            op = attributes[name]["op_name"]
            dtype = "uint8" if op in _DYNAMIC_OPS else _compute_type(attributes[name]["input_type_shape"])
            is_scaling = op in _SCALING_OPS and name.rpartition("/")[0] in scaled
            kind = "convert" if op in _CONVERSION_OPS or is_scaling else kind_of(dtype)
            yield EngineLayer((name,), op, dtype, kind, min(durations))


def session_of(model: Any, threads: int, profile: str = "") -> Any:
    """Create a session that runs an `onnx.ModelProto`. On CPUs without VNNI it sums products without saturation.

    Args:
        model: The model.
        threads: Number of threads; the model may set a lower limit.
        profile: Prefix of the file that the profile is written to; empty for no profile.
    """
    ort = import_engine("onnxruntime")
    options = ort.SessionOptions()
    thread_limit = next((int(entry.value) for entry in model.metadata_props if entry.key == THREADS), threads)
    options.intra_op_num_threads, options.log_severity_level = (
        min(threads, thread_limit),
        4,
    )  # errors are raised, not logged
    if not cpu.has_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS
    )


SLOW_FUSIONS = ["SkipLayerNormFusion"]
"""Fusions of ONNX Runtime that take several times as long as their parts, in version 1.31."""


class OnnxruntimeRequest(Request):
    """Session that is bound to memory."""

    def __init__(self, session: Any) -> None:
        self.session, self.binding = session, session.io_binding()
        self.reads, self.makes = ([arg.name for arg in args] for args in (session.get_inputs(), session.get_outputs()))

    def set_input(self, i: int, x: Tensor) -> None:
        """Bind an input to the memory of a tensor."""
        self.binding.bind_input(self.reads[i], "cpu", 0, onnx_type(x.dtype), tuple(x.shape), x.data_ptr())

    def set_output(self, i: int, y: Tensor) -> None:
        """Bind an output to the memory of a tensor."""
        self.binding.bind_output(self.makes[i], "cpu", 0, onnx_type(y.dtype), tuple(y.shape), y.data_ptr())

    def run(self) -> None:
        """Run the session."""
        self.session.run_with_iobinding(self.binding)


_TIME_SUFFIX = "_kernel_time"
_CONVERSION_OPS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_DYNAMIC_OPS = ("DynamicQuantizeMatMul", "DynamicQuantizeLSTM")
"""Ops that read floats and compute on integers."""
_SCALING_OPS = ("Cast", "Mul", "Add", "Relu", "Clip")
"""Ops that scale the sums of a ConvInteger to float and clamp them."""
_INTEGER_TYPES = ("uint8", "int8", "uint4", "int4")


def _compute_type(inputs: Sequence[dict[str, Sequence[int]]]) -> str:
    """Type that a node computes in: that of its integer inputs with axes, or else of its first input."""
    types = [(type_, shape) for input_types in inputs for type_, shape in input_types.items()]
    compute_type = next(
        (type_ for type_, shape in types if shape and type_ in _INTEGER_TYPES), types[0][0] if types else ""
    )
    return {"float": "float32", "double": "float64"}.get(compute_type, compute_type)


def _is_dynamic(config: QuantConfig) -> bool:
    """Whether activations have dynamic ranges."""
    return config.activation is not None and config.activation.range == "dynamic"


_PER_TENSOR_DYNAMIC = TensorSpec(range="dynamic")
"""Dynamic range of a whole tensor."""


_MAX_ERROR_GROWTH = 1.12
"""Factor by which the power of the rounding error may grow with one scale for all rows: 0.5 dB."""


def _has_even_rows(weight: Tensor) -> bool:
    """Whether the rows of a weight, (R, C), have so similar ranges that one scale serves all of them."""
    squares = weight.abs().amax(1).square()
    return bool(squares.max() <= _MAX_ERROR_GROWTH * squares.mean())


class Onnxruntime(OnnxBackend):
    """Backend of ONNX Runtime's CPU provider: uint8 activations, int8 per-channel weights; LSTMs may be per-tensor."""

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
        """Return the config of a unit: an LSTM has dynamic per-tensor ranges of its input and of each step's state.

        These ranges are of all samples together, so the result of a sample depends a little on the others.

        Per-channel weights make the recurrent product slower. So the weights have one scale each if the rows of both
        have much the same range; both weights are quantized alike.
        """
        if calls[0].op.name != "lstm" or config.activation is None or config.state is None:
            return config
        weights = [constant(gm, calls[0].tensors[name]) for name in ("weight_ih", "weight_hh")]
        spec = config.weight
        if spec is not None and spec.per == "channel" and all(w is not None and _has_even_rows(w) for w in weights):
            spec = replace(spec, per="tensor")
        return replace(config, activation=_PER_TENSOR_DYNAMIC, weight=spec, state=_PER_TENSOR_DYNAMIC)

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """How many ops of a unit the engine runs on integers.

        With dynamic ranges, only ops count that ONNX Runtime has a dynamic kernel for.
        """
        reason = self._dynamic_refusal(calls[0], config) if _is_dynamic(config) else None
        return super().supports(gm, node, calls, config) if reason is None else Support(0, f"{self.name} {reason}")

    def _dynamic_refusal(self, call: OpCall, config: QuantConfig) -> str | None:
        """Reason why no kernel runs a layer with a dynamic range of its input, or None.

        Also None for ops that are not in `measures`, which `supports` refuses.
        """
        if config.weight is not None and not config.weight.symmetric:
            return "computes dynamic ranges beside symmetric weights only"
        is_float = call.op.name == "lstm" and config.state is None
        return "reads the state of an LSTM as integers" if is_float else None

    def fuses(self, calls: Calls) -> bool:
        """Whether all ops but the first are clamps, which the quantization after them includes."""
        return all(call.op.name in ("relu", "relu6", "hardtanh") for call in calls[1:])
