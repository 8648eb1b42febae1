"""Small random models of transformers that generate, of each family, with the attention of either kind."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
WINDOW = {**GROUPED, "head_dim": 8, "sliding_window": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 128}

TRANSLATOR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
WHISPER = {
    **{name: value for name, value in TRANSLATOR.items() if name != "max_position_embeddings"},
    **{"max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None},
}

FAMILIES = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "OPT": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", WINDOW),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOW),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**GROUPED, **EXPERTS}),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {**SIZES, "alibi": False}),
    "Falcon with alibi": ("FalconForCausalLM", "FalconConfig", {**SIZES, "alibi": True}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}),
}
ENCODER_DECODERS = {
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", TRANSLATOR),
    "Marian": ("MarianMTModel", "MarianConfig", {**TRANSLATOR, "pad_token_id": 0}),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}
"""Model class, configuration class and options of each family."""
CASES = [
    (family, attention)
    for family in (*FAMILIES, *ENCODER_DECODERS)
    for attention in ("eager", "sdpa")
    if (family, attention) != ("Gemma2", "sdpa")  # which transformers refuses
]
"""Family and attention implementation of every model."""


def generator(family: str, attention: str = "sdpa", **changes: Any) -> Any:
    """Random model of a family in eval mode, which generates without an end."""
    model_class, config_class, options = (FAMILIES | ENCODER_DECODERS)[family]
    torch.manual_seed(0)
    start = {"decoder_start_token_id": 3} if family in ENCODER_DECODERS else {}
    config = getattr(transformers, config_class)(**{**options, **start, **changes})
    model = getattr(transformers, model_class)(config).eval()
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompt(family: str) -> dict[str, torch.Tensor]:
    """Batch of three for a model: tokens with padding, at the left for decoders, or features of sound."""
    random = torch.Generator().manual_seed(0)
    if family == "Whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=random)}
    ids = torch.randint(3, 50, (3, 7), generator=random)
    mask = torch.ones_like(ids)
    if family in ENCODER_DECODERS:
        mask[0, 5:] = mask[1, 6:] = 0
    else:
        mask[0, :3] = mask[1, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def vision_language(attention: str = "sdpa", layers: int = 2) -> tuple[Any, dict[str, torch.Tensor]]:
    """Random Llava with a small CLIP and a small Llama of so many layers each, and a call with two images."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    sight = transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=60)
    config = transformers.LlavaConfig(
        vision_config=sight, text_config=text, image_token_id=55, image_seq_length=4, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.tensor([[3, 4, 55, 55, 55, 55, 7, 8], [5, 6, 55, 55, 55, 55, 9, 2]])
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 28, 28)}
