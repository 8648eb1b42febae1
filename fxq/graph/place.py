"""What a message calls a node."""

from __future__ import annotations

from torch import fx

from fxq.graph.info import info
from fxq.graph.query import op_of
from fxq.graph.unit import unit_of


def where(gm: fx.GraphModule, node: fx.Node) -> str:
    """What a message calls a node: its name, op, layer and source line."""
    about = info(node)
    op, unit = op_of(node), unit_of(gm, node)
    what = op.name if op is not None else unit.kind if unit is not None else node.op
    layer = f', layer "{about.path}"' if about.path else ""
    return f"%{node.name} ({what}{layer}{', ' + about.source if about.source else ''})"
