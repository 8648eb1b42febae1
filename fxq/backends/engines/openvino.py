"""The openvino backend: regions run in OpenVINO."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends import cpu
from fxq.backends.base import Support
from fxq.backends.engine import EngineKernel, import_engine
from fxq.backends.engine_layers import kind_of
from fxq.backends.engines.moves import convert_before_moves
from fxq.backends.engines.onnx_engine import OnnxBackend, OnnxKernel
from fxq.backends.engines.openvino_tuning import (
    NO_SNIPPETS,
    faster_in_jit,
    faster_without_snippets,
    in_jit,
    layer_times,
)
from fxq.backends.engines.request import Request
from fxq.backends.table.layer_rows import is_depthwise_call
from fxq.graph.info import EngineLayer, info
from fxq.graph.unit import Calls
from fxq.onnx.graph import OnnxGraph
from fxq.ops import OPS
from fxq.quant.spec import QuantConfig

log = logging.getLogger("fxq")


@cache
def _core() -> Any:
    return import_engine("openvino").Core()


class OpenvinoKernel(OnnxKernel):
    """Kernel of a region that OpenVINO compiles: float32, one stream.

    Args:
        jit: Names of convolutions that run in "jit" kernels instead of OpenVINO's choice. See `openvino_tuning.py`.
        snippets: Whether OpenVINO fuses chains of element-wise ops into kernels of its own.
        tensors: See `RegionKernel`.
    """

    name: ClassVar[str] = "openvino.region"
    options: ClassVar[tuple[str, ...]] = ("jit", "snippets")
    integer_bias: ClassVar[bool] = False
    jit: tuple[str, ...] = ()
    snippets: bool = True

    def __init__(self, jit: tuple[str, ...] = (), snippets: bool = True, **tensors: Tensor) -> None:
        super().__init__(**tensors)
        self.jit, self.snippets = jit, snippets

    @classmethod
    def written(cls, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> OnnxGraph:
        """Return the ONNX form of a region, with conversions before moves."""
        convert_before_moves(gm)
        return super().written(gm, inputs, for_openvino=True, **options)

    @classmethod
    def compiled(cls, model: Any, threads: int, **options: Any) -> Callable[[], Request]:
        """Compile a model. Each thread has its own request, which serves one call at a time."""
        return partial(OpenvinoRequest, compile_model(read_model(model), threads, **options))

    @classmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor], **options: Any) -> Iterable[EngineLayer]:
        """Yield the layers of a compiled model with OpenVINO's times of them."""
        compiled = compile_model(read_model(model), torch.get_num_threads(), PERF_COUNT=True, **options)
        request = OpenvinoRequest(compiled)
        for i, x in enumerate(inputs):
            request.set_input(i, x)
        times = layer_times(request.request)
        for node in compiled.get_runtime_model().get_ordered_ops():
            if node.friendly_name in times:
                attributes = {key: value.astype(str) for key, value in node.get_rt_info().items()}
                names, op = attributes.get("originalLayersNames", ""), attributes.get("layerType", "")
                dtype = _torch_name(attributes.get("runtimePrecision", ""))
                kind = "float" if "Compressed" in op else kind_of(dtype)  # integer weights are dequantized
                yield EngineLayer(tuple(names.split(",")), op, dtype, kind, times[node.friendly_name])

    def tune(self, *inputs: Any) -> None:
        """Time the region with and without snippets, then its convolutions in "jit" kernels, and keep the fastest."""
        if self.form is None:
            return
        written, tensors = self.model_for(self.form.module(self), inputs)
        model, arrays = read_model(written), [x.numpy() for x in tensors]
        compiled = partial(compile_model, model, torch.get_num_threads())
        self.adopt({"snippets": not faster_without_snippets(compiled, arrays)})
        timed = partial(compiled, snippets=self.snippets, PERF_COUNT=True)
        self.adopt({"jit": faster_in_jit(model, timed, arrays)})


def compile_model(model: Any, threads: int, jit: Sequence[str] = (), snippets: bool = True, **config: Any) -> Any:
    """Compile an `openvino.Model`. The convolutions named in `jit` run in "jit" kernels.

    See `fxq/backends/engines/openvino_tuning.py`.
    """
    settings = {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }  # fmt: skip
    core = _core()
    prepared = in_jit(core, model, jit) if jit else model
    if not snippets:
        try:
            return core.compile_model(prepared, "CPU", {**settings, **NO_SNIPPETS, **config})
        except RuntimeError as error:  # versions that do not know the entry
            log.debug("OpenVINO cannot disable snippets: %s", error)
    return core.compile_model(prepared, "CPU", {**settings, **config})


def read_model(model: Any) -> Any:
    """Read an `onnx.ModelProto` as an `openvino.Model`."""
    return _core().read_model(model.SerializeToString())


class OpenvinoRequest(Request):
    """Request of a compiled model."""

    def __init__(self, compiled: Any) -> None:
        self.request, self.tensor = compiled.create_infer_request(), import_engine("openvino").Tensor

    def set_input(self, i: int, x: Tensor) -> None:
        """Bind an input to the memory of a tensor."""
        self.request.set_input_tensor(i, self.tensor(x.numpy(), shared_memory=True))

    def set_output(self, i: int, y: Tensor) -> None:
        """Bind an output to the memory of a tensor."""
        self.request.set_output_tensor(i, self.tensor(y.numpy(), shared_memory=True))

    def run(self) -> None:
        """Run the request."""
        self.request.infer(share_outputs=True)


def _torch_name(dtype: str) -> str:
    """PyTorch's name of a type of OpenVINO: "uint8" for "u8"."""
    prefixes = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint"}
    return re.sub("^(bf|f|i|u)(?=[0-9])", lambda match: prefixes[match[0]], dtype)


class Openvino(OnnxBackend):
    """Backend of OpenVINO's CPU plugin: uint8 activations, int8 per-channel weights.

    Without VNNI, oneDNN, which OpenVINO includes, sums pairs of products in 16 bits, which may saturate.
    """

    name: ClassVar[str] = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "onnx")
    kernel: ClassVar[type[EngineKernel]] = OpenvinoKernel
    layers: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), *OPS.family("conv_transpose"), "linear"})
    other_ops: ClassVar[frozenset[str]] = frozenset(
        {"add", "mul", "mean", *OPS.family("avg_pool"), *OPS.family("adaptive_avg_pool")}
    )
    dynamic_layers: ClassVar[frozenset[str]] = frozenset({"linear"})
    table_ops: ClassVar[frozenset[str]] = frozenset({"embedding"})
    large_layers_gain: ClassVar[bool] = True

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """Reason why the engine does not run a node; None if it runs.

        OpenVINO computes in float32 only. Nodes with int64 results or inputs are refused unless the result is float,
        since it computes int64 in 32 bits.
        """
        result_dtype = info(node).dtype
        dtypes = {result_dtype, *(info(read).dtype for read in node.all_input_nodes)}
        other_float = next((kind for kind in dtypes if kind and kind.is_floating_point and kind != torch.float32), None)
        if other_float is not None:
            return f"OpenVINO computes in float32, and not in {str(other_float).removeprefix('torch.')}"
        if torch.int64 in dtypes and not (result_dtype is not None and result_dtype.is_floating_point):
            return "OpenVINO computes integers of 64 bits in 32"
        return super().refusal(gm, node)

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: Calls) -> QuantConfig:
        """Return the config of a unit: transposed convolutions read symmetric int8, without a zero point.

        With a zero point OpenVINO runs them in float. Without VNNI they keep their config: there int8 is shifted to
        uint8, whose large values saturate.
        """
        if calls[0].op.name not in OPS.family("conv_transpose") or config.activation is None or not cpu.has_vnni():
            return config
        return replace(config, activation=replace(config.activation, signed=True, symmetric=True))

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """How many ops of a unit OpenVINO runs on integers; beside dynamic ranges, weights must be symmetric."""
        is_dynamic = config.activation is not None and config.activation.range == "dynamic"
        if is_dynamic and config.weight is not None and not config.weight.symmetric:
            return Support(0, f"{self.name} computes dynamic ranges beside symmetric weights only")
        return super().supports(gm, node, calls, config)

    def adds_in_int16(self, calls: Calls) -> bool:
        """Whether the unit is a layer on a CPU without VNNI, except depthwise convolutions."""
        return bool(calls[0].op.traits.weight) and not cpu.has_vnni() and not is_depthwise_call(calls[0])

    def available(self) -> str | None:
        """Reason why the backend cannot run here, also if oneDNN's instruction sets are limited; None if it can run."""
        isa = cpu.onednn_isa()
        if isa != "DEFAULT":
            return (
                f"OpenVINO crashes if oneDNN is limited to {isa}: unset ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA. "
                'Use backend="auto".'
            )
        return super().available()

    def drawback(self) -> str | None:
        """Drawback of a CPU without VNNI; None with VNNI."""
        return cpu.without_vnni()
