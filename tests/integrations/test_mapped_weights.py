"""Quantization of models whose weights are read from safetensors files: equal to that of models in memory."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxq
from fxq.common.files import write_file
from fxq.common.metrics import nbytes
from fxq.errors import FileError, InputError
from fxq.quant import resumed_grids
from tests.integrations.test_transformers_checkpoints import IDS, llama, logits

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]


class Block(nn.Module):
    """A transformer without convolutions, with a tied head and a buffer that is in its files."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(48, 64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.ones(64))

    def forward(self, ids):
        x = self.table(ids) + self.shift
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v))


def own_model(folder):
    torch.manual_seed(0)
    model = Block().eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    first, rest = dict(list(state.items())[:2]), dict(list(state.items())[2:])
    save_file(first, folder / "a.safetensors")
    save_file(rest, folder / "b.safetensors")
    index = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(rest, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model


def shell_of():
    with torch.device("meta"):
        return Block().eval()


def recipe_of(bits):
    return fxq.Recipe.weight_only(bits=bits, per=32, optimize="coverage")


def ledgers(model):
    programs = getattr(model, "programs", None)
    return [str(program.ledger) for program in programs.programs.values()] if programs else [str(model.ledger)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bits", [4, 8, 3, 6])
def test_a_folder_of_transformers_is_quantized_as_the_model_in_memory(bits, tmp_path):
    model = llama(tied=bits == 8)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    usual, read = fxq.quantize(model, recipe_of(bits)), fxq.quantize(tmp_path, recipe_of(bits))
    assert ledgers(read) == ledgers(usual)
    assert torch.equal(logits(read), logits(usual))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # the result has all of its tensors
    assert torch.equal(logits(read), logits(usual))
    assert (
        abs(fxq.estimate_memory(model, recipe_of(bits)).result / nbytes(usual.programs) - 1) < 0.1
    )  # kernels have some small tensors


@pytest.mark.slow
def test_weights_of_16_bits_are_quantized_from_float32(tmp_path):
    llama().bfloat16().save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    usual, read = fxq.quantize(model, recipe_of(8)), fxq.quantize(str(tmp_path), recipe_of(8))
    assert torch.equal(logits(read), logits(usual))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_of_ones_own_reads_its_weights(bits, tmp_path):
    model, shell = own_model(tmp_path), shell_of()
    usual = fxq.quantize(model, recipe_of(bits), example_inputs=IDS)
    read = fxq.quantize(shell, recipe_of(bits), example_inputs=IDS, weights=tmp_path)
    assert ledgers(read) == ledgers(usual)
    assert torch.equal(read(IDS), usual(IDS))
    assert shell.table.weight.is_meta  # the user's model is not changed


def test_files_that_do_not_fit_are_refused(tmp_path):
    model = own_model(tmp_path)
    with pytest.raises(InputError, match=r"Block has values: leave it out"):
        fxq.quantize(model, "weight_only", example_inputs=IDS, weights=tmp_path)
    save_file({"out.weight": torch.zeros(3, 3)}, tmp_path / "c.safetensors")
    with pytest.raises(FileError, match=r"'out.weight' is \[3, 3\] in the files, and \[64, 64\] in Block"):
        fxq.quantize(shell_of(), "weight_only", example_inputs=IDS, weights=tmp_path / "c.safetensors")
    with pytest.raises(FileError, match=r"the files have no weight for 'shift' of Block"):
        fxq.quantize(shell_of(), "weight_only", example_inputs=IDS, weights=tmp_path / "b.safetensors")
    with pytest.raises(FileError, match=r"it has no config.json of a model of transformers"):
        fxq.quantize(tmp_path, "weight_only", example_inputs=IDS)


def test_a_model_that_writes_to_its_parameters_is_refused(tmp_path):
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Embedding(8, 4, max_norm=0.5)

        def forward(self, ids):
            return self.layer(ids)

    torch.manual_seed(0)  # rows whose norm is at the limit are scaled again in each call
    save_file(dict(Writer().state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        shell = Writer().eval()
    with pytest.raises(InputError, match=r"Writer writes to its parameter 'layer.weight'"):
        fxq.quantize(shell, "weight_only", example_inputs=torch.tensor([[1, 2]]), weights=tmp_path)


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    files, scales = tmp_path / "files", tmp_path / "scales"
    files.mkdir()
    own_model(files)
    unbroken = fxq.quantize(shell_of(), recipe_of(4), example_inputs=IDS, weights=files)
    count = 0

    def interrupted(*arguments, **options):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return write_file(*arguments, **options)

    monkeypatch.setattr(resumed_grids, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fxq.quantize(shell_of(), recipe_of(4), example_inputs=IDS, weights=files, checkpoint=scales)
    assert len(list(scales.iterdir())) == 2
    resumed = fxq.quantize(shell_of(), recipe_of(4), example_inputs=IDS, weights=files, checkpoint=scales)
    total = count
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), unbroken.state_dict().values(), strict=True)
    )
    assert ledgers(resumed) == ledgers(unbroken)
    fxq.quantize(shell_of(), recipe_of(4), example_inputs=IDS, weights=files, checkpoint=scales)
    assert count == total  # everything is there
    changed = load_file(files / "b.safetensors")
    changed["out.weight"][0, 0] += 1e-3
    save_file(changed, files / "b.safetensors")
    fxq.quantize(shell_of(), recipe_of(4), example_inputs=IDS, weights=files, checkpoint=scales)
    assert count == total + 1  # one weight is another
    monkeypatch.setattr(resumed_grids, "version", lambda _: "0.0.0")
    fxq.quantize(shell_of(), recipe_of(4), example_inputs=IDS, weights=files, checkpoint=scales)
    assert count > total + 3  # another version


MEASURED = """
import sys, warnings
import torch, transformers, fxq
warnings.simplefilter("ignore")
torch.set_num_threads(1)
def peak(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
recipe = fxq.Recipe.weight_only(bits=8, optimize="coverage")
fxq.quantize(sys.argv[1], recipe)
before = peak()
fxq.quantize(sys.argv[2], recipe)
print(before, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
def test_the_peak_is_as_estimated(tmp_path):
    llama().save_pretrained(tmp_path / "small")
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "large", max_shard_size="300MB")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / "large")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800).stdout
    before, peak = map(int, out.split()[-2:])
    estimate = fxq.estimate_memory(tmp_path / "large", fxq.Recipe.weight_only(bits=8))
    assert 0.8 * estimate.peak < peak - before < 1.2 * estimate.peak
