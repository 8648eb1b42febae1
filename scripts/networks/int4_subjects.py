"""Models whose weights `scripts.bench.int4` makes 4 bits wide, with data and the measure of what they lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scripts.demo.sequence_data import (
    END,
    LETTERS,
    START,
    Missing,
    sentence_encoder,
    spelling_networks,
    tokenize,
)
from scripts.demo.sequence_data import (
    docstrings as described,
)
from scripts.networks.language import antibodies, docstrings, iglm, smollm2
from scripts.networks.pydoc_model import pydoc_model

Measure = Literal["KL", "1 - cosine"]


@dataclass(frozen=True)
class Subject:
    """A model with sequences of tokens, int64[rows, length].

    Attributes:
        model: the float model, which takes sequences.
        calibration: sequences for calibration.
        judged: sequences that no variant sees.
        measure: what a quantized model loses: KL divergence of its distributions from those of the float model, in nats
            per token, or 1 minus the cosine of its outputs and those of the float model, as a mean.
        is_transformers_model: whether it is a language model of transformers.
    """

    model: Any
    calibration: Tensor
    judged: Tensor
    measure: Measure = "KL"
    is_transformers_model: bool = True


def iglm_subject() -> Subject:
    """IgLM with 64 sequences of its own for calibration, and as many that are judged."""
    model = iglm()
    return Subject(model, antibodies(model, 64, seed=1), antibodies(model, 64, seed=2))


def smollm2_subject() -> Subject:
    """SmolLM2 with docstrings: 8 rows of 256 tokens for calibration, 8 that are judged."""
    model, tokenizer = smollm2()
    rows = docstrings(tokenizer)
    return Subject(model, rows[:8], rows[8:16])


def pydoc_subject() -> Subject:
    """Model of Python's documentation with rows of 128 held-out tokens: 64 for calibration, 64 that are judged."""
    model, _, rows = pydoc_model()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return Subject(model, rows[order[:64]], rows[order[64:128]])


class Sentences(nn.Module):
    """MiniLM for texts that fill all of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = sentence_encoder()

    def forward(self, rows: Tensor) -> Tensor:
        """(N, length) int64 -> embeddings, (N, 384)."""
        embeddings: Tensor = self.encoder(rows, torch.ones_like(rows))
        return embeddings


def minilm_subject() -> Subject:
    """MiniLM with docstrings: 64 texts of 32 tokens for calibration, 64 that are judged."""
    tokens = tokenize([f"{text.summary} {text.details}" for text in described(400)], most=32)
    rows = tokens.words[tokens.mask.all(1)]
    return Subject(Sentences().eval(), rows[:64], rows[64:128], "1 - cosine", is_transformers_model=False)


class Speller(nn.Module):
    """g2p-en, which tells how words of `letters` letters are spoken, with the phonemes so far as an input."""

    letters = 8

    def __init__(self) -> None:
        super().__init__()
        self.encoder, decoder = spelling_networks()
        cell = decoder.cell
        self.embedding, self.linear = decoder.embedding, decoder.linear
        self.gru = nn.GRU(cell.input_size, cell.hidden_size, batch_first=True)
        self.gru.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})

    def forward(self, rows: Tensor) -> Tensor:
        """Letters, the end of the word and phonemes, (N, letters + 1 + n) int64 -> scores of the next, (N, n, 74)."""
        hidden = self.encoder(rows[:, : self.letters + 1])
        scores: Tensor = self.linear(self.gru(self.embedding(rows[:, self.letters + 1 :]), hidden[None])[0])
        return scores


def g2p_subject() -> Subject:
    """g2p-en with words of docstrings and their first 6 phonemes: 64 for calibration, up to 256 that are judged."""
    texts = (f"{text.summary} {text.details}".lower() for text in described(2000))
    spellings = sorted({word for text in texts for word in text.split() if len(word) == Speller.letters})
    plain_words = [word for word in spellings if word.isascii() and word.isalpha()]
    letters = torch.tensor([[*map(LETTERS.index, word), LETTERS.index("</s>")] for word in plain_words])
    order = torch.randperm(len(letters), generator=torch.Generator().manual_seed(0))
    model, rows = Speller().eval(), torch.cat([letters[order], torch.full((len(letters), 1), START)], 1)
    with torch.no_grad():
        for _ in range(6):
            rows = torch.cat([rows, model(rows)[:, -1:].argmax(-1)], 1)
    rows = rows[(rows[:, Speller.letters + 1 :] != END).all(1)]
    return Subject(model, rows[:64], rows[64:320], is_transformers_model=False)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "iglm": iglm_subject,
    "smollm2": smollm2_subject,
    "minilm": minilm_subject,
    "g2p-en": g2p_subject,
    "pydoc": pydoc_subject,
}
"""Functions that load a model and its data, by name; `SystemExit` or `Missing` says what is not installed.

The first call of `pydoc_subject` trains its model.
"""
NOT_INSTALLED = (SystemExit, Missing)
