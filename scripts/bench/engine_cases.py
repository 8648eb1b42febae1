"""The networks of bench_engines.py: those of bench_cases.py, two that read sequences, and three small ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scripts.bench.cases import CASES as PICTURES
from scripts.bench.cases import Case, random_case
from scripts.demo.data import digits
from scripts.networks.demo import load_demo_networks
from scripts.networks.sequence import Bert, Recurrent
from scripts.networks.small import ConvNeXt, UNet


@dataclass(frozen=True)
class EngineCase(Case):
    """One network to measure.

    Attributes:
        recipe: preset of fxq's recipe.
        sequence: whether it reads sequences: such networks torch.ao and ONNX Runtime quantize dynamically, as both
            advise, and all others statically.
    """

    recipe: str = "static"
    sequence: bool = False

    def timed_at(self, batch: int) -> EngineCase:
        """Case of this network, timed on a batch of this size."""
        times = -(-batch // len(self.fresh))
        return dataclasses.replace(self, timed=torch.cat([self.fresh] * times)[:batch].contiguous())

    def calibration(self) -> list[Tensor]:
        """The calibration data in batches as large as the timed one."""
        size = len(self.timed)
        return [part for part in torch.cat(self.data).split(size) if len(part) == size]


def sequence_case(model: nn.Module, draw: Callable[[], Tensor], recipe: str) -> EngineCase:
    data = [draw() for _ in range(4)]
    fresh = draw()
    return EngineCase(model.eval(), data, fresh, fresh[:1], recipe, sequence=True)


def bert() -> EngineCase:
    """BERT of the size of MiniLM, 128 words. Static in fxq, for the engines measure no ranges at run time."""
    torch.manual_seed(0)
    return sequence_case(Bert(), lambda: torch.randint(30522, (8, 128)), "static")


def lstm() -> EngineCase:
    """Two LSTM layers of width 512, 100 steps."""
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM(512, 512, 2, batch_first=True))
    return sequence_case(model, lambda: torch.randn(8, 100, 512), "dynamic")


def digits_case() -> EngineCase:
    """The demo's classifier with its weights, on digits of the test split."""
    data = digits()
    fresh = data.test_images[:64]
    return EngineCase(load_demo_networks()[1], list(data.train_images[:512].split(64)), fresh, fresh[:1])


def picture(make: Callable[[], Case]) -> Callable[[], EngineCase]:
    return lambda: EngineCase(**vars(make()))


CASES: dict[str, Callable[[], EngineCase]] = {
    **{name: picture(make) for name, make in PICTURES.items()},
    "bert": bert,
    "lstm": lstm,
    "digits": digits_case,
    "unet": picture(lambda: random_case(UNet, (3, 128, 128))),
    "convnext": picture(lambda: random_case(ConvNeXt, (3, 128, 128))),
}
