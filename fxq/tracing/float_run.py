"""Run of the float model on the example: its outputs, and the state that it keeps between calls."""

from __future__ import annotations

import array
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import CodeState
from fxq.common.data import Batch, samples_in
from fxq.common.hooks import forward_hooks, recorded_calls
from fxq.common.isolation import ModelChanges, computed_tensors, copied, drawn, untouched
from fxq.common.iterators import IteratorStandIn
from fxq.common.metrics import tensors
from fxq.common.state import ABSENT, ChangedPlace
from fxq.errors import TraceError, words_of
from fxq.graph.analysis.memory import KEEP_STATE_REMEDY
from fxq.tracing.fidelity import call, same_values
from fxq.tracing.probe_batches import variations
from fxq.tracing.weight_norm import is_normed


@dataclass(frozen=True)
class KeptState:
    """State of a module that affects its next call, so that a graph cannot replace the module.

    Attributes:
        path: path of the module.
        why: the state and what to do about it, for an error message.
        outside: whether the state is outside the module, so that copies of the module share it.
        hidden: whether it is a tensor or an array that is neither a parameter nor a buffer.
    """

    path: str
    why: str
    outside: bool = False
    hidden: bool = False


@dataclass
class FloatRun:
    """Run of the float model on one batch.

    Attributes:
        model: the model, unchanged by the run.
        example: the batch.
        fixed: arguments that the recipe fixes (`concrete_args`).
        code: variables outside the modules that the model's code uses.
        outputs: what the model returned.
        error: exception that it raised, if any.
        kept: state of its modules that affects later calls.
        suspects: state that may affect later calls, in modules whose inputs differed as well, due to state elsewhere.
        written: names of parameters that the forward changes in place.
        changes_state: whether the forward changes any state of the model, or of its code.
        stream: batches on which the model ran in sequence; empty if it changed no state.
        streamed: tensors that it returned for each batch of `stream`.
    """

    model: nn.Module
    example: Batch
    fixed: Mapping[str, Any]
    outputs: Any = None
    error: Exception | None = None
    kept: list[KeptState] = field(default_factory=list)
    suspects: list[KeptState] = field(default_factory=list)
    written: frozenset[str] = frozenset()
    changes_state: bool = False
    stream: list[Batch] = field(default_factory=list)
    streamed: list[list[Tensor]] = field(default_factory=list)
    _changes_more: bool = False  # parameters, state outside of the model, or global generators of random numbers

    def __post_init__(self) -> None:
        self.code, draws = CodeState.of(self.model), list[str]()
        try:
            with self.untouched() as changes:
                self.outputs = call(self.model, self.example, self.fixed, draws=draws)
        except TraceError:  # of an iterator that cannot be copied
            raise
        except Exception as error:  # any type of error; tracing names the layer
            self.error = error
            return
        kinds = (changes.buffers, changes.parameters, changes.attributes, changes.in_place, changes.outside)
        self.changes_state = any(kinds)
        self._changes_more = bool(draws or changes.parameters or changes.outside)
        changes.parameters = [name for name in changes.parameters if not self._is_read_normed(name)]
        self.written = frozenset(changes.parameters)
        self.kept = [*self._random(draws), *self._remembered(changes), *self._written(changes)]

    def _changer(self, name: str) -> str:
        """Path of the innermost module of the user's code that contains a tensor, whose forward may change it."""
        path = name.rpartition(".")[0]
        while path and type(self.model.get_submodule(path)).__module__.startswith("torch.nn."):
            path = path.rpartition(".")[0]
        return path

    def _is_read_normed(self, name: str) -> bool:
        """Whether a parameter is the weight of an embedding with `max_norm`, which `canonicalize` handles."""
        return is_normed(self.model.get_submodule(name.rpartition(".")[0]))

    def untouched(self) -> AbstractContextManager[ModelChanges]:
        """Context that undoes all state changes of the model's code, also in parameters and outside its modules."""
        return untouched(self.model, self.code.bindings, watches=True)

    def has_state_of_its_own(self) -> bool:
        """Whether a copy of the model has a state of its own, which changes the results of its calls as in the model.

        It does not if the state is outside of the model, or in an object that copies share, or if a hook reads it.
        """
        hooked = any(forward_hooks(module) for module in self.model.modules() if module is not self.model)
        if self.error is not None or self._changes_more or hooked:
            return False
        try:
            own = copy.deepcopy(self.model, computed_tensors(self.model))
            with self.untouched() as changes:
                got = self._repeated(own)
                is_apart = not changes.so_far()
            with self.untouched() as changes:
                expected = self._repeated(self.model)
        except (
            Exception
        ):  # attributes that cannot be copied, and a forward that runs only once, raise any type of error
            return False
        more = changes.parameters or changes.outside
        return is_apart and not more and all(same_values(a, b) for a, b in zip(got, expected, strict=True))

    def _repeated(self, model: nn.Module) -> list[list[Tensor]]:
        """Tensors that a model returns for the example, of a few calls in sequence."""
        return [list(tensors(call(model, self.example, self.fixed))) for _ in range(_REPEATS)]

    def read_changes(self, changes: ModelChanges) -> dict[tuple[str, str], Any]:
        """State changed so far that the model's code reads, by module path and name: its value if it is a plain one."""
        return {
            (change.owner, change.name): change.now if type(change.now) in (bool, int, float, str) else None
            for change in changes.so_far()
            if not change.name.startswith("_tensor_constant")
            and any(self.code.reads(_variable(change.name.partition("[")[0], outside)) for outside in (False, True))
        }

    def _random(self, draws: list[str]) -> Iterator[KeptState]:
        """The innermost module that draws from a global generator of NumPy or Python, which tracing cannot record."""
        if draws:
            with self.untouched(), _drawing(self.model, [path for path, _ in self.model.named_modules()]) as drawn_by:
                call(self.model, self.example, self.fixed)
            for path, names in islice(drawn_by.items(), 1):  # the innermost returns first; empty if another thread drew
                yield KeptState(path, f"forward draws numbers from {' and '.join(names)}, {_DRAW}")

    def _written(self, changes: ModelChanges) -> Iterator[KeptState]:
        """Tensors that the forward changes in place. A graph would change its own copies, or nothing."""
        for kind, names in (("buffer", changes.buffers), ("parameter", changes.parameters)):
            for name in names:
                yield KeptState(
                    self._changer(name), f"forward changes the {kind} {name!r} in place: {_remedy(self._changer(name))}"
                )
        for path, places in changes.in_place.items():
            yield KeptState(path, f"forward changes {places[0]!r} in place: {_remedy(path)}", hidden=True)

    def computes_alike(self, graph: nn.Module) -> bool:
        """Whether a traced graph returns the same as the model on the batches of `stream`, run in sequence."""
        if not self.kept or not self.stream:
            return True
        for chosen in ([True] * len(self.stream), self._of_own_size()):
            batches = [batch for batch, runs in zip(self.stream, chosen, strict=True) if runs]
            try:
                with self.untouched(), untouched(graph, self.code.bindings, watches=True):
                    got = [list(tensors(call(graph, batch, {}))) for batch in batches]
                break
            except Exception:  # the graph may reject other sizes with any type of error
                if all(chosen):
                    continue
                raise
        expected = self.streamed if all(chosen) else [calls[-1].outputs for calls in self._stream(batches, ())]
        return all(same_values(a, b) for a, b in zip(got, expected, strict=True))

    def _remembered(self, changes: ModelChanges) -> Iterator[KeptState]:
        """State that changes later outputs, such as the counter of a schedule, but not a cache of equal values."""
        places = self._changed_places(changes)
        if not places:
            return
        numbers, fresh = list[dict[tuple[str, str], Any]](), list[list[_Call]]()
        order = self._probed(places, fresh)
        try:
            got = self._stream(self.stream, places, numbers)
        except Exception:  # state of one size may not fit a batch of another, with any type of error
            order = [i for i, same in zip(order, self._of_own_size(), strict=True) if same]
            self.stream = [batch for batch, same in zip(self.stream, self._of_own_size(), strict=True) if same]
            numbers.clear()
            got = self._stream(self.stream, places, numbers)
        self.streamed = [calls[-1].outputs for calls in got]
        sure = _blamed(places, [(late, fresh[i]) for late, i in zip(got, order, strict=True)])
        for path, held in (item for two in sure for item in two.items()):
            shared = any(name in (*changes.outside.get(p, ()), *changes.parameters) for p, name in held)
            shown = " and ".join(repr(name) for _, name in held[:_MAX_SHOWN])
            why = f"forward sets {shown} and returns other values when it runs again"
            state = self._refused(KeptState(path, f"{why}: {_remedy(path, shared)}", shared))
            if path in sure[0]:
                yield state
            else:
                self.suspects.append(state)
        for path, names in places.items():
            if path not in sure[0]:
                yield from self._counters(path, names, changes.outside.get(path, ()), numbers[:_REPEATS])

    def _changed_places(self, changes: ModelChanges) -> dict[str, list[str]]:
        """Names of changed attributes, variables, parameters and buffers by path of the module that changes them."""
        places: dict[str, list[str]] = {}
        for kind in (changes.attributes, changes.in_place, changes.outside):
            for path, names in kind.items():
                places.setdefault(path, []).extend(names)
        for name in (*changes.parameters, *changes.buffers):
            path = self._changer(name)
            if not isinstance(self.model.get_submodule(path), torch.jit.ScriptModule):  # its calls run no hooks
                places.setdefault(path, []).append(name)
        return places

    def _counters(
        self, path: str, names: Sequence[str], outside: Sequence[str], numbers: Sequence[Mapping[tuple[str, str], Any]]
    ) -> Iterator[KeptState]:
        """Counts and growing containers of a module that its code reads, whose effect the outputs do not show yet.

        Args:
            path: path of the module.
            names: changed places.
            outside: those of them that are outside the module.
            numbers: for each run on the example, the changed plain values, see `_stream`.
        """
        for name in names:
            shared = name in outside
            values = [now.get((path, name), ABSENT) for now in numbers]
            if len(set(map(repr, values))) > 1 and self.code.reads(_variable(name, shared)):
                why = f"forward counts in {name!r}, and reads the count"
                yield self._refused(KeptState(path, f"{why}: {_remedy(path, shared)}", shared))
        for stem in dict.fromkeys(name.partition("[")[0] for name in names if "[" in name):
            shared = any(name.partition("[")[0] == stem for name in outside)
            sizes = [now.get((path, f"{stem}[]"), 0) for now in numbers]
            if all(a < b for a, b in pairwise((0, *sizes))) and self.code.reads(_variable(stem, shared)):
                why = f"forward adds to {stem!r} in each call, and reads it"
                yield self._refused(KeptState(path, f"{why}: {_remedy(path, shared)}", shared))

    def _of_own_size(self) -> list[bool]:
        """For each batch of `stream`, whether it has as many samples as the example."""
        return [samples_in(batch) == samples_in(self.example) for batch in self.stream]

    def _probed(self, places: Collection[str], fresh: list[list[_Call]]) -> list[int]:
        """Choose the batches of `stream`: the example three times, which shows counters, then its variations in turn.

        Args:
            places: modules whose calls are recorded.
            fresh: gets the calls of the model with its initial state on the example and on each of its variations that
                the model takes.

        Returns:
            For each batch of `stream`, its index in `fresh`.
        """
        batches = []
        for batch in variations(self.example):
            try:
                fresh += self._stream([batch], places)
                batches.append(batch)
            except Exception:  # the model may reject other values and sizes with any type of error
                if not batches:
                    raise
        others = range(1, len(batches))
        order = [0, 0, 0, *others, 0, *reversed(others), 0]
        self.stream = [batches[i] for i in order]
        return order

    def _refused(self, kept: KeptState) -> KeptState:
        """Return the state of a module, marked as outside if the module cannot be copied, so that copies share it."""
        if kept.outside or not kept.path:
            return kept
        module = self.model.get_submodule(kept.path)
        try:
            copy.deepcopy(module, computed_tensors(module))
        except Exception as error:  # attributes of the module may raise any type of error
            why = kept.why.partition(": ")[0]
            return KeptState(
                kept.path, f"{why}, and the module cannot be copied ({words_of(error)}): {_UNCOPIED}", True
            )
        return kept

    def _stream(
        self,
        batches: Sequence[Batch],
        paths: Collection[str],
        numbers: list[dict[tuple[str, str], Any]] | None = None,
    ) -> list[list[_Call]]:
        """Run the model on batches in sequence, and record the calls of modules; the model's own call comes last.

        Args:
            batches: the batches.
            paths: modules whose calls, and those of the modules around them, are recorded.
            numbers: if given, gets a dict of the changed plain values after each run, by module path and name; for a
                container, `name[]` counts its changed places.
        """
        around = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
        results = []
        with self.untouched() as changes:
            for batch in batches:
                with _calling(self.model, {*paths, *around, ""}) as calls:
                    call(self.model, batch, self.fixed)
                results.append(calls)
                if numbers is not None:
                    numbers.append(_counts(changes.so_far()))
        return results


_MAX_SHOWN = 3
_MAX_COUNTED = 1024
_REPEATS = 3
"""Number of times that a stream starts with the example."""
_SHARED = (
    "this state is outside the module, so the float and the quantized model would share it. Store it in an attribute "
    "of a module and keep that module as a float leaf (recipe.leaf), or return the new value."
)
_UNCOPIED = "the float and the quantized model would share it. Make the module copyable (`__deepcopy__`)."
_WHOLE = (
    "a graph keeps no state between calls. Move that part of forward into a module of its own, and keep that module as "
    "a float leaf (recipe.leaf), or return the new value."
)
_DRAW = (
    "which a graph would store as constants. Draw them with torch (torch.rand), or keep the module as a float leaf "
    "(recipe.leaf)."
)


def _remedy(path: str, shared: bool = False) -> str:
    """Remedy for state of a module. The model itself cannot be a leaf."""
    return _SHARED if shared else KEEP_STATE_REMEDY if path else _WHOLE


def _counts(changes: list[ChangedPlace]) -> dict[tuple[str, str], Any]:
    """Changed plain values by module path and name, and for a container `name[]`, how many of its places changed."""
    counts: dict[tuple[str, str], Any] = {}
    for change in changes:
        value = _counted(change.now)
        if value is not None:
            counts[change.owner, change.name] = value
        if "[" in change.name:
            size = change.owner, f"{change.name.partition('[')[0]}[]"
            counts[size] = counts.get(size, 0) + 1
    return counts


def _counted(value: Any) -> Any:
    """Copy of a value that may be a count; None for other types, and for floats of a tensor, which may round."""
    if isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (bytearray, array.array)):
        return bytes(value)
    if isinstance(value, IteratorStandIn):
        return value.steps
    if isinstance(value, Tensor) and not value.is_floating_point() and value.numel() <= _MAX_COUNTED:
        return value.tolist()
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of a NumPy array
    return value.tobytes() if kind in ("i", "u", "b") and value.size <= _MAX_COUNTED else None


@contextmanager
def _drawing(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Record which modules draw from global generators: names of the generators by path, in order of return."""
    drawn_by: dict[str, list[str]] = {}
    calls: list[Callable[[], list[str]]] = []

    def enter() -> None:
        calls.append(drawn())

    def leave(path: str, inputs: Any, result: Any) -> None:
        names = calls.pop()()
        if names:
            drawn_by.setdefault(path, names)

    with recorded_calls(model, paths, leave, enter):
        yield drawn_by


@dataclass
class _Call:
    """Call of a module, with copies of its input and output tensors."""

    path: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def _blamed(
    places: Mapping[str, list[str]], pairs: list[tuple[list[_Call], list[_Call]]]
) -> tuple[dict[str, list[tuple[str, str]]], dict[str, list[tuple[str, str]]]]:
    """Find the modules whose outputs depend on kept state, and those that may, as their inputs differ as well.

    Args:
        places: names of changed state by module path.
        pairs: calls in a model that ran before, and the same calls in a fresh model.

    Returns:
        Sure and possible modules: for each path, (module path, name) of the state.
    """
    sure, suspects = dict[str, list[tuple[str, str]]](), dict[str, list[tuple[str, str]]]()
    for late, fresh in [two for got, want in pairs for two in zip(got, want, strict=False)]:
        if late.path != fresh.path or same_values(late.outputs, fresh.outputs):
            continue
        inside = any(_is_in(path, late.path) for path in sure)
        inner = [(p, n) for p, names in places.items() for n in names if p == late.path or _is_in(p, late.path)]
        own = [(p, n) for p, n in inner if p == late.path]
        if inner and same_values(late.inputs, fresh.inputs) and not inside:
            sure.setdefault(late.path, own or inner)
        elif own:
            suspects.setdefault(late.path, own)
    return sure, {path: names for path, names in suspects.items() if path not in sure}


@contextmanager
def _calling(model: nn.Module, paths: Collection[str]) -> Iterator[list[_Call]]:
    """Record the calls of modules, in order of return."""
    calls: list[_Call] = []

    def leave(path: str, inputs: Any, result: Any) -> None:
        calls.append(_Call(path, *(copied(list(tensors(values))) for values in (inputs, result))))

    with recorded_calls(model, sorted(paths), leave):
        yield calls


def _is_in(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _variable(name: str, outside: bool) -> str:
    """Name of the variable or attribute that holds a place, as the code spells it."""
    spelled = name.rpartition(" ")[2] if outside else name
    parts = spelled.partition("[")[0].split(".")
    return parts[-1] if outside else parts[0]
