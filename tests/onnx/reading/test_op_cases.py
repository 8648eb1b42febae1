"""ONNX's own cases for each op, of the package onnx, against the reader."""

import functools
import importlib
import pkgutil
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fxq
from fxq.onnx.reading.onnx_file import constant_of
from fxq.onnx.reading.reader import OP_READERS

onnx = pytest.importorskip("onnx")

PARAMETERS = {
    "Reshape": [1], "Slice": [1, 2, 3, 4], "Pad": [1, 2, 3], "Expand": [1], "Tile": [1], "Unsqueeze": [1],
    "Squeeze": [1], "Split": [1], "TopK": [1], "ConstantOfShape": [0], "CumSum": [1], "Resize": [1, 2, 3],
    "OneHot": [1, 2], "Range": [0, 1, 2], "Clip": [1, 2], "Trilu": [1], "Dropout": [1, 2], "If": [0], "Loop": [0, 1],
    "NonMaxSuppression": [2, 3, 4], "Upsample": [1], "LSTM": [1, 2, 3, 4], "GRU": [1, 2, 3, 4], "RNN": [1, 2, 3, 4],
    **{f"Reduce{kind}": [1] for kind in ("Max", "Min", "Sum", "Mean", "Prod", "L1", "L2")},
    **{f"Reduce{kind}": [1] for kind in ("LogSum", "LogSumExp", "SumSquare")},
}  # fmt: skip
"""Inputs that files hold as constants: shapes, axes, weights; ONNX's cases give them at run time."""

REFUSED = (
    "affine_grid", "batchnorm_.*training", "blackman", "castlike?_.*INT4", "center_crop", "training_dropout",
    "gathernd_example_int32_batch_dim1", "hammingwindow", "hannwindow", "cast_.*INT4", "lstm_with_peepholes",
    "maxpool_with_argmax_2d_precomputed_strides", "not_[234]d", "quantizelinear_(u?int4|blocked)", "range_.*_expanded",
    "reshape_allowzero_reordered", "scan_sum", "tf_crop", "split_zero_size", "loop", "optional",
)  # fmt: skip
"""Cases that the reader refuses with an error that names the node; everything else has to be right."""


def _tensor(value):
    if isinstance(value, onnx.TensorProto):
        return constant_of(value)
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _readable(case):
    """Whether a case has ops of the reader only, and dtypes that PyTorch computes with."""
    graph = case.model.graph
    values = [*graph.input, *graph.output]
    if any(value.type.WhichOneof("value") != "tensor_type" for value in values):
        return False
    dtypes = {value.type.tensor_type.elem_type for value in values}
    half_attention = "attention" in case.name and dtypes & {10, 16}  # sums in another order than ONNX's
    readable = all(node.op_type in OP_READERS and node.domain in ("", "ai.onnx") for node in graph.node)
    return readable and not half_attention and dtypes <= {1, 2, 3, 5, 6, 7, 9, 10, 11, 16, 21, 22}


LATE = ("averagepool", "lppool", "maxpool")
"""Modules of cases that take longer than all others to compute their outputs."""


@functools.cache
def cases(without=()):
    """Cases by name, except for those of some modules."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's overflows while the cases are computed
        for module in pkgutil.iter_modules(node.__path__):
            if module.name not in without:
                importlib.import_module(f"{node.__name__}.{module.name}")
    return {case.name: case for case in list(node._NodeTestCases) if _readable(case)}


def _with_constants(case):
    """Model with the parameters of its nodes as constants, its other inputs, and its expected outputs."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    fixed = {node.input[i] for node in graph.node for i in PARAMETERS.get(node.op_type, ()) if i < len(node.input)}
    values, outputs = case.data_sets[0]
    kept, inputs = [], []
    for declared, value in zip(graph.input, values, strict=False):
        if declared.name in fixed:
            proto = value if isinstance(value, onnx.TensorProto) else onnx.numpy_helper.from_array(np.asarray(value))
            graph.initializer.add().CopyFrom(proto)
            graph.initializer[-1].name = declared.name
        else:
            kept.append(onnx.ValueInfoProto.FromString(declared.SerializeToString()))
            inputs.append(_tensor(value))
    del graph.input[:]
    graph.input.extend(kept)
    return model, inputs, [_tensor(output) for output in outputs]


def _check(case):
    model, inputs, expected = _with_constants(case)
    read = fxq.read_onnx(model)
    with torch.no_grad():
        results = read(*inputs)
    for result, right in zip(results if isinstance(results, tuple) else (results,), expected, strict=False):
        assert result.dtype == right.dtype
        assert result.shape == right.shape
        torch.testing.assert_close(result, right, rtol=max(case.rtol, 1e-3), atol=1e-5, equal_nan=True)


def _is_refused(name):
    return any(re.search(pattern, name) for pattern in REFUSED)


def _one_of_each():
    """First case of each op type with one node, except for the pools of `LATE`."""
    firsts = {}
    for name, case in cases(LATE).items():
        nodes = case.model.graph.node
        if len(nodes) == 1 and not _is_refused(name):
            firsts.setdefault(nodes[0].op_type, case)
    return firsts.values()


def test_one_case_of_each_op():
    firsts = _one_of_each()
    assert len(firsts) > 110
    for case in firsts:
        _check(case)


POOLS = {"MaxPool": F.max_pool2d, "AveragePool": F.avg_pool2d, "LpPool": lambda x, size: F.lp_pool2d(x, 2, size)}


@pytest.mark.parametrize("op", POOLS)
def test_pools(op):
    """ONNX's cases of them are only in the slow test."""
    node = onnx.helper.make_node(op, ["x"], ["y"], kernel_shape=[2, 3], strides=[2, 3])
    shapes = {"x": (1, 2, 6, 9), "y": (1, 2, 3, 3)}
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes[name]) for name in shapes]
    graph = onnx.helper.make_graph([node], "pool", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)])
    x = torch.randn(shapes["x"])
    torch.testing.assert_close(fxq.read_onnx(model)(x), POOLS[op](x, (2, 3)), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_all_cases():
    """Each case is right, or one of those that are refused; at least 95 % are right."""
    right, refused, wrong = 0, [], []
    for name, case in cases().items():
        try:
            _check(case)
            right += 1
        except fxq.FileError:
            refused.append(name)
        except Exception as error:
            wrong.append((name, str(error)[:200]))
    unexpected = [name for name in refused if not _is_refused(name)]
    empty = [name for name, _ in wrong if "empty_set" in name]  # PyTorch has no maximum of an empty axis
    assert len(wrong) == len(empty), wrong
    assert not unexpected
    assert right / (right + len(refused) + len(wrong)) > 0.95, (right, len(refused), len(wrong))
