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
    """A region as OpenVINO compiles it: float32, one stream.

    Args:
        jit: names of convolutions that it does not run in the kernels of its own choice. See `openvino_tuning.py`.
        snippets: whether it makes kernels of its own of chains of element-wise ops.
        tensors: as in `RegionKernel`.
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
        """As in `OnnxKernel`."""
        convert_before_moves(gm)
        return super().written(gm, inputs, **options)

    @classmethod
    def compiled(cls, model: Any, threads: int, **options: Any) -> Callable[[], Request]:
        """As in `OnnxKernel`. Each thread has a request of its own: one serves a single call at a time."""
        return partial(OpenvinoRequest, compile_model(read_model(model), threads, **options))

    @classmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor], **options: Any) -> Iterable[EngineLayer]:
        """As in `OnnxKernel`."""
        compiled = compile_model(read_model(model), torch.get_num_threads(), PERF_COUNT=True, **options)
        request = OpenvinoRequest(compiled)
        for i, x in enumerate(inputs):
            request.set_input(i, x)
        times = layer_times(request.request)
        for node in compiled.get_runtime_model().get_ordered_ops():
            if node.friendly_name in times:
                about = {key: value.astype(str) for key, value in node.get_rt_info().items()}
                names, op = about.get("originalLayersNames", ""), about.get("layerType", "")
                dtype = _torch_name(about.get("runtimePrecision", ""))
                kind = "float" if "Compressed" in op else kind_of(dtype)  # it makes floats of integer weights
                yield EngineLayer(tuple(names.split(",")), op, dtype, kind, times[node.friendly_name])

    def tune(self, *inputs: Any) -> None:
        """As in `RegionKernel`: with snippets or without, and the convolutions that other kernels run faster."""
        if self.form is None:
            return
        written, tensors = self.model_for(self.form.module(self), inputs)
        model, arrays = read_model(written), [x.numpy() for x in tensors]
        compiled = partial(compile_model, model, torch.get_num_threads())
        self.adopt({"snippets": not faster_without_snippets(compiled, arrays)})
        timed = partial(compiled, snippets=self.snippets, PERF_COUNT=True)
        self.adopt({"jit": faster_in_jit(model, timed, arrays)})


def compile_model(model: Any, threads: int, jit: Sequence[str] = (), snippets: bool = True, **config: Any) -> Any:
    """An `openvino.Model`, compiled; the convolutions of these names run in kernels of the other kind.

    See `fxq/backends/engines/openvino_tuning.py`.
    """
    settings = {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }  # fmt: skip
    core = _core()
    told = in_jit(core, model, jit) if jit else model
    if not snippets:
        try:
            return core.compile_model(told, "CPU", {**settings, **NO_SNIPPETS, **config})
        except RuntimeError as error:  # of a version that does not know the entry
            log.debug("OpenVINO is not told to do without snippets: %s", error)
    return core.compile_model(told, "CPU", {**settings, **config})


def read_model(model: Any) -> Any:
    """An `onnx.ModelProto` as an `openvino.Model`."""
    return _core().read_model(model.SerializeToString())


class OpenvinoRequest(Request):
    """A request of a compiled model."""

    def __init__(self, compiled: Any) -> None:
        self.request, self.tensor = compiled.create_infer_request(), import_engine("openvino").Tensor

    def set_input(self, i: int, x: Tensor) -> None:
        """As in `Request`."""
        self.request.set_input_tensor(i, self.tensor(x.numpy(), shared_memory=True))

    def set_output(self, i: int, y: Tensor) -> None:
        """As in `Request`."""
        self.request.set_output_tensor(i, self.tensor(y.numpy(), shared_memory=True))

    def run(self) -> None:
        """As in `Request`."""
        self.request.infer(share_outputs=True)


def _torch_name(dtype: str) -> str:
    """A type of OpenVINO's, as torch calls it: uint8 for u8."""
    kinds = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint"}
    return re.sub("^(bf|f|i|u)(?=[0-9])", lambda found: kinds[found[0]], dtype)


class Openvino(OnnxBackend):
    """OpenVINO's CPU plugin. uint8 activations, int8 per-channel weights.

    Without VNNI it adds pairs of products in 16 bits, as oneDNN does, which is inside of it.
    """

    name: ClassVar[str] = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "onnx")
    kernel: ClassVar[type[EngineKernel]] = OpenvinoKernel
    layers: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), *OPS.family("conv_transpose"), "linear"})
    other_ops: ClassVar[frozenset[str]] = frozenset(
        {"add", "mul", "mean", *OPS.family("avg_pool"), *OPS.family("adaptive_avg_pool")}
    )

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """As in `OnnxBackend`; nor floats other than float32, which it computes in.

        Nor what makes other than floats of integers of 64 bits, which it makes 32 of.
        """
        made = info(node).dtype
        types = {made, *(info(read).dtype for read in node.all_input_nodes)}
        other = next((kind for kind in types if kind and kind.is_floating_point and kind != torch.float32), None)
        if other is not None:
            return f"OpenVINO computes in float32, and not in {str(other).removeprefix('torch.')}"
        if torch.int64 in types and not (made is not None and made.is_floating_point):
            return "OpenVINO computes integers of 64 bits in 32"
        return super().refusal(gm, node)

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: Calls) -> QuantConfig:
        """As in `Backend`: transposed convolutions read int8 around 0, since with a zero point they run in float.

        Not without VNNI, where int8 is shifted to uint8, whose large values overflow.
        """
        if calls[0].op.name not in OPS.family("conv_transpose") or config.activation is None or not cpu.has_vnni():
            return config
        return replace(config, activation=replace(config.activation, signed=True, symmetric=True))

    def adds_in_int16(self, calls: Calls) -> bool:
        """Layers on a CPU without VNNI, but not depthwise convolutions."""
        return bool(calls[0].op.traits.weight) and not cpu.has_vnni() and not is_depthwise_call(calls[0])

    def available(self) -> str | None:
        """As in `Backend`; not where oneDNN, which is inside of it, may use less than its other kernels do."""
        isa = cpu.onednn_isa()
        if isa != "DEFAULT":
            return (
                f"OpenVINO crashes if oneDNN is limited to {isa}: unset ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA. "
                'Use backend="auto".'
            )
        return super().available()

    def drawback(self) -> str | None:
        """As in `Backend`."""
        return cpu.without_vnni()
