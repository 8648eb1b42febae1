"""Readers of a state that grows: the output of the model, which returns it, and ops, which read its values."""

from __future__ import annotations

from torch import fx

from fxq.graph.query import is_op, options_of, reads_only_metadata
from fxq.rewriting.rewriter import Rewriter


def split_slices(rewriter: Rewriter, node: fx.Node) -> None:
    """Divide each slice of a state that is returned and read by other ops into one for each purpose."""
    for part in [user for user in node.users if is_op(user, "getitem")]:
        if any(user.op == "output" for user in part.users) and not is_returned(part):
            options = options_of(part)
            read = rewriter.call("getitem", node, like=part, after=part, name=f"{part.name}_dq", **options)
            rewriter.reroute(part, read, only=lambda user: user.op != "output")


def is_returned(user: fx.Node) -> bool:
    """Whether a reader of a state is the output of the model, returns it or a part of it, or reads its shape."""
    if is_op(user, "rotate_rows"):
        return len(user.users) > 0 and all(is_returned(reader) for reader in user.users)
    is_slice = is_op(user, "getitem") and all(reader.op == "output" for reader in user.users)
    return user.op == "output" or is_slice or reads_only_metadata(user)
