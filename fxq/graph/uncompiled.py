"""Graph module of a pipeline, whose code is generated only when it is called or read."""

from __future__ import annotations

from typing import Any

from torch import fx


class UncompiledModule(fx.GraphModule):
    """Graph module that generates its code when it is first called or read after `recompile`.

    Passes edit a graph many times, and mostly run it node by node.
    """

    def recompile(self) -> Any:
        """Let the next call generate the code of the graph."""
        if self.__dict__.get("_compiles"):
            return super().recompile()
        own_class: Any = type(self)  # every graph module has a class of its own
        own_class.forward = UncompiledModule.forward
        return None

    def compile_graph(self) -> Any:
        """Generate the code of the graph now."""
        self.__dict__["_compiles"] = True
        try:
            return super().recompile()
        finally:
            del self.__dict__["_compiles"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Generate the code of the graph and run it. The code replaces this method."""
        self._ensure_code()
        return type(self).forward(self, *args, **kwargs)

    def _ensure_code(self) -> None:
        if type(self).forward is UncompiledModule.forward:
            self.compile_graph()

    @property
    def code(self) -> str:
        """Code of the graph."""
        self._ensure_code()
        return super().code

    def __str__(self) -> str:
        self._ensure_code()
        return super().__str__()

    def __reduce__(self) -> Any:
        self._ensure_code()
        self.__dict__["_compiles"] = True
        try:
            construct, (state, imports) = super().__reduce__()
        finally:
            del self.__dict__["_compiles"]
        state.pop("_compiles", None)
        return construct, (state, imports)
