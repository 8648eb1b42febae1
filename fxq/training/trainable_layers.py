"""Layers of a graph for training: with the model's weights as parameters, and with batch norms that are not folded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxq.common.train_mode import fixed_statistics
from fxq.errors import PassError
from fxq.graph.grid import grid_of
from fxq.graph.info import ChosenGrids, Edge, info, weight_key
from fxq.graph.place import where
from fxq.graph.query import argument, is_op, op_of, options_of, read_attribute, tensor_meta
from fxq.patterns.fusions.norm import norm_scale, scaled_channels
from fxq.pipeline.context import Context
from fxq.pipeline.derived_weights import ComputedConstant, FoldedNorm, ParameterRows
from fxq.quant.fake_quantize import FakeQuantizeWeight
from fxq.quant.observers import observer_for
from fxq.quant.qparams import QParams, scale_dtype
from fxq.rewriting.computed import TrainableConstant
from fxq.rewriting.editor import DATA
from fxq.rewriting.rewriter import Rewriter

FOLDER = "fxq_quantizers"


class TrainableLayers:
    """Editor that makes the layers of one graph trainable.

    Attributes:
        own: parameters and buffers of the model by path, and constants computed from them.
        frozen: paths of weights of layers that stay constant.
        fixed_norms: module paths of batch norms whose statistics stay constant.
    """

    def __init__(self, rewriter: Rewriter[Context], grids: ChosenGrids) -> None:
        context = rewriter.context
        if context.original is None:
            raise PassError(f"{rewriter.name} needs canonicalize before it.")
        self.rewriter, self.gm, self.grids, self.original = rewriter, rewriter.gm, grids, context.original
        model = context.model
        self.own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.own |= dict(model.named_buffers(remove_duplicate=False))
        for path, computed in context.computed.items():
            if all(read in self.own for read in computed.paths):
                self.own[path] = computed.value(self.own)
        self._computed_nodes: dict[str, fx.Node] = {}
        self.frozen: dict[str, None] = {}
        self.fixed_norms: dict[str, None] = {}
        norms = ((path, m) for path, m in model.named_modules() if isinstance(m, _BatchNorm))
        self._norms = {(id(m.running_mean), id(m.running_var)): path for path, m in norms if m.running_mean is not None}
        fixed = map(model.get_submodule, fixed_statistics(model, context.example))
        self._fixed = {id(norm.running_mean) for norm in fixed}
        self._norm_nodes: dict[FoldedNorm, fx.Node] = {}
        self._quantizers: dict[tuple[str, int], str] = {}

    def free(self, node: fx.Node) -> None:
        """Let an op read the model's weights, fake quantized if they were integers."""
        op = op_of(node)
        if op is None or is_op(node, "quantize", "dequantize"):
            return
        fold = self._folded(node)
        if fold is not None:
            self._unfold(node, fold)
            return
        for read in node.all_input_nodes:
            path = _float_path(read)
            live = self._live(path, node) if path else None
            if live is not None:
                weight = live if read.op == "get_attr" else self._rounded(read, live, node)
                padding = self._padding_of(node)
                if padding is not None:
                    weight = self._call(without_gradient_of, (weight, padding), node)
                node.replace_input_with(read, weight)
                self.rewriter.touched.add(node)
            elif path and op.traits.weight is not None:
                self.frozen[path] = None

    def _padding_of(self, node: fx.Node) -> int | None:
        """Row of an embedding's table that is not trained, or None."""
        path = info(node).path
        module = self.rewriter.context.model.get_submodule(path) if path and is_op(node, "embedding") else None
        return module.padding_idx if isinstance(module, nn.Embedding) else None

    def _live(self, path: str, before: fx.Node) -> fx.Node | None:
        """Node of the model's tensor at a path, or of its rows that the constant is; None for other constants."""
        if path in self.own:
            return self._read(path, before)
        rows = ParameterRows.of(path, read_attribute(self.gm, path), self.own)
        if rows is None:
            return None
        if rows not in self.rewriter.context.derived:
            self.rewriter.context.derived.append(rows)
        whole, range_of_rows = self._read(rows.whole, before), slice(rows.start, rows.start + rows.length)
        return self.rewriter.call("getitem", whole, before=before, index=(range_of_rows,))

    def call_norm(self, node: fx.Node) -> None:
        """Replace a batch norm op by a call of its module, if the model updates its statistics in train mode."""
        reads = {name: argument(node, name) for name in ("running_mean", "running_var", "weight", "bias")}
        own = {name: self.own.get(str(r.target)) for name, r in reads.items() if isinstance(r, fx.Node)}
        statistics = id(own.pop("running_mean", None)), id(own.pop("running_var", None))
        if statistics[0] in self._fixed:
            return
        path = self._norms.get(statistics)
        if path is None or not all(isinstance(tensor, nn.Parameter) for tensor in own.values()):
            self.fixed_norms[info(node).path or node.name] = None
            return
        norm = self.rewriter.context.model.get_submodule(path)
        attach(self.gm, path, plain_norm(norm, own, len(info(node).shape or ()), options_of(node)["eps"]))
        name, typed = node.name, (info(node).shape, info(node).dtype)
        call = self.rewriter.node("call_module", path, (node.args[0],), like=node, typed=typed)
        self.rewriter.replace(node, call)
        self.rewriter.rename(call, name)

    def _folded(self, node: fx.Node) -> FoldedNorm | None:
        """Folded batch norm of a layer, with the tensors of the model; None if the layer has none."""
        op, by_origin, nodes = op_of(node), self.original.by_origin, self.original.nodes
        if op is None or op.traits.weight is None or op.traits.bias is None:
            return None
        parts = [nodes[by_origin[origin]] for origin in info(node).origins if by_origin.get(origin) in nodes]
        layer = next((part for part in parts if is_op(part, op.name)), None)
        norm = next((part for part in parts if is_op(part, "batch_norm") and part.args[0] is layer), None)
        read, bias = argument(node, op.traits.weight), argument(node, op.traits.bias)
        if layer is None or norm is None or not isinstance(read, fx.Node) or not isinstance(bias, fx.Node):
            return None
        own: dict[str, Any] = {
            "own_weight": argument(layer, op.traits.weight),
            "own_bias": argument(layer, op.traits.bias),
            "mean": argument(norm, "running_mean"),
            "var": argument(norm, "running_var"),
            "gamma": argument(norm, "weight"),
            "beta": argument(norm, "bias"),
        }
        paths = {name: str(value.target) for name, value in own.items() if value is not None}
        folded_paths = {"weight": _float_path(read), "bias": str(bias.target)}
        if self.own.keys() & folded_paths.values() or not self.own.keys() >= set(paths.values()):
            return None
        axis, groups, commutes = op.traits.axis or 0, options_of(layer).get("groups", 1), True
        if read.op != "get_attr":
            edge = self._edge_of(read)[1]
            grouped = axis and groups > 1  # then channels of several groups have one scale
            commutes = edge.axis == axis and edge.spec.symmetric and edge.spec.block is None and not grouped
        fields: dict[str, Any] = {**dict.fromkeys(own), **paths, **folded_paths, "eps": options_of(norm)["eps"]}
        fold = FoldedNorm(**fields, axis=axis, groups=groups, commutes=commutes)
        folded = fold.made(self.own)
        same = all(torch.allclose(tensor, read_attribute(self.gm, path), 1e-4, 1e-6) for path, tensor in folded.items())
        self._norm_nodes[fold] = norm
        return fold if same else None

    def _unfold(self, node: fx.Node, fold: FoldedNorm) -> None:
        """Remove a folded batch norm from a layer, and insert it after the layer."""
        op, users, norm = op_of(node), list(node.users), self._norm_nodes[fold]
        assert op is not None and op.traits.weight is not None and op.traits.bias is not None  # `_folded` checks it
        paths = (fold.own_weight, fold.own_bias, fold.mean, fold.var, fold.gamma, fold.beta)
        own: list[Any] = [self._read(path, node) if path is not None else None for path in paths]
        weight, bias, *statistics = own
        read, typed, last, divisor = argument(node, op.traits.weight), (info(node).shape, info(node).dtype), node, None
        if not fold.commutes:  # several channels have one scale, which depends on the norm's factor of each
            divisor = self._call(norm_divisor, (statistics[1], statistics[2], fold.eps), node)
            weight = self._call(scaled_channels, (weight, divisor, fold.axis, fold.groups), node)
        if read.op != "get_attr":
            weight = self._rounded(read, weight, node, self.own[fold.own_weight] if fold.commutes else None)
        args = [*node.args, *[None] * (len(op.tensors) - len(node.args))]
        args[op.tensors.index(op.traits.weight)] = weight
        args[op.tensors.index(op.traits.bias)] = bias if divisor is None else None
        self.rewriter.update(node, args=tuple(args))
        if divisor is not None:
            inputs = (node, divisor, op.traits.channels, bias)
            last = self.rewriter.node("call_function", divided_channels, inputs, like=node, after=node, typed=typed)
        unfolded = self.rewriter.call("batch_norm", last, *statistics, like=node, after=last, typed=typed, eps=fold.eps)
        if norm.name not in self.rewriter.names:
            self.rewriter.rename(unfolded, norm.name)
        self.rewriter.describe(unfolded, path=info(norm).path, source=info(norm).source)
        self.rewriter.reroute(node, unfolded, only=lambda user: user in users)
        self.rewriter.context.derived.append(fold)

    def _rounded(self, read: fx.Node, weight: fx.Node, before: fx.Node, own: Tensor | None = None) -> fx.Node:
        """Insert the fake quantizer of a weight.

        Args:
            read: dequantize of the integer weight, whose spec the fake quantizer has.
            weight: node of the float weight.
            before: op that reads the weight.
            own: values from which the grid is computed; None: the grid of `read`.
        """
        path, rewriter = info(read).stands_for, self.rewriter
        at, edge = self._edge_of(read)
        if (path, at) not in self._quantizers:
            grid, name = edge.qparams, f"the weight {path}"
            assert isinstance(grid, QParams)  # weights have no dynamic range
            if own is not None:
                observer = observer_for(edge.spec, edge.axis, name)
                observer(own)
                grid = observer.on(replace(edge.spec, bits=grid.bits)).qparams()
            quantizer = FakeQuantizeWeight(edge.spec, grid, name, (path, at))
            label = path.removeprefix(f"{DATA}.").replace(".", "_").removesuffix("_folded")
            self._quantizers[path, at] = rewriter.module(quantizer, label, FOLDER)
        target, typed = self._quantizers[path, at], (info(weight).shape, torch.float32)
        name = f"{target.removeprefix(f'{FOLDER}.')}_fq"
        rounded = rewriter.node("call_module", target, (weight,), before=before, name=name, typed=typed)
        rewriter.describe(rounded, path=info(before).path, source=info(before).source)
        return rounded

    def _edge_of(self, read: fx.Node) -> tuple[int, Edge]:
        """Edge of a weight that has the grid of an integer form, and its position among the edges of the weight."""
        edges = self.grids.get(weight_key(info(read).stands_for), (None, ()))[1]
        grid = grid_of(self.gm, read)
        for at, edge in enumerate(edges):
            if isinstance(edge.qparams, QParams) and any(chosen.same_as(grid) for chosen in _as_stored(edge.qparams)):
                return at, edge
        raise PassError(f"{where(self.gm, read)}: choose-grids has chosen no grid for this weight.")

    def _read(self, path: str, before: fx.Node) -> fx.Node:
        """Node of a tensor of the model, or of its computation from other tensors."""
        computed = self.rewriter.context.computed.get(path)
        if computed is not None:
            if path not in self._computed_nodes:
                self._computed_nodes[path] = self._computed(path, computed, before)
            return self._computed_nodes[path]
        attach(self.gm, path, self.own[path])
        return self.rewriter.read(path, self.own[path], before=before, like=before)

    def _computed(self, path: str, computed: TrainableConstant, before: fx.Node) -> fx.Node:
        reads = tuple(self._read(read, before) for read in computed.paths)
        name = path.removeprefix(f"{DATA}.").replace(".", "_")
        target, typed = self.rewriter.module(copy.deepcopy(computed), name, FOLDER), tensor_meta(self.own[path])
        self.rewriter.context.derived.append(ComputedConstant(path, computed))
        return self.rewriter.node("call_module", target, reads, like=before, before=before, name=name, typed=typed)

    def _call(self, function: Any, args: tuple[Any, ...], before: fx.Node) -> fx.Node:
        return self.rewriter.node("call_function", function, args, like=before, before=before, name=function.__name__)


def _as_stored(grid: QParams) -> Iterator[QParams]:
    """The chosen grid of a weight; for blocks also with its scales in float16, as insert-qdq stores them."""
    yield grid
    if grid.block is not None:
        yield replace(grid, scale=grid.scale.to(scale_dtype(grid.scale)).float())


def _float_path(read: fx.Node) -> str:
    """Path of the float weight that an argument is, or was before quantization; empty for an activation."""
    if read.op == "get_attr":
        return str(read.target)
    source = read.args[0] if is_op(read, "dequantize") else None
    return info(read).stands_for if isinstance(source, fx.Node) and source.op == "get_attr" else ""


def without_gradient_of(weight: Tensor, row: int) -> Tensor:
    """Return a weight, (R, C), with no gradient for one row."""
    rows = torch.arange(len(weight), device=weight.device)[:, None]
    return torch.where(rows == row, weight.detach(), weight)


def norm_divisor(var: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Factor of a batch norm for each channel, (C,), without gradient, and at least 1e-12 where it is about zero."""
    scale = norm_scale(var, gamma, eps).to(var.dtype)
    return torch.where(scale.abs() < 1e-12, torch.full_like(scale, 1e-12), scale)


def divided_channels(y: Tensor, divisor: Tensor, channels: int, bias: Tensor | None) -> Tensor:
    """Divide each channel of a layer's output, then add the layer's bias.

    Args:
        y: output without bias, any shape.
        divisor: divisor of each channel, (C,).
        channels: axis of the channels, counted from the end.
        bias: bias, (C,), or None.
    """
    shape = [-1] + [1] * (-channels - 1)
    y = y / divisor.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def plain_norm(norm: nn.Module, affine: Mapping[str, Any], dims: int, eps: float) -> _BatchNorm:
    """Batch norm of PyTorch that shares the statistics of a subclass, such as timm's, which also has an activation.

    Args:
        norm: module of the model.
        affine: "weight" and "bias", (C,), if it has them.
        dims: number of dimensions of its input.
        eps: added to the variance.
    """
    assert isinstance(norm, _BatchNorm)
    by_dims: dict[int, type[_BatchNorm]] = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    kind = nn.SyncBatchNorm if isinstance(norm, nn.SyncBatchNorm) else by_dims.get(dims, nn.BatchNorm1d)
    plain = kind(norm.num_features, eps, norm.momentum, affine=False)
    plain._parameters.update(affine)
    plain._buffers.update(norm._buffers)
    return plain.train(norm.training)


def attach(root: nn.Module, path: str, value: nn.Module | Tensor) -> None:
    """Set a tensor or a module at a path below `root`. Missing modules on the way are created.

    Attributes of a module that is replaced stay, unless the new one has them.
    """
    *folders, name = path.split(".")
    for folder in folders:
        if not isinstance(getattr(root, folder, None), nn.Module):
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    if isinstance(value, nn.Module):
        replaced = getattr(root, name, None)
        root.add_module(name, value)
        for table in ("_parameters", "_buffers", "_modules"):
            old: dict[str, Any] = getattr(replaced, table, {})
            vars(value)[table].update((key, item) for key, item in old.items() if key not in vars(value)[table])
    elif isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    elif name not in root._buffers:
        root.register_buffer(name, value)
