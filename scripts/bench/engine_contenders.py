"""Contenders of `scripts.bench.engines`: they make a network ready, in float or quantized, on PyTorch's threads.

Each gets its best form: constant shapes wherever its tools allow, no copies of inputs and outputs, the memory format
that suits it. Where nothing else is said, a tool runs with its own defaults.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxq
from scripts.bench.engine_cases import EngineCase
from scripts.bench.rivals import onnx_session, quantized_dynamic, torch_ao, write_float_onnx
from scripts.bench.torch_ao import every_engine


@dataclass(frozen=True)
class Runner:
    """A network that a contender has made ready.

    Attributes:
        call: runs it on a batch of the timed size.
        memory_format: of its input, if that is an image.
        note: which engine or backend it is, where the contender chose one.
    """

    call: Callable[[Tensor], Tensor]
    memory_format: torch.memory_format = torch.contiguous_format
    note: str = ""


Contender = Callable[[EngineCase], Runner]


def eager(case: EngineCase) -> Runner:
    """PyTorch in float; images channels-last."""
    form = torch.channels_last if case.timed.dim() == 4 else torch.contiguous_format
    return Runner(copy.deepcopy(case.model).to(memory_format=form), form)  # type: ignore[call-overload]


def torch_ao_best(case: EngineCase) -> Runner:
    """torch.ao, by the engine that is the fastest of those that are right; if none is, by the most precise one.

    Raises:
        RuntimeError: every engine fails.
    """
    if case.sequence:
        return Runner(torch_ao()(case.model, (case.timed,)).call, note="dynamic")
    with torch.no_grad():
        entries = [entry for entry in every_engine(case, case.model(case.fresh)) if entry.run]
    if not entries:
        raise RuntimeError("every engine fails")
    best = min(entries, key=lambda entry: (not entry.right, entry.seconds))
    torch.backends.quantized.engine = best.engine
    assert best.run is not None  # as of all of them
    return Runner(best.run, best.memory_format, best.engine)


# ---- ONNX Runtime


def onnxruntime_float(case: EngineCase) -> Runner:
    """ONNX Runtime in float."""
    with tempfile.TemporaryDirectory() as folder:
        return _session(_float_onnx(case, folder), case)


def onnxruntime_own(case: EngineCase) -> Runner:
    """ONNX Runtime's own quantizer: preprocessed, static in QDQ form with per-channel weights; dynamic for sequences.

    Where 16 bits can overflow, on CPUs without VNNI, its weights have 7 bits, as its manual advises.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        path = _float_onnx(case, folder)
        if case.sequence:
            return _session(quantized_dynamic(path), case, "dynamic")
        prepared, quantized = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
        quant_pre_process(path, prepared)
        quantize_static(
            prepared,
            quantized,
            _Reader(case),
            QuantFormat.QDQ,
            per_channel=True,
            reduce_range=fxq.doctor(["reference"], progress=False).machine["VNNI"] != "yes",
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return _session(quantized, case)


class _Reader:
    """Calibration data as `quantize_static` reads it."""

    def __init__(self, case: EngineCase) -> None:
        self.batches: Iterator[Tensor] = iter(case.calibration())

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"input0": batch.numpy()}


def _float_onnx(case: EngineCase, folder: str) -> Path:
    path = Path(folder, "float.onnx")
    write_float_onnx(case.model, (case.timed,), path, {"input0": _open_sizes(case)})
    return path


def _open_sizes(case: EngineCase) -> dict[int, str]:
    """Names of the sizes that the calibration data does not share with the timed input, by axis."""
    shapes = zip(case.calibration()[0].shape, case.timed.shape, strict=True)
    return {axis: f"size{axis}" for axis, (example_size, timed) in enumerate(shapes) if example_size != timed}


def _session(path: Path, case: EngineCase, note: str = "") -> Runner:
    """An ONNX file in ONNX Runtime; it reads the input where it is, and writes into a new tensor."""
    sizes = {name: case.timed.shape[axis] for axis, name in _open_sizes(case).items()}
    session = onnx_session(path.read_bytes(), sizes)
    name = session.get_outputs()[0].name
    like = torch.from_numpy(session.run([name], {"input0": case.timed.numpy()})[0])
    kinds, binding = [x.numpy().dtype for x in (case.timed, like)], session.io_binding()

    def call(x: Tensor) -> Tensor:
        y = torch.empty_like(like)
        for bind, end, tensor, kind in (
            (binding.bind_input, "input0", x, kinds[0]),
            (binding.bind_output, name, y, kinds[1]),
        ):
            bind(end, "cpu", 0, kind, tuple(tensor.shape), tensor.data_ptr())
        session.run_with_iobinding(binding)
        return y

    return Runner(call, note=note)


# ---- OpenVINO


def openvino_float(case: EngineCase) -> Runner:
    """OpenVINO in float."""
    return _compiled(_converted(case), case)


def nncf_openvino(case: EngineCase) -> Runner:
    """NNCF's `quantize` in OpenVINO; where there is attention, it is told so."""
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    batches = [batch.numpy() for batch in case.calibration()]
    kind = nncf.ModelType.TRANSFORMER if case.sequence else None
    return _compiled(nncf.quantize(_converted(case), nncf.Dataset(batches), model_type=kind), case)


def _converted(case: EngineCase) -> Any:
    """The float model as `openvino.Model`."""
    import openvino

    return openvino.convert_model(case.model, example_input=case.timed)


def _compiled(model: Any, case: EngineCase) -> Runner:
    """A model compiled for one shape; it reads the input where it is, and writes into a new tensor."""
    import openvino

    model.reshape(list(case.timed.shape))
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request, shape = compiled.create_infer_request(), tuple(compiled.outputs[0].shape)

    def call(x: Tensor) -> Tensor:
        y = torch.empty(shape)
        request.set_input_tensor(0, openvino.Tensor(x.numpy(), shared_memory=True))
        request.set_output_tensor(0, openvino.Tensor(y.numpy(), shared_memory=True))
        request.infer()
        return y

    return Runner(call)


# ---- fxq


def own(backend: str, effort: str = "default") -> Contender:
    """fxq with one of its backends."""

    def make(case: EngineCase) -> Runner:
        is_dynamic = case.recipe == "dynamic"
        recipe = (fxq.Recipe.dynamic if is_dynamic else fxq.Recipe.static)(backend=backend)
        data = None if is_dynamic else case.data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxq.FxqWarning)  # what stays in float is seen in the times
            qmodel = fxq.quantize(
                case.model, recipe, data=data, example_inputs=case.timed, effort=effort, progress=False
            )
        form = torch.channels_last if case.timed.dim() == 4 else torch.contiguous_format
        return Runner(qmodel, form, case.recipe if backend != "fastest" else f"{case.recipe}, {qmodel.backend}")

    return make


CONTENDERS: dict[str, Contender] = {
    "float eager": eager,
    "float onnxruntime": onnxruntime_float,
    "float openvino": openvino_float,
    "torch.ao": torch_ao_best,
    "onnxruntime quantizer": onnxruntime_own,
    "nncf": nncf_openvino,
    "fxq auto": own("auto"),
    "fxq auto, fast": own("auto", effort="fast"),
    **{f"fxq {backend}": own(backend) for backend in ("x86", "jit", "openvino", "onnxruntime", "fastest")},
}
