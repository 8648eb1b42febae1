"""`Precision`: every list of its words is complete."""

from typing import get_args

from fxq.display.colours import LOOKS
from fxq.graph.precision import ENTRY_PRECISIONS, PRECISIONS, SPLIT_OP_PRECISIONS, NodeKind


def test_every_kind_of_node_has_a_look():
    assert set(get_args(NodeKind)) == set(LOOKS)


def test_every_precision_has_a_place_in_the_order_for_split_ops():
    assert sorted(SPLIT_OP_PRECISIONS) == sorted(PRECISIONS)


def test_an_op_has_the_precision_of_a_node_or_is_folded():
    assert set(ENTRY_PRECISIONS) == {*PRECISIONS, "folded"}
