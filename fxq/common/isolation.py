"""Contexts that run the user's code without changes to the user's model."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxq.common.container_types import is_container
from fxq.common.containers import ContainerNames, Leaves, put_together, taken_apart
from fxq.common.contents import same
from fxq.common.data import Batch
from fxq.common.state import ChangedPlace, StateSnapshot
from fxq.common.writes import WriteWatch
from fxq.errors import InputError

log = logging.getLogger("fxq")


@dataclass
class ModelChanges:
    """Changes of a model by the code inside of `untouched`, which undoes them; complete when the context ends.

    Attributes:
        buffers: names of buffers changed in place.
        parameters: names of parameters changed in place or through `.data`.
        attributes: reassigned attributes and items by module path, such as `h` or `h[0]`.
        in_place: tensors, arrays and generators changed in place, by module path and named like `attributes`.
        outside: changed variables outside the model that the code of a module reads, by module path, such as
            `global COUNT`.
    """

    buffers: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    attributes: dict[str, list[str]] = field(default_factory=dict)
    in_place: dict[str, list[str]] = field(default_factory=dict)
    outside: dict[str, list[str]] = field(default_factory=dict)

    _snapshots: tuple[StateSnapshot, ...] = ()

    def so_far(self) -> list[ChangedPlace]:
        """Return all changes up to now."""
        return [change for snapshot in self._snapshots for change in snapshot.changes()]

    def end(self, model: nn.Module) -> None:
        """Restore all state and fill in the names of what had changed, except for constants that torch.fx adds."""
        for snapshot in self._snapshots:
            snapshot_changes = list(snapshot.changes())
            if snapshot is not self._snapshots[0]:
                for change in snapshot_changes:
                    self.outside.setdefault(change.owner, []).append(change.name)
            elif snapshot_changes:
                self._name(snapshot_changes, model)
            if snapshot_changes or snapshot.is_shielded:
                snapshot.restore()
        self._snapshots = ()

    def _name(self, state_changes: Iterable[ChangedPlace], model: nn.Module) -> None:
        """Sort changes inside the model, which still has its changed tensors."""
        buffers, parameters = ({id(t): n for n, t in own} for own in (model.named_buffers(), model.named_parameters()))
        for change in state_changes:
            if change.in_place and id(change.now) in buffers:
                self.buffers += [buffers[id(change.now)]] if change.counted else []
            elif change.in_place and id(change.now) in parameters:
                self.parameters.append(parameters[id(change.now)])
            elif not change.name.startswith("_tensor_constant"):
                kind = self.in_place if change.in_place else self.attributes
                kind.setdefault(change.owner, []).append(change.name)


@contextmanager
def untouched(
    model: nn.Module, outside: Iterable[tuple[str, Any]] = (), watches: bool = False
) -> Iterator[ModelChanges]:
    """Context that undoes changes to a model's attributes, buffers and parameters; yields the changes.

    A forward may store what it computes (`self.attention = a`), count its calls, fill a cache, or normalize its
    weights. Containers and objects in attributes are restored, too. Of parameters, the storage is restored; the values
    only for embeddings with `max_norm`, or with `watches`.

    Args:
        model: the model.
        outside: further objects to restore, each with the path of the module that it belongs to.
        watches: whether to detect and undo writes into parameters, which slows down every op.
    """
    modules = list(model.named_modules())
    scripts = [
        (path, script, name, buffer)
        for path, script in modules
        if isinstance(script, torch.jit.ScriptModule)
        for name, buffer in script.named_buffers(recurse=False)
    ]
    snapshot, others = snapshot_of(model, modules), StateSnapshot(frozenset(id(module) for _, module in modules))
    watch = WriteWatch(model.parameters()) if watches else nullcontext()
    for path, value in outside:
        others.add(path, value)
    changes = ModelChanges(_snapshots=(snapshot, others))
    for every in (snapshot, others):
        every.shield()
    try:
        with watch:
            yield changes
    finally:
        for path, script, name, buffer in scripts:  # TorchScript code replaces them without Python attribute access
            if getattr(script, name).data_ptr() != buffer.data_ptr():
                setattr(script, name, buffer)
                changes.buffers.append(f"{path}.{name}".lstrip("."))
        changes.end(model)
        if isinstance(watch, WriteWatch):
            watch.put_back()
            if watch.written:
                parameters = {id(parameter): name for name, parameter in model.named_parameters()}
                written = [name for p in watch.written if (name := parameters[id(p)]) not in changes.parameters]
                changes.parameters += written


def snapshot_of(model: nn.Module, named: Sequence[tuple[str, nn.Module]] | None = None) -> StateSnapshot:
    """Snapshot of all modules of a model, with copies of buffers and of embeddings with `max_norm`.

    Args:
        model: the model.
        named: its `named_modules`, if they are at hand.
    """
    named = list(model.named_modules()) if named is None else named
    # a script module stores its state in C++, and creates some attributes on access
    modules = [(n, m) for n, m in named if not isinstance(m, torch.jit.ScriptModule)]
    snapshot = StateSnapshot(frozenset(id(module) for _, module in modules))
    for path, module in named:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                snapshot.add_tensor(path, name, buffer, copies=True)
    normed = {id(m.weight) for _, m in modules if getattr(m, "max_norm", None) and isinstance(m.weight, Tensor)}
    for path, module in named:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                snapshot.add_tensor(path, name, parameter, copies=id(parameter) in normed)
    for path, module in modules:
        snapshot.add(path, vars(module))
    for path, module in named:
        if isinstance(module, torch.jit.ScriptModule):
            snapshot.add_script(path, module)
    return snapshot


def unshare(model: nn.Module, lender: nn.Module) -> None:
    """Copy the modules and tensors that a finished model shares with the user's float model.

    A leaf module that cannot be copied stays shared. The copies require no gradients, since integers pass none.
    """
    lent, memo = set(lender.modules()), computed_tensors(lender)
    storages = {t.untyped_storage().data_ptr() for t in (*lender.parameters(), *lender.buffers())}
    for module in [m for m in model.modules() if m not in lent]:
        for name, child in module._modules.items():
            if child in lent:
                try:
                    with torch.no_grad():
                        module._modules[name] = own_child = copy.deepcopy(child, memo)
                    for parameter in own_child.parameters():  # one by one: a script module has no requires_grad_
                        parameter.requires_grad_(False)
                except Exception as error:  # attributes of the module may raise anything
                    log.warning("%s is shared with the float model: it cannot be copied: %s", name, error)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.untyped_storage().data_ptr() in storages:
                    own: Any = copy.deepcopy(tensor, memo)
                    own.requires_grad_(False)
                    tensors[name] = own


def computed_tensors(*modules: nn.Module) -> dict[int, Any]:
    """Detached copies of non-leaf tensors in module attributes, by id: the memo for `copy.deepcopy` of these modules.

    An example is the weight that a parametrized recurrent layer stores in each call.
    """
    every = [value for module in modules for m in module.modules() for value in vars(m).values()]
    kept = [t for value in every for t in (value if isinstance(value, (list, tuple)) else (value,))]
    return {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context that disables `torch.autocast`, under which a float32 layer would return bfloat16."""
    with ExitStack() as stack:
        for device in autocast_on():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocast_on() -> list[str]:
    """Types of the devices with `torch.autocast` enabled."""
    return [device for device in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(device)]


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Context that seeds PyTorch, NumPy and Python, and restores the states of their global generators after."""
    numpy, python = sys.modules.get("numpy"), random.getstate()
    numbers = numpy.random.get_state(legacy=False) if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # generators of accelerators would not be restored
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numbers)


def drawn() -> Callable[[], list[str]]:
    """Function that returns which global generators of NumPy and Python drew numbers since this call."""

    def states() -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        numbers = {"np.random": numpy.random.get_state(legacy=False)} if numpy is not None else {}
        return {**numbers, "random": random.getstate()}

    before = states()
    return lambda: [name for name, state in states().items() if name in before and not same(state, before[name])]


def copied(value: Any) -> Any:
    """Return a value with copies of its tensors and containers; for a batch, with copies of its arguments."""
    if isinstance(value, Batch):
        return Batch(copied(value.args), copied(dict(value.kwargs)))
    return tree_map(_copy_of_leaf, value)


def _copy_of_leaf(value: Any) -> Any:
    """Copy of a tensor, or of a container that `torch.utils._pytree` does not know; other values themselves."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not is_container(value):
        return value
    leaves, names = Leaves(), ContainerNames()
    try:
        structure = taken_apart(value, "value", leaves, containers=names)
    except InputError:  # it holds an object that is no data
        return value
    own = {name: copy.copy(inner) for name, inner in names.values.items() if isinstance(inner, (list, dict))}
    return put_together(structure, copied(leaves), own)  # subclasses may have attributes


def with_united_views(model: nn.Module) -> nn.Module:
    """Model in which equal views of one memory, as tied weights, are one tensor, so that a pickle has them once.

    Modules above such views are shallow copies, and the model stays as it is: its parameters are the tensors that an
    optimizer has, and each keeps its gradient.
    """
    seen: dict[Any, Tensor] = {}
    copies: dict[int, nn.Module] = {}

    def united(tensor: Any) -> Any:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or not tensor.data_ptr():
            return tensor
        flags = type(tensor), tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
        view = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *flags
        return seen.setdefault(view, tensor)

    def visit(module: Any) -> Any:
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in copies:
            copies[id(module)] = module
            tables = {
                table: {name: change(value) for name, value in vars(module)[table].items()}
                for table, change in (("_parameters", united), ("_buffers", united), ("_modules", visit))
            }
            if any(new is not vars(module)[table][name] for table in tables for name, new in tables[table].items()):
                copies[id(module)] = object.__new__(type(module))
                vars(copies[id(module)]).update(vars(module) | tables)
        return copies[id(module)]

    result: nn.Module = visit(model)
    return result
