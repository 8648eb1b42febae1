"""Public names of the package `fxq`."""

from fxq.api import calibrate, compare, convert, load, merge_calibrations, prepare, quantize, run_passes
from fxq.backends.base import Backend, Prices, Support
from fxq.backends.kernel import Kernel
from fxq.backends.region_kernel import RegionKernel
from fxq.backends.stored_graph import read_graph
from fxq.backends.table.kernel_table import FusedUnit
from fxq.backends.table.own_kernels import register_kernel
from fxq.common.metrics import nbytes
from fxq.cost import price_file as prices
from fxq.diagnosis import Diagnosis, doctor
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
    TraceError,
)
from fxq.graph.analysis.partition import connected_regions
from fxq.graph.info import Cost
from fxq.graph.region import Region
from fxq.graph.text.text_writer import graph_tensors, write_graph
from fxq.ledger.comparison import Comparison
from fxq.ledger.layer_qparams import LayerQParams
from fxq.ledger.ledger import Ledger
from fxq.ledger.qparams_table import ModelQParams
from fxq.model import QuantizedModel
from fxq.ops.own_ops import register_op
from fxq.ops.table import Spelling
from fxq.ops.traits import Quant
from fxq.picture.diff import Diff, diff
from fxq.pipeline.history import History, Snapshot
from fxq.quant.observer_base import Observer
from fxq.quant.one_tensor import (
    QuantizationNoise,
    dequantize_tensor,
    make_observer,
    quantization_error,
    quantize_tensor,
)
from fxq.quant.qparams import QParams
from fxq.quant.spec import FLOAT, QuantConfig, TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import op
from fxq.report.profile import Profile
from fxq.rewriting.match import Match, explain
from fxq.rewriting.pattern import FUSIONS, fusion, rewrite
from fxq.rewriting.rewriter import Rewriter
from fxq.tuning.bisection import Bisection
from fxq.tuning.search_result import SearchResult
from fxq.tuning.sensitivity import Sensitivity
from fxq.tuning.tools import bisect, search, sensitivity
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.training_model import TrainingModel

__all__ = [
    "FLOAT",
    "FUSIONS",
    "Backend",
    "BackendError",
    "Bisection",
    "CalibrationError",
    "Comparison",
    "Cost",
    "Diagnosis",
    "Diff",
    "ExportError",
    "FileError",
    "FusedUnit",
    "FxqError",
    "FxqWarning",
    "History",
    "InputError",
    "Kernel",
    "LayerQParams",
    "Ledger",
    "Match",
    "ModelQParams",
    "ObservedModel",
    "Observer",
    "Pass",
    "PassError",
    "PatternError",
    "Prices",
    "Profile",
    "QParams",
    "Quant",
    "QuantConfig",
    "QuantizationNoise",
    "QuantizedModel",
    "Recipe",
    "RecipeError",
    "Region",
    "RegionKernel",
    "RenderError",
    "Rewriter",
    "SearchResult",
    "Sensitivity",
    "Snapshot",
    "Spelling",
    "Stage",
    "Support",
    "TensorSpec",
    "TraceError",
    "TrainingModel",
    "bisect",
    "calibrate",
    "compare",
    "connected_regions",
    "convert",
    "dequantize_tensor",
    "diff",
    "doctor",
    "explain",
    "fusion",
    "graph_tensors",
    "load",
    "make_observer",
    "merge_calibrations",
    "nbytes",
    "op",
    "prepare",
    "prices",
    "quantization_error",
    "quantize",
    "quantize_tensor",
    "read_graph",
    "register_kernel",
    "register_op",
    "rewrite",
    "run_passes",
    "search",
    "sensitivity",
    "write_graph",
]
