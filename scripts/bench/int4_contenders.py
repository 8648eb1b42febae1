"""Contenders of `scripts.bench.int4`: 4-bit weights as NNCF, HQQ, AutoRound and GPTQModel round them by default."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scripts.networks.int4_subjects import Subject

BLOCK = 64
"""Values of a block of weights that share a scale and a zero point."""


@dataclass(frozen=True)
class Contender:
    """Model that one tool has made, called like the float model.

    Attributes:
        call: takes sequences, int64 (rows, length), and returns what the float model returns.
        bits: mean bits per value of its weights in integers, with scales and zero points; by their formats, but for
            NNCF, whose model is read.
    """

    call: Callable[[Tensor], Any]
    bits: float

    def __call__(self, rows: Tensor) -> Any:
        return self.call(rows)


def in_nncf(**options: Any) -> Callable[[Subject], Contender]:
    """NNCF's default for 4 bits, asymmetric, in its OpenVINO backend, computed in float32.

    Args:
        options: options of `nncf.compress_weights` that read data; without any, there is none.
    """

    def quantized(subject: Subject) -> Contender:
        import nncf
        import openvino

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = subject.model

            def forward(self, rows: Tensor) -> Any:
                if not subject.is_transformers_model:
                    return self.model(rows)
                return self.model(rows, attention_mask=torch.ones_like(rows), use_cache=False).logits

        converted = openvino.convert_model(Logits().eval(), example_input=subject.calibration[:2])
        dataset = nncf.Dataset([row[None].numpy() for row in subject.calibration]) if options else None
        model = nncf.compress_weights(
            converted, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=BLOCK, dataset=dataset, **options
        )
        in_float32 = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        compiled = openvino.compile_model(model, "CPU", in_float32)
        return Contender(
            lambda rows: SimpleNamespace(logits=torch.from_numpy(compiled(rows.numpy())[0])), bits_in_openvino(model)
        )

    return quantized


def bits_in_openvino(model: Any) -> float:
    """Mean bits per value of the integer weights of a model of OpenVINO, with their scales and zero points."""

    def constants(node: Any) -> Iterator[Any]:
        if node.get_type_name() == "Constant":
            yield node
        elif node.get_type_name() in ("Convert", "Subtract", "Multiply", "Reshape"):
            for value in node.input_values():
                yield from constants(value.get_node())

    bits, values = 0, 0
    for scaling in (op for op in model.get_ops() if op.get_type_name() == "Multiply"):
        parts = [(part.get_element_type(), math.prod(part.get_output_shape(0))) for part in constants(scaling)]
        if any(kind.get_type_name() in ("u4", "i4", "u8", "i8") for kind, _ in parts):
            bits += sum(kind.bitwidth * size for kind, size in parts)
            values += max(size for _, size in parts)
    return bits / values


def in_hqq(all_layers: bool = False) -> Callable[[Subject], Contender]:
    """HQQ, which reads no data and fits the zero point of each block; scales and zero points are float16.

    As its integration into transformers does, it leaves embeddings and a head called `lm_head` in float, and recurrent
    layers, which it does not know.

    Args:
        all_layers: whether embeddings and the head are rounded, too.
    """

    def quantized(subject: Subject) -> Contender:
        from hqq.core.quantize import Quantizer

        model, rounded_weights = copy.deepcopy(subject.model), set()
        for name, layer in model.named_modules():
            weight, is_left = getattr(layer, "weight", None), isinstance(layer, nn.Embedding) or name == "lm_head"
            if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or (is_left and not all_layers):
                continue
            if id(weight) in rounded_weights:  # the head that shares the table of the embedding
                continue
            rounded_weights.add(id(weight))
            is_transposed = type(layer).__name__ == "Conv1D"  # of transformers
            rows = weight.detach().T.contiguous() if is_transposed else weight.detach()
            packed, facts = Quantizer.quantize(
                rows, nbits=4, group_size=BLOCK, axis=1, device="cpu", compute_dtype=torch.float16
            )
            rounded = Quantizer.dequantize(packed, facts).float()
            weight.data.copy_(rounded.T if is_transposed else rounded)
        return Contender(model, 4 + 2 * 16 / BLOCK)

    return quantized


def in_auto_round(**options: Any) -> Callable[[Subject], Contender]:
    """AutoRound, which trains how weights are rounded, block by block; it leaves embeddings and the head in float.

    Args:
        options: options of AutoRound that are not its defaults.
    """

    def quantized(subject: Subject) -> Contender:
        from auto_round import AutoRound

        rows = subject.calibration
        rounding = AutoRound(
            copy.deepcopy(subject.model),
            tokenizer=object(),  # it asks for one, which only texts would need
            scheme="W4A16",
            bits=4,
            group_size=BLOCK,
            sym=False,
            dataset=[row[None] for row in rows],
            nsamples=len(rows),
            seqlen=rows.shape[1],
            device_map="cpu",
            enable_torch_compile=False,
            **options,
        )
        model, _ = rounding.quantize()
        return Contender(model.float(), 4 + (16 + 4) / BLOCK)

    return quantized


def in_gptqmodel(subject: Subject) -> Contender:
    """GPTQModel, which rounds column by column; its kernel for CPUs computes in bfloat16.

    It leaves embeddings and the head in float, and takes language models of transformers alone, from a folder.
    """
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it needs two threads, also on two cores
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    with tempfile.TemporaryDirectory() as float_folder, tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(float_folder)
        config = QuantizeConfig(bits=4, group_size=BLOCK)
        rounding = GPTQModel.load(float_folder, config, device="cpu", dtype=torch.float32)
        rows = subject.calibration
        rounding.quantize([{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows])
        rounding.save(folder)
        model = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.bfloat16)
    return Contender(model.model, 4 + (16 + 4) / BLOCK)


CONTENDERS: dict[str, Callable[[Subject], Contender]] = {
    "NNCF int4": in_nncf(),
    "NNCF int4, scale estimation": in_nncf(scale_estimation=True),
    "HQQ int4": in_hqq(),
    "HQQ int4, all": in_hqq(all_layers=True),
    "AutoRound int4, data": in_auto_round(),
    "AutoRound int4, 20 steps, data": in_auto_round(iters=20),
    "GPTQModel int4, data": in_gptqmodel,
}
"""Functions that quantize a subject, by name. Packages that are not installed raise ImportError."""
