"""Graphs that call functions of other libraries, as files."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import fxq
from fxq.graph.text.text_names import function_of, name_of
from tests.support.helpers import REFERENCE


def _filter_input(boxes, count):
    return boxes[:count].clone()


torch.fx.wrap("_filter_input")


def _setup_scales(features, size):
    return [1.0], len


def _multiscale_roi_align(features, boxes, size, ratio, scales, mapper):
    return features[0] * mapper(boxes)


@pytest.fixture
def library(monkeypatch):
    """Stand-in for torchvision: its op `nms`, which keeps each second box here, and a function of its poolers."""
    op = torch.library.Library("torchvision", "FRAGMENT")
    op.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    op.impl("nms", lambda boxes, scores, _: scores.argsort()[::2].clone(), "CPU")
    poolers = ModuleType("torchvision.ops.poolers")
    for function in (_filter_input, _setup_scales, _multiscale_roi_align):
        setattr(poolers, function.__name__, function)
        monkeypatch.setattr(function, "__module__", poolers.__name__)
    monkeypatch.setitem(sys.modules, poolers.__name__, poolers)
    yield op
    op._destroy()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        boxes = self.boxes(x)
        return _filter_input(boxes[torch.ops.torchvision.nms(boxes, self.scores(x)[:, 0], 0.5)], 2)


def test_functions_of_torchvision_are_in_files(library, tmp_path, monkeypatch):
    model, x = Detector().eval(), torch.randn(6, 8)
    qmodel = fxq.quantize(model, REFERENCE, data=[x])
    path = qmodel.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(path)(x), qmodel(x)) and qmodel(x).shape == (2, 4)
    monkeypatch.delitem(sys.modules, "torchvision.ops.poolers")
    with pytest.raises(fxq.FxqError, match=r"_filter_input, a function of torchvision, .*: import torchvision first"):
        fxq.load(path)


def test_other_functions_of_a_library_are_not_called(library):
    assert function_of("torch.ops.torchvision.nms") is torch.ops.torchvision.nms
    assert name_of(_filter_input) == "torchvision.ops.poolers._filter_input"
    for name in ("torch.ops.torchvision.other", "torchvision.ops.poolers.sys", "os.system", "torch.ops.torchvision"):
        assert function_of(name) is None


@pytest.mark.parametrize("mapper", ["getattr(x, 'detach')", "operator.getitem([x], 0)", "operator.getitem(made, 0)"])
def test_a_function_that_calls_its_argument_gets_no_other(library, mapper):
    text = """
x = input()
made = torchvision.ops.poolers._setup_scales([x], 4)
mapper = operator.getitem(made, 1)
y = torchvision.ops.poolers._multiscale_roi_align([x], [x, x], 2, 2, [1.0], mapper)
return y
"""
    assert torch.equal(fxq.extend.read_graph(text, {})(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(fxq.InputError, match="its mapper is called"):
        fxq.extend.read_graph(text.replace("operator.getitem(made, 1)", mapper), {})
