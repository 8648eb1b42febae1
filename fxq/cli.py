"""The command line: `fxq quantize`, `inspect`, `diff`, `bench`, `report`, `export` and `doctor`.

Modules that need PyTorch are imported when a command runs, so that `fxq --help` is fast.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import click

import fxq
from fxq.common.file_kinds import no_module
from fxq.common.files import check_writable
from fxq.common.source import imported
from fxq.errors import FxqError, FxqWarning, InputError, unknown, words_of

if TYPE_CHECKING:
    from torch import nn

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
_IN, _OUT = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)
_MODEL = click.argument("model", type=_IN)


class _Commands(click.Group):
    """Commands whose errors are told in words on stderr, with exit code 1; wrong arguments have 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Warnings of fxq are told without their place in the code, errors without a traceback."""
        with warnings.catch_warnings():
            others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, FxqWarning):
                    click.echo(f"Warning: {message}", err=True)
                else:
                    others(message, category, *place)

            warnings.showwarning = show  # type: ignore[assignment]
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
                raise
            except Exception as error:  # of fxq, or of the user's code
                if ctx.params["traceback"]:
                    raise
                raise click.ClickException(str(error) if isinstance(error, FxqError) else _told(error)) from error


@click.group(cls=_Commands)
@click.version_option(fxq.__version__)
@click.option("--traceback", is_flag=True, help="Show where in the code an error comes from.")
def main(traceback: bool) -> None:
    """Quantize PyTorch models, and look at what became of them."""


@main.command()
@click.argument("model")
@click.option("--data", required=True, help="Calibration batches: package.module:name, an iterable or a function.")
@click.option("--weights", type=_IN, help="A .safetensors file with the model's state dict.")
@click.option("--recipe", default="static", show_default=True, help="A preset's name, or a recipe file (.toml).")
@click.option("--backend", help="Backend, overrides the recipe's: auto, fastest, openvino, ...")
@click.option("--optimize", help="speed or coverage, overrides the recipe's.")
@click.option("--threads", type=click.IntRange(min=1), help="Number of PyTorch threads; default: PyTorch's.")
@click.option(
    "-o",
    "--output",
    type=_OUT,
    required=True,
    help="File to write: m.fxq, or an export: m.onnx, m.xml (OpenVINO), m.pt2 (torch.export).",
)
@click.option("--report", type=_OUT, help="Write the report page to this file, too.")
@_JSON
def quantize(
    model: str,
    data: str,
    weights: Path | None,
    recipe: str,
    backend: str | None,
    optimize: str | None,
    threads: int | None,
    output: Path,
    report: Path | None,
    as_json: bool,
) -> None:
    """Quantize MODEL, package.module:name: a module, or a function that makes one."""
    exported = _check_output(output)
    if report is not None:
        check_writable(report)
    import torch
    from torch import nn

    import fxq.public  # presets name passes, which register when they are imported
    from fxq.recipe.recipe import as_recipe
    from fxq.tracing.wrappers import unwrapped

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = as_recipe(recipe)
    chosen = chosen if backend is None else chosen.with_backend(backend)
    chosen = chosen if optimize is None else chosen.with_optimize(optimize)
    sys.path.insert(0, os.getcwd())
    module = _called(model, "model", lambda value: not isinstance(value, nn.Module))
    if not isinstance(module, nn.Module):
        raise InputError(f"{model} is a {type(module).__name__}, not an nn.Module, nor a function that makes one.")
    if weights is not None:
        _load_weights(module, weights)
    unwrapped(module).eval()
    qmodel = fxq.quantize(module, chosen, data=_called(data, "data", callable))
    if exported:
        qmodel.export(output)
    else:
        qmodel.save(output)
    if report is not None:
        qmodel.report(report)
    _print_model(qmodel, as_json)


@main.command()
@_MODEL
@_JSON
def inspect(model: Path, as_json: bool) -> None:
    """What became of every layer of MODEL, a .fxq file."""
    _print_model(fxq.load(model), as_json)


@main.command()
@_MODEL
@click.argument("other", type=_IN)
@click.option("--svg", type=_OUT, help="Draw the difference.")
@_JSON
def diff(model: Path, other: Path, svg: Path | None, as_json: bool) -> None:
    """How the graph of OTHER differs from that of MODEL."""
    found = fxq.diff(fxq.load(model).history[-1], fxq.load(other).history[-1])
    drawn = [] if svg is None else [str(found.render(svg))]
    if as_json:
        names = {kind: list(getattr(found, kind)) for kind in ("removed", "added", "rewired")}
        changed = {change.name: list(change.by_field.values()) for change in found.changed}
        click.echo(json.dumps({**names, "changed": changed}, indent=2))
    else:
        click.echo("\n".join([found.to_text(full=False) if found else "The graphs are the same.", *drawn]))


@main.command()
@_MODEL
@_JSON
def bench(model: Path, as_json: bool) -> None:
    """Where the time of MODEL goes, on inputs that are made up."""
    found = fxq.load(model).profile()
    click.echo(found.to_json() if as_json else found)


@main.command()
@_MODEL
@click.argument("page", type=_OUT)
def report(model: Path, page: Path) -> None:
    """Write the report of MODEL as one HTML file, PAGE."""
    click.echo(fxq.load(model).report(page))


@main.command()
@_MODEL
@click.argument("path", type=_OUT)
@click.option("--fixed", is_flag=True, help="For batches of the example's size alone.")
def export(model: Path, path: Path, fixed: bool) -> None:
    """Write MODEL for another runtime: PATH ends in .onnx, .xml (OpenVINO) or .pt2 (torch.export)."""
    click.echo(fxq.load(model).export(path, dynamic=not fixed))


@main.command()
@_JSON
@click.option("--compile", "compiles", is_flag=True, help="Only compile fxq's loops into the cache, for image builds.")
def doctor(as_json: bool, compiles: bool) -> None:
    """What this machine does with integers, and how fast."""
    if compiles:
        from fxq.backends.loops.code.compiler import compile_loops

        click.echo(compile_loops())
        return
    diagnosis = fxq.doctor()
    click.echo(json.dumps(diagnosis.to_dict(), indent=2) if as_json else diagnosis)


_EXPORTED = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}
"""Suffixes of exports, with the package that writes each."""


def _check_output(path: Path) -> bool:
    """Whether a path is an export for another runtime. Raises `FxqError` if it cannot be written."""
    if path.suffix not in (*_EXPORTED, ".fxq", ""):
        raise InputError(f"{path}: {unknown('suffix', path.suffix, (*_EXPORTED, '.fxq'))}")
    package = _EXPORTED.get(path.suffix, "torch")
    if find_spec(package) is None:
        raise InputError(f"{path} cannot be written: {package} is not installed: pip install fxq[{package}].")
    check_writable(path)
    return path.suffix in _EXPORTED


def _told(error: Exception) -> str:
    """An error that is none of fxq's, and the line that raised it."""
    *_, last = extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {words_of(error)} ({last.filename}:{last.lineno}; fxq --traceback ... says more)"


def _called(path: str, role: str, makes: Callable[[Any], bool]) -> Any:
    """What an import path names; where that `makes` it, what it returns."""
    if ":" not in path:
        if role == "model" and (why := no_module(path)):
            raise InputError(why)
        raise InputError(f"the {role} is written package.module:name, not {path!r}.")
    try:
        value = imported(path)
        return value() if callable(value) and makes(value) else value
    except FxqError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"{path}: {type(error).__name__}: {words_of(error)}") from error


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors.torch import load_model

    try:
        load_model(model, path)
    except Exception as error:  # a file that is none, or of another model: each has errors of its own
        raise InputError(f"the weights of {path} cannot be loaded: {words_of(error)}") from error


def _print_model(qmodel: fxq.results.QuantizedModel, as_json: bool) -> None:
    from fxq.common.metrics import nbytes

    facts = {
        "backend": qmodel.backend,
        "preset": qmodel.recipe.preset,
        "bytes": nbytes(qmodel),
        "int8_macs": qmodel.ledger.coverage,
        "output_sqnr": qmodel.output_sqnr,
    }
    if as_json:
        layers = json.loads(qmodel.ledger.to_json())
        facts["output_sqnr"] = layers["output_sqnr"]  # as JSON has it
        click.echo(json.dumps({**facts, "layers": layers}, indent=2, allow_nan=False))
        return
    for name, value in facts.items():
        click.echo(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    click.echo(qmodel.ledger)
