"""Cases of tests/ops/test_rows.py: pooling and reductions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.opcases import Case, aten, cases, function, method, module, spelled


def extrema(name: str) -> list[Case]:
    function_, overload, plain = getattr(torch, name), getattr(aten, name).dim, getattr(aten, f"a{name}").default
    return cases(
        f"a{name}",
        *spelled(getattr(torch, f"a{name}"), f"a{name}", plain, args=(1,)),
        function(function_, lambda x, m: function_(x, 1)[0]),
        function(function_, lambda x, m: function_(x, dim=1).values),
        method(name, lambda x, m: getattr(x, name)(1).values),
        function(overload, lambda x, m: overload(x, 1)[0]),
    )


POOLING = [
    *cases(
        "max_pool1d",
        module(nn.MaxPool1d, 3, 2, 1),
        *(function(f, lambda x, m, f=f: f(x, 3, 2, 1)) for f in (F.max_pool1d, torch.max_pool1d)),
        function(aten.max_pool1d.default, lambda x, m: aten.max_pool1d.default(x, [3], [2], [1])),
        layout="sequence",
    ),
    *cases(
        "max_pool2d",
        module(nn.MaxPool2d, 2),
        *(function(f, lambda x, m, f=f: f(x, 2)) for f in (F.max_pool2d, torch.max_pool2d)),
        function(F.max_pool2d, lambda x, m: F.max_pool2d(x, (2, 2), stride=2)),
        function(aten.max_pool2d.default, lambda x, m: aten.max_pool2d.default(x, [2, 2])),
        function(aten.max_pool2d_with_indices.default, lambda x, m: aten.max_pool2d_with_indices.default(x, [2, 2])[0]),
    ),
    *cases(
        "max_pool3d",
        module(nn.MaxPool3d, 2),
        *spelled(F.max_pool3d, torch.max_pool3d, aten.max_pool3d.default, args=(2,)),
        function(
            aten.max_pool3d_with_indices.default, lambda x, m: aten.max_pool3d_with_indices.default(x, [2, 2, 2])[0]
        ),
        layout="volume",
    ),
    *cases(
        "avg_pool3d",
        module(nn.AvgPool3d, 2),
        *spelled(F.avg_pool3d, aten.avg_pool3d.default, args=(2,)),
        layout="volume",
    ),
    *[
        case
        for n, layout in ((1, "sequence"), (3, "volume"))
        for case in (
            *cases(
                f"adaptive_avg_pool{n}d",
                module(getattr(nn, f"AdaptiveAvgPool{n}d"), 2),
                *spelled(getattr(F, f"adaptive_avg_pool{n}d"), args=(2,)),
                *spelled(getattr(aten, f"adaptive_avg_pool{n}d").default, args=([2] * n,)),
                *spelled(*([aten._adaptive_avg_pool3d.default] if n == 3 else []), args=([2] * n,)),
                layout=layout,
            ),
            *cases(
                f"adaptive_max_pool{n}d",
                module(getattr(nn, f"AdaptiveMaxPool{n}d"), 2),
                *spelled(getattr(F, f"adaptive_max_pool{n}d"), args=(2,)),
                function(
                    getattr(aten, f"adaptive_max_pool{n}d").default,
                    lambda x, m, n=n: getattr(aten, f"adaptive_max_pool{n}d").default(x, [2] * n)[0],
                ),
                layout=layout,
            ),
        )
    ],
    *cases(
        "avg_pool1d",
        module(nn.AvgPool1d, 2),
        function(F.avg_pool1d, lambda x, m: F.avg_pool1d(x, 2)),
        function(aten.avg_pool1d.default, lambda x, m: aten.avg_pool1d.default(x, [2])),
        layout="sequence",
    ),
    *cases(
        "avg_pool2d",
        module(nn.AvgPool2d, 3, 2, 1),
        function(F.avg_pool2d, lambda x, m: F.avg_pool2d(x, 3, 2, 1)),
        function(aten.avg_pool2d.default, lambda x, m: aten.avg_pool2d.default(x, [3, 3], [2, 2], [1, 1])),
    ),
    *cases(
        "adaptive_avg_pool2d",
        module(nn.AdaptiveAvgPool2d, 1),
        function(F.adaptive_avg_pool2d, lambda x, m: F.adaptive_avg_pool2d(x, 1)),
        *spelled(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default, args=([1, 1],)),
    ),
    *cases(
        "adaptive_avg_pool2d",
        module(nn.AdaptiveAvgPool2d, (3, 2)),
        function(F.adaptive_avg_pool2d, lambda x, m: F.adaptive_avg_pool2d(x, (3, 2))),
        group="adaptive_avg_pool2d_windows",
    ),
    *cases(
        "adaptive_max_pool2d",
        module(nn.AdaptiveMaxPool2d, 2),
        function(F.adaptive_max_pool2d, lambda x, m: F.adaptive_max_pool2d(x, 2)),
        function(aten.adaptive_max_pool2d.default, lambda x, m: aten.adaptive_max_pool2d.default(x, [2, 2])[0]),
    ),
    *cases(
        "mean",
        function(torch.mean, lambda x, m: torch.mean(x, (2, 3))),
        method("mean", lambda x, m: x.mean((2, 3))),
        method("mean", lambda x, m: x.mean(dim=[2, 3])),
        function(aten.mean.dim, lambda x, m: aten.mean.dim(x, [2, 3])),
    ),
    *cases("sum", *spelled(torch.sum, "sum", aten.sum.dim_IntList, args=([2, 3],))),
    *extrema("max"),
    *extrema("min"),
]
