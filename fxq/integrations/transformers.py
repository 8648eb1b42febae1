"""Quantization of models of transformers that generate: their calls are known, so no examples are needed."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from fxq.common.data import Batch, as_batch
from fxq.common.ranks import Ranks
from fxq.errors import InputError
from fxq.integrations.transformers_calls import CallRules, cache_name, count_positions, in_32_bits
from fxq.integrations.transformers_models import (
    QuantizedEncoder,
    QuantizedGenerator,
    make_quantized,
    without_tensors,
)
from fxq.integrations.transformers_tracing import graph_form
from fxq.ledger.float_states import warn_without_states
from fxq.quant.spec import WEIGHT, QuantConfig, is_low_bit
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import Selector, as_selector, by_op
from fxq.tracing.part_shell import PartShell
from fxq.workflow.programs import check_program_overrides, quantize_programs

_PROMPT, _PAST, _BATCH, _ENCODED = 3, 5, 2, 7
"""Sizes of the calls that a model is traced with: new tokens, past tokens, sequences, tokens of the encoder."""

LINEAR_BLOCK_SIZE = 128
"""Number of values of a row of a linear layer's weight that share a scale, in models that generate.

Rows of these models have outliers, which make the scale of a whole row coarse, and the errors of all layers add up. The
scales add 1/32 to the size of the integers.
"""


def generates(model: nn.Module) -> bool:
    """Whether a model is a decoder or encoder-decoder of transformers that generates with a cache."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate") or not model.can_generate():
        return False
    return cache_name(model) != ""


def quantize_generator(
    model: PreTrainedModel,
    recipe: Recipe,
    data: Iterable[Any] | None,
    examples: Mapping[str, Batch],
    *,
    progress: bool | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """Quantize a decoder or encoder-decoder of transformers, for prompts and for single tokens with a cache.

    Args:
        model: the float model. Weights of 16 bits are converted to float32 first.
        recipe: the recipe.
        data: calibration batches, with the arguments of forward.
        examples: calls besides those with tokens, such as one with an image, by the name of their program.
        progress: whether to show a progress bar.
        ranks: processes that calibrate together, each with its share of the data; None: this one alone.

    Returns:
        A model of a subclass of the float model's class: `generate` and pipelines work.
    """
    model = _in_32_bits(model)

    def programs_of(module: nn.Module, calls: Mapping[str, Batch], batches: Iterator[Any] | None) -> Any:
        options: dict[str, Any] = {"around": graph_form, "progress": progress, "selecting": selecting, "ranks": ranks}
        return quantize_programs(module, recipe, calls, batches, **options)

    selecting: set[int] = set()
    recipe = finer_recipe(model, recipe)
    shell = without_tensors(model)
    # the encoder's run reads no further than it needs, and the decoder's reads the same batches again
    for_encoder, for_decoder = itertools.tee(as_batch(batch, model) for batch in (() if data is None else data))
    if model.config.is_encoder_decoder:
        encoder: Any = model.get_encoder()
        quantized = make_quantized(shell.get_encoder(), QuantizedEncoder)
        calls = {"encoder": Batch((), quantized.arguments((), _encoder_example(model)))}
        batches = (quantized.arguments((), _encoder_inputs(encoder, batch)) for batch in for_encoder)
        path = next(path for path, module in model.named_modules() if module is encoder)
        quantized.programs = programs_of(PartShell(path, encoder), calls, None if data is None else batches)
    del for_encoder  # whose position would keep all batches
    step, first = _examples(model)
    rules = _rules_of(model, step)
    make_quantized(shell, QuantizedGenerator, rules=rules)
    calls = {"decoder": step} | ({"first": first} if first is not None else {})
    for name, example in examples.items():
        _install_recorders(model, example)
        calls[name] = Batch((), shell.arguments(example.args, example.kwargs)[0])
    batches = (shell.arguments(batch.args, batch.kwargs)[0] for batch in for_decoder)
    shell.programs = programs_of(model, calls, None if data is None else batches)
    (ranks or Ranks()).together(lambda: check_program_overrides(model, recipe, selecting))
    warn_without_states(recipe, (entry for program in shell.programs.programs.values() for entry in program.ledger))
    return shell.eval()


def encodes(model: nn.Module) -> bool:
    """Whether a model is one of transformers that does not generate."""
    return isinstance(model, PreTrainedModel) and not generates(model)


def has_example(model: PreTrainedModel) -> bool:
    """Whether fxq has an example call of a model that does not generate: the model takes tokens or images."""
    return bool(_call_of(model))


def quantize_encoder(
    model: PreTrainedModel,
    recipe: Recipe,
    data: Iterable[Any] | None = None,
    examples: Mapping[str, Any] | None = None,
    *,
    progress: bool | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """Quantize a model of transformers that does not generate, such as BERT or ViT, to a model of its class.

    `fxq.quantize` calls it for such a model if there is neither data nor an example. Calls of the result may leave out
    masks and pass options that change nothing, so that pipelines work.

    Args:
        model: the float model. Weights of 16 bits are converted to float32 first.
        recipe: the recipe.
        data: calibration batches, with the arguments of forward.
        examples: calls by the name of their program. Default: a call with tokens or images.
        progress: whether to show a progress bar.
        ranks: processes that calibrate together, each with its share of the data; None: this one alone.

    Returns:
        A model of a subclass of the float model's class. Its `programs` have ledger, history and graph.

    Raises:
        InputError: there is no example, and the model takes neither tokens nor images; or the recipe needs data.
    """
    model = _in_32_bits(model)
    calls = {name: as_batch(example, model, name) for name, example in (examples or {}).items()}
    if not calls and not has_example(model):
        raise InputError(
            f"{type(model).__name__} takes {model.main_input_name}, of which fxq has no example. Pass one: "
            "fxq.quantize(model, recipe, example_inputs={...})."
        )
    quantized = make_quantized(without_tensors(model), QuantizedEncoder)

    def completed(batch: Batch) -> Batch:
        return Batch((), quantized.arguments(batch.args, batch.kwargs))

    calls = calls or {"encoder": _taken(model, _call_of(model))}
    for call in calls.values():
        _install_recorders(model, call)
    quantized.programs = quantize_programs(
        model,
        recipe,
        {name: completed(call) for name, call in calls.items()},
        None if data is None else (completed(as_batch(batch, model)) for batch in data),
        around=graph_form,
        progress=progress,
        ranks=ranks,
    )
    return quantized.eval()


def _call_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Arguments of an example call with tokens or images; empty if the model takes neither."""
    if model.main_input_name == "input_ids" and hasattr(model.config, "vocab_size"):
        mask = torch.ones(_BATCH, _ENCODED, dtype=torch.long)
        mask[0, -1] = 0
        return {"input_ids": _tokens(model, _ENCODED), "attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
    size, channels = (getattr(model.config, name, None) for name in ("image_size", "num_channels"))
    if model.main_input_name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        values = torch.linspace(-1, 1, _BATCH * channels * size * size)
        return {"pixel_values": values.sin().reshape(_BATCH, channels, size, size)}
    return {}


def example_call(model: Any) -> dict[str, Any]:
    """Arguments of a call of a model, quantized or not, without a cache."""
    call = dict(_taken(model, _call_of(model) or _encoder_example(model)).kwargs)
    if model.config.is_encoder_decoder:
        call["decoder_input_ids"] = _tokens(model, _PROMPT)
    return call


def _in_32_bits(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, or a copy with float32 weights if some weights have 16 bits."""
    if all(p.dtype is torch.float32 for p in model.parameters() if p.is_floating_point()):
        return model
    return copy.deepcopy(model).float()


def _install_recorders(model: PreTrainedModel, call: Batch) -> None:
    """Run a call of the float model, at whose first call transformers installs what it records inner values with."""
    with torch.no_grad():
        model(*map(in_32_bits, call.args), **{name: in_32_bits(value) for name, value in call.kwargs.items()})


def finer_recipe(model: PreTrainedModel, recipe: Recipe) -> Recipe:
    """Recipe for a model that generates: it has finer grids, and with dynamic ranges all linear layers on integers.

    For the grids see `_with_finer_grids`. A token reads all weights from memory, of which integers are a quarter or an
    eighth. Prices would not say so: they are those of the rows of the example, with weights in the CPU's cache.
    """
    if recipe.preset == "dynamic" and recipe.optimize == "speed":
        recipe = recipe.with_optimize("coverage")
    return _with_finer_grids(recipe, _head_path(model))


def _head_path(model: PreTrainedModel) -> str:
    """Path of the module that computes the logits; empty if there is none."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), "")


def _with_finer_grids(recipe: Recipe, head: str = "") -> Recipe:
    """Recipe whose first overrides give linear layers scales per block, and the head of a language model finer ones.

    With scales per block, an outlier makes only its block coarser, not the whole row. Rounding errors of the head go
    straight into the logits, so the head has the grid of an embedding, with 8 bits if the recipe's weights have 4 or
    fewer. The user's overrides have precedence.

    Args:
        recipe: the recipe.
        head: path of the head; empty if there is none.
    """
    config, overrides = recipe.config, list[tuple[Selector, QuantConfig]]()
    if config.weight is None:
        return recipe
    if config.activation is None and config.weight.for_embedding != config.weight:
        overrides.append((by_op("linear"), replace(config, weight=replace(config.weight, per=LINEAR_BLOCK_SIZE))))
    if head and (overrides or is_low_bit(config.weight)):
        weight = WEIGHT if is_low_bit(config.weight) else config.weight
        overrides.append((as_selector(head), replace(config, weight=weight.for_embedding)))
    return replace(recipe, overrides=(*overrides, *recipe.overrides))


def _encoder_inputs(encoder: nn.Module, batch: Batch) -> dict[str, Any]:
    """Arguments of a call of the whole model that its encoder takes, too."""
    names = inspect.signature(encoder.forward).parameters
    return {name: value for name, value in batch.kwargs.items() if name in names}


def _tokens(model: PreTrainedModel, length: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return (torch.arange(_BATCH * length) * 37 % vocabulary).reshape(_BATCH, length)


def _encoder_example(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Example inputs of the encoder: tokens, audio features as Whisper takes them, or images.

    Raises:
        InputError: the model takes other inputs.
    """
    if model.main_input_name == "input_ids":
        return {"input_ids": _tokens(model, _ENCODED)}
    config: Any = model.config
    if not hasattr(config, "max_source_positions"):
        call = _call_of(model.get_encoder())
        if not call:
            raise InputError(
                f"{type(model).__name__} takes {model.main_input_name}, for which fxq has no example inputs. Quantize "
                "its encoder alone, with example_inputs, and keep the decoder in float."
            )
        return call
    frames = config.max_source_positions * 2  # the encoder halves their number
    values = torch.linspace(-1, 1, _BATCH * config.num_mel_bins * frames).sin()
    call = {model.main_input_name: values.reshape(_BATCH, config.num_mel_bins, frames)}
    if "attention_mask" in inspect.signature(model.get_encoder().forward).parameters:  # pipelines pass one
        call["attention_mask"] = torch.ones(_BATCH, frames, dtype=torch.long)
    return call


def _examples(model: PreTrainedModel) -> tuple[Batch, Batch | None]:
    """Example call with past and new tokens; for an encoder-decoder, also one with an empty cross-attention cache."""
    tokens, name = _tokens(model, _PAST + _PROMPT), cache_name(model)
    config = model.config.get_text_config(decoder=True)
    own = DynamicCache(config=config)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0  # one token of padding
    if not model.config.is_encoder_decoder:
        with torch.no_grad():
            model(tokens[:, :_PAST], **{name: own, "use_cache": True})
        call = {"input_ids": tokens[:, _PAST:], "attention_mask": mask, name: own, "logits_to_keep": 0}
        call["position_ids"] = torch.arange(_PAST, _PAST + _PROMPT).expand(_BATCH, -1)
        return _taken(model, call), None
    with torch.no_grad():
        hidden = model.get_encoder()(**_encoder_example(model))[0]
    cache = EncoderDecoderCache(own, DynamicCache(config=config))
    encoded: dict[str, Any] = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden)}
    encoded["attention_mask"] = torch.ones(hidden.shape[:2], dtype=torch.long)
    encoded["attention_mask"][0, -1] = 0
    with torch.no_grad():
        model(**_taken(model, {**encoded, "decoder_input_ids": tokens[:, :_PAST], name: cache}).kwargs, use_cache=True)
    call = {**encoded, "decoder_input_ids": tokens[:, _PAST:], "decoder_attention_mask": mask, name: cache}
    call["decoder_position_ids"] = torch.arange(_PAST, _PAST + _PROMPT).expand(_BATCH, -1)
    past = copy.deepcopy(cache.self_attention_cache)
    unfilled = EncoderDecoderCache(past, DynamicCache(config=config))
    return _taken(model, call), _taken(model, {**call, name: unfilled})


def _taken(model: PreTrainedModel, call: Mapping[str, Any]) -> Batch:
    """Batch with those arguments of a call that the forward of a model takes."""
    parameters = inspect.signature(model.forward).parameters
    return Batch((), {name: value for name, value in call.items() if name in parameters})


def _rules_of(model: PreTrainedModel, example: Batch) -> CallRules:
    name, prefix = cache_name(model), "decoder_" if model.config.is_encoder_decoder else ""
    cache = example.kwargs[name]
    layers = (cache.self_attention_cache if prefix else cache).layers
    foreign_layer = next((layer for layer in layers if not isinstance(getattr(layer, "keys", None), Tensor)), None)
    if foreign_layer is not None:
        raise InputError(
            f"the cache of {type(model).__name__} has layers of type {type(foreign_layer).__name__}, whose states are "
            "not keys and values. Quantize its linear layers as parts: fxq.quantize(model, fxq.Recipe.weight_only()"
            '.parts("**.*_proj"), example_inputs={"input_ids": ids}).'
        )
    sizes = tuple(
        ((layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3])) for layer in layers
    )
    positions: Literal["", "count", "mask"] = ""
    if f"{prefix}position_ids" in example.kwargs:
        positions = "count" if prefix or _counts_tokens(model) else "mask"
    return CallRules(
        name,
        sizes,
        positions,
        keeps_logits="logits_to_keep" in example.kwargs,
        takes_mask=f"{prefix}attention_mask" in example.kwargs,
        prefix=prefix,
    )


def _counts_tokens(model: PreTrainedModel) -> bool:
    """Whether a decoder that gets no position_ids counts padding tokens, too, instead of following the mask."""
    tokens = _tokens(model, _PROMPT)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with torch.no_grad():
        own = model(tokens, attention_mask=mask, use_cache=False).logits
        positions = count_positions(mask, 0, _PROMPT).expand(_BATCH, -1)
        counted = model(tokens, attention_mask=mask, use_cache=False, position_ids=positions).logits
    return torch.allclose(own[:, 1:], counted[:, 1:], atol=1e-4, rtol=1e-4)
