"""Sizes that vary: axes of inputs whose length is known when the model runs, and what is computed of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxq.onnx.onnx_objects import NotInOnnx

if TYPE_CHECKING:
    from fxq.onnx.writer import Writer


def varies(size: Any) -> bool:
    """Whether a size is known only when the model runs."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


class VaryingSizes:
    """The sizes of a model's inputs that may be others in each call, as symbols, which shapes are computed with.

    Whatever asks such a size for its value (a branch, a constant that is made of it) makes the model one of that size
    alone; PyTorch keeps account of what was asked, and `assumed` tells it.
    """

    def __init__(self) -> None:
        # Imported here: sympy takes a good part of a second, and only who writes such a model needs it.
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._names: dict[Any, str] = {}
        self._axes: dict[Any, tuple[str, int]] = {}
        self._sizes: dict[str, Any] = {}
        self._examples: dict[Any, int] = {}

    def axis(self, name: str, value: str, axis: int, example: int) -> Any:
        """The size of an axis of an input of the model. Axes of one name have the same size.

        Args:
            name: what the size is called, such as "batch".
            value: the name of the input.
            axis: which of its axes.
            example: a size that it may have; where that is 0 or 1, 2 stands for it.
        """
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        if name not in self._sizes:
            hint, source = max(example, 2), ConstantSource(name)
            symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self._sizes[name] = self._env.create_symintnode(symbol, hint=hint, source=source)
            self._names[symbol], self._axes[symbol], self._examples[symbol] = name, (value, axis), hint
        return self._sizes[name]

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A tensor of such sizes, without values."""
        with self.computing():
            return torch.empty(tuple(shape), dtype=dtype, device="meta")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """For the block that computes shapes: tensors that are made inside have no values."""
        with self._mode, python_dispatch():
            yield

    def assumed(self) -> str | None:
        """What was taken for granted of sizes that vary, as text, but that they are large enough; None: nothing."""
        return next((self.text(guard.expr) for guard in self._env.guards if not self._holds_above(guard.expr)), None)

    def asked(self) -> list[str]:
        """All that was taken for granted so far, as text."""
        return [self.text(guard.expr) for guard in self._env.guards]

    def _holds_above(self, guard: Any) -> bool:
        """Whether what was asked of sizes holds for all larger ones: they are no smaller, or neither 0 nor 1."""
        import sympy

        if isinstance(guard, sympy.And):
            return all(map(self._holds_above, guard.args))
        if isinstance(guard, sympy.Ne):
            return guard.rhs in (0, 1) and self._grows(guard.lhs)
        if isinstance(guard, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
            less, more = guard.lts, guard.gts
            if less.is_Integer:
                return self._grows(more)
            times = more / less  # of sizes and their product, as PyTorch asks where it looks how memory is laid out
            return self._grows(less) and self._grows(times) and bool(times.xreplace(self._examples) > 1)
        return False

    def _grows(self, size: Any) -> bool:
        """Whether an expression of sizes is no smaller where these are larger than in the example."""
        from torch.utils._sympy.functions import FloorDiv

        if size.is_Integer or size.is_Symbol:
            return True
        if size.is_Pow:
            base, power = size.args
            return bool(power.is_Integer and power > 0 and base.xreplace(self._examples) >= 0) and self._grows(base)
        parts, kind = size.args, type(size).__name__
        if isinstance(size, FloorDiv):
            return bool(parts[1].is_Integer and parts[1] > 0) and self._grows(parts[0])
        if kind == "Mul" and any(part.xreplace(self._examples) < 0 for part in parts):
            return False
        return kind in ("Add", "Mul", "Max", "Min") and all(map(self._grows, parts))

    def text(self, size: Any) -> str:
        """A size, or what was asked of one, with the names of the axes in it."""
        import sympy

        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)
        named = expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in self._names.items()})
        return f"{named.lhs} != {named.rhs}" if isinstance(named, sympy.Ne) else str(named)

    def written(self, w: Writer, sizes: Sequence[Any]) -> str:
        """Sizes as a value of the model, int64, 1-d: what it computes of the shapes of its inputs."""
        parts = [self._written(w, s.node.expr) if varies(s) else w.name_of(w.ints([s])) for s in sizes]
        return w.joined(parts, 0)

    def _written(self, w: Writer, expression: Any) -> str:
        """An expression of sizes, of one entry."""
        return w.made_once(("size", expression), lambda: self._computed(w, expression))

    def _computed(self, w: Writer, expression: Any) -> str:
        import sympy
        from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

        if expression.is_Integer:
            return w.name_of(w.ints([int(expression)]))
        if expression in self._axes:
            name, axis = self._axes[expression]
            return w.emit("Shape", name, start=axis, end=axis + 1)
        if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
            parts, kind = [expression.base] * int(expression.exp), "Mul"
        else:
            parts, kind = list(expression.args), _KINDS.get(type(expression).__name__, "")
        if isinstance(expression, (FloorDiv, Mod, PythonMod)):
            first, second = (self._written(w, part) for part in parts)
            rest = w.emit("Mod", first, second)  # its sign is the divisor's, as Python's
            return rest if not isinstance(expression, FloorDiv) else w.emit("Div", w.emit("Sub", first, rest), second)
        if not kind or not isinstance(expression, sympy.Expr):
            raise NotInOnnx(f"the size {self.text(expression)} is computed in a way that fxq cannot write")
        made, *others = [self._written(w, part) for part in parts]
        for other in others:
            made = w.emit(kind, made, other)
        return made


_KINDS = {"Add": "Add", "Mul": "Mul", "Pow": "Mul", "Max": "Max", "Min": "Min"}


def python_dispatch() -> AbstractContextManager[Any]:
    """For a block that computes with sizes that vary: PyTorch takes the forms of its ops that are written in Python."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(enable_python_dispatcher())
    return stack
