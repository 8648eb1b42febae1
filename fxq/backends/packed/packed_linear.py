"""Linear layers, sums and products in PyTorch's packed quantized kernels."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fxq.backends.kernel import PostOp, bounds
from fxq.backends.packed.packed_kernel import Finish, PackedKernel
from fxq.backends.packed.quantized_tensors import as_qint8, as_quint8, quantized
from fxq.backends.plain.binary import BinaryKernel
from fxq.backends.plain.converters import dense, dequantize
from fxq.quant.qparams import QParams


class PackedLinear(PackedKernel):
    """Linear layer over the last dimension: uint8 in, uint8 out, or float32 out if the engine supports it."""

    layer: ClassVar[str] = "linear layer"
    dims: ClassVar[tuple[int, ...]] = (0,)
    options: ClassVar[tuple[str, ...]] = ("x", "out", "post")

    def _pack(self) -> Any:
        return quantized.linear_prepack(as_qint8(self.weight.contiguous(), self.weight_scale, 0), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (..., in_features) -> (..., out_features), on `out`'s grid or float32."""
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        self._check(x.shape[-1], self.weight.shape[1])
        if self.out is None:
            return self._float(x)
        op = quantized.linear_relu if self._finish.relu else quantized.linear
        weight = self._weight()  # first, since it refuses tensors that are not plain
        return self._finish(op(as_quint8(x, *self._input), weight, *self._output))

    def _float(self, x: Tensor) -> Tensor:
        """Call the kernel with float32 output, which takes float32 and quantizes it to the same grid again."""
        op = quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y = op(dequantize(x, *self._input), *self._input, self._weight())
        return y if self.post is None else y.clamp_(*bounds(self.post))  # type: ignore[misc]


class _PackedOfTwo(BinaryKernel):
    """Binary kernel of PyTorch. The engine that is selected at the call may run it."""

    op: ClassVar[str]

    def __init__(self, a: QParams, b: QParams, out: QParams, post: PostOp | None = None) -> None:
        super().__init__(a, b, out, post)
        self._a, self._b, self._output, self._finish = (a.s, a.z), (b.s, b.z), (out.s, out.z), Finish(out, post)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """uint8, uint8, shapes that broadcast -> uint8."""
        op = getattr(quantized, self.op + ("_relu" if self._finish.relu else ""))
        return self._finish(op(as_quint8(dense(a), *self._a), as_quint8(dense(b), *self._b), *self._output))


class PackedAdd(_PackedOfTwo):
    """a + b, broadcast."""

    name: ClassVar[str] = "packed.add"
    op: ClassVar[str] = "add"


class PackedMul(_PackedOfTwo):
    """a * b, broadcast."""

    name: ClassVar[str] = "packed.mul"
    op: ClassVar[str] = "mul"
