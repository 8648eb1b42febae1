"""How a constant was computed of a model's parameters: so that it can be computed again when these are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from fxq.graph.query import flat_nodes, read_attribute
from fxq.rewriting.editor import Editor


class TrainableConstant(nn.Module):
    """A constant, as a function of parameters.

    Attributes:
        function: takes their values, in order, and behind them the buffers: what is not computed of parameters.
        paths: their paths, or those of other constants of this kind.
    """

    def __init__(self, function: Callable[..., Tensor], paths: Sequence[str], others: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.function, self.paths = function, tuple(paths)
        for i, other in enumerate(others):
            self.register_buffer(f"constant{i}", other, persistent=False)

    def forward(self, *tensors: Tensor) -> Tensor:
        """The constant."""
        return self.function(*tensors, *self._buffers.values())

    def value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The constant, without a gradient, from tensors by path."""
        return self(*(tensors[path].detach() for path in self.paths)).detach()


def as_trainable(editor: Editor, node: fx.Node) -> TrainableConstant | None:
    """What a call that reads nothing but constants computes; None where no parameter is among them, or none is trained.

    Constants that are not computed of parameters are kept in it.
    """
    if not editor.context.recipe.trains:
        return None
    read = list(dict.fromkeys(flat_nodes((node.args, node.kwargs))))
    live = [r for r in read if depends_on_parameters(editor, str(r.target))]
    if not live:
        return None
    others, graph = [r for r in read if r not in live], fx.Graph()
    values = {r: graph.placeholder(f"x{i}") for i, r in enumerate([*live, *others])}
    graph.output(graph.node_copy(node, values.__getitem__))
    kept = [read_attribute(editor.gm, str(r.target)) for r in others]
    return TrainableConstant(fx.GraphModule(nn.Module(), graph), [str(r.target) for r in live], kept)


def parametrized_constant(module: nn.Module, path: str, name: str) -> TrainableConstant | None:
    """What a parametrization of torch.nn.utils computes; None where it keeps a state, as spectral_norm does.

    Args:
        module: whose tensor it is.
        path: of the module.
        name: of the tensor.
    """
    if not parametrize.is_parametrized(module, name):
        return None
    made: nn.Module = module.parametrizations[name]  # type: ignore[index, assignment]
    names = [key for key, _ in made.named_parameters()]

    def function(*tensors: Tensor) -> Tensor:
        found: Tensor = functional_call(made, dict(zip(names, tensors, strict=True)), ())
        return found

    stateful = next(made.buffers(), None) is not None
    return None if stateful else TrainableConstant(function, [f"{path}.parametrizations.{name}.{key}" for key in names])


def depends_on_parameters(editor: Editor, path: str) -> bool:
    """Whether a constant is a parameter, or is computed of one."""
    return path in editor.context.computed or isinstance(read_attribute(editor.gm, path), nn.Parameter)


def record_trainable(editor: Editor, node: fx.Node, made: TrainableConstant | None) -> None:
    """Keep how a new constant was computed."""
    if made is not None and editor.context.recipe.trains:
        editor.context.computed[str(node.target)] = made
