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


def expert():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


class Routed(nn.Module):
    """Model that sends each batch through one of three experts, and has a head that only training calls."""

    def __init__(self, make=expert):
        super().__init__()
        self.experts = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(32, 8)
        self.extra = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))

    def forward(self, x):
        h = self.pass_expert(int(x[0, 0].abs().item()) % 3, x)
        return (self.head(h), self.extra(h)) if self.training else self.head(h)

    def pass_expert(self, i, x):
        return self.experts[i](x)


def batch_for(number):
    x = torch.randn(16, 32)
    x[0, 0] = number + 0.5
    return x


def quantized(recipe, experts, make=Routed, **options):
    torch.manual_seed(0)
    model = make().eval()
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
    assert "Modules in float, because the data does not call them: extra." in warning
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
    assert "Modules in float, because the data does not call them: experts.2, extra." in warning
    x = batch_for(2)
    hidden = model.experts[2](x)
    assert torch.equal(q(x), q.head(hidden))  # the expert computes in float, the head on integers
    assert not torch.equal(q(x), model(x))


def test_checkpoints_add_no_graphs(tmp_path):
    for _ in range(2):  # the second run is resumed: all batches are covered
        _, q, _ = quantized(STATIC, [0, 1], checkpoint=tmp_path / "c")
        assert in_python(q)["experts.1"] == ("the example, whose calls alone a checkpoint stores, does not call it")


def test_parts_that_the_example_does_not_call_can_be_named():
    recipe = STATIC.parts("experts.*")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxqWarning)
        _, q, _ = quantized(recipe, [1, 0])
        assert list(q.parts) == ["experts.0", "experts.1"]
        _, q, _ = quantized(STATIC.parts("experts.1"), [0, 1])
        assert list(q.parts) == ["experts.1"]
        with pytest.raises(fxq.TraceError, match=r"no part is quantized, because the data calls none of: experts\.2"):
            fxq.quantize(Routed().eval(), STATIC.parts("experts.2"), data=[(batch_for(0),)])


def test_only_some_data_is_run_without_ranges():
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
    _, q, warning = quantized(recipe, [0] * 70 + [1])
    assert in_python(q)["experts.1"] == "the data up to batch 64 does not call it"
    assert "because the data up to batch 64 does not call them: experts.1, experts.2, extra." in warning


class Shifting(nn.Module):
    """Expert that changes its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(x.add_(1))


class Counting(nn.Module):
    """Expert that counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class WithInput(Routed):
    """Adds the input of the expert, which may have changed, and a count if there is one."""

    def pass_expert(self, i, x):
        h = x * 1.0
        return self.experts[i](h) + h + getattr(self.experts[i], "calls", 0)


class WithoutForward(Routed):
    """Calls the layers of the second expert one by one, and reads a weight of the third without calling it."""

    def pass_expert(self, i, x):
        if i == 0:
            return self.experts[0](x)
        if i == 2:
            return x @ self.experts[2][0].weight.T[:, :32]
        for layer in self.experts[1]:
            x = layer(x)
        return x


class InBfloat16(Routed):
    """Calls all but the first expert under autocast."""

    def pass_expert(self, i, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=i > 0):
            return self.experts[i](x).float()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: WithInput(Shifting), "it changes its input args[0] in place"),
        (lambda: WithInput(Counting), "its attribute 'calls' changes during a run, which code outside of a graph can"),
        (WithoutForward, "the data does not call it"),
        (InBfloat16, "it runs under torch.autocast"),
    ],
    ids=["changes its input", "keeps a state", "is not called as a whole", "autocast"],
)
def test_what_cannot_be_a_graph_stays_float(make, why):
    model, q, _ = quantized(STATIC, [0, 1, 2, 1, 2], make)
    assert all(in_python(q)[f"experts.{i}"].startswith(why) for i in (1, 2))
    for number in (0, 1, 2, 1):
        x = batch_for(number)
        with torch.no_grad():
            want, got = model(x.clone()), q(x.clone())
        assert 20 < sqnr(want, got) < 80


def test_a_recurrent_expert_becomes_a_part():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(32, 32, batch_first=True)

        def forward(self, x):
            return self.layer(x[None])[0][0]

    _, q, _ = quantized(STATIC, [0, 1], lambda: Routed(Recurrent))
    assert list(q.parts) == ["experts.0", "experts.1", "head"]


def test_a_weight_that_later_data_reads_is_kept():
    class Reading(Routed):
        def pass_expert(self, i, x):
            h = self.experts[i](x)
            return h + (h @ self.experts[1][0].weight.T)[:, :32] if i == 2 else h

    model, q, _ = quantized(STATIC, [0, 1, 2], Reading)
    assert list(q.parts) == ["experts.0", "experts.1", "experts.2", "head"]
    for number in range(3):
        x = batch_for(number)
        with torch.no_grad():
            assert 20 < sqnr(model(x), q(x)) < 80
