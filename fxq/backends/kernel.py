"""What integer kernels on plain tensors share: they are described as data, and pack their tensors on first use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fxq.errors import BackendError, InputError
from fxq.graph.bindable import Bindable, ModuleSnapshot, ModuleWatch
from fxq.quant.qparams import QParams
from fxq.runtime.call_checks import OPAQUE

if TYPE_CHECKING:
    from typing_extensions import Self

    from fxq.backends.qdq_form import Form


@dataclass(frozen=True)
class Post:
    """An activation function that a kernel applies to its float result before it rounds.

    Attributes:
        name: of the op: see `OpTraits.fused_after`, and "prelu", whose slopes are a tensor of the kernel.
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
    if isinstance(value, Mapping) and "zero_point" in value:
        return QParams.per_tensor(value["scale"], value["zero_point"], value["qmin"], value["qmax"])
    if isinstance(value, Mapping) and "algorithm" in value:
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
        self.seen = ModuleSnapshot(buffers)
        self.about = _about(buffers)
        self.made: dict[Hashable, Any] = {}
        self.of_sizes: OrderedDict[Hashable, Any] = OrderedDict()


_KERNELS: dict[str, type[Kernel]] = {}
"""The kernels by name, for `by_name.kernel_named`."""
_PLAIN = (Tensor, nn.Parameter, type(None))


def _about(buffers: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if t is None else (t.dtype, t.shape) for name, t in buffers.items()}


class Kernel(Bindable):
    """One integer kernel. `config()` and the buffers describe it completely.

    Its options are fixed. Its tensors may be edited, or replaced by others of the same type and shape: what was made of
    the old ones is made again.

    Attributes:
        name: what files and the ledger call it; no two kernels have the same.
        options: the names of the attributes that `config()` holds: parameters of the class, as its tensors are.
        pure: whether it only computes its value.
        opaque: whether it takes plain tensors, and no tool can look into it.
        returns_view: whether its value may share memory with its input.
        sizes_kept: of how many sizes of inputs it keeps what it has made for them.
        inplace: whether it overwrites its second input, a residual; None: it has none.
        reads: which inputs of its region it is called with, in order; None: with all of them.
        form: what it stands for, where it was made of the qdq graph.
    """

    name: ClassVar[str]
    pure: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    returns_view: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()
    sizes_kept: ClassVar[int] = 16
    inplace: bool | None = None
    reads: tuple[int, ...] | None = None
    form: Form | None = None
    _packed: PackedTensors | None = None

    def last_call(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        return self.form.last_call(part) if self.form is not None else super().last_call(part)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a class that has a name of its own. Raises `BackendError` when another class has that name."""
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            return
        path = f"{cls.__module__}.{cls.__qualname__}"
        known = _KERNELS.setdefault(cls.name, cls)
        if f"{known.__module__}.{known.__qualname__}" != path:
            raise BackendError(
                f"two kernels are called {cls.name!r}: {known.__module__}.{known.__qualname__} and {path}. Give one of "
                "them another name: files say by it which kernel they hold."
            )
        _KERNELS[cls.name] = cls  # a cell of a notebook that runs again makes its class again

    @property
    def described(self) -> type[Kernel]:
        """The class of the kernel that `config()` and the tensors describe: its own."""
        return type(self)

    @classmethod
    def defined_as(cls) -> Any:
        """The object that an import path names to define this kernel: the class, or the function that it calls."""
        return cls

    def config(self) -> dict[str, Any]:
        """The options as plain data: numbers, strings, tuples, dicts, None."""
        return {name: encode(getattr(self, name)) for name in self.options}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `config()` and `dict(kernel.named_buffers())`."""
        return cls(**{name: decode(value) for name, value in config.items()}, **tensors)

    def at_other_sizes(self, *inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Inputs of other sizes to verify the kernel on; none if its code does not depend on the size of inputs."""
        return ()

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
        if packed is None or not packed.seen.is_unchanged():
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
        own = nn.Module().__dict__.keys() | {"form", "reads"}
        self._notify_watches()
        self.__dict__.update({name: value for name, value in other.__dict__.items() if name not in own})
        self._modules.update(other._modules)
        self.__dict__.pop("_packed", None)

    def notify(self, watch: ModuleWatch) -> None:
        own_memory(self._buffers)
        super().notify(watch)

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


def known_kernels() -> Mapping[str, type[Kernel]]:
    """The kernels whose modules were imported, by name."""
    return _KERNELS


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


def numbers(qp: QParams | None) -> tuple[float, int]:
    """Scale and zero point as numbers, to be read from their tensors once."""
    return (1.0, 0) if qp is None else (qp.s, qp.z)


def refuse(name: str, *reasons: str | None) -> None:
    """Raise `BackendError` for the first reason that is not None."""
    reason = first_reason(reasons)
    if reason:
        raise BackendError(f"{name}: {reason}. Keep the layer in float or in q/dq form.")
