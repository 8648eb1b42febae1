"""Model to train: a graph of the float model with fake quantizers and copies of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm

from fxq.common.data import Batch
from fxq.common.isolation import computed_tensors
from fxq.common.metrics import tensors
from fxq.common.ranks import AUTO, Ranks
from fxq.errors import CalibrationError, InputError, warn
from fxq.graph.query import read_attribute
from fxq.passes.insert_fake_quantizers import InsertFakeQuantizers
from fxq.pipeline.history import History
from fxq.pipeline.manager import PassManager
from fxq.pipeline.samples import record
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight, move_ranges, use_ranges
from fxq.quant.oscillation import Oscillation, max_frequency


@dataclass(frozen=True)
class Preparation:
    """Pipelines that a model to train was made with; copies of the model share them.

    Attributes:
        manager: the pipeline up to the graph with fake quantizers.
        observed: the pipeline up to the graph with observers.
    """

    manager: PassManager
    observed: PassManager

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        return self


class TrainingProgress(nn.Module):
    """Progress of training as buffers, so that it is part of the `state_dict`.

    Buffers:

        steps: int64, 0-d: number of forwards in train mode.
        ranges_frozen, norms_frozen: uint8, 0-d: 1 or 0. Not bool, which weight averaging does not accept.
    """

    steps: Tensor
    ranges_frozen: Tensor
    norms_frozen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("ranges_frozen", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("norms_frozen", torch.tensor(0, dtype=torch.uint8))


class TrainingModel(fx.GraphModule):
    """Model to train: values and weights are fake quantized, and gradients pass through the rounding.

    Train it like the float model, then `fxq.convert` it. It has copies of the float model's parameters under the same
    names, and learned scales if the recipe asks for them. It works with any optimizer, `DistributedDataParallel`,
    `fully_shard` (of the whole model), autocast, `torch.compile` and `torch.utils.checkpoint`.

    In train mode, each forward collects the ranges of values, which the next forward uses. The first forward only
    quantizes weights, and values with learned scales. On several ranks of `torch.distributed`, ranges cover the batches
    of all ranks. In eval mode, ranges and batch norms do not change.

    Attributes:
        preparation: pipelines that it was made with.
        group: the `torch.distributed.ProcessGroup` whose ranks share ranges; None: this process alone; "auto": the
            default group, if there is one.
    """

    preparation: Preparation
    group: Any

    @classmethod
    def from_manager(cls, manager: PassManager, observed: PassManager) -> TrainingModel:
        """Wrap the graph of a manager whose passes have inserted fake quantizers.

        Args:
            manager: that manager.
            observed: the manager after insert-observers.
        """
        model = cls(manager.gm, manager.gm.graph, class_name="TrainingModel")
        model.add_module(PROGRESS, TrainingProgress())
        if model._options(manager).freeze_weights_over:
            for path, quantizer in _rounded_parameters(model).items():
                quantizer.oscillation = Oscillation(model.get_parameter(path).shape, quantizer.grid.dtype)
        model._attach(Preparation(manager, observed), AUTO)
        return model.train()

    def _attach(self, preparation: Preparation, group: Any) -> None:
        self.preparation, self.group = preparation, group
        self._steps, self._moved = 0, False
        self._quantizers = [m for m in self.modules() if isinstance(m, FakeQuantizeValue)]
        self._norm_paths = [path for path, m in self.named_modules() if isinstance(m, _BatchNorm)]
        read = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        self._types = {path: parameter.dtype for path, parameter in self.named_parameters() if path in read}
        self._held: list[tuple[_BatchNorm, float | None, Tensor | None]] = []
        rounded = _rounded_parameters(self)
        self._freezing = {path: q for path, q in rounded.items() if q.oscillation is not None}
        self.register_forward_pre_hook(_before_forward, with_kwargs=True)
        self.register_forward_hook(_after_forward)
        self.register_load_state_dict_post_hook(_loaded)
        _loaded(self)

    @property
    def history(self) -> History:
        """One snapshot per pass so far."""
        return self.preparation.manager.history

    @property
    def progress(self) -> TrainingProgress:
        """Progress of training."""
        progress: TrainingProgress = self.get_submodule(PROGRESS)  # type: ignore[assignment]
        return progress

    @property
    def steps(self) -> int:
        """Number of forwards in train mode so far."""
        return self._steps

    @property
    def _norms(self) -> list[_BatchNorm]:
        """Current batch norms; `SyncBatchNorm.convert_sync_batchnorm` replaces them."""
        return [self.get_submodule(path) for path in self._norm_paths]  # type: ignore[misc]

    def train(self, mode: bool = True) -> TrainingModel:
        """Set train or eval mode; the statistics of frozen batch norms stay frozen."""
        super().train(mode)
        if PROGRESS in self._modules and self.progress.norms_frozen:
            self._freeze_norms()
        return self

    def freeze_ranges(self) -> None:
        """Freeze the ranges of values. Learned scales still train.

        Raises:
            InputError: they are frozen already.
            CalibrationError: there are none, since no forward has run in train mode.
        """
        self._check_not_frozen("ranges", self.progress.ranges_frozen)
        if not self.steps:
            raise CalibrationError("there are no ranges to freeze: call the model on a batch in train mode first.")
        self._freeze_ranges()

    def freeze_norms(self) -> None:
        """Freeze the statistics of batch norms. Their weights and biases still train.

        Raises:
            InputError: they are frozen already, or the model has no batch norm.

        Source: Krishnamoorthi 2018, section 3.2.2.
        """
        self._check_not_frozen("norms", self.progress.norms_frozen)
        if not self._norm_paths:
            raise InputError("the model has no batch norm whose statistics could be frozen.")
        self._freeze_norms()

    def _check_not_frozen(self, name: str, frozen: Tensor) -> None:
        if frozen:
            option = f"{InsertFakeQuantizers.name}, freeze_{name}_after"
            raise InputError(f"the {name} are frozen already, by freeze_{name}() or by the recipe ({option}).")

    def _freeze_ranges(self) -> None:
        self.progress.ranges_frozen.fill_(1)
        for quantizer in self._quantizers:
            quantizer.watching = quantizer.watching and not quantizer.has_range

    def _freeze_norms(self) -> None:
        self.progress.norms_frozen.fill_(1)
        for norm in self._norms:
            norm.eval()

    def use_ranges(self) -> None:
        """Apply the collected ranges and the frozen state to the fake quantizers. Called before each forward.

        It is not called after a forward, which collects new ranges: activation checkpointing may run that forward again
        for its gradients, and it must then quantize as before.
        """
        if not self._moved:
            return
        if self.progress.ranges_frozen:
            self._freeze_ranges()
        if self.progress.norms_frozen:
            self._freeze_norms()
        use_ranges([q for q in self._quantizers if not q.learned])
        for quantizer in self._quantizers:
            quantizer.started = quantizer.started or quantizer.has_range
        for path, weight in self._freezing.items():
            weight.restore_frozen(self.get_parameter(path))
        self._moved = False

    def _check_parameters(self) -> None:
        """Raise `InputError` if a parameter has another dtype than when the model was prepared, or is sharded now."""
        for path, dtype in self._types.items():
            parameter = read_attribute(self, path)
            if parameter.dtype != dtype:
                raise InputError(
                    f"{path} is {parameter.dtype}, but was {dtype} when the model was prepared. Dtypes must "
                    "not change: for lower precision, call the model under torch.autocast (also with fully_shard)."
                )
            if hasattr(parameter, "device_mesh"):
                raise InputError(
                    f"{path} is sharded in the forward: call fully_shard on the whole model, not on layers."
                )

    def _take_step(self) -> None:
        """Count a forward in train mode: update ranges over all ranks, and freeze weights, ranges and norms if due."""
        moving = [q for q in self._quantizers if q.watching]
        if moving:
            move_ranges(moving, self._seen_on_all_ranks(moving))
            for quantizer in moving:
                quantizer.has_range = quantizer.has_range or bool(quantizer.low <= quantizer.high)
        options = self._options(self.preparation.manager)
        for weight in self._freezing.values():
            assert weight.oscillation is not None
            weight.oscillation.update(max_frequency(self._steps, options.freeze_weights_over), not self._steps)
        self._moved = True
        self._steps += 1
        self.progress.steps.fill_(self._steps)
        if self._steps == options.freeze_ranges_after:
            self.progress.ranges_frozen.fill_(1)
        if self._steps == options.freeze_norms_after and self._norm_paths:
            self.progress.norms_frozen.fill_(1)

    def _hold_norms(self) -> None:
        """Prevent forwards from changing the statistics and batch counters of batch norms."""
        if self._held:
            return
        for norm in self._norms:
            counted = norm.num_batches_tracked
            self._held.append((norm, norm.momentum, None if counted is None else counted.clone()))
            norm.momentum = 0.0

    def _release_norms(self) -> None:
        """Undo `_hold_norms`."""
        for norm, momentum, counted in self._held:
            norm.momentum = momentum
            if counted is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(counted)
        self._held.clear()

    @staticmethod
    def _options(manager: PassManager) -> InsertFakeQuantizers:
        pipeline = manager.context.recipe.pipeline
        return next(step for step in pipeline if isinstance(step, InsertFakeQuantizers))

    def _seen_on_all_ranks(self, quantizers: Sequence[FakeQuantizeValue]) -> Tensor:
        """Smallest and largest value of each quantizer in this forward, over all ranks: float32, (N, 2)."""
        seen = torch.stack([q.seen for q in quantizers])
        ranks = Ranks.of(self.group)
        if ranks.size > 1:
            sign = torch.tensor([1.0, -1.0], device=seen.device)
            seen *= sign
            dist.all_reduce(seen, dist.ReduceOp.MIN, group=ranks.group)
            seen *= sign
        return seen

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingModel:
        memo |= {key: value for key, value in computed_tensors(self).items() if key not in memo}
        copied = super().__deepcopy__(memo)
        clone = TrainingModel(copied, copied.graph, class_name="TrainingModel")
        clone.add_module(PROGRESS, copied.get_submodule(PROGRESS))
        clone._attach(self.preparation, self.group)
        clone.training = self.training
        return clone

    def __copy__(self) -> TrainingModel:
        raise InputError("a model to train cannot share parameters and ranges with a copy: use copy.deepcopy.")

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError(
            "a model to train cannot be pickled: it holds the float model and an unfinished pipeline. Save its "
            "state_dict() and load it into a model from a new call of fxq.prepare, or copy it with copy.deepcopy."
        )


PROGRESS = "fxq_progress"
"""Name of the submodule `TrainingProgress`."""


def _rounded_parameters(model: fx.GraphModule) -> dict[str, FakeQuantizeWeight]:
    """Fake quantizers of the parameters that exactly one fake quantizer reads, by the parameter's path."""
    readers: dict[int, tuple[str, set[FakeQuantizeWeight]]] = {}
    for node in model.graph.nodes:
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, FakeQuantizeWeight) and node.args[0].op == "get_attr":
            path = str(node.args[0].target)
            parameter = read_attribute(model, path)
            if isinstance(parameter, nn.Parameter):
                readers.setdefault(id(parameter), (path, set()))[1].add(module)
    return {path: quantizers.pop() for path, quantizers in readers.values() if len(quantizers) == 1}


def _recomputes() -> bool:
    """Whether a forward is being recomputed for its gradients, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@_disable_dynamo
def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: apply the ranges so far. If the forward is a recomputation, batch norms do not count it."""
    assert isinstance(model, TrainingModel)
    if _recomputes():
        model._hold_norms()
        Variable._execution_engine.queue_callback(model._release_norms)  # after the gradients
        return
    model._check_parameters()
    model._release_norms()  # in case that computing gradients failed
    if model.training:
        record(model.preparation.manager.context, Batch(args, kwargs))
    model.use_ranges()


@_disable_dynamo
def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook: count a forward in train mode; warn if gradients are computed in eval mode."""
    assert isinstance(model, TrainingModel)
    if _recomputes():
        return
    if model.training:
        model._take_step()
        return
    trained = next((tensor for tensor in tensors(output) if tensor.requires_grad), None)
    if trained is not None:
        trained.register_hook(_warn_of_eval_mode)


def _warn_of_eval_mode(grad: Tensor) -> None:
    warn("the model is trained in eval mode, so ranges and batch norms do not change: call model.train() first.")


def _loaded(model: nn.Module, keys: Any = None) -> None:
    """Restore the state that depends on buffers after `load_state_dict`."""
    assert isinstance(model, TrainingModel)
    progress = model.progress
    model._steps, model._moved = int(progress.steps), True
    for quantizer in model._quantizers:
        if not quantizer.learned:
            quantizer.has_range = bool(quantizer.low <= quantizer.high)
            quantizer.watching = not (quantizer.has_range and progress.ranges_frozen)
    model.train(model.training)
