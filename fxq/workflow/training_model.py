"""The model that is trained: fake quantizers in a graph of the float model's own parameters."""

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

from fxq.calibration.ranks import AUTO, Ranks
from fxq.common.data import Batch
from fxq.common.isolation import computed_tensors
from fxq.common.metrics import tensors
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
    """What a model that is trained was made with, which its copies share.

    Attributes:
        manager: the pipeline, as far as the graph that is trained.
        observed: the same, as far as observers.
    """

    manager: PassManager
    observed: PassManager

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        return self


class TrainingProgress(nn.Module):
    """How far training is, as buffers: so it is part of the `state_dict`.

    Buffers:

        steps: int64, 0-d: forwards in train mode.
        ranges_frozen, norms_frozen: uint8, 0-d: 1 or 0, as averages of models take no bool.
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
    """A model to train: it computes with values and weights that are rounded, and gradients pass through the rounding.

    Train it as you would the float model, whose parameters it has a copy of, by the same names (and learned scales):
    with any optimizer, in `DistributedDataParallel`, under `fully_shard` (of the whole model), autocast,
    `torch.compile` and `torch.utils.checkpoint`. Then `fxq.convert` it.

    In train mode, each forward notes the ranges of values; the next one uses them. The first one rounds weights alone,
    and values whose scales are learned.
    On several ranks of `torch.distributed`, ranges are those of all ranks' batches. In eval mode ranges and batch norms
    stand still.

    Attributes:
        preparation: what it was made with.
        group: the `torch.distributed.ProcessGroup` whose ranks share ranges; None: this process alone; "auto": the
            default group, if there is one.
    """

    preparation: Preparation
    group: Any

    @classmethod
    def from_manager(cls, manager: PassManager, observed: PassManager) -> TrainingModel:
        """Wrap the graph of a manager that has inserted fake quantizers; `observed` is it behind insert-observers."""
        made = cls(manager.gm, manager.gm.graph, class_name="TrainingModel")
        made.add_module(PROGRESS, TrainingProgress())
        if made._options(manager).freeze_weights_over:
            for path, quantizer in _rounded_parameters(made).items():
                quantizer.oscillation = Oscillation(made.get_parameter(path).shape, quantizer.grid.dtype)
        made._attach(Preparation(manager, observed), AUTO)
        return made.train()

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
        self.register_forward_hook(_behind_forward)
        self.register_load_state_dict_post_hook(_loaded)
        _loaded(self)

    @property
    def history(self) -> History:
        """One snapshot per pass so far."""
        return self.preparation.manager.history

    @property
    def progress(self) -> TrainingProgress:
        """How far training is."""
        found: TrainingProgress = self.get_submodule(PROGRESS)  # type: ignore[assignment]
        return found

    @property
    def steps(self) -> int:
        """Forwards in train mode so far."""
        return self._steps

    @property
    def _norms(self) -> list[_BatchNorm]:
        """The batch norms as they are now: `SyncBatchNorm.convert_sync_batchnorm` puts others in their place."""
        return [self.get_submodule(path) for path in self._norm_paths]  # type: ignore[misc]

    def train(self, mode: bool = True) -> TrainingModel:
        """As of any module; the statistics of batch norms that are frozen stay so."""
        super().train(mode)
        if PROGRESS in self._modules and self.progress.norms_frozen:
            self._freeze_norms()
        return self

    def freeze_ranges(self) -> None:
        """Let the ranges of values stay as they are from now on. Learned scales go on learning.

        Raises:
            InputError: they do already.
            CalibrationError: no forward in train mode has found any.
        """
        self._check_not("ranges", self.progress.ranges_frozen)
        if not self.steps:
            raise CalibrationError("there are no ranges to freeze: call the model on a batch in train mode first.")
        self._freeze_ranges()

    def freeze_norms(self) -> None:
        """Let the statistics of batch norms stay as they are from now on; their weights and biases go on learning.

        Raises:
            InputError: they do already, or there are none.

        Source: Krishnamoorthi 2018, section 3.2.2.
        """
        self._check_not("norms", self.progress.norms_frozen)
        if not self._norm_paths:
            raise InputError("the model has no batch norm whose statistics could be frozen.")
        self._freeze_norms()

    def _check_not(self, what: str, frozen: Tensor) -> None:
        if frozen:
            option = f"{InsertFakeQuantizers.name}, freeze_{what}_after"
            raise InputError(f"the {what} are frozen already, by freeze_{what}() or by the recipe ({option}).")

    def _freeze_ranges(self) -> None:
        self.progress.ranges_frozen.fill_(1)
        for quantizer in self._quantizers:
            quantizer.watching = quantizer.watching and not quantizer.has_range

    def _freeze_norms(self) -> None:
        self.progress.norms_frozen.fill_(1)
        for norm in self._norms:
            norm.eval()

    def use_ranges(self) -> None:
        """Let values be rounded to the grids of all that was seen, and what is frozen be so. Each forward does it.

        Not behind the forward that decides it: that one may be computed again for its gradients.
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
        """Raise `InputError` where what the graph reads has another type than before, or is sharded in the forward."""
        for path, dtype in self._types.items():
            parameter = read_attribute(self, path)
            if parameter.dtype != dtype:
                raise InputError(
                    f"{path} is {parameter.dtype}, and was {dtype} when the model was prepared, whose types stay as "
                    "they are. For lower precision call it under torch.autocast, which goes with fully_shard, too."
                )
            if hasattr(parameter, "device_mesh"):
                raise InputError(
                    f"{path} is sharded in the forward: call fully_shard on the whole model, not on layers."
                )

    def _take_step(self) -> None:
        """Behind a forward in train mode: move ranges, on all ranks alike, freeze weights, and count it."""
        moving = [q for q in self._quantizers if q.watching]
        if moving:
            move_ranges(moving, self._seen_on_all_ranks(moving))
            for quantizer in moving:
                quantizer.has_range = quantizer.has_range or bool(quantizer.low <= quantizer.high)
        options = self._options(self.preparation.manager)
        for weight in self._freezing.values():
            assert weight.oscillation is not None  # of all of these
            weight.oscillation.update(max_frequency(self._steps, options.freeze_weights_over), not self._steps)
        self._moved = True
        self._steps += 1
        self.progress.steps.fill_(self._steps)
        if self._steps == options.freeze_ranges_after:
            self.progress.ranges_frozen.fill_(1)
        if self._steps == options.freeze_norms_after and self._norm_paths:
            self.progress.norms_frozen.fill_(1)

    def _hold_norms(self) -> None:
        """Let forwards leave the statistics of batch norms as they are, and what counts their batches."""
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
        """The smallest and the largest value of each in this forward: float32, (N, 2)."""
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
        raise InputError("a model that is trained is copied with its parameters and ranges: use copy.deepcopy.")

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError(
            "a model that is trained cannot be pickled: it holds the float model, and a pipeline that has not run to "
            "its end. Save its state_dict(), and load that into one that fxq.prepare makes anew; or copy.deepcopy it."
        )


PROGRESS = "fxq_progress"
"""Where the model has its `TrainingProgress`."""


def _rounded_parameters(model: fx.GraphModule) -> dict[str, FakeQuantizeWeight]:
    """The parameters that one fake quantizer rounds, and nothing else: their paths, and which it is."""
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
    """Whether a forward is computed again for its gradients, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@_disable_dynamo
def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Use the ranges so far. Where the forward is computed again, batch norms do not count it."""
    assert isinstance(model, TrainingModel)
    if _recomputes():
        model._hold_norms()
        Variable._execution_engine.queue_callback(model._release_norms)  # behind the gradients
        return
    model._check_parameters()
    model._release_norms()  # where computing gradients has failed
    if model.training:
        record(model.preparation.manager.context, Batch(args, kwargs))
    model.use_ranges()


@_disable_dynamo
def _behind_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Count a forward in train mode; of one in eval mode, warn when it is trained with."""
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
    warn("the model is trained in eval mode: ranges and batch norms stand still. Call model.train() before training.")


def _loaded(model: nn.Module, keys: Any = None) -> None:
    """Go on from what was loaded."""
    assert isinstance(model, TrainingModel)
    progress = model.progress
    model._steps, model._moved = int(progress.steps), True
    for quantizer in model._quantizers:
        if not quantizer.learned:
            quantizer.has_range = bool(quantizer.low <= quantizer.high)
            quantizer.watching = not (quantizer.has_range and progress.ranges_frozen)
    model.train(model.training)
