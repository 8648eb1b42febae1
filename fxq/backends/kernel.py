"""`Kernel`: base class of integer kernels, which are described by plain data and pack their tensors on first use."""

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

    from fxq.backends.qdq_form import QdqForm


@dataclass(frozen=True)
class PostOp:
    """Activation function that a kernel applies to its float result before it rounds (a post-op, as in oneDNN).

    Attributes:
        name: name of the op: one that `OpTraits.fused_after` allows, or one whose slopes are a tensor of the kernel.
        args: (low, high) of hardtanh, (slope,) of an op whose slope is an option, otherwise empty.
        algorithm: "none" (exact) or "tanh" of gelu, otherwise empty.
    """

    name: str
    args: tuple[float, ...] = ()
    algorithm: str = ""


def pair(value: int | Sequence[int], dims: int = 2) -> tuple[int, ...]:
    """Return `value` as a tuple with one number per spatial dimension."""
    return (value,) * dims if isinstance(value, int) else tuple(int(v) for v in value)


def encode(value: object) -> Any:
    """Return `value` as plain data: `QParams` and `PostOp` become dicts."""
    if isinstance(value, QParams):
        return {"scale": value.s, "zero_point": value.z, "qmin": value.qmin, "qmax": value.qmax}
    if isinstance(value, PostOp):
        return {"post": value.name, "args": list(value.args), "algorithm": value.algorithm}
    return value


def decode(value: Any) -> Any:
    """Invert `encode`. Lists become tuples."""
    if isinstance(value, Mapping) and "zero_point" in value:
        return QParams.per_tensor(value["scale"], value["zero_point"], value["qmin"], value["qmax"])
    if isinstance(value, Mapping) and "algorithm" in value:
        return PostOp(value["post"], tuple(value["args"]), value["algorithm"])
    return tuple(value) if isinstance(value, list) else value


class DerivedValues:
    """Values that a kernel has computed from its tensors, such as packed weights.

    They are valid until a tensor changes, and are neither copied nor saved with the kernel.

    Attributes:
        seen: the tensors as they were when the values were computed.
        signatures: dtype and shape of each tensor, by name; None for a tensor that is None.
        values: the values, by key.
        values_by_size: the values for input sizes, by key, least recently used first.
    """

    def __init__(self, buffers: Mapping[str, Tensor | None]) -> None:
        self.seen = ModuleSnapshot(buffers)
        self.signatures = _signatures(buffers)
        self.values: dict[Hashable, Any] = {}
        self.values_by_size: OrderedDict[Hashable, Any] = OrderedDict()


_KERNELS: dict[str, type[Kernel]] = {}
"""Kernel classes by name, for `by_name.kernel_named`."""
_PLAIN = (Tensor, nn.Parameter, type(None))


def _signatures(buffers: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if t is None else (t.dtype, t.shape) for name, t in buffers.items()}


class Kernel(Bindable):
    """Base class of integer kernels. `config()` and the buffers describe a kernel completely.

    The options of a kernel are fixed. Its tensors may be edited, or replaced by tensors of the same dtype and shape;
    values that were computed from the old tensors, such as packed weights, are computed again.

    Attributes:
        name: unique name, which files and the ledger use.
        options: names of the attributes that `config()` holds. The options and the buffers are the parameters of the
            class.
        pure: whether a call has no side effects.
        opaque: whether it needs plain tensors, so that tracers and other tools cannot look inside.
        returns_view: whether its result may share memory with its input.
        max_cached_sizes: number of input sizes whose derived values it caches.
        inplace: whether it overwrites its second input, a residual; None: it has no residual.
        reads: indices of the inputs of its region that it is called with, in order; None: all of them.
        form: the q/dq form that it replaces; None if it was not made from a qdq graph.
        note: remark of the backend on why it chose this kernel, for the ledger; empty if there is none.
    """

    name: ClassVar[str]
    pure: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    returns_view: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()
    max_cached_sizes: ClassVar[int] = 16
    inplace: bool | None = None
    reads: tuple[int, ...] | None = None
    form: QdqForm | None = None
    note: str = ""
    _derived: DerivedValues | None = None

    def last_call(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        return self.form.last_call(part) if self.form is not None else super().last_call(part)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a class that defines `name`. Raises `BackendError` if another class has that name."""
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            return
        path = f"{cls.__module__}.{cls.__qualname__}"
        registered = _KERNELS.setdefault(cls.name, cls)
        registered_path = f"{registered.__module__}.{registered.__qualname__}"
        if registered_path != path:
            raise BackendError(
                f"two kernels are called {cls.name!r}: {registered_path} and {path}. Rename one of them, since files "
                "identify kernels by name."
            )
        _KERNELS[cls.name] = cls  # a notebook cell that runs again defines its class again

    @property
    def described(self) -> type[Kernel]:
        """Class of the kernel that `config()` and the tensors describe. A `FallbackKernel` describes another class."""
        return type(self)

    @classmethod
    def defined_as(cls) -> Any:
        """Object whose import path identifies this kernel: the class, or the user's function that it calls."""
        return cls

    @classmethod
    def is_ours(cls) -> bool:
        """Whether its code is part of fxq, whose kernels change no tensor but a residual (`inplace`)."""
        return str(cls.defined_as().__module__).partition(".")[0] == "fxq"

    def config(self) -> dict[str, Any]:
        """Return the options as plain data: numbers, strings, tuples, dicts, None."""
        return {name: encode(getattr(self, name)) for name in self.options}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Make a kernel from `config()` and `dict(kernel.named_buffers())`."""
        return cls(**{name: decode(value) for name, value in config.items()}, **tensors)

    def at_other_sizes(self, *inputs: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Inputs of further sizes to verify the kernel on; none if its code does not depend on the input size."""
        return ()

    def rounded_result(self, *inputs: Tensor) -> Tensor | None:
        """Result of a kernel that rounds floats to less than float32, computed by other code: float32, as of `forward`.

        Comparisons with the q/dq form allow the difference between this and the result in float32. None, the default,
        if the kernel does not round floats for these inputs.
        """
        return None

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached value of `key`, or compute it with `make` if a tensor has changed since.

        Raises:
            InputError: a tensor has another dtype or shape than before.
            BackendError: the kernel cannot run with the tensors that it has now.
        """
        derived = self._derived_now()
        if key not in derived.values:
            derived.values[key] = make()
        return derived.values[key]

    def _cached_for_size(self, size: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached value of an input size, or compute it: an LRU cache of `max_cached_sizes` values."""
        values_by_size = self._derived_now().values_by_size
        value = values_by_size.get(size)
        if value is None:
            value = make()
        values_by_size[size] = value
        try:
            values_by_size.move_to_end(size)
            if len(values_by_size) > self.max_cached_sizes:
                values_by_size.popitem(last=False)
        except KeyError:  # another thread has evicted it
            pass
        return value

    def _derived_now(self) -> DerivedValues:
        derived = self._derived
        if derived is None or not derived.seen.is_unchanged():
            if any(type(tensor) not in _PLAIN for tensor in self._buffers.values()):
                raise InputError(f"{self.name}: a tool runs the model on tensors that are not plain. {OPAQUE}")
            own_memory(self._buffers)
            if derived is not None:
                self._check_edit(derived.signatures)
            derived = self.__dict__["_derived"] = DerivedValues(self._buffers)
        return derived

    def _check_edit(self, old_signatures: Mapping[str, Any]) -> None:
        """Refuse edited tensors with which this kernel could not have been made."""
        signatures = _signatures(self._buffers)
        for name, old in old_signatures.items():
            if signatures.get(name) != old:
                raise InputError(
                    f"{self.name}: {name} was {_signature_text(old)} and is {_signature_text(signatures.get(name))}. "
                    "The dtypes and shapes of a kernel's tensors are fixed. To change them, make another kernel: "
                    "type(kernel).from_config(kernel.config(), tensors)."
                )
        self.check()

    def check(self) -> None:
        """Raise `BackendError` if this kernel could not be made on this machine with its current tensors."""
        type(self).from_config(self.config(), dict(self.named_buffers(recurse=False)))

    def adopt(self, config: Mapping[str, Any]) -> None:
        """Replace the options by those of `config`. The tensors stay.

        Raises:
            BackendError: no kernel can have these options with these tensors.
        """
        template = type(self).from_config(config, dict(self.named_buffers(recurse=False)))
        keep = nn.Module().__dict__.keys() | {"form", "reads"}
        self._notify_watches()
        self.__dict__.update({name: value for name, value in template.__dict__.items() if name not in keep})
        self._modules.update(template._modules)
        self.__dict__.pop("_derived", None)

    def notify(self, watch: ModuleWatch) -> None:
        own_memory(self._buffers)
        super().notify(watch)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options and name != "inplace" and self.__dict__.get(name, value) is not value:
            raise InputError(
                f"{self.name}: {name} is fixed: the kernel was compiled for it, and its neighbours in the graph rely "
                "on it. Make another kernel, type(kernel).from_config({**kernel.config(), ...}, tensors), and replace "
                "this one by it."
            )
        replaces_buffer = isinstance(value, nn.Parameter) and name in self._buffers
        super().__setattr__(name, value.detach() if replaces_buffer else value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_derived"}

    def extra_repr(self) -> str:
        """Options as `print(kernel)` shows them."""
        shown = ((name, getattr(self, name)) for name in self.options)
        return ", ".join(
            f"{name}=({v})" if isinstance(v, QParams) else f"{name}={v}" for name, v in shown if v is not None
        )


def known_kernels() -> Mapping[str, type[Kernel]]:
    """Kernel classes of all modules imported so far, by name."""
    return _KERNELS


def own_memory(buffers: dict[str, Tensor | None]) -> None:
    """Replace tensors made in inference mode by copies, since they have no version counter to detect edits by."""
    for name, tensor in buffers.items():
        if tensor is not None and tensor.is_inference():
            with torch.inference_mode(False):
                buffers[name] = tensor.clone()


def _signature_text(signature: tuple[torch.dtype, torch.Size] | None) -> str:
    return "None" if signature is None else f"{str(signature[0]).removeprefix('torch.')} {list(signature[1])}"


def activation_refused(role: str, qp: QParams | None) -> str | None:
    """Why a kernel cannot read or emit a tensor on the grid `qp`; None if it can, or if `qp` is not known yet."""
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
    """Return the first reason that is not None."""
    return next((reason for reason in reasons if reason), None)


_BOUNDS = {"relu": (0.0, float("inf")), "relu6": (0.0, 6.0)}


def bounds(post: PostOp | None) -> tuple[float, float] | None:
    """Interval that `post` clamps to; None if it is not a clamp. Without a `post`, all real numbers."""
    if post is None:
        return float("-inf"), float("inf")
    if post.name == "hardtanh":
        return post.args[0], post.args[1]
    return _BOUNDS.get(post.name)


def scale_and_zero_point(qp: QParams | None) -> tuple[float, int]:
    """Scale and zero point as Python numbers, so that a kernel reads their tensors only once; (1.0, 0) for None."""
    return (1.0, 0) if qp is None else (qp.s, qp.z)


def refuse(name: str, *reasons: str | None) -> None:
    """Raise `BackendError` for the first reason that is not None."""
    reason = first_reason(reasons)
    if reason:
        raise BackendError(f"{name}: {reason}. Keep the layer in float or in q/dq form.")
