"""Checkpoints of other tools as quantized models of transformers: their own integers, on fxq's kernels."""

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fxq
from fxq.checkpoints.gguf_files import GgufFile, in_names_of_transformers
from fxq.checkpoints.open_checkpoint import open_checkpoint
from fxq.common.metrics import sqnr
from fxq.errors import FileError, InputError
from tests.integrations.test_transformers_checkpoints import IDS, llama, logits
from tests.support.gguf_writer import decoded, random_blocks, write_gguf
from tests.support.onnx_runs import same

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_an_exported_checkpoint_computes_the_same(format, tmp_path):
    qmodel = fxq.quantize(llama(), fxq.Recipe.weight_only(bits=4, per=32))
    loaded = fxq.load(qmodel.export(tmp_path, format=format))
    same(logits(loaded), logits(qmodel), 2e-6)  # sums in another order
    own, again = (model.programs.qparams()["decoder"]["model.layers.0.mlp.up_proj"] for model in (qmodel, loaded))
    assert torch.equal(own.weight_scale, again.weight_scale)
    assert loaded.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 9)


def gguf_model(path, kinds, positive=False, **more):
    """GGUF file of a small Llama, `more` metadata, and the float model with the same values, decoded one by one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=48, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    block, attention = "model.layers.0", "model.layers.0.self_attn"
    names = {
        "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
        f"{block}.input_layernorm": "blk.0.attn_norm", f"{block}.post_attention_layernorm": "blk.0.ffn_norm",
        **{f"{attention}.{p}_proj": f"blk.0.attn_{p}" for p in "qkv"}, f"{attention}.o_proj": "blk.0.attn_output",
        **{f"{block}.mlp.{p}_proj": f"blk.0.ffn_{p}" for p in ("gate", "up", "down")},
    }  # fmt: skip
    tensors, kinds = {}, iter(kinds)
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            tensors[f"{names[layer]}.weight"] = (0, shape, parameter.detach().numpy().tobytes())
            continue
        kind = next(kinds)
        stored = random_blocks(kind, *shape, seed=len(tensors), positive=positive)
        tensors[f"{names[layer]}.weight"] = (kind, shape, stored.tobytes())
        values = torch.tensor(np.array([decoded(kind, row) for row in stored]), dtype=torch.float32)
        heads = {"q": 4, "k": 2}.get(layer.rpartition(".")[2][0]) if "self_attn" in name else None
        if heads:  # llama.cpp alternates between the rows of the halves of a head
            values = values.reshape(heads, shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        parameter.data = values
    about = {"general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 4}
    about |= {"llama.attention.head_count_kv": 2, **{f"llama.{name}": value for name, value in more.items()}}
    return write_gguf(path, about, tensors), model


def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    path, model = gguf_model(tmp_path / "m.gguf", [8, 2, 3, 12, 14, 2, 12, 3, 14])
    with torch.device("meta"):
        shell = transformers.LlamaForCausalLM(model.config)
    loaded = fxq.load(path, into=shell)
    assert sqnr(logits(model), logits(loaded)) > 100  # rounding in float32
    assert len(loaded.programs.qparams()["decoder"]) == 9
    again = fxq.load(loaded.programs.save(tmp_path / "m.fxq"))
    assert type(again).__name__ == "QuantizedPrograms"


@pytest.mark.parametrize("positive", [False, True], ids=["both signs", "positive"])
@pytest.mark.parametrize("kinds", [(3, 12), (2, 8, 14)], ids=["Q4_1 and Q4_K", "Q4_0, Q8_0 and Q6_K"])
def test_a_saved_gguf_model_has_the_numbers_of_the_file_bit_for_bit(kinds, positive, tmp_path):
    pytest.importorskip("gguf")
    path, model = gguf_model(tmp_path / "m.gguf", itertools.cycle(kinds), positive)
    loaded = fxq.load(path, into=model)
    again = fxq.load(loaded.programs.save(tmp_path / "m.fxq")).programs["decoder"]
    file = in_names_of_transformers(GgufFile(path), list(model.state_dict()))
    entries = [entry for entry in again.ledger if entry.weight_bits]
    assert len(entries) == 9
    for entry in entries:
        stored = again.get_submodule(f"fxq_kernels.{entry.into}").stored_weight()
        assert torch.equal(stored.floats(stored.empty()), file[f"{entry.path}.weight"].floats), entry.path


def test_what_cannot_be_loaded_is_said(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"a": (0, (1,), bytes(4))})
    with pytest.raises(InputError, match=r"pass the model that they belong to, fxq.load\(path, into=model\)"):
        fxq.load(path)
    with pytest.raises(InputError, match="into is a Linear: pass a model of transformers"):
        fxq.load(path, into=torch.nn.Linear(2, 2))
    pytest.importorskip("gguf")
    with pytest.raises(FileError, match="does not say how many layers"):
        fxq.load(path, into=llama())
    path = write_gguf(tmp_path / "b.gguf", {"general.architecture": "gemma"}, {"a": (0, (1,), bytes(4))})
    with pytest.raises(FileError, match="architecture 'gemma'; fxq reads llama"):
        fxq.load(path, into=llama())


def test_a_configuration_that_contradicts_the_file(tmp_path):
    """Other heads, or another norm or rotary embedding, leave all shapes as they are."""
    pytest.importorskip("gguf")
    more = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0}
    path, model = gguf_model(tmp_path / "m.gguf", itertools.repeat(8), **more)
    fxq.load(path, into=model)
    for changes, says in (
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}, "head_count 4, .*num_attention_heads 8"),
        ({"rms_norm_eps": 1e-2}, "layer_norm_rms_epsilon 1e-06, .*rms_norm_eps 0.01"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "freq_base 10000, .*rope_theta 500000"),
        ({"num_hidden_layers": 0}, "block_count 1, .*num_hidden_layers 0"),
    ):
        config = transformers.LlamaConfig(**{**model.config.to_dict(), **changes})
        with pytest.raises(FileError, match=says):
            fxq.load(path, into=transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("config", [
    {}, {"model_type": "none"}, {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}
])  # fmt: skip
def test_a_configuration_that_transformers_refuses(config, tmp_path):
    own = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own}))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"its config.json is refused"):
        fxq.load(tmp_path)


def test_a_method_that_is_no_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": ["gptq"]}}))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="unknown quant_method"):
        open_checkpoint(tmp_path)
    with pytest.raises(fxq.FxqError):
        fxq.load(tmp_path)
