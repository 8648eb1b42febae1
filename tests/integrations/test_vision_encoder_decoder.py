"""Models of transformers that write texts about images; and hidden states of a model that was never called before."""

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.any_cpu

CONFIG = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().reshape(2, 3, 16, 16)


def captioner():
    torch.manual_seed(0)
    encoder = transformers.ViTConfig(image_size=16, patch_size=8, **CONFIG)
    decoder = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.VisionEncoderDecoderModel(config).eval()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 1
    model.generation_config.pad_token_id = 0
    return model


def test_texts_about_images():
    model = captioner()
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference"))
    call = {"pixel_values": IMAGES, "decoder_input_ids": torch.arange(8).reshape(2, 4)}
    with torch.no_grad():
        assert sqnr(model(**call).logits, qmodel(**call).logits) > 30
    tokens = {"max_new_tokens": 5, "do_sample": False}
    assert qmodel.generate(pixel_values=IMAGES, **tokens).shape == model.generate(pixel_values=IMAGES, **tokens).shape


def test_the_encoder_of_other_inputs_is_refused(monkeypatch):
    model = captioner()
    monkeypatch.setattr(type(model.encoder), "main_input_name", "clouds")
    with pytest.raises(fxq.InputError, match="VisionEncoderDecoderModel takes pixel_values, for which fxq has no"):
        fxq.quantize(model, "weight_only")


@pytest.mark.parametrize("calls", [0, 1])
def test_hidden_states_are_recorded_once(calls):
    """transformers installs hooks in the first call, which may be one of fxq's."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **CONFIG)).eval()
    call = {"input_ids": torch.arange(6).reshape(1, 6), "output_hidden_states": True}
    for _ in range(calls):
        model(**call)
    for _ in range(2):
        qmodel = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference"), example_inputs=call)
        with torch.no_grad():
            ours, theirs = qmodel(**call).hidden_states, model(**call).hidden_states
        assert len(ours) == len(theirs) == 2
        assert all(sqnr(y, x) > 30 for x, y in zip(ours, theirs, strict=True))
