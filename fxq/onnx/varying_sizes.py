"""Dynamic sizes: lengths of input axes that are known only at run time, and expressions of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxq.graph.analysis.varying_axes import terms_of
from fxq.onnx.onnx_objects import NotInOnnx

if TYPE_CHECKING:
    from fxq.onnx.writer import Writer


def varies(size: Any) -> bool:
    """Whether a size is dynamic: known only when the model runs."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def decided(comparison: Any) -> bool | None:
    """Result of a comparison of sizes if it is the same for all sizes from 1 on; None if it depends on them."""
    if not isinstance(comparison, torch.SymBool):
        return bool(comparison)
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    expression = comparison.node.expr
    bounds = bound_sympy(expression, {symbol: ValueRanges(1, int_oo) for symbol in expression.free_symbols})
    return bool(bounds.lower) if bounds.is_singleton() else None


class VaryingSizes:
    """Dynamic sizes of a model's inputs, as symbols that shapes are computed with.

    Code that needs the value of such a size, in a branch or a constant, restricts the model to that size. PyTorch
    records these restrictions as guards; `assumed` and `asked` return them.
    """

    def __init__(self) -> None:
        # Imported here: sympy imports slowly, and only models with dynamic sizes need it.
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._names: dict[Any, str] = {}
        self._axes: dict[Any, tuple[str, int]] = {}
        self._sizes: dict[str, Any] = {}
        self._examples: dict[Any, int] = {}

    def axis(self, name: str, value: str, axis: int, example: int) -> Any:
        """Declare an axis of an input as dynamic and return its size. Axes with one name have one size.

        The name of a sum, such as "past + new", is that of sizes that have been declared.

        Args:
            name: name of the size, such as "batch".
            value: name of the input.
            axis: axis of the input.
            example: example of the size; 0 and 1 are replaced by 2.
        """
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        if name not in self._sizes and len(terms_of(name)) > 1:
            self._sizes[name] = sum(self._sizes[term] for term in terms_of(name))
        if name not in self._sizes:
            hint, source = max(example, 2), ConstantSource(name)
            symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self._sizes[name] = self._env.create_symintnode(symbol, hint=hint, source=source)
            self._names[symbol], self._axes[symbol], self._examples[symbol] = name, (value, axis), hint
        return self._sizes[name]

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return a tensor of these sizes, without data."""
        with self.computing():
            return torch.empty(tuple(shape), dtype=dtype, device="meta")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager for the computation of shapes; tensors created inside have no data."""
        with self._mode, python_dispatch():
            yield

    def assumed(self) -> str | None:
        """First restriction of the dynamic sizes that excludes some larger sizes, as text; None if there is none."""
        return next((self.text(guard.expr) for guard in self._env.guards if not self._holds_above(guard.expr)), None)

    def asked(self) -> list[str]:
        """All restrictions of the dynamic sizes so far, as text."""
        return [self.text(guard.expr) for guard in self._env.guards]

    def fixed(self) -> dict[str, int]:
        """Sizes that the computation restricts to one number, by name."""
        exact = {name: self._env.replace(symbol) for symbol, name in self._names.items()}
        return {name: int(size) for name, size in exact.items() if size.is_Integer}

    def _holds_above(self, guard: Any) -> bool:
        """Whether a guard holds for all larger sizes too, such as a lower bound, or that a size is neither 0 nor 1."""
        import sympy

        if isinstance(guard, sympy.And):
            return all(map(self._holds_above, guard.args))
        if isinstance(guard, sympy.Ne):
            return guard.rhs in (0, 1) and self._grows(guard.lhs)
        if isinstance(guard, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
            less, more = guard.lts, guard.gts
            if less.is_Integer:
                return self._grows(more)
            times = more / less  # PyTorch compares sizes with products of sizes when it checks memory layouts
            return self._grows(less) and self._grows(times) and bool(times.xreplace(self._examples) > 1)
        return False

    def _grows(self, size: Any) -> bool:
        """Whether an expression of sizes does not decrease if the sizes grow beyond the example."""
        from torch.utils._sympy.functions import FloorDiv

        if size.is_Integer or size.is_Symbol:
            return True
        if size.is_Pow:
            base, power = size.args
            return bool(power.is_Integer and power > 0 and base.xreplace(self._examples) >= 0) and self._grows(base)
        parts, expression_type = size.args, type(size).__name__
        if isinstance(size, FloorDiv):
            return bool(parts[1].is_Integer and parts[1] > 0) and self._grows(parts[0])
        if expression_type == "Mul" and any(part.xreplace(self._examples) < 0 for part in parts):
            return False
        return expression_type in ("Add", "Mul", "Max", "Min") and all(map(self._grows, parts))

    def text(self, size: Any) -> str:
        """Text of a size or a restriction, with the names of the sizes."""
        import sympy

        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)
        named = expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in self._names.items()})
        return f"{named.lhs} != {named.rhs}" if isinstance(named, sympy.Ne) else str(named)

    def written(self, w: Writer, sizes: Sequence[Any]) -> str:
        """Write sizes as a 1-d int64 value that the model computes from the shapes of its inputs."""
        parts = [self._written(w, s.node.expr) if varies(s) else w.name_of(w.ints([s])) for s in sizes]
        return w.joined(parts, 0)

    def _written(self, w: Writer, expression: Any) -> str:
        """Write an expression of sizes as a value with one entry."""
        return w.emit_once(("size", expression), lambda: self._computed(w, expression))

    def _computed(self, w: Writer, expression: Any) -> str:
        import sympy
        from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

        if expression.is_Integer:
            return w.name_of(w.ints([int(expression)]))
        if expression in self._axes:
            name, axis = self._axes[expression]
            return w.emit("Shape", name, start=axis, end=axis + 1)
        if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
            parts, op_type = [expression.base] * int(expression.exp), "Mul"
        else:
            parts, op_type = list(expression.args), _OP_TYPES.get(type(expression).__name__, "")
        if isinstance(expression, (FloorDiv, Mod, PythonMod)):
            first, second = (self._written(w, part) for part in parts)
            remainder = w.emit("Mod", first, second)  # has the sign of the divisor, as in Python
            return (
                remainder
                if not isinstance(expression, FloorDiv)
                else w.emit("Div", w.emit("Sub", first, remainder), second)
            )
        if not op_type or not isinstance(expression, sympy.Expr):
            raise NotInOnnx(f"fxq has no ONNX form of the size {self.text(expression)}")
        result, *operands = [self._written(w, part) for part in parts]
        for operand in operands:
            result = w.emit(op_type, result, operand)
        return result


_OP_TYPES = {"Add": "Add", "Mul": "Mul", "Pow": "Mul", "Max": "Max", "Min": "Min"}


def python_dispatch() -> AbstractContextManager[Any]:
    """Context manager for computations with dynamic sizes; PyTorch then uses the Python forms of its ops."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(enable_python_dispatcher())
    return stack
