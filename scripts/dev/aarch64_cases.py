"""Small networks for `aarch64_networks.py`: how they are quantized and called, and how far results may be apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxq
from fxq.backends.loops.tokens.token_program import TokenProgram
from fxq.backends.plain.few_rows import FewRowsProduct

MAX_LOSS = 1.02
"""Largest distance from the float model's result of a network that is quantized on the other machine, as a multiple of
that of the network quantized here. Sums in another order may round a few numbers of a weight to another integer."""


class MaxErrors(NamedTuple):
    """Largest relative errors, in the Euclidean norm, against the results of the backends here."""

    jit: float
    reference: float


OF_INTEGERS = MaxErrors(jit=2e-3, reference=1e-2)
"""A few activations of another integer; the reference runs recurrent layers otherwise."""
OF_FLOATS = MaxErrors(jit=1e-5, reference=1e-5)
"""Sums of float32 in another order."""


def _call(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y


@dataclass(frozen=True)
class Case:
    """Network, and how it is quantized and called.

    Attributes:
        make: Makes the float network.
        recipe: Recipe, whose backend is replaced.
        shape: Shape of the input.
        max_errors: Largest errors of a network that is loaded on the other machine.
        call: Calls a network with the input, in turns if need be, and returns all results as one tensor.
        example: Makes inputs of one call of the network.
        loops: Class whose objects call compiled loops. They are called as often on the other machine as here.
    """

    make: Callable[[], nn.Module]
    recipe: Callable[[str], fxq.Recipe]
    shape: tuple[int, ...]
    max_errors: MaxErrors = OF_INTEGERS
    call: Callable[[nn.Module, Tensor], Tensor] = _call
    example: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,)
    loops: type | None = None

    def quantized(self, backend: str, model: nn.Module, x: Tensor) -> Any:
        """The network, quantized for a backend."""
        example = self.example(x)
        recipe = self.recipe(backend).with_min_sqnr(None)
        return fxq.quantize(model.eval(), recipe, data=[example], example_inputs=example, progress=False)


class Block(nn.Module):
    """Convolution, depthwise convolution, a residual sum, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.by_channel = nn.Conv2d(3, 32, 3, stride=2), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.mix, self.last = nn.Conv2d(32, 32, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = torch.relu(self.mix(torch.relu(self.by_channel(y))) + y)
        return self.last(y.mean((2, 3)))


class Words(nn.Module):
    """LSTM, and a linear layer of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(24, 40, batch_first=True), nn.Linear(40, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(192, 320), nn.GELU(), nn.Linear(320, 64), nn.ReLU())


def _preset(preset: Callable[..., fxq.Recipe], **options: Any) -> Callable[[str], fxq.Recipe]:
    return lambda backend: preset(backend=backend, optimize="coverage", **options)


# ---- weights of 2 to 6 bits

_COLUMNS = (33, 75, 128, 133, 200)
_BLOCKS = ("channel", 12, 24, 48, 64)
_COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 20)
"""Numbers of rows. Those above 16 are multiplied by a weight that a loop converts to floats."""


class OddLayers(nn.Module):
    """Linear layers of different numbers of columns, each of which reads the first columns of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.by_block = nn.ModuleList(
            nn.ModuleList(nn.Linear(columns, outputs) for outputs, columns in enumerate(_COLUMNS, 7)) for _ in _BLOCKS
        )

    def forward(self, x: Tensor) -> Tensor:
        layers = [layer for of_block in self.by_block for layer in of_block]  # type: ignore[union-attr]
        return torch.cat([layer(x[:, : layer.in_features]) for layer in layers], 1)


def _odd_recipe(bits: int) -> Callable[[str], fxq.Recipe]:
    """Weights of so many bits, with scales of blocks of another size for each list of layers."""

    def recipe(backend: str) -> fxq.Recipe:
        whole = fxq.Recipe.weight_only(bits=bits, backend=backend, optimize="coverage")
        for index, block in enumerate(_BLOCKS):
            whole = whole.override(f"by_block.{index}.*", fxq.Recipe.weight_only(bits=bits, per=block).config)
        return whole

    return recipe


def _of_each_count(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(x[:count]) for count in _COUNTS])


# ---- decoders

_HEADS, _DEPTH, _PAST = 2, 32, 6
_WIDTH = 2 * _HEADS * _DEPTH


class Decoder(nn.Module):
    """Attention of two queries to each head of a cache, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.key, self.value = nn.Linear(_WIDTH, _WIDTH // 2), nn.Linear(_WIDTH, _WIDTH // 2)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, _HEADS, 2, _DEPTH).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, _HEADS, 2 * length, _DEPTH)
        keys = torch.cat([keys, self.key(x).view(batch, length, _HEADS, _DEPTH).transpose(1, 2)], 2)
        values = torch.cat([values, self.value(x).view(batch, length, _HEADS, _DEPTH).transpose(1, 2)], 2)
        y = F.scaled_dot_product_attention(query, keys, values).view(batch, _HEADS, 2, length, _DEPTH)
        x = x + self.out(y.permute(0, 3, 1, 2, 4).reshape(x.shape))
        return x + self.down(F.silu(self.up(x))), keys, values


def _past(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the first tokens, (batch, heads, tokens, depth)."""
    states = x[:, :_PAST].view(len(x), _PAST, 2 * _HEADS, _DEPTH).transpose(1, 2).contiguous()
    return states[:, :_HEADS].contiguous(), states[:, _HEADS:].contiguous()


def _decoder_example(x: Tensor) -> tuple[Any, ...]:
    return x[:, _PAST : _PAST + 3], *_past(x)


@torch.no_grad()
def _token_by_token(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs of all tokens after the past, and the states after the last one."""
    states: Any = _past(x)
    outputs = []
    for token in x[:, _PAST:].split(1, 1):
        y, *states = model(token, *states)
        outputs.append(y)
    floats = [state if isinstance(state, Tensor) else state.dequantize() for state in states]
    return torch.cat([part.flatten() for part in (*outputs, *floats)])


def _decoder(bits: int, state: fxq.TensorSpec, max_errors: MaxErrors) -> Case:
    return Case(
        Decoder, _preset(fxq.Recipe.weight_only, bits=bits, state=state), (1, _PAST + 14, _WIDTH), max_errors,
        _token_by_token, _decoder_example, TokenProgram,
    )  # fmt: skip


CASES = {
    "convolutions": Case(Block, _preset(fxq.Recipe.static), (2, 3, 20, 20)),
    "few rows, dynamic": Case(_layers, _preset(fxq.Recipe.dynamic), (3, 192)),
    "many rows, dynamic": Case(_layers, _preset(fxq.Recipe.dynamic), (40, 192)),
    "few rows, weights of 4 bits": Case(_layers, _preset(fxq.Recipe.weight_only, bits=4), (3, 192), OF_FLOATS),
    "many rows, weights of 4 bits": Case(_layers, _preset(fxq.Recipe.weight_only, bits=4), (40, 192), OF_FLOATS),
    "LSTM": Case(Words, _preset(fxq.Recipe.static), (3, 5, 24)),
    "LSTM, dynamic": Case(Words, _preset(fxq.Recipe.dynamic), (3, 5, 24)),
    **{
        f"odd blocks and columns, weights of {bits} bits": Case(
            OddLayers, _odd_recipe(bits), (max(_COUNTS), max(_COLUMNS)), OF_FLOATS, _of_each_count, loops=FewRowsProduct
        )
        for bits in (2, 3, 4, 6)
    },
    "decoder, cache of 8 bits": _decoder(8, fxq.TensorSpec(per="row", range="dynamic"), OF_INTEGERS),
    "decoder, cache of 4 bits": _decoder(4, fxq.TensorSpec(bits=4, per="row", range="dynamic"), OF_INTEGERS),
}
"""Cases by name."""
