"""Export of quantized models of transformers as checkpoints of compressed-tensors and GPTQ, which others load."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fxq.backends.kernel import Kernel
from fxq.backends.qdq_graph import qdq_graph
from fxq.checkpoints import compressed_tensors_files, gptq_files
from fxq.checkpoints.grid_weight import GridWeight
from fxq.checkpoints.open_checkpoint import open_checkpoint
from fxq.checkpoints.tensor_files import INDEX, SINGLE
from fxq.common.files import as_path, writing
from fxq.common.metrics import sqnr, tensors
from fxq.errors import ExportError, InputError, unknown
from fxq.graph.info import info
from fxq.graph.query import DYNAMIC_GRID_OPS, constant, is_op, reads_only_metadata, submodule
from fxq.graph.region import integer_weight
from fxq.integrations.transformers import example_call
from fxq.integrations.transformers_models import QuantizedEncoder, QuantizedGenerator, float_class_of
from fxq.model import QuantizedModel
from fxq.quant.qparams import dequantize

Written = tuple[dict[str, Tensor], dict[str, Any]]

FORMATS: dict[str, Callable[[Mapping[str, GridWeight]], Written]] = {
    "compressed-tensors": compressed_tensors_files.write,
    "gptq": gptq_files.write,
}
"""Function that gives tensors of linear layers and `quantization_config`, by name of the format."""

_MIN_SQNR = 60.0
"""dB SQNR below which a checkpoint does not compute what the quantized model computes, up to rounding in float32."""


def export_checkpoint(model: Any, path: Any, format: str | None, check: bool) -> Path:
    """Write a quantized model of transformers as a folder that `from_pretrained` and vLLM read.

    Args:
        model: the quantized model.
        path: the folder.
        format: key of `FORMATS`.
        check: whether to read the files back, and compare the outputs with those of the quantized model.

    Raises:
        ExportError: the format cannot hold the model.
        InputError: the format is unknown.
        RenderError: the folder cannot be written.
    """
    folder = as_path(path)
    if format not in FORMATS:
        raise InputError(
            f"{unknown('format', format, FORMATS)} For .onnx, .xml and .pt2 files, call export of its programs: "
            "model.programs.export(path)."
        )
    config, state = copy.deepcopy(model.config), _weights(model)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        float_model = float_class_of(type(model))(config)
    float_config = copy.deepcopy(config)
    layers, floats, ignored = _split(float_model, state, config)
    if format == "gptq" and ignored - _heads(float_model):
        raise ExportError(
            f"{sorted(ignored - _heads(float_model))[0]} is in float, and GPTQ has integers for all linear layers but "
            'the head. Use format="compressed-tensors".'
        )
    if not layers:
        raise ExportError(f"no linear layer of {type(model).__name__} has integer weights: there is nothing to pack.")
    packed, own = FORMATS[format](layers)
    if format == "compressed-tensors":
        own["ignore"] = sorted(ignored)
    config.architectures, config.dtype, config.quantization_config = (
        [float_class_of(type(model)).__name__],
        "float32",
        own,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder), TemporaryDirectory(prefix=".fxq-", dir=folder) as new:
        save_file({**floats, **packed}, Path(new, SINGLE), metadata={"format": "pt"})
        config.save_pretrained(new)
        if hasattr(model, "generation_config") and model.can_generate():
            model.generation_config.save_pretrained(new)
        if check:
            _check(folder, Path(new), model, float_config)
        (folder / INDEX).unlink(missing_ok=True)
        for file in Path(new).iterdir():
            file.replace(folder / file.name)
    return folder


def _heads(model: Any) -> set[str]:
    """Path of the module that computes logits, if there is one."""
    head = model.get_output_embeddings()
    return {path for path, module in model.named_modules() if module is head} if head is not None else set()


def _split(
    model: Any, state: Mapping[str, GridWeight | Tensor], config: Any
) -> tuple[dict[str, GridWeight], dict[str, Tensor], set[str]]:
    """Weights of linear layers in integers; all other tensors of the model, as floats; linear layers in float.

    The head is in float, since loaders expect it, and so are embeddings. A head with weights other than those of the
    embedding, to which it is tied, sets `tie_word_embeddings` of the configuration to False.
    """
    modules, heads = dict(model.named_modules()), _heads(model)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    layers: dict[str, GridWeight] = {}
    floats: dict[str, Tensor] = {}
    ignored: set[str] = set()
    for name, like in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        stored = next((state[plain] for n in _names_of(name, tied) if (plain := _plain(n)) in state), None)
        if stored is None:  # a norm that multiplies by 1 + weight, as Gemma's, has this sum in the graph
            sum_with_one = state.get(f"{_plain(name)}_identity_add")
            stored = sum_with_one - 1 if isinstance(sum_with_one, Tensor) else None
        shape = (
            None if stored is None else tuple(stored.integers.shape if isinstance(stored, GridWeight) else stored.shape)
        )
        is_other = not isinstance(modules[path], (nn.Linear, nn.Embedding)) and like.dim() > 1
        if is_other and (stored is None or isinstance(stored, GridWeight)):
            raise ExportError(
                f"{path} is a {type(modules[path]).__name__}, and the format holds integers only for nn.Linear."
            )
        if stored is None or shape != tuple(like.shape):
            raise ExportError(
                f"the graph does not hold {name!r} {list(like.shape)} of {type(model).__name__}"
                f"{'' if shape is None else f', but {list(shape)}'}: a pass has changed it, or the model "
                "computes with a value derived from it."
            )
        is_linear = isinstance(modules[path], nn.Linear) and leaf == "weight"
        if is_linear and path not in heads and isinstance(stored, GridWeight):
            layers[path] = stored
            continue
        floats[name] = (stored.floats if isinstance(stored, GridWeight) else stored.detach()).contiguous()
        if is_linear:
            ignored.add(path)
    for name, first in tied.items():
        if first in floats and torch.equal(floats[name], floats[first]):
            del floats[name]
        elif name in floats:
            config.tie_word_embeddings = False
    return layers, floats, ignored


def _names_of(name: str, tied: Mapping[str, str]) -> list[str]:
    """Names of a tensor: this one first, then those of the tensors that are tied to it."""
    first = tied.get(name, name)
    return [name, first, *(alias for alias, of in tied.items() if of == first)]


def _plain(name: str) -> str:
    """Name of a tensor as constants of a graph are named."""
    return name.removeprefix("fxq_data.").replace(".", "_")


def _programs(model: Any) -> Iterator[QuantizedModel]:
    for module in model.modules():
        if isinstance(module, (QuantizedEncoder, QuantizedGenerator)):
            yield from module.programs.programs.values()


def _weights(model: Any) -> dict[str, GridWeight | Tensor]:
    """Weights and other constants of the programs of a model, by plain name.

    Raises:
        ExportError: activations are quantized, weights have corrections, or two programs have weights of their own.
    """
    weights: dict[str, GridWeight | Tensor] = {}
    for program in _programs(model):
        gm = qdq_graph(program)
        kernels = {node.name for node in program.graph.nodes if isinstance(submodule(program, node), Kernel)}
        for node in gm.graph.nodes:
            if is_op(node, "quantize", "requantize", *DYNAMIC_GRID_OPS):
                raise ExportError(
                    f"{info(node).path or node.name}: activations or caches are in integers, and the format holds "
                    'weights alone. Quantize with "weight_only".'
                )
            if info(node).corrects:
                raise ExportError(
                    f"{info(node).path}: its weight has a low-rank correction, which the format cannot hold. Quantize "
                    "without the pass low-rank."
                )
            stands_for, stored = info(node).stands_for, integer_weight(gm, node)
            value: GridWeight | Tensor | None = None
            if stands_for and stored is not None:
                grid_weight = GridWeight.of_layer(stored.values, stored.qparams)
                name, value = stands_for, grid_weight or dequantize(stored.values, stored.qparams)
            elif node.op == "get_attr" and not (node.users and all(map(reads_only_metadata, node.users))):
                first, _, inside = str(node.target).partition(".")  # `qdq_graph` adds the name of the kernel
                name, value = inside if first in kernels else str(node.target), constant(gm, node)
            if value is None:
                continue
            earlier = weights.setdefault(_plain(name), value)
            if earlier is not value and not _is_equal(earlier, value):
                raise ExportError(
                    f"{name} has other values, or other integers, in another program of the model. If it was quantized "
                    "with data, quantize it without."
                )
    return weights


def _is_equal(a: GridWeight | Tensor, b: GridWeight | Tensor) -> bool:
    if isinstance(a, GridWeight) and isinstance(b, GridWeight):
        return a.grid.same_as(b.grid) and torch.equal(a.integers, b.integers)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def _check(path: Path, folder: Path, model: Any, config: Any) -> None:
    """Raise `ExportError` if a float model with the weights of a folder computes other outputs than a model."""
    config.tie_word_embeddings = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    read = open_checkpoint(folder)
    state = {name: weight.floats if isinstance(weight, GridWeight) else weight for name, weight in read.items()}
    float_class: Any = float_class_of(type(model))
    again = float_class.from_pretrained(None, config=config, state_dict=state).eval()
    call = example_call(model)
    if "attention_mask" in call:  # outputs of padding mean nothing, and differ
        call["attention_mask"] = torch.ones_like(call["attention_mask"])
    if model.can_generate():
        call["use_cache"] = False
    with torch.no_grad():
        wanted, got = (next(iter(tensors(m(**copy.deepcopy(call))[0]))) for m in (model, again))
    db = sqnr(wanted, got)
    if db < _MIN_SQNR:
        raise ExportError(
            f"{path}: the checkpoint computes something else than the quantized model, and nothing was written: "
            f"{db:.1f} dB SQNR. A pass may have changed a weight that the format does not hold. check=False skips this."
        )
