"""`Precision`, in which a node runs, and the wider sets of words for ops, layers of engines, and nodes of views."""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["int8", "weight-only", "moves", "float"]
"""Precision of a node: `int8` (runs on integers), `weight-only` (computes in float with a weight that is stored as
integers or float16), `moves` (hands integers on unchanged), or `float`."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""All precisions. A kernel of several ops has the first of these that one of its ops has."""
SPLIT_OP_PRECISIONS: tuple[Precision, ...] = ("float", "weight-only", "int8", "moves")
"""All precisions. An op that is split over several nodes has the first of these that one of the nodes has."""

EntryPrecision = Literal[Precision, "folded"]
"""Precision of an op of the float model. `folded`: into the weights of another op, or without effect."""
ENTRY_PRECISIONS: tuple[EntryPrecision, ...] = get_args(EntryPrecision)

LayerKind = Literal[Precision, "convert"]
"""Precision of a layer that an engine runs, or `convert` if it only converts between floats and integers."""

NodeKind = Literal[LayerKind, "observer", "op", "size", "constant", "io"]
"""Precision of a node; else `convert` (a conversion), `observer`, `op` (not decided yet), `size` (sizes and other plain
values, checks), `constant`, or `io` (input or output of the model)."""
