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
from fxq.common.file_kinds import is_onnx, no_module
from fxq.common.files import check_writable
from fxq.common.source import imported
from fxq.errors import FxqError, FxqWarning, InputError, unknown, words_of

if TYPE_CHECKING:
    from torch import nn

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
_IN, _OUT = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)
_MODEL = click.argument("model", type=_IN)


class _Commands(click.Group):
    """Command group that prints errors as one message on stderr, with exit code 1; invalid arguments exit with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Print warnings of fxq without their source line, and errors without a traceback."""
        with warnings.catch_warnings():
            default_showwarning = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, FxqWarning):
                    click.echo(f"Warning: {message}", err=True)
                else:
                    default_showwarning(message, category, *place)

            warnings.showwarning = show  # type: ignore[assignment]
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
                raise
            except Exception as error:  # raised by fxq or the user's code
                if ctx.params["traceback"]:
                    raise
                raise click.ClickException(str(error) if isinstance(error, FxqError) else _error_text(error)) from error


@click.group(cls=_Commands)
@click.version_option(fxq.__version__)
@click.option("--traceback", is_flag=True, help="Show the Python traceback of an error.")
def main(traceback: bool) -> None:
    """Quantize PyTorch models; inspect, compare, time and export the results."""


@main.command()
@click.argument("model")
@click.option(
    "--data",
    required=True,
    help="Calibration data as package.module:name of an iterable of batches, or of a function that returns one.",
)
@click.option("--weights", type=_IN, help="File with the model's state dict (.safetensors).")
@click.option(
    "--recipe",
    default="static",
    show_default=True,
    help="Name of a preset (static, dynamic, weight_only, stored), or recipe file (.toml).",
)
@click.option("--backend", help="Backend instead of the recipe's: auto, fastest, x86, openvino, ...")
@click.option("--optimize", help="Goal instead of the recipe's: speed or coverage.")
@click.option("--effort", default="default", show_default=True, help="fast, default or best, see fxq.quantize.")
@click.option("--threads", type=click.IntRange(min=1), help="Number of threads. Default: PyTorch's setting.")
@click.option(
    "-o",
    "--output",
    type=_OUT,
    required=True,
    help="Output file: .fxq, or an export: .onnx, .xml (OpenVINO), .pt2 (torch.export).",
)
@click.option("--report", type=_OUT, help="Also write a report page (HTML) to this file.")
@_JSON
def quantize(
    model: str,
    data: str,
    weights: Path | None,
    recipe: str,
    backend: str | None,
    optimize: str | None,
    effort: Any,
    threads: int | None,
    output: Path,
    report: Path | None,
    as_json: bool,
) -> None:
    """Quantize MODEL: an ONNX file, or package.module:name of an nn.Module or of a function that returns one."""
    exported = _check_output(output)
    if report is not None:
        check_writable(report)
    import torch
    from torch import nn

    import fxq.public  # presets name passes, which register when they are imported
    from fxq.recipe.recipe import as_recipe

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = as_recipe(recipe)
    chosen = chosen if backend is None else chosen.with_backend(backend)
    chosen = chosen if optimize is None else chosen.with_optimize(optimize)
    sys.path.insert(0, os.getcwd())
    if is_onnx(model):
        module = fxq.read_onnx(model)
    else:
        module = _called(model, "model", lambda value: not isinstance(value, nn.Module))
    if not isinstance(module, nn.Module):
        raise InputError(f"{model} is a {type(module).__name__}, not an nn.Module or a function that returns one.")
    if weights is not None:
        _load_weights(module, weights)
    module.eval()
    qmodel = fxq.quantize(module, chosen, data=_called(data, "data", callable), effort=effort)
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
    """Print a table of the layers of MODEL, a .fxq file: precision, error and the reason for float."""
    _print_model(fxq.load(model), as_json)


@main.command()
@_MODEL
@click.argument("other", type=_IN)
@click.option("--svg", type=_OUT, help="Also draw the difference to this file.")
@_JSON
def diff(model: Path, other: Path, svg: Path | None, as_json: bool) -> None:
    """Print the differences between the graphs of MODEL and OTHER, two .fxq files."""
    difference = fxq.diff(fxq.load(model).history[-1], fxq.load(other).history[-1])
    pictures = [] if svg is None else [str(difference.render(svg))]
    if as_json:
        names = {kind: list(getattr(difference, kind)) for kind in ("removed", "added", "rewired")}
        changed = {change.name: list(change.by_field.values()) for change in difference.changed}
        click.echo(json.dumps({**names, "changed": changed}, indent=2))
    else:
        text = difference.to_text(full=False) if difference else "The graphs are the same."
        click.echo("\n".join([text, *pictures]))


@main.command()
@_MODEL
@_JSON
def bench(model: Path, as_json: bool) -> None:
    """Time every layer of MODEL, a .fxq file, on random inputs of the recorded shapes."""
    profile = fxq.load(model).profile()
    click.echo(profile.to_json() if as_json else profile)


@main.command()
@_MODEL
@click.argument("page", type=_OUT)
def report(model: Path, page: Path) -> None:
    """Write a report of MODEL, a .fxq file, to PAGE, one HTML file."""
    click.echo(fxq.load(model).report(page))


@main.command()
@_MODEL
@click.argument("path", type=_OUT)
@click.option("--fixed", is_flag=True, help="Fix the batch size to that of the example.")
def export(model: Path, path: Path, fixed: bool) -> None:
    """Export MODEL, a .fxq file, to PATH: .onnx, .xml (OpenVINO) or .pt2 (torch.export)."""
    click.echo(fxq.load(model).export(path, dynamic=not fixed))


@main.command()
@_JSON
@click.option(
    "--compile", "compiles", is_flag=True, help="Only compile fxq's loops into the cache, as in image builds."
)
def doctor(as_json: bool, compiles: bool) -> None:
    """Check which layers each backend runs on integers on this machine, whether correctly, and how fast."""
    if compiles:
        from fxq.backends.loops.code.compiler import compile_loops

        click.echo(compile_loops())
        return
    diagnosis = fxq.doctor()
    click.echo(json.dumps(diagnosis.to_dict(), indent=2) if as_json else diagnosis)


_EXPORTED = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}
"""Package that writes an export, by suffix."""


def _check_output(path: Path) -> bool:
    """Whether an output path is an export for another runtime. Raises `FxqError` if it cannot be written."""
    if path.suffix not in (*_EXPORTED, ".fxq", ""):
        raise InputError(f"{path}: {unknown('suffix', path.suffix, (*_EXPORTED, '.fxq'))}")
    package = _EXPORTED.get(path.suffix, "torch")
    if find_spec(package) is None:
        raise InputError(f"{path} cannot be written: {package} is not installed: pip install fxq[{package}].")
    check_writable(path)
    return path.suffix in _EXPORTED


def _error_text(error: Exception) -> str:
    """Message of an error that fxq did not raise, with the line that raised it."""
    *_, last = extract_tb(error.__traceback__)
    place = f"{last.filename}:{last.lineno}; for the traceback: fxq --traceback ..."
    return f"{type(error).__name__}: {words_of(error)} ({place})"


def _called(path: str, role: str, makes: Callable[[Any], bool]) -> Any:
    """Import the object at a path, and call it if `makes` says that it is a function that makes the object.

    Args:
        path: as in "package.module:name".
        role: "model" or "data", for messages.
        makes: whether a callable is to be called.
    """
    if ":" not in path:
        if role == "model" and (why := no_module(path)):
            raise InputError(why)
        raise InputError(f"give the {role} as package.module:name, not {path!r}.")
    try:
        value = imported(path)
        return value() if callable(value) and makes(value) else value
    except FxqError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise InputError(f"{path}: {type(error).__name__}: {words_of(error)}") from error


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors.torch import load_model

    try:
        load_model(model, path)
    except Exception as error:  # damaged files and files of other models raise different errors
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
