"""Passes, one per file, and the pipelines of the presets."""

from fxq.passes.adaround import AdaRound
from fxq.passes.adopt_grids import AdoptGrids
from fxq.passes.annotate import Annotate
from fxq.passes.canonicalize import Canonicalize
from fxq.passes.choose_grids import ChooseGrids
from fxq.passes.cleanup import Cleanup
from fxq.passes.correct_bias import CorrectBias
from fxq.passes.decompose import Decompose
from fxq.passes.equalize import Equalize
from fxq.passes.fallback import Fallback
from fxq.passes.fold_batch_norm import FoldBatchNorm
from fxq.passes.fuse import Fuse
from fxq.passes.gptq import Gptq
from fxq.passes.insert_fake_quantizers import InsertFakeQuantizers
from fxq.passes.insert_observers import InsertObservers
from fxq.passes.insert_qdq import InsertQdq
from fxq.passes.keep_small_values import KeepSmallValues
from fxq.passes.low_rank import LowRank
from fxq.passes.lower import Lower
from fxq.passes.propagate import Propagate
from fxq.passes.rotate_keys import RotateKeys
from fxq.passes.scale_channels import ScaleChannels
from fxq.passes.share_qparams import ShareQParams
from fxq.passes.smooth import Smooth
from fxq.passes.smooth_depthwise import SmoothDepthwise
from fxq.passes.split_inputs import SplitInputs
from fxq.passes.store_states import StoreStates
from fxq.passes.trace import Trace
from fxq.passes.verify_lowering import VerifyLowering
from fxq.quant.spec import DYNAMIC, LOW_BITS, TRAINED, QuantConfig
from fxq.recipe.pass_base import Pass
from fxq.recipe.pipeline import register_preset

PASSES: tuple[Pass, ...] = (
    Trace(),
    Canonicalize(),
    Decompose(),
    FoldBatchNorm(),
    Fuse(),
    Annotate(),
    ShareQParams(),
    InsertObservers(),
    # calibration happens here
    ChooseGrids(),
    KeepSmallValues(),
    InsertQdq(),
    SmoothDepthwise(),
    Smooth(),
    CorrectBias(),
    Propagate(),
    Fallback(),
    SplitInputs(),
    Lower(),
    VerifyLowering(),
    RotateKeys(),
    StoreStates(),
    Cleanup(),
)

TRAINING_PASSES: tuple[Pass, ...] = (
    Trace(),
    Canonicalize(),
    Decompose(),
    FoldBatchNorm(into_next=False),
    Fuse(),
    Annotate(),
    ShareQParams(),
    InsertObservers(),
    ChooseGrids(),
    InsertQdq(),
    Propagate(),
    Fallback(),
    InsertFakeQuantizers(),
    # training happens here; then choose-grids to fallback run again on the trained model, before lower
    Lower(),
    VerifyLowering(),
    Cleanup(),
)

register_preset("static", PASSES, QuantConfig())
register_preset("dynamic", PASSES, QuantConfig(DYNAMIC))
WEIGHT_ONLY_PASSES: tuple[Pass, ...] = tuple(
    step for own in PASSES for step in ((own, Gptq(max_bits=LOW_BITS, needs_data=False)) if own == Smooth() else (own,))
)
"""Passes with `gptq` for weights of 4 bits or fewer, if there is data."""

register_preset("weight_only", WEIGHT_ONLY_PASSES, QuantConfig(activation=None))
STORED_PASSES: tuple[Pass, ...] = (
    Trace(),
    Canonicalize(),
    Decompose(),
    Fuse(),
    AdoptGrids(),
    InsertQdq(),
    Propagate(),
    Fallback(keeps_rounding=True),
    Lower(),
    VerifyLowering(),
    Cleanup(),
)
"""Passes for models that are quantized already, such as ONNX files, with the grids that they have."""

register_preset("stored", STORED_PASSES, QuantConfig(), optimize="coverage")
register_preset("qat", TRAINING_PASSES, QuantConfig(TRAINED, state=None), optimize="coverage")

__all__ = [
    "PASSES",
    "STORED_PASSES",
    "TRAINING_PASSES",
    "AdaRound",
    "AdoptGrids",
    "Annotate",
    "Canonicalize",
    "ChooseGrids",
    "Cleanup",
    "CorrectBias",
    "Decompose",
    "Equalize",
    "Fallback",
    "FoldBatchNorm",
    "Fuse",
    "Gptq",
    "InsertFakeQuantizers",
    "InsertObservers",
    "InsertQdq",
    "KeepSmallValues",
    "LowRank",
    "Lower",
    "Propagate",
    "RotateKeys",
    "ScaleChannels",
    "ShareQParams",
    "Smooth",
    "SmoothDepthwise",
    "SplitInputs",
    "StoreStates",
    "Trace",
    "VerifyLowering",
]
