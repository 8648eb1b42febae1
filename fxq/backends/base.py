"""`Backend`: the interface of everything that runs units on integers and makes kernels of them."""

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
        ops: number of ops, counted from the first, that one kernel runs. 0: none. Fewer than the unit has: the kernel
            emits float, and the remaining ops run in float.
        reason: why the kernel does not run all of them, or why fewer may be faster.
        fewer: number of ops that a second kernel runs, if either of the two may be the faster one; their prices
            decide. 0: there is no second kernel.
        emits_float: whether the kernel can emit float. If not, its result is rounded to a grid of its own, even if
            only float ops read it.
        emits_float_last: whether a kernel with `emits_float=False` can emit float after all if its result reaches the
            model's output without being quantized.
    """

    ops: int
    reason: str = ""
    fewer: int = 0
    emits_float: bool = True
    emits_float_last: bool = False


@dataclass(frozen=True)
class FaultyKernel:
    """Kernel of PyTorch that the backend does not call, because its results are wrong on some machines.

    Attributes:
        kernel: its name, and the inputs for which it is wrong.
        replacement: what the backend does instead.
        is_correct: function that calls the kernel and checks the result. It must not be able to crash the process.
    """

    kernel: str
    replacement: str
    is_correct: Callable[[], bool]


@dataclass(frozen=True)
class Prices:
    """Prices of a qdq graph that a backend has measured itself.

    Attributes:
        ops: prices of units and ops, in float and on integers. Nodes that are left out are timed alone. A unit that is
            listed is not opened to find out whether fewer of its ops are faster (`Support.fewer`).
        conversion: microseconds per element to quantize or dequantize a value between units.
    """

    ops: Mapping[fx.Node, Cost]
    conversion: float = 0.0


class Backend(ABC):
    """Interface of a backend, which runs parts of a graph in integer kernels.

    Three passes ask a backend. `annotate` calls `supports`: which ops it can run, and if not, why. `fallback` calls
    `prices`: their costs, if the backend measures them itself. `lower` calls `regions`, which cuts the qdq graph into
    units or larger regions, and then `lower`, which makes the kernel of each region. Regions without a kernel stay in
    qdq form, which runs anywhere. A backend with a table of kernels, such as x86, derives from
    `fxq.backends.table.lowering.RowBackend`.

    Attributes:
        name: name of the backend. A saved recipe names a class of your own by its import path.
        devices: types of the devices that it runs on; empty: any.
        has_kernels: whether it runs some ops faster on integers than in float. If not, prices are meaningless.
        notes_specs: whether the ledger has a note on each spec that `config` replaces; False: only on specs that differ
            from those of the preset, for a backend that replaces all.

    Example:
        A backend that runs each linear layer in one kernel, which computes in float. `calls` are the ops of a unit, in
        order; a region of a unit has them as `region.calls`.

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
    notes_specs: ClassVar[bool] = True

    @abstractmethod
    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """Return how many of the ops `calls` of the unit `node` have an integer kernel with `config`."""

    @abstractmethod
    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """Return the kernel of a region of the qdq graph, or None to keep the region in qdq form.

        The kernel is called with the values of `region.inputs`. It returns the value of the region's output, or a
        tuple if there are several.

        Raises:
            BackendError: no kernel runs the region; the ledger gives the message as the reason.
        """

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """Regions to make kernels of, in the order of the graph. By default every unit alone, then every conversion.

        The next region is requested after the kernel of the previous one has been inserted into the graph. An engine
        that runs larger regions returns `fxq.extend.connected_regions(gm, takes)`.
        """
        return unit_regions(gm)

    def prices(self, gm: fx.GraphModule, example: Batch) -> Prices | None:
        """Return prices of the ops of the qdq graph, in float and on integers, measured on an example input.

        `fallback` calls it before it times anything, and again after it has opened units whose kernel runs only their
        first ops. None, the default: each unit is timed alone, as the kernel that `lower` makes of it, and in float.
        """
        return None

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: Calls) -> QuantConfig:
        """Return the config that this backend uses for a unit of `calls` if a recipe asks for `config`.

        A backend may return per-tensor weights if its kernel takes no per-channel scales, or is slower with them. `gm`
        holds the values of constant weights, in case they decide.
        """
        return config

    def adds_in_int16(self, calls: Calls) -> bool:
        """Whether the kernel of a unit of `calls` adds pairs of products in int16 on this machine.

        Activations or weights of such a unit use 7 bits, so that the sums cannot saturate (`Recipe.reduce_range`).
        """
        return False

    def code(self, calls: Calls) -> str:
        """Hash of the code outside of fxq that runs a unit of `calls`; empty if there is none.

        Cached prices are valid as long as it stays the same.
        """
        return "" if type(self).__module__.startswith("fxq.") else digest_of(type(self))

    def fuses(self, calls: Calls) -> bool:
        """Whether the ops `calls`, which a fusion pattern matches, may become one unit."""
        return True

    def faulty_kernels(self) -> tuple[FaultyKernel, ...]:
        """Kernels of PyTorch that it avoids. `fxq.doctor` tries and reports them."""
        return ()

    def available(self) -> str | None:
        """Why this machine cannot run the backend, and the remedy; None if it can."""
        return None

    def drawback(self) -> str | None:
        """Drawback of the backend on this machine, shown once as a warning when it is chosen; None: there is none."""
        return None


def support_of(backend: Backend, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
    """Return the checked result of `Backend.supports` for a unit.

    Raises:
        InputError: the backend returns no `Support`, or one of more ops than the unit has.
    """
    support: Any = backend.supports(gm, node, calls, config)
    if not isinstance(support, Support) or not 0 <= support.ops <= len(calls):
        raise InputError(
            f"supports() of the backend {backend.name!r} must return a fxq.extend.Support of 0 to {len(calls)} ops for "
            f"%{node.name}; it returned {support!r}."
        )
    return support
