"""A small model, quantized, and the data of its report."""

import pytest

import fxq
from fxq.common import timed_calls
from fxq.report.report import report_data
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build


@pytest.fixture(scope="module")
def one_round():
    """Times are measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_calls, "MAX_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def model():
    return build("residual")


@pytest.fixture(scope="module")
def qmodel(model):
    return fxq.quantize(model, REFERENCE, data=[batch("residual")])


@pytest.fixture(scope="module")
def data(qmodel, one_round):
    return report_data(qmodel)
