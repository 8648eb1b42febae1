"""Float form of a qdq graph: the same nodes, with nothing rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, arguments_of, is_op, op_of, read_attribute, submodule
from fxq.graph.run import Runner
from fxq.quant.observer_base import Observer


class FloatForm(Runner):
    """Run of an observed or qdq graph in float: skips observers and conversions, and uses the float weights."""

    def compute(self, node: fx.Node) -> Any:
        if info(node).stands_for:
            return read_attribute(self.gm, info(node).stands_for)
        if info(node).corrects:
            return torch.zeros_like(super().compute(node))
        op = op_of(node)
        if op is not None and op.traits.recurrence is not None:
            args, options = arguments_of(node, self.values)
            return op.target(*args, **op.traits.recurrence.without_grid(options))
        passed = is_op(node, *CONVERSIONS) or isinstance(submodule(self.gm, node), Observer)
        read: Any = node.args[0] if passed else None
        return self.values[read] if read is not None and read.op != "get_attr" else super().compute(node)
