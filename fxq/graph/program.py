"""A graph with private copies of its stateful modules, so that runs of several graphs do not affect each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx, nn

from fxq.common.isolation import computed_tensors
from fxq.graph.analysis.mutation import changes
from fxq.graph.query import is_pure, submodule


@dataclass(frozen=True)
class IsolatedGraph:
    """A graph with private copies of its stateful modules.

    Attributes:
        gm: the module with the weights.
        graph: `gm.graph`, or another graph that reads the same weights.
    """

    gm: fx.GraphModule
    graph: fx.Graph

    @cached_property
    def overwrites(self) -> bool:
        """Whether one of its nodes may change the value of another one in place."""
        return any(changes(n) or getattr(submodule(self.gm, n), "inplace", False) is True for n in self.graph.nodes)

    @cached_property
    def modules(self) -> Mapping[str, nn.Module]:
        """Copies of the modules that may keep state between calls, by path; they share their weights with `gm`.

        Empty if a module cannot be copied: then the modules of `gm` run, and other runs of `gm` see their state.
        """
        originals = {
            str(n.target): self.gm.get_submodule(str(n.target))
            for n in self.graph.nodes
            if n.op == "call_module" and not is_pure(self.gm, n)
        }
        weights = {id(p): p for module in originals.values() for p in module.parameters()}
        weights |= computed_tensors(*originals.values())
        try:
            return copy.deepcopy(originals, weights)
        except Exception:  # a user's module may hold anything: a lock, a file, a tensor with a history
            return {}

    @cached_property
    def fresh(self) -> IsolatedGraph:
        """Another copy of the graph, whose stateful modules are separate from those of this one."""
        return IsolatedGraph(self.gm, self.graph)
