"""A ledger of each backend."""

import pytest

import fxq
from tests.support.ledgers import RECIPES, X, net


@pytest.fixture(scope="module", params=RECIPES)
def ledger(request):
    return fxq.quantize(net(), request.param, data=[X]).ledger
