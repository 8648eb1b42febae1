"""What integer kernels on plain tensors share: how they are described as data, what they refuse, how they finish."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fxq.errors import BackendError, InputError
from fxq.graph.bindable import Bindable, ModuleWatch, Seen
from fxq.quant.qparams import QParams
from fxq.quant.spec import fits_int16
from fxq.runtime.call_checks import OPAQUE

if TYPE_CHECKING:
    from typing_extensions import Self

    from fxq.backends.qdq_form import Form


@dataclass(frozen=True)
class Post:
    """An activation function that a kernel applies to its float result before it rounds.

    Attributes:
        name: "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "leaky_relu", "prelu" or "tanh".
        args: hardtanh: (low, high); leaky_relu: (slope,); otherwise empty.
        algorithm: gelu: "none" (exact) or "tanh"; otherwise empty.
    """

    name: str
    args: tuple[float, ...] = ()
    algorithm: str = ""


def pair(value: int | Sequence[int], dims: int = 2) -> tuple[int, ...]:
    """`value` once per spatial dimension."""
    return (value,) * dims if isinstance(value, int) else tuple(int(v) for v in value)


def encode(value: object) -> Any:
    """`value` as plain data: `QParams` and `Post` become dicts."""
    if isinstance(value, QParams):
        return {"scale": value.s, "zero_point": value.z, "qmin": value.qmin, "qmax": value.qmax}
    if isinstance(value, Post):
        return {"post": value.name, "args": list(value.args), "algorithm": value.algorithm}
    return value


def decode(value: Any) -> Any:
    """Inverse of `encode`; lists become tuples."""
    if isinstance(value, Mapping) and "scale" in value:
        return QParams.per_tensor(value["scale"], value["zero_point"], value["qmin"], value["qmax"])
    if isinstance(value, Mapping) and "post" in value:
        return Post(value["post"], tuple(value["args"]), value["algorithm"])
    return tuple(value) if isinstance(value, list) else value


class PackedTensors:
    """What a kernel has made of its tensors, which cannot be copied; it holds for as long as they are as they were.

    Attributes:
        seen: the tensors.
        about: type and shape of each.
        made: by key.
        of_sizes: what was made for sizes of inputs, by key; the last to come at the end.
    """

    def __init__(self, buffers: Mapping[str, Tensor | None]) -> None:
        self.seen = Seen(buffers)
        self.about = _about(buffers)
        self.made: dict[Hashable, Any] = {}
        self.of_sizes: OrderedDict[Hashable, Any] = OrderedDict()


_PLAIN = (Tensor, nn.Parameter, type(None))


def _about(buffers: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if t is None else (t.dtype, t.shape) for name, t in buffers.items()}


class Kernel(Bindable):
    """One integer kernel. `config()` and the buffers describe it completely.

    Its options are fixed. Its tensors may be edited, or replaced by others of the same type and shape: what was made of
    the old ones is made again.
    """

    name: ClassVar[str]
    pure: ClassVar[bool] = True
    """It only computes its value."""
    opaque: ClassVar[bool] = True
    """It takes plain tensors, and no tool can look into it."""
    returns_view: ClassVar[bool] = False
    """Its value may share memory with its input."""
    options: ClassVar[tuple[str, ...]] = ()
    sizes_kept: ClassVar[int] = 16
    """Of how many sizes of inputs it keeps what it has made for them."""
    inplace: bool | None = None
    """Whether it overwrites its second input, a residual; None: it has none."""
    form: Form | None = None
    """What it stands for, where it was made of the qdq graph."""
    _packed: PackedTensors | None = None

    @property
    def ends_in(self) -> tuple[Any, Mapping[str, Any]]:
        """As in `Bindable`: the last call of its q/dq form."""
        return self.form.ends_in if self.form is not None else super().ends_in

    def config(self) -> dict[str, Any]:
        """The options as plain data: numbers, strings, tuples, dicts, None."""
        return {name: encode(getattr(self, name)) for name in self.options}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `config()` and `dict(kernel.named_buffers())`."""
        return cls(**{name: decode(value) for name, value in config.items()}, **tensors)

    def _kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made once of the tensors, or is made now.

        Raises:
            InputError: a tensor has another type or shape than before.
            BackendError: this is no kernel any more, with the tensors that it has now.
        """
        packed = self._packed_now()
        if key not in packed.made:
            packed.made[key] = make()
        return packed.made[key]

    def _kept_for(self, size: Hashable, make: Callable[[], Any]) -> Any:
        """The same for inputs of one size: of `sizes_kept`, the one that has not come for longest goes."""
        of_sizes = self._packed_now().of_sizes
        found = of_sizes.get(size)
        if found is None:
            found = make()
        of_sizes[size] = found
        try:
            of_sizes.move_to_end(size)
            if len(of_sizes) > self.sizes_kept:
                of_sizes.popitem(last=False)
        except KeyError:  # another thread has dropped it
            pass
        return found

    def _packed_now(self) -> PackedTensors:
        packed = self._packed
        if packed is None or not packed.seen.holds():
            if any(type(tensor) not in _PLAIN for tensor in self._buffers.values()):
                raise InputError(f"{self.name}: a tool runs the model on tensors that are no plain ones. {OPAQUE}")
            own_memory(self._buffers)
            if packed is not None:
                self._check_edit(packed.about)
            packed = self.__dict__["_packed"] = PackedTensors(self._buffers)
        return packed

    def _check_edit(self, before: Mapping[str, Any]) -> None:
        """Refuse tensors that this kernel could not have been made with."""
        now = _about(self._buffers)
        for name, about in before.items():
            if now.get(name) != about:
                changed = f"{self.name}: {name} was {_worded(about)} and is {_worded(now.get(name))}"
                raise InputError(
                    f"{changed}. A kernel's tensors keep type and shape; for others make a kernel, "
                    "type(kernel).from_config(kernel.config(), tensors)."
                )
        self.check()

    def check(self) -> None:
        """Raise `BackendError` if this kernel could not be made on this machine with the tensors that it has now."""
        type(self).from_config(self.config(), dict(self.named_buffers(recurse=False)))

    def adopt(self, config: Mapping[str, Any]) -> None:
        """Take over the options of another kernel of its kind, which fits the same tensors.

        Raises:
            BackendError: there can be no such kernel.
        """
        other = type(self).from_config(config, dict(self.named_buffers(recurse=False)))
        own = nn.Module().__dict__.keys() | {"form"}
        self._changes()
        self.__dict__.update({name: value for name, value in other.__dict__.items() if name not in own})
        self._modules.update(other._modules)
        self.__dict__.pop("_packed", None)

    def tell(self, watch: ModuleWatch) -> None:
        """As in `Bindable`."""
        own_memory(self._buffers)
        super().tell(watch)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options and name != "inplace" and self.__dict__.get(name, value) is not value:
            raise InputError(
                f"{self.name}: {name} is fixed: what the kernel runs was made for it, and its neighbours in the graph "
                "rely on it. Make another kernel, type(kernel).from_config({**kernel.config(), ...}, tensors), and put "
                "it in the place of this one."
            )
        of_buffer = isinstance(value, nn.Parameter) and name in self._buffers
        super().__setattr__(name, value.detach() if of_buffer else value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_packed"}

    def extra_repr(self) -> str:
        """Shown by `print(kernel)`."""
        shown = ((name, getattr(self, name)) for name in self.options)
        return ", ".join(
            f"{name}=({v})" if isinstance(v, QParams) else f"{name}={v}" for name, v in shown if v is not None
        )


def own_memory(buffers: dict[str, Tensor | None]) -> None:
    """Copy the tensors that were made in inference mode: those do not count how often they are written to."""
    for name, tensor in buffers.items():
        if tensor is not None and tensor.is_inference():
            with torch.inference_mode(False):
                buffers[name] = tensor.clone()


def _worded(about: tuple[torch.dtype, torch.Size] | None) -> str:
    return "None" if about is None else f"{str(about[0]).removeprefix('torch.')} {list(about[1])}"


def activation_refused(role: str, qp: QParams | None) -> str | None:
    """Why a tensor with `qp` cannot enter or leave a kernel; None if it can, or if `qp` is not known yet."""
    if qp is None:
        return None
    if qp.axis is not None:
        return f"{role} is quantized per channel"
    if qp.dtype != torch.uint8:
        return f"{role} is {str(qp.dtype).removeprefix('torch.')}, the kernels take uint8"
    if not 0 <= qp.qmin < qp.qmax <= 255:
        return f"{role} has the grid {qp.qmin}..{qp.qmax}, outside of uint8"
    return None


def weight_refused(qp: QParams | None, axis: int) -> str | None:
    """Why a weight with `qp` cannot be used; `axis` is the axis of its output channels."""
    if qp is None:
        return None
    if qp.dtype != torch.int8:
        return f"the weight is {str(qp.dtype).removeprefix('torch.')}, the kernels take int8"
    if bool((qp.zero_point != 0).any()):
        return "the weight has a zero point other than 0, which the kernels ignore"
    if qp.axis not in (None, axis):
        return f"the weight is quantized along axis {qp.axis}, the kernels need axis {axis}"
    return None


def is_depthwise(shape: Sequence[int], groups: int) -> bool:
    """Whether a convolution with a weight of this shape is depthwise: a channel in and one out for each group."""
    return groups > 1 and shape[0] == groups and shape[1] == 1


def overflow_refused(x: QParams, weight: Tensor) -> str | None:
    """Why activations on the grid `x` and an int8 weight are too large for a kernel that adds pairs in int16."""
    low, high = weight.aminmax() if weight.numel() else (0, 0)
    largest = max(-int(low), int(high))
    if fits_int16(x.qmax, largest):
        return None
    return (
        f"the kernel adds pairs of products in int16 here, which activations up to {x.qmax} and weights up to "
        f"{largest} overflow; use 7 bits for one of them"
    )


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first reason that is not None."""
    return next((reason for reason in reasons if reason), None)


_BOUNDS = {"relu": (0.0, float("inf")), "relu6": (0.0, 6.0)}


def bounds(post: Post | None) -> tuple[float, float] | None:
    """The interval that `post` clamps to; None if it is not a clamp. No post at all clamps to everything."""
    if post is None:
        return float("-inf"), float("inf")
    if post.name == "hardtanh":
        return post.args[0], post.args[1]
    return _BOUNDS.get(post.name)


class WeightedKernel(Kernel):
    """A kernel with the buffers `weight` (int8), `weight_scale` (float32, 0-d or (C,)) and `bias` (float32 or None)."""

    channel_axis: ClassVar[int] = 0
    sums_bias: ClassVar[bool] = False
    """Whether the bias goes into the integer sums, as int32 with the scale of the products."""
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    x: QParams
    groups: int = 1

    def __init__(self, weight: Tensor, qparams: QParams, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous())  # oneDNN packs a transposed linear weight wrongly
        self.register_buffer("weight_scale", qparams.scale.detach().to(torch.float32))
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32, copy=True))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `config()` and `dict(kernel.named_buffers())`."""
        rest = dict(tensors)
        scale = rest.pop("weight_scale")
        axis = cls.channel_axis if scale.dim() else None
        qparams = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), -128, 127, torch.int8, axis)
        options = {name: decode(value) for name, value in config.items()}
        return cls(rest.pop("weight"), qparams, rest.pop("bias", None), **options, **rest)

    def check(self) -> None:
        """As in `Kernel`; weights may have been edited, so that sums are bounded again."""
        super().check()
        refuse(self.name, sums_refused(self))


def sums_refused(kernel: WeightedKernel) -> str | None:
    """Why sums of the kernel's products could leave int32 for inputs on its grid; None where they cannot.

    The kernels sum products with the integers of the input as they are, or less their zero point.
    """
    weight, x, axis = kernel.weight, kernel.x, kernel.channel_axis
    parts = weight.unflatten(0, (kernel.groups if axis else 1, -1)).movedim(1 + axis, 1).flatten(2)
    if not kernel.sums_bias and 128 * x.qmax * parts.shape[2] <= _INT32:
        return None  # whatever the weights: nearly all layers, without a copy of them in float64
    parts = parts.double()
    above, below = parts.clamp(min=0).sum(2), parts.clamp(max=0).sum(2).neg()  # (groups or 1, C)
    up, down = x.qmax - x.z, x.z - x.qmin
    shifted = torch.maximum(above * up + below * down, above * down + below * up)
    most = torch.maximum(torch.maximum(above, below) * x.qmax, shifted)
    if kernel.bias is not None and kernel.sums_bias:
        bias = kernel.bias.double().abs() / (kernel.weight_scale.double() * x.s)
        most = most + bias.reshape(most.shape if bias.numel() == most.numel() else (1, -1))
    largest = float(most.max()) if most.numel() else 0.0
    return f"its sums can reach {largest:.2g}, beyond int32 (2.1e+09)" if largest > _INT32 else None


_INT32 = 2**31 - 1


def numbers(qp: QParams | None) -> tuple[float, int]:
    """Scale and zero point as numbers: reading them from tensors takes microseconds."""
    return (1.0, 0) if qp is None else (qp.s, qp.z)


def padding_refused(
    padding: int | Sequence[int] | str, mode: str, kernel_size: Sequence[int] | None, dilation: int | Sequence[int]
) -> str | None:
    """Why a convolution with this padding cannot be run; the kernels pad with zeros, as much before as after."""
    if mode != "zeros":
        return f"pads with mode {mode!r}"
    if padding == "same" and kernel_size is not None:
        spread = [d * (k - 1) for k, d in zip(kernel_size, pair(dilation, len(kernel_size)), strict=True)]
        return "pads asymmetrically" if any(s % 2 for s in spread) else None
    if isinstance(padding, str) or kernel_size is None or isinstance(padding, int):
        return None
    return "pads asymmetrically" if len(padding) != len(kernel_size) else None


def slope_refused(slope: Tensor | None) -> str | None:
    """Why prelu with these slopes cannot be the larger, or the smaller, of y and slope * y in every channel."""
    if slope is None:
        return None
    if not bool(slope.isfinite().all()):
        return "prelu has slopes that are not finite"
    if bool((slope <= 1).all()) or bool((slope >= 1).all()):
        return None
    return "prelu has slopes above 1 in some channels and below 1 in others"


def post_refused(post: Post | None, known: tuple[str, ...], residual: bool) -> str | None:
    """Why `post` cannot be applied by a kernel that knows the activation functions `known`."""
    if post is None:
        return None
    if post.name not in known:
        return f"the kernel has no {post.name}"
    if residual and bounds(post) is None:
        return f"{post.name} after a residual"
    if post.name == "gelu" and post.algorithm not in ("none", "tanh"):
        return f"gelu with approximate={post.algorithm!r}"
    return None


def refuse(name: str, reason: str | None) -> None:
    """Raise `BackendError` if there is a reason."""
    if reason:
        raise BackendError(f"{name}: {reason}. Keep the layer in float or in q/dq form.")
