"""Cases of tests/ops/test_rows.py: arithmetic of two values."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tests.support.opcases import aten, cases, function, method, normal, spelled


def iadd(x: Any, y: Any, m: Any) -> Any:
    x += y
    return x


def imul(x: Any, y: Any, m: Any) -> Any:
    x *= y
    return x


def CHANNELS() -> torch.Tensor:
    return torch.tensor([0.5, 1.0, 1.5, 2.0]).reshape(4, 1, 1)


ARITHMETIC = [
    *cases(
        "add",
        function(torch.add, lambda x, y, m: torch.add(x, y)),
        function(operator.add, lambda x, y, m: x + y),
        function(operator.iadd, iadd),
        method("add", lambda x, y, m: x.add(other=y)),
        method("add_", lambda x, y, m: x.add_(y)),
        function(aten.add.Tensor, lambda x, y, m: aten.add.Tensor(x, y)),
        function(aten.add_.Tensor, lambda x, y, m: aten.add_.Tensor(x, y)),
        layout="images",
    ),
    *cases(
        "add",
        *spelled(torch.add, operator.add, "add", aten.add.Tensor, aten.add.Scalar, args=(0.5,)),
        function(operator.add, lambda x, m: 0.5 + x),
        group="add_number",
    ),
    *cases(
        "sub",
        *spelled(torch.sub, torch.subtract, operator.sub, operator.isub, "sub", "sub_"),
        *spelled(aten.sub.Tensor, aten.sub_.Tensor),
        function(torch.rsub, lambda x, y, m: torch.rsub(y, x)),
        function(aten.rsub.Tensor, lambda x, y, m: aten.rsub.Tensor(y, x)),
        layout="images",
    ),
    *cases("sub", *spelled(torch.sub, "sub", aten.sub.Scalar, args=(0.5,)), group="sub_number"),
    *cases(
        "sub",
        *spelled(torch.rsub, aten.rsub.Scalar, args=(0.5,)),
        function(operator.sub, lambda x, m: 0.5 - x),
        group="sub_from_number",
    ),
    *cases(
        "div",
        *spelled(torch.div, torch.divide, torch.true_divide, operator.truediv, "div", "div_", args=(2.5,)),
        *spelled(operator.itruediv, args=(2.5,)),
        *spelled(aten.div.Tensor, aten.div.Scalar, args=(2.5,)),
        function(aten.div.Tensor_mode, lambda x, m: aten.div.Tensor_mode(x, 2.5, rounding_mode=None)),
    ),
    *cases(
        "div",
        *(function(f, lambda x, m, f=f: f(x, m.scale), scale=CHANNELS) for f in (operator.truediv, torch.div)),
        group="div_channels",
    ),
    *cases(
        "matmul",
        *(
            function(f, lambda x, y, m, f=f: getattr(x, f)(y.mT) if isinstance(f, str) else f(x, y.mT))
            for f in (torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm", aten.matmul.default, aten.bmm.default)
        ),
        layout="sequences",
    ),
    *cases(
        "baddbmm",
        *(
            function(f, lambda x, y, m, f=f: f(m.bias, x, y.mT, alpha=0.5), bias=normal(4, 4, 4))
            for f in (torch.baddbmm, aten.baddbmm.default)
        ),
        method("baddbmm", lambda x, y, m: m.bias.baddbmm(x, y.mT, alpha=0.5), bias=normal(4, 4, 4)),
        layout="sequences",
    ),
    *cases(
        "maximum",
        *spelled(torch.maximum, "maximum", torch.max, "max", aten.maximum.default),
        layout="images",
    ),
    *cases(
        "minimum",
        *spelled(torch.minimum, "minimum", torch.min, "min", aten.minimum.default),
        layout="images",
    ),
    *cases(
        "mul",
        function(torch.mul, lambda x, y, m: torch.mul(x, y)),
        function(operator.mul, lambda x, y, m: x * y),
        function(operator.imul, imul),
        method("mul", lambda x, y, m: x.mul(y)),
        method("mul_", lambda x, y, m: x.mul_(y)),
        function(aten.mul.Tensor, lambda x, y, m: aten.mul.Tensor(x, y)),
        function(aten.mul_.Tensor, lambda x, y, m: aten.mul_.Tensor(x, y)),
        *spelled(torch.multiply, "multiply"),
        layout="images",
    ),
    *cases(
        "mul",
        *spelled(torch.mul, operator.mul, "mul", aten.mul.Tensor, aten.mul.Scalar, args=(-0.5,)),
        function(operator.mul, lambda x, m: -0.5 * x),
        group="mul_number",
    ),
    *cases(
        "mul",
        function(operator.mul, lambda x, m: x * m.scale, scale=CHANNELS),
        function(operator.mul, lambda x, m: m.scale * x, scale=CHANNELS),
        group="mul_channels",
    ),
    *cases(
        "cat",
        *(
            function(f, lambda x, y, m, f=f: f([x, y], 1))
            for f in (torch.cat, torch.concat, torch.concatenate, aten.cat.default)
        ),
        function(torch.cat, lambda x, y, m: torch.cat(tensors=[x, y], dim=1)),
        layout="images",
    ),
]
