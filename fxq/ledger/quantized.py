"""Base class of quantized models, without saving, loading and reports: tensors, grids, ledger and history."""

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
"""Name of an empty parameter that every quantized model has, so that it has a device and dtype like any module."""


class Quantized(fx.GraphModule):
    """Quantized graph with its ledger and history; `QuantizedModel` is its public subclass.

    Attributes:
        history: one `Snapshot` per pass.
        ledger: precision of every op of the float model, and the reason for it.
        recipe: the recipe that it was quantized with.
        backend: name of the backend of its kernels, as in a recipe.
        record: facts about the float model: distributions of its values, its inputs and its size.
    """

    history: History
    ledger: Ledger
    recipe: Recipe
    backend: str
    record: FloatRecord

    def __init__(self, root: Any, graph: fx.Graph, class_name: str = "QuantizedModel") -> None:
        super().__init__(root, graph, class_name)
        home = next((t.device for t in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        # much code reads the device from the first parameter of a model, and a fully integer model has none
        with torch.inference_mode(False):  # load_state_dict cannot write into inference tensors
            place = torch.empty(0, dtype=torch.float32, device=home)
        self.register_parameter(PLACE, nn.Parameter(place, False))

    @classmethod
    def _deepcopy_init(cls) -> Any:
        """Return the constructor that `fx.GraphModule.__deepcopy__` uses for the copy."""
        return cls.__init__

    @property
    def float_model(self) -> nn.Module | None:
        """The float model that it was made from, while the caller keeps it; otherwise None."""
        return None

    @property
    def output_sqnr(self) -> float | None:
        """SQNR of its outputs against the float model's, in dB, when it was quantized; see `Ledger.output_sqnr`.

        Use it in tests: `assert qmodel.output_sqnr > 20`.
        """
        return self.ledger.output_sqnr

    def qparams(self) -> ModelQParams:
        """Return the weights, scales and zero points of every layer with an integer weight, by module path.

        A functional call has its node's name as key. `print` shows a table, `.save("p.npz")` writes a file.
        """
        return ModelQParams(layers_of(self))

    def _repr_html_(self) -> str:
        """Notebook view: a summary, the ops in float and why, the history, and the ledger, folded."""
        floats, size = self.ledger.where(precision="float"), nbytes(self)
        facts = (
            f"backend {self.backend}",
            f"{self.ledger.coverage:.1%} of the multiply-accumulates in int8",
            f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB",
        )
        shown = html([line(text("QuantizedModel", "strong"), f": {', '.join(facts)}")])
        if floats:
            *parts, _ = floats._parts()  # the totals would only cover these ops
            shown += folded(f"{len(floats)} ops in float, and why", html(parts), opened=True)
        shown += folded("history: what every pass did", self.history._repr_html_(), opened=True)
        return shown + folded(f"ledger: all {len(self.ledger)} ops", self.ledger._repr_html_())

    @property
    def device(self) -> torch.device:
        """Device of the model and of its inputs."""
        return self.get_parameter(PLACE).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its floating-point inputs and outputs: float32."""
        return self.get_parameter(PLACE).dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantized:
        """Apply `fn` to every tensor, as `.to`, `.half`, `.cuda` and similar methods do.

        Raises:
            InputError: `fn` changes a dtype, or moves the model to a device that the backend has no kernels for.
        """
        for dtype, device in {(t.dtype, t.device): None for t in (*self.parameters(), *self.buffers())}:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if probe.dtype != dtype:
                raise InputError(
                    f"the tensors of a quantized model keep their dtypes, and this makes {probe.dtype} of {dtype}: its "
                    "scales and kernels require them. Convert the float model before quantizing it, or convert inputs "
                    "and outputs.".replace("torch.", "")
                )
            devices = devices_of(self.backend)
            if probe.device.type != device.type and devices and probe.device.type not in devices:
                raise InputError(
                    f"the kernels of backend {self.backend!r} run on {', '.join(devices)} only, not on {probe.device}. "
                    'For another device, quantize with backend="reference", which is exact and runs anywhere.'
                )
        super()._apply(fn, recurse)
        return self

    def get_extra_state(self) -> Tensor:
        """Return all grids, so that the state dict holds them together with the weights."""
        return state_of(self)

    def set_extra_state(self, state: Tensor) -> None:
        """Load the grids of a model with the same structure. Ledger, history and record do not change.

        Raises:
            InputError: the model that `state` is from has another structure; the message says where.
        """
        take_over(self, state)
        self.recompile()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load a state dict as `nn.Module` does, but only if it is complete, so that no two models are mixed.

        Raises:
            InputError: some entries are missing, or the structure is another.
        """
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None:
            check_same(self, state)
        own = self.state_dict(prefix=prefix)
        missing = [name for name in own if name not in state_dict]
        if missing and len(missing) < len(own):
            raise InputError(
                f"the state dict has {len(own) - len(missing)} of {len(own)} entries of this quantized model; "
                f"{missing[0]!r} is missing. Weights and grids belong together: load all entries of one model, even "
                "with strict=False."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
