"""Export of a quantized model as a `torch.export` program of PyTorch ops, which loads without fxq."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from fxq.common.data import Batch
from fxq.common.files import replacing
from fxq.common.isolation import copied
from fxq.common.metrics import identical, tensors
from fxq.common.trees import mapped
from fxq.errors import ExportError, words_of
from fxq.graph.analysis.varying_axes import (
    FIXED_SIZE_REMEDY,
    Dynamic,
    example_sizes,
    inputs_of,
    size_names,
    terms_of,
    varying_axes,
)
from fxq.graph.guards import check_fixed, make_output
from fxq.graph.query import is_check, is_op
from fxq.graph.run import inputs_for
from fxq.ops.states import unpack_rows
from fxq.quant.qparams import AsPlainOps
from fxq.quant.quantized_rows import QuantizedRows
from fxq.quant.rotation import rotated_by_halves
from fxq.saved.export_check import checked_batches, resized, run_graph, warn_of_fixed_sizes


def write_program(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic, check: bool) -> None:
    """Write a qdq graph as a `.pt2` file: conversions as round, clamp and products, weights as integers.

    States that are stored as integers between calls are inputs and outputs in float: the program quantizes them again.

    Args:
        path: the file.
        gm: the graph. It is changed: checks are removed, since the program has its own, and objects among the outputs
            become mappings.
        batch: example of its inputs.
        dynamic: axes of the inputs whose size may vary.
        check: whether to load and run the program, and compare it with the graph, before the file is written.

    Raises:
        ExportError: `torch.export` rejects the graph, or the program computes other outputs.
        InputError: `dynamic` names an input or axis that does not exist.
        RenderError: the file cannot be written.
    """
    batch = Batch(mapped(batch.args, _in_float), mapped(dict(batch.kwargs), _in_float))
    try:
        program, axes = program_of(path, gm, batch, dynamic), dynamic
    except ExportError as error:
        if dynamic is not True:
            raise
        program, axes = program_of(path, gm, batch, False), False
        warn_of_fixed_sizes(path, batch, words_of(error))
    data = io.BytesIO()
    try:
        torch.export.save(program, data)
        loaded = torch.export.load(data).module() if check else None
    except Exception as error:  # torch.export may raise anything when it writes or reads
        raise _refused(path, error) from error
    if loaded is not None:
        _check(path, loaded, gm, batch, axes)
    with replacing(path) as file:
        file.write(data.getbuffer())


def _check(path: Path, loaded: nn.Module, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic) -> None:
    """Raise `ExportError` where an exported program disagrees with its graph at the example's or another batch size."""
    axes = varying_axes(dict(inputs_of(inputs_for(gm.graph, batch))), dynamic)
    for i, check_batch in enumerate(checked_batches(gm, batch, axes)):
        try:
            result = run_graph(loaded, check_batch)
        except Exception as error:
            if i == 0:
                raise _refused(path, error) from error
            return  # below the smallest size that the program accepts; its own guard rejects it
        pairs = zip(tensors(result), tensors(run_graph(gm, check_batch)), strict=True)
        if not all(identical(a, b) for a, b in pairs):
            raise ExportError(
                f"{path}: the program computes something else than the quantized model, and nothing was written: "
                f"inputs {check_batch}. This is a bug of fxq or of torch.export: please report it. check=False skips "
                "this check and writes the file."
            )


def program_of(path: Path, gm: fx.GraphModule, batch: Batch, dynamic: Dynamic) -> ExportedProgram:
    """Return the program that `write_program` writes."""
    named = dict(inputs_of(inputs_for(gm.graph, batch)))
    axes = varying_axes(named, dynamic)
    _simplify(gm, sizes_vary=bool(axes))
    vary = {id(named[name]): own for name, own in axes.items()}
    # torch.export takes sizes 0 and 1 as fixed
    example = resized(batch, named, axes, {label: max(size, 2) for label, size in example_sizes(named, axes).items()})
    taken = inspect.signature(gm.forward).bind(*batch.args, **batch.kwargs).arguments

    def export(size_of: Callable[[str], Any]) -> ExportedProgram:
        sizes = {leaf: {axis: size_of(label) for axis, label in own.items()} for leaf, own in vary.items()}
        shapes = mapped(taken, lambda leaf: sizes.get(id(leaf), {}) if isinstance(leaf, Tensor) else None)
        # torch.export marks the tensors of its example, and the next export would read the marks.
        own_args, own_kwargs = copied((example.args, dict(example.kwargs)))
        with torch.no_grad(), AsPlainOps(), small_sizes:
            return torch.export.export(gm, own_args, own_kwargs, dynamic_shapes=shapes if axes else None)

    from torch._dynamo.exc import UserError  # here, as it comes with all of the compiler
    from torch.fx.experimental import _config

    has_sums = any(len(terms_of(label)) > 1 for own in axes.values() for label in own.values())
    # else sizes are assumed to be at least 2, and sums at least 4
    small_sizes = _config.patch(backed_size_oblivious=has_sums)  # type: ignore[attr-defined]  # added by a function
    try:
        try:
            program = export(cache(lambda label: Dim(label) if len(terms_of(label)) == 1 else Dim.DYNAMIC))
        except UserError:  # perhaps there is a minimum size, which the program then checks at run time
            program = export(lambda label: Dim.DYNAMIC)
    except Exception as error:  # ops may raise anything when they are traced
        raise _refused(
            path, error, f" {size_names(axes)} of another size. {FIXED_SIZE_REMEDY}" if axes else ""
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has paths of this machine
    return program


def _simplify(gm: fx.GraphModule, sizes_vary: bool) -> None:
    """Remove checks that an exported program does itself, and return objects as plain dicts, states as floats.

    Rotations become sums and differences, which need no matrix.

    With varying sizes, the checks of sizes stay, so that `torch.export` excludes sizes that they reject. Checks of
    argument types are removed always: the program has its own.
    """
    for node in list(gm.graph.nodes):
        if is_check(node) and (node.target is check_fixed or not sizes_vary):
            gm.graph.erase_node(node)
        elif node.target is make_output:
            node.target = _fields
        elif is_op(node, "quantized_rows"):
            node.target = _state_as_floats
        elif is_op(node, "rotate_rows"):
            node.target = rotated_by_halves
    gm.recompile()


def _fields(kind: str, fields: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any] | list[Any]:
    """Plain stand-in for `make_output`: a dict of the fields, or a list of the items."""
    return dict(fields) if isinstance(fields, Mapping) else list(fields)


def _state_as_floats(
    integers: Tensor, scale: Tensor, zero_point: Tensor, *, size: int | None = None, bits: int = 8
) -> Tensor:
    """Float values of a state, which a program takes and returns instead of integers: these lie on its grid."""
    values = integers if size is None else unpack_rows(integers, size=size, bits=bits)
    rows, block = values.shape[-1], values.shape[-1] // scale.shape[-1]
    by_block = values.to(scale.dtype).unflatten(-1, (rows // block, block))
    return ((by_block - zero_point.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2)


def _in_float(leaf: Any) -> Any:
    return leaf.dequantize() if isinstance(leaf, QuantizedRows) else leaf


def _refused(path: Path, error: Exception, varying: str = "") -> ExportError:
    sizes = f" with{varying}" if varying else ""
    return ExportError(f"{path} cannot be written: torch.export does not take the model{sizes}: {words_of(error)}")
