"""Layers that read one value of a measured grid, as one kernel: one product for query, key and value of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel, Post, refuse
from fxq.backends.measured_layer import MeasuredLayer
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.graph.region import Region, UnitRegion, integer_input, joined_region
from fxq.graph.unit import calls_of

if TYPE_CHECKING:
    from typing_extensions import Self


class JoinedLayers(Kernel):
    """Linear layers whose outputs are computed behind one another, and handed out apart.

    Args:
        kernel, settings, post: as of each `MeasuredLayer`.
        tensors: those of the layers, each with its number behind its name, as in `weight_0`.
    """

    name: ClassVar[str] = "joined_layers"
    options: ClassVar[tuple[str, ...]] = ("kernel", "settings", "post")

    def __init__(self, kernel: str, settings: Mapping[str, Any], post: Post | None, **tensors: Tensor | None) -> None:
        super().__init__()
        self.kernel, self.settings, self.post = kernel, dict(settings), post
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._joined()  # refuses what it cannot run

    @classmethod
    def of(cls, layers: Sequence[MeasuredLayer]) -> Self:
        """The kernel of these layers.

        Raises:
            BackendError: they are not alike, or no linear layers.
        """
        first, tensors = layers[0], dict[str, Tensor]()
        for i, layer in enumerate(layers):
            refuse(cls.name, None if layer.config() == first.config() else "the layers differ in their options")
            tensors |= {f"{name}_{i}": tensor for name, tensor in layer.named_buffers(recurse=False)}
        return cls(first.kernel, first.settings, first.post, **tensors)

    def bind(self, *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        """As in `Bindable`: the layer's kernel is bound to its integers."""
        layer, sizes = self._kept("", self._joined)
        run = layer.bind(*inputs)
        return lambda *values: run(*values).split(sizes, -1)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `MeasuredLayer` takes -> the results of all layers, views of one tensor."""
        layer, sizes = self._kept("", self._joined)
        made: tuple[Tensor, ...] = layer(*inputs).split(sizes, -1)
        return made

    def _joined(self) -> tuple[MeasuredLayer, list[int]]:
        """All layers as one, and how many outputs each has."""
        parts: dict[str, list[Tensor]] = {}
        for name, tensor in self.named_buffers(recurse=False):
            parts.setdefault(name.rpartition("_")[0], []).append(tensor)
        weights = parts["weight"]
        alike = all(w.dim() == 2 and w.shape[1] == weights[0].shape[1] for w in weights)
        refuse(self.name, None if alike else "not all are linear layers of as many inputs")
        complete = all(len(tensors) == len(weights) for tensors in parts.values())
        refuse(self.name, None if complete else "some have a bias, others none")
        sizes = [len(weight) for weight in weights]
        scales = zip(parts["weight_scale"], sizes, strict=True)
        parts["weight_scale"] = [scale.expand(size) for scale, size in scales]
        joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
        return MeasuredLayer(self.kernel, self.settings, self.post, **joined), sizes


def joined_with(gm: fx.GraphModule, region: UnitRegion) -> Region | None:
    """The region of a linear layer on a measured grid and of all others that read the same integers; None: it is alone.

    Each makes floats. They are in the order of the graph.
    """
    read = _measured(gm, region.node)
    if read is None:
        return None
    integers: Any = read[0]
    readers = {unit for value in integers.users if is_op(value, "dequantize") for unit in value.users}
    units = sorted(node for node in readers if _measured(gm, node) == read)
    return joined_region(units) if len(units) > 1 else None


def _measured(gm: fx.GraphModule, node: fx.Node) -> tuple[object, ...] | None:
    """What layers have to have in common; None where a node is no linear layer on integers of a measured grid.

    These integers, what is measured of their grid, and whether it has a bias.
    """
    plan, calls = info(node).plan, calls_of(gm, node)
    if plan is None or plan.fate != "int8" or [call.op.name for call in calls] != ["linear"]:
        return None
    found = integer_input(gm, calls[0].tensors["x"])
    biased = calls[0].tensors.get("bias") is not None
    return (*found.nodes, biased) if found is not None and found.measured else None
