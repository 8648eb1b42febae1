"""rotate-keys: rotate keys and queries, so that keys lose less when they are stored as integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import argument, is_op, options_of, plan_of
from fxq.quant.rotation import MIN_ROTATED, rotation_size
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.state_readers import is_returned, split_slices

_ROTATED = "stored as integers of its rotated rows, so that an outlier is divided among all values of a row"


@dataclass(frozen=True)
class RotateKeys(Pass):
    """Rotate the rows of a cache of keys, and the queries that are multiplied with them.

    Before: keys = append(past, new); attention(query, keys, values)
    After: keys = append(rotate_rows(past), rotate_rows(new)); attention(rotate_rows(query), keys, values); the model
    returns rotate_rows(keys), which are the keys.
    Where: the pass store-states is to store the keys as integers, and all that reads them are attentions, written as
    one op or as a product with their transpose.
    Keeps: the output, up to rounding. Products of rotated rows are those of the rows, but a rotated key has no
    outliers, which would make the step of its grid large (QuaRot: Ashkboos et al. 2024, section 4).
    """

    name: ClassVar[str] = "rotate-keys"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Rewrite each `append` of keys whose plan has a spec for its state."""
        for node in rewriter.nodes("append"):
            plan, size = plan_of(node), (info(node).shape or (0,))[-1]
            is_stored = plan is not None and plan.state is not None and not is_op(node.args[0], "rotate_rows")
            is_long = isinstance(size, int) and rotation_size(size) >= MIN_ROTATED
            products = _products(node) if is_stored and is_long else []
            if products:
                with rewriter.attributed("rotate_keys", _rotate):
                    _rotate(rewriter, node, products)


def _products(keys: fx.Node) -> list[fx.Node]:
    """Nodes that multiply queries, their first argument, with keys; none if the keys are read in another way."""
    products = list[fx.Node]()
    for user in keys.users:
        if is_returned(user):
            continue
        reads: Any = user.args
        if is_op(user, "scaled_dot_product_attention") and [read is keys for read in reads[:3]] == [False, True, False]:
            products.append(user)
        elif is_op(user, "transpose", "permute") and _swaps_last_axes(user, keys):
            products += user.users
            if not all(is_op(reader, "matmul") and argument(reader, "x") is not user for reader in user.users):
                return []
        elif is_op(user, "getitem") and _has_whole_rows(user) and (of_part := _products(user)):
            products += of_part
        else:
            return []
    return products


def _has_whole_rows(part: fx.Node) -> bool:
    """Whether a slice of keys has all values of each row."""
    index, rank = options_of(part)["index"], len(info(part).shape or ())
    places = index if isinstance(index, tuple) else (index,)
    # axes that an index leaves out are taken whole
    return all(isinstance(place, slice) for place in places) and places[rank - 1 :] in ((), (slice(None),))


def _swaps_last_axes(node: fx.Node, x: fx.Node) -> bool:
    rank, options = len(info(x).shape or ()), options_of(node)
    if is_op(node, "permute"):
        return [dim % rank for dim in options["dims"]] == [*range(rank - 2), rank - 1, rank - 2]
    return {options["dim0"] % rank, options["dim1"] % rank} == {rank - 1, rank - 2}


def _rotate(rewriter: Rewriter, keys: fx.Node, products: list[fx.Node]) -> None:
    plan = Plan(Decision("moves", decided_by=rewriter.name))

    def rotated(x: Any, name: str, **place: fx.Node) -> fx.Node:
        node = rewriter.call("rotate_rows", x, name=name, typed=(info(x).shape, torch.float32), **place)
        rewriter.describe(node, path=info(keys).path, source=info(keys).source, plan=plan)
        return node

    split_slices(rewriter, keys)
    past, new = keys.args
    assert isinstance(past, fx.Node) and isinstance(new, fx.Node)
    rotations = tuple(rotated(x, f"{x.name}_rotated", before=keys) for x in (past, new))
    rewriter.update(keys, keys.target, rotations, keys.kwargs)
    name = keys.name
    returned = rotated(keys, f"{name}_returned", after=keys)
    rewriter.describe(returned, origins=info(keys).origins, note=_ROTATED)
    rewriter.describe(keys, origins=())
    rewriter.reroute(keys, returned, only=is_returned)
    rewriter.rename(keys, f"{name}_rotated")
    rewriter.rename(returned, name)
    queries: dict[fx.Node, fx.Node] = {}
    for product in products:
        query = argument(product, "x")
        assert isinstance(query, fx.Node)
        if query not in queries:
            queries[query] = rotated(query, f"{query.name}_rotated", after=query)
        rewriter.update(product, product.target, (queries[query], *product.args[1:]), product.kwargs)
