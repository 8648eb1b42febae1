"""What PyTorch's packed quantized kernels share. They take plain uint8 tensors.

They emit uint8 only; fbgemm's linear layer has a form that emits float32. The engine that is selected when a weight is
packed is the one that runs it, whatever is selected later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from fxq.backends.kernel import PostOp, bounds
from fxq.backends.packed.quantized_tensors import as_uint8, engine_selected
from fxq.backends.plain.clamp_and_pad import to_integer
from fxq.backends.table.kernel_table import CLAMPS
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.backends.table.layer_spec import LayerSpec
from fxq.errors import InputError
from fxq.quant.qparams import QParams


class Finish:
    """A clamp, and the grid of the result, on what a kernel has rounded: rounding keeps the order, so it is exact.

    Attributes:
        relu: the kernel clamps by itself, for the lower bound is zero and there is no upper one.
        clamp: the integer bounds, or None.
    """

    def __init__(self, out: QParams, post: PostOp | None, has_relu: bool = True) -> None:
        low, high = (to_integer(bound, out) for bound in bounds(post) or (0.0, 0.0))
        self.relu = has_relu and post is not None and (low, high) == (out.z, 255)
        self.clamp = None if self.relu or (low, high) == (0, 255) else (low, high)

    def __call__(self, q: Tensor) -> Tensor:
        y = as_uint8(q)
        return y if self.clamp is None else y.clamp_(*self.clamp)


class PackedKernel(LayerKernel, ABC):
    """A layer with a weight that one of PyTorch's quantized engines has packed.

    Args:
        spec: the layer; post None or a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    engine: ClassVar[str]
    posts: ClassVar[tuple[str, ...]] = CLAMPS
    emits_float: ClassVar[bool] = False
    has_relu: ClassVar[bool] = True
    """Whether the engine has a form of the kernel that clamps to positive values."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._input = self.x.s, self.x.z
        if self.out is not None:
            self._output, self._finish = (self.out.s, self.out.z), Finish(self.out, self.post, self.has_relu)

    def _check(self, given: int, wanted: int) -> None:
        """Refuse an input with other channels than the weight has: qnnpack would read whatever lies behind it."""
        if given != wanted:
            raise InputError(f"{self.name}: an input with {given} channels; the layer takes {wanted}.")

    @abstractmethod
    def _pack(self) -> Any:
        """The packed weight. Opaque: it cannot be copied or pickled."""

    def _weight(self) -> Any:
        """The packed weight, packed on first use."""

        def pack() -> Any:
            with engine_selected(self.engine):
                return self._pack()

        return self._cached("", pack)
