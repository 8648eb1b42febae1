"""A quantized model as its ledger, a comparison and a report know it: its tensors, its grids, what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.backends.by_name import devices_of
from fxq.backends.saved_state import check_same, state_of, take_over
from fxq.common.metrics import nbytes
from fxq.display.notebook import folded, html
from fxq.display.tables import line, text
from fxq.errors import InputError
from fxq.ledger.float_record import FloatRecord
from fxq.ledger.layer_qparams import layers_of
from fxq.ledger.ledger import Ledger
from fxq.ledger.qparams_table import ModelQParams
from fxq.pipeline.history import History
from fxq.recipe.recipe import Recipe

PLACE = "fxq_place"
"""The empty parameter of a quantized model, which tells its device and dtype."""


class Quantized(fx.GraphModule):
    """A graph on integers, and what was recorded while it was made.

    Attributes:
        history: one `Snapshot` per pass.
        ledger: what became of every op of the float model.
        recipe: the recipe that made it.
        backend: what a recipe calls the backend that its kernels belong to.
        record: what was seen of the float model: how its values lie, its inputs and its size.
    """

    history: History
    ledger: Ledger
    recipe: Recipe
    backend: str
    record: FloatRecord

    def __init__(self, root: Any, graph: fx.Graph, class_name: str = "QuantizedModel") -> None:
        super().__init__(root, graph, class_name)
        home = next((t.device for t in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        # Much code asks the first parameter of a model where it is, and a fully integer one has none.
        with torch.inference_mode(False):  # a tensor of that mode could not be loaded into
            place = torch.empty(0, dtype=torch.float32, device=home)
        self.register_parameter(PLACE, nn.Parameter(place, False))

    @classmethod
    def _deepcopy_init(cls) -> Any:
        """Constructor that `fx.GraphModule.__deepcopy__` uses for the copy."""
        return cls.__init__

    @property
    def float_model(self) -> nn.Module | None:
        """The float model that it was made from, for as long as somebody keeps it."""
        return None

    @property
    def output_sqnr(self) -> float | None:
        """How far its outputs were from the float model's when it was made: dB, see `Ledger.output_sqnr`.

        Example, for your CI: `assert qmodel.output_sqnr > 20`.
        """
        return self.ledger.output_sqnr

    def qparams(self) -> ModelQParams:
        """The integers of every layer whose weight is in integers, as they are now, by module path.

        A functional call goes by its node's name. `print` shows a table, `.save("p.npz")` writes a file.
        """
        return ModelQParams(layers_of(self))

    def _repr_html_(self) -> str:
        """In a notebook: what it is, what stays in float and why, the passes, and every op at a click."""
        floats, size = self.ledger.where(precision="float"), nbytes(self)
        facts = (
            f"backend {self.backend}",
            f"{self.ledger.coverage:.1%} of the multiply-accumulates in int8",
            f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB",
        )
        shown = html([line(text("QuantizedModel", "strong"), f": {', '.join(facts)}")])
        if floats:
            *parts, _ = floats._parts()  # without totals: those of a part would mislead
            shown += folded(f"{len(floats)} ops in float, and why", html(parts), opened=True)
        shown += folded("history: what every pass did", self.history._repr_html_(), opened=True)
        return shown + folded(f"ledger: all {len(self.ledger)} ops", self.ledger._repr_html_())

    @property
    def device(self) -> torch.device:
        """Where it is, and takes its inputs."""
        return self.get_parameter(PLACE).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of its floating-point inputs and outputs: float32, whatever it computes with inside."""
        return self.get_parameter(PLACE).dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantized:
        """What `.to`, `.half`, `.cuda` and their like come down to: `fn` for every tensor, if the kernels allow it.

        Raises:
            InputError: it changes a dtype, or moves the model to a device that the backend has no kernels for.
        """
        for dtype, device in {(t.dtype, t.device): None for t in (*self.parameters(), *self.buffers())}:
            made = fn(torch.empty(0, dtype=dtype, device=device))
            if made.dtype != dtype:
                raise InputError(
                    f"a quantized model's tensors keep their types, and this makes {made.dtype} of {dtype}: its scales "
                    "and kernels are made for them. Convert the float model before quantizing it, or convert inputs "
                    "and outputs.".replace("torch.", "")
                )
            devices = devices_of(self.backend)
            if made.device.type != device.type and devices and made.device.type not in devices:
                raise InputError(
                    f"the kernels of backend {self.backend!r} run on {', '.join(devices)} only, not on {made.device}. "
                    'For another device, quantize with backend="reference", which is exact and runs anywhere.'
                )
        super()._apply(fn, recurse)
        return self

    def get_extra_state(self) -> Tensor:
        """What belongs to the state dict besides the tensors: all grids, so that they go with the weights."""
        return state_of(self)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the grids of a model that was quantized alike. What was recorded of this one stays as it is.

        Raises:
            InputError: the other model has another structure; the message names where.
        """
        take_over(self, state)
        self.recompile()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """As in `nn.Module`; all of a model or nothing, so that no two are mixed."""
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None:
            check_same(self, state)
        own = self.state_dict(prefix=prefix)
        missing = [name for name in own if name not in state_dict]
        if missing and len(missing) < len(own):
            raise InputError(
                f"the state dict has {len(own) - len(missing)} of {len(own)} entries of this quantized model, "
                f"{missing[0]!r} is not among them. Weights and grids belong together: load all of one model, also "
                "with strict=False."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
