"""verify-lowering: compare every kernel with its q/dq form. The reason to trust fxq."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxq.backends.kernel import Kernel
from fxq.backends.lower_graph import record_engine_layers
from fxq.backends.region_kernel import engine_layers
from fxq.common.data import Batch, first_of, samples_in
from fxq.common.metrics import identical, storage_address, tensors
from fxq.common.source import name_of
from fxq.errors import BackendError, FxqError, InputError, PassError, warn, words_of
from fxq.graph.bindable import Bindable
from fxq.graph.info import Decision, Plan, info
from fxq.graph.place import where
from fxq.graph.query import arguments_of, submodule
from fxq.graph.region import Region
from fxq.graph.region_difference import FLOAT32, MAX_KERNEL_VALUE, DefaultTolerances, difference, largest_value
from fxq.graph.region_run import RegionOutput, run_region, weights_in
from fxq.graph.run import Runner
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter
from fxq.tracing.fidelity import run_model

_EXTRA_SHAPES = 2
"""Number of further input shapes, among the recorded samples, that kernels are verified on."""
_MAX_INPUT_VALUES = 2**18
"""Maximum number of input values that kernels of small models are verified on; more find nothing new."""


@dataclass(frozen=True)
class VerifyLowering(Pass):
    """Compare every kernel and conversion with its q/dq form on recorded samples; replace a wrong one by that form.

    Before: x86.conv(x)    After: x86.conv(x), or quantize(conv2d(dequantize(x), ...)) if the kernel is wrong
    Keeps: every kernel that is right: its integers are nearest to the real values, up to float32 arithmetic, and it
    changes neither its weights nor its inputs.
    Also: a kernel that would overwrite a residual with other readers copies it instead. An op that an engine runs in
    float, although its plan is int8, is recorded as a float op with that reason.

    The lowered graph runs on the first recorded batch (part of it if the samples are large), and on its first sample
    alone, since kernels plan by input shape. If recorded samples have other shapes, it also runs on one sample each of
    the first two of these. Kernels whose code depends on the image size also run alone at two other sizes, on inputs
    that are cropped or repeated. On the first batch all kernels are compared; at other sizes, one of those that differ
    only in the values of their tensors, as the layers of a transformer.

    Args:
        tolerance: how much further than half a step an integer may be from the real value, in steps.
        float_tolerance: error allowed for float results, relative to the largest absolute value of the reference.
        sum_tolerance: further error allowed for both, relative to the magnitude of the terms of a sum, since terms that
            cancel leave their rounding errors. It is ten times the error that float32 sums show.
        sizes: whether kernels are verified at other sizes, too: one sample, other shapes, other image sizes.
    """

    tolerance: float = DefaultTolerances.tolerance
    float_tolerance: float = DefaultTolerances.float_tolerance
    sum_tolerance: float = DefaultTolerances.sum_tolerance
    sizes: bool = True

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "tolerance": (0.0, math.inf),
        "float_tolerance": (0.0, math.inf),
        "sum_tolerance": (0.0, math.inf),
    }
    name: ClassVar[str] = "verify-lowering"
    needs: ClassVar[Stage] = Stage.LOWERED
    gives: ClassVar[Stage] = Stage.LOWERED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Compare all kernels, then replace the wrong ones by their q/dq form."""
        regions = rewriter.context.regions
        for node in rewriter.nodes():
            kernel: Any = submodule(rewriter.gm, node)
            if node not in regions and isinstance(kernel, Kernel):
                place = where(rewriter.gm, node)
                warn(f"{place}: the {kernel.name} kernel was added after lower. It has no q/dq form: not verified.")
        if not regions:
            return
        findings = self._find(rewriter)
        for node, wrong in findings.wrong.items():
            if wrong.largest < MAX_KERNEL_VALUE:
                _warn(rewriter, node, f"kernel is wrong on this machine: {wrong.why}. It runs in qdq form instead")
                reason = f"failed verification: {wrong.why}"
            else:
                end = f"{wrong.largest:.3g}, near the end of float32 ({FLOAT32:.3g})"
                reason = f"fails on values as large as {end}: {wrong.why}"
                _warn(rewriter, node, f"kernel {reason}. It runs in qdq form instead", "scale the data down")
            with rewriter.attributed("put_back", put_back):
                put_back(rewriter, node, regions[node], f"its kernel {_name_of(rewriter, node)} {reason}")
        for node, why in findings.overwrites.items():
            kernel = submodule(rewriter.gm, node)
            if kernel is not None and node not in findings.wrong:
                _warn(rewriter, node, f"kernel overwrites its residual, but {why}. It copies it instead")
                kernel.inplace = False
        with torch.no_grad():
            for node, layers in engine_layers(rewriter.gm, rewriter.context.example).items():
                record_engine_layers(rewriter, node, layers)

    def _find(self, rewriter: Rewriter[Context]) -> _Findings:
        """Find wrong kernels: on a batch, on one sample, and on samples of other shapes."""
        context = rewriter.context
        batch = (context.samples or [context.example])[0]
        if context.divisible:
            size = sum(tensor.numel() for tensor in tensors((batch.args, batch.kwargs)))
            sample_size = size // (samples_in(batch) or 1)
            batch = first_of(batch, 2 if context.is_large else max(2, _MAX_INPUT_VALUES // max(sample_size, 1)))
        findings = self._compare(rewriter, batch, resizes=self.sizes)
        if findings is None:  # the first samples were cut along an axis that does not count samples
            batch = context.example
            findings = self._compare(rewriter, batch, certain=True, resizes=self.sizes) or _Findings()
        if not self.sizes:
            return findings
        singles = [first_of(sample, 1) if context.divisible else sample for sample in (batch, *context.samples)]
        by_shapes = {str(single): single for single in singles if str(single) != str(batch)}  # `str` gives the shapes
        for single in [*by_shapes.values()][: 1 + _EXTRA_SHAPES]:
            more = self._compare(rewriter, single, is_first=False) or _Findings()
            findings.wrong.update({k: v for k, v in more.wrong.items() if k not in findings.wrong})
            findings.overwrites.update(more.overwrites)
        return findings

    def _compare(
        self,
        rewriter: Rewriter[Context],
        batch: Batch,
        certain: bool = False,
        resizes: bool = False,
        is_first: bool = True,
    ) -> _Findings | None:
        """Find wrong kernels on one batch.

        Args:
            rewriter: rewriter of the lowered graph.
            batch: inputs of the model.
            certain: whether the graph must run on this batch, so that an error is raised if it does not.
            resizes: whether kernels also run alone at other sizes.
            is_first: whether it is the batch on which all kernels are compared, see `_Verifier`.

        Returns:
            The findings; None if the graph does not run on the batch.
        """
        verifier = _Verifier(rewriter.gm, batch, rewriter.context.regions, self, resizes, is_first)
        try:
            with torch.no_grad():
                verifier.run()
        except FxqError as error:
            if certain or not isinstance(error, InputError):  # the graph may not support this size
                raise
            return None
        except Exception as error:  # nor may the float model
            if certain:
                raise
            if _runs_in_float(rewriter.context, batch):
                problem = f"{batch}, as the float model does: {type(error).__name__}: {words_of(error)}"
                warn(
                    f"verify-lowering: the lowered graph does not run on {problem}. Its kernels are not verified there."
                )
            return None
        return verifier.findings


def _runs_in_float(context: Context, batch: Batch) -> bool:
    """Whether the float model runs on a batch."""
    try:
        run_model(context.model, batch, context.recipe.concrete_args)
    except Exception:  # models raise errors of any type for a wrong size
        return False
    return True


def _name_of(rewriter: Rewriter, node: fx.Node) -> str:
    kernel = submodule(rewriter.gm, node)
    return str(getattr(kernel, "name", node.target)) if kernel is not None else node.name


def _warn(rewriter: Rewriter, node: fx.Node, problem: str, remedy: str = "") -> None:
    kernel = submodule(rewriter.gm, node)
    ours = kernel.is_ours() if isinstance(kernel, Kernel) else kernel is None
    code = kernel.defined_as() if isinstance(kernel, Kernel) else type(kernel)
    kind = "class" if isinstance(code, type) else "function"
    remedy = remedy or ("please report it" if ours else f"its {kind} is {name_of(code)}")
    warn(f"{where(rewriter.gm, node)}: the {_name_of(rewriter, node)} {problem}; {remedy}.")


@dataclass(frozen=True)
class _Wrong:
    """Description of how a kernel's result differs, and the largest value that its region computes with."""

    why: str
    largest: float


@dataclass
class _Findings:
    """Findings of a comparison, by the kernel's node.

    Attributes:
        wrong: kernels with a wrong result.
        overwrites: kernels that overwrite a value with other readers, each with the reason.
    """

    wrong: dict[fx.Node, _Wrong] = field(default_factory=dict)
    overwrites: dict[fx.Node, str] = field(default_factory=dict)


class _Verifier(Runner):
    """Run of the lowered graph that compares every kernel with its q/dq form on the same inputs.

    Attributes:
        findings: findings so far.
        resizes: whether each kernel also runs alone on resized inputs, see `Kernel.at_other_sizes`.
        compares_all: whether all kernels are compared; else one of those that are alike, see `_likeness`.
        right: likenesses of the kernels that were right, on the run's inputs and on resized ones.
        lasting: by address, memory that outlives a run and must not be overwritten: weights and inputs of the model.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        batch: Batch,
        regions: dict[fx.Node, Region],
        rules: VerifyLowering,
        resizes: bool,
        compares_all: bool,
    ) -> None:
        super().__init__(gm, batch)
        self.resizes, self.compares_all = resizes, compares_all
        self.right: set[Hashable] = set()
        self.regions, self.rules, self.findings = regions, rules, _Findings()
        lasting = {"a weight": [*gm.parameters(), *gm.buffers()], "an input of the model": list(self.values.values())}
        self.lasting = {storage_address(tensor): name for name, values in lasting.items() for tensor in tensors(values)}

    def compute(self, node: fx.Node) -> Any:
        """Return the kernel's value if it is right, else that of the q/dq form."""
        region = self.regions.get(node)
        if region is None:
            return super().compute(node)
        likeness = self._likeness(node)
        if likeness in self.right and not self.compares_all:
            return self._run_kernel(node)
        inputs, weights = inputs_now(self.gm, node, region), weights_in(self.gm, region)
        values = {read: self.values[now] for read, now in inputs.items()} | weights
        expected = run_region(self.gm, region, values)
        kept = self._kept(node)
        try:
            got = self._run_kernel(node)
            later = self._run_bound(node, got)
            rounded = _rounded_result(submodule(self.gm, node), self._inputs(node))
            why = difference(self.gm, region, values, expected, got, self.rules, rounded)
        except Exception as error:
            if isinstance(error, FxqError) and not isinstance(error, BackendError):
                raise
            why = f"it raised {type(error).__name__}: {words_of(error)}"
        why = _restored(kept) or why
        if why is None and not all(map(identical, tensors(later), tensors(got))):
            why = "bound to its inputs it returns something else"
        if why is None and likeness not in self.right:
            why = self._wrong_at_other_sizes(node, region, weights)
            why = _restored(kept) or why
        if why is None:
            self.right |= {likeness} - {None}
            return got
        self.findings.wrong.setdefault(node, _Wrong(why, largest_value(self.gm, region, values)))
        right = tuple(result.value for result in expected)
        return right if len(right) > 1 else right[0]

    def _kept(self, node: fx.Node) -> list[tuple[str, Tensor, Tensor]]:
        """Names, tensors and copies of all that a kernel must not change, if its code is not part of fxq."""
        kernel = submodule(self.gm, node)
        if not isinstance(kernel, Kernel) or kernel.is_ours():
            return []
        own = [*kernel.named_buffers(), *kernel.named_parameters()]
        read = [(f"its input %{a.name}", t) for a in node.all_input_nodes for t in tensors(self.values[a])]
        return [
            *((f"its tensor {name!r}", t, t.clone()) for name, t in own),
            *((name, t, t.clone()) for name, t in read),
        ]

    def _wrong_at_other_sizes(self, node: fx.Node, region: Region, weights: Mapping[fx.Node, Any]) -> str | None:
        """Description of how a kernel's result differs on resized inputs; None if it agrees or has no such inputs.

        `weights`: as of `weights_in`.
        """
        kernel = submodule(self.gm, node)
        if not self.resizes or not isinstance(kernel, Kernel) or node.kwargs:
            return None
        inputs = self._inputs(node)
        if inputs is None:
            return None
        own = None  # a copy with the same tensors and q/dq form: the kernel caches weights packed for the current sizes
        for resized in kernel.at_other_sizes(*inputs):
            own = own or copy.deepcopy(kernel, {id(shared): shared for shared in (*kernel.buffers(), kernel.form)})
            of_node = dict(zip(node.args, resized, strict=True))
            values = {**{read: of_node[now] for read, now in inputs_now(self.gm, node, region).items()}, **weights}
            try:
                expected = run_region(self.gm, region, values)
            except Exception:  # the layer rejects this size; torch raises errors of many types
                continue
            try:
                got = own(*(x.clone() for x in resized))
                why = difference(self.gm, region, values, expected, got, self.rules, _rounded_result(own, resized))
            except Exception as error:
                why = f"it raised {type(error).__name__}: {words_of(error)}"
            if why is not None:
                sizes = " and ".join(dict.fromkeys(str(tuple(x.shape)) for x in resized))
                return f"on inputs cut or repeated to {sizes}: {why}"
        return None

    def _likeness(self, node: fx.Node) -> Hashable:
        """Key that kernels with equal options, and with tensors and inputs of equal sizes, share; None if unknown."""
        kernel, inputs = submodule(self.gm, node), self._inputs(node)
        if not isinstance(kernel, Kernel) or inputs is None or node.kwargs:
            return None
        tensors = [*inputs, *kernel.buffers()]
        kinds = tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
        nodes = kernel.form.nodes if kernel.form is not None else ()
        form = [(op, None if op in ("get_attr", "placeholder") else target, *read) for op, target, *read, _, _ in nodes]
        return kernel.described, repr((kernel.config(), form)), kernel.inplace, kinds

    def _inputs(self, node: fx.Node) -> list[Tensor] | None:
        """Values that a kernel reads; None if not all are tensors."""
        inputs = [self.values[a] for a in node.args if isinstance(a, fx.Node)]
        return inputs if len(inputs) == len(node.args) and all(isinstance(x, Tensor) for x in inputs) else None

    def _run_kernel(self, node: fx.Node) -> Any:
        """Run a kernel. It gets a copy of a residual that it overwrites, so that other readers see the right value."""
        kernel = submodule(self.gm, node)
        if kernel is None or getattr(kernel, "inplace", None) is not True or len(node.args) < 2:
            return super().compute(node)
        residual = node.args[1]
        assert isinstance(residual, fx.Node)
        reader = self._reader(node, self.values[residual])
        if reader is not None:
            self.findings.overwrites.setdefault(node, f"{reader} is in the same memory and still needed")
        return kernel(*self._arguments(node, kernel))

    def _arguments(self, node: fx.Node, kernel: nn.Module) -> list[Any]:
        """Arguments of the kernel, with a copy of a residual that it overwrites."""
        args: list[Any] = [self.values[a] if isinstance(a, fx.Node) else a for a in node.args]
        if getattr(kernel, "inplace", None) is True and len(args) > 1:
            args[1] = args[1].clone()
        return args

    def _run_bound(self, node: fx.Node, got: Any) -> Any:
        """Run a kernel bound to its inputs, as it runs in all calls of a model except the first ones."""
        kernel = submodule(self.gm, node)
        if not isinstance(kernel, Bindable) or node.kwargs:
            return got
        args = self._arguments(node, kernel)
        return kernel.callable_for(*args)(*args)

    def _reader(self, node: fx.Node, residual: Tensor) -> str | None:
        """Name of a value that shares memory with the residual of `node` and is still needed; None if there is none."""
        memory = storage_address(residual)
        dead = self.last.get(node, ())
        needed = {
            f"%{m.name}": v
            for m, v in self.values.items()
            if m not in dead or (m in node.args and m is not node.args[1])
        }
        shared = (name for name, value in needed.items() if any(storage_address(t) == memory for t in tensors(value)))
        return next(shared, self.lasting.get(memory))


def _restored(kept: Sequence[tuple[str, Tensor, Tensor]]) -> str | None:
    """Write copies back to tensors that a kernel has changed, and name the first one; None if it changed none."""
    changed = [(name, tensor, before) for name, tensor, before in kept if not identical(tensor, before)]
    for _, tensor, before in changed:
        tensor.copy_(before)
    return f"it changes {changed[0][0]}" if changed else None


def _rounded_result(kernel: nn.Module | None, inputs: Sequence[Tensor] | None) -> list[RegionOutput] | None:
    """Result of a kernel that rounds floats to less than float32, see `Kernel.rounded_result`; None for others."""
    result = kernel.rounded_result(*inputs) if isinstance(kernel, Kernel) and inputs is not None else None
    return None if result is None else [RegionOutput(result)]


def inputs_now(gm: fx.GraphModule, node: fx.Node, region: Region) -> dict[fx.Node, fx.Node]:
    """Map the inputs of a kernel's region to the nodes that the kernel reads now.

    Raises:
        PassError: a pass after lower has changed the number of the kernel's inputs.
    """
    reads = getattr(submodule(gm, node), "reads", None) or range(len(region.inputs))
    if len(node.args) != len(reads):
        raise PassError(
            f"{where(gm, node)}: the kernel was made for {len(reads)} inputs and reads {len(node.args)}; a pass "
            "after lower has changed it. Run such a pass before lower, or after verify-lowering."
        )
    args: Any = node.args
    return {region.inputs[i]: arg for i, arg in zip(reads, args, strict=True)}


def put_back(rewriter: Rewriter, node: fx.Node, region: Region, reason: str) -> None:
    """Replace a kernel by its q/dq form."""
    copies = inputs_now(rewriter.gm, node, region)
    unverified = Plan(Decision("float", "unverified", reason, decided_by=rewriter.name))
    for step in region.steps:
        copy = rewriter.node(step.op, step.target, *arguments_of(step, copies), like=node, name=step.name)
        copies[step.node] = copy
        plan = unverified if step.about.plan is not None and step.about.plan.precision != "float" else step.about.plan
        rewriter.describe(copy, **step.about._replace(plan=plan, made_by=info(copy).made_by)._asdict())
    if len(region.outputs) == 1:
        rewriter.replace(node, copies[region.outputs[0]])
    else:
        for part in list(node.users):
            index: Any = part.args[1]
            rewriter.replace(part, copies[region.outputs[index]])
        rewriter.erase(node)
    for step in region.steps:  # restore the names: torch.fx gave the copies new ones while the kernel had them
        if step.name not in rewriter.names:
            rewriter.rename(copies[step.node], step.name)
