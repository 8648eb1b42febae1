"""What holds for every test."""

import os

import pytest
import torch

from fxq import costs

# Order of summation, and so the tests' numbers, must not depend on the machine. And small tensors are slower on several
# threads, much slower where other programs run.
torch.set_num_threads(1)

os.environ["TERM"] = (
    "dumb"  # what is printed is plain, also under `pytest -s` in a terminal; tests of colours set theirs
)


class IntegersAreFree(costs.Costs):
    """Prices at which everything that can runs on integers, so that no test depends on how fast the machine is.

    Tests of prices plant their own.
    """

    def __contains__(self, key):
        return True

    def seconds(self, key, prepare, cold=False):
        return 1.0 if key.startswith("float") else 0.0


@pytest.fixture(autouse=True, scope="session")
def integers_are_free():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "machine_costs", IntegersAreFree)
        yield
