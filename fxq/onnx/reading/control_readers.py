"""Readers of ONNX control flow, constants, non-maximum suppression, and ops that the standard defines by others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.reading.graph_builder import Sizes, Traced
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import refuse

MAX_ITERATIONS = 1000
"""Largest number of iterations of a loop that is written out in the graph."""


@reads("Constant")
def constant(r: Reader, **attributes: Any) -> Any:
    name, value = next(iter(attributes.items()))
    refuse(name in ("value_string", "value_strings", "sparse_value"), "its constant is text or sparse")
    if isinstance(value, Tensor):
        return r.constant(r.label, value)
    return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)


@contextmanager
def _inside(r: Reader, values: dict[str, Any]) -> Iterator[None]:
    """Read nodes of a graph inside of a node, which see the values outside of it and these."""
    outer, label, count = r.values, r.label, r.outputs
    r.values = {**outer, **values}
    yield
    r.values, r.label, r.outputs = outer, label, count


_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
"""Op types whose results differ between iterations, whatever they read."""


class _Body:
    """Graph inside of a node, which is read once for each iteration, after what is equal in all of them.

    Args:
        r: reader of the graph outside.
        graph: `onnx.GraphProto`.
    """

    def __init__(self, r: Reader, graph: Any) -> None:
        self.reader, self.graph = r, graph
        self.names = [value.name for value in graph.input]
        varying = set(self.names)
        self.nodes, equal = [], []
        for node in graph.node:
            nested = any(attribute.HasField("g") for attribute in node.attribute)
            if nested or node.op_type in _RANDOM or not varying.isdisjoint(node.input):
                varying.update(node.output)
                self.nodes.append(node)
            else:
                equal.append(node)
        with _inside(r, {}):
            for initializer in graph.initializer:
                r.values[initializer.name] = r.declare(initializer)
            r.read_all(equal)
            self.values = dict(r.values)

    def read(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Read an iteration with these inputs; return the outputs of the graph."""
        with _inside(self.reader, {**self.values, **dict(zip(self.names, inputs, strict=True))}):
            self.reader.read_all(self.nodes)
            return tuple(self.reader.value(output.name) for output in self.graph.output)


@reads("If")
def branch(r: Reader, condition: Any, *, then_branch: Any, else_branch: Any) -> Any:
    refuse(isinstance(condition, Traced), "its condition is computed from data")
    return _Body(r, then_branch if r.number(condition) else else_branch).read(())


@reads("Loop")
def loop(r: Reader, count: Any, condition: Any, *carried: Any, body: Any) -> Any:
    most = _largest_count(r, count)
    refuse(isinstance(condition, Traced), "its condition is computed from data")
    values, collected = list(carried), [list[Any]() for _ in range(len(body.output) - 1 - len(carried))]
    going, i = condition is None or bool(r.number(condition)), 0
    if not going or most == 0:
        return (*values, *(_collected_from_none(r, body, values) if collected else ()))
    iteration = _Body(r, body)
    while going and (most is None or i < most):
        refuse(i == MAX_ITERATIONS, f"it has more than {MAX_ITERATIONS} iterations")
        again, *results = iteration.read([torch.tensor(i), torch.tensor(going), *values])
        refuse(isinstance(again, (Traced, Sizes)), "its condition is computed from data")
        going, values, i = bool(again), results[: len(carried)], i + 1
        for kept, result in zip(collected, results[len(carried) :], strict=True):
            kept.append(result)
    return (*values, *(r.call(torch.stack, kept) for kept in collected))


def _largest_count(r: Reader, count: Any) -> int | None:
    """Number of iterations of a loop whose condition does not end it earlier; None if it has no such number."""
    if count is None:
        return None
    refuse(isinstance(count, Traced), "its number of iterations is computed from data")
    total: Any = r.number(count)
    refuse(not isinstance(total, int), "its number of iterations depends on a dynamic size")
    refuse(total > MAX_ITERATIONS, f"it has more than {MAX_ITERATIONS} iterations")
    return int(total)


def _collected_from_none(r: Reader, body: Any, values: Sequence[Any]) -> list[Tensor]:
    """Results that a loop without iterations collects: none, of the shapes that a first one would have."""
    _, *results = _Body(r, body).read([torch.tensor(0), torch.tensor(True), *values])
    likes = [r.like(result) for result in results[len(values) :]]
    refuse(any(varies(size) for like in likes for size in like.shape), "it collects none of a dynamic size")
    return [torch.empty((0, *like.shape), dtype=like.dtype) for like in likes]


@reads("Scan")
def scan(
    r: Reader, *values: Any, body: Any, num_scan_inputs: int, scan_input_directions: Sequence[int] = (),
    scan_output_directions: Sequence[int] = (), scan_input_axes: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (), **rest: Any,
) -> Any:  # fmt: skip
    refuse(r.opset < 9, "its form before opset 9 is not supported")
    count = len(values) - num_scan_inputs
    refuse(not 0 < num_scan_inputs <= len(values), f"it says that {num_scan_inputs} of its inputs are scanned")
    refuse(len(body.input) != len(values), "its body has other inputs than the node")
    refuse(len(body.output) < count, "its body returns fewer states than it has")
    states, inputs = list(values[:count]), values[count:]
    axes = list(scan_input_axes) or [0] * num_scan_inputs
    ranks = [len(r.shape_of(x)) for x in inputs]
    fit = len(axes) == len(ranks) and all(-rank <= axis < rank for axis, rank in zip(axes, ranks, strict=True))
    refuse(not fit, "an axis that it scans does not exist")
    (total, *others) = [r.shape_of(x)[axis] for x, axis in zip(inputs, axes, strict=True)]
    refuse(varies(total) or any(varies(size) for size in others), "its number of steps depends on a dynamic size")
    refuse(total > MAX_ITERATIONS, f"it has more than {MAX_ITERATIONS} steps")
    refuse(total == 0 or any(size != total for size in others), "its inputs have no steps, or not equally many")
    backwards = list(scan_input_directions) or [0] * num_scan_inputs
    step, collected = _Body(r, body), []
    for i in range(total):
        parts = [
            r.call(torch.select, x, axis, total - 1 - i if last_first else i)
            for x, axis, last_first in zip(inputs, axes, backwards, strict=True)
        ]
        results = step.read([*states, *parts])
        states = list(results[:count])
        collected.append(results[count:])
    outputs = [list(parts) for parts in zip(*collected, strict=True)]
    output_axes = list(scan_output_axes) or [0] * len(outputs)
    for parts, last_first in zip(outputs, scan_output_directions, strict=False):
        if last_first:
            parts.reverse()
    return (*states, *(r.call(torch.stack, parts, axis) for parts, axis in zip(outputs, output_axes, strict=True)))


def suppressed(
    boxes: Tensor, scores: Tensor, limit: int, iou_threshold: float, score_threshold: float, centers: bool
) -> Tensor:
    """Indices (batch, class, box) of the boxes that non-maximum suppression keeps, of shape (N, 3).

    Args:
        boxes: float[B, N, 4]: two corners, or center, width and height.
        scores: float[B, C, N].
        limit: largest number of boxes of a class.
        iou_threshold: overlap (intersection over union) above which the box with the lower score is dropped.
        score_threshold: score that a box must exceed.
        centers: whether boxes are given by their centers.
    """
    if centers:
        center, half = boxes[..., :2], boxes[..., 2:] / 2
        low, high = center - half, center + half
    else:
        first, second = boxes[..., :2], boxes[..., 2:]
        low, high = torch.minimum(first, second), torch.maximum(first, second)
    area = (high - low).prod(-1)
    kept: list[tuple[int, int, int]] = []
    for b in range(scores.shape[0]):
        for c in range(scores.shape[1]):
            order = torch.argsort(scores[b, c], descending=True, stable=True)
            order = order[scores[b, c][order] > score_threshold]
            count = 0
            while order.numel() and count < limit:
                best, order = order[0], order[1:]
                kept.append((b, c, int(best)))
                count += 1
                common = torch.minimum(high[b, best], high[b, order]) - torch.maximum(low[b, best], low[b, order])
                shared = common.clamp(min=0).prod(-1)
                overlap = shared / (area[b, best] + area[b, order] - shared)
                order = order[~(overlap > iou_threshold)]
    return torch.tensor(kept, dtype=torch.int64).reshape(-1, 3)


torch.fx.wrap("suppressed")


@reads("NonMaxSuppression")
def non_max_suppression(
    r: Reader,
    boxes: Any,
    scores: Any,
    limit: Any = None,
    iou: Any = None,
    score: Any = None,
    *,
    center_point_box: int = 0,
) -> Any:
    limits = int(r.number(limit)) if limit is not None else 0
    least = -float("inf") if score is None else r.number(score)
    overlap = 0.0 if iou is None else r.number(iou)
    arguments = (boxes, scores, limits, overlap, least, bool(center_point_box))
    return r.call_of_data(suppressed, *arguments, like=lambda count: (count, 3), dtype=torch.int64)


def read_function(r: Reader, node: Any, inputs: Any) -> Any:
    """Read a node through the body that the ONNX standard defines for its op type; None if it defines none."""
    import onnx
    import onnx.defs

    try:
        schema: Any = onnx.defs.get_schema(node.op_type, r.opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_context_dependent_function or not schema.has_function:
        return None
    body = schema.function_body
    values = dict(zip(body.input, [*inputs, *[None] * (len(body.input) - len(inputs))], strict=True))
    own = {attribute.name: attribute for attribute in node.attribute}
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type}
    nodes = []
    for inner in body.node:
        copied = onnx.NodeProto()
        copied.CopyFrom(inner)
        kept = []
        for attribute in inner.attribute:
            if not attribute.ref_attr_name:
                kept.append(attribute)
            elif (attached := own.get(attribute.ref_attr_name) or defaults.get(attribute.ref_attr_name)) is not None:
                named = onnx.AttributeProto()
                named.CopyFrom(attached)
                named.name = attribute.name
                kept.append(named)
        del copied.attribute[:]
        copied.attribute.extend(kept)
        copied.name = node.name
        nodes.append(copied)
    outer, label, count, opset = r.values, r.label, r.outputs, r.opset
    r.values = values
    r.opset = max([entry.version for entry in body.opset_import if entry.domain == ""], default=opset)
    r.read_all(nodes)
    results = tuple(r.values.get(name) for name in body.output)
    r.values, r.label, r.outputs, r.opset = outer, label, count, opset
    return results
