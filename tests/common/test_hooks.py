"""Forward hooks: the user's are told from fxq's own, which record calls of one thread."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import fxq
from fxq.common.hooks import forward_hooks, recorded_calls
from tests.support.graphs import text
from tests.support.helpers import REFERENCE


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_hooks_of_the_user():
    model, calls = nn.Sequential(nn.Linear(4, 4)), []

    def pre(module, args):
        return None

    def post(module, args, result):
        return None

    model[0].register_forward_pre_hook(pre)
    model[0].register_forward_hook(post)
    with recorded_calls(model, ["", "0"], lambda *call: calls.append(call), lambda: None):
        assert forward_hooks(model) == [] and forward_hooks(model[0]) == [pre, post]
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_calls_are_recorded_in_order_of_return_with_inputs_and_results():
    model, calls, x = nn.Sequential(nn.ReLU(), torch.jit.script(nn.ReLU())), [], torch.randn(2, 3)
    with recorded_calls(model, ["", "0", "1"], lambda *call: calls.append(call)):
        y = model(input=x)
    assert [path for path, _, _ in calls] == ["0", ""]
    assert calls[1][1] == ((), {"input": x}) and calls[1][2] is y


def test_calls_in_another_thread_are_not_recorded():
    model, calls, entered = nn.Linear(3, 3), [], []
    with recorded_calls(model, [""], lambda *call: calls.append(call), lambda: entered.append(1)):
        in_a_thread(lambda: model(torch.ones(1, 3)))
        assert calls == [] and entered == []
        model(torch.ones(1, 3))
        assert len(calls) == 1 and entered == [1]


def test_a_copy_taken_while_calls_are_recorded_records_none():
    model, calls = nn.Linear(3, 3), []
    with recorded_calls(model, [""], lambda *call: calls.append(call)):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for duplicate in copies:
            duplicate(torch.ones(1, 3))
    assert calls == [] and all(forward_hooks(duplicate) == [] for duplicate in copies)


class Tagger(nn.Module):
    """Has a parameter of its own, embeddings, a recurrent layer, attention, and a leaf with a count."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(20, 8, max_norm=1.0)
        self.rnn, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        y, _ = self.rnn(self.words(x) + self.places(x))
        return self.head(self.attention(y, y, y)[0])


@pytest.mark.slow
def test_a_model_whose_calls_another_thread_records_gives_the_same_graph():
    """Recording hooks were taken for the user's: layers stayed in float, or the model was refused."""
    torch.manual_seed(0)
    model, xs = Tagger().eval(), [torch.randint(0, 20, (4, 6)) for _ in range(2)]
    quiet, beside = fxq.quantize(model, REFERENCE, data=xs), []
    with recorded_calls(model, [path for path, _ in model.named_modules()], lambda *_: beside.append(1), lambda: None):
        beside.clear()
        in_a_thread(lambda: beside.append(fxq.quantize(model, REFERENCE, data=xs)))
    assert len(beside) == 1, "the hooks recorded calls of the other thread"
    assert text(beside[0]) == text(quiet) and torch.equal(beside[0](xs[0]), quiet(xs[0]))
    assert "linear" in text(quiet) and not any(isinstance(m, nn.LSTM) for m in quiet.modules())
