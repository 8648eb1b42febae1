"""What a backend is: it says which units it can run, and lowers them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxq.backends.kernel import Kernel
from fxq.common.data import Batch
from fxq.common.source import digest_of
from fxq.errors import InputError
from fxq.graph.info import Cost
from fxq.graph.region import Region, unit_regions
from fxq.graph.unit import Calls
from fxq.quant.spec import QuantConfig


@dataclass(frozen=True)
class Support:
    """How much of a unit a backend can run on integers.

    Attributes:
        ops: how many of its ops, from the first on, one kernel runs. 0: none. Fewer than the unit has: the kernel
            emits float, and the remaining ops run in float.
        reason: why not all of them, or why fewer may be better.
        fewer: how many of its ops another kernel runs, where neither of the two is always the faster one: what they
            are measured to take decides. 0: there is no other.
        emits_float: whether the kernel can emit float. If not, its result is rounded to a grid of its own where nobody
            reads integers from it.
        emits_float_last: whether a kernel that does not emit float otherwise does so for values that reach the model's
            output without being quantized.
    """

    ops: int
    reason: str = ""
    fewer: int = 0
    emits_float: bool = True
    emits_float_last: bool = False


@dataclass(frozen=True)
class Trap:
    """A kernel of PyTorch that the backend does not call, because it is wrong on some machines.

    Attributes:
        kernel: its name, and where it is wrong.
        instead: what the backend does.
        is_right: calls it, and compares. It must not be able to end the process.
    """

    kernel: str
    instead: str
    is_right: Callable[[], bool]


@dataclass(frozen=True)
class Prices:
    """What a backend has measured of a qdq graph itself.

    Attributes:
        ops: units and ops of the graph, in float and on integers. The others are timed alone. A unit that stands here
            is not taken apart to find out whether fewer of its ops are faster (`Support.fewer`).
        conversion: microseconds to quantize or dequantize a value between them, for each of its elements.
    """

    ops: Mapping[fx.Node, Cost]
    conversion: float = 0.0


class Backend(ABC):
    """An engine that runs integer kernels.

    A backend is asked three times. In `annotate`, `supports` says what it can run, and why not. In `fallback`, `prices`
    says what that costs, for a backend that measures itself. In `lower`, it cuts the qdq graph into `regions`, units
    alone or whole parts of the graph, and `lower` makes the kernel of each. What it leaves stays in qdq form, which
    runs everywhere. One that has a table of kernels, as x86, is extended by `fxq.backends.table.lowering.RowBackend`.

    Attributes:
        name: of the backend; a class of your own stands in a saved recipe by its import path.
        devices: types of the devices that it runs on; empty: any.
        has_kernels: whether it runs integers faster than float somewhere, so that prices mean something.

    Example:
        Linear layers as one kernel each, which computes in float. `calls` are the ops of a unit, in order; its region
        has them, too.

        >>> class OnlyLinear(fxq.extend.Backend):
        ...     name = "only_linear"
        ...
        ...     def supports(self, gm, node, calls, config):
        ...         fits = calls[0].op.name == "linear"
        ...         return fxq.extend.Support(1) if fits else fxq.extend.Support(0, "only_linear runs linear layers")
        ...
        ...     def lower(self, gm, region):
        ...         return fxq.extend.RegionKernel.of(gm, region) if region.calls[0].op.name == "linear" else None
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ()
    has_kernels: ClassVar[bool] = True

    @abstractmethod
    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """How much of the unit `node`, which runs `calls`, has an integer kernel here, with `config`."""

    @abstractmethod
    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """The kernel of a region of the qdq graph; None: it stays as it stands, without a reason.

        The kernel is called with the values of `region.inputs` and returns that of its output; of several outputs, a
        tuple.

        Raises:
            BackendError: no kernel runs the region; the message becomes the reason that its ops give.
        """

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """What kernels are to be made of, in the order of the graph: every unit alone, then every conversion.

        The next one is asked for when the kernel of the one before stands in the graph. An engine that runs more at
        once returns `fxq.extend.connected_regions(gm, takes)`.
        """
        return unit_regions(gm)

    def prices(self, gm: fx.GraphModule, example: Batch) -> Prices | None:
        """What the ops of the qdq graph cost either way, where the backend measures that itself on an example input.

        It is asked before anything is timed, and again where units of which it runs the first ops alone were opened.
        None: every unit is timed alone, as the kernel that `lower` makes of it, and in float.
        """
        return None

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: Calls) -> QuantConfig:
        """The config that this backend uses for a unit of `calls` where a recipe asks for `config`.

        One scale for a whole weight where the kernel takes no more, or is slower with more: `gm` has the values of
        constant weights, by which that may be decided.
        """
        return config

    def adds_in_int16(self, calls: Calls) -> bool:
        """Whether the kernel of a unit of `calls` adds pairs of products in int16 on this machine.

        Then activations or weights of such a unit give up a bit; the recipe says which (`Recipe.reduce_range`).
        """
        return False

    def code(self, calls: Calls) -> str:
        """A hash of the code outside of fxq that runs a unit of `calls`: when it changes, so do prices. Else empty."""
        return "" if type(self).__module__.startswith("fxq.") else digest_of(type(self))

    def fuses(self, calls: Calls) -> bool:
        """Whether ops that a fusion pattern joins may become one unit."""
        return True

    def traps(self) -> tuple[Trap, ...]:
        """Kernels that it leaves alone, for `fxq.doctor`."""
        return ()

    def available(self) -> str | None:
        """Why this machine cannot run the backend, and what to do; None if it can."""
        return None

    def drawback(self) -> str | None:
        """What is worse on this machine than on others; None: nothing. Who chooses the backend is warned once."""
        return None


def support_of(backend: Backend, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
    """What a backend says of a unit (see `Backend.supports`).

    Raises:
        InputError: it says something else.
    """
    found: Any = backend.supports(gm, node, calls, config)
    if not isinstance(found, Support) or not 0 <= found.ops <= len(calls):
        raise InputError(
            f"supports of the backend {backend.name!r} returns a fxq.extend.Support of 0 to {len(calls)} ops for "
            f"%{node.name}, not {found!r}."
        )
    return found
