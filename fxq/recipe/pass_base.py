"""`Pass`, the base class of passes, and `Stage`, the stages that passes move a graph through."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fxq.errors import PassError, RecipeError
from fxq.quant.spec import QuantConfig
from fxq.rewriting.rewriter import Rewriter


class Stage(enum.IntEnum):
    """Stage of a graph. A pass needs one stage and gives the same or a later one.

    TRACED: as the tracer made it. CANONICAL: every op in its canonical form. FUSED: groups of ops are units. OBSERVED:
    with observers on the edges. QDQ: with quantize and dequantize ops. LOWERED: with kernels. The invariants of each
    stage are in `fxq/pipeline/invariants.py`.
    """

    NONE = 0
    TRACED = 1
    CANONICAL = 2
    FUSED = 3
    OBSERVED = 4
    QDQ = 5
    LOWERED = 6

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Pass(ABC):
    """One step of the pipeline: a frozen dataclass whose fields are its options.

    A subclass sets `name`, `needs` and `gives`, and edits the graph through its rewriter::

        @dataclass(frozen=True)
        class DropTanh(fxq.Pass):
            '''Before: tanh(x)    After: x'''
            name = "drop-tanh"
            needs = gives = fxq.extend.Stage.CANONICAL

            def run(self, rewriter):
                for node in rewriter.nodes("tanh"):
                    rewriter.replace(node, node.args[0])

    `recipe.insert_pass(DropTanh(), after="canonicalize")` adds it to the pipeline. In a test, run it alone on a graph
    that `fxq.extend.read_graph` makes from text: `DropTanh().run(fxq.extend.Rewriter(gm, context=None))`. If the graph
    is invalid or does not run after the pass, an error names the pass; `recipe.with_check()` finds a pass that makes
    the numbers wrong.

    Attributes:
        name: name in the pipeline and in messages.
        needs: stage of the graph before the pass.
        gives: stage of the graph after the pass.
        latest: last stage at which the pass is useful; at a later one it raises `PassError`. None: any stage from
            `needs` on.
        bounds: smallest and largest value of each numeric option, by name.

    Raises:
        RecipeError: an option is out of its bounds.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    name: ClassVar[str] = ""
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL
    latest: ClassVar[Stage | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise `PassError` for invalid stages, stages in the wrong order, and a hand-written `__init__`.

        A saved recipe holds the fields of the dataclass only, not the arguments of such an `__init__`.
        """
        super().__init_subclass__(**kwargs)
        for key in ("needs", "gives", "latest"):
            if not isinstance(stage := getattr(cls, key), (Stage, property)) and (key, stage) != ("latest", None):
                raise PassError(
                    f"{cls.__name__}: {key} is {stage!r}; it must be a stage, such as fxq.extend.Stage.CANONICAL."
                )
            if isinstance(stage, Stage) and isinstance(cls.needs, Stage) and stage < cls.needs:
                raise PassError(f"{cls.__name__}: {key} is {stage}, before {cls.needs}, which the pass needs.")
        if not isinstance(cls.name, (str, property)):
            raise PassError(f"{cls.__name__}: name is {cls.name!r}; it must be a string.")
        if "__init__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
            raise PassError(
                f"{cls.__name__}: a pass cannot define __init__. Make it a dataclass(frozen=True) with its options as "
                "fields."
            )

    def __post_init__(self) -> None:
        for key, (smallest, largest) in self.bounds.items():
            value = getattr(self, key)
            is_integer = isinstance(type(self).__dataclass_fields__[key].default, int)
            if type(value) not in ((int,) if is_integer else (int, float)) or not smallest <= value <= largest:
                kind = "an integer" if is_integer else "a number"
                raise RecipeError(
                    f"{self.name}: {key} is {value!r}; it must be {kind} from {smallest:g} to {largest:g}."
                )

    @abstractmethod
    def run(self, rewriter: Rewriter[Any]) -> None:
        """Edit the graph of `rewriter.gm` through the rewriter."""

    @property
    def samples_read(self) -> int:
        """Number of calibration samples to record, since the pass runs the graph on them; 0: no preference."""
        return 0

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        """Whether the pass may change a model whose layers have these configs. If not, it reads no samples."""
        return True

    def scratch_bytes(self, rows: tuple[int, int, int]) -> int:
        """Bytes of temporary tensors while the pass chooses the integers of one weight with data; 0 if it does not.

        Args:
            rows: groups, outputs of a group and inputs of an output of the weight.
        """
        return 0

    @property
    def replaceable(self) -> bool:
        """Whether a recipe may insert a pass of this name, which replaces this one; else that is an error."""
        return False

    @property
    def options(self) -> dict[str, Any]:
        """The options: the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def changed_options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in self.options.items() if v != defaults[k]}

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.changed_options.items())
        return f"{self.name}({options})" if options else self.name
