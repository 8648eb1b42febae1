"""The contenders of bench_accuracy.py: what quantizes a part of a network, and simulates its integers exactly.

fxq's models run on its reference backend, the others' ONNX files in ONNX Runtime with nothing optimized: all of them
dequantize, compute in float and quantize again. No kernel is involved, which may overflow where a CPU has no VNNI.
Where nothing else is said, a tool runs with its own defaults.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fxq
from scripts.bench.rivals import Call, input_names, onnx_call, onnx_session, write_float_onnx
from scripts.bench.sequence_recipes import on_integers
from scripts.demo.sequence_subjects import Part


@dataclass(frozen=True)
class FilePart(Part):
    """A part that came as an ONNX file.

    Attributes:
        path: the file.
    """

    path: Path = Path()

    def file(self) -> bytes:
        """The file as the other tools can use it.

        Inputs are named as `input_names` does, nodes have a name each, constants and casts of constants are
        initializers, sizes that the example has otherwise are open, and the opset is 13 at least, the first one with
        scales per channel.
        """
        import onnx
        import onnx.version_converter

        model = onnx.load(self.path)
        if min(opset.version for opset in model.opset_import if not opset.domain) < 13:
            model = onnx.version_converter.convert_version(model, 13)
        constants = {value.name for value in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in constants]
        renamed = dict(zip([value.name for value in inputs], input_names(self.example), strict=True))
        for value, x in zip(inputs, self.example, strict=True):
            value.name = renamed[value.name]
            for axis, size in enumerate(value.type.tensor_type.shape.dim):
                if size.HasField("dim_value") and size.dim_value != x.shape[axis]:
                    size.dim_param = f"{value.name}_{axis}"
                    for output in model.graph.output:  # their sizes are for the input's
                        output.type.tensor_type.ClearField("shape")
        del model.graph.input[:], model.graph.value_info[:]
        model.graph.input.extend(inputs)
        nodes = list(model.graph.node)
        del model.graph.node[:]
        values = {value.name: value for value in model.graph.initializer}
        for i, node in enumerate(nodes):
            value = constant_of(node, values)
            if value is not None:
                values[value.name] = value
                model.graph.initializer.append(value)
                continue
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.name = f"{i} {node.name}"
            model.graph.node.append(node)
        content: bytes = model.SerializeToString()
        return content


def constant_of(node: Any, values: Mapping[str, Any]) -> Any:
    """Tensor that a node of an ONNX file gives if it is a constant, or casts one of `values`; else None."""
    from onnx import helper, numpy_helper

    if node.op_type == "Constant" and node.attribute[0].name == "value":
        return numpy_helper.from_array(numpy_helper.to_array(node.attribute[0].t), node.output[0])
    if node.op_type == "Cast" and node.input[0] in values:  # NNCF fails on these
        array = numpy_helper.to_array(values[node.input[0]])
        dtype = helper.tensor_dtype_to_np_dtype(helper.get_node_attr_value(node, "to"))
        return numpy_helper.from_array(array.astype(dtype), node.output[0])
    return None


Contender = Callable[[Part, bool], tuple[Call, str]]
"""Quantizes a part, told whether it is a transformer; what runs it, and a note."""
OBSERVERS = ("minmax", "moving_average", "histogram", "percentile", "entropy")
NOISES = (30, 40)
"""dB. How much of a quantity is lost to rounding of some size, however it comes about."""


def contenders(observers: bool = False, target: float | None = None) -> dict[str, Contender]:
    """Everyone, by name, where its tool is installed.

    Args:
        observers: fxq also with each of its observers that is not the default.
        target: fxq also with the mix of integers and float layers that `fxq.search` finds for so many dB.
    """
    plain = fxq.Recipe.static(backend="reference")
    seven = replace(plain.config.weight, bits=7)
    four = fxq.Recipe.static(backend="reference", weight=replace(plain.config.weight, bits=4))
    four_only = fxq.Recipe.weight_only(bits=4, backend="reference")
    makers = {
        "fxq static": own(plain),
        "fxq without correct-bias": own(plain.without_pass("correct-bias")),
        "fxq 7-bit weights": own(fxq.Recipe.static(backend="reference", weight=seven)),
        "fxq on this CPU": own(fxq.Recipe.static()),
        "fxq 4-bit weights": own(four),
        "fxq 4-bit weights, adaround": own(four.insert_pass(fxq.passes.AdaRound(), after="smooth")),
        "fxq 4-bit weights, gptq": own(four.insert_pass(fxq.passes.Gptq(), after="smooth")),
        "fxq 4-bit weight-only": own(four_only),
        "fxq 4-bit weight-only, gptq": own(four_only.insert_pass(fxq.passes.Gptq(), after="smooth"), reads_data=True),
    }
    for name in OBSERVERS if observers else ():
        spec = replace(plain.config.activation, observer=name)
        if spec != plain.config.activation:
            makers[f"fxq {name}"] = own(fxq.Recipe.static(backend="reference", activation=spec))
    if target is not None:
        makers[f"fxq static, searched for {target:g} dB"] = searched(plain, target)
    makers |= {f"float with noise at {decibels} dB": noisy(decibels) for decibels in NOISES}
    makers["fxq dynamic"] = own(fxq.Recipe.dynamic(backend="reference"))
    if find_spec("onnxruntime") and find_spec("onnx"):
        if find_spec("nncf"):
            makers["NNCF"] = nncf_static(fast=True)
            makers["NNCF, full bias correction"] = nncf_static(fast=False)
        makers["ONNX Runtime, min-max"] = onnxruntime_static("MinMax")
        makers["ONNX Runtime, percentile"] = onnxruntime_static("Percentile")
    return makers


def noisy(decibels: float) -> Contender:
    """The float part, with white noise on each of its outputs: what any error of this SQNR would do."""

    def make(part: Part, is_transformer: bool) -> tuple[Call, str]:
        draw = torch.Generator().manual_seed(0)

        def rounded(x: Tensor) -> Tensor:
            size = x.square().mean().sqrt() * 10 ** (-decibels / 20)
            return x + size * torch.randn(x.shape, generator=draw)

        def call(*inputs: Any) -> Any:
            return tree_map_only(Tensor, rounded, part.model(*inputs))

        return call, ""

    return make


def own(recipe: fxq.Recipe, reads_data: bool = False) -> Contender:
    """fxq with a recipe; `reads_data`: it calibrates nothing, and has a pass that reads data all the same."""

    def make(part: Part, is_transformer: bool) -> tuple[Call, str]:
        data = part.data if recipe.preset == "static" or reads_data else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxq.FxqWarning)  # what stays in float is in the note
            qmodel = fxq.quantize(part.model, recipe, data=data, example_inputs=part.example, progress=False)
        return qmodel, on_integers(qmodel)

    return make


def searched(recipe: fxq.Recipe, target: float) -> Contender:
    """fxq with the recipe that it finds for so many dB, on the data that calibrates."""

    def make(part: Part, is_transformer: bool) -> tuple[Call, str]:
        result = fxq.search(part.model, recipe, part.data, target=target, progress=False)
        call, note = own(result.recipe)(part, is_transformer)
        return call, note if result.reached else f"{note}, target not reached"

    return make


def nncf_static(fast: bool) -> Contender:
    """NNCF's `quantize`; `fast`: its default bias correction, which looks at each layer alone."""
    return lambda part, is_transformer: (_simulated(nncf_file(part, is_transformer, fast)), "")


def nncf_file(part: Part, is_transformer: bool, fast: bool = True) -> bytes:
    """ONNX file that NNCF's `quantize` makes of a part."""
    import nncf
    import onnx

    kind = nncf.ModelType.TRANSFORMER if is_transformer else None
    rows = single(part.data)
    with tempfile.TemporaryDirectory() as folder, quiet():
        model = onnx.load(float_onnx(part, folder))
        wanted = {node.name for node in model.graph.input}
        items = [{name: value for name, value in row.items() if name in wanted} for row in rows]
        quantized = nncf.quantize(
            model, nncf.Dataset(items), subset_size=len(items), model_type=kind, fast_bias_correction=fast
        )
    content: bytes = quantized.SerializeToString()
    return content


def nncf_model(part: Part, is_transformer: bool) -> Any:
    """`openvino.Model` that NNCF's `quantize` makes of a part."""
    import nncf

    rows, kind = single(part.data), nncf.ModelType.TRANSFORMER if is_transformer else None
    model = openvino_model(part)
    wanted = {name for node in model.inputs for name in node.names}
    items = [{name: value for name, value in row.items() if name in wanted} for row in rows]
    return nncf.quantize(model, nncf.Dataset(items), subset_size=len(items), model_type=kind)


def openvino_model(part: Part) -> Any:
    """`openvino.Model` of the float part, by way of its ONNX file, whose inputs it names."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        content = float_onnx(part, folder).read_bytes()
    return openvino.Core().read_model(content, b"")


def onnxruntime_static(method: str) -> Contender:
    """ONNX Runtime's `quantize_static`: preprocessed, QDQ, per-channel weights; `method`: how ranges are found."""
    return lambda part, is_transformer: (_simulated(onnxruntime_file(part, method)), "")


def onnxruntime_file(part: Part, method: str = "MinMax") -> bytes:
    """ONNX file that ONNX Runtime's `quantize_static` makes of a part."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder, quiet():
        path = float_onnx(part, folder)
        prepared, quantized = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
        quant_pre_process(path, prepared, skip_symbolic_shape=True)  # with it, it fails on MiniLM and on an LSTM
        quantize_static(
            prepared,
            quantized,
            Reader(named(part.data), prepared),
            QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod[method],
        )
        return quantized.read_bytes()


class Reader:
    """Calibration data as `quantize_static` reads it: what the network has inputs for."""

    def __init__(self, batches: Sequence[dict[str, Any]], path: Path) -> None:
        import onnx

        wanted = {node.name for node in onnx.load(path).graph.input}
        self.batches = iter([{key: value for key, value in batch.items() if key in wanted} for batch in batches])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.batches, None)


def named(data: Sequence[tuple[Tensor, ...]]) -> list[dict[str, Any]]:
    """Batches as ONNX networks are fed: arrays by the names of inputs."""
    return [{name: x.numpy() for name, x in zip(input_names(batch), batch, strict=True)} for batch in data]


def single(data: Sequence[tuple[Tensor, ...]]) -> list[dict[str, Any]]:
    """Split batches into batches of one sample: NNCF's statistics mix the samples of larger ones."""
    return named([row for batch in data for row in (rows_of(batch) if len(batch[0]) > 1 else [batch])])


def rows_of(batch: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The samples of a batch, whose first axis counts them."""
    return [tuple(x[i : i + 1] for x in batch) for i in range(len(batch[0]))]


def open_sizes(data: Sequence[tuple[Tensor, ...]]) -> Mapping[str, Mapping[int, str]]:
    """Names of the sizes that are left open: that of the batch, and what differs between batches; by input and axis.

    Example:
        >>> import torch
        >>> open_sizes([(torch.zeros(2, 3, 8),), (torch.zeros(2, 3, 9),)])
        {'input0': {0: 'size0', 2: 'size2'}}
    """
    varying: dict[str, dict[int, str]] = {}
    for name, inputs in zip(input_names(data[0]), zip(*data, strict=True), strict=True):
        sizes = zip(*(x.shape for x in inputs), strict=True)
        axes = [axis for axis, axis_sizes in enumerate(sizes) if axis == 0 or len(set(axis_sizes)) > 1]
        varying[name] = {axis: f"size{axis}" for axis in axes}
    return varying


def float_onnx(part: Part, folder: str) -> Path:
    """Write the ONNX file of a part to a folder; `FilePart`s have it already."""
    path = Path(folder, "float.onnx")
    if isinstance(part, FilePart):
        path.write_bytes(part.file())
    else:
        write_float_onnx(part.model, part.example, path, open_sizes([part.example, *part.data]))
    return path


def _simulated(model: bytes) -> Call:
    return onnx_call(onnx_session(model, optimized=False))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and the advice of other tools."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
