"""insert-observers: observers on the edges that will carry integers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.graph.info import info
from fxq.graph.query import submodule
from fxq.quant.observer_base import Observer
from tests.graphs import MINMAX, after, equal, expected, text
from tests.helpers import REFERENCE
from tests.models import NETWORKS, batch, build, call, settled


def test_text_before_and_after():
    gm = after(build("dense"), batch("dense"), "insert-observers", REFERENCE)
    assert text(gm) == expected("""
        x = input
        x_observer = module Histogram(x)
        a_relu = conv2d_relu(x_observer, @a.weight, @a.bias) {conv2d(padding=(1, 1)); relu}
        a_relu_observer = module Histogram(a_relu)
        b_relu = conv2d_relu(a_relu_observer, @b.weight, @b.bias) {conv2d(padding=(1, 1)); relu}
        b_relu_observer = module Histogram(b_relu)
        cat = cat([a_relu_observer, b_relu_observer], dim=1)
        c_relu = conv2d_relu(cat, @c.weight, @c.bias) {conv2d(padding=(1, 1)); relu}
        c_relu_observer = module Histogram(c_relu)
        cat_1 = cat([a_relu_observer, b_relu_observer, c_relu_observer], dim=1)
        d = conv2d(cat_1, @d.weight, @d.bias)
        return d
    """)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_keep_their_output(name):
    model, inputs = build(name), batch(name)
    before = after(model, inputs, "share-qparams", REFERENCE)
    gm = after(model, inputs, "insert-observers", REFERENCE)
    assert any(isinstance(m, Observer) for m in gm.modules())
    assert equal(call(gm, inputs), call(before, inputs))


def test_an_observer_sees_what_it_is_named_after():
    model, x = build("dense"), batch("dense")
    gm = after(model, x, "insert-observers", fxq.Recipe.static(backend="reference", activation=MINMAX))
    call(gm, x)
    node = next(n for n in gm.graph.nodes if n.name == "a_relu_observer")
    observer = submodule(gm, node)
    seen = F.relu(model.a(x))
    assert [float(v) for v in observer.range()] == [float(seen.min()), float(seen.max())]
    assert observer.name.startswith('%a_relu (layer "a", tests/models.py:')
    assert (info(node).path, info(node).shape) == ("a", (4, 4, 8, 8))


def test_one_observer_for_each_spec():
    """Each reader reads through the observer of its own spec; readers in float read the value as it is seen."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.stem(x)
            return self.a(x) + torch.erf(self.b(x)) * torch.erf(x)

    recipe = REFERENCE.override("b", fxq.QuantConfig(activation=fxq.TensorSpec(bits=4, observer="minmax")))
    assert text(after(settled(Model), torch.randn(8, 4), "insert-observers", recipe)).splitlines()[3:8] == [
        "stem_observer = module Histogram(stem)",
        "stem_observer_1 = module MinMax(stem_observer)",
        "b = linear(stem_observer_1, @b.weight, @b.bias)",
        "erf = erf(b)",
        "erf_1 = erf(stem_observer)",
    ]


def test_nothing_to_observe_in_a_float_model():
    model, x = build("dense"), batch("dense")
    gm = after(model, x, "insert-observers", REFERENCE.override("*", fxq.FLOAT).override(fxq.op("cat"), fxq.FLOAT))
    assert not any(isinstance(m, Observer) for m in gm.modules())


def test_an_observer_that_saw_nothing_is_refused():
    observed = fxq.prepare(build("dense"), REFERENCE, batch("dense"))
    with pytest.raises(fxq.CalibrationError, match=r"%x .*has seen no data"):
        fxq.convert(observed)


def test_a_nan_in_an_activation_names_the_layer_and_the_batch():
    model, x = build("dense"), batch("dense")
    with torch.no_grad():
        model.b.bias.fill_(3e38)
        model.b.weight.fill_(3e38)
    with pytest.raises(fxq.CalibrationError, match=r'data, batch 0: .*layer "b"'):
        fxq.quantize(model, REFERENCE, data=[x])
