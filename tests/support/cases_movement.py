"""Cases of tests/ops/test_rows.py: data movement."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.opcases import aten, cases, function, method, module, spelled

INDEX = {"running_index": lambda: torch.tensor([2, 0, 1])}
DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

MOVEMENT = [
    *cases(
        "flatten",
        module(nn.Flatten),
        function(torch.flatten, lambda x, m: torch.flatten(x, 1)),
        method("flatten", lambda x, m: x.flatten(start_dim=1)),
        *spelled(aten.flatten.using_ints, args=(1,)),
    ),
    *cases(
        "unflatten",
        module(nn.Unflatten, 1, (2, 2)),
        *spelled(torch.unflatten, "unflatten", aten.unflatten.int, args=(1, (2, 2))),
        layout="sequence",
    ),
    *cases(
        "reshape",
        function(torch.reshape, lambda x, m: torch.reshape(x, (4, 8, 4, 8))),
        method("reshape", lambda x, m: x.reshape(4, 8, 4, 8)),
        method("reshape", lambda x, m: x.reshape((4, 8, 4, 8))),
        method("view", lambda x, m: x.view(4, 8, 4, 8)),
        function(aten.reshape.default, lambda x, m: aten.reshape.default(x, [4, 8, 4, 8])),
        function(aten._unsafe_view.default, lambda x, m: aten._unsafe_view.default(x, [4, 8, 4, 8])),
        function(aten.view.default, lambda x, m: aten.view.default(x, [4, 8, 4, 8])),
    ),
    *cases(
        "permute",
        function(torch.permute, lambda x, m: torch.permute(x, (0, 3, 1, 2))),
        method("permute", lambda x, m: x.permute(0, 3, 1, 2)),
        method("permute", lambda x, m: x.permute((0, 3, 1, 2))),
        function(aten.permute.default, lambda x, m: aten.permute.default(x, [0, 3, 1, 2])),
        *spelled(torch.movedim, "movedim", torch.moveaxis, "moveaxis", args=(-1, 1)),
        function(aten.movedim.int, lambda x, m: aten.movedim.int(x, 3, 1)),
    ),
    *cases(
        "transpose",
        function(torch.transpose, lambda x, m: torch.transpose(x, 1, 2)),
        method("transpose", lambda x, m: x.transpose(1, 2)),
        *spelled(torch.swapaxes, torch.swapdims, "swapaxes", "swapdims", args=(1, 2)),
        function(aten.transpose.int, lambda x, m: aten.transpose.int(x, 1, 2)),
    ),
    *cases(
        "transpose",
        *spelled(torch.t, "t", aten.t.default),
        function(getattr, lambda x, m: x.T),
        layout="rows",
        group="transpose_matrix",
    ),
    *cases("transpose", function(getattr, lambda x, m: x.mT.contiguous()), group="transpose_last"),
    *cases(
        "squeeze",
        *(
            function(f, lambda x, m, f=f: getattr(x[:, :1], f)(1) if isinstance(f, str) else f(x[:, :1], 1))
            for f in (torch.squeeze, "squeeze", aten.squeeze.dim)
        ),
        function(aten.squeeze.dims, lambda x, m: aten.squeeze.dims(x[:, :1], [1])),
    ),
    *cases(
        "squeeze",
        *(function(f, lambda x, m, f=f: f(x[:, :1])) for f in (torch.squeeze, aten.squeeze.default)),
        group="squeeze_all",
    ),
    *cases("squeeze", function("squeeze_", lambda x, m: (x[:, :1] * 2).squeeze_(1)), group="squeeze_in_place"),
    *cases(
        "unsqueeze",
        *spelled(torch.unsqueeze, "unsqueeze", "unsqueeze_", aten.unsqueeze.default, args=(1,)),
        layout="sequence",
    ),
    *cases("unsqueeze", function(operator.getitem, lambda x, m: x[:, None]), layout="sequence"),
    *cases(
        "expand",
        *(
            function(
                f,
                lambda x, m, f=f: (
                    getattr(x[:, :1], f)((-1, 3, 8, 8)) if isinstance(f, str) else f(x[:, :1], (-1, 3, 8, 8))
                ),
            )
            for f in ("expand", aten.expand.default)
        ),
    ),
    *cases(
        "expand",
        *(
            function(
                f,
                lambda x, m, f=f: (
                    getattr(x[:, :1], f)((4, 3, 8, 8)) if isinstance(f, str) else f(x[:, :1], (4, 3, 8, 8))
                ),
            )
            for f in (torch.broadcast_to, "broadcast_to", "expand")
        ),
        group="broadcast_to",
    ),
    *cases("expand_as", method("expand_as", lambda x, m: x[:, :1].expand_as(x))),
    *cases("reshape_as", *(method(f, lambda x, m, f=f: getattr(x, f)(x.detach())) for f in ("reshape_as", "view_as"))),
    *cases("contiguous", *spelled("contiguous", aten.contiguous.default)),
    *cases(
        "contiguous",
        *spelled("to", "contiguous", torch.clone, "clone", aten.clone.default, memory_format=torch.channels_last),
        *spelled(aten._to_copy.default, memory_format=torch.channels_last),
        group="channels_last",
    ),
    *cases(
        "identity",
        *spelled("to", "type", aten.to.dtype, args=(torch.float32,)),
        *spelled("float", "clone", torch.clone, torch.detach, "detach", "detach_", "requires_grad_"),
        *spelled(aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten._to_copy.default),
        function("type_as", lambda x, m: x.type_as(x)),
        function(getattr, lambda x, m: x.data),
    ),
    *cases(
        "pixel_shuffle",
        module(nn.PixelShuffle, 2),
        function(F.pixel_shuffle, lambda x, m: F.pixel_shuffle(x, 2)),
        function(aten.pixel_shuffle.default, lambda x, m: aten.pixel_shuffle.default(x, 2)),
    ),
    *cases(
        "pixel_unshuffle",
        module(nn.PixelUnshuffle, 2),
        *spelled(F.pixel_unshuffle, aten.pixel_unshuffle.default, args=(2,)),
    ),
    *cases(
        "channel_shuffle",
        module(nn.ChannelShuffle, 2),
        *spelled(F.channel_shuffle, aten.channel_shuffle.default, args=(2,)),
    ),
    *cases(
        "unfold",
        module(nn.Unfold, 3, padding=1, stride=2),
        function(F.unfold, lambda x, m: F.unfold(x, 3, 1, 1, 2)),
        function(aten.im2col.default, lambda x, m: aten.im2col.default(x, [3, 3], [1, 1], [1, 1], [2, 2])),
    ),
    *cases(
        "fold",
        module(nn.Fold, (8, 8), 2, stride=2),
        function(F.fold, lambda x, m: F.fold(x, (8, 8), 2, stride=2)),
        function(aten.col2im.default, lambda x, m: aten.col2im.default(x, [8, 8], [2, 2], [1, 1], [0, 0], [2, 2])),
        layout="sequence",
        precision="float",
    ),
    *cases(
        "pad",
        module(nn.ZeroPad2d, (1, 2, 0, 1)),
        function(F.pad, lambda x, m: F.pad(x, (1, 2, 0, 1))),
        function(F.pad, lambda x, m: F.pad(x, [1, 2, 0, 1], value=None)),
        function(aten.constant_pad_nd.default, lambda x, m: aten.constant_pad_nd.default(x, [1, 2, 0, 1])),
        function(aten.pad.default, lambda x, m: aten.pad.default(x, [1, 2, 0, 1])),
    ),
    *cases(
        "pad",
        module(nn.ConstantPad2d, 1, 0.5),
        function(F.pad, lambda x, m: F.pad(x, (1, 1, 1, 1), value=0.5)),
        group="pad_value",
    ),
    *[
        case
        for n, layout in ((1, "sequence"), (2, "image"), (3, "volume"))
        for kind, mode, overload in (
            (getattr(nn, f"ReflectionPad{n}d"), "reflect", getattr(aten, f"reflection_pad{n}d").default),
            (getattr(nn, f"ReplicationPad{n}d"), "replicate", getattr(aten, f"replication_pad{n}d").default),
            (getattr(nn, f"CircularPad{n}d"), "circular", None),
        )
        for case in cases(
            "pad",
            module(kind, (1, 2, 2, 1, 0, 1)[: 2 * n]),
            function(F.pad, lambda x, m, mode=mode, n=n: F.pad(x, (1, 2, 2, 1, 0, 1)[: 2 * n], mode=mode)),
            *(spelled(overload, args=((1, 2, 2, 1, 0, 1)[: 2 * n],)) if overload is not None else ()),
            layout=layout,
            group=f"pad_{mode}_{n}d",
        )
    ],
    *[
        case
        for n, layout in ((1, "sequence"), (3, "volume"))
        for case in cases(
            "pad",
            module(getattr(nn, f"ZeroPad{n}d"), 1),
            module(getattr(nn, f"ConstantPad{n}d"), 1, 0.0),
            function(F.pad, lambda x, m, n=n: F.pad(x, (1, 1) * n)),
            layout=layout,
            group=f"pad_{n}d",
        )
    ],
    *cases(
        "interpolate",
        *(function(f, lambda x, m, f=f: f(x, [16, 16])) for f in (F.interpolate, aten.upsample_nearest2d.default)),
        function(aten.upsample_nearest2d.vec, lambda x, m: aten.upsample_nearest2d.vec(x, [16, 16], None)),
        group="interpolate_size",
    ),
    *[
        case
        for n, layout, overloads in (
            (1, "sequence", aten.upsample_nearest1d),
            (3, "volume", aten.upsample_nearest3d),
        )
        for case in (
            *cases(
                "interpolate",
                function(F.interpolate, lambda x, m: F.interpolate(x, scale_factor=2)),
                function(overloads.vec, lambda x, m, f=overloads.vec, n=n: f(x, None, [2.0] * n)),
                layout=layout,
                group=f"interpolate_{n}d",
            ),
            *cases(
                "interpolate",
                function(overloads.default, lambda x, m, f=overloads.default, n=n: f(x, [12] * n)),
                function(F.interpolate, lambda x, m: F.interpolate(x, 12)),
                layout=layout,
                group=f"interpolate_size_{n}d",
            ),
        )
    ],
    *cases(
        "interpolate",
        module(nn.UpsamplingBilinear2d, scale_factor=2),
        function(F.interpolate, lambda x, m: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)),
        function(aten.upsample_bilinear2d.vec, lambda x, m: aten.upsample_bilinear2d.vec(x, None, True, [2.0, 2.0])),
        group="interpolate_bilinear",
        precision="float",
    ),
    *cases(
        "grid_sample",
        function(F.grid_sample, lambda x, m: F.grid_sample(x, x[:, :2].movedim(1, -1), align_corners=False)),
    ),
    *cases(
        "interpolate",
        function(F.interpolate, lambda x, m: F.interpolate(x, scale_factor=2)),
        module(nn.Upsample, scale_factor=2),
        module(nn.UpsamplingNearest2d, scale_factor=2),
    ),
    *cases("dropout", *(module(t) for t in DROPOUTS)),
    *cases(
        "dropout",
        *(function(f, lambda x, m, f=f: f(x, 0.3, False)) for f in (F.dropout, F.dropout2d)),
        *spelled(torch.dropout, aten.dropout.default, F.alpha_dropout, F.feature_alpha_dropout, args=(0.3, False)),
        function(F.dropout3d, lambda x, m: F.dropout3d(x, training=False)),
    ),
    *cases(
        "dropout",
        module(nn.Dropout1d),
        function(F.dropout1d, lambda x, m: F.dropout1d(x, training=m.training)),
        layout="sequence",
        group="dropout1d",
    ),
    *cases("identity", module(nn.Identity)),
]


def pick(f: Any, *args: Any, index: Any = 1) -> tuple[Any, Any]:
    """Spelling that returns several values, of which one is used."""

    def body(x: Any, m: Any) -> Any:
        return (getattr(x, f)(*args) if isinstance(f, str) else f(x, *args))[index]

    return function(f, body)


SELECTION = [
    *cases(
        "getitem",
        function(operator.getitem, lambda x, m: x[:, 1:3]),
        function(operator.getitem, lambda x, m: x[:, 1:3, ...]),
        function(operator.getitem, lambda x, m: x[..., 1:3, :, :]),
        function(operator.getitem, lambda x, m: x[:, 1:3, :, :]),
        *spelled(torch.narrow, "narrow", aten.narrow.default, args=(1, 1, 2)),
        *spelled("narrow", args=(-3, -3, 2)),
        *spelled(aten.slice.Tensor, args=(1, 1, 3)),
    ),
    *cases(
        "getitem",
        function(operator.getitem, lambda x, m: x[:, 1:, 2:]),
        function(aten.slice.Tensor, lambda x, m: aten.slice.Tensor(aten.slice.Tensor(x, 1, 1, 2**63 - 1), 2, 2)),
        group="getitem_two_axes",
    ),
    *cases(
        "getitem",
        *spelled(torch.select, "select", aten.select.int, args=(1, 2)),
        *(pick(f, 1, index=2) for f in (torch.unbind, "unbind", aten.unbind.int)),
        function(operator.getitem, lambda x, m: x[:, 2]),
        group="getitem_number",
    ),
    *cases("getitem", function(operator.getitem, lambda x, m: x[:, None, ::2, -1]), group="getitem_mixed"),
    *cases("chunk", *(pick(f, 2, 1) for f in (torch.chunk, "chunk", aten.chunk.default))),
    *cases("split", *(pick(f, 2, 1) for f in (torch.split, "split", aten.split.Tensor))),
    *cases(
        "split",
        *(
            pick(f, [1, 3], 1)
            for f in (torch.split, "split", torch.split_with_sizes, "split_with_sizes", aten.split_with_sizes.default)
        ),
        group="split_sizes",
    ),
    *cases("tensor_split", *(pick(f, 3, 1) for f in (torch.tensor_split, "tensor_split"))),
    *cases(
        "index_select",
        *(
            function(
                f,
                lambda x, m, f=f: getattr(x, f)(1, m.running_index) if isinstance(f, str) else f(x, 1, m.running_index),
                **INDEX,
            )
            for f in (torch.index_select, "index_select", aten.index_select.default)
        ),
    ),
    *cases(
        "stack",
        *(function(f, lambda x, y, m, f=f: f([x, y], 1)) for f in (torch.stack, aten.stack.default)),
        layout="sequences",
    ),
    *cases(
        "flip",
        *spelled(torch.flip, "flip", aten.flip.default, args=([2, 3],)),
        method("flip", lambda x, m: x.flip(2, 3)),
    ),
    *cases("roll", *spelled(torch.roll, "roll", aten.roll.default, args=([1, 2], [2, 3]))),
    *cases("roll", *spelled(torch.roll, "roll", args=(1, 2)), group="roll_one"),
    *cases(
        "repeat",
        *spelled("repeat", "tile", torch.tile, aten.repeat.default, aten.tile.default, args=((1, 1, 2, 1),)),
        function("tile", lambda x, m: x.tile(2, 1)),
        function("repeat", lambda x, m: x.repeat(1, 1, 2, 1)),
    ),
    *cases(
        "repeat_interleave",
        *spelled(torch.repeat_interleave, "repeat_interleave", aten.repeat_interleave.self_int, args=(2, 1)),
    ),
]
