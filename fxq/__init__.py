"""fxq: a quantization compiler for PyTorch, as a pipeline of graph-rewriting passes on `torch.fx`."""

from fxq import prices
from fxq.api import calibrate, compare, convert, prepare, quantize, run_passes
from fxq.comparison import Comparison
from fxq.diff import Diff, diff
from fxq.doctor import Diagnosis, doctor
from fxq.errors import (
    BackendError,
    CalibrationError,
    FxqError,
    FxqWarning,
    InputError,
    PassError,
    PatternError,
    RecipeError,
    RenderError,
    TraceError,
)
from fxq.history import History, Snapshot
from fxq.layers import LayerQParams
from fxq.ledger import Ledger
from fxq.match import Match, explain
from fxq.model import ObservedModel, QuantizedModel
from fxq.passbase import Pass, Stage
from fxq.pattern import FUSIONS, fusion, rewrite
from fxq.qparams import QParams
from fxq.recipe import Recipe
from fxq.rewrite import Rewriter
from fxq.selector import op
from fxq.size import nbytes
from fxq.spec import FLOAT, QuantConfig, TensorSpec

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The public names; the modules behind them are fxq's own."""
    return [*__all__, "__version__", "__doc__", "__file__", "__name__", "__path__"]


__all__ = [
    "FLOAT",
    "FUSIONS",
    "BackendError",
    "CalibrationError",
    "Comparison",
    "Diagnosis",
    "Diff",
    "FxqError",
    "FxqWarning",
    "History",
    "InputError",
    "LayerQParams",
    "Ledger",
    "Match",
    "ObservedModel",
    "Pass",
    "PassError",
    "PatternError",
    "QParams",
    "QuantConfig",
    "QuantizedModel",
    "Recipe",
    "RecipeError",
    "RenderError",
    "Rewriter",
    "Snapshot",
    "Stage",
    "TensorSpec",
    "TraceError",
    "calibrate",
    "compare",
    "convert",
    "diff",
    "doctor",
    "explain",
    "fusion",
    "nbytes",
    "op",
    "prepare",
    "prices",
    "quantize",
    "rewrite",
    "run_passes",
]
