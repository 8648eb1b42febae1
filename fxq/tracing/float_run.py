"""What a float model does on the example: what it returns, and what it keeps from one call to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import CodeState
from fxq.common.data import Batch
from fxq.common.isolation import ModelChanges, copied, drawn, untouched
from fxq.common.metrics import tensors
from fxq.common.state import ABSENT, ChangedPlace
from fxq.common.trees import mapped
from fxq.graph.memory import STATELESS
from fxq.tracing.fidelity import call, same_values
from fxq.tracing.weight_norm import is_normed


@dataclass(frozen=True)
class KeptState:
    """What a module keeps from one call to the next, so that no graph can stand for it.

    Attributes:
        path: the module.
        why: what it keeps, and what to do about it.
        outside: whether that is no part of the module, so that a copy of the module shares it.
        hidden: whether it is a tensor or an array for which a graph has no name.
    """

    path: str
    why: str
    outside: bool = False
    hidden: bool = False


@dataclass
class FloatRun:
    """The float model with one batch of inputs.

    Attributes:
        model: the model.
        example: the batch.
        fixed: arguments that the recipe fixes.
        code: what its code names outside of its modules.
        outputs: what it returns.
        error: what it raises, if it does not run.
        kept: what its modules keep from one call to the next.
        suspects: what they may keep, where a module is given other inputs in a later call because of another's state.
        written: names of the parameters that it changes in place.
        stream: batches on which it was run one after the other, where it has changed something.
        streamed: the tensors that it returned for each of these.
    """

    model: nn.Module
    example: Batch
    fixed: Mapping[str, Any]
    outputs: Any = None
    error: Exception | None = None
    kept: list[KeptState] = field(default_factory=list)
    suspects: list[KeptState] = field(default_factory=list)
    written: frozenset[str] = frozenset()
    stream: list[Batch] = field(default_factory=list)
    streamed: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.code, draws = CodeState.of(self.model), list[str]()
        try:
            with self.untouched() as changes:
                self.outputs = call(self.model, self.example, self.fixed, draws=draws)
        except Exception as error:  # whatever the model raises: the trace says in which layer
            self.error = error
            return
        changes.parameters = [name for name in changes.parameters if not self._is_read_normed(name)]
        self.written = frozenset(changes.parameters)
        self.kept = [*self._random(draws), *self._remembered(changes), *self._written(changes)]

    def _changer(self, name: str) -> str:
        """Path of the innermost module around a tensor whose forward may change it: torch's own change none."""
        path = name.rpartition(".")[0]
        while path and type(self.model.get_submodule(path)).__module__.startswith("torch.nn."):
            path = path.rpartition(".")[0]
        return path

    def _is_read_normed(self, name: str) -> bool:
        """Whether a parameter is the weight of an embedding, which canonicalize reads as the embedding leaves it."""
        return is_normed(self.model.get_submodule(name.rpartition(".")[0]))

    def untouched(self) -> AbstractContextManager[ModelChanges]:
        """Undo all that code of the model changes inside, also in its parameters and outside of its modules."""
        return untouched(self.model, self.code.bindings, watches=True)

    def _random(self, draws: list[str]) -> Iterator[KeptState]:
        """The module that draws from a global generator of NumPy or Python, which a trace does not see."""
        if draws:
            with self.untouched(), _drawing(self.model, [path for path, _ in self.model.named_modules()]) as drawn_by:
                call(self.model, self.example, self.fixed)
            for path, names in islice(drawn_by.items(), 1):  # the innermost returns first; none: another thread drew
                yield KeptState(path, f"forward draws numbers from {' and '.join(names)}, {_DRAW}")

    def _written(self, changes: ModelChanges) -> Iterator[KeptState]:
        """What is changed in place: the graph would change its own copies, or nothing."""
        for kind, names in (("buffer", changes.buffers), ("parameter", changes.parameters)):
            for name in names:
                yield KeptState(
                    self._changer(name), f"forward changes the {kind} {name!r} in place: {_remedy(self._changer(name))}"
                )
        for path, places in changes.in_place.items():
            yield KeptState(path, f"forward changes {places[0]!r} in place: {_remedy(path)}", hidden=True)

    def computes_alike(self, graph: nn.Module) -> bool:
        """Whether a traced graph returns what the model returns, on several batches one after the other."""
        if not self.kept or not self.stream:
            return True
        with self.untouched(), untouched(graph, watches=True):
            got = [list(tensors(call(graph, batch, {}))) for batch in self.stream]
        return all(same_values(a, b) for a, b in zip(got, self.streamed, strict=True))

    def _remembered(self, changes: ModelChanges) -> Iterator[KeptState]:
        """What decides what the model returns next time, as the counter of a schedule does and a cache does not."""
        places: dict[str, list[str]] = {}
        for kind in (changes.attributes, changes.in_place, changes.outside):
            for path, names in kind.items():
                places.setdefault(path, []).extend(names)
        for name in (*changes.parameters, *changes.buffers):
            path = self._changer(name)
            if not isinstance(self.model.get_submodule(path), torch.jit.ScriptModule):  # whose calls no hook sees
                places.setdefault(path, []).append(name)
        if not places:
            return
        other, numbers = _mirrored(self.example), list[dict[tuple[str, str], Any]]()
        try:
            fresh = [self._stream([batch], places)[0] for batch in (self.example, other)]
        except Exception:  # whatever the model raises for values that it cannot have
            other, fresh = self.example, self._stream([self.example], places) * 2
        self.stream = [self.example, other, self.example]
        got = self._stream(self.stream, places, numbers)
        self.streamed = [calls[-1].outputs for calls in got]
        sure = _blamed(places, [*zip(got, [*fresh, fresh[0]], strict=True)])
        for path, held in (found for two in sure for found in two.items()):
            shared = any(name in (*changes.outside.get(p, ()), *changes.parameters) for p, name in held)
            what = " and ".join(repr(name) for _, name in held[:_MOST])
            why = f"forward sets {what} and returns something else when it runs again"
            state = KeptState(path, f"{why}: {_remedy(path, shared)}", shared)
            if path in sure[0]:
                yield state
            else:
                self.suspects.append(state)
        for path, names in places.items():
            for name in names if path not in sure[0] else ():
                shared = name in changes.outside.get(path, ())
                values = [now.get((path, name), ABSENT) for now in numbers]
                if len(set(map(repr, values))) > 1 and self.code.reads(_variable(name, shared)):
                    why = f"forward counts in {name!r}, and reads the count"
                    yield KeptState(path, f"{why}: {_remedy(path, shared)}", shared)
            stems = dict.fromkeys(name.partition("[")[0] for name in names if path not in sure[0] and "[" in name)
            for stem in stems:
                shared = any(name.partition("[")[0] == stem for name in changes.outside.get(path, ()))
                sizes = [now.get((path, f"{stem}[]"), 0) for now in numbers]
                if all(a < b for a, b in pairwise((0, *sizes))) and self.code.reads(_variable(stem, shared)):
                    why = f"forward adds to {stem!r} in each call, and reads it"
                    yield KeptState(path, f"{why}: {_remedy(path, shared)}", shared)

    def _stream(
        self,
        batches: Sequence[Batch],
        paths: Collection[str],
        numbers: list[dict[tuple[str, str], Any]] | None = None,
    ) -> list[list[_Call]]:
        """The calls of modules, and in the end of the model, when it runs on one batch after the other.

        The plain values that are other ones than before go into `numbers`, after each run, and for a container, as
        `h[]`, how many of its places are.
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


_MOST = 3
_SHARED = (
    "that is outside of the module, so that the float model and the quantized one would share it. Keep it in an "
    "attribute of a module, and keep that module as a float leaf (recipe.leaf), or return the new value."
)
_WHOLE = (
    "a graph keeps no state between calls. Move that part of forward into a module of its own, and keep that module as "
    "a float leaf (recipe.leaf), or return the new value."
)
_DRAW = (
    "which a graph would hold as constants. Draw them with torch (torch.rand), or keep the module as a float leaf "
    "(recipe.leaf)."
)


def _remedy(path: str, shared: bool = False) -> str:
    """What to do about state of a module; the model itself cannot be a leaf."""
    return _SHARED if shared else STATELESS if path else _WHOLE


def _counts(changes: list[ChangedPlace]) -> dict[tuple[str, str], Any]:
    counts: dict[tuple[str, str], Any] = {}
    for change in changes:
        if isinstance(change.now, (bool, int, float, str, bytes)):
            counts[change.owner, change.name] = change.now
        if "[" in change.name:
            size = change.owner, f"{change.name.partition('[')[0]}[]"
            counts[size] = counts.get(size, 0) + 1
    return counts


@contextmanager
def _drawing(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """By path, in the order in which they return, which of these modules have drawn from a global generator."""
    found: dict[str, list[str]] = {}
    calls: list[Callable[[], list[str]]] = []

    def enter(module: nn.Module, args: Any) -> None:
        calls.append(drawn())

    def leave(path: str, module: nn.Module, args: Any, result: Any) -> None:
        names = calls.pop()()
        if names:
            found.setdefault(path, names)

    handles = []
    for path in paths:
        module = model.get_submodule(path)
        if not isinstance(module, torch.jit.ScriptModule):
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(partial(leave, path))]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _mirrored(batch: Batch) -> Batch:
    """The same values in another order: along the first axis that has more than one of them, from the last on."""

    def mirror(leaf: Any) -> Any:
        axes = [i for i, size in enumerate(leaf.shape) if size > 1] if isinstance(leaf, Tensor) else []
        return leaf.flip(axes) if axes else leaf

    return Batch(mapped(batch.args, mirror), mapped(dict(batch.kwargs), mirror))


@dataclass
class _Call:
    """One call of a module, with the tensors that it was given and those that it has returned."""

    path: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def _blamed(
    places: Mapping[str, list[str]], pairs: list[tuple[list[_Call], list[_Call]]]
) -> tuple[dict[str, list[tuple[str, str]]], dict[str, list[tuple[str, str]]]]:
    """The modules whose results depend on what they have kept, and those that may, being given other inputs.

    Args:
        places: what modules have kept, by path.
        pairs: calls after other calls, and in a model that was not called before.

    Returns:
        By path the places, each with the module that has it.
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
    """The calls of these modules, in the order in which they return."""
    calls: list[_Call] = []

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.append(_Call(path, *(copied(list(tensors(values))) for values in ((args, kwargs), result))))

    modules = [(path, model.get_submodule(path)) for path in sorted(paths)]
    own = [(path, module) for path, module in modules if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(partial(note, path), with_kwargs=True) for path, module in own]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _is_in(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _variable(name: str, outside: bool) -> str:
    """The variable or attribute that a place is in, as code spells it."""
    spelled = name.rpartition(" ")[2] if outside else name
    parts = spelled.partition("[")[0].split(".")
    return parts[-1] if outside else parts[0]
