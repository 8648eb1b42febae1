"""A qdq graph and its float form, run side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import is_op, op_of, options_of
from fxq.graph.run import Runner
from fxq.paired.used_rows import used_rows
from fxq.pipeline.float_form import FloatForm


class PairedRun:
    """Some batches, run through a qdq graph and through its float form, node by node.

    Both draw the same random numbers, and the modules of each keep what they keep from batch to batch to themselves.

    Args:
        gm: the qdq graph.
        batches: the batches.
        tokens: values that may hold padding, which is left out, see `used_rows`.
    """

    def __init__(self, gm: fx.GraphModule, batches: Sequence[Batch], tokens: Collection[fx.Node] = ()) -> None:
        kinds = Runner, FloatForm
        self._used = [used_rows(IsolatedGraph(gm, gm.graph), batch, tokens) for batch in batches]
        sides = [(kind, IsolatedGraph(gm, gm.graph).modules) for kind in kinds]
        self._runs = [tuple(kind(gm, copied(batch), modules=own) for kind, own in sides) for batch in batches]

    def values(self, node: fx.Node) -> Iterator[tuple[Any, Any]]:
        """Of every batch, the value of a node that is still read: as it is, and in float; without padding, (n, C)."""
        for pair, used in zip(self._runs, self._used, strict=True):
            chosen = used.get(node, ...)
            yield pair[0].values[node][chosen], pair[1].values[node][chosen]

    def states(self, node: fx.Node) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every batch, the hidden states that a recurrent op, the next node, multiplies with its weight_hh.

        As they are, and in float; without those of steps whose input is padding.
        """
        x: Any = node.args[0]
        for pair, used in zip(self._runs, self._used, strict=True):
            chosen = used.get(x, ...)
            yield _states(node, pair[0])[chosen], _states(node, pair[1])[chosen]

    def put(self, node: fx.Node, value: Any) -> None:
        """Take this for the value of a node that has been run, in the graph as it is."""
        for run, _ in self._runs:
            run.values[node] = value

    def step(self, node: fx.Node) -> None:
        """Run a node for every batch; a weight once for all of them."""
        weight = node.op == "get_attr" or is_op(node, "dequantize")
        once = weight and all(read.op == "get_attr" for read in node.all_input_nodes)
        made = [run.compute(node) for run in self._runs[0]] if once else []
        for pair in self._runs:
            drawn = torch.get_rng_state()
            for side, run in enumerate(pair):
                torch.set_rng_state(drawn)
                if once:
                    run.put(node, made[side])
                else:
                    run.step(node)


def _states(node: fx.Node, run: Runner) -> Tensor:
    """The state before each step of a recurrent op, (T, N, P), as its value has them: rounded to no grid."""
    op = op_of(node)
    assert op is not None and op.traits.recurrence is not None
    given: dict[str, Any] = dict(zip(op.tensors, node.args, strict=False))
    first = given.get(op.traits.recurrence.states[0])
    made = run.compute(node)[: len(run.values[given["x"]])]  # an LSTM may have its cell state behind them
    before = torch.zeros_like(made[:1]) if first is None else run.values[first].expand_as(made[0])[None]
    return torch.cat([made[1:], before] if options_of(node)["reverse"] else [before, made[:-1]])
