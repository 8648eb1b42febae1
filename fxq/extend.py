"""Names for extending fxq: kernels, backends, ops, fusion patterns, passes and observers."""

from fxq.api import run_passes
from fxq.backends.base import Backend, Prices, Support
from fxq.backends.kernel import Kernel
from fxq.backends.packed.fbgemm import Fbgemm
from fxq.backends.packed.qnnpack import Qnnpack
from fxq.backends.region_kernel import RegionKernel
from fxq.backends.stored_graph import read_graph
from fxq.backends.table.function_kernel import QTensor
from fxq.backends.table.kernel_table import KernelRequest, KernelRow
from fxq.backends.table.lowering import RowBackend
from fxq.backends.table.own_kernels import kernel, register_kernel
from fxq.backends.x86.x86 import X86
from fxq.common.container_types import register_container
from fxq.graph.analysis.partition import connected_regions
from fxq.graph.info import Cost
from fxq.graph.region import Region
from fxq.graph.text.text_writer import graph_tensors, write_graph
from fxq.ops.own_ops import register_op
from fxq.ops.table import Spelling
from fxq.ops.traits import OpTraits
from fxq.quant.observer_base import Observer
from fxq.quant.observers import Entropy, Histogram, LeastError, MinMax, MovingAverage, Percentile
from fxq.quant.one_tensor import dequantize_tensor, make_observer, quantization_error, quantize_tensor
from fxq.quant.qparams import QParams
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.match import Match, explain
from fxq.rewriting.pattern import FUSIONS, fusion, rewrite
from fxq.rewriting.rewriter import Rewriter

__all__ = [
    "FUSIONS",
    "X86",
    "Backend",
    "Cost",
    "Entropy",
    "Fbgemm",
    "Histogram",
    "Kernel",
    "KernelRequest",
    "KernelRow",
    "LeastError",
    "Match",
    "MinMax",
    "MovingAverage",
    "Observer",
    "OpTraits",
    "Pass",
    "Percentile",
    "Prices",
    "QParams",
    "QTensor",
    "Qnnpack",
    "Region",
    "RegionKernel",
    "Rewriter",
    "RowBackend",
    "Spelling",
    "Stage",
    "Support",
    "connected_regions",
    "dequantize_tensor",
    "explain",
    "fusion",
    "graph_tensors",
    "kernel",
    "make_observer",
    "quantization_error",
    "quantize_tensor",
    "read_graph",
    "register_container",
    "register_kernel",
    "register_op",
    "rewrite",
    "run_passes",
    "write_graph",
]
