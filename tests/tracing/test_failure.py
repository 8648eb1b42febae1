"""Failed traces: the module that stays in float, and the message."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import module
from tests.support.machine import no_warnings
from tests.support.traced import Data, X, caught, close, conv, resized

pytestmark = no_warnings


def assigned(y):
    z = y.clone()
    z.data = y * 2
    return z


ASKS = {
    "branch": (lambda y: y if y.mean() > 9 else -y, "a branch on a value that depends on the data"),
    "rows": (lambda y: y + sum(row for row in y), "a loop over the rows of a tensor"),
    "int": (lambda y: y + int(y.sum()), r"int\(\) of a value that depends on the data"),
    "numpy": (lambda y: torch.from_numpy(y.detach().numpy() * 2), "np.ndarray"),
    "caught": (caught, r"int\(\) of a value that depends"),
    "resized": (resized, r"changes %mul in place: the op changes its size or storage"),
    "assigned": (assigned, r"an assignment to \.data of a tensor"),
    "type": (
        lambda y: y if type(y) is torch.Tensor else y + 1,
        "computes something else than the model on the example",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ASKS)
def test_the_smallest_module_stays_in_float(name):
    ask, why = ASKS[name]
    model = nn.Sequential(conv(), nn.Sequential(nn.Sequential(Data(ask), nn.ReLU()), conv())).eval()
    with pytest.warns(fxq.FxqWarning, match=rf'1 module .*layer "1.0.0" \(Data\) cannot be traced: .*{why}'):
        qmodel = close(model, X)
    assert [(e.path, e.precision) for e in qmodel.ledger] == [
        ("0", "int8"), ("1.0.0", "float"), ("1.0.1", "float"), ("1.1", "int8")
    ]  # fmt: skip
    assert "cannot be traced" in qmodel.ledger[1].reason
    assert "cannot be traced" in qmodel.history["trace"].graph["_1_0_0"].note
    with torch.no_grad():
        assert sqnr(model(X[:2]), qmodel(X[:2])) > 30


@pytest.mark.parametrize("name", ASKS)
def test_strict_tracing_refuses(name):
    ask, why = ASKS[name]
    with pytest.raises(fxq.TraceError, match=why):
        fxq.prepare(nn.Sequential(conv(), Data(ask)).eval(), fxq.Recipe.static(strict_trace=True), example_inputs=X)


def test_one_warning_for_many_modules():
    blocks = [Data(ASKS["branch"][0]) for _ in range(6)]
    with pytest.warns(
        fxq.FxqWarning, match=r"6 modules of the model cannot be traced.*and 3 more, see the ledger"
    ) as seen:
        close(nn.Sequential(*blocks, conv()), X)
    assert len(seen) == 1


def test_a_branch_of_the_model_itself_is_refused():
    def helper(y):
        return y if y.sum() > 0 else -y

    with pytest.raises(fxq.TraceError, match=r"test_failure\.py:\d+: a branch on .*%gt = gt\(%sum_1\).*Remedies: "):
        close(module(lambda self, x: helper(self.a(x)), a=conv()), X)


def test_a_warning_says_how_much_of_the_model_is_in_float():
    """Most of the arithmetic, where there is one other layer like it and two in the module; less than half of eight."""

    def forward(self, x):
        return self.b(self.a(x)) if self.a(x).mean() < 9 else x

    leaf = module(forward, a=conv(), b=conv())
    with pytest.warns(fxq.FxqWarning, match="They do about 67% of the .*: move the line that cannot be traced"):
        close(nn.Sequential(conv(), leaf), X)
    with pytest.warns(fxq.FxqWarning, match=r"in float: ((?!They do).)*$"):
        close(nn.Sequential(*[conv() for _ in range(6)], leaf), X)
