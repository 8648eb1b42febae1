"""Public names of the package `fxq`."""

from fxq import extend, results, task_metrics
from fxq.api import calibrate, compare, convert, load, merge_calibrations, prepare, quantize
from fxq.calibration.synthetic import synthetic
from fxq.cost import price_file as cost_cache
from fxq.diagnosis import doctor
from fxq.errors import (
    BackendError,
    CalibrationError,
    ExportError,
    FileError,
    FxqError,
    FxqWarning,
    InputError,
    PassError,
    PatternError,
    RecipeError,
    RenderError,
    StateError,
    TraceError,
)
from fxq.integrations.memory_estimate import estimate_memory
from fxq.onnx.reading.read_onnx import read_onnx
from fxq.picture.diff import diff
from fxq.quant.spec import FLOAT, QuantConfig, TensorSpec
from fxq.recipe.pass_base import Pass
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import by_op
from fxq.rewriting.pattern import fusion
from fxq.tuning.tools import bisect, search, sensitivity

__all__ = [
    "FLOAT",
    "BackendError",
    "CalibrationError",
    "ExportError",
    "FileError",
    "FxqError",
    "FxqWarning",
    "InputError",
    "Pass",
    "PassError",
    "PatternError",
    "QuantConfig",
    "Recipe",
    "RecipeError",
    "RenderError",
    "StateError",
    "TensorSpec",
    "TraceError",
    "bisect",
    "by_op",
    "calibrate",
    "compare",
    "convert",
    "cost_cache",
    "diff",
    "doctor",
    "estimate_memory",
    "extend",
    "fusion",
    "load",
    "merge_calibrations",
    "prepare",
    "quantize",
    "read_onnx",
    "results",
    "search",
    "sensitivity",
    "synthetic",
    "task_metrics",
]
