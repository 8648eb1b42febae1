"""A file that a calibration which was ended, or killed, goes on from."""

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
from fxq.calibration.ranks import Ranks
from fxq.common.checksums import checksum
from fxq.common.data import Batch
from fxq.common.files import as_path, replacing
from fxq.common.stored_data import pack, unpack
from fxq.common.trees import leaves
from fxq.errors import InputError

FORMAT = 1
"""Version of the files. A file of a later version is refused."""

Prints = Sequence[Mapping[str, str]]


class Checkpoint:
    """A calibration as it is written to a file, with a checksum of each batch that was seen.

    Attributes:
        path: the file.
        checksums: of the batches that were seen, in order.
        complete: whether these were all.

    Args:
        path: the file; of several ranks each has its own, `rank_path` of it.
        every: seconds between two writes.
        prints: fingerprints of the graphs of the model.
        ranks: the processes that calibrate together.
        models: returns what each of the graphs has seen.
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
        """What each of the graphs had seen when the file was written; None where there is none.

        Args:
            device: where tensors are to be.
            length: how many batches there are this time; None: not known.

        Raises:
            InputError: the file is no checkpoint, of another model, recipe or share of the data, or of less data.
        """
        if not self.path.exists():
            return None
        found = read_checkpoint(self.path, self._prints, device)
        if (found["rank"], found["ranks"]) != (self._ranks.rank, self._ranks.size):
            raise InputError(
                f"{self.path} was written by rank {found['rank']} of {found['ranks']}, and this is rank "
                f"{self._ranks.rank} of {self._ranks.size}, with another share of the data. {_ANEW}"
            )
        self.checksums, self.complete = found["checksums"].tolist(), found["complete"]
        if self.complete and length not in (None, len(self.checksums)):
            raise InputError(
                f"{self.path} is of a calibration that ended with {len(self.checksums)} batches, and the data has "
                f"{length}. {_ANEW}"
            )
        models: list[dict[str, Any]] = found["models"]
        return models

    def covers(self, i: int, batch: Batch) -> bool:
        """Whether batch `i` was seen before the file was written.

        Raises:
            InputError: another batch was, in its place.
        """
        if i >= len(self.checksums):
            return False
        if _checksum(batch) != self.checksums[i]:
            raise InputError(
                f"data, batch {i}: {self.path} was written when another batch was in this place. To go on from it, the "
                f"data has to give the same batches in the same order (a DataLoader that shuffles, with the same "
                f"generator). {_ANEW}"
            )
        return True

    def add(self, batch: Batch) -> None:
        """A batch has been seen; write the file if it is time."""
        self.checksums.append(_checksum(batch))
        if time.monotonic() - self._written >= self._every:
            self.write()

    def finish(self, count: int) -> None:
        """The data is at its end, behind so many batches. Raises `InputError` where more had been seen."""
        if count < len(self.checksums):
            raise InputError(
                f"the data ended behind {count} batches, and {self.path} was written behind {len(self.checksums)}. "
                f"{_ANEW}"
            )
        self.complete = True
        self.write()

    def write(self) -> None:
        """Write the file; the one before is there until the new one is complete."""
        content = {
            "format": FORMAT,
            "fingerprint": [dict(one) for one in self._prints],
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            "complete": self.complete,
            "checksums": torch.tensor(self.checksums, dtype=torch.int64),
            "models": self._models(),
        }
        with replacing(self.path) as file:
            file.write(pack(content))
        self._written = time.monotonic()


_ANEW = "Delete the file to calibrate anew, or give another path."


def rank_path(path: str | os.PathLike[str], ranks: Ranks) -> Path:
    """The file of this rank: `c.rank0.safetensors` for `c.safetensors`; of one process alone, the path as it is."""
    path = as_path(path)
    return path if ranks.size == 1 else path.with_name(f"{path.stem}.rank{ranks.rank}{path.suffix}")


def read_checkpoint(path: Path, prints: Prints, device: str) -> dict[str, Any]:
    """What is in a file.

    Raises:
        InputError: there is no such file, it is no checkpoint or a later version of one, or of another model or recipe.
    """
    try:
        found = unpack(path.read_bytes(), device)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    except InputError as error:
        raise InputError(f"{path} is no checkpoint of a calibration, or damaged: {error} {_ANEW}") from error
    if not isinstance(found, dict) or "fingerprint" not in found:
        raise InputError(f"{path} is no checkpoint of a calibration. {_ANEW}")
    if found["format"] > FORMAT:
        raise InputError(
            f"{path} was written by a later version of fxq, in format {found['format']}; this one reads {FORMAT}. "
            f"Update fxq. {_ANEW}"
        )
    why = difference(prints, found["fingerprint"])
    if why is not None:
        raise InputError(f"{path} is of another model or recipe: {why}. {_ANEW}")
    return found


def _checksum(batch: Batch) -> int:
    """Of all values of a batch."""
    found = 0
    for leaf in leaves((batch.args, dict(batch.kwargs))):
        if isinstance(leaf, Tensor):
            text = f"{leaf.dtype} {list(leaf.shape)} {checksum(leaf, max_values=max(leaf.numel(), 1))}"
        else:
            text = repr(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__
        found = zlib.crc32(text.encode(), found)
    return found
