"""A small transformer for demo_accuracy.py: trained here, in about a minute, to guess the next character of a text.

The text is what Python's own library says of itself. A tenth of it is kept from training, to judge with.
"""

from __future__ import annotations

import string
from itertools import chain

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from scripts.bench.accuracy_subjects import Subject, agreement, percent
from scripts.demo.sequence_data import docstrings
from scripts.demo.sequence_subjects import Calls, Part
from scripts.networks.sequence import Bert

CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation + " "
OTHER = len(CHARACTERS)
"""The number of what is none of these."""
LENGTH = 64
"""Characters that are read at once."""


class NextCharacter(nn.Module):
    """Prediction of the next character of a text: three causal layers of BERT and a linear layer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.bert = Bert(layers=3, width=width, heads=4, inner=4 * width, words=OTHER + 1, causal=True)
        self.head = nn.Linear(width, OTHER + 1)

    def forward(self, text: Tensor) -> Tensor:
        """(N, length) int64 -> logits (N, length, characters)."""
        y: Tensor = self.head(self.bert(text))
        return y


def numbered(text: str) -> list[int]:
    """The number of each character, in lower case."""
    return [CHARACTERS.find(c) if c in CHARACTERS else OTHER for c in text.lower()]


def pieces(count: int = 3000) -> tuple[Tensor, Tensor]:
    """Texts in pieces, (N, LENGTH + 1) int64: to train with, and to judge with."""
    texts = [numbered(f"{text.summary} {text.details} ") for text in docstrings(count)]
    kept, length = len(texts) // 10, LENGTH + 1
    parts = (list(chain.from_iterable(part)) for part in (texts[kept:], texts[:kept]))
    train, judged = (torch.tensor(part[: len(part) // length * length]).view(-1, length) for part in parts)
    return train, judged


def trained(texts: Tensor, steps: int, batch: int = 16, rate: float = 3e-3, seed: int = 0) -> NextCharacter:
    """A network that guesses: AdamW, one-cycle learning rate."""
    torch.manual_seed(seed)
    network = NextCharacter()
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps, pct_start=0.1)
    bar = track(range(steps), "training a transformer", console=Console(stderr=True), transient=True)
    with torch.enable_grad():
        for _ in bar:
            chosen = texts[torch.randint(len(texts), (batch,))]
            loss = F.cross_entropy(network(chosen[:, :-1]).transpose(1, 2), chosen[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def text(steps: int) -> Subject:
    """The transformer, trained for so many steps, calibrated on texts of its training."""
    train, judged = pieces()
    model = trained(train, steps)
    data = [(part,) for part in train[:256, :-1].split(8)]
    answers = judged[:400, 1:].flatten()

    def judge(a: Tensor, b: Tensor) -> dict[str, float]:
        return {"right characters, %": percent(b.argmax(1) == answers), **agreement(a, b)}

    def outputs(calls: Calls) -> Tensor:
        return torch.cat([calls[0](part) for part in judged[:400, :-1].split(8)]).flatten(0, 1)

    return Subject("transformer", [Part(model, data[0], data)], outputs, judge, is_transformer=True)
