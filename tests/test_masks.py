"""Masks with infinity as inputs and constants: they are on no grid, and what reads them stays in float."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import module

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
MASK = nn.Transformer.generate_square_subsequent_mask(6)
RECIPES = {
    "reference": fxq.Recipe.static(backend="reference"),
    "coverage": fxq.Recipe.static(optimize="coverage"),
    "checked": fxq.Recipe.static(optimize="coverage").with_check("numeric"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def layers(*names):
    torch.manual_seed(0)
    return {name: nn.Linear(16, 16) for name in names}


def attention(weights=False):
    def forward(self, x, mask):
        y, weights_of_heads = self.m(x, x, x, attn_mask=mask, need_weights=weights)
        return (self.l(y), weights_of_heads) if weights else self.l(y)

    return module(forward, m=nn.MultiheadAttention(16, 2, batch_first=True), **layers("l"))


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return module(lambda self, x, mask: self.m(x, mask=mask), m=nn.TransformerEncoder(layer, 2))


def written_out():
    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4 + mask.unsqueeze(0)
        return scores.softmax(-1) @ self.v(x)

    return module(forward, **layers("q", "k", "v"))


def dot_product():
    def forward(self, x, mask):
        return self.l(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), mask))

    return module(forward, **layers("q", "k", "v", "l"))


def largest():
    return module(lambda self, x, mask: self.l(torch.maximum(self.q(x), mask[:, :1])), **layers("q", "l"))


MODELS = {
    "attention": attention,
    "weights": lambda: attention(True),
    "encoder": encoder,
    "written out": written_out,
    "dot product": dot_product,
    "maximum": largest,
}


@pytest.mark.one_in(6)
@recipes
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_mask_with_infinity_is_an_input(make, recipe):
    model, mask = make(), MASK.roll(-1, 1) if make is largest else MASK
    qmodel = fxq.quantize(model, recipe, data=[(X, mask), (-X, mask)])
    with torch.no_grad():
        assert sqnr(model(X, mask), qmodel(X, mask)) > 25
    assert qmodel.ledger.count("int8") > 0
    assert not any(math.isnan(entry.sqnr) for entry in qmodel.ledger if entry.sqnr is not None)
    assert fxq.compare(model, qmodel, [(X, mask)]).output_sqnr > 25


def test_a_mask_may_be_a_constant():
    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(1, 2) + self.mask.unsqueeze(0)).softmax(-1) @ self.v(x)

    model = module(forward, **layers("q", "k", "v"))
    model.register_buffer("mask", MASK)
    qmodel = fxq.quantize(model, RECIPES["coverage"], data=[X])
    with torch.no_grad():
        assert sqnr(model(X), qmodel(X)) > 25


@recipes
def test_a_mask_that_is_finite_in_the_example(recipe):
    model = module(lambda self, x, mask: self.l(torch.maximum(self.q(x), mask)), **layers("q", "l"))
    plain, masked = (X, torch.zeros(6, 1)), (X, MASK[:, 5:])
    qmodel = fxq.quantize(model, recipe, data=[plain, masked])
    with torch.no_grad():
        assert sqnr(model(*plain), qmodel(*plain)) > 25
        assert sqnr(model(*masked), qmodel(*masked)) > 25


@recipes
@pytest.mark.parametrize("batch", [0, 1])
def test_a_layer_does_not_multiply_infinity(batch, recipe):
    model = module(lambda self, x, mask: self.q(x) + self.k(F.pad(mask, (0, 10))), **layers("q", "k"))
    data = [(X, torch.zeros(6, 6))] * 2
    data[batch] = (X, MASK)
    with pytest.raises(fxq.CalibrationError, match=r'layer "k".*its input %(pad|mask) holds Inf. A mask may hold it'):
        fxq.quantize(model, recipe, data=data)
