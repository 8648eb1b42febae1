"""Cases of tests/ops/test_rows.py: ops with weights, and norms."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.opcases import Call, Case, aten, cases, function, method, module, normal, spelled

KINDS = {1: (nn.Conv1d, "sequence"), 2: (nn.Conv2d, "image"), 3: (nn.Conv3d, "volume")}


def conv_cases(n: int) -> list[Case]:
    kind, layout = KINDS[n]
    call, overloads = getattr(F, f"conv{n}d"), getattr(aten, f"conv{n}d")
    tensors = {"weight": normal(6, 4, *(3,) * n), "bias": normal(6)}
    ones, twos = [1] * n, [2] * n
    return [
        *cases(
            f"conv{n}d",
            module(kind, 4, 6, 3, stride=2, padding=1),
            function(call, lambda x, m: call(x, m.weight, m.bias, 2, 1), **tensors),
            function(
                call, lambda x, m: call(input=x, weight=m.weight, bias=m.bias, stride=twos, padding=(1,)), **tensors
            ),
            function(overloads.default, lambda x, m: overloads.default(x, m.weight, m.bias, twos, ones), **tensors),
            function(
                aten.convolution.default,
                lambda x, m: aten.convolution.default(x, m.weight, m.bias, twos, ones, ones, False, [0] * n, 1),
                **tensors,
            ),
            layout=layout,
        ),
        *cases(
            f"conv{n}d",
            module(kind, 4, 6, 3, padding="same"),
            function(call, lambda x, m: call(x, m.weight, m.bias, padding="same"), **tensors),
            function(overloads.padding, lambda x, m: overloads.padding(x, m.weight, m.bias, ones, "same"), **tensors),
            layout=layout,
            group=f"conv{n}d_same",
        ),
    ]


UP = {1: (nn.ConvTranspose1d, "sequence"), 2: (nn.ConvTranspose2d, "image"), 3: (nn.ConvTranspose3d, "volume")}


def transposed_cases(n: int) -> list[Case]:
    kind, layout = UP[n]
    call, aten_call = getattr(F, f"conv_transpose{n}d"), getattr(aten, f"conv_transpose{n}d")
    overload = aten_call.default if n == 1 else aten_call.input
    tensors = {"weight": normal(4, 6, *(2,) * n), "bias": normal(6)}
    zeros, ones, twos = [0] * n, [1] * n, [2] * n
    return cases(
        f"conv_transpose{n}d",
        module(kind, 4, 6, 2, stride=2),
        function(call, lambda x, m: call(x, m.weight, m.bias, 2), **tensors),
        function(overload, lambda x, m: overload(x, m.weight, m.bias, twos), **tensors),
        function(
            aten.convolution.default,
            lambda x, m: aten.convolution.default(x, m.weight, m.bias, twos, zeros, ones, True, zeros, 1),
            **tensors,
        ),
        layout=layout,
    )


STATISTICS = {
    "running_mean": normal(4),
    "running_var": lambda: torch.rand(4) + 0.5,
    "weight": normal(4),
    "bias": normal(4),
}
VOLUME = (4, 4, 2, 4, 8)


def _bags(f: Any, more: tuple[Any, ...], x: torch.Tensor, m: Any) -> torch.Tensor:
    """x plus the mean of the weight's row at the index of x's largest value, by an aten overload."""
    index = x.argmax(1)
    bags: torch.Tensor = f(m.weight, index, torch.arange(len(index)), False, 1, *more)[0]
    return x + bags


def SCALE() -> torch.Tensor:
    return torch.ones(8)


def SHIFT() -> torch.Tensor:
    return torch.zeros(8)


LAYERS = [
    *conv_cases(1),
    *conv_cases(2),
    *conv_cases(3),
    *(case for n in (1, 2, 3) for case in transposed_cases(n)),
    *cases(
        "linear",
        module(nn.Linear, 8, 6),
        function(F.linear, lambda x, m: F.linear(x, m.weight, m.bias), weight=normal(6, 8), bias=normal(6)),
        function(
            aten.linear.default,
            lambda x, m: aten.linear.default(x, m.weight, m.bias),
            weight=normal(6, 8),
            bias=normal(6),
        ),
        layout="rows",
    ),
    *cases(
        "linear",
        *(
            function(f, lambda x, m, f=f: f(m.bias, x, m.weight), weight=normal(8, 6), bias=normal(6))
            for f in (torch.addmm, aten.addmm.default)
        ),
        method("addmm", lambda x, m: m.bias.addmm(x, m.weight), weight=normal(8, 6), bias=normal(6)),
        layout="rows",
        group="linear_addmm",
    ),
    *cases(
        "linear",
        *(
            function(f, lambda x, m, f=f: f(x, m.weight), weight=normal(8, 6))
            for f in (torch.matmul, torch.mm, operator.matmul, aten.mm.default, aten.matmul.default)
        ),
        *(method(f, lambda x, m, f=f: getattr(x, f)(m.weight), weight=normal(8, 6)) for f in ("matmul", "mm")),
        layout="rows",
        group="linear_matmul",
    ),
    *cases(
        "batch_norm",
        module(nn.BatchNorm2d, 4),
        function(
            F.batch_norm,
            lambda x, m: F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias),
            **STATISTICS,
        ),
        function(
            torch.batch_norm,
            lambda x, m: torch.batch_norm(
                x, m.weight, m.bias, m.running_mean, m.running_var, False, 0.1, 1e-5, torch.backends.cudnn.enabled
            ),
            **STATISTICS,
        ),
        function(
            aten.batch_norm.default,
            lambda x, m: aten.batch_norm.default(
                x, m.weight, m.bias, m.running_mean, m.running_var, False, 0.1, 1e-5, False
            ),
            **STATISTICS,
        ),
        function(
            aten._native_batch_norm_legit_no_training.default,
            lambda x, m: aten._native_batch_norm_legit_no_training.default(
                x, m.weight, m.bias, m.running_mean, m.running_var, 0.1, 1e-5
            )[0],
            **STATISTICS,
        ),
    ),
    *cases("batch_norm", module(nn.BatchNorm1d, 4), layout="sequence", group="batch_norm_1d"),
    *cases(
        "batch_norm",
        (
            nn.BatchNorm3d,
            lambda: Call(lambda x, m: m.norm(x.reshape(VOLUME)).reshape(4, 4, 8, 8), norm=nn.BatchNorm3d(4)),
        ),
        group="batch_norm_3d",
        precision="int8",
    ),
    *cases(
        "prelu",
        module(nn.PReLU, 4),
        function(F.prelu, lambda x, m: F.prelu(x, m.weight), weight=lambda: torch.full((4,), 0.25)),
        function(
            aten.prelu.default, lambda x, m: aten.prelu.default(x, m.weight), weight=lambda: torch.full((4,), 0.25)
        ),
        method("prelu", lambda x, m: x.prelu(m.weight), weight=lambda: torch.full((4,), 0.25)),
    ),
    *cases(
        "layer_norm",
        module(nn.LayerNorm, 8),
        *(
            function(f, lambda x, m, f=f: f(x, [8], m.weight, m.bias), weight=SCALE, bias=SHIFT)
            for f in (F.layer_norm, aten.layer_norm.default)
        ),
        function(
            torch.layer_norm,
            lambda x, m: torch.layer_norm(x, [8], m.weight, m.bias, 1e-5, False),
            weight=SCALE,
            bias=SHIFT,
        ),
        function(
            aten.native_layer_norm.default,
            lambda x, m: aten.native_layer_norm.default(x, [8], m.weight, m.bias, 1e-5)[0],
            weight=SCALE,
            bias=SHIFT,
        ),
        layout="rows",
    ),
    *cases(
        "rms_norm",
        module(nn.RMSNorm, 8),
        *(
            function(f, lambda x, m, f=f: f(x, [8], m.weight), weight=SCALE)
            for f in (F.rms_norm, torch.rms_norm, aten.rms_norm.default)
        ),
        layout="rows",
    ),
    *cases(
        "group_norm",
        module(nn.GroupNorm, 2, 4),
        *(
            function(
                f,
                lambda x, m, f=f: f(x, 2, m.weight, m.bias),
                weight=lambda: torch.ones(4),
                bias=lambda: torch.zeros(4),
            )
            for f in (F.group_norm, torch.group_norm, aten.group_norm.default)
        ),
    ),
    *cases(
        "instance_norm",
        module(nn.InstanceNorm2d, 4),
        function(F.instance_norm),
        function(
            aten.instance_norm.default,
            lambda x, m: aten.instance_norm.default(x, None, None, None, None, True, 0.1, 1e-5, False),
        ),
        function(
            torch.instance_norm,
            lambda x, m: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        ),
    ),
    *cases("instance_norm", module(nn.InstanceNorm1d, 4), layout="sequence", group="instance_norm_1d"),
    *cases("instance_norm", module(nn.InstanceNorm3d, 4), layout="volume", group="instance_norm_3d"),
    *cases(
        "local_response_norm",
        module(nn.LocalResponseNorm, 2),
        *spelled(F.local_response_norm, args=(2,)),
    ),
    *cases(
        "embedding",
        (nn.Embedding, lambda: Call(lambda x, m: x + m.table(x.argmax(1)), table=nn.Embedding(8, 8))),
        layout="rows",
        group="embedding_module",
    ),
    *cases(
        "embedding_bag",
        (nn.EmbeddingBag, lambda: Call(lambda x, m: x + m.table(x.argmax(1)[:, None]), table=nn.EmbeddingBag(8, 8))),
        layout="rows",
        group="embedding_bag_module",
    ),
    *cases(
        "embedding_bag",
        function(
            F.embedding_bag, lambda x, m: x + F.embedding_bag(x.argmax(1)[:, None], m.weight), weight=normal(8, 8)
        ),
        layout="rows",
        group="embedding_bag_function",
    ),
    *cases(
        "embedding_bag",
        *(
            function(f, partial(_bags, f, more), weight=normal(8, 8))
            for f, more in (
                (aten.embedding_bag.default, ()),
                (aten._embedding_bag.default, ()),
                (aten.embedding_bag.padding_idx, (False, None, False, None)),
            )
        ),
        layout="rows",
    ),
    *cases(
        "embedding",
        function(F.embedding, lambda x, m: x + F.embedding(x.argmax(1), m.weight), weight=normal(8, 8)),
        function(
            aten.embedding.default,
            lambda x, m: (lambda index: x + aten.embedding.default(m.weight, index))(x.argmax(1)),
            weight=normal(8, 8),
        ),
        layout="rows",
    ),
    *cases(
        "scaled_dot_product_attention",
        *(
            function(f, lambda x, y, m, f=f: f(x, y, x + y))
            for f in (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)
        ),
        function(
            F.scaled_dot_product_attention,
            lambda x, y, m: F.scaled_dot_product_attention(query=x, key=y, value=x + y),
        ),
        layout="sequences",
    ),
]
