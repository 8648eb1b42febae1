"""Values that follow from the inputs of a model without a layer, and the nodes that apply them as masks."""

import pytest
import torch
from torch import nn

from fxq.graph.analysis.given import InputDerivedValues
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE


class Masked(nn.Module):
    """Combines the values of a layer with a mask that is computed from an input."""

    def __init__(self, together):
        super().__init__()
        self.together, self.linear = together, nn.Linear(4, 4)

    def forward(self, x, mask):
        return self.together(self.linear(x), x, mask.unsqueeze(0))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("together", "masks"),
    [
        (lambda computed, x, mask: computed + mask, True),
        (lambda computed, x, mask: mask + computed.reshape(1, 4, 4), True),
        (lambda computed, x, mask: x + mask, False),
        (lambda computed, x, mask: computed + computed.t(), False),
        (lambda computed, x, mask: computed + 1.0, False),
        (lambda computed, x, mask: torch.matmul(computed, mask), False),
    ],
    ids=["mask", "mask first", "both inputs", "both computed", "number", "product"],
)
@pytest.mark.parametrize("stage", ["fuse", "insert-observers"])
def test_masks(together, masks, stage):
    gm = graph(Masked(together).eval(), (torch.randn(4, 4), torch.randn(4, 4)), stage, REFERENCE)
    input_derived = InputDerivedValues(gm)
    masking = [node.name for node in gm.graph.nodes if input_derived.applies_mask(node)]
    assert len(masking) == masks
