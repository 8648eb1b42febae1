"""Reads graphs from text, with kernels of all backends."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn

from fxq.backends.by_name import kernel_named
from fxq.graph.text.text_reader import read


def read_graph(
    text: str, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None
) -> fx.GraphModule:
    """Read a graph that `write_graph` wrote, with its nodes, units, kernels and metadata.

    No code in the text is executed. The text may name ops of the op table, fxq's kernels, and tensor functions of
    torch.

    Args:
        text: the graph, one line per node. The whole text may be indented.
        tensors: tensors by their names in the text, as `graph_tensors` returns them. They are not copied.
        modules: modules by path that the graph calls as leaves (`leaf` in the text).

    Raises:
        InputError: a line cannot be read, or a tensor or module is missing; the message has the line, and says what was
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
