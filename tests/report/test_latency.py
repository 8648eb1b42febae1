"""Timing a quantized model beside its float model: what is timed, what is not and why, and no traces in the models."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import fxq
from fxq.common import timed_calls
from fxq.common.data import Batch, as_batch
from fxq.common.metrics import tensors
from fxq.errors import InputError
from fxq.ledger.float_record import record_of
from fxq.report.latency import recorded_inputs, time_models
from tests.support.helpers import REFERENCE, module
from tests.support.models import NETWORKS, batch, build


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch):
    monkeypatch.setattr(timed_calls, "MAX_ROUNDS", 2)


@pytest.fixture(scope="module")
def residual():
    model = build("residual")
    return model, fxq.quantize(model, REFERENCE, data=[batch("residual")])


# ---- inputs


@pytest.mark.parametrize("name", NETWORKS)
def test_made_up_inputs_run_the_model(name):
    model, record = build(name), record_of(build(name), as_batch(batch(name), build(name)), {})
    example, own = recorded_inputs(record.inputs, "cpu"), as_batch(batch(name), model)
    outputs = [tensors(model(*inputs.args, **inputs.kwargs)) for inputs in (example, own)]
    shapes = [[(tensor.shape, tensor.dtype) for tensor in output] for output in outputs]
    assert shapes[0] == shapes[1] != []


def made_up(*args, **kwargs):
    return recorded_inputs(record_of(nn.Identity(), Batch(args, kwargs), {}).inputs, "cpu")


def test_made_up_inputs_have_the_shapes_and_dtypes_of_the_example():
    inputs = made_up(torch.zeros(100, 3), x=torch.zeros(50, 2, dtype=torch.float64))
    assert (inputs.args[0].shape, inputs.args[0].dtype) == ((100, 3), torch.float32)
    assert (inputs.kwargs["x"].shape, inputs.kwargs["x"].dtype) == ((50, 2), torch.float64)
    assert inputs.args[0].std() > 0.5


def test_integers_and_flags_are_zeros():
    inputs = made_up(torch.tensor([3, 1]), torch.tensor([[True], [False]]))
    assert inputs.args[0].tolist() == [0, 0] and inputs.args[0].dtype == torch.int64
    assert inputs.args[1].tolist() == [[False], [False]]


def test_containers_and_plain_values_are_those_of_the_example():
    inputs = made_up({"x": torch.rand(5, 4), "more": (torch.zeros(2), [3, None])}, 2.5, flag=True, mode="a")
    inside, number = inputs.args
    assert inside["x"].shape == (5, 4) and inside["x"].std() > 0.1
    assert inside["more"][0].shape == (2,) and inside["more"][1] == [3, None] and type(inside["more"]) is tuple
    assert (number, inputs.kwargs) == (2.5, {"flag": True, "mode": "a"})


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("odd", [Pair(torch.rand(5, 4), 1), {1: torch.rand(5, 4)}, object(), float("inf")])
def test_objects_of_other_classes_are_not_made_up(odd):
    with pytest.raises(InputError, match="input 1 is not a tensor, so it cannot be generated; pass example_inputs="):
        made_up(torch.rand(2), odd)
    with pytest.raises(InputError, match=r"input 'x'\['y'\]\[0\] is not a tensor"):
        made_up(x={"y": [odd]})


# ---- timing


def test_both_models_and_every_node_that_computes_are_timed(residual):
    model, qmodel = residual
    latency = time_models(qmodel, model, Batch((batch("residual"),)))
    assert latency.why == ""
    assert latency.float_us > 0 and latency.int8_us > 0
    assert [row.node for row in latency.profile] == [n.name for n in qmodel.graph.nodes if n.op.startswith("call")]
    assert all(row.us > 0 for row in latency.profile)
    count = torch.get_num_threads()
    assert latency.profile.batch == f"float32[4, 3, 8, 8], {count} thread{'s' * (count > 1)}"


def test_a_float_model_that_is_gone_is_said(residual):
    latency = time_models(residual[1], None, Batch((batch("residual"),)))
    assert latency.float_us is None and latency.int8_us > 0
    assert "the float model was deleted" in latency.why


@pytest.mark.slow
def test_a_float_model_in_train_mode_is_not_run(residual):
    _, qmodel = residual
    model = build("residual").train()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it was run"))
    latency = time_models(qmodel, model, Batch((batch("residual"),)))
    assert (latency.float_us, latency.why) == (None, "the float model is in train mode")


@pytest.mark.slow
def test_a_float_model_elsewhere_is_not_run(residual):
    model = build("residual").to("meta")
    latency = time_models(residual[1], model, Batch((batch("residual"),)))
    assert latency.why == "the float model is on meta and the inputs are on cpu"


def test_a_float_model_that_fails_is_said(residual):
    def broken(self, x):
        raise ValueError("no such batch")

    latency = time_models(residual[1], module(broken), Batch((batch("residual"),)))
    assert latency.int8_us > 0
    assert "float32[4, 3, 8, 8]): ValueError: no such batch" in latency.why


def test_inputs_that_the_quantized_model_refuses_are_an_error(residual):
    with pytest.raises(InputError, match=r"the model does not run on \(float32\[2, 5\]\): "):
        time_models(residual[1], None, Batch((torch.rand(2, 5),)))


def test_models_inputs_and_the_generator_stay_as_they_were():
    def forward(self, x):
        self.calls += 1
        self.seen.add_(1)
        return self.layer(x.mul_(2)) + torch.rand(1)

    model = module(forward, layer=nn.Linear(4, 4))
    model.calls = 0
    model.register_buffer("seen", torch.zeros(1))
    qmodel = fxq.quantize(
        module(lambda self, x: self.layer(x * 2), layer=model.layer), REFERENCE, data=[torch.rand(5, 4)]
    )
    x = torch.ones(5, 4)
    state = torch.get_rng_state()
    latency = time_models(qmodel, model, Batch((x,)))
    assert latency.float_us > 0
    assert (model.calls, model.seen.item()) == (0, 0)
    assert torch.equal(x, torch.ones(5, 4))
    assert torch.equal(state, torch.get_rng_state())
