"""The models that run_coverage.py puts through the pipeline: real architectures, random weights, small inputs.

One `Subject` per architecture family: torchvision's classification and segmentation networks, the smallest member of
families of timm, small encoders of HuggingFace transformers. `Subject.build` makes the model in eval mode and its
batches; nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from scripts.coverage.torchvision import import_torchvision
from scripts.networks.realistic import realistic

BATCH, SEED = 2, 0
INSTALL = {
    "torchvision": "pip install --no-deps torchvision==0.28.0   (the release that belongs to torch 2.13.0)",
    "timm": "pip install --no-deps timm torchvision==0.28.0 && pip install huggingface_hub safetensors pyyaml",
    "transformers": "pip install transformers",
}


@dataclass(frozen=True)
class Subject:
    """One model of a suite.

    Attributes:
        suite: the package that it comes from: torchvision, timm or transformers.
        name: its architecture there.
        make: makes the model, random weights, train or eval mode.
        inputs: makes one batch for the model, as fxq takes it, from a seeded generator.
    """

    suite: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, torch.Generator], Any]

    def __str__(self) -> str:
        return f"{self.suite}/{self.name}"

    def build(self, batches: int) -> tuple[nn.Module, list[Any]]:
        """The model in eval mode, with statistics like those of a trained one, and its batches."""
        load(self.suite)
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the packages say about their own defaults
            model = self.make().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(SEED)
        data = [self.inputs(model, generator) for _ in range(batches)]
        enliven(model, generator)
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            realistic(model, tuple(data[0].shape), batches=1)
        return model, data


def enliven(model: nn.Module, generator: torch.Generator) -> None:
    """Let every branch count: parameters that begin at (nearly) nothing get the size that they have after training.

    Layer scales begin at 1e-6 and the last norm of a residual branch at 0, so that an untrained block is an identity:
    whatever it computed, the output would not show it. They become about 0.3. Class tokens and positions begin at 0,
    1e-6 or 0.02, and drown in the stream that they are part of; their entries get a standard deviation of 0.3.
    """
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        is_position = "token" in last or "embed" in last
        if parameter.numel() < 2 or "bias" in last or float(parameter.abs().max()) > (0.2 if is_position else 1e-2):
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.3 * noise if is_position else 0.3 * (1 + 0.2 * noise))


def load(suite: str) -> None:
    """Import the package of a suite.

    Raises:
        SystemExit: it is not installed; the message says how to install it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if suite != "transformers" or find_spec("torchvision") is not None:
                import_torchvision()
            package = import_module(suite)
            _ = suite != "transformers" or package.PreTrainedModel  # it imports the rest of itself when it is asked for
        except ImportError as error:
            message = f"the suite {suite} cannot be loaded ({error}). Install it:\n    {INSTALL[suite]}"
            raise SystemExit(message) from error


def _image(model: nn.Module, generator: torch.Generator, size: int) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=generator)


# ---- torchvision


def _torchvision(name: str, size: int = 224) -> Subject:
    def make() -> nn.Module:
        import torchvision

        options: dict[str, Any] = {"weights_backbone": None} if name in SEGMENTATION else {}
        if name in ("googlenet", "inception_v3"):
            options = {"init_weights": True, "transform_input": True}
        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        return model

    return Subject("torchvision", name, make, partial(_image, size=size))


CLASSIFICATION = (
    "alexnet",
    "vgg11",
    "vgg11_bn",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "squeezenet1_0",
    "squeezenet1_1",
    "densenet121",
    "googlenet",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "convnext_tiny",
    "vit_b_32",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
)
SEGMENTATION = (
    "fcn_resnet50",
    "deeplabv3_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
)
SIZES = {"inception_v3": 299, **dict.fromkeys(SEGMENTATION, 128)}

# ---- timm: one per family (a module of timm.models), the smallest or nearly so

TIMM = (
    "beit_base_patch16_224",
    "botnet26t_256",
    "mobileone_s1",
    "cait_xxs24_224",
    "coat_tiny",
    "coatnet_nano_rw_224",
    "convit_tiny",
    "convnext_atto",
    "crossvit_tiny_240",
    "cs3darknet_focus_s",
    "darknet53",
    "davit_tiny",
    "deit_tiny_distilled_patch16_224",
    "densenet121",
    "dla46x_c",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "efficientnet_lite0",
    "efficientvit_b0",
    "efficientvit_m0",
    "ese_vovnet19b_slim_dw",
    "eva02_tiny_patch14_224",
    "fasternet_t0",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "ghostnet_050",
    "gmlp_ti16_224",
    "hardcorenas_a",
    "hgnetv2_b0",
    "hiera_tiny_224",
    "hrnet_w18_small",
    "inception_next_atto",
    "inception_v4",
    "lcnet_035",
    "legacy_seresnet18",
    "levit_128s",
    "mambaout_femto",
    "maxvit_pico_rw_256",
    "mixer_s32_224",
    "mixnet_s",
    "mobilenetv3_small_050",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "nest_tiny",
    "nextvit_small",
    "nf_regnet_b0",
    "pit_ti_224",
    "poolformerv2_s12",
    "pvt_v2_b0",
    "regnety_002",
    "repghostnet_050",
    "repvit_m1",
    "res2net50_14w_8s",
    "resnest14d",
    "resnet10t",
    "resnetv2_18",
    "rexnet_100",
    "selecsls42",
    "sequencer2d_s",
    "shvit_s1",
    "skresnet18",
    "starnet_s050",
    "swiftformer_xs",
    "swinv2_cr_tiny_224",
    "tf_efficientnetv2_b0",
    "tiny_vit_5m_224",
    "tinynet_e",
    "tnt_s_legacy_patch16_224",
    "tresnet_m",
    "twins_svt_small",
    "visformer_tiny",
    "vit_tiny_patch16_224",
    "vit_srelpos_small_patch16_224",
    "volo_d1_224",
    "xception41p",
    "xcit_nano_12_p8_224",
)


def _timm(name: str) -> Subject:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model

    def inputs(model: nn.Module, generator: torch.Generator) -> Tensor:
        config: Any = model.default_cfg
        size = config["input_size"][-1]
        if not config.get("fixed_input_size") and size > 160:
            size = max((config.get("min_input_size") or (3, 0, 0))[-1], 160)
        return _image(model, generator, size)

    return Subject("timm", name, make, inputs)


# ---- transformers: the real structure at a small size

TEXT: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 130,
}
VISION: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "image_size": 96,
    "patch_size": 16,
}
T5 = {"vocab_size": 1000, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
SPEECH: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key not in ("vocab_size", "max_position_embeddings")},
    "conv_dim": (64, 64, 64),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
}


def _text(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """64 tokens; the second sentence ends 16 tokens early."""
    tokens = torch.randint(5, TEXT["vocab_size"], (BATCH, 64), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 48:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _pixels(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": _image(model, generator, VISION["image_size"])}


def _sound(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 4000, generator=generator)}


def _transformers(name: str, model: str, inputs: Callable[..., Any], options: dict[str, Any]) -> Subject:
    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        network: nn.Module = kind(kind.config_class(**options))
        return network

    return Subject("transformers", name, make, inputs)


TRANSFORMERS: tuple[tuple[str, str, Callable[..., Any], dict[str, Any]], ...] = (
    ("bert", "BertModel", _text, TEXT),
    (
        "distilbert",
        "DistilBertModel",
        _text,
        {"vocab_size": 1000, "dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 512},
    ),
    ("roberta", "RobertaModel", _text, TEXT),
    ("albert", "AlbertModel", _text, {**TEXT, "embedding_size": 64}),
    ("electra", "ElectraModel", _text, {**TEXT, "embedding_size": 64}),
    ("mpnet", "MPNetModel", _text, TEXT),
    (
        "deberta-v2",
        "DebertaV2Model",
        _text,
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
    ),
    ("mobilebert", "MobileBertModel", _text, {**TEXT, "embedding_size": 64, "intra_bottleneck_size": 64}),
    ("t5-encoder", "T5EncoderModel", _text, T5),
    ("vit", "ViTModel", _pixels, VISION),
    (
        "swin",
        "SwinModel",
        _pixels,
        {"image_size": 96, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 6},
    ),
    ("clip-vision", "CLIPVisionModel", _pixels, VISION),
    ("wav2vec2", "Wav2Vec2Model", _sound, SPEECH),
)

SUBJECTS: tuple[Subject, ...] = (
    *(_torchvision(name, SIZES.get(name, 224)) for name in (*CLASSIFICATION, *SEGMENTATION)),
    *(_timm(name) for name in TIMM),
    *(_transformers(*row) for row in TRANSFORMERS),
)
SUITES = tuple(INSTALL)
