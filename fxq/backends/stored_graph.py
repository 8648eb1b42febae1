"""Graphs from text, with the kernels of all backends."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn

from fxq.backends.by_name import kernel_named
from fxq.graph.text.text_reader import read


def read_graph(
    text: str, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None
) -> fx.GraphModule:
    """The graph that `write_graph` wrote: the same nodes, units, kernels and metadata, computing the same.

    Nothing of the text is run. It may name the ops of the op table, fxq's kernels, and tensor functions of torch.

    Args:
        text: one line a node; all of it may be indented.
        tensors: by the names that stand in the text, as `graph_tensors` gives them. They are used, not copied.
        modules: by path, the modules that the graph calls as they are (`leaf` in the text).

    Raises:
        InputError: a line cannot be read, or a tensor or module is missing; the message says which line, and what was
            expected there.

    Example:
        >>> text = '''
        ...     x: float32[1, 4] = input()
        ...     w: float32[2, 4] = tensor("fc.weight")
        ...     fc = linear(x, w)
        ...     return fc
        ... '''
        >>> gm = read_graph(text, {"fc.weight": torch.ones(2, 4)})
        >>> gm(torch.ones(1, 4))
        tensor([[4., 4.]])
        >>> print(fxq.extend.write_graph(gm).splitlines()[2])
        fc: float32[1, 2] = linear(x, w)
    """
    return read(text, tensors, modules or {}, kernel_named)
