"""Random models whose forward branches and loops on values: right in parts, call after call, or refused."""

import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.metrics import sqnr, tensors

pytestmark = pytest.mark.any_cpu

ALL_FLOAT = fxq.Recipe.static(backend="reference").override("*", fxq.FLOAT)
KINDS = ("plain", "optional", "flag", "buffer", "inner", "tuple")
USES = ("once", "while", "branch", "rows", "keyword", "twice", "log")
WIDTH = 8


class Unit(nn.Module):
    """Layer that may be a part: of a kind, with options that its callers use."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x, scale=None, flip=False, log=None):
        y = self.layer(x)
        if self.kind == "inner":
            y = self.inner(y) if float(y.sum()) > 0 else y
        if self.kind == "buffer":
            y = y + self.last
            self.last = y.detach().reshape(-1, WIDTH).mean(0)
        if log is not None:
            log.append(float(y.mean()))
        if self.kind == "optional" and scale is not None:
            y = y * scale
        if self.kind == "flag" and flip:
            y = -y
        return (y, y.relu()) if self.kind == "tuple" else y


class Random(nn.Module):
    """Calls units as a plan says: pairs of a kind and a use."""

    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(0)
        self.uses = [use for _, use in plan]
        self.units = nn.ModuleList(Unit(kind) for kind, _ in plan)

    def forward(self, x):
        log, steps = [], 0
        for unit, use in zip(self.units, self.uses, strict=True):

            def run(value, unit=unit, **options):
                result = unit(value, **options)
                return sum(result) if isinstance(result, tuple) else result

            if use == "while":
                start = x
                while float(x.abs().mean()) < 1.0 and steps < 4:
                    x, steps = run(x) + start, steps + 1
            elif use == "branch":
                x = run(x) if float(x.mean()) > 0 else run(x, flip=True)
            elif use == "rows":
                x = torch.stack([run(row) for row in x if float(row.sum()) > -1e9])
            elif use == "keyword":
                x = run(x, scale=x.mean(0)) if float(x.std()) > 0.2 else x
            elif use == "twice":
                x = run(run(x), flip=True)
            elif use == "log":
                x = run(x, log=log)
            else:
                x = run(x)
        return x, torch.tensor([*log, float(steps)])


PLANS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(USES)), min_size=1, max_size=4)


def check(plan):
    """Quantize with everything in float; "right" or "refused". A wrong value, or an error of another type, fails."""
    model = Random(plan).eval()
    draw = torch.Generator().manual_seed(1)
    data = [torch.randn(3, WIDTH, generator=draw) * size for size in (1.0, 0.2, 3.0)]
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        try:
            qmodel = fxq.quantize(model, ALL_FLOAT, data=data)
        except fxq.FxqError:
            qmodel = None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    if qmodel is None:
        return "refused"
    for size in (1.0, 0.2, 3.0, 1.0, 0.5):
        x = torch.randn(3, WIDTH, generator=draw) * size
        with torch.no_grad():
            want = model(x)
            try:
                got = qmodel(x)
            except fxq.FxqError:  # a kind of call that the data did not have
                return "refused"
        for a, b in zip(tensors(want), tensors(got), strict=True):
            assert a.shape == b.shape
            assert sqnr(a, b) > 80 or torch.allclose(a, b, atol=1e-5)
    return "right"


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PLANS)
def test_random_models_in_parts(plan):
    check(plan)


def test_loops_are_right_rather_than_refused():
    for use in ("while", "rows"):
        assert check([("plain", use), ("inner", "once")]) == "right"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(PLANS)
def test_more_random_models_in_parts(plan):
    check(plan)
