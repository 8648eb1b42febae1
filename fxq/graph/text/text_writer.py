"""Writer of the text form of graphs, which `fxq/graph/text/text_reader.py` reads back. Every line is a Python call.

    def conv2d_relu(x, weight, bias):                                 a unit, once per body
        conv2d = conv2d(x, weight, bias, padding=(1, 1))
        relu = relu(conv2d)
        return relu

    def a_to_b():                                                     the graph inside a kernel of several units
        x: uint8[1, 4] = input()
        t0_w: int8[2, 4] = tensor('fxq_kernels.a_to_b.t0_w')
        ...
        return y

    modules['fxq_kernels.a_to_b'] = engine.region(t0_w=tensor('fxq_kernels.a_to_b.t0_w'), runs=a_to_b)
    modules['fxq_kernels.fc'] = x86.linear(out=None, weight=tensor('fxq_kernels.fc.weight'))

    x: float32[1, 3, 8, 8] = input()
    w: float32[4, 3, 3, 3] = tensor('conv.weight')
    conv_relu: float32[1, 4, 8, 8] = conv2d_relu(x, w, b)  # 'conv', 'net.py:41', origins=('conv', 'relu')
    return conv_relu

The comment after `#` holds facts of the node: module path, source line, and the other fields of `NodeInfo` that do not
follow from the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.errors import InputError
from fxq.graph.analysis.mutation import changes
from fxq.graph.bindable import Bindable
from fxq.graph.info import FusedInfo, NodeInfo, info
from fxq.graph.place import where
from fxq.graph.query import CONVERSIONS, constant, is_check, is_op, op_of, submodule
from fxq.graph.run import infer_ops
from fxq.graph.text.text_modules import declaration
from fxq.graph.text.text_names import METHODS, is_taken, name_of
from fxq.graph.text.text_values import type_text, value_text
from fxq.graph.unit import Unit, unit_of
from fxq.quant.observer_base import Observer

FACTS = {
    **dict.fromkeys(("path", "source", "origins"), ""),
    **dict.fromkeys(("parts", "values", "paths"), "fused"),
    "plans": "lowered",
    "kept": "traced",
    **dict.fromkeys(("plan", "edges"), ""),
    **dict.fromkeys(("body", "layers"), "lowered"),
    **dict.fromkeys(("memory", "changes"), "traced"),
    **dict.fromkeys(("stands_for", "corrects", "note"), ""),
}
"""The fields of `NodeInfo` that are written after `#`, in order, each with its record in `NodeInfo`; empty: none.

The type is before the `#`, and `made_by` is not written.
"""


def write_graph(gm: fx.GraphModule, *, facts: bool = True, complete: bool = False) -> str:
    """Write the graph of `gm` as text, one line per node. `read_graph` reads it back.

    Works for graphs from the canonical stage on. The text refers to tensors by path; `graph_tensors` returns them.

    Args:
        gm: a graph module, as `run_passes` and `quantize` return it.
        facts: whether to write the metadata of the nodes as comments.
        complete: whether to write facts, too, that the reader could infer, so that reading is faster.

    Raises:
        InputError: a node calls a function, or holds a value, that cannot be written; the message says which.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.ReLU()).eval()
        >>> print(write_graph(fxq.extend.run_passes(model, "static", example_inputs=torch.rand(1, 4), until="fuse")))
        def linear_relu(x, weight, bias):
            linear = linear(x, weight, bias)
            relu = relu(linear)
            return relu
        <BLANKLINE>
        input_1: float32[1, 4] = input('input')
        _0_weight: float32[2, 4] = tensor('0.weight')  # '0'
        _0_relu: float32[1, 2] = linear_relu(input_1, _0_weight, None)  # '0', origins=('_0', '_1'), paths=('0', '1')
        return _0_relu
    """
    return "\n".join(_Writer(gm, complete=complete).lines(facts))


def write_graphs(graphs: Mapping[str, fx.GraphModule]) -> str:
    """Write several graphs as one text, each as a `def`; units with the same body are written once.

    The text refers to the tensors of each graph by their paths in it, see `read_graphs`. It is complete, see
    `write_graph`.
    """
    names = _Names(set(graphs))
    return "\n".join(line for name, gm in graphs.items() for line in _Writer(gm, names, complete=True).inside(name))


def graph_tensors(gm: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors that the text of a graph refers to, by path: constants, and the tensors of kernels and observers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()
        >>> gm = fxq.extend.run_passes(model, "static", example_inputs=torch.rand(1, 4), until="canonicalize")
        >>> {name: tuple(tensor.shape) for name, tensor in graph_tensors(gm).items()}
        {'0.weight': (2, 4), '0.bias': (2,)}
    """
    tensors: dict[str, Tensor] = {}
    for node in gm.graph.nodes:
        tensor, module = constant(gm, node), submodule(gm, node)
        if tensor is not None:
            tensors[str(node.target)] = tensor
        elif isinstance(module, Bindable) and (inner := module.graph_inside()) is not None:
            tensors.update({f"{node.target}.{path}": tensor for path, tensor in graph_tensors(inner).items()})
        elif isinstance(module, (Bindable, Observer)):
            tensors.update(module.named_buffers(f"{node.target}", recurse=False))
    return tensors


def same_graph(a: fx.GraphModule, b: fx.GraphModule, *, facts: bool = True) -> bool:
    """Whether two graphs have the same text and equal tensors; False if one cannot be written.

    Args:
        a: a graph.
        b: another one.
        facts: whether the metadata of the nodes must be the same, too.
    """
    try:
        if write_graph(a, facts=facts) != write_graph(b, facts=facts):
            return False
    except InputError:  # a graph cannot be written
        return False
    tensors = graph_tensors(b)
    return all(torch.equal(tensor, tensors[name]) for name, tensor in graph_tensors(a).items())


class _Names:
    """Names of units and graphs, which are written as `def`.

    Attributes:
        taken: all names.
        units: names of units, by their kind, captures and lines.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)
        self.units: dict[tuple[str, ...], str] = {}

    def new(self, path: str) -> str:
        """Choose an unused name for the unit or graph at a path, and note it as taken."""
        name = path.rpartition(".")[2]
        while is_taken(name) or name in self.taken:
            name = f"{name}_unit" if name.isidentifier() else "unit"
        self.taken.add(name)
        return name


class _Writer:
    """Writes one graph.

    Attributes:
        names: names of all units and graphs that were written so far.
        defined: names of the units and graphs that this graph calls, by path.
        prefix: prefix of the paths of tensors.
        complete: whether to write facts, too, that the reader could infer.
    """

    def __init__(
        self, gm: fx.GraphModule, names: _Names | None = None, prefix: str = "", complete: bool = False
    ) -> None:
        self.gm, self.complete = gm, complete
        self.nodes = list(gm.graph.nodes)
        self.changed = {block for node in self.nodes for block in changes(node)}
        self.names = names or _Names()
        self.defined: dict[str, str] = {}
        self.prefix = prefix
        self.called = {str(n.target): submodule(gm, n) for n in self.nodes if n.op == "call_module"}

    def lines(self, facts: bool) -> Iterator[str]:
        """Yield the lines of the graph: declarations first, then nodes."""
        yield from self._definitions(facts)
        others = {path: module for path, module in self.called.items() if not isinstance(module, Unit)}
        declared = [declaration(path, module, self.defined.get(path)) for path, module in others.items()]
        yield from [*declared, ""] if declared else []
        yield from self._node_lines(facts)

    def inside(self, name: str, facts: bool = True) -> Iterator[str]:
        """Yield the lines of the graph as a graph inside a kernel."""
        yield from self._definitions(facts)
        yield f"def {name}():"
        yield from (f"    {line}" for line in self._node_lines(facts))
        yield ""

    def _definitions(self, facts: bool) -> Iterator[str]:
        """Yield the lines of the units that the graph calls, and of the graphs inside kernels."""
        for path, module in self.called.items():
            inner = module.graph_inside() if isinstance(module, Bindable) else None
            if isinstance(module, Unit):
                yield from self._unit(path, module)
            elif inner is not None:
                writer = _Writer(inner, self.names, f"{path}.", self.complete)
                self.defined[path] = self.names.new(path)
                yield from writer.inside(self.defined[path], facts)

    def _node_lines(self, facts: bool) -> Iterator[str]:
        for node in self.nodes:
            comment = self._facts(node) if facts else ""
            yield self._line(node, self._type(node)) + (f"  # {comment}" if comment else "")

    def _unit(self, path: str, unit: Unit) -> Iterator[str]:
        """Yield the lines of a unit, unless an equal one was written."""
        lines = [f"    {self._line(node)}" for node in unit.graph.nodes if node.op != "placeholder"]
        key = (unit.kind, *unit.captures, "", *lines)
        written_name = self.names.units.get(key)
        name = self.defined[path] = self.names.new(path) if written_name is None else written_name
        if written_name is None:
            self.names.units[key] = name
            yield f"def {name}({', '.join(unit.captures)}):" + (
                f"  # {value_text(unit.kind)}" if unit.kind != name else ""
            )
            yield from (*lines, "")

    def _line(self, node: fx.Node, typed: str = "") -> str:
        try:
            if node.op == "output":
                _check_output(node.args[0])
                return f"return {value_text(node.args[0])}"
            return f"{node.name}{typed} = {self._call(node)}"
        except InputError as error:
            raise InputError(f"{where(self.gm, node)}: {error}") from None

    def _type(self, node: fx.Node) -> str:
        """Type of a node's value, such as `: float32[1, 3]`; empty if it is not a tensor and the reader infers none."""
        about, inferred = info(node), node.op == "get_attr" or op_of(node) is not None
        if about.shape is None and not inferred and unit_of(self.gm, node) is None:
            return ""
        return f": {type_text(about.shape, about.dtype)}"

    def _call(self, node: fx.Node) -> str:
        args = [*map(value_text, node.args), *(f"{k}={value_text(v)}" for k, v in node.kwargs.items())]
        if node.op == "placeholder":
            named = [value_text(node.target)] if node.target != node.name else []
            return f"input({', '.join([*named, *(f'default={arg}' for arg in args)])})"
        if node.op == "get_attr":
            return f"tensor({value_text(f'{self.prefix}{node.target}')})"
        if node.op == "call_method":
            receiver, *args = args
            method = _checked_name(node.target if node.target in METHODS else None, node.target)
            return f"{receiver}.{method}({', '.join(args)})"
        if node.op == "call_module":
            path = str(node.target)
            name = self.defined[path] if isinstance(self.called[path], Unit) else f"modules[{value_text(path)}]"
        else:
            op = op_of(node)
            name = op.name if op is not None else _checked_name(name_of(node.target), node.target)
        return f"{name}({', '.join(args)})"

    def _facts(self, node: fx.Node) -> str:
        about = info(node)
        blocks = about.traced.memory if about.shape is None else [b for b in about.traced.memory if b in self.changed]
        traced = about.traced._replace(memory=tuple(blocks), changes=changes(node))
        written = _flat_facts(about._replace(traced=traced))
        defaults = _flat_facts(derived(node, submodule(self.gm, node), written, self.complete))
        facts = {name: value for name, value in written.items() if value != defaults[name]}
        first = [facts.pop("path", about.path), facts.pop("source", "")]
        while first and not first[-1]:
            first.pop()
        return ", ".join([*map(value_text, first), *(f"{name}={value_text(value)}" for name, value in facts.items())])


def derived(node: fx.Node, module: nn.Module | None, facts: Mapping[str, Any], complete: bool = False) -> NodeInfo:
    """Default metadata of a node, for fields that are missing in its line.

    A node's default origin is itself; a unit has one origin and one path per op.

    Args:
        node: the node.
        module: the module that it calls, or None.
        facts: the facts in its line.
        complete: whether the facts include the types of a unit's ops; else they are inferred.
    """
    is_call = node.op.startswith("call") and not is_check(node) and not isinstance(module, Observer)
    default_origins = (node.name,) if is_call and not is_op(node, *CONVERSIONS) else ()
    origins, path, body = facts.get("origins", default_origins), facts.get("path", ""), facts.get("body", ())
    values = infer_ops(module.graph, node.args) if isinstance(module, Unit) and not complete else ()
    count = len(facts.get("values", ()) if complete else values)
    fused = FusedInfo(values=values, paths=(path,) * count)
    part_origins, count = tuple((origin,) for origin in origins), count or len(body)
    fused = fused._replace(parts=part_origins) if len(part_origins) == count > 1 else fused
    return NodeInfo(path, origins=default_origins, fused=fused)


def with_facts(about: NodeInfo, facts: Mapping[str, Any]) -> NodeInfo:
    """Metadata with the fields replaced that `facts` names."""
    for name, value in facts.items():
        record = FACTS[name]
        changed = {name: value} if not record else {record: getattr(about, record)._replace(**{name: value})}
        about = about._replace(**changed)
    return about


def _flat_facts(about: NodeInfo) -> dict[str, Any]:
    """Fields of a node's metadata that can be written, by name."""
    return {name: getattr(getattr(about, record) if record else about, name) for name, record in FACTS.items()}


def _check_output(value: Any) -> None:
    """Raise `InputError` for Enum members in a model's output. As op arguments, they are written as plain values."""
    if isinstance(value, Enum):
        raise InputError(
            f"holds a {type(value).__name__} ({value!r}), which cannot be written as text: return its plain value."
        )
    entries = [*value, *value.values()] if isinstance(value, Mapping) else value
    for entry in entries if isinstance(entries, (tuple, list)) else ():
        _check_output(entry)


def _checked_name(name: Any, target: Any) -> str:
    if not name:
        raise InputError(
            f"calls {target!r}, which cannot be written as text: it is neither an op of the table nor a function of "
            "torch."
        )
    return str(name)
