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
        a_weight_observer = module MinMax(@a.weight)
        a_relu = conv2d_relu(x_observer, a_weight_observer, @a.bias) {conv2d(padding=(1, 1)); relu}
        a_relu_observer = module Histogram(a_relu)
        b_weight_observer = module MinMax(@b.weight)
        b_relu = conv2d_relu(a_relu_observer, b_weight_observer, @b.bias) {conv2d(padding=(1, 1)); relu}
        b_relu_observer = module Histogram(b_relu)
        cat = cat([a_relu_observer, b_relu_observer], dim=1)
        c_weight_observer = module MinMax(@c.weight)
        c_relu = conv2d_relu(cat, c_weight_observer, @c.bias) {conv2d(padding=(1, 1)); relu}
        c_relu_observer = module Histogram(c_relu)
        cat_1 = cat([a_relu_observer, b_relu_observer, c_relu_observer], dim=1)
        d_weight_observer = module MinMax(@d.weight)
        d = conv2d(cat_1, d_weight_observer, @d.bias)
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
    assert text(after(settled(Model), torch.randn(8, 4), "insert-observers", recipe)).splitlines()[4:11] == [
        "stem_observer = module Histogram(stem)",
        "stem_observer_1 = module MinMax(stem_observer)",
        "a_weight_observer = module MinMax(@a.weight)",
        "b_weight_observer = module MinMax(@b.weight)",
        "b = linear(stem_observer_1, b_weight_observer, @b.bias)",
        "erf = erf(b)",
        "erf_1 = erf(stem_observer)",
    ]


class Twice(nn.Module):
    """One weight that two layers read, and a float op."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.relu(F.linear(x, self.a.weight, self.a.bias))
        return self.a(y) + torch.cdist(y, self.a.weight)


@pytest.mark.parametrize(("per", "axes"), [("channel", [0]), ("tensor", [0, None])])
def test_a_weight_has_one_observer_for_each_form_that_layers_want(per, axes):
    """What reads it in float, reads it as it is. Calibration shows the observer nothing: a weight is known."""
    x = torch.randn(8, 4)
    weight = fxq.TensorSpec(signed=True, symmetric=True, per=per, observer="minmax")
    gm = fxq.prepare(settled(Twice), REFERENCE.override("a", fxq.QuantConfig(weight=weight)), x)
    call(gm, x)
    nodes = [n for n in gm.graph.nodes if n.name.startswith("a_weight_observer")]
    assert [submodule(gm, node).axis for node in nodes] == axes[::-1]
    assert not any(submodule(gm, node).seen for node in nodes)
    assert next("@a.weight" in line for line in text(gm).splitlines() if line.startswith("cdist"))
    lines = text(fxq.convert(gm)).splitlines()
    assert sum(line.startswith("a_weight_dq") for line in lines) == len(axes)


def test_a_weight_that_changes_after_calibration_is_seen_as_it_is_then():
    model, x = settled(Twice), torch.randn(8, 4)
    observed = fxq.calibrate(fxq.prepare(model, REFERENCE, x), [x])
    with torch.no_grad():
        model.a.weight.mul_(100)
    assert fxq.convert(observed).qparams()["a"].weight_scale.max() == pytest.approx(
        float(model.a.weight.abs().max()) / 127, rel=1e-6
    )


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
