"""Cost of training with fake quantization: time and memory of a step, beside the float model and torch.ao's QAT.

    python -m scripts.bench.qat                      all networks, on one thread
    python -m scripts.bench.qat --only fsrcnn        some

Steps (forward, backward, SGD) run in turns in one process; each figure is the median over that of the float step. With
--cpu-time, for busy machines, it is the least CPU time instead of the median time.
Memory is what a step holds when its forward ends: parameters, buffers, and what is kept for the backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxq
from scripts.bench import history
from scripts.bench.timing import interleaved, threads_set_to
from scripts.networks.demo import FSRCNN
from scripts.networks.mobile import mobilenet_v2
from scripts.networks.resnet import resnet18


@dataclass(frozen=True)
class Subject:
    """A network, and a batch to train it with."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


SUBJECTS = {
    "resnet18": Subject(resnet18, (8, 3, 224, 224)),
    "mobilenet_v2": Subject(mobilenet_v2, (8, 3, 112, 112)),
    "fsrcnn": Subject(FSRCNN, (8, 1, 48, 48)),
}


def contenders(model: nn.Module, x: Tensor) -> Iterator[tuple[str, nn.Module]]:
    """The float model, and what each makes of it to train."""
    yield "float", copy.deepcopy(model).train()
    yield "fxq", fxq.prepare(model, fxq.Recipe.qat(), example_inputs=x)
    yield "fxq, ranges frozen", frozen(fxq.prepare(model, fxq.Recipe.qat(), example_inputs=x), x)
    yield "fxq, learned scales", fxq.prepare(model, fxq.Recipe.qat(learned=True), example_inputs=x)
    yield "torch.ao", of_torch_ao(model, x)


def frozen(trained: Any, x: Tensor) -> nn.Module:
    """The model after a batch, with ranges that do not move any more."""
    trained(x)
    trained.freeze_ranges()
    return trained


def of_torch_ao(model: nn.Module, x: Tensor) -> nn.Module:
    """Model prepared for training by torch.ao's FX graph mode."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    return prepare_qat_fx(copy.deepcopy(model).train(), get_default_qat_qconfig_mapping("x86"), (x,))


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """One step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.enable_grad():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return step


def held(model: nn.Module, x: Tensor) -> int:
    """Bytes that a step holds when its forward has ended."""
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}

    def keep(tensor: Tensor) -> Tensor:
        blocks[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x).sum()
    return sum(blocks.values())


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="to time each network for")
    parser.add_argument("--cpu-time", action="store_true", help="least CPU time of a step, instead of the median time")
    history.add_argument(parser)
    arguments = parser.parse_args()
    statistic, clock = (min, time.thread_time) if arguments.cpu_time else (statistics.median, time.perf_counter)
    warnings.simplefilter("ignore")
    rows, numbers = [], []
    with threads_set_to(1):
        for name in arguments.only:
            torch.manual_seed(0)
            subject = SUBJECTS[name]
            model, x = subject.make().eval(), torch.rand(subject.shape)
            models = dict(contenders(model, x))
            steps = {who: step_of(trained, x) for who, trained in models.items()}
            seconds = interleaved(steps, arguments.seconds, statistic, clock)
            memory = {who: held(trained, x) for who, trained in models.items()}
            for who in models:
                times, more = seconds[who] / seconds["float"], memory[who] / memory["float"]
                numbers += [
                    (f"{name}, {who}", f"{kind} of a step, of float", ratio, "times")
                    for kind, ratio in (("time", times), ("memory", more))
                ]
                rows.append(
                    (name, who, f"{1e3 * seconds[who]:.0f}", f"{times:.2f}", f"{memory[who] / 1e6:.0f}", f"{more:.2f}")
                )
    print(tabulate(rows, ("network", "trained by", "ms a step", "times float", "MB", "times float"), tablefmt="github"))
    history.append(arguments.history, "bench.qat", numbers)
    machine = fxq.doctor().machine
    print(f"{machine['CPU']}, {machine['vectors']}, one thread{', CPU time' if arguments.cpu_time else ''}")


if __name__ == "__main__":
    main()
