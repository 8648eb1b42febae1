"""Errors that a model raises itself are reported as such, and not as something that a graph cannot do."""

import pytest
import torch
from torch import nn

import fxq
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu
X = torch.randn(2, 16)


class Checks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 4)

    def forward(self, x):
        if x.shape[1] != 32:
            raise ValueError("expects 32 features")
        return self.a(x)


class Lacks(Checks):
    def forward(self, x):
        return self.missing(x)


@pytest.mark.parametrize(("kind", "words"), [(Checks, "expects 32 features"), (Lacks, "has no attribute 'missing'")])
def test_the_message_says_that_the_model_does_not_run(kind, words):
    with pytest.raises(fxq.InputError, match=f"^the model does not run on the example .*{words}") as error:
        fxq.quantize(kind().eval(), REFERENCE, data=[X])
    assert "branch" not in str(error.value) and "parts" not in str(error.value)


class Rest(Checks):
    def forward(self, x, *rest, temperature=1.0):
        return self.a(x) / temperature


def test_a_keyword_that_the_example_left_out():
    qmodel = fxq.quantize(Rest().eval(), REFERENCE, data=[X])
    with pytest.raises(fxq.InputError, match=r"no input 'temperature'; .* x, \*rest \(if forward takes \*args, only"):
        qmodel(X, temperature=2.0)


class Counts(Checks):
    def forward(self, x):
        return self.a(x.view(len(x), -1))


def test_a_size_that_python_has_fixed():
    with pytest.raises(fxq.InputError, match=r"x\.shape\[0\] does not"):
        fxq.quantize(Counts().eval(), REFERENCE, data=[X, X[:1]])


def test_a_whole_transformer_is_traced():
    torch.manual_seed(0)
    model = nn.Transformer(32, 2, 1, 1, 64, batch_first=True).eval()
    data = [(torch.randn(2, 7, 32), torch.randn(2, 5, 32))] * 3
    qmodel = fxq.quantize(model, REFERENCE, data=data)
    assert qmodel.ledger.coverage > 0.9
    assert {"encoder.layers.0.linear1", "decoder.layers.0.linear2"} <= {row.path for row in qmodel.ledger}
