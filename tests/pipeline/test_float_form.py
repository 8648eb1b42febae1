"""The float form of a qdq graph computes what the float model does."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.data import Batch
from fxq.pipeline.float_form import FloatForm
from tests.support.helpers import plain

FOUND = []


class RunsIt(fxq.Pass):
    """Runs the float form on the example."""

    name = "runs-it"
    needs = gives = fxq.extend.Stage.QDQ

    def run(self, rewriter):
        FOUND.append(FloatForm(rewriter.gm, rewriter.context.example).run())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(64, 16)

    def forward(self, x):
        return self.layer(x[:, None].relu())[0][:, 0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("network", ["linear", "recurrent"])
@pytest.mark.parametrize("recipe", [fxq.Recipe.static(), fxq.Recipe.dynamic(), fxq.Recipe.weight_only(bits=4)])
def test_it_computes_what_the_model_does(recipe, network):
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64), nn.PReLU(), nn.Linear(64, 3))
    model = (linear if network == "linear" else Recurrent()).eval()
    x = torch.randn(5, 64)
    recipe = plain(recipe.with_backend("reference")).insert_pass(RunsIt(), after="insert-qdq")
    qmodel = fxq.quantize(model, recipe, data=[x])
    assert qmodel.ledger.count("float") < len(qmodel.ledger)
    wanted = model(x)
    torch.testing.assert_close(FOUND.pop(), wanted, rtol=1e-6, atol=1e-6)
    assert (qmodel(x) - wanted).abs().max() > 1e-4


def test_a_constant_that_was_never_a_float_stays_what_its_integers_stand_for():
    gm = fxq.extend.read_graph(
        """
        x: float32[2, 3] = input()
        c: int8[3] = tensor('c')
        c_dq = dequantize(c, scale=0.5, zero_point=1)
        y = add(x, c_dq)
        return y
        """,
        {"c": torch.tensor([1, 2, 3], dtype=torch.int8)},
    )
    x = torch.rand(2, 3)
    torch.testing.assert_close(FloatForm(gm, Batch((x,))).run(), x + torch.tensor([0, 0.5, 1.0]), rtol=0, atol=0)
