"""Quantized models of transformers in folders, and quantization by `from_pretrained`."""

import json
import shutil

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("fxq.integrations.transformers_files")

pytestmark = [pytest.mark.filterwarnings("ignore:with integer weights"), pytest.mark.any_cpu]

INT8 = fxq.Recipe.weight_only(backend="reference")
IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}


def generated(model):
    return model.generate(IDS, max_new_tokens=6, do_sample=False)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model, fxq.quantize(model, INT8)


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    llama[1].save_pretrained(path)
    return path


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["fxq.load", "AutoModelForCausalLM", "LlamaForCausalLM"])
def test_a_saved_decoder_generates_the_same(llama, folder, way, tmp_path):
    model, qmodel = llama
    load = fxq.load if way == "fxq.load" else getattr(transformers, way).from_pretrained
    again = load(folder)
    assert type(again) is type(qmodel) and torch.equal(generated(again), generated(qmodel))
    with torch.no_grad():  # one of them may run compiled programs already, which add in another order
        torch.testing.assert_close(again(IDS).logits, qmodel(IDS).logits, rtol=0, atol=1e-5)
    assert again.generation_config.pad_token_id == 0
    assert again.programs.programs["decoder"].ledger.count("weight-only")
    again.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.slow
def test_a_saved_encoder_decoder_generates_the_same(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    qmodel = fxq.quantize(model, INT8)
    qmodel.save_pretrained(tmp_path)
    for again in (fxq.load(tmp_path), transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        assert type(again) is type(qmodel) and torch.equal(generated(again), generated(qmodel))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_quantizes(llama, tmp_path, dtype):
    model = transformers.LlamaForCausalLM(llama[0].config).to(dtype).eval()
    model.save_pretrained(tmp_path)
    config = files.FxqConfig("weight_only", bits=4, backend="reference")
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    want = fxq.quantize(model, fxq.Recipe.weight_only(bits=4, backend="reference"))
    with torch.no_grad():
        assert sqnr(want(IDS).logits, got(IDS).logits) > 100
    assert isinstance(got, transformers.LlamaForCausalLM) and got.dtype is torch.float32
    got.save_pretrained(tmp_path / "again")
    assert torch.equal(generated(fxq.load(tmp_path / "again")), generated(got))


@pytest.mark.slow
def test_from_pretrained_quantizes_an_encoder(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    got = transformers.AutoModel.from_pretrained(tmp_path, quantization_config=files.FxqConfig(INT8))
    mask = torch.ones_like(IDS)
    mask[0, 5:] = 0
    got.save_pretrained(tmp_path / "again")
    again = fxq.load(tmp_path / "again")
    with torch.no_grad():
        want = model(IDS, mask).last_hidden_state
        result = got(IDS, mask, output_attentions=False, return_dict=True).last_hidden_state
        assert 30 < sqnr(want, result) < 80  # integers
        assert torch.equal(again(IDS, mask).last_hidden_state, result)
    with pytest.raises(fxq.InputError, match="output_attentions"):
        got(IDS, output_attentions=True)


def test_what_cannot_be_loaded_or_saved_is_refused(llama, folder, tmp_path):
    with pytest.raises(fxq.InputError, match="push_to_hub"):
        llama[1].save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(fxq.RecipeError, match="training"):
        files.FxqConfig(fxq.Recipe.qat())
    with pytest.raises(fxq.RecipeError, match="bits"):
        files.FxqConfig(INT8, bits=4)
    with pytest.raises(fxq.FileError, match="without a config"):
        fxq.load(tmp_path)
    with pytest.raises(fxq.InputError, match="device_map"):
        files.FxqQuantizer(files.FxqConfig()).validate_environment(device_map={"": "meta"})
    for change, words in (
        ({"architectures": ["NoSuch"]}, "no class NoSuch"),
        ({"quantization_config": {}}, "config.json"),
    ):
        again = tmp_path / words.replace(" ", "")
        shutil.copytree(folder, again)
        config = json.loads((again / "config.json").read_text()) | change
        (again / "config.json").write_text(json.dumps(config))
        with pytest.raises(fxq.FileError, match=words):
            fxq.load(again)
