"""A graph to run, beside another one of the same model or once more: what modules keep from call to call is its own."""

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
class Program:
    """A graph to run.

    Attributes:
        gm: the module with its weights.
        graph: the graph, `gm`'s own or another one that reads the same weights.
    """

    gm: fx.GraphModule
    graph: fx.Graph

    @cached_property
    def overwrites(self) -> bool:
        """Whether one of its nodes may change a value that another one made."""
        return any(changes(n) or getattr(submodule(self.gm, n), "inplace", False) is True for n in self.graph.nodes)

    @cached_property
    def modules(self) -> Mapping[str, nn.Module]:
        """Copies of the modules that may keep something from call to call, by path; their weights are shared.

        None of those that cannot be copied: then they are those of `gm`, and whoever else runs it sees what they keep.
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
        except Exception:  # whatever a module of the user holds: a lock, a file, a tensor with a history
            return {}

    @cached_property
    def alone(self) -> Program:
        """The same once more, for runs that keep nothing in common with those of this one."""
        return Program(self.gm, self.graph)
