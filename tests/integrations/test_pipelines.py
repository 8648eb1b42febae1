"""`transformers.pipeline` with quantized models, beside the float models."""

import logging

import numpy as np
import pytest
import torch

import fxq
from fxq.common.metrics import sqnr

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from scripts.networks.generators import generator  # noqa: E402
from tests.integrations.test_transformers import ALL_FLOAT, INT8  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:nothing runs on integers"),
    pytest.mark.filterwarnings("ignore:with integer weights"),
    pytest.mark.any_cpu,
]

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
TEXT = "the cat sat on a mat dog ran far who where is it blue red sky"
WORDS = [*SPECIAL.values(), "[MASK]", *TEXT.split(" ")]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXTS = ["the cat sat", "a dog ran far on the mat", "it is [MASK]"]


@pytest.fixture(scope="module")
def tokenizer():
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    own = tokenizers.Tokenizer(words)
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, mask_token="[MASK]", **SPECIAL)


def bert(kind, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=len(WORDS), max_position_embeddings=32, **options)
    return getattr(transformers, kind)(config).eval()


def numbers(value):
    """Numbers of a result, in order, and all else as it is."""
    if isinstance(value, (float, np.floating)):
        return [float(value)], []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        return [], [repr(value)]
    inner = [numbers(part) for part in parts]
    return [n for own, _ in inner for n in own], [text for _, own in inner for text in own]


def check_pipeline(caplog, task, model, inputs, recipe=ALL_FLOAT, least=80, **options):
    """Run a pipeline with a model and with the quantized one. Returns the latter."""
    qmodel = fxq.quantize(model, recipe)
    assert isinstance(qmodel, type(model)) and qmodel.config.model_type == model.config.model_type
    call = options.pop("call", {})
    results = []
    for each_model in (model, qmodel):
        with caplog.at_level(logging.WARNING, "transformers"):
            caplog.clear()
            results.append(numbers(transformers.pipeline(task, model=each_model, **options)(inputs, **call)))
            assert "not supported" not in caplog.text
    (want, want_texts), (got, texts) = results
    assert want_texts == texts
    if want:
        assert sqnr(torch.tensor(want), torch.tensor(got)) > least
    return qmodel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("feature-extraction", "BertModel"),
        ("text-classification", "BertForSequenceClassification"),
        ("fill-mask", "BertForMaskedLM"),
        ("token-classification", "BertForTokenClassification"),
    ],
)
def test_encoders(caplog, tokenizer, task, kind):
    texts = TEXTS[2:] if task == "fill-mask" else TEXTS
    qmodel = check_pipeline(caplog, task, bert(kind), texts, tokenizer=tokenizer, batch_size=len(texts))
    assert list(qmodel.programs.programs) == ["encoder"]


@pytest.mark.slow
def test_integer_weights_keep_the_labels(caplog, tokenizer):
    model = bert("BertForSequenceClassification", num_labels=3)
    check_pipeline(caplog, "text-classification", model, TEXTS, INT8, 30, tokenizer=tokenizer, call={"top_k": None})


def test_text_generation(caplog, tokenizer):
    model = generator("Llama", vocab_size=len(WORDS), num_hidden_layers=1)
    options = {"do_sample": False, "max_new_tokens": 5}
    check_pipeline(caplog, "text-generation", model, TEXTS, tokenizer=tokenizer, batch_size=3, call=options)


@pytest.mark.slow
def test_images(caplog):
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    image = pytest.importorskip("PIL.Image")
    picture = image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8))
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    check_pipeline(caplog, "image-classification", model, [picture], image_processor=processor)


def test_calls_of_an_encoder():
    """Masks given or not, options that change nothing, results as an object or a tuple, attributes."""
    model = bert("BertModel")
    qmodel = fxq.quantize(model, ALL_FLOAT)
    ids = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    calls = (
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "token_type_ids": 1 - mask, "output_attentions": False, "output_hidden_states": False},
        {"input_ids": ids[:1, :2], "attention_mask": mask[:1, :2], "position_ids": None, "return_dict": True},
    )
    with torch.no_grad():
        for call in calls:
            want, got = model(**call), qmodel(**call)
            assert type(want) is type(got) and want.keys() == got.keys()
            assert all(sqnr(want[key], got[key]) > 80 for key in want)
        assert isinstance(qmodel(ids, mask, return_dict=False), tuple)
        with pytest.raises(fxq.InputError, match="output_attentions is True"):
            qmodel(ids, output_attentions=True)
    assert qmodel.main_input_name == "input_ids" and qmodel.dtype is torch.float32 and qmodel.device.type == "cpu"
    assert repr(qmodel).startswith("QuantizedBertModel(")


@pytest.mark.slow
def test_several_kinds_of_calls_and_data():
    """Examples of several calls give a model of the float class, also where ranges are calibrated."""
    model = bert("BertModel")
    ids = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 4]])
    calls = {"plain": {"input_ids": ids}, "hidden": {"input_ids": ids, "output_hidden_states": True}}
    data = [call for call in calls.values() for _ in range(4)]
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    qmodel = fxq.quantize(model, recipe, example_inputs=calls, data=data)
    assert isinstance(qmodel, transformers.BertModel) and list(qmodel.programs.programs) == ["plain", "hidden"]
    assert qmodel.programs.ledger["hidden"].count("int8")
    with torch.no_grad():
        want, got = (m(ids, output_hidden_states=True).hidden_states for m in (model, qmodel))
    assert all(sqnr(*pair) > 20 for pair in zip(want, got, strict=True))


def test_a_model_without_an_example_is_refused():
    config = transformers.Wav2Vec2Config(**SIZES, conv_dim=(8,), conv_kernel=(4,), conv_stride=(4,))
    model = transformers.Wav2Vec2ForCTC(config).eval()
    with pytest.raises(fxq.InputError, match=r"example_inputs=x"):
        fxq.quantize(model, INT8)


@pytest.mark.slow
def test_speech_recognition_with_whisper(caplog):
    """The pipeline passes a mask of the sound, which Whisper takes and does not read."""
    model = generator("Whisper", encoder_layers=1, decoder_layers=1)
    words = [*map(chr, range(ord("a"), ord("z") + 1)), "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    tokenizer = transformers.WhisperTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    extractor = transformers.WhisperFeatureExtractor(8, sampling_rate=1000, hop_length=10, chunk_length=0.4, n_fft=128)
    texts = []
    with caplog.at_level("ERROR"):
        for each_model in (model, fxq.quantize(model, ALL_FLOAT)):
            pipeline = transformers.pipeline(
                "automatic-speech-recognition", model=each_model, tokenizer=tokenizer, feature_extractor=extractor
            )
            sounds = [{"raw": torch.linspace(0, 50 + i, 400).sin().numpy(), "sampling_rate": 1000} for i in range(3)]
            options = {"max_new_tokens": 6, "suppress_tokens": list(range(26, 50))}
            texts.append([result["text"] for result in pipeline(sounds, generate_kwargs=options)])
    assert texts[0] == texts[1] and all(texts[0])
