"""The command line: `fxq quantize`, `inspect`, `diff`, `bench`, `report`, `export` and `doctor`.

Modules that need PyTorch are imported when a command runs, so that `fxq --help` is fast.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
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


def _model_command(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose first argument is a quantized model, which is loaded from a file or folder."""

    @click.argument("model", type=_IN)
    @click.option(
        "--import", "imports", multiple=True, metavar="MODULE", help="First import a module whose classes a file names."
    )
    @click.option("--into", help="Float model of a file of parts: package.module:name of it, or of a function.")
    @functools.wraps(command)
    def with_loaded(model: Path, imports: tuple[str, ...], into: str | None, **options: Any) -> None:
        sys.path.insert(0, os.getcwd())
        for name in imports:
            try:
                import_module(name)
            except ImportError as error:
                raise InputError(f"--import {name}: {words_of(error)}") from error
        command(model=_loaded(model, into), **options)

    return with_loaded


def _loaded(path: Path, into: str | None = None) -> Any:
    """Load a quantized model. Of a model of transformers, return the programs."""
    from torch import nn

    of_parts = {} if into is None else {"into": _called(into, "model", lambda value: not isinstance(value, nn.Module))}
    loaded = fxq.load(path, **of_parts)
    return loaded.programs if path.is_dir() else loaded  # a folder holds a model of transformers


def _graphs(model: Any) -> Mapping[str, Any]:
    """Return the graphs of a model by name: its programs or parts, or the model itself under an empty name."""
    from fxq.results import PartsModel, QuantizedPrograms

    if isinstance(model, QuantizedPrograms):
        return model.programs
    return model.parts if isinstance(model, PartsModel) else {"": model}


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
@_model_command
@_JSON
def inspect(model: Any, as_json: bool) -> None:
    """Print a table of the layers of MODEL, a .fxq file or a folder: precision, error and the reason for float."""
    _print_model(model, as_json)


@main.command()
@_model_command
@click.argument("other", type=_IN)
@click.option("--svg", type=_OUT, help="Also draw the difference to this file.")
@_JSON
def diff(model: Any, other: Path, svg: Path | None, as_json: bool) -> None:
    """Print the differences between the graphs of MODEL and OTHER, two .fxq files."""
    others = _graphs(_loaded(other))
    if list(graphs := _graphs(model)) != list(others) or len(graphs) > 1:
        raise InputError("diff compares two models of one graph each; these have several, or different ones.")
    difference = fxq.diff(*(next(iter(of.values())).history[-1] for of in (graphs, others)))
    pictures = [] if svg is None else [str(difference.render(svg))]
    if as_json:
        names = {kind: list(getattr(difference, kind)) for kind in ("removed", "added", "rewired")}
        changed = {change.name: list(change.by_field.values()) for change in difference.changed}
        click.echo(json.dumps({**names, "changed": changed}, indent=2))
    else:
        text = difference.to_text(full=False) if difference else "The graphs are the same."
        click.echo("\n".join([text, *pictures]))


@main.command()
@_model_command
@_JSON
def bench(model: Any, as_json: bool) -> None:
    """Time every layer of MODEL, a .fxq file or a folder, on random inputs of the recorded shapes."""
    profiles = {name: graph.profile() for name, graph in _graphs(model).items()}
    if as_json:
        data = {name: json.loads(profile.to_json()) for name, profile in profiles.items()}
        click.echo(json.dumps(data.get("", data), indent=2))
        return
    for name, profile in profiles.items():
        click.echo(f"{name}:\n{profile}" if name else profile)


@main.command()
@_model_command
@click.argument("page", type=_OUT)
def report(model: Any, page: Path) -> None:
    """Write a report of MODEL, a .fxq file or a folder, to PAGE, one HTML file; one for each program of a decoder."""
    _echo_paths(model.report(page))


@main.command()
@_model_command
@click.argument("path", type=_OUT)
@click.option("--fixed", is_flag=True, help="Fix the batch size to that of the example.")
@click.option("--target", help='"tensorrt": an .onnx file for TensorRT, of a model quantized with that backend.')
def export(model: Any, path: Path, fixed: bool, target: str | None) -> None:
    """Export MODEL, a .fxq file or a folder, to PATH: .onnx, .xml (OpenVINO) or .pt2 (torch.export)."""
    if not hasattr(model, "export"):
        raise InputError("a model in parts runs Python code around them, which no exported file can hold.")
    _echo_paths(model.export(path, dynamic=not fixed, target=target))


def _echo_paths(written: Any) -> None:
    """Print the path of a file, or of those of several programs."""
    for path in written.values() if isinstance(written, dict) else [written]:
        click.echo(path)


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


def _print_model(model: Any, as_json: bool) -> None:
    """Print facts and the ledger of a model, for each of its programs."""
    from fxq.results import QuantizedPrograms

    of_programs = model.programs if isinstance(model, QuantizedPrograms) else {"": model}
    if as_json:
        data = {name: _facts(graph) for name, graph in of_programs.items()}
        click.echo(json.dumps(data.get("", data), indent=2, allow_nan=False))
        return
    for name, graph in of_programs.items():
        facts = {**_facts(graph), "output_sqnr": graph.output_sqnr}
        facts.pop("layers")
        values = {fact: f"{v:.4g}" if isinstance(v, float) else v for fact, v in facts.items()}
        lines = [f"{fact}: {value}" for fact, value in values.items()]
        click.echo("\n".join([*([f"program {name}"] if name else []), *lines, str(graph.ledger)]))


def _facts(graph: Any) -> dict[str, Any]:
    """Facts about a quantized model, with its ledger, as data that JSON can hold."""
    from fxq.common.metrics import nbytes

    layers = json.loads(graph.ledger.to_json())
    return {
        "backend": graph.backend,
        "preset": graph.recipe.preset,
        "bytes": nbytes(graph),
        "int8_macs": graph.ledger.coverage,
        "output_sqnr": layers["output_sqnr"],
        "layers": layers,
    }
