"""The openvino backend: regions run in OpenVINO."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends import cpu
from fxq.backends.engines.engine import Compiled, EngineBackend, EngineKernel, PerThread, imported, repeated
from fxq.backends.layer_rows import is_depthwise_call
from fxq.graph.info import info
from fxq.graph.unit import Calls
from fxq.ops import OPS
from fxq.quant.spec import QuantConfig


@cache
def _core() -> Any:
    return imported("openvino").Core()


class OpenvinoKernel(EngineKernel):
    """A region as OpenVINO compiles it: float32, one stream."""

    name: ClassVar[str] = "openvino.region"
    integer_bias: ClassVar[bool] = False

    @classmethod
    def compiled(cls, model: Any, threads: int) -> Compiled:
        """As in `EngineKernel`. Each thread has a request of its own: one serves a single call at a time."""
        return runner_of(compile_model(model, threads))


def compile_model(model: Any, threads: int, **config: Any) -> Any:
    """An `onnx.ModelProto` as OpenVINO compiles it."""
    settings = {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }  # fmt: skip
    core = _core()
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU", {**settings, **config})


def runner_of(compiled: Any) -> Compiled:
    """What runs a compiled model."""
    requests = PerThread(compiled.create_infer_request)

    def run(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        request = requests.made
        for i, x in enumerate(inputs):
            request.set_input_tensor(i, _shared(x))
        for i, y in enumerate(outputs):
            request.set_output_tensor(i, _shared(y))
        request.infer()

    return run


def _shared(x: Tensor) -> Any:
    """OpenVINO's tensor in the memory of one of torch's."""
    return imported("openvino").Tensor(x.numpy(), shared_memory=True)


class Openvino(EngineBackend):
    """OpenVINO's CPU plugin. uint8 activations, int8 per-channel weights.

    Without VNNI it adds pairs of products in 16 bits, as oneDNN does, which is inside of it.
    """

    name: ClassVar[str] = "openvino"
    package: ClassVar[str] = "openvino"
    kernel: ClassVar[type[EngineKernel]] = OpenvinoKernel
    layers: ClassVar[frozenset[str]] = frozenset({*OPS.family("conv"), *OPS.family("conv_transpose"), "linear"})
    others: ClassVar[frozenset[str]] = frozenset(
        {"add", "mul", "mean", *OPS.family("avg_pool"), *OPS.family("adaptive_avg_pool")}
    )

    def profile(self, model: Any, inputs: Sequence[Tensor]) -> Iterable[tuple[Sequence[str], float]]:
        """As in `EngineBackend`."""
        compiled = compile_model(model, torch.get_num_threads(), PERF_COUNT=True)
        request = compiled.create_infer_request()
        for i, x in enumerate(inputs):
            request.set_input_tensor(i, _shared(x))
        seconds: dict[str, list[float]] = {}
        for _ in repeated():
            request.infer()
            for part in request.get_profiling_info():
                seconds.setdefault(part.node_name, []).append(part.real_time.total_seconds())
        for op in compiled.get_runtime_model().get_ordered_ops():
            about = op.get_rt_info()
            names = about["originalLayersNames"].astype(str) if "originalLayersNames" in about else ""
            if op.friendly_name in seconds:
                yield names.split(","), 1e6 * min(seconds[op.friendly_name])

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """As in `EngineBackend`; nor what makes other than floats of integers of 64 bits, which it makes 32 of."""
        made = info(node).dtype
        types = {made, *(info(read).dtype for read in node.all_input_nodes)}
        if torch.int64 in types and not (made is not None and made.is_floating_point):
            return "OpenVINO computes integers of 64 bits in 32"
        return super().refusal(gm, node)

    def config(self, config: QuantConfig, calls: Calls) -> QuantConfig:
        """As in `Backend`: transposed convolutions read int8 around 0, since with a zero point they run in float.

        Not without VNNI, where int8 is shifted to uint8, whose large values overflow.
        """
        if calls[0].op.name not in OPS.family("conv_transpose") or config.activation is None or not cpu.has_vnni():
            return config
        return replace(config, activation=replace(config.activation, signed=True, symmetric=True))

    def adds_in_int16(self, calls: Calls) -> bool:
        """Layers on a CPU without VNNI, but not depthwise convolutions."""
        return bool(calls[0].op.quant.weight) and not cpu.has_vnni() and not is_depthwise_call(calls[0])

    def available(self) -> str | None:
        """As in `Backend`; not where oneDNN, which is inside of it, may use less than its other kernels do."""
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
        if isa not in ("ALL", "DEFAULT"):
            return f'OpenVINO crashes where ONEDNN_MAX_CPU_ISA is {isa}: unset it. Use backend="auto".'
        return super().available()

    def drawback(self) -> str | None:
        """As in `Backend`."""
        return cpu.without_vnni()
