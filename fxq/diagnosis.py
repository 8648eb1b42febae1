"""`fxq.doctor`: which layers each backend runs on integers on this machine, whether correctly, and how fast."""

from __future__ import annotations

import platform
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.text import Text
from torch import Tensor, nn

from fxq.api import quantize
from fxq.backends import by_name as backends
from fxq.backends import cpu
from fxq.backends.by_name import FaultyKernel
from fxq.backends.loops.code import compiler
from fxq.common.cpus import is_contended, usable_cpus
from fxq.common.progress import progress_bar
from fxq.common.timed_calls import threads_set_to
from fxq.cost import price_file as prices
from fxq.cost.cache import measure, read_rounds
from fxq.display.printed import Printed
from fxq.display.tables import Column, Part, Table, line, row, text
from fxq.errors import BackendError, FxqError, words_of
from fxq.recipe.recipe import Recipe


@dataclass(frozen=True)
class Probe:
    """A layer to try on every backend.

    Attributes:
        name: name in the table.
        make: function that creates the layer, with random weights.
        shapes: shapes of its inputs.
    """

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]


class _Binary(nn.Module):
    """a + b or a * b of the outputs of two layers, since converting the inputs of a lone sum does not pay."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head, self.op = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), op

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 16, H, W) to (N, 16, H, W)."""
        return self.head(self.op(self.a(x), self.b(x)))


def _relu(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU())


PROBES: tuple[Probe, ...] = (
    Probe("conv2d 3x3, 64 channels", lambda: _relu(nn.Conv2d(64, 64, 3, padding=1)), ((1, 64, 28, 28),)),
    Probe("conv2d 3x3, 4x4 pixels", lambda: _relu(nn.Conv2d(16, 16, 3, padding=1)), ((1, 16, 4, 4),)),
    Probe("conv2d 1x1, 96 channels", lambda: nn.Conv2d(96, 96, 1), ((1, 96, 28, 28),)),
    Probe("conv2d depthwise 3x3", lambda: _relu(nn.Conv2d(64, 64, 3, padding=1, groups=64)), ((1, 64, 28, 28),)),
    Probe("conv2d, 3 groups of 35", lambda: nn.Conv2d(9, 105, 3, groups=3), ((2, 9, 9, 9),)),
    Probe("conv2d into one column", lambda: nn.Conv2d(16, 16, 3, stride=2), ((2, 16, 9, 3),)),
    Probe("conv2d padded past its kernel", lambda: nn.Conv2d(8, 16, 2, padding=3), ((2, 8, 6, 6),)),
    Probe("conv1d", lambda: nn.Conv1d(16, 32, 5, padding=2), ((2, 16, 40),)),
    Probe("conv_transpose2d 2x2 by 2", lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), ((2, 32, 14, 14),)),
    Probe(
        "conv_transpose2d 3x3 by 2",
        lambda: nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
        ((2, 32, 14, 14),),
    ),
    Probe("linear, 768 to 768, 1 row", lambda: nn.Linear(768, 768), ((1, 768),)),
    Probe("linear, 768 to 768, 64 rows", lambda: nn.Linear(768, 768), ((64, 768),)),
    Probe("linear, 16 to 16", lambda: nn.Linear(16, 16), ((2, 16),)),
    Probe("sum", lambda: _Binary(torch.add), ((2, 16, 14, 14),)),
    Probe("product", lambda: _Binary(torch.mul), ((2, 16, 14, 14),)),
    Probe("prelu", lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.PReLU(16), nn.Conv2d(16, 16, 3)), ((2, 16, 14, 14),)),
    Probe(
        "max_pool2d",
        lambda: nn.Sequential(nn.Conv2d(16, 16, 1), nn.MaxPool2d(3, 2), nn.Conv2d(16, 16, 1)),
        ((2, 16, 15, 15),),
    ),
)
"""Common layers, and shapes for which kernels of PyTorch have been wrong. Zero points are nonzero, and values reach
both ends of the grid."""


@dataclass(frozen=True)
class LayerCheck:
    """Result of one backend for one probe.

    Attributes:
        backend: name of the backend.
        probe: name of the layer.
        verdict: "right"; "wrong": verification replaces such a kernel by float ops; "part": right, but partly in float;
            "float": no kernel; "avoided": a kernel of PyTorch that is wrong on this machine and that fxq does not call.
        kernels: names of the kernels that ran.
        int8_us, float_us: microseconds of CPU time of the quantized and the float layer, on one thread, with the
            conversions of input and output; None if it did not run.
        why: description of the error, or reason why there is no kernel.
    """

    backend: str
    probe: str
    verdict: str
    kernels: tuple[str, ...] = ()
    int8_us: float | None = None
    float_us: float | None = None
    why: str = ""


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """Result of `fxq.doctor`. `print` shows it as tables.

    Attributes:
        machine: facts about the machine: CPU, instruction sets, threads, versions, and the file of measured prices.
        busy: whether other programs or a cgroup quota preempted this process while layers were timed.
        rows: one `LayerCheck` per backend and probe.
        auto: the backend that `backend="auto"` selects.
        why: reason for that selection.
    """

    machine: dict[str, str]
    rows: tuple[LayerCheck, ...]
    auto: str
    why: str
    busy: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)

    def _short(self) -> str:
        return f"{len(self.rows)} layers tried, auto is {self.auto}"

    def _parts(self) -> list[Part]:
        machine = Table((Column(), Column(give="fold")), [row(text(k, "quiet"), v) for k, v in self.machine.items()])
        auto = line('backend="auto" is ', text(self.auto, "strong"), f": {self.why}")
        times = "Times are CPU time, on one thread." + (f" {BUSY}" if self.busy else "")
        return [machine, line(), Table(_COLUMNS, [_cells(check) for check in self.rows]), line(times), line(), auto]


BUSY = "The machine was busy: with shared caches and cores, int8 and float may take up to twice as long."


_COLUMNS = (
    Column("backend"),
    Column("layer"),
    Column("int8"),
    Column("kernels", give="fold", drop=1),
    Column("int8 us", "right"),
    Column("float us", "right"),
    Column("why", give="fold"),
)
_LOOKS = {"right": "added", "wrong": "removed", "part": "changed", "avoided": "rewired"}


def _cells(check: LayerCheck) -> list[Text]:
    verdict = text(check.verdict, _LOOKS.get(check.verdict, "float"))
    kernels = text(textwrap.fill(", ".join(check.kernels), 30), breaks=True)
    why = text(textwrap.fill(check.why, 50), breaks=True)
    return row(check.backend, check.probe, verdict, kernels, _us(check.int8_us), _us(check.float_us), why)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def doctor(names: Sequence[str] | None = None, *, progress: bool | None = None) -> Diagnosis:
    """Try every backend on common layers: which of them it runs on integers, whether correctly, and how fast.

    Each layer runs through the whole pipeline, so the result is what `fxq.quantize` does on this machine. Kernels that
    could crash the process are not called. It takes a few seconds.

    Args:
        names: names of the backends to try. Default: all backends, also those of other packages, except "reference" and
            "tensorrt", which have no kernels.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.

    Returns:
        A table with a row per backend and layer, facts about the machine, and the backend that "auto" selects.

    Raises:
        BackendError: a name is unknown.

    Example:
        >>> diagnosis = doctor(["reference"])
        >>> diagnosis.rows[0].backend, diagnosis.rows[0].verdict
        ('reference', 'right')
        >>> diagnosis.auto in ("x86", "fbgemm", "qnnpack", "reference")
        True
    """
    others = [backend.name for backend in backends.installed() if not backend.refused]
    chosen = tuple(names) if names is not None else (*backends.names_with_kernels(), *others)
    with warnings.catch_warnings(), progress_bar("probing kernels", len(chosen) * len(PROBES), progress) as advance:
        warnings.simplefilter("ignore")  # the rows report wrong kernels
        busy = is_contended()
        rows = [row for name in chosen for row in _probe_backend(name, advance)]
        auto, why = _auto()
    return Diagnosis(_machine(), tuple(rows), auto, why, busy or is_contended())


def _machine() -> dict[str, str]:
    isa = torch.backends.cpu.get_cpu_capability()
    return {
        "CPU": f"{cpu.cpu_name()} ({platform.machine()})",
        "vectors": isa,
        "VNNI": "yes"
        if cpu.has_vnni()
        else "no: activations or weights have 7 bits where products are added in 16-bit sums",
        "AMX": "yes" if cpu.has_amx() else "no",
        "threads": f"{torch.get_num_threads()} on {usable_cpus():g} CPUs",
        "torch": torch.__version__,
        "loops": compiler.description(),
        "Python": platform.python_version(),
        "prices": f"{prices.path()} ({len(read_rounds(prices.path()))} measured; see fxq.cost_cache)",
        **{
            f"backend {backend.name}": f"of {backend.distribution}"
            + (f": {backend.refused}" if backend.refused else "")
            for backend in backends.installed()
        },
    }


def _auto() -> tuple[str, str]:
    """Backend that "auto" selects for a model on the CPU, and the reason."""
    order = backends.auto_order()
    refused: list[str] = []
    for name in order:
        reason = backends.auto_skips(name)
        if reason is None:
            return name, "; ".join([f"the first of {', '.join(order)} that runs here", *refused])
        refused.append(f"{name}: {reason}")
    raise BackendError("no backend runs on this machine.")  # reference runs on any


def _probe_backend(name: str, advance: Callable[[], None]) -> list[LayerCheck]:
    reason = backends.unavailable(name)
    if reason is not None:
        return [LayerCheck(name, "(all)", "float", why=reason)]
    rows = []
    for probe in PROBES:
        rows.append(_probe(name, probe))
        advance()
    return rows + [_try_faulty_kernel(name, faulty) for faulty in backends.get_backend(name).faulty_kernels()]


def _probe(backend: str, probe: Probe) -> LayerCheck:
    """Run one layer through the whole pipeline, calibrated on the inputs that it is tried on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = probe.make().eval()
        inputs = tuple(torch.randn(shape) + 0.1 for shape in probe.shapes)
    recipe = Recipe.static(backend=backend, optimize="coverage")
    try:
        quantized = quantize(model, recipe, data=[inputs], progress=False)
    except FxqError as error:
        return LayerCheck(backend, probe.name, "wrong", why=words_of(error))
    entries = [e for e in quantized.ledger if e.precision == "float"]
    wrong = next((e.reason for e in entries if e.kind == "unverified"), None)
    with threads_set_to(1):
        int8, real = (1e6 * measure(lambda run=run: run(*inputs)) for run in (quantized, model))  # type: ignore[misc]
    kernels = tuple(dict.fromkeys(n.label for n in quantized.history[-1].graph if n.kind == "int8"))
    if wrong is not None:
        return LayerCheck(backend, probe.name, "wrong", kernels, int8, real, wrong)
    reason = "; ".join(dict.fromkeys(e.reason for e in entries))
    verdict = "right" if not entries else "part" if quantized.ledger.count("int8") else "float"
    return LayerCheck(backend, probe.name, verdict, kernels, int8, real, reason)


def _try_faulty_kernel(backend: str, faulty: FaultyKernel) -> LayerCheck:
    """Check a kernel of PyTorch that is wrong on some machines, and that fxq therefore does not call."""
    try:
        right = faulty.is_correct()
    except Exception as error:  # a kernel may raise anything
        why = f"it raises {type(error).__name__}; {faulty.replacement}"
        return LayerCheck(backend, faulty.kernel, "avoided", why=why)
    if right:
        return LayerCheck(backend, faulty.kernel, "right", why=f"wrong on other machines; {faulty.replacement}")
    return LayerCheck(backend, faulty.kernel, "avoided", why=f"its numbers are wrong; {faulty.replacement}")
