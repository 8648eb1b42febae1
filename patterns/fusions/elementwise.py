"""Fusions of elementwise ops."""

from __future__ import annotations

from fxq.rewriting.pattern import fusion


@fusion
def add_relu(op, x, other):
    return op.relu(op.add(x, other, alpha=1))


@fusion
def mul_relu(op, x, other):
    return op.relu(op.mul(x, other))


@add_relu.unless
@mul_relu.unless
def operand_is_a_number(m):
    """Refuse numbers: the unit is for two activations."""
    return m.x.shape is None or m.other.shape is None or () in (m.x.shape, m.other.shape)


@fusion
def batch_norm_relu(op, x, mean, var, weight, bias):
    return op.relu(op.batch_norm(x, mean, var, weight, bias))
