"""The networks of demo_sequence.py and bench_sequence.py: encoders with attention, and recurrent networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BertLayer(nn.Module):
    """Self-attention and two linear layers with GELU between, each added to its input and normalized.

    Args:
        width: of the vectors.
        heads: how many parts of a vector attend by themselves.
        inner: width between the two layers.
        causal: whether a place sees only those before it.
    """

    def __init__(self, width: int, heads: int, inner: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm_attention, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, width) float32 -> the same shape."""
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = self.norm_attention(x + self.output(attended.transpose(1, 2).flatten(2)))
        return self.norm(x + self.narrow(F.gelu(self.wide(x))))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Bert(nn.Module):
    """BERT of the size of MiniLM, with random weights. Its embeddings are more than half of it."""

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 12,
        inner: int = 1536,
        words: int = 30522,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(BertLayer(width, heads, inner, causal) for _ in range(layers)))

    def forward(self, words: Tensor) -> Tensor:
        """(N, length) int64 -> (N, length, width) float32."""
        places = torch.arange(words.shape[1], device=words.device)
        x: Tensor = self.layers(self.norm(self.words(words) + self.positions(places)))
        return x


class Recurrent(nn.Module):
    """The output of an LSTM or a GRU at every step."""

    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """(N, length, inputs) float32 -> (N, length, hidden)."""
        y: Tensor = self.layers(x)[0]
        return y


class SentenceEncoder(nn.Module):
    """A BERT of HuggingFace's, and the mean over a text's words, of length 1."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Two (N, length) int64, the mask 1 at words and 0 at padding -> (N, width) float32."""
        x = self.bert(input_ids=words, attention_mask=mask).last_hidden_state
        counted = mask.unsqueeze(-1).to(x.dtype)
        return F.normalize((x * counted).sum(1) / counted.sum(1), dim=-1)


class SpeechEncoder(nn.Module):
    """The speaker encoder of Resemblyzer, as its checkpoint names its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """(N, frames, 40) float32, mel powers -> (N, 256), of length 1."""
        _, (hidden, _) = self.lstm(mels)
        return F.normalize(self.linear(hidden[-1]).relu(), dim=-1)


class SpellingEncoder(nn.Module):
    """The encoder of g2p-en: reads the letters of a word."""

    def __init__(self, letters: int = 29, width: int = 256, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.gru = nn.GRU(width, hidden, batch_first=True)

    def forward(self, letters: Tensor) -> Tensor:
        """(1, length) int64 -> the last hidden state, (1, hidden)."""
        hidden: Tensor = self.gru(self.embedding(letters))[1]
        return hidden[0]


class SoundDecoder(nn.Module):
    """The decoder of g2p-en: gives one phoneme after the other."""

    def __init__(self, sounds: int = 74, width: int = 256, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sounds, width)
        self.cell = nn.GRUCell(width, hidden)
        self.linear = nn.Linear(hidden, sounds)

    def forward(self, sound: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last phoneme, (1,) int64, and the hidden state -> scores of the next, (1, sounds), and the state."""
        hidden = self.cell(self.embedding(sound), hidden)
        return self.linear(hidden), hidden
