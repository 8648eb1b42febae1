"""Module that replaces a submodule of a float model: of the same class, with quantized graphs that it calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fxq.errors import InputError, words_of
from fxq.model import QuantizedModel
from fxq.parts.copying import copy_of
from fxq.programs.fitting import first_fitting


class Part(nn.Module):
    """Base class of modules that replace a submodule of the float model. A part is also of that submodule's class.

    Attributes and submodules of the float module can be read; its weights are placeholders without values
    (`AbsentTensor`), unless Python code outside of the part reads them.

    Attributes:
        fxq_programs: module that is called: quantized graphs, or observed ones during calibration.
        fxq_skeleton: copy of the float module without values, which answers reads of attributes and submodules.
        float_class: class of the float module.
    """

    fxq_programs: nn.Module
    fxq_skeleton: nn.Module
    float_class: type[nn.Module] = nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph that was traced from this kind of call."""
        return self.fxq_programs(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        skeleton = vars(self).get("fxq_skeleton")
        if skeleton is not None:
            for table in (skeleton._modules, skeleton._parameters, skeleton._buffers):
                if name in table:
                    return table[name]
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank_part, (self.float_class,), state_of_object(self)


def state_of_object(module: Any) -> Any:
    """Return the state that pickles and copies of a module hold, as its class defines it."""
    return module.__getstate__() if hasattr(module, "__getstate__") else dict(vars(module))  # absent in Python 3.10


@functools.lru_cache(maxsize=512)
def part_class(float_class: Any) -> type[Part]:
    """Return the class of parts that replace modules of a class."""

    @functools.wraps(float_class.forward)
    def forward(self: Part, *args: Any, **kwargs: Any) -> Any:
        return self.fxq_programs(*args, **kwargs)

    content: dict[str, Any] = {"forward": forward, "float_class": float_class, "__module__": float_class.__module__}
    for name in ("__len__", "__iter__", "__getitem__", "__contains__"):
        if hasattr(float_class, name):  # a container: its items are the float module's, not the quantized graphs
            content[name] = _of_skeleton(name)
    try:
        kind = types.new_class(float_class.__name__, (Part, float_class), {}, lambda space: space.update(content))
    except TypeError:  # the class cannot be subclassed like this
        kind = type(float_class.__name__, (Part,), content)
    kind.__qualname__, kind.__doc__ = float_class.__qualname__, float_class.__doc__
    return kind


def _of_skeleton(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(vars(self)["fxq_skeleton"], name)(*args)


def _blank_part(float_class: Any) -> Part:
    kind = part_class(float_class)
    part = kind.__new__(kind)
    nn.Module.__init__(part)
    return part


def make_part(module: nn.Module, programs: nn.Module, weights: Mapping[int, Tensor]) -> Part:
    """Create the part that replaces a float module.

    Args:
        module: the float module; it is not changed.
        programs: the module to call.
        weights: tensor to show for each parameter and buffer of the module, by id.
    """
    skeleton = copy_of(module, weights)
    for inner in skeleton.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            hooks.clear()  # they are in the graph
    part = _blank_part(type(module))
    own = vars(nn.Module())
    vars(part).update({name: v for name, v in vars(skeleton).items() if name not in own and name != "forward"})
    vars(part)["fxq_skeleton"] = skeleton  # not registered: it has no weights of its own
    part.fxq_programs = programs
    return part.eval()


class Programs(nn.Module):
    """Quantized graphs of one part, one for each kind of call.

    Args:
        graphs: the graphs, each traced from one kind of call.
        float_module: module for calls that none of the graphs takes; None: they are errors.
    """

    def __init__(self, graphs: Mapping[str, nn.Module], float_module: nn.Module | None = None) -> None:
        super().__init__()
        self.names = tuple(graphs)
        self.graphs = nn.ModuleList(graphs.values())
        self.float_module = float_module
        self._fitting: dict[Any, int] = {}

    def named_graphs(self) -> Iterator[tuple[str, QuantizedModel]]:
        """Yield the graphs with their names."""
        yield from zip(self.names, self.graphs, strict=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph that takes these arguments.

        Raises:
            InputError: no graph was traced from a call like this one.
        """
        if len(self.graphs) == 1 and self.float_module is None:
            return self.graphs[0](*args, **kwargs)
        kind = kind_of(args, kwargs)
        if kind in self._fitting:
            return self._module(self._fitting[kind])(*args, **kwargs)
        at, result = self._tried(args, kwargs)
        if len(self._fitting) < MAX_KINDS:
            self._fitting[kind] = at
        return result

    def fitting(self, args: Any, kwargs: Mapping[str, Any]) -> str | None:
        """Return the name of the graph that takes a call; None if the float module does."""
        alone = len(self.graphs) == 1 and self.float_module is None
        return [*self.names, None][0 if alone else self._tried(args, kwargs)[0]]

    def _module(self, at: int) -> Any:
        return self.graphs[at] if at < len(self.graphs) else self.float_module

    def _tried(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[int, Any]:
        """Number of the first graph that takes a call, that of the float module after them; and its result."""
        fitting = first_fitting(enumerate(self.graphs), args, kwargs)
        if fitting.key is not None:
            return fitting.key, fitting.result
        if self.float_module is not None:
            return len(self.graphs), self.float_module(*args, **kwargs)
        error = fitting.refusals[0][1]
        names, why = ", ".join(self.names), words_of(error)
        raise InputError(f"none of the graphs {names} takes this call: {why}") from error


MAX_KINDS = 256
"""Maximum number of kinds of calls for which the index of the graph is cached."""


def kind_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a key that is equal for calls with the same structure, shapes, dtypes and plain values."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    return str(spec), tuple(
        (leaf.dtype, tuple(leaf.shape))
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf)
        if isinstance(leaf, (bool, int, float, str, type(None)))
        else type(leaf)
        for leaf in leaves
    )


def parts_in(model: Any) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a model with their paths."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Part))


def graphs_in(model: Any) -> dict[str, QuantizedModel]:
    """Return the quantized graphs of a model, by the name of the part."""
    programs = (part.fxq_programs for _, part in parts_in(model))
    return {name: graph for own in programs if isinstance(own, Programs) for name, graph in own.named_graphs()}


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of a module with their names, shared ones once."""
    yield from module.named_parameters()
    yield from module.named_buffers()
