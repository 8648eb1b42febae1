"""Dynamic quantization by other tools: torch.ao, torchao and ONNX Runtime, where installed.

Each with its own defaults. torch.ao comes with torch; the others are no dependency, and are used where they are found.
"""

from __future__ import annotations

import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[..., Any]


@dataclass(frozen=True)
class Made:
    """A model as one tool has quantized it.

    Attributes:
        call: runs it, on the inputs of the float model.
        nbytes: size of its state dict in a file, or of its ONNX file.
        macs: share of the multiply-accumulates that run on integers, where the tool says so.
    """

    call: Call
    nbytes: int
    macs: float | None = None


Make = Callable[[nn.Module, Sequence[Tensor]], Made]
"""Quantizes a float model, of which example inputs are given."""


def rivals(engines: bool = False) -> dict[str, Make]:
    """The tools that are installed, by name; `engines`: torch.ao once with each engine of this machine."""
    makers: dict[str, Make] = {"torch.ao dynamic": torch_ao()}
    if engines:
        supported = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
        makers = {f"torch.ao dynamic, {engine}": torch_ao(engine) for engine in supported}
    if find_spec("torchao"):
        makers["torchao dynamic"] = torchao
    if find_spec("onnxruntime") and find_spec("onnx"):
        makers["ONNX Runtime float"] = onnx_runtime(quantized=False)
        makers["ONNX Runtime dynamic"] = onnx_runtime(quantized=True)
    return makers


def torch_ao(engine: str | None = None) -> Make:
    """torch.ao's `quantize_dynamic` of all linear and recurrent layers, by one engine; default: torch's choice."""

    def make(model: nn.Module, example: Sequence[Tensor]) -> Made:
        chosen = engine or torch.backends.quantized.engine
        kinds = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
        with warnings.catch_warnings(), restored_engine():
            torch.backends.quantized.engine = chosen
            warnings.simplefilter("ignore")  # deprecated, both the workflow and its dtypes
            from torch.ao.quantization import quantize_dynamic

            quantized = quantize_dynamic(copy.deepcopy(model), kinds, dtype=torch.qint8)
            size = saved(quantized)

        def call(*inputs: Tensor) -> Any:
            torch.backends.quantized.engine = chosen  # qnnpack reads it when it runs
            return quantized(*inputs)

        return Made(call, size)

    return make


def torchao(model: nn.Module, example: Sequence[Tensor]) -> Made:
    """torchao's int8 weights and int8 activations, measured for each token, of linear layers."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)  # it tells of kernels for other devices
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return Made(quantized, saved(quantized))


def onnx_runtime(quantized: bool) -> Make:
    """ONNX Runtime on one thread; `quantized`: by its `quantize_dynamic`."""

    def make(model: nn.Module, example: Sequence[Tensor]) -> Made:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "float.onnx")
            names = input_names(example)
            sizes = {name: {0: "batch", 1: "length"} for name, x in zip(names, example, strict=True) if _is_sequence(x)}
            write_float_onnx(model, example, path, sizes)
            if quantized:
                path = quantized_dynamic(path)
            data = path.read_bytes()
        return Made(onnx_call(onnx_session(data)), len(data))

    return make


def onnx_call(session: Any) -> Call:
    """Runs a session on tensors, in the order of `input_names`; inputs that the network does not read are left out."""
    wanted = {node.name for node in session.get_inputs()}

    def call(*inputs: Tensor) -> Any:
        feed = {name: x.numpy() for name, x in zip(input_names(inputs), inputs, strict=True) if name in wanted}
        outputs = [torch.from_numpy(y) for y in session.run(None, feed)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call


def openvino_call(model: Any, precision: str) -> Call:
    """Runs an `openvino.Model` on tensors, in the order of `input_names`, on the threads that PyTorch has now.

    Inputs that the network does not read are left out.

    Args:
        model: the model.
        precision: of what is not in integers: "f32" or "bf16".
    """
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": False,
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    places = {name: i for i, node in enumerate(compiled.inputs) for name in node.names}
    request = compiled.create_infer_request()

    def call(*inputs: Tensor) -> Any:
        arrays = {name: x.contiguous().numpy() for name, x in zip(input_names(inputs), inputs, strict=True)}
        for name in arrays.keys() & places.keys():
            request.set_input_tensor(places[name], openvino.Tensor(arrays[name], shared_memory=True))
        request.infer()
        outputs = [torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in range(len(compiled.outputs))]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call


def openvino_bytes(model: Any) -> int:
    """Size of the two files that OpenVINO makes of a model."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(model, Path(folder, "model.xml"))
        return sum(path.stat().st_size for path in Path(folder).iterdir())


def input_names(inputs: Sequence[Tensor]) -> list[str]:
    """Names of the inputs of a network in its ONNX file."""
    return [f"input{i}" for i in range(len(inputs))]


def write_float_onnx(
    model: nn.Module, example: Sequence[Tensor], path: Path, sizes: Mapping[str, Mapping[int, str]]
) -> None:
    """The float model to an ONNX file.

    Args:
        model: the float model.
        example: its inputs, which are named input0, input1 and so on in the file.
        path: of the file.
        sizes: which sizes of an input are left open, by its name: their names by axis.
    """
    names = input_names(example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the exporter that needs no further package
        torch.onnx.export(model, tuple(example), path, dynamo=False, input_names=names, dynamic_axes=sizes)


def quantized_dynamic(path: Path) -> Path:
    """Quantize an ONNX file with ONNX Runtime's `quantize_dynamic`, into another file beside it."""
    from onnxruntime.quantization import quantize_dynamic

    logging.disable(logging.WARNING)  # it advises to preprocess, which changes nothing here
    quantize_dynamic(path, quantized := path.with_name("int8.onnx"))
    logging.disable(logging.NOTSET)
    return quantized


def onnx_session(model: bytes, sizes: Mapping[str, int] = MappingProxyType({}), optimized: bool = True) -> Any:
    """A session of ONNX Runtime on as many threads as torch uses.

    Args:
        model: the ONNX file.
        sizes: what sizes left open are, by name.
        optimized: false: every op runs as it stands in the file, conversions between float ops too.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _is_sequence(x: Tensor) -> bool:
    """Whether the second dimension of an input is a length: of indices, or of vectors."""
    return x.dim() == 3 or (x.dim() == 2 and not x.is_floating_point())


@contextmanager
def restored_engine() -> Iterator[None]:
    """Leave torch's quantized engine as it was: it is global."""
    before = torch.backends.quantized.engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def saved(model: nn.Module) -> int:
    """Bytes of the state dict as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()
