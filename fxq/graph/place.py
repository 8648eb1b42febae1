"""Description of a node in messages."""

from __future__ import annotations

from torch import fx

from fxq.graph.info import info
from fxq.graph.query import op_of
from fxq.graph.unit import unit_of


def where(gm: fx.GraphModule, node: fx.Node) -> str:
    """Describe a node for a message: its name, op, layer and source line."""
    about = info(node)
    op, unit = op_of(node), unit_of(gm, node)
    kind = op.name if op is not None else unit.kind if unit is not None else node.op
    layer = f', layer "{about.path}"' if about.path else ""
    return f"%{node.name} ({kind}{layer}{', ' + about.source if about.source else ''})"
