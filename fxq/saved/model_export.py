"""Export of quantized models to ONNX, OpenVINO and `torch.export` files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx

from fxq.backends.qdq_graph import qdq_graph
from fxq.common.data import Batch
from fxq.common.files import as_path, replacing, writing
from fxq.common.isolation import copied
from fxq.errors import ExportError, FxqError, InputError, RenderError, unknown, warn, words_of
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.analysis.varying_axes import Dynamic, size_names
from fxq.graph.grid import grid_of, moved_from
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.graph.region import integer_weight
from fxq.graph.run import inputs_for
from fxq.onnx.model_check import ModelCheck
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.whole_model import OnnxModel, write_model
from fxq.quant.qparams import QParams, dequantize
from fxq.saved.export_check import check_in_openvino, checked_batches, warn_of_fixed_sizes
from fxq.saved.program_export import write_program
from fxq.saved.tensorrt_export import fit_tensorrt

Writing = Callable[[Path, fx.GraphModule, Batch, Dynamic, bool], None]
"""Function that writes a file: its arguments are path, qdq graph, example, dynamic axes, and `check`."""


def export_model(
    path: str | os.PathLike[str],
    model: fx.GraphModule,
    batch: Batch,
    dynamic: Dynamic = True,
    check: bool = True,
    format: str | None = None,
    target: str | None = None,
) -> Path:
    """Export a model for another runtime, see `QuantizedModel.export`.

    Args:
        path: the file; its suffix selects the format.
        model: the lowered model.
        batch: example of its inputs.
        dynamic: axes of the inputs whose size may vary.
        check: whether to run the exported model, if its runtime is installed, and compare outputs.
        format: form of weights, see `FORMATS`; None: that of the suffix.
        target: runtime that the file is for, see `TARGETS`; None: any that reads the format.
    """
    path = as_path(path)
    for name, value, writers in (("format", format, FORMATS), ("target", target, TARGETS)):
        if value is not None:
            _check_choice(path, name, value, writers)
    if format is not None and target is not None:
        raise InputError(f"a file has format={format!r} or target={target!r}, not both.")
    if path.suffix not in WRITERS:
        raise InputError(f"the suffix of {str(path)!r} selects the format: {unknown('suffix', path.suffix, WRITERS)}")
    with torch.no_grad():  # the model itself reports errors of the example best
        model(*copied(batch).args, **copied(batch).kwargs)
    gm = qdq_graph(model)
    if path.suffix != ".pt2":  # .pt2 multiplies floats only
        _leave_products_in_float(path, gm)
    write = FORMATS.get(format or "") or TARGETS.get(target or "") or WRITERS[path.suffix]
    write(path, gm, batch, dynamic, check)
    return path


def _check_choice(path: Path, name: str, value: str, writers: Mapping[str, Writing]) -> None:
    """Raise `InputError` if an option of ONNX files has an unknown value, or the file is no ONNX file."""
    if value not in writers:
        raise InputError(unknown(name, value, writers))
    if path.suffix != ".onnx":
        raise InputError(f"{name}={value!r} is one of .onnx files, and {str(path)!r} has another suffix.")


def _leave_products_in_float(path: Path, gm: fx.GraphModule) -> None:
    """Let layers and products whose integer sums could overflow int32 read floats, with a warning.

    The `fallback` pass leaves such layers in float, so this applies if weights were edited later or it was skipped.
    """
    for node in list(gm.graph.nodes):
        reason = node_refused(gm, node)
        if reason is None:
            continue
        reads = list(node.all_input_nodes)
        weights = {read: w for read in reads if (w := integer_weight(gm, read)) is not None}
        for read, weight in weights.items():
            gm.register_buffer(name := f"{read.name}_float", dequantize(weight.values, weight.qparams))
            with gm.graph.inserting_before(node):
                real = gm.graph.get_attr(name)
            real.meta = dict(read.meta)
            _replace(node, read, real)
        replaced = bool(weights)
        for read in () if weights else reads:
            unrounded = _unrounded(gm, read, node)
            replaced = replaced or unrounded is not None
            if unrounded is not None:
                _replace(node, read, unrounded)
        where = info(node).path or node.name
        if not replaced:
            remedy = "Insert the pass `fallback` again, or give it fewer bits"
            warn(f"{path}: {where} may be wrong in the file: {reason}, in which runtimes accumulate. {remedy}.")
        else:
            warn(f"{path}: {where} is in float in the file: {reason}, in which runtimes accumulate.")
    gm.recompile()


def _replace(node: fx.Node, read: fx.Node, by: fx.Node) -> None:
    node.replace_input_with(read, by)
    while not read.users and read.op == "call_function":
        above = read.args[0]
        read.graph.erase_node(read)
        if not isinstance(above, fx.Node):
            break
        read = above


def _unrounded(gm: fx.GraphModule, read: fx.Node, reader: fx.Node) -> fx.Node | None:
    """Float value that a dequantized activation was quantized from, after the same moves; None if there is none."""
    above = moved_from(read)
    if above is None:
        integers = read.args[0] if is_op(read, "dequantize") else None
        return integers.args[0] if isinstance(integers, fx.Node) and is_op(integers, "quantize") else None  # type: ignore[return-value]
    real = _unrounded(gm, above, reader)
    if real is None:
        return None
    with gm.graph.inserting_before(reader):
        return gm.graph.node_copy(read, lambda node: real if node is above else node)


def _onnx(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, check: bool, **options: Any) -> CheckedOnnx:
    """Convert a model to ONNX, with options of `Writer`, and check it."""
    written = _written(path, gm, batch, dynamic, **options)
    batches = list(checked_batches(gm, batch, written.axes)) if check else []
    checks = _checked(path, written, gm, batches)
    if len(batches) == 1 and written.axes:
        warn(
            f"{path}: the model itself rejects inputs of another {size_names(written.axes)} than the example's, so "
            "that no other size was checked. If further axes of inputs vary with it, such as the second one of a "
            'recurrent state, name all of them: dynamic={"x": {0: "batch"}, "h": {1: "batch"}}, for example.'
        )
    if written.assumptions:
        warn(
            f"{path}: the model is right for sizes with {', '.join(sorted(set(written.assumptions)))}. For others, "
            "a runtime may return wrong values where PyTorch raises: check sizes before calling it."
        )
    if path.suffix == ".onnx" and batches and not checks:
        warn(
            f"{path} is written, but was not checked: onnxruntime is not installed. pip install "
            "fxq[onnxruntime] lets export run it and compare."
        )
    return CheckedOnnx(written, batches, checks)


@dataclass(frozen=True)
class CheckedOnnx:
    """ONNX model, the batches that it was checked on, and the check on each batch if ONNX Runtime is installed."""

    written: OnnxModel
    batches: Sequence[Batch]
    checks: Sequence[ModelCheck]

    @property
    def data(self) -> bytes:
        """Serialized ONNX model."""
        data: bytes = self.written.model.SerializeToString()
        return data


def _written(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, **options: Any) -> OnnxModel:
    """Write the model as ONNX; with `dynamic=True`, falls back to fixed sizes with a warning."""
    inputs = inputs_for(gm.graph, batch)
    try:
        return write_model(gm, inputs, dynamic, **options)
    except NotInOnnx as error:
        if dynamic is not True:
            raise ExportError(f"{path} cannot be written: {error}") from None
        why = words_of(error)
    try:
        fixed = write_model(gm, inputs, False, **options)
    except NotInOnnx as error:  # the sizes were not the reason
        raise ExportError(f"{path} cannot be written: {error}") from None
    warn_of_fixed_sizes(path, batch, why)
    return fixed


def _checked(path: Path, written: OnnxModel, gm: fx.GraphModule, batches: Sequence[Batch]) -> Sequence[ModelCheck]:
    """Check a model on each batch, in ONNX Runtime if it is installed, and return these checks.

    Raises:
        ExportError: it is not valid ONNX, or disagrees with its graph on a batch.
    """
    import onnx

    if written.model.ByteSize() >= _MAX_ONNX_BYTES:
        raise ExportError(f"{path} cannot be written: ONNX files are limited to 2 GB. Use fewer bits.")
    runs = find_spec("onnxruntime") is not None
    try:
        onnx.checker.check_model(written.model, full_check=True)
        checks = [ModelCheck(written, gm, batch) for batch in batches] if runs else []
        results = [(check, check.differences()) for check in checks]
    except FxqError:
        raise
    except Exception as error:  # the checker and the runtime may raise anything
        if type(error).__name__ == "NotImplemented" or "has unsupported type" in str(error):
            raise ExportError(
                f"{path} is not checked, as ONNX Runtime cannot run it here: {words_of(error)}. For ONNX Runtime, "
                "quantize the model in float32; for another runtime, check=False writes the file."
            ) from error
        raise ExportError(
            f"{path}: the model is refused: {type(error).__name__}: {words_of(error)}. {_REPORT}"
        ) from error
    for (_, differences), batch in zip(results, batches, strict=False):
        wrong = [difference for difference in differences if not difference.is_rounding]
        if wrong:
            raise ExportError(
                f"{path}: ONNX Runtime computes something else than the quantized model, and nothing was written: "
                f"{wrong[0]}, and {len(wrong) - 1} more of {len(differences)}, inputs {batch}. {_REPORT}"
            )
    return checks


def _check_optimized(path: Path, checks: Sequence[ModelCheck]) -> None:
    """Warn if ONNX Runtime with default session options computes other values, and name options that help."""
    failed = [(check, problem) for check in checks if (problem := _wrong(check, {}))]
    if not failed:
        return
    wrong = failed[0][1]
    right = next((entries for entries in _PRECISE if not any(_wrong(check, entries) for check, _ in failed)), None)
    advice = "Without its graph optimizations"
    if right is not None:
        calls = " and ".join(f'add_session_config_entry("{key}", "{value}")' for key, value in right.items())
        advice = f"With {calls} of its SessionOptions"
        if right == _FLOAT_INPUTS:
            advice = f'Exported with format="matmulnbits", or w{advice[1:]}'
    warn(
        f"{path}: ONNX Runtime with default options does not compute what the quantized model does: {wrong}. "
        f"{advice}, it does on this machine, up to rounding."
    )


def _wrong(check: ModelCheck, entries: Mapping[str, str]) -> str:
    """Describe the error with optimizations and these entries in the session configuration; empty if there is none."""
    try:
        wrong = [difference for difference in check.differences(True, entries) if not difference.is_rounding]
    except Exception as error:  # the runtime may raise anything
        return f"it fails: {words_of(error)}"
    return f"{max(wrong, key=lambda difference: difference.steps)}, and {len(wrong) - 1} more" if wrong else ""


_EXACT_SUMS = {"session.x64quantprecision": "1"}  # otherwise 16-bit sums saturate on CPUs without VNNI
_FLOAT_INPUTS = {"session.qdq_matmulnbits_accuracy_level": "1"}  # otherwise inputs of weight-only layers are rounded
_FLOAT_INPUTS_IN_OPENVINO = ("0", ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
"""Option that the file contains, as `openvino.Model.set_rt_info` takes it: otherwise OpenVINO rounds them, too."""
_PRECISE = (_EXACT_SUMS, _FLOAT_INPUTS, {**_EXACT_SUMS, **_FLOAT_INPUTS})


def _warn_of_reduced_ranges(path: Path, gm: fx.GraphModule) -> None:
    """Warn if values do not use all 8 bits: other runtimes have no kernels for these, and compute in float."""
    grids = [grid_of(gm, node) for node in gm.graph.nodes if is_op(node, "quantize", "requantize")]
    limits = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in (torch.uint8, torch.int8)}
    reduced = sum(isinstance(g, QParams) and (g.qmin, g.qmax) != limits.get(g.dtype) for g in grids)
    if reduced:
        warn(
            f"{path}: {reduced} of {len(grids)} values have fewer than 8 bits, as the recipe says, or since kernels of "
            "PyTorch saturate on this CPU. Other runtimes compute with them in float. To use their integer kernels, "
            'quantize with backend="onnxruntime" or backend="openvino".'
        )


_MAX_ONNX_BYTES = 2**31
_REPORT = "This is a bug of fxq or of the runtime: please report it. check=False skips this check and writes the file."


def _write_onnx(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, check: bool) -> None:
    exported = _onnx(path, gm, batch, dynamic, check)
    _check_optimized(path, exported.checks)
    _warn_of_reduced_ranges(path, gm)
    with replacing(path) as file:
        file.write(exported.data)


def _write_tensorrt(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, check: bool) -> None:
    fit_tensorrt(path, gm)
    exported = _onnx(path, gm, batch, dynamic, check, integer_bias=False)
    with replacing(path) as file:
        file.write(exported.data)


def _write_nbits(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, check: bool) -> None:
    exported = _onnx(path, gm, batch, dynamic, check, nbits=True)
    if not any(node.op_type == "MatMulNBits" for node in exported.written.model.graph.node):
        raise ExportError(
            f'{path} cannot be written with format="matmulnbits": no linear layer with a float input has integer '
            'weights. Leave out format, or quantize with "weight_only".'
        )
    _check_optimized(path, exported.checks)
    _warn_of_reduced_ranges(path, gm)
    with replacing(path) as file:
        file.write(exported.data)


def _write_openvino(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, check: bool) -> None:
    try:
        import openvino
    except ImportError:
        raise FxqError("openvino is not installed: pip install fxq[openvino].") from None
    exported = _onnx(path, gm, batch, dynamic, check, for_openvino=True)
    _warn_of_reduced_ranges(path, gm)
    try:
        model = openvino.Core().read_model(exported.data)
    except Exception as error:  # engines may raise anything
        *_, why = words_of(error).split("GeneralFailure:\n")  # the message of the node, without the list of nodes
        raise ExportError(f"{path} cannot be written: OpenVINO does not take the model: {why}") from error
    model.set_rt_info(*_FLOAT_INPUTS_IN_OPENVINO)
    if check:
        check_in_openvino(path, model, exported.written, gm, exported.batches)
    _save_openvino(path, model)


def _save_openvino(path: Path, model: Any) -> None:
    """Write an `openvino.Model` as `.xml` and `.bin` files. Raises `RenderError` on failure."""
    import openvino

    with writing(path), TemporaryDirectory(prefix=".fxq-", dir=path.parent) as folder:
        new = Path(folder, path.name)
        try:
            openvino.save_model(model, str(new), compress_to_fp16=False)
            openvino.Core().read_model(str(new))  # save_model does not report a full disk
        except Exception as error:  # engines may raise anything
            raise RenderError(f"cannot write {path}: OpenVINO wrote an incomplete file: {words_of(error)}") from error
        for suffix in (".bin", ".xml"):
            new.with_suffix(suffix).replace(path.with_suffix(suffix))


WRITERS: dict[str, Writing] = {
    ".onnx": _write_onnx,
    ".xml": _write_openvino,
    ".pt2": write_program,
}
"""Function that writes a format, by suffix."""

FORMATS: dict[str, Writing] = {"matmulnbits": _write_nbits}
"""Function that writes an ONNX file with another form of weights, by its name."""

TARGETS: dict[str, Writing] = {"tensorrt": _write_tensorrt}
"""Function that writes an ONNX file for one runtime, by its name."""
