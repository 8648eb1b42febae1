"""insert-observers: observers on the edges that will carry integers."""

import pytest
import torch
from torch import nn

import fxq
from fxq.graph.info import info
from fxq.graph.query import submodule
from fxq.passes import InsertObservers
from tests.support.graphs import equal, expected, node, run_pass, text
from tests.support.helpers import REFERENCE, module
from tests.support.models import batch, build

W = "TensorSpec(signed=True, symmetric=True, per='channel', observer='minmax')"
INT8 = f"plan=Plan(Decision('int8'), reads=TensorSpec(), weight={W})"
WEIGHT = f"edges=(Edge({W}, 1, True, observed=True, axis=0),)"
OBSERVED = "Edge(TensorSpec(), 0, True, observed=True)"
DENSE = f"""
    x: float32[1, 3, 4, 4] = input()  # edges=({OBSERVED},)
    w: float32[3, 3, 1, 1] = tensor('a.weight')  # {WEIGHT}
    a = conv2d(x, w)  # 'a', 'net.py:7', edges=({OBSERVED},), {INT8}
    v: float32[2, 6, 1, 1] = tensor('b.weight')  # {WEIGHT}
    cat = cat([x, a], dim=1)  # edges=(Edge(TensorSpec(), 0, False),), plan=Plan(Decision('moves'), reads=TensorSpec())
    b = conv2d(cat, v)  # {INT8}
    return b
"""


def test_text_before_and_after():
    """After computed values, not after moved values, nor after values without an integer reader."""
    gm = run_pass(InsertObservers(), DENSE)
    assert text(gm) == expected("""
        x = input
        x_observer = module Histogram(x)
        w_observer = module MinMax(@a.weight)
        a = conv2d(x_observer, w_observer)
        a_observer = module Histogram(a)
        v_observer = module MinMax(@b.weight)
        cat = cat([x_observer, a_observer], dim=1)
        b = conv2d(cat, v_observer)
        return b
    """)


def test_an_observer_sees_what_it_is_named_after():
    gm = run_pass(InsertObservers(), DENSE.replace("TensorSpec()", "TensorSpec(observer='minmax')"))
    x = torch.randn(1, 3, 4, 4)
    gm(x)
    observer_node = node(gm, "a_observer")
    observer = submodule(gm, observer_node)
    seen = torch.conv2d(x, gm.a.weight)
    assert [float(v) for v in observer.range()] == [float(seen.min()), float(seen.max())]
    assert observer.name == '%a (layer "a", net.py:7)'
    about = info(observer_node)
    assert (about.path, about.source, about.shape) == ("a", "net.py:7", (1, 3, 4, 4))


def test_one_observer_for_each_spec():
    """Each reader reads through the observer of its own spec; readers in float read the value as it is seen."""
    fine, coarse = "TensorSpec()", "TensorSpec(bits=4, observer='minmax')"
    program = f"""
        x: float32[8, 4] = input()
        w: float32[4, 4] = tensor('w')
        y = sigmoid(x)  # edges=(Edge({fine}, 0, True, True), Edge({coarse}, 1, True, True))
        a = linear(y, w)  # plan=Plan(Decision('int8'), reads={fine})
        b = linear(y, w)  # plan=Plan(Decision('int8'), reads={coarse})
        erf = torch.erf(y)
        return (a, b, erf)
    """
    gm = run_pass(InsertObservers(), program)
    assert text(gm) == expected("""
        x = input
        y = sigmoid(x)
        y_observer = module Histogram(y)
        y_observer_1 = module MinMax(y_observer)
        a = linear(y_observer, @w)
        b = linear(y_observer_1, @w)
        erf = erf(y_observer)
        return (a, b, erf)
    """)
    x = torch.randn(8, 4)
    assert equal(gm(x), fxq.extend.read_graph(program, {"w": gm.w})(x))


def test_a_weight_has_one_observer_for_each_form_that_layers_want():
    """Float readers read the weight as it is. Its observer sees nothing in calibration."""
    tensor = W.replace("channel", "tensor")
    gm = run_pass(
        InsertObservers(),
        f"""
        x: float32[8, 4] = input()
        w: float32[4, 4] = tensor('w')  # edges=(Edge({W}, 1, True, True, axis=0), Edge({tensor}, 2, True, True))
        a = linear(x, w)  # {INT8}
        b = linear(x, w)  # {INT8.replace("channel", "tensor")}
        cdist = torch.cdist(x, w)
        return (a, b, cdist)
        """,
    )
    assert text(gm).splitlines()[1:] == [
        "w_observer_1 = module MinMax(@w)",
        "w_observer = module MinMax(@w)",
        "a = linear(x, w_observer)",
        "b = linear(x, w_observer_1)",
        "cdist = cdist(x, @w)",
        "return (a, b, cdist)",
    ]
    gm(torch.randn(8, 4))
    observers = [submodule(gm, node(gm, name)) for name in ("w_observer", "w_observer_1")]
    assert [(observer.axis, observer.seen) for observer in observers] == [(0, False), (None, False)]


def test_a_weight_that_changes_after_calibration_is_seen_as_it_is_then():
    model, x = module(lambda self, x: self.a(x), a=nn.Linear(4, 4)), torch.randn(8, 4)
    observed = fxq.calibrate(fxq.prepare(model, REFERENCE, example_inputs=x), [x])
    with torch.no_grad():
        model.a.weight.mul_(100)
    assert fxq.convert(observed).qparams()["a"].weight_scale.max() == pytest.approx(
        float(model.a.weight.detach().abs().max()) / 127, rel=1e-6
    )


def test_nothing_to_observe_in_a_float_model():
    same = expected("""
        x = input
        relu = relu(x)
        return relu
    """)
    plan = "# plan=Plan(Decision('float'))"
    gm = run_pass(InsertObservers(), f"x: float32[2] = input()\nrelu = relu(x)  {plan}\nreturn relu")
    assert text(gm) == same


def test_an_observer_that_saw_nothing_is_refused():
    observed = fxq.prepare(build("dense"), REFERENCE, example_inputs=batch("dense"))
    with pytest.raises(fxq.CalibrationError, match=r"%x .*has seen no data"):
        fxq.convert(observed)


def test_a_nan_in_an_activation_names_the_layer_and_the_batch():
    model, x = build("dense"), batch("dense")
    with torch.no_grad():
        model.b.bias.fill_(3e38)
        model.b.weight.fill_(3e38)
    with pytest.raises(fxq.CalibrationError, match=r'data, batch 0: .*layer "b"'):
        fxq.quantize(model, REFERENCE, data=[x])


def test_a_calibrated_state_is_observed_where_it_is_made_and_where_it_is_given():
    states, fixed = "TensorSpec(symmetric=True, observer='minmax')", "TensorSpec(symmetric=True, range='fixed')"
    gm = run_pass(
        InsertObservers(),
        f"""
        x: float32[3, 1, 2] = input()  # edges=({OBSERVED},)
        h: float32[1, 4] = input()
        w: float32[12, 2] = tensor('w')
        v: float32[12, 4] = tensor('v')
        y = gru(x, w, v, None, None, h)  # plan=Plan(Decision('int8'), reads=TensorSpec(), state={states})
        z = gru(y, w, v)  # plan=Plan(Decision('int8'), reads=TensorSpec(), state={fixed})
        return (y, z)
        """,
    )
    assert text(gm) == expected("""
        x = input
        h = input
        h_observer = module MinMax(h)
        x_observer = module Histogram(x)
        y = gru(x_observer, @w, @v, None, None, h_observer)
        y_observer = module MinMax(y)
        z = gru(y_observer, @w, @v)
        return (y_observer, z)
    """)
