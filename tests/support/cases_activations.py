"""Cases of tests/ops/test_rows.py: activation functions."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.opcases import aten, cases, function, method, module, spelled, unary

ACTIVATIONS = [
    *unary(
        "relu",
        module(nn.ReLU),
        module(nn.ReLU, inplace=True),
        functions=(F.relu, torch.relu, torch.relu_, aten.relu.default, aten.relu_.default),
        methods=("relu", "relu_"),
    ),
    *cases("relu", function(F.relu, lambda x, m: F.relu(x, inplace=True))),
    *unary("relu6", module(nn.ReLU6), functions=(F.relu6, aten.relu6.default)),
    *cases(
        "hardtanh",
        module(nn.Hardtanh, -0.5, 0.75),
        *(
            function(f, lambda x, m, f=f: f(x, -0.5, 0.75))
            for f in (
                F.hardtanh,
                F.hardtanh_,
                aten.hardtanh.default,
                aten.hardtanh_.default,
                torch.clamp,
                torch.clip,
                aten.clamp.default,
                aten.clamp_.default,
            )
        ),
        *(method(f, lambda x, m, f=f: getattr(x, f)(-0.5, max=0.75)) for f in ("clamp", "clamp_", "clip", "clip_")),
    ),
    *cases(
        "hardtanh",
        function(torch.clamp, lambda x, m: torch.clamp(x, max=0.75)),
        method("clamp", lambda x, m: x.clamp(max=0.75)),
        *spelled(torch.clamp_max, "clamp_max", "clamp_max_", aten.clamp_max.default, args=(0.75,)),
        group="hardtanh_one_bound",
    ),
    *cases(
        "relu",
        *spelled(torch.clamp_min, "clamp_min", "clamp_min_", aten.clamp_min.default, args=(0.0,)),
        function(torch.clamp, lambda x, m: torch.clamp(x, min=0)),
        group="relu",
    ),
    *cases("relu6", module(nn.Hardtanh, 0, 6), *spelled("clamp", aten.hardtanh.default, args=(0, 6))),
    *unary(
        "hardswish",
        module(nn.Hardswish),
        functions=(F.hardswish, aten.hardswish.default, aten.hardswish_.default),
    ),
    *unary(
        "hardsigmoid",
        module(nn.Hardsigmoid),
        functions=(F.hardsigmoid, aten.hardsigmoid.default, aten.hardsigmoid_.default),
    ),
    *unary("silu", module(nn.SiLU), functions=(F.silu, aten.silu.default, aten.silu_.default)),
    *[
        case
        for layout in ("rows", "image")
        for case in cases(
            "gelu",
            module(nn.GELU),
            function(F.gelu),
            function(aten.gelu.default),
            layout=layout,
            group=f"gelu_{layout}",
        )
    ],
    *cases(
        "leaky_relu",
        module(nn.LeakyReLU, 0.2),
        *(
            function(f, lambda x, m, f=f: f(x, 0.2))
            for f in (F.leaky_relu, F.leaky_relu_, aten.leaky_relu.default, aten.leaky_relu_.default)
        ),
        layout="rows",
    ),
    *unary(
        "sigmoid",
        module(nn.Sigmoid),
        functions=(torch.sigmoid, torch.special.expit, aten.sigmoid.default, aten.sigmoid_.default),
        methods=("sigmoid", "sigmoid_"),
    ),
    *unary(
        "tanh",
        module(nn.Tanh),
        functions=(torch.tanh, aten.tanh.default, aten.tanh_.default),
        methods=("tanh", "tanh_"),
    ),
    *cases("leaky_relu", module(nn.RReLU, 0.1, 0.3), *spelled(F.rrelu, args=(0.1, 0.3)), layout="rows", group="rrelu"),
    *unary("mish", module(nn.Mish), functions=(F.mish, aten.mish.default, aten.mish_.default)),
    *unary("softplus", module(nn.Softplus), functions=(F.softplus, aten.softplus.default)),
    *unary("elu", module(nn.ELU), functions=(F.elu, F.elu_, aten.elu.default)),
    *unary("celu", module(nn.CELU), functions=(F.celu, torch.celu, F.celu_, aten.celu.default)),
    *unary("selu", module(nn.SELU), functions=(F.selu, torch.selu, F.selu_, aten.selu.default)),
    *unary("log_sigmoid", module(nn.LogSigmoid), functions=(F.logsigmoid, aten.log_sigmoid.default)),
    *unary("softsign", module(nn.Softsign), functions=(F.softsign,)),
    *unary("tanhshrink", module(nn.Tanhshrink), functions=(F.tanhshrink,)),
    *cases(
        "hardshrink",
        module(nn.Hardshrink, 0.02),
        *spelled(F.hardshrink, "hardshrink", aten.hardshrink.default, args=(0.02,)),
    ),
    *unary("softshrink", module(nn.Softshrink), functions=(F.softshrink, aten.softshrink.default)),
    *cases(
        "threshold",
        module(nn.Threshold, 0.1, 0.5),
        *spelled(F.threshold, torch.threshold_, aten.threshold.default, args=(0.1, 0.5)),
    ),
    *unary("neg", functions=(torch.neg, torch.negative, operator.neg, aten.neg.default), methods=("neg", "neg_")),
    *unary("abs", functions=(torch.abs, torch.absolute, aten.abs.default), methods=("abs", "abs_")),
]

FLOATS = [
    *(
        case
        for f in ("int", "long", "bool")
        for case in cases("cast", function(f, lambda x, m, f=f: x + 0.01 * getattr(4 * x, f)().float()), group=f)
    ),
    *cases(
        "softmax", module(nn.Softmax, 1), *spelled(F.softmax, torch.softmax, "softmax", aten.softmax.int, args=(1,))
    ),
    *cases("softmax", *spelled(aten._softmax.default, args=(1, False))),
    *cases(
        "log_softmax",
        module(nn.LogSoftmax, 1),
        *spelled(F.log_softmax, torch.log_softmax, "log_softmax", aten.log_softmax.int, args=(1,)),
    ),
    *cases("log_softmax", *spelled(aten._log_softmax.default, args=(1, False))),
    *cases("softmin", module(nn.Softmin, 1), *spelled(F.softmin, args=(1,))),
    *cases("pow", *spelled(torch.pow, operator.pow, "pow", aten.pow.Tensor_Scalar, args=(2,))),
    *unary("pow", functions=(torch.square,), methods=("square",)),
    *unary("exp", functions=(torch.exp, aten.exp.default), methods=("exp",)),
    *unary("erf", functions=(torch.erf, torch.special.erf, aten.erf.default), methods=("erf",)),
    *unary("sin", functions=(torch.sin, aten.sin.default), methods=("sin",)),
    *unary("cos", functions=(torch.cos, aten.cos.default), methods=("cos",)),
    *(
        case
        for name in ("log", "sqrt", "rsqrt")
        for f in (getattr(torch, name), getattr(aten, name).default, name)
        for case in cases(
            name,
            function(f, lambda x, m, f=f: getattr(x * x + 1, f)() if isinstance(f, str) else f(x * x + 1)),
        )
    ),
    *cases("cumsum", *spelled(torch.cumsum, "cumsum", aten.cumsum.default, args=(1,))),
    *cases("normalize", *spelled(F.normalize, args=(2.0, 1))),
    *cases(
        "cosine_similarity",
        module(nn.CosineSimilarity, 1),
        *spelled(F.cosine_similarity, args=(1,)),
        layout="images",
    ),
    *cases(
        "where",
        *(function(f, lambda x, y, m, f=f: f(x > 0, x, y)) for f in (torch.where, aten.where.self)),
        method("where", lambda x, y, m: x.where(x > 0, y)),
        layout="images",
    ),
    *cases(
        "masked_fill",
        *(
            function(f, lambda x, m, f=f: getattr(x, f)(x > 0, 0.5) if isinstance(f, str) else f(x, x > 0, 0.5))
            for f in (torch.masked_fill, "masked_fill", "masked_fill_", aten.masked_fill.Scalar)
        ),
    ),
    *cases(
        "masked_fill",
        function(
            aten.masked_fill.Tensor,
            lambda x, m: aten.masked_fill.Tensor(x, x > 0, m.value),
            value=lambda: torch.tensor(0.5),
        ),
        group="masked_fill_tensor",
    ),
    *cases("einsum", function(torch.einsum, lambda x, y, m: torch.einsum("nchw,nkhw->nck", x, y)), layout="images"),
]
