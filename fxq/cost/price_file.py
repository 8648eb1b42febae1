"""`fxq.cost_cache`: the file of this machine's measured prices, and functions to reset, export and load it.

With optimize="speed", prices that are measured once per machine decide which ops run on integers (see
`fxq/cost/cache.py`). Machines of one kind can share a file of prices to reach the same decisions. A recipe with fixed
decisions (`qmodel.recipe_as_decided()`) needs no prices.
"""

from __future__ import annotations

import os
from pathlib import Path

from fxq.cost.cache import machine, machine_path, parse_file, read_rounds, write_rounds
from fxq.errors import InputError, RenderError


def path() -> Path:
    """Return the path of the file with this machine's prices. It exists once a price was measured.

    Its name has a hash of all that prices depend on: CPU, instruction sets, versions of torch and fxq, and kernel code.

    Example:
        >>> path().suffix
        '.json'
    """
    return machine_path()


def reset() -> None:
    """Delete the prices of this machine, so that they are measured again."""
    machine_path().unlink(missing_ok=True)


def export(file: str | os.PathLike[str]) -> Path:
    """Write the prices of this machine to a file, for `load` on machines of the same kind.

    Args:
        file: path of the file. Missing folders are created.

    Returns:
        The file's path.

    Raises:
        InputError: no price was measured yet, or the file cannot be written.

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
    """Add the prices of a file that `export` wrote to this machine's. They replace prices that were measured here.

    Args:
        file: path of the file.

    Returns:
        Number of prices in the file.

    Raises:
        InputError: the file is missing, has no prices, or is from another kind of machine; the message says which facts
            differ.
    """
    try:
        there, rounds = parse_file(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read prices from {os.fspath(file)!r}: {error}.") from None
    here = machine()
    differences = [
        f"{key} is {there.get(key)!r} there, {here.get(key)!r} here"
        for key in {**here, **there}
        if there.get(key) != here.get(key)
    ]
    if differences:
        raise InputError(
            f"the prices in {os.fspath(file)!r} are of another kind of machine: {'; '.join(differences)}. Measure "
            "prices here, or fix the decisions: qmodel.recipe_as_decided()."
        )
    try:
        write_rounds(machine_path(), {**read_rounds(machine_path()), **rounds})
    except RenderError as error:
        raise InputError(f"cannot store the prices: {error}") from None
    return len(rounds)
