"""fxq against torch.ao: the FX graph mode quantization that it replaces, on every engine of this machine.

Each engine quantizes the same model with the same calibration batches and its
own default settings, and is timed in the memory format that suits it. An engine gets a network right when it runs and
its SQNR against float is at least `RIGHT` dB. fxq, with its default recipe, is compared with the fastest engine that
does; beside it stands, without a target, the comparison with the fastest engine whatever it computes.
"""

from __future__ import annotations

import copy
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import fxq
from scripts.bench.cases import CASES, Case
from scripts.bench.number import Number, sqnr
from scripts.bench.rivals import restored_engine
from scripts.bench.timing import interleaved, no_gc, threads_set_to

AGAINST = "times faster than torch.ao"
AGAINST_ANY = "times faster than torch.ao, right or wrong"
RIGHT = 10.0
"""A broken kernel gives below 5 dB; the sound ones reach 10 to 14 on deep random networks, which pass on all noise."""
MAX_SQNR_GAP_DB = 2.0
"""An engine that is so many times slower than the fastest in a few runs is not timed further."""


@dataclass(frozen=True)
class Entry:
    """Result of one engine on a network.

    Attributes:
        engine: the engine's name.
        detail: its SQNR, or why it failed.
        right: whether its SQNR is at least `RIGHT`.
        run: runs the network; None where it fails.
        memory_format: of the input, the one in which it is faster.
        seconds: the best of a few runs on the timed input.
    """

    engine: str
    detail: str
    right: bool = False
    run: Callable[[Tensor], Tensor] | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    seconds: float = math.inf


def against_torch_ao(seconds: float, networks: Sequence[str] = ()) -> Iterator[Number]:
    """The comparison on each of `networks` (default: all), then the geometric mean over those torch.ao gets right."""
    ratios: dict[str, float] = {}
    for name in networks or CASES:
        for number in _compare(name, CASES[name](), seconds):
            if number.quantity == AGAINST:
                ratios[name] = number.value
            yield number
        gc.collect()  # the graph modules of a network hold each other
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        yield Number("geometric mean", AGAINST, mean, least=1.15, detail=", ".join(ratios))


def _compare(name: str, case: Case, seconds: float) -> list[Number]:
    """One network: float, fxq and every engine in turns, one thread."""
    with threads_set_to(1):
        qmodel = fxq.quantize(case.model, "static", data=case.data, example_inputs=case.timed)
    with torch.no_grad():
        reference = case.model(case.fresh)
        noise = sqnr(reference, qmodel(case.fresh))
    picture = case.timed.to(memory_format=torch.channels_last)
    with threads_set_to(1), restored_engine():
        entries = every_engine(case, reference)
        close = {
            e.engine: partial(e.run, case.timed.to(memory_format=e.memory_format))
            for e in entries
            if e.run and e.seconds <= MAX_SQNR_GAP_DB * _fastest(entries, e.right)
        }
        case.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        own = {"float": lambda: case.model(picture), "fxq": lambda: qmodel(picture)}
        medians = interleaved(own | close, seconds)
    before, after = medians["float"], medians["fxq"]
    numbers = [
        Number(name, "float, ms", 1e3 * before, detail="eager, channels-last"),
        Number(name, "fxq, ms", 1e3 * after, detail=f"{noise:.1f} dB"),
    ]
    for entry in entries:
        taken = 1e3 * medians.get(entry.engine, entry.seconds)
        detail = entry.detail if entry.engine in close or not entry.run else f"{entry.detail}, best of a few runs"
        numbers.append(Number(name, f"torch.ao {entry.engine}, ms", taken, detail=detail))
    numbers.append(Number(name, "times faster than float", before / after, least=1.0))
    for quantity, least, engines in (
        (AGAINST, 0.95, [entry.engine for entry in entries if entry.right and entry.engine in close]),
        (AGAINST_ANY, None, list(close)),
    ):
        if engines:
            best = min(engines, key=medians.__getitem__)
            numbers.append(Number(name, quantity, medians[best] / after, least, detail=best))
    return numbers


def every_engine(case: Case, reference: Tensor) -> list[Entry]:
    """Results of each engine on a network; `reference` is the float output for `case.fresh`."""
    return [_entry(engine, case, reference) for engine in torch.backends.quantized.supported_engines]


def _fastest(entries: list[Entry], right: bool) -> float:
    """Least seconds of the engines, of the right ones only if `right`."""
    return min((entry.seconds for entry in entries if entry.right or not right), default=math.inf)


def _entry(engine: str, case: Case, reference: Tensor) -> Entry:
    """Quantize `case` with one engine, see that it is right, and time it a few times in both memory formats."""
    torch.backends.quantized.engine = engine
    try:
        qmodel = _quantize(engine, case)
        with torch.no_grad():
            noise = sqnr(reference, qmodel(case.fresh))
    except Exception as error:  # it fails in many ways; each is a result
        return Entry(engine, f"fails: {str(error).splitlines()[0][:60]}")

    def run(x: Tensor) -> Tensor:
        torch.backends.quantized.engine = engine  # some ops of qnnpack read it when they run
        y: Tensor = qmodel(x)
        return y

    formats = (torch.contiguous_format, torch.channels_last)
    pictures = [case.timed.to(memory_format=memory_format) for memory_format in formats]
    times = [_best_of_a_few(partial(run, x)) for x in pictures]
    faster = formats[times.index(min(times))]
    right = noise >= RIGHT
    return Entry(engine, f"{noise:.1f} dB" + ("" if right else ": wrong"), right, run, faster, min(times))


def _quantize(engine: str, case: Case) -> nn.Module:
    """FX graph mode static quantization with the engine's default settings."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecated, both the workflow and its dtypes
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        mapping = get_default_qconfig_mapping(engine)
        observed = prepare_fx(copy.deepcopy(case.model), mapping, (case.data[0],))
        for batch in case.data:
            observed(batch)
        return convert_fx(observed)


def _best_of_a_few(call: Callable[[], object]) -> float:
    """Least seconds of three runs after one to warm up."""
    times = []
    with torch.no_grad(), no_gc():
        for _ in range(4):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(times[1:])
