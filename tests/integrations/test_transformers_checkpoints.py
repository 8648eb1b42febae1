"""Quantized models of transformers as checkpoints of compressed-tensors and GPTQ, loaded by other code than fxq's."""

import json

import pytest
import torch
from safetensors.torch import load_file

import fxq
from fxq.errors import ExportError, InputError
from tests.support.onnx_runs import same

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
SYMMETRIC = fxq.TensorSpec(bits=4, per=32, signed=True, symmetric=True, observer="mse")


def llama(tied=True):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def affine():
    return fxq.quantize(llama(), fxq.Recipe.weight_only(bits=4, per=32))


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def from_gptq(folder):
    """Float model with the weights of a GPTQ checkpoint of 4 bits, decoded value by value as AutoGPTQ defines it."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    shift = {"gptq": 1, "gptq_v2": 0}[config["checkpoint_format"]]
    state = {name: t for name, t in tensors.items() if name.rpartition(".")[2] in ("weight", "bias")}
    for layer in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        qweight, qzeros, scales, group = (tensors[f"{layer}.{p}"] for p in ("qweight", "qzeros", "scales", "g_idx"))
        inputs, outputs = torch.arange(8 * len(qweight))[:, None], torch.arange(qweight.shape[1])[None]
        q = (qweight.long()[inputs // 8, outputs] >> (4 * (inputs % 8))) & 15
        zero = ((qzeros.long()[group.long()[:, None], outputs // 8] >> (4 * (outputs % 8))) & 15) + shift
        state[f"{layer}.weight"] = ((q - zero) * scales[group.long()]).t().contiguous()
    model = llama()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model.eval()


def test_gptq(affine, tmp_path):
    folder = affine.export(tmp_path / "new" / "m", format="gptq")
    same(logits(from_gptq(folder)), logits(affine), 2e-6)  # sums in another order
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("weight", [None, SYMMETRIC], ids=["affine", "symmetric"])
def test_compressed_tensors(weight, affine, tmp_path):
    pytest.importorskip("compressed_tensors")
    qmodel = affine if weight is None else fxq.quantize(llama(False), fxq.Recipe.weight_only(weight=weight))
    folder = qmodel.export(tmp_path, format="compressed-tensors")
    # without dequantize, transformers allocates unpacked zero points for affine weights
    config = transformers.CompressedTensorsConfig(dequantize=weight is None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    same(logits(loaded.eval()), logits(qmodel), 2e-6)  # sums in another order


@pytest.mark.slow
def test_layers_with_grids_of_their_own(tmp_path):
    """Several groups of layers; a float layer and the head are ignored by loaders."""
    recipe = fxq.Recipe.weight_only(bits=4, per=32).override("**.up_proj", fxq.FLOAT)
    eight = fxq.QuantConfig(activation=None, weight=fxq.TensorSpec(signed=True, symmetric=True, per=16, observer="mse"))
    qmodel = fxq.quantize(llama(), recipe.override("**.down_proj", eight))
    folder = qmodel.export(tmp_path, format="compressed-tensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.up_proj"]
    kinds = {
        (g["weights"]["num_bits"], g["weights"]["group_size"]): g["targets"] for g in config["config_groups"].values()
    }
    assert kinds[8, 16] == ["model.layers.0.mlp.down_proj"] and len(kinds[4, 32]) == 5
    with pytest.raises(ExportError, match=r'up_proj is in float, and GPTQ.*format="compressed-tensors"'):
        qmodel.export(tmp_path / "gptq", format="gptq")


@pytest.mark.slow
def test_what_no_checkpoint_holds(affine, tmp_path):
    with pytest.raises(InputError, match=r"'gptqq'.*model.programs.export"):
        affine.export(tmp_path / "a", format="gptqq")
    with pytest.raises(ExportError, match=r'activations or caches are in integers.*"weight_only"'):
        fxq.quantize(llama(), fxq.Recipe.dynamic(optimize="coverage")).export(tmp_path / "a", format="gptq")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=48, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    gpt2 = fxq.quantize(transformers.GPT2LMHeadModel(config).eval(), fxq.Recipe.weight_only(bits=4, per=32))
    with pytest.raises(ExportError, match=r"c_attn is a Conv1D, and the format holds integers only for nn"):
        gpt2.export(tmp_path / "a", format="compressed-tensors")
    assert not (tmp_path / "a").exists()


SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
KINDS = {
    "biases": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(intermediate_size=128, num_key_value_heads=2, **SIZES)
    ),
    "padding is not ignored": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(ffn_dim=128, word_embed_proj_dim=64, **SIZES)
    ),
    "an encoder": lambda: transformers.BertModel(transformers.BertConfig(intermediate_size=128, **SIZES)),
    "norms that add 1 to their weights": lambda: transformers.GemmaForCausalLM(
        transformers.GemmaConfig(intermediate_size=128, num_key_value_heads=4, head_dim=16, **SIZES)
    ),
    "a table whose device is read": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=96,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=64,
        )
    ),
    "an embedding of two stacks": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    ),
}

TWO_STACKS = ("an embedding of two stacks", "a table whose device is read")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [(8, "compressed-tensors"), (4, "gptq")], ids=["compressed-tensors", "gptq"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds(kind, form, tmp_path):
    """`export` itself compares the checkpoint with the quantized model. With 4 bits, some rows are one block of 64."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_()
    bits, checkpoint = form
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(bits=bits, per=64))
    loaded = fxq.load(qmodel.export(tmp_path, format=checkpoint))
    call = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if kind in TWO_STACKS else {})
    with torch.no_grad():
        same(loaded(**call)[0], qmodel(**call)[0], 1e-5)  # sums in another order


def test_a_checkpoint_that_computes_something_else_is_not_written(affine, tmp_path, monkeypatch):
    monkeypatch.setattr("fxq.integrations.transformers_checkpoints._MIN_SQNR", 1000.0)
    with pytest.raises(ExportError, match="computes something else than the quantized model, and nothing was written"):
        affine.export(tmp_path, format="gptq")
    assert not list(tmp_path.iterdir())
