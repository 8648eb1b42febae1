"""Verification of the kernels of a quantized model on another machine than the one it was quantized on."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from fxq.backends import cpu
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import FallbackKernel
from fxq.common.checksums import word_sum
from fxq.common.isolation import without_autocast
from fxq.common.metrics import identical, tensors
from fxq.common.names import in_short
from fxq.errors import BackendError, warn, words_of
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import is_op, options_of, submodule
from fxq.graph.region import whole_region
from fxq.graph.region_difference import DefaultTolerances, Tolerances, difference
from fxq.graph.region_run import run_region, weights_in
from fxq.quant.qparams import QParams
from fxq.recipe.recipe import Recipe
from fxq.rewriting.editor import DATA, KERNELS

log = logging.getLogger("fxq")


def fit(model: fx.GraphModule, made_on: Mapping[str, str]) -> None:
    """Verify every kernel of a model from another machine, on random integers, and replace wrong kernels.

    A kernel that is wrong on this machine is replaced by its q/dq form, with a warning. A form that replaced a kernel
    on another machine is replaced by the kernel if that is right here.

    Args:
        model: the model; kernels are replaced in place.
        made_on: `cpu.machine()` of the other machine.

    Raises:
        BackendError: a wrong kernel has no q/dq form, since it was inserted into the graph by hand.
    """
    wrong: dict[str, str] = {}
    limits = _tolerances(model)
    asked = 0
    for node, kernel in kernels_of(model):
        asked += 1
        reason = misfit(kernel, node, limits)
        if reason is None:
            if isinstance(kernel, FallbackKernel):
                model.set_submodule(str(node.target), kernel.kernel())
            continue
        wrong[info(node).path or node.name] = reason
        if isinstance(kernel, FallbackKernel):
            kernel.reason = reason
        elif kernel.form is not None:
            model.set_submodule(str(node.target), FallbackKernel.instead_of(kernel, reason))
        else:
            raise BackendError(
                f"{node.name}: the model comes from another machine ({_differences(made_on)}), and its kernel "
                f"{kernel.name}, which was inserted by hand and has no q/dq form, is wrong on this machine: {reason}. "
                "Quantize the float model on this machine."
            )
    log.info(
        "a model from another machine (%s): %d of %d kernels fit", _differences(made_on), asked - len(wrong), asked
    )
    if wrong:
        reasons = Counter(wrong.values())
        named = "; ".join(
            f"{reason} ({count} times, for instance {_first(wrong, reason)!r})" for reason, count in reasons.items()
        )
        warn(
            f"this model was quantized on another machine ({_differences(made_on)}): {len(wrong)} of its {asked} "
            f"kernels are wrong on this machine: {named}. They run in q/dq form, which is correct but slow. For "
            "kernels of this machine, quantize the float model here."
        )


def stored_checksums(model: fx.GraphModule) -> dict[str, int]:
    """Checksum of each tensor of a model's kernels and of its constants, which no call changes, by name."""
    tensors_by_name = {name: t for name, t in model.state_dict(keep_vars=True).items() if _is_stored(name, t)}
    return {name: word_sum(tensor) for name, tensor in tensors_by_name.items()}


def _is_stored(name: str, tensor: Any) -> bool:
    return name.startswith((f"{KERNELS}.", f"{DATA}.")) and type(tensor) in (Tensor, Parameter) and not tensor.is_meta


def verify(model: fx.GraphModule, stored: Mapping[str, int]) -> None:
    """Verify the tensors of a model by their checksums, and every kernel on random integers.

    Args:
        model: the model.
        stored: `stored_checksums` of the model when it was made.

    Raises:
        BackendError: tensors have changed, or kernels are wrong; the message names them.
    """
    changed = [name for name, number in stored_checksums(model).items() if stored.get(name, number) != number]
    if changed:
        raise BackendError(
            f"{in_short(changed)}: not the values that fxq.quantize stored. They were written to, or their memory or "
            "file is damaged. Quantize the float model again, or load its file again."
        )
    limits = _tolerances(model)
    reasons = [(node, kernel, misfit(kernel, node, limits)) for node, kernel in kernels_of(model)]
    wrong = [f"{info(node).path or node.name} ({kernel.described.name}): {why}" for node, kernel, why in reasons if why]
    if wrong:
        raise BackendError(
            f"{len(wrong)} of {len(reasons)} kernels are wrong on this machine: {'; '.join(wrong)}. "
            'Quantize the float model here, or with backend="reference".'
        )


def _first(wrong: Mapping[str, str], reason: str) -> str:
    return next(name for name, why in wrong.items() if why == reason)


def kernels_of(model: fx.GraphModule) -> Iterator[tuple[fx.Node, Kernel]]:
    """Kernels that a graph calls, each once, with the first node that calls it."""
    seen: set[str] = set()
    for node in model.graph.nodes:
        kernel = submodule(model, node)
        if isinstance(kernel, Kernel) and str(node.target) not in seen:
            seen.add(str(node.target))
            yield node, kernel


def _differences(made_on: Mapping[str, str]) -> str:
    here = cpu.machine()
    different = [f"{name}: there {made_on.get(name, 'unknown')}, here {here[name]}" for name in here]
    return "; ".join(text for name, text in zip(here, different, strict=True) if made_on.get(name) != here[name])


def _tolerances(model: fx.GraphModule) -> Tolerances:
    """Tolerances with which the recipe of a model verified its kernels; the default ones, if it did not."""
    recipe: Recipe | None = getattr(model, "recipe", None)
    steps: Sequence[Any] = recipe.pipeline if recipe is not None else ()
    return next((step for step in steps if step.name == "verify-lowering"), DefaultTolerances())


def misfit(kernel: Kernel, node: fx.Node, limits: Tolerances) -> str | None:
    """Reason why a kernel is wrong on this machine; None if no error is found.

    The kernel checks the machine itself, and is then compared with its q/dq form on random integers of the example's
    shapes, normally distributed around the zero point like activations. Models keep no user data for this.
    """
    try:
        kernel = kernel.kernel() if isinstance(kernel, FallbackKernel) else kernel
        kernel.check()
    except BackendError as error:
        return (
            words_of(error).removeprefix(f"{kernel.name}: ").removesuffix(". Keep the layer in float or in q/dq form.")
        )
    if kernel.form is None:
        return None
    module = kernel.form.module(kernel)
    if any(math.prod(shape or ()) > MAX_RANDOM_ELEMENTS for node in module.graph.nodes for shape in _shapes(node)):
        return None
    form_inputs = _random_inputs(module, module.graph.find_nodes(op="placeholder"), kernel)
    if form_inputs is None:
        return None
    values = {node.args[i]: value for i, value in zip(kernel.form.takes, form_inputs, strict=True)}
    kernel_inputs = [values[value] for value in node.args]
    with torch.no_grad(), without_autocast():
        try:
            got = [run(*_copies(kernel_inputs)) for run in (kernel, kernel.callable_for(*_copies(kernel_inputs)))]
        except Exception as error:
            return f"it raised {type(error).__name__}: {words_of(error)}"
        if len(info(node).lowered.plans) > 1:
            return _region_difference(module, form_inputs, got, limits)
        expected = module(*form_inputs)
    pairs = [pair for y in got for pair in zip(tensors(expected), tensors(y), strict=True)]
    rounded = kernel.rounded_result(*kernel_inputs)
    rounding = 0.0 if rounded is None else float((expected - rounded).abs().max())
    return next((why for why in (_difference(*pair, rounding) for pair in pairs) if why is not None), None)


def _region_difference(
    module: fx.GraphModule, inputs: Sequence[Tensor], got: Sequence[Any], limits: Tolerances
) -> str | None:
    """Describe a difference between results of a kernel of several units and its q/dq form; None if there is none.

    Values inside that are near a tie may be rounded either way, and later values follow, see `difference`.

    Args:
        module: the form.
        inputs: inputs of the form.
        got: results of the kernel, called directly and bound to its inputs.
        limits: the tolerances.
    """
    region = whole_region(module.graph)
    values = dict(zip(region.inputs, inputs, strict=True)) | weights_in(module, region)
    expected = run_region(module, region, values)
    first, *others = got
    results = [first, *(y for y in others if not all(map(identical, tensors(y), tensors(first))))]
    reasons = (difference(module, region, values, expected, result, limits) for result in results)
    return next((f"it is {why}" if why.startswith("off") else why for why in reasons if why is not None), None)


MAX_RANDOM_ELEMENTS = 1 << 28
"""Elements of a value up to which kernels are run, so that a file with huge shapes does not exhaust memory."""


def _shapes(node: fx.Node) -> Iterator[tuple[int, ...] | None]:
    """Shapes of the value of a node and of the values inside a unit."""
    yield from (info(node).shape, *(shape for shape, _ in info(node).fused.values))


def _difference(expected: Tensor, got: Tensor, rounding: float) -> str | None:
    """Describe a difference between kernel and q/dq form beyond float32 rounding; None if there is none.

    Args:
        expected: output of the form.
        got: output of the kernel.
        rounding: error of floats that the kernel rounds to less than float32.
    """
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"it returns {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if not got.numel():
        return None
    real = got.dtype.is_floating_point
    limit = 1e-3 * float(expected.abs().max()) + rounding if real else 1.0
    error = float((expected.double() - got.double()).abs().max())
    return None if error <= limit else f"it is off by {error:.3g}{'' if real else ' steps'}"


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of values, since a kernel may overwrite its inputs."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _random_inputs(gm: fx.GraphModule, inputs: Sequence[fx.Node], kernel: Kernel) -> list[Tensor] | None:
    """Random inputs of a q/dq form, from a fixed seed; None if a shape is unknown. Dynamic zero points are integers."""
    generator = torch.Generator().manual_seed(0)
    grids = [value for value in vars(kernel).values() if isinstance(value, QParams) and value.axis is None]
    values: list[Tensor] = []
    for node in inputs:
        about = info(node)
        if about.shape is None or about.dtype is None:
            return None
        real = torch.randn(about.shape, generator=generator)
        named = {name for user in node.users for name, value in user.kwargs.items() if value is node}
        if "zero_point" in named:
            values.append(real.abs_().mul_(30).round_().to(about.dtype))
        elif "scale" in named:
            values.append(real.abs_().to(about.dtype))
        elif about.dtype.is_floating_point:
            reach = max((float(grid.high - grid.low) for grid in grids), default=6.0)
            values.append(real.mul_(reach / 6).to(about.dtype))
        elif about.dtype in (torch.int32, torch.int64):  # indices of an embedding: 0 is always valid
            values.append(torch.zeros(about.shape, dtype=about.dtype))
        else:
            grid = next((static for user in node.users if (static := grid_of(gm, user)) is not None), None)
            if grid is not None:
                zero, low, high = grid.z, grid.qmin, grid.qmax
            else:  # a dynamic grid
                read = next((options_of(user) for user in node.users if is_op(user, "dequantize")), {})
                low, high = read.get("qmin", 0), read.get("qmax", 255)
                zero = (low + high + 1) // 2
            values.append(real.mul_((high - low) / 6).round_().add_(zero).clamp_(low, high).to(about.dtype))
    return values
