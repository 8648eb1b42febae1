"""Parts that the example does not call: calibration data that calls them gives their graphs."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import FxqWarning

pytestmark = pytest.mark.any_cpu

STATIC = fxq.Recipe.static(backend="reference", optimize="coverage")


class Routed(nn.Module):
    """Model that sends each batch through one of three experts, and has a head that only training calls."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, 8)
        self.extra = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))

    def forward(self, x):
        h = self.experts[int(x[0, 0].abs().item()) % 3](x)
        return (self.head(h), self.extra(h)) if self.training else self.head(h)


def batch_for(expert):
    x = torch.randn(16, 32)
    x[0, 0] = expert + 0.5
    return x


def quantized(recipe, experts, **options):
    torch.manual_seed(0)
    model = Routed().eval()
    with pytest.warns(FxqWarning, match="is quantized in") as heard:
        q = fxq.quantize(model, recipe, data=[(batch_for(e),) for e in experts], **options)
    return model, q, str(heard[0].message)


def in_python(q):
    return {entry.path: entry.reason for entry in q.ledger if entry.op == "python" and entry.path}


@pytest.mark.parametrize(
    "recipe", [STATIC, fxq.Recipe.dynamic(backend="reference", optimize="coverage")], ids=["static", "dynamic"]
)
def test_data_after_the_example_gives_graphs(recipe, tmp_path):
    model, q, warning = quantized(recipe, [0, 0, 0, 0, 0, 2, 1])
    assert list(q.parts) == ["experts.0", "experts.1", "experts.2", "head"]
    assert all(graph.ledger.coverage == 1 for graph in q.parts.values())
    assert in_python(q) == {"extra": "the data does not call it"}
    assert "The data does not call extra, which stays in float." in warning
    loaded = fxq.load(q.save(tmp_path / "m.fxq"), into=model)
    for expert in range(3):
        x = batch_for(expert)
        with torch.no_grad():
            want, got = model(x), q(x)
        assert 25 < sqnr(want, got) < 80
        assert torch.equal(got, loaded(x))


def test_what_no_data_calls_stays_float_and_is_named():
    model, q, warning = quantized(STATIC, [0, 1])
    assert list(q.parts) == ["experts.0", "experts.1", "head"]
    assert in_python(q) == dict.fromkeys(["experts.2", "extra"], "the data does not call it")
    assert "The data does not call experts.2, extra, which stay in float." in warning
    x = batch_for(2)
    hidden = model.experts[2](x)
    assert torch.equal(q(x), q.head(hidden))  # the expert computes in float, the head on integers
    assert not torch.equal(q(x), model(x))


def test_checkpoints_add_no_graphs(tmp_path):
    _, q, _ = quantized(STATIC, [0, 1], checkpoint=tmp_path / "c")
    assert "with a checkpoint" in in_python(q)["experts.1"]


def test_parts_that_the_example_does_not_call_can_be_named():
    recipe = STATIC.parts("experts.*")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxqWarning)
        _, q, _ = quantized(recipe, [1, 0])
    assert list(q.parts) == ["experts.0", "experts.1"]
