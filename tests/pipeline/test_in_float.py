"""An integer op goes back to float: what it reads, and what the graph says of it."""

from dataclasses import dataclass
from typing import ClassVar

import fxq
from fxq.graph.info import Decision, info, precision_of
from fxq.pipeline.in_float import run_in_float
from tests.support.graphs import GRID, expected, integer_weight, joined, node, qdq, run_pass, text

INT8 = "plan=Plan(Decision('int8'), reads=TensorSpec())"
MOVES = "plan=Plan(Decision('moves'), reads=TensorSpec())"
GRAPH = joined(
    "", "x: float32[2, 3, 8, 8] = input()", "c: float32[8] = tensor('c')",
    integer_weight("a", "8, 3, 3, 3"), qdq("x"), f"a = conv2d(x_qdq, a_dq, c)  # {INT8}", f"a_q = quantize(a, {GRID})",
    f"flat = flatten(a_q, start_dim=1)  # {MOVES}", f"flat_dq = dequantize(flat, {GRID})", "return flat_dq",
)  # fmt: skip


@dataclass(frozen=True)
class Back(fxq.Pass):
    """Puts ops of these names back."""

    names: tuple[str, ...]
    name: ClassVar[str] = "back"

    def run(self, rewriter):
        for candidate in rewriter.nodes():
            if candidate.name in self.names and precision_of(candidate) != "float":
                run_in_float(rewriter, candidate, "unsupported", "it is tried out", "none")


def test_a_layer_reads_its_float_weight():
    gm = run_pass(Back(("a",)), GRAPH)
    assert text(gm) == expected("""
        x = input
        a_dq = int8(a_weight, axis=0)
        x_q = quantize(x, A)
        x_qdq = dequantize(x_q, A)
        a = conv2d(x_qdq, @a.weight, @c)
        a_q = quantize(a, A)
        flat = flatten(a_q, start_dim=1)
        flat_dq = dequantize(flat, A)
        return flat_dq
    """)
    decision = info(node(gm, "a")).plan.decision
    assert decision == Decision("float", "unsupported", "it is tried out", "none", "back")
    assert precision_of(node(gm, "flat")) == "moves"


def test_what_moves_integers_moves_floats():
    gm = run_pass(Back(("flat",)), GRAPH)
    assert text(gm) == expected("""
        x = input
        a_dq = int8(a_weight, axis=0)
        x_q = quantize(x, A)
        x_qdq = dequantize(x_q, A)
        a = conv2d(x_qdq, a_dq, @c)
        a_q = quantize(a, A)
        a_q_dq = dequantize(a_q, A)
        flat = flatten(a_q_dq, start_dim=1)
        flat_q = quantize(flat, A)
        flat_dq = dequantize(flat_q, A)
        return flat_dq
    """)
    assert str(info(node(gm, "flat")).dtype) == "torch.float32" and precision_of(node(gm, "flat")) == "float"
