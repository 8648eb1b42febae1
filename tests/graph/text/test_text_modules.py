"""Lines of a text that declare modules, written and read."""

import ast

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.by_name import kernel_named
from fxq.graph.text.text_modules import declaration, read_module
from fxq.quant.observers import MinMax, observer_for
from tests.support.machine import needs_x86

pytestmark = pytest.mark.any_cpu


def made(line, tensors=None, graphs=None):
    call = ast.parse(line).body[0].value
    return read_module(call, (tensors or {}).__getitem__, kernel_named, graphs or {})


def test_an_observer_keeps_what_it_has_seen():
    observer = observer_for(fxq.TensorSpec(observer="minmax"), name="the input")
    observer(torch.tensor([-1.0, 3.0]))
    line = declaration("a.b", observer, None)
    assert line.startswith("modules['a.b'] = observer(spec=TensorSpec(") and "minimum=tensor('a.b.minimum')" in line
    again = made(line, {f"a.b.{name}": tensor for name, tensor in observer.named_buffers()})
    assert isinstance(again, MinMax) and not again.paused
    assert (float(again.minimum), float(again.maximum)) == (-1.0, 3.0)
    observer.paused = True
    assert made(declaration("a.b", observer, None), dict(observer.named_buffers("a.b"))).paused


@needs_x86
def test_a_kernel_is_its_options_and_tensors():
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.rand(2, 4)
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage")
    qmodel = fxq.quantize(model, recipe, data=[x])
    path, kernel = next(
        (p, m) for p, m in qmodel.named_modules() if isinstance(m, fxq.extend.Kernel) and list(m.buffers())
    )
    line = declaration(path, kernel, None)
    again = made(line, dict(kernel.named_buffers(path)))
    assert type(again) is type(kernel) and again.config() == kernel.config()


def test_a_leaf_is_named_by_its_type():
    assert declaration("head", nn.Tanh(), None) == "modules['head'] = leaf('Tanh')"


@pytest.mark.parametrize(
    "line, why",
    [
        ("3", "expected a call, not `3`"),
        ("x86.nothing()", "x86.nothing"),
        ("observer(spec=1)", "these options do not fit observer"),
        ("openvino.region(runs=nothing)", "do not fit|not installed"),
        ("x86.linear(stride=x)", "there is no value 'x'"),
    ],
)
def test_refused(line, why):
    with pytest.raises(fxq.FxqError, match=why):
        made(line)
