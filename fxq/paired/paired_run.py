"""Paired run: a qdq graph and its float form on the same samples."""

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
    """Run of a qdq graph and its float form on some batches, node by node.

    Both draw the same random numbers. Each has private copies of stateful modules.

    Args:
        gm: the qdq graph.
        batches: the batches.
        tokens: nodes whose values are read without padding, see `used_rows`.
    """

    def __init__(self, gm: fx.GraphModule, batches: Sequence[Batch], tokens: Collection[fx.Node] = ()) -> None:
        self._used = [used_rows(IsolatedGraph(gm, gm.graph), batch, tokens) for batch in batches]
        sides = [(runner, IsolatedGraph(gm, gm.graph).modules) for runner in (Runner, FloatForm)]
        self._runs = [tuple(runner(gm, copied(batch), modules=own) for runner, own in sides) for batch in batches]

    def values(self, node: fx.Node) -> Iterator[tuple[Any, Any]]:
        """Yield for each batch the value of a node that is still read, quantized and in float.

        If the node is among `tokens`, padding is left out: (n, C).
        """
        for pair, used in zip(self._runs, self._used, strict=True):
            chosen = used.get(node, ...)
            yield pair[0].values[node][chosen], pair[1].values[node][chosen]

    def states(self, node: fx.Node) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each batch the hidden states that the next node, a recurrent op, multiplies with weight_hh.

        They are quantized and in float, without the steps whose input is padding.
        """
        x: Any = node.args[0]
        for pair, used in zip(self._runs, self._used, strict=True):
            chosen = used.get(x, ...)
            yield _states(node, pair[0])[chosen], _states(node, pair[1])[chosen]

    def put(self, node: fx.Node, value: Any) -> None:
        """Set the value of a node that has run, in the quantized graph."""
        for run, _ in self._runs:
            run.values[node] = value

    def step(self, node: fx.Node) -> None:
        """Run a node for every batch. Weights are computed only once."""
        weight = node.op == "get_attr" or is_op(node, "dequantize")
        once = weight and all(read.op == "get_attr" for read in node.all_input_nodes)
        weights = [run.compute(node) for run in self._runs[0]] if once else []
        for pair in self._runs:
            rng_state = torch.get_rng_state()
            for side, run in enumerate(pair):
                torch.set_rng_state(rng_state)
                if once:
                    run.put(node, weights[side])
                else:
                    run.step(node)


def _states(node: fx.Node, run: Runner) -> Tensor:
    """Hidden state before each step of a recurrent op, (T, N, P), not rounded."""
    op = op_of(node)
    assert op is not None and op.traits.recurrence is not None
    arguments: dict[str, Any] = dict(zip(op.tensors, node.args, strict=False))
    first = arguments.get(op.traits.recurrence.states[0])
    states = run.compute(node)[: len(run.values[arguments["x"]])]  # the cell state of an LSTM may follow
    before = torch.zeros_like(states[:1]) if first is None else run.values[first].expand_as(states[0])[None]
    return torch.cat([states[1:], before] if options_of(node)["reverse"] else [before, states[:-1]])
