"""Constants that were computed from a model's parameters, and are computed again when these are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from fxq.graph.query import flat_nodes, read_attribute
from fxq.rewriting.editor import Editor


class TrainableConstant(nn.Module):
    """Constant as a function of parameters.

    Attributes:
        function: function of the tensors at `paths`, in order, followed by the buffers, which do not depend on
            parameters.
        paths: paths of parameters, or of other trainable constants.
    """

    def __init__(self, function: Callable[..., Tensor], paths: Sequence[str], constants: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.function, self.paths = function, tuple(paths)
        for i, constant in enumerate(constants):
            self.register_buffer(f"constant{i}", constant, persistent=False)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Compute the constant."""
        return self.function(*tensors, *self._buffers.values())

    def value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute the constant from tensors by path, without a gradient."""
        return self(*(tensors[path].detach() for path in self.paths)).detach()


def as_trainable(editor: Editor, node: fx.Node) -> TrainableConstant | None:
    """Make a trainable constant of a call that reads only constants.

    None if it depends on no parameter, or if the recipe does not train. Constants that do not depend on parameters
    become its buffers.
    """
    if not editor.context.trains:
        return None
    read = list(dict.fromkeys(flat_nodes((node.args, node.kwargs))))
    live = [r for r in read if depends_on_parameters(editor, str(r.target))]
    if not live:
        return None
    others, graph = [r for r in read if r not in live], fx.Graph()
    values = {r: graph.placeholder(f"x{i}") for i, r in enumerate([*live, *others])}
    graph.output(graph.node_copy(node, values.__getitem__))
    constants = [read_attribute(editor.gm, str(r.target)) for r in others]
    return TrainableConstant(fx.GraphModule(nn.Module(), graph), [str(r.target) for r in live], constants)


def parametrized_constant(module: nn.Module, path: str, name: str) -> TrainableConstant | None:
    """Make a trainable constant of a parametrization of torch.nn.utils; None if it has buffers, as spectral_norm does.

    Args:
        module: module that owns the tensor.
        path: path of the module.
        name: name of the tensor.
    """
    if not parametrize.is_parametrized(module, name):
        return None
    parametrization: nn.Module = module.parametrizations[name]  # type: ignore[index, assignment]
    names = [key for key, _ in parametrization.named_parameters()]

    def function(*tensors: Tensor) -> Tensor:
        result: Tensor = functional_call(parametrization, dict(zip(names, tensors, strict=True)), ())
        return result

    stateful = next(parametrization.buffers(), None) is not None
    return None if stateful else TrainableConstant(function, [f"{path}.parametrizations.{name}.{key}" for key in names])


def depends_on_parameters(editor: Editor, path: str) -> bool:
    """Whether a constant is a parameter, or was computed from one."""
    return path in editor.context.computed or isinstance(read_attribute(editor.gm, path), nn.Parameter)


def record_trainable(editor: Editor, node: fx.Node, constant: TrainableConstant | None) -> None:
    """Record how a new constant was computed, if the recipe trains."""
    if constant is not None and editor.context.trains:
        editor.context.computed[str(node.target)] = constant
