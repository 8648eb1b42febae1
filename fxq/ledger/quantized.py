"""A quantized model as its ledger, a comparison and a report know it."""

from __future__ import annotations

from torch import fx, nn

from fxq.ledger.float_record import Record
from fxq.ledger.layer_qparams import LayerQParams, layers_of
from fxq.ledger.ledger import Ledger
from fxq.pipeline.history import History
from fxq.recipe.recipe import Recipe


class Quantized(fx.GraphModule):
    """A graph on integers, and what was recorded while it was made.

    Attributes:
        history: one `Snapshot` per pass.
        ledger: what became of every op of the float model.
        recipe: the recipe that made it.
        backend: name of the backend that its kernels belong to.
        record: what was seen of the float model: how its values lie, its inputs and its size.
    """

    history: History
    ledger: Ledger
    recipe: Recipe
    backend: str
    record: Record

    @property
    def float_model(self) -> nn.Module | None:
        """The float model that it was made from, for as long as somebody keeps it."""
        return None

    def qparams(self) -> dict[str, LayerQParams]:
        """The integers of every int8 layer with a weight, as they are now, by module path.

        A functional call goes by its node's name.
        """
        return layers_of(self)
