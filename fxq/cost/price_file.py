"""Measured prices, for their owner: where they are, and how to forget, export and ship them.

What runs on integers follows from prices that are measured once per machine (see `fxq/cost/cache.py`). Machines of one
kind that are to come to the same decisions can share a file of them; a recipe with the decisions themselves
(`qmodel.recipe_as_decided()`) needs no prices, on any machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from fxq.cost.cache import machine, machine_path, parse_file, read_rounds, write_rounds
from fxq.errors import InputError, RenderError


def path() -> Path:
    """The file with the prices of this machine; there is none before anything was measured.

    Its name holds all that prices depend on: CPU and instruction sets, versions of torch and fxq, the kernels' code.

    Example:
        >>> path().suffix
        '.json'
    """
    return machine_path()


def reset() -> None:
    """Forget the prices of this machine: whatever is quantized next is measured anew."""
    machine_path().unlink(missing_ok=True)


def export(file: str | os.PathLike[str]) -> Path:
    """Write the prices of this machine to a file, for `load` on machines of the same kind.

    Args:
        file: where to; folders that are missing are made.

    Returns:
        The file's path.

    Raises:
        InputError: nothing was measured yet, or the file cannot be written.

    Example:
        >>> export("prices.json")  # doctest: +SKIP
        >>> load("prices.json")  # doctest: +SKIP
    """
    rounds = read_rounds(machine_path())
    if not rounds:
        raise InputError(
            f"there are no prices to export: {machine_path()} is missing or empty. Quantize a model first, with "
            'optimize="speed".'
        )
    try:
        write_rounds(Path(file), rounds)
    except RenderError as error:
        raise InputError(f"cannot write the prices to {os.fspath(file)!r}: {error}") from None
    return Path(file)


def load(file: str | os.PathLike[str]) -> int:
    """Take over the prices in a file that `export` wrote; where this machine has measured the same, the file's count.

    Returns:
        How many there are.

    Raises:
        InputError: there is no such file, it holds no prices, or they are those of another kind of machine; the message
            says what is different.
    """
    try:
        about, rounds = parse_file(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read prices from {os.fspath(file)!r}: {error}.") from None
    here = machine()
    apart = [
        f"{key} is {about.get(key)!r} there, {here.get(key)!r} here"
        for key in {**here, **about}
        if about.get(key) != here.get(key)
    ]
    if apart:
        raise InputError(
            f"the prices in {os.fspath(file)!r} are of another kind of machine: {'; '.join(apart)}. Measure here, or "
            "pin the decisions: qmodel.recipe_as_decided()."
        )
    try:
        write_rounds(machine_path(), {**read_rounds(machine_path()), **rounds})
    except RenderError as error:
        raise InputError(f"cannot keep the prices: {error}") from None
    return len(rounds)
