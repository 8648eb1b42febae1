"""Models with several programs on several ranks: the same, bit for bit, as one process that sees all of the data."""

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError
from tests.support.calibrations import same
from tests.support.processes import on_ranks

pytestmark = pytest.mark.any_cpu

RECIPES = {
    "static": fxq.Recipe.static(backend="reference", optimize="coverage"),
    "gptq": fxq.Recipe.weight_only(bits=4, backend="reference").insert_pass(fxq.passes.Gptq(), after="smooth"),
}


class Gated(nn.Module):
    """Layers that are called with x alone, or with a gate, too: two programs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, gate=None):
        x = torch.relu(self.first(x))
        return self.second(x if gate is None else x * gate)


def calls(count=12):
    """Calls of both forms in turns, of growing range, so that each of them counts."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(6, 16, generator=generator) * (i + 1) for i in range(count)]
    return [{"x": x, "gate": torch.rand(6, 32, generator=generator)} if i % 2 else {"x": x} for i, x in enumerate(xs)]


SHARES = {
    "both forms": lambda rank: [call for i, call in enumerate(calls()) if i // 2 % 2 == rank],
    "one form each": lambda rank: calls()[rank::2],
    "one rank has nothing": lambda rank: calls() if rank else [],
}


def result(data, recipe, **options):
    qmodel = fxq.quantize(Gated().eval(), recipe, data=data, example_inputs=calls()[:2], **options)
    assert len(qmodel.programs) == 2
    return [(program.code, dict(program.state_dict())) for program in qmodel.programs.values()], [
        qmodel(**call) for call in calls()[:2]
    ]


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "share"), [(r, s) for r in RECIPES for s in SHARES])
def test_programs_see_what_one_process_sees(tmp_path, name, share):
    results = on_ranks(2, tmp_path, lambda rank: result(SHARES[share](rank), RECIPES[name]))
    want = result(calls(), RECIPES[name])
    for got in results:
        assert not isinstance(got, Exception), got
        assert same(got, want)
    of_one_share = result(SHARES["both forms"](1), RECIPES[name])
    assert not same(of_one_share, want)


def test_errors_are_those_of_all_ranks(tmp_path):
    """A batch that fails on one rank; a form without a batch; and another model."""

    def broken(rank):
        return result([{"x": torch.ones(6, 15)}] if rank else calls(), RECIPES["static"])

    def without_gates(rank):
        return result(calls()[::2], RECIPES["static"])

    def other_model(rank):
        model = Gated().eval()
        with torch.no_grad():
            model.first.weight[0, 0] += rank
        return fxq.quantize(model, RECIPES["static"], data=calls(), example_inputs=calls()[:2])

    texts = {
        broken: "rank 1: data, batch 0 .*does not run on it",
        without_gates: "no batch is a call of the form",
        other_model: "rank 1 calibrates another model",
    }
    for k, (work, text) in enumerate(texts.items()):
        for error in on_ranks(2, tmp_path / str(k), work):
            with pytest.raises(InputError, match=text):
                raise error


def test_a_generator_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = [{"input_ids": torch.randint(50, (2, 9)), "attention_mask": torch.ones(2, 9).long()} for _ in range(6)]

    def work(batches):
        qmodel = fxq.quantize(model, RECIPES["gptq"], data=batches)
        program = next(iter(qmodel.programs.programs.values()))
        return dict(program.state_dict()), qmodel(**prompts[0]).logits

    results = on_ranks(2, tmp_path, lambda rank: work(prompts[rank::2]))
    want = work(prompts)
    for got in results:
        assert not isinstance(got, Exception), got
        assert same(got, want)
    assert not same(work(prompts[:1]), want)
