"""What a pass is, and the stages that passes move a graph through."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fxq.errors import PassError, RecipeError
from fxq.rewriting.rewriter import Rewriter


class Stage(enum.IntEnum):
    """What the graph holds. A pass needs one stage and gives the same or a later one (`fxq/pipeline/invariants.py`)."""

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

    A subclass sets `name`, `needs` and `gives`, and edits the graph through the rewriter it is given::

        @dataclass(frozen=True)
        class DropTanh(fxq.Pass):
            '''Before: tanh(x)    After: x'''
            name = "drop-tanh"
            needs = gives = fxq.extend.Stage.CANONICAL

            def run(self, rewriter):
                for node in rewriter.nodes("tanh"):
                    rewriter.replace(node, node.args[0])

    `recipe.insert_pass(DropTanh(), after="canonicalize")` puts it into the pipeline. A test runs it alone, on a graph
    that `fxq.extend.read_graph` has made of a text: `DropTanh().run(fxq.extend.Rewriter(gm, context=None))`. An
    invalid graph, or one that does not run, raises an error that names the pass. `recipe.with_check()` finds the pass
    that makes numbers wrong.

    `bounds` of the class are the least and the largest value of its options that are numbers, by name. `latest` is the
    last stage of a graph in which the pass finds what it looks for; None: it runs at any stage from `needs` on.

    Raises:
        RecipeError: an option is not a number from the least to the largest.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    name: ClassVar[str] = ""
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL
    latest: ClassVar[Stage | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise `PassError` for stages that are none, or in the wrong order, and for an `__init__` of the class's own.

        What such an `__init__` takes would not be in a saved recipe.
        """
        super().__init_subclass__(**kwargs)
        for key in ("needs", "gives", "latest"):
            if not isinstance(stage := getattr(cls, key), (Stage, property)) and (key, stage) != ("latest", None):
                raise PassError(
                    f"{cls.__name__}: {key} is {stage!r}; it must be a stage, as fxq.extend.Stage.CANONICAL is."
                )
            if isinstance(stage, Stage) and isinstance(cls.needs, Stage) and stage < cls.needs:
                raise PassError(f"{cls.__name__}: {key} is {stage}, before {cls.needs}, which the pass needs.")
        if not isinstance(cls.name, (str, property)):
            raise PassError(f"{cls.__name__}: name is {cls.name!r}; it must be a text.")
        if "__init__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
            raise PassError(f"{cls.__name__}: a pass is a dataclass(frozen=True): its options are fields, no __init__.")

    def __post_init__(self) -> None:
        for key, (least, most) in self.bounds.items():
            value = getattr(self, key)
            whole = isinstance(type(self).__dataclass_fields__[key].default, int)
            if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
                kind = "a whole number" if whole else "a number"
                raise RecipeError(f"{self.name}: {key} is {value!r}; it must be {kind} from {least:g} to {most:g}.")

    @abstractmethod
    def run(self, rewriter: Rewriter) -> None:
        """Edit the graph of `rewriter.gm` through the rewriter."""

    @property
    def samples_read(self) -> int:
        """How many calibration samples the pass would like to run the graph on: they are kept for it; 0: any number."""
        return 0

    @property
    def options(self) -> dict[str, Any]:
        """The pass's fields as plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def changed_options(self) -> dict[str, Any]:
        """The fields that differ from their default."""
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in self.options.items() if v != defaults[k]}

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v!r}" for k, v in self.changed_options.items())
        return f"{self.name}({inside})" if inside else self.name
