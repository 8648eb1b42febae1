"""Classes of what fxq returns: quantized models, ledgers, comparisons and other tables."""

from fxq.common.metrics import nbytes
from fxq.diagnosis import Diagnosis
from fxq.integrations.memory_estimate import MemoryEstimate
from fxq.ledger.clipped import Clipped
from fxq.ledger.comparison import Comparison
from fxq.ledger.layer_qparams import LayerQParams
from fxq.ledger.ledger import Ledger
from fxq.ledger.qparams_table import ModelQParams
from fxq.model import QuantizedModel
from fxq.parts.observed_parts import ObservedParts
from fxq.parts.parts_model import PartsModel
from fxq.picture.diff import Diff
from fxq.pipeline.history import History, Snapshot
from fxq.programs.quantized_programs import QuantizedPrograms
from fxq.quant.one_tensor import QuantizationNoise
from fxq.quant.quantized_rows import QuantizedRows
from fxq.report.profile import Profile
from fxq.tuning.bisection import Bisection
from fxq.tuning.bits_result import BitsResult
from fxq.tuning.search_result import SearchResult
from fxq.tuning.sensitivity import Sensitivity
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.training_model import TrainingModel

__all__ = [
    "Bisection",
    "BitsResult",
    "Clipped",
    "Comparison",
    "Diagnosis",
    "Diff",
    "History",
    "LayerQParams",
    "Ledger",
    "MemoryEstimate",
    "ModelQParams",
    "ObservedModel",
    "ObservedParts",
    "PartsModel",
    "Profile",
    "QuantizationNoise",
    "QuantizedModel",
    "QuantizedPrograms",
    "QuantizedRows",
    "SearchResult",
    "Sensitivity",
    "Snapshot",
    "TrainingModel",
    "nbytes",
]
