"""Weights that a module computes before every call."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE

X, IMAGES = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


NORMS = [
    (nn.utils.weight_norm, lambda: nn.Linear(4, 4), X),
    (nn.utils.spectral_norm, lambda: nn.Conv2d(3, 4, 3), IMAGES),
    (parametrizations.weight_norm, lambda: nn.Linear(4, 4), X),
    (parametrizations.spectral_norm, lambda: nn.Conv2d(3, 4, 3), IMAGES),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(("norm", "layer", "x"), NORMS)
def test_reparametrized_layers_run_on_integers(norm, layer, x):
    """The older two are pre-hooks, which once kept the layer in float."""
    torch.manual_seed(0)
    model = nn.Sequential(norm(layer())).eval()
    keys = set(vars(model[0])), set(model.state_dict())
    qmodel = fxq.quantize(model, REFERENCE, data=[x])
    assert [e.precision for e in qmodel.ledger] == ["int8"]
    with torch.no_grad():
        assert sqnr(model(x), qmodel(x)) > 35
    assert keys == (set(vars(model[0])), set(model.state_dict()))
