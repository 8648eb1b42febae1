"""Weight-only kernels, by name of the op."""

from __future__ import annotations

from collections.abc import Mapping

from fxq.backends.plain.weight_only import (
    WeightOnlyBag,
    WeightOnlyConv,
    WeightOnlyEmbedding,
    WeightOnlyExperts,
    WeightOnlyKernel,
    WeightOnlyLinear,
)
from fxq.backends.plain.weight_only_recurrent import WeightOnlyRecurrent
from fxq.ops import OPS

KERNELS: Mapping[str, type[WeightOnlyKernel]] = {
    "linear": WeightOnlyLinear,
    "expert_linear": WeightOnlyExperts,
    **dict.fromkeys((*OPS.family("conv"), *OPS.family("conv_transpose")), WeightOnlyConv),
    "embedding": WeightOnlyEmbedding,
    "embedding_bag": WeightOnlyBag,
    **dict.fromkeys(("lstm", "gru", "rnn"), WeightOnlyRecurrent),
}
