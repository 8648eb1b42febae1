"""insert-qdq: observers become quantize and dequantize, weights become integers."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxq.errors import PassError
from fxq.graph import Edge, constant, info, reads_only_metadata, submodule
from fxq.observers import Observer, make_observer
from fxq.passbase import Pass, Stage
from fxq.qparams import QParams, choose_qparams, quantize
from fxq.rewrite import Rewriter
from fxq.spec import TensorSpec
from fxq.stages import where
from fxq.unit import calls_of, inputs_of

log = logging.getLogger("fxq")


@dataclass(frozen=True)
class InsertQdq(Pass):
    """Put quantize and dequantize on every edge that carries integers, with the parameters that calibration found.

    Before: conv2d(observer(x), w, b)
    After: conv2d(dequantize(quantize(x)), dequantize(w_int8), b)
    Keeps: the output up to rounding to the grids. This is the portable reference: exact, on any device.
    Source: Jacob et al. 2018, section 2.
    """

    name: ClassVar[str] = "insert-qdq"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Find all parameters, and only then edit: without data, the observed model can still be calibrated."""
        parameters = _parameters(rewriter)
        for node in rewriter.nodes():
            if isinstance(submodule(rewriter.gm, node), Observer):
                rewriter.replace(node, node.args[0])
        for value in rewriter.nodes():
            current = value
            for edge in info(value).edges:
                current = _convert(rewriter, value, current, edge, parameters[edge.group])
        _convert_weights(rewriter)
        rewriter.erase_unused()


def _parameters(rewriter: Rewriter) -> dict[int, QParams]:
    """The parameters of each group of edges. Edits nothing."""
    groups = _seen_together(rewriter)
    parameters: dict[int, QParams] = {}
    for value in rewriter.nodes():
        for edge in info(value).edges:
            if edge.group not in parameters:
                parameters[edge.group] = _grid(rewriter, value, edge, groups)
    return parameters


def _seen_together(rewriter: Rewriter) -> dict[int, Observer]:
    """What the observers of each group have seen together. They observe different tensors, and stay as they are."""
    groups: dict[int, list[Observer]] = {}
    for node in rewriter.nodes():
        observer = submodule(rewriter.gm, node)
        if isinstance(observer, Observer):
            (edge,) = info(node).edges
            groups.setdefault(edge.group, []).append(observer)
    return {group: observers[0] if len(observers) == 1 else _joined(observers) for group, observers in groups.items()}


def _joined(observers: list[Observer]) -> Observer:
    """An observer that stands for the tensors of all of them."""
    together = copy.deepcopy(observers[0])
    for other in observers[1:]:
        together.join(other)
    return together


def _grid(rewriter: Rewriter, value: fx.Node, edge: Edge, groups: dict[int, Observer]) -> QParams:
    if edge.fixed is not None:
        low, high = edge.fixed
        return choose_qparams(torch.tensor(low), torch.tensor(high), edge.spec)
    observer = groups.get(edge.group)
    if observer is None:
        raise PassError(
            f"{where(rewriter.gm, value)}: no observer watches the values that it shares a grid with. "
            "Run insert-observers behind the pass that made these edges."
        )
    if observer.seen_only_zeros:
        rewriter.describe(value, note="calibration saw nothing but zeros: scale 1")
        log.warning("%s: calibration saw nothing but zeros; its scale is 1.", observer.name)
    return observer.qparams()


def _convert(rewriter: Rewriter, value: fx.Node, current: fx.Node, edge: Edge, qp: QParams) -> fx.Node:
    """Quantize and dequantize behind `current` (the value, or its previous integer form); the dequantize.

    Every form is made from the value itself: made from a coarser form, it would have that one's error as well.
    """
    about = info(value)
    grid: dict[str, Any] = {"scale": qp.s, "zero_point": qp.z}
    limits: dict[str, Any] = {"qmin": qp.qmin, "qmax": qp.qmax, "dtype": qp.dtype}
    integer, real = (about.shape, qp.dtype), (about.shape, torch.float32)
    q = rewriter.call("quantize", value, after=current, name=f"{value.name}_q", typed=integer, **grid, **limits)
    dq = rewriter.call("dequantize", q, after=q, name=f"{value.name}_dq", typed=real, **grid)
    for node in (q, dq):
        rewriter.describe(node, qparams=qp, path=about.path, source=about.source)

    def wants(user: fx.Node) -> bool:
        plan = info(user).plan
        first = current is value
        return user not in (q, dq) and (first or (plan is not None and (plan.reads or {}).get(value.name) == edge.spec))

    rewriter.reroute(current, q, only=lambda user: reads_only_metadata(user))
    rewriter.reroute(current, dq, only=wants)
    return dq


def _convert_weights(rewriter: Rewriter) -> None:
    """Replace the float weights of integer ops by dequantized integer weights, each made once."""
    made: dict[tuple[fx.Node, TensorSpec, int | None], fx.Node] = {}
    for node in rewriter.nodes():
        plan = info(node).plan
        if plan is None or plan.fate != "int8":
            continue
        calls = calls_of(rewriter.gm, node)
        asked, _ = rewriter.context.config_for(info(node).path, calls[0].op.name)
        config = rewriter.context.backend.config(asked, calls)
        for read in inputs_of(calls):
            if read.role == "weight" and config.weight is not None:
                axis = read.axis if config.weight.per_channel else None
                key = (read.node, config.weight, axis)
                known = made.get(key)
                if known is None:
                    known = made[key] = _integer_weight(rewriter, read.node, config.weight, axis)
                    rewriter.describe(known, path=info(node).path, source=info(node).source)
                rewriter.update(node, args=_swap(node.args, read.node, known))


def _swap(args: Any, old: fx.Node, new: fx.Node) -> Any:
    return fx.node.map_arg(args, lambda n: new if n is old else n)


def _integer_weight(rewriter: Rewriter, weight: fx.Node, spec: TensorSpec, axis: int | None) -> fx.Node:
    """The integer form of a weight, dequantized: a node behind `weight`."""
    tensor = constant(rewriter.gm, weight)
    if tensor is None:
        raise PassError(
            f"{where(rewriter.gm, weight)}: is to be an integer weight, but it is computed. Plan its reader as float."
        )
    name = str(weight.target).removeprefix("fxq_data.").replace(".", "_")
    observer = make_observer(spec, axis, f"the weight {weight.target}")
    observer(tensor)
    real = (tuple(tensor.shape), torch.float32)
    qp = observer.qparams()
    values = rewriter.constant(quantize(tensor.detach(), qp), f"{name}_int8", before=weight.next)
    rewriter.describe(values, qparams=qp)
    if axis is None:
        dq = rewriter.call(
            "dequantize", values, after=values, name=f"{name}_dq", typed=real, scale=qp.s, zero_point=qp.z
        )
    else:
        scale = rewriter.constant(qp.scale.to(tensor.device), f"{name}_scale", before=values.next)
        zero = rewriter.constant(qp.zero_point.to(tensor.device), f"{name}_zero_point", before=scale.next)
        dq = rewriter.call(
            "dequantize_channel", values, scale, zero, after=zero, name=f"{name}_dq", typed=real, axis=axis
        )
    rewriter.describe(dq, qparams=qp)
    rewriter.context.float_weights[dq.name] = str(weight.target)
    return dq
