"""Base class of kernels that call PyTorch's packed quantized kernels on plain uint8 tensors.

All emit uint8; only fbgemm's linear layer can also emit float32. The engine that is selected when a weight is packed
runs the layer, whatever engine is selected later.
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
    """Clamp of the rounded result of a packed kernel. It is exact, since rounding is monotonic.

    Attributes:
        relu: whether the kernel itself clamps, because the bounds are those of relu.
        clamp: integer bounds to clamp to after the kernel, or None.
    """

    def __init__(self, out: QParams, post: PostOp | None, has_relu: bool = True) -> None:
        low, high = (to_integer(bound, out) for bound in bounds(post) or (0.0, 0.0))
        self.relu = has_relu and post is not None and (low, high) == (out.z, 255)
        self.clamp = None if self.relu or (low, high) == (0, 255) else (low, high)

    def __call__(self, q: Tensor) -> Tensor:
        y = as_uint8(q)
        return y if self.clamp is None else y.clamp_(*self.clamp)


class PackedKernel(LayerKernel, ABC):
    """Layer whose weight is packed for one of PyTorch's quantized engines.

    Args:
        spec: the layer; its `post` is None or a clamp.

    Raises:
        BackendError: `refuses` gives a reason.
    """

    engine: ClassVar[str]
    posts: ClassVar[tuple[str, ...]] = CLAMPS
    emits_float: ClassVar[bool] = False
    has_relu: ClassVar[bool] = True
    """Whether the engine has a variant of the kernel with relu."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._input = self.x.s, self.x.z
        if self.out is not None:
            self._output, self._finish = (self.out.s, self.out.z), Finish(self.out, self.post, self.has_relu)

    def _check(self, channels: int, expected: int) -> None:
        """Refuse an input with another number of channels than the layer's, since qnnpack would read beyond its end."""
        if channels != expected:
            raise InputError(f"{self.name}: an input with {channels} channels; the layer takes {expected}.")

    @abstractmethod
    def _pack(self) -> Any:
        """Pack the weight. The result is opaque: it cannot be copied or pickled."""

    def _weight(self) -> Any:
        """Return the packed weight, which is packed on first use."""

        def pack() -> Any:
            with engine_selected(self.engine):
                return self._pack()

        return self._cached("", pack)
