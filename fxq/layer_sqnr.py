"""How far the output of every op of an integer model is from the float model's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxq.data import Batch
from fxq.evaluate import Stepper
from fxq.graph import info, is_op
from fxq.numeric import sqnr, tensors
from fxq.original import Original
from fxq.qparams import QParams, dequantize
from fxq.untouched import copied, without_autocast

log = logging.getLogger("fxq")


def layer_sqnr(
    original: Original, gm: fx.GraphModule, ends: Mapping[fx.Node, fx.Node], batches: list[Batch]
) -> dict[fx.Node, float]:
    """SQNR of the values of an integer graph against the same values of the float model, in dB.

    Both graphs run once, side by side and node by node, so that of each only the values still needed are held.

    Args:
        original: the float model.
        gm: the integer model.
        ends: nodes of `gm`, and the node of the float graph that makes the same value, each once.
        batches: inputs to try: the first that both models run on is used.

    Returns:
        dB by node of `gm`; nodes whose value is not comparable (no float tensors, another structure) are left out.
    """
    for batch in batches:
        try:
            with torch.no_grad(), without_autocast():
                return _side_by_side(original, gm, ends, batch)
        except Exception as error:  # recorded are the first samples; where the first axis is none of samples, none fits
            log.info("no SQNR of layers on %s: %s", batch, error)
    log.warning("the ledger has no SQNR: the float and the int8 graph do not both run on recorded samples.")
    return {}


def _side_by_side(
    original: Original, gm: fx.GraphModule, ends: Mapping[fx.Node, fx.Node], batch: Batch
) -> dict[fx.Node, float]:
    integer = Stepper(gm, gm.graph, copied(batch))  # copies: either graph may change its inputs in place
    real = _Wanted(Stepper(original.gm, original.graph, copied(batch)), set(ends.values()))
    rounded = {_rounded(node): node for node in ends}
    found: dict[fx.Node, float] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        value = integer.step(node)
        end = rounded.get(node)
        if end is not None:
            ratio = _compare(real.value(ends[end]), value, info(node).qparams)
            if ratio is not None:
                found[end] = ratio
    return found


def _rounded(node: fx.Node) -> fx.Node:
    """The quantize that alone reads a value, else the node itself: what an op in qdq form hands on."""
    reader = next(iter(node.users), None)
    plan = info(node).plan
    integer = plan is not None and plan.fate != "float"
    return reader if integer and len(node.users) == 1 and is_op(reader, "quantize") and reader is not None else node


class _Wanted:
    """The values of the float graph as they are asked for; those that were passed by are held until then."""

    def __init__(self, stepper: Stepper, wanted: set[fx.Node]) -> None:
        self._stepper, self._wanted = stepper, wanted
        self._nodes = iter(stepper.graph.nodes)
        self._held: dict[fx.Node, Any] = {}
        changes = any(info(n).changes for n in stepper.graph.nodes)
        self._keep = copied if changes else lambda value: value  # a later node may change it in place

    def value(self, wanted: fx.Node) -> Any:
        """The value of a node, once; the graph runs as far as it must."""
        while wanted not in self._held:
            node = next(self._nodes)
            value = self._stepper.step(node)
            if node in self._wanted:
                self._held[node] = self._keep(value)
        return self._held.pop(wanted)


def _compare(reference: Any, value: Any, qp: QParams | None) -> float | None:
    if qp is not None:
        value = tree_map(
            lambda v: dequantize(v, qp) if isinstance(v, Tensor) and not v.is_floating_point() else v, value
        )
    want, got = list(tensors(reference)), list(tensors(value))
    if not want or [t.shape for t in want] != [t.shape for t in got]:
        return None
    if not all(t.is_floating_point() for t in (*want, *got)):
        return None
    return sqnr(want, got)
