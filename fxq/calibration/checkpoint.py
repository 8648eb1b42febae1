"""Checkpoint file, from which an interrupted calibration continues."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxq.calibration.calibration_state import difference
from fxq.common.checksums import checksum
from fxq.common.data import Batch
from fxq.common.files import as_path, replacing
from fxq.common.ranks import Ranks
from fxq.common.stored_data import pack, unpack
from fxq.common.trees import leaves
from fxq.errors import InputError

FORMAT = 1
"""Version of the file format. Files of a later version are refused."""

Prints = Sequence[Mapping[str, str]]


class Checkpoint:
    """Checkpoint of a calibration: the state of each graph, and a checksum of each batch that was seen.

    Attributes:
        path: the file.
        checksums: checksums of the batches that were seen, in order.
        complete: whether these were all batches.

    Args:
        path: the file. With several ranks, each has a file of its own, see `rank_path`.
        every: minimum number of seconds between two writes.
        prints: fingerprints of the graphs of the model.
        ranks: the processes that calibrate together.
        models: function that returns the state of each graph, see `seen_by`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: float,
        prints: Prints,
        ranks: Ranks,
        models: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self.path = rank_path(path, ranks)
        self.checksums: list[int] = []
        self.complete = False
        self._every, self._prints, self._ranks, self._models = every, prints, ranks, models
        self._written = time.monotonic()

    def load(self, device: str, length: int | None = None) -> list[dict[str, Any]] | None:
        """Return the states of the graphs in the file; None if there is no file.

        Args:
            device: device of the tensors.
            length: number of batches of the data now; None: not known.

        Raises:
            InputError: the file is no checkpoint, or of another model, recipe, share or amount of data.
        """
        if not self.path.exists():
            return None
        content = read_checkpoint(self.path, self._prints, device)
        if (content["rank"], content["ranks"]) != (self._ranks.rank, self._ranks.size):
            raise InputError(
                f"{self.path} was written by rank {content['rank']} of {content['ranks']}, and this is rank "
                f"{self._ranks.rank} of {self._ranks.size}, with another share of the data. {_DELETE_FILE}"
            )
        self.checksums, self.complete = content["checksums"].tolist(), content["complete"]
        if self.complete and length not in (None, len(self.checksums)):
            raise InputError(
                f"{self.path} is of a calibration that ended with {len(self.checksums)} batches, and the data has "
                f"{length}. {_DELETE_FILE}"
            )
        models: list[dict[str, Any]] = content["models"]
        return models

    def covers(self, i: int, batch: Batch) -> bool:
        """Whether the state in the file includes batch `i`.

        Raises:
            InputError: it includes another batch in this place.
        """
        if i >= len(self.checksums):
            return False
        if _checksum(batch) != self.checksums[i]:
            raise InputError(
                f"data, batch {i}: {self.path} was written when another batch was in this place. To continue from it, "
                "the data must have the same batches in the same order (a DataLoader that shuffles, the same "
                f"generator). {_DELETE_FILE}"
            )
        return True

    def add(self, batch: Batch) -> None:
        """Add a batch that was seen, and write the file if it is time."""
        self.checksums.append(_checksum(batch))
        if time.monotonic() - self._written >= self._every:
            self.write()

    def finish(self, count: int) -> None:
        """Write the file after the last batch.

        Args:
            count: number of batches of the data.

        Raises:
            InputError: the file was written after more batches.
        """
        if count < len(self.checksums):
            raise InputError(
                f"the data ended after {count} batches, and {self.path} was written after {len(self.checksums)}. "
                f"{_DELETE_FILE}"
            )
        self.complete = True
        self.write()

    def write(self) -> None:
        """Write the file. The old file is replaced once the new one is complete."""
        content = {
            "format": FORMAT,
            "fingerprint": [dict(print_of_graph) for print_of_graph in self._prints],
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            "complete": self.complete,
            "checksums": torch.tensor(self.checksums, dtype=torch.int64),
            "models": self._models(),
        }
        with replacing(self.path) as file:
            file.write(pack(content))
        self._written = time.monotonic()


_DELETE_FILE = "Delete the file to calibrate from the start, or give another path."


def rank_path(path: str | os.PathLike[str], ranks: Ranks) -> Path:
    """File of this rank: `c.rank0.safetensors` for `c.safetensors`; with a single process, the path as it is."""
    path = as_path(path)
    return path if ranks.size == 1 else path.with_name(f"{path.stem}.rank{ranks.rank}{path.suffix}")


def read_checkpoint(path: Path, prints: Prints, device: str) -> dict[str, Any]:
    """Content of a checkpoint file.

    Raises:
        InputError: the file does not exist, is no checkpoint, has a later format, or is of another model or recipe.
    """
    try:
        content = unpack(path.read_bytes(), device)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    except InputError as error:
        raise InputError(f"{path} is no checkpoint of a calibration, or damaged: {error} {_DELETE_FILE}") from error
    if not isinstance(content, dict) or "fingerprint" not in content:
        raise InputError(f"{path} is no checkpoint of a calibration. {_DELETE_FILE}")
    if content["format"] > FORMAT:
        raise InputError(
            f"{path} was written by a later version of fxq, in format {content['format']}; this one reads {FORMAT}. "
            f"Update fxq. {_DELETE_FILE}"
        )
    why = difference(prints, content["fingerprint"])
    if why is not None:
        raise InputError(f"{path} is of another model or recipe: {why}. {_DELETE_FILE}")
    return content


def _checksum(batch: Batch) -> int:
    """Checksum of all values of a batch."""
    crc = 0
    for leaf in leaves((batch.args, dict(batch.kwargs))):
        if isinstance(leaf, Tensor):
            text = f"{leaf.dtype} {list(leaf.shape)} {checksum(leaf, max_values=max(leaf.numel(), 1))}"
        else:
            text = repr(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__
        crc = zlib.crc32(text.encode(), crc)
    return crc
