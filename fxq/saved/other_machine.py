"""A quantized model that comes from another machine: its kernels are asked again whether they run right here."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends import cpu
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import FallbackKernel
from fxq.common.isolation import without_autocast
from fxq.common.metrics import tensors
from fxq.errors import BackendError, warn, words_of
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import is_op, options_of, submodule
from fxq.quant.qparams import QParams

log = logging.getLogger("fxq")


def fit(model: fx.GraphModule, made_on: Mapping[str, str]) -> None:
    """Ask every kernel of a model that was made on another machine, and try it out on made-up integers.

    One that cannot be right here, or is not, gives its place to its q/dq form, with a warning; where such a form finds
    that its kernel is right here, the kernel comes back.

    Args:
        model: the model; its kernels are replaced in place.
        made_on: `cpu.machine()` there.

    Raises:
        BackendError: such a kernel has no q/dq form: it was put into the graph by hand.
    """
    wrong: dict[str, str] = {}
    asked = 0
    for node, kernel in kernels_of(model):
        asked += 1
        reason = misfit(kernel, node)
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
                f"{kernel.name}, which was put there by hand, does not run right here: {reason}. Quantize the float "
                "model on this machine."
            )
    log.info(
        "a model from another machine (%s): %d of %d kernels fit", _differences(made_on), asked - len(wrong), asked
    )
    if wrong:
        reasons = Counter(wrong.values())
        named = "; ".join(
            f"{reason} ({count} times, {_first(wrong, reason)!r} for one)" for reason, count in reasons.items()
        )
        warn(
            f"this model was quantized on another machine ({_differences(made_on)}): {len(wrong)} of its {asked} "
            f"kernels do not run right here: {named}. They run in q/dq form, which is right and slow. For kernels that "
            "fit this machine, quantize the float model here."
        )


def verify(model: fx.GraphModule) -> None:
    """Ask every kernel of a model, and try it out. Raises `BackendError`, which names those that do not run right."""
    reasons = [(node, kernel, misfit(kernel, node)) for node, kernel in kernels_of(model)]
    wrong = [f"{info(node).path or node.name} ({kernel.described.name}): {why}" for node, kernel, why in reasons if why]
    if wrong:
        raise BackendError(
            f"{len(wrong)} of {len(reasons)} kernels do not run right on this machine: {'; '.join(wrong)}. "
            'Quantize the float model here, or with backend="reference".'
        )


def _first(wrong: Mapping[str, str], reason: str) -> str:
    return next(name for name, why in wrong.items() if why == reason)


def kernels_of(model: fx.GraphModule) -> Iterator[tuple[fx.Node, Kernel]]:
    """The kernels that a graph calls, each path once, with the first node that calls it."""
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


def misfit(kernel: Kernel, node: fx.Node) -> str | None:
    """Why a kernel does not run right on this machine; None when it does, as far as can be told.

    It is asked, and compared with its q/dq form on integers made up for the shapes of the example input: normally
    distributed around the zero point, as activations are. No data of the user's is kept for it.
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
    if any(math.prod(shape or ()) > _MOST for node in module.graph.nodes for shape in _shapes(node)):
        return None
    made = _made_up(module, module.graph.find_nodes(op="placeholder"), kernel)
    if made is None:
        return None
    values = {node.args[i]: value for i, value in zip(kernel.form.takes, made, strict=True)}
    given = [values[value] for value in node.args]
    with torch.no_grad(), without_autocast():
        expected = module(*made)
        try:
            got = [run(*_copies(given)) for run in (kernel, kernel.callable_for(*_copies(given)))]
        except Exception as error:
            return f"it raised {type(error).__name__}: {words_of(error)}"
    several = len(info(node).plans) > 1
    pairs = [pair for y in got for pair in zip(tensors(expected), tensors(y), strict=True)]
    return next((why for why in (_difference(*pair, several) for pair in pairs) if why is not None), None)


_MOST = 1 << 28
"""Elements of the largest value that is made up: a file that declares more is not to fill the memory."""


def _shapes(node: fx.Node) -> Iterator[tuple[int, ...] | None]:
    """Those of its value and of what a unit computes inside."""
    yield from (info(node).shape, *(shape for shape, _ in info(node).values))


def _difference(expected: Tensor, got: Tensor, several: bool) -> str | None:
    """How a kernel's value differs from its form's by more than float32 arithmetic explains; None when it does not.

    Where the form rounds a sum of large terms that cancel, it may be a step off itself. Where it is of several units,
    so may be what these hand on: that counts on average.
    """
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"it returns {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if not got.numel():
        return None
    real = got.dtype.is_floating_point
    limit = 1e-3 * float(expected.abs().max()) if real else 1.0
    apart = (expected.double() - got.double()).abs()
    most = float(apart.mean() if several else apart.max())
    return None if most <= limit else f"it is off by {most:.3g}{'' if real else ' steps'}"


def _copies(values: Sequence[Any]) -> list[Any]:
    """A kernel may overwrite what it adds."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _made_up(gm: fx.GraphModule, inputs: Sequence[fx.Node], kernel: Kernel) -> list[Tensor] | None:
    """Inputs of a form, the same every time; None where a shape is not known. Measured zero points are whole."""
    generator = torch.Generator().manual_seed(0)
    grids = [value for value in vars(kernel).values() if isinstance(value, QParams) and value.axis is None]
    made: list[Tensor] = []
    for node in inputs:
        about = info(node)
        if about.shape is None or about.dtype is None:
            return None
        real = torch.randn(about.shape, generator=generator)
        named = {name for user in node.users for name, value in user.kwargs.items() if value is node}
        if "zero_point" in named:
            made.append(real.abs_().mul_(30).round_().to(about.dtype))
        elif "scale" in named:
            made.append(real.abs_().to(about.dtype))
        elif about.dtype.is_floating_point:
            reach = max((float(grid.high - grid.low) for grid in grids), default=6.0)
            made.append(real.mul_(reach / 6).to(about.dtype))
        elif about.dtype in (torch.int32, torch.int64):  # rows of a table: it has the first one, whatever its size
            made.append(torch.zeros(about.shape, dtype=about.dtype))
        else:
            grid = next((found for user in node.users if (found := grid_of(gm, user)) is not None), None)
            if grid is not None:
                zero, low, high = grid.z, grid.qmin, grid.qmax
            else:  # it is measured
                read = next((options_of(user) for user in node.users if is_op(user, "dequantize")), {})
                low, high = read.get("qmin", 0), read.get("qmax", 255)
                zero = (low + high + 1) // 2
            made.append(real.mul_((high - low) / 6).round_().add_(zero).clamp_(low, high).to(about.dtype))
    return made
