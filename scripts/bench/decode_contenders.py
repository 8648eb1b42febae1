"""Contenders of `scripts.bench.decode`: decoders of several tools, and stacks of linear layers of several engines."""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxq
from scripts.networks.language import SMOLLM2

MISSING = "not installed"


@dataclass(frozen=True)
class Decoder:
    """Decoder that one tool has made.

    Attributes:
        prefill: reads tokens, int64 (1, length), into a new cache, and returns it.
        decode: reads one more token, int64 (1, 1), and returns the cache.
        model: for the perplexity; None where its logits are not accessible.
    """

    prefill: Callable[[Tensor], Any]
    decode: Callable[[Tensor, Any], Any]
    model: Any = None


def of_transformers(model: Any) -> Decoder:
    """Decoder of a model with the call of transformers."""

    def call(ids: Tensor, cache: Any = None) -> Any:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    return Decoder(call, call, model)


def decoders(model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Makers of decoders by name. A maker returns a `Decoder`, or the reason why there is none."""
    yield "float32 eager", lambda: of_transformers(model)
    yield "bfloat16 eager", lambda: of_transformers(copy.deepcopy(model).to(torch.bfloat16))
    recipes = {
        "fxq int8 weights": fxq.Recipe.weight_only(),
        "fxq int8 weights, int8 cache": fxq.Recipe.weight_only(state=fxq.TensorSpec(per="row", range="dynamic")),
        "fxq int4 weights": fxq.Recipe.weight_only(bits=4),
        "fxq dynamic int8": fxq.Recipe.dynamic(),
        "fxq dynamic int4": fxq.Recipe.dynamic(weight=fxq.Recipe.weight_only(bits=4).config.weight),
    }
    for name, recipe in recipes.items():
        yield name, lambda recipe=recipe: of_transformers(_quantized(model, recipe))  # type: ignore[misc]
    for bits in (8, 4):
        name = f"ONNX Runtime, fxq's int{bits} file"
        yield name, lambda bits=bits: _onnxruntime_file(model, bits) if _has("onnxruntime") else MISSING  # type: ignore[misc]
        name = f"OpenVINO, fxq's int{bits} file"
        yield name, lambda bits=bits: _openvino_file(model, bits) if _has("openvino") else MISSING  # type: ignore[misc]
    yield "torch.ao dynamic", lambda: of_transformers(_torch_ao(model))
    yield "torchao int8 weights", lambda: of_transformers(_torchao(model)) if _has("torchao") else MISSING


def random_llama() -> Any:
    """Llama of 1.1 B parameters (22 layers of 2048) with random weights in float32, 4.4 GB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _quantized(model: Any, recipe: fxq.Recipe) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        return fxq.quantize(model, recipe)


def _exported(model: Any, bits: int, path: str, **options: Any) -> None:
    """Write the decoder with integer weights, and a cache that grows."""
    qmodel = _quantized(model, fxq.Recipe.weight_only(bits=bits))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        qmodel.programs.programs["decoder"].export(path, dynamic=qmodel.dynamic_axes(), check=False, **options)


def _of_file(names: Sequence[str], heads: int, size: int, run: Callable[[dict[str, Any]], dict[str, Any]]) -> Decoder:
    """Decoder of a function of the inputs of an exported program; `names` are those of its cache."""

    def call(ids: Tensor, cache: Any = None) -> Any:
        cache = cache or {name: np.zeros((1, heads, 0, size), np.float32) for name in names}
        past, length = next(iter(cache.values())).shape[2], ids.shape[1]
        inputs = {
            "input_ids": ids.numpy(),
            "attention_mask": np.ones((1, past + length), np.int64),
            "position_ids": np.arange(past, past + length)[None],
        }
        results = run(inputs | cache)
        return {name: results[f"new_{name}"] for name in names}

    return Decoder(call, call)


def _cache_of(model: Any) -> tuple[list[str], int, int]:
    """Names of the cache's inputs, number of heads, and size of a head."""
    config = model.config
    layers = range(config.num_hidden_layers)
    names = [f"cache_layers_{i}_{part}" for i in layers for part in ("keys", "values")]
    return names, config.num_key_value_heads, config.hidden_size // config.num_attention_heads


def _onnxruntime_file(model: Any, bits: int) -> Decoder:
    """ONNX Runtime with nodes MatMulNBits."""
    from scripts.bench.rivals import onnx_session

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "decoder.onnx")
        _exported(model, bits, str(path), format="matmulnbits")
        session = onnx_session(path.read_bytes())
    outputs = [value.name for value in session.get_outputs()]
    return _of_file(*_cache_of(model), lambda inputs: dict(zip(outputs, session.run(None, inputs), strict=True)))


def _openvino_file(model: Any, bits: int) -> Decoder:
    """OpenVINO with compressed weights, in float32."""
    import openvino as ov

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "decoder.xml")
        _exported(model, bits, str(path))
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }
        request = ov.Core().compile_model(str(path), "CPU", settings).create_infer_request()

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        return {output.any_name: value for output, value in request.infer(inputs).items()}

    return _of_file(*_cache_of(model), run)


def _torch_ao(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        from torch.ao.quantization import quantize_dynamic

        return quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


def _torchao(model: Any) -> Any:
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8WeightOnlyConfig())
    return quantized


def llama_cpp(
    prompt: str, tokens: int, file: Path | None = None, clock: Callable[[], float] = time.process_time
) -> dict[str, float] | str:
    """Tokens per second of llama.cpp on the package's Q4_1 file: "prefill" and "decode"; or why not.

    Args:
        prompt: text of the prompt.
        tokens: number of tokens to decode.
        file: the GGUF file; None: that of the package.
        clock: what is read before and after a request.
    """
    if not _has("xllamacpp"):
        return MISSING
    import xllamacpp

    if file is None:
        spec = importlib.util.find_spec(SMOLLM2)
        if spec is None or not spec.submodule_search_locations:
            return MISSING
        file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(file), 1024, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(params)

    def seconds(count: int) -> tuple[float, Any]:
        request = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        begin = clock()
        result = server.handle_completions(request)
        return clock() - begin, result

    seconds(1)
    first, result = seconds(1)
    more, _ = seconds(1 + tokens)
    timings = result.get("timings", {}) if isinstance(result, dict) else {}
    read = timings.get("prompt_n", len(prompt) // 4)
    return {"prefill": read / first, "decode": tokens / (more - first)}


def stacks(weights: Sequence[Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Makers of stacks of linear layers by name. A maker returns a function of float32 (rows, K), or a reason."""
    for level in (0, 4):
        name = f"ONNX Runtime MatMulNBits int4, level {level}"
        yield name, lambda level=level: _onnxruntime(weights, level) if _has("onnxruntime") else MISSING  # type: ignore[misc]
    for kind in ("int8", "int4"):
        yield f"OpenVINO + NNCF {kind} weights", lambda kind=kind: _openvino(weights, kind)  # type: ignore[misc]


def _onnxruntime(weights: Sequence[Tensor], level: int) -> Callable[[Tensor], Any]:
    """One session for each layer with weights rounded to 4 bits in groups of 32."""
    import onnx
    from onnx import helper

    from scripts.bench.rivals import onnx_session

    calls = []
    for weight in weights:
        outputs, columns = weight.shape
        groups = weight.reshape(outputs, columns // 32, 32)
        scale = groups.abs().amax(-1) / 7
        q = (torch.round(groups / scale[..., None]).clamp(-8, 7) + 8).to(torch.uint8)
        packed = q[..., 0::2] | (q[..., 1::2] << 4)
        constants = [
            onnx.numpy_helper.from_array(packed.numpy(), "w"),
            onnx.numpy_helper.from_array(scale.numpy().reshape(-1), "s"),
        ]
        node = helper.make_node(
            "MatMulNBits", ["input0", "w", "s"], ["y"], domain="com.microsoft", K=columns, N=outputs, bits=4,
            block_size=32, accuracy_level=level,
        )  # fmt: skip
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node], "g", [value("input0", 1, ["n", columns])], [value("y", 1, ["n", outputs])], constants
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        session = onnx_session(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
        calls.append(session)
    return lambda x: [session.run(None, {"input0": x.numpy()}) for session in calls]


def _openvino(weights: Sequence[Tensor], kind: str) -> Any:
    """One compiled model for each layer, weights compressed by NNCF."""
    if not (_has("openvino") and _has("nncf")):
        return MISSING
    import nncf
    import openvino as ov
    from openvino import opset13 as ops

    mode = nncf.CompressWeightsMode.INT8_SYM if kind == "int8" else nncf.CompressWeightsMode.INT4_SYM
    options = {} if kind == "int8" else {"group_size": 32, "ratio": 1.0, "all_layers": True}
    requests = []
    for weight in weights:
        x = ops.parameter([-1, weight.shape[1]], ov.Type.f32)
        y = ops.matmul(x, ops.constant(weight.numpy()), False, True)
        compressed = nncf.compress_weights(ov.Model([y], [x]), mode=mode, **options)
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
        requests.append(ov.Core().compile_model(compressed, "CPU", settings).create_infer_request())
    return lambda x: [request.infer([x.numpy()]) for request in requests]
