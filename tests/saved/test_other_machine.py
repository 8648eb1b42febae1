"""A pickle made on one kind of CPU runs right on another one, and says what it cannot run there."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import FallbackKernel
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.common.metrics import sqnr, tensors
from fxq.errors import BackendError, FxqWarning
from fxq.graph.region_difference import DefaultTolerances
from fxq.saved import other_machine as elsewhere
from tests.support import elsewhere as other_process
from tests.support import models
from tests.support.graphs import equal
from tests.support.machine import needs_x86
from tests.support.processes import in_new_python

NAMES = ["residual", "paddings", "several_inputs", "upscaler", "prelu_chain", "squeeze_excite", "in_place", "shapes"]
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
pytestmark = needs_x86
VNNI = pytest.mark.skipif(not cpu.has_vnni(), reason="needs a CPU with VNNI, which can play one without")


def grids_of_7_bits():
    """Recipe with 7-bit activations: kernels take them on every CPU, so the models are equal on each."""
    activation = fxq.TensorSpec(bits=7)
    return fxq.Recipe.static(backend="x86", optimize="coverage", activation=activation)


def network():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.PReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(288, 5),
    )
    return nn.Sequential(*layers).eval()


def quantized():
    return fxq.quantize(network(), grids_of_7_bits(), data=[X])


def kernels(qmodel):
    return [m for m in qmodel.modules() if isinstance(m, Kernel)]


@pytest.fixture(scope="module")
def pickles(tmp_path_factory):
    """Outputs of models where they were made and where their pickle is loaded, by the instruction set of the maker.

    This process makes the models of "DEFAULT". A second one simulates AVX2: it loads these and makes its own models,
    which this process loads. Half of the networks go each way.
    """
    folder = tmp_path_factory.mktemp("pickles")
    here, there = folder / "here.pt", folder / "there.pt"
    results = [folder / f"{i}.pt" for i in range(4)]
    other_process.main("make", here, results[0], *NAMES[::2])
    loaded_there, made_there = other_process.run(
        "AVX2", ("load", here, results[1]), ("make", there, results[2], *NAMES[1::2])
    )
    other_process.main("load", there, results[3])
    made_here, loaded_here = (torch.load(results[i], weights_only=False) for i in (0, 3))
    return {"DEFAULT": (made_here, loaded_there), "AVX2": (made_there, loaded_here)}


@pytest.mark.slow
@VNNI
@pytest.mark.parametrize("there", ["DEFAULT", "AVX2"])
def test_a_pickle_on_another_cpu(pickles, there):
    here = {"DEFAULT": "AVX2", "AVX2": "DEFAULT"}[there]
    expected, loaded = pickles[there]
    for name in expected["values"]:
        for values in zip(*(map(tensors, loaded["values"][name])), strict=True):
            assert equal(values[0], values[1]) and equal(values[0], values[2]), name
        for a, b in zip(tensors(expected["values"][name][0]), tensors(loaded["values"][name][0]), strict=True):
            assert sqnr(a, b) > 35, name  # rounding ties apart: both forms are right
    if here == "AVX2":
        assert len(loaded["messages"]) == len(expected["values"])
        for message in loaded["messages"]:
            assert "quantized on another machine (VNNI: there yes, here no; " in message
            assert "run in q/dq form, which is correct but slow" in message
    else:
        assert loaded["messages"] == []


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", models.NETWORKS)
def test_the_form_of_every_kernel_computes_what_the_kernel_does(name):
    qmodel = fxq.quantize(models.build(name), grids_of_7_bits(), data=[models.batch(name)])
    for node, kernel in elsewhere.kernels_of(qmodel):
        assert kernel.form is not None and elsewhere.misfit(kernel, node, DefaultTolerances()) is None, node


@pytest.mark.one_in(2)
@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_form_of_a_layer_that_measures_computes_what_the_kernel_does(per, symmetric):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(3, 9, 16)
    with torch.no_grad():
        model[0].weight += 0.1  # what a zero point adds is not little
    spec = fxq.TensorSpec(bits=7, per=per, symmetric=symmetric, range="dynamic")
    qmodel = fxq.quantize(model, fxq.Recipe.dynamic(optimize="coverage", activation=spec), example_inputs=x)
    node_kernels = list(elsewhere.kernels_of(qmodel))
    assert len(node_kernels) == 4
    for node, kernel in node_kernels:
        assert elsewhere.misfit(kernel, node, DefaultTolerances()) is None, node


def pickled_elsewhere(qmodel):
    """As it would be pickled on another machine."""
    with pytest.MonkeyPatch.context() as there:
        made_on = {**cpu.machine(), "CPU": "another"}
        there.setattr(cpu, "machine", lambda: made_on)
        return pickle.dumps(qmodel)


def refuse(kernel):
    raise BackendError("x86.conv: not here. Keep the layer in float or in q/dq form.")


def test_nothing_happens_where_all_fit(recwarn):
    qmodel = quantized()
    unpickled = pickle.loads(pickled_elsewhere(qmodel))
    assert torch.equal(unpickled(X), qmodel(X)) and not [w for w in recwarn if "another machine" in str(w.message)]
    assert [type(k) for k in kernels(unpickled)] == [type(k) for k in kernels(qmodel)]


def test_the_same_machine_does_not_ask(monkeypatch):
    monkeypatch.setattr(OnednnConv, "check", refuse)
    qmodel = quantized()
    assert torch.equal(pickle.loads(pickle.dumps(qmodel))(X), qmodel(X))


def test_kernels_that_do_not_fit_run_in_their_form(monkeypatch):
    qmodel = quantized()
    written = pickled_elsewhere(qmodel)
    monkeypatch.setattr(OnednnConv, "check", refuse)
    with pytest.warns(
        FxqWarning, match=r"2 of its \d+ kernels .*: not here \(2 times, for instance '0'\)\. They run"
    ) as said:
        unpickled = pickle.loads(written)
    assert "CPU: there another, here" in str(said[0].message)
    assert [k.name for k in kernels(unpickled)].count("qdq") == 2
    expected = qmodel(X)
    for _ in range(3):
        torch.testing.assert_close(unpickled(X), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    assert unpickled.state_dict().keys() == qmodel.state_dict().keys()
    for path, layer in qmodel.qparams().items():
        assert torch.equal(unpickled.qparams()[path].weight, layer.weight)
    # It is as much of a model as any: copied, pickled, edited, and the kernels come back where they fit.
    assert torch.equal(copy.deepcopy(unpickled)(X), unpickled(X))
    with pytest.warns(FxqWarning, match="2 of its"):
        again = pickle.loads(pickled_elsewhere(unpickled))
    assert torch.equal(again(X), unpickled(X))
    monkeypatch.undo()
    kept = pickle.loads(pickle.dumps(unpickled))
    assert [k.name for k in kernels(kept)] == [k.name for k in kernels(unpickled)]


def test_kernels_come_back_where_they_fit():
    qmodel = quantized()
    written = pickled_elsewhere(qmodel)
    with pytest.MonkeyPatch.context() as there:
        there.setattr(OnednnConv, "check", refuse)
        with pytest.warns(FxqWarning, match="2 of its"):
            unpickled = pickle.loads(written)
    back = pickle.loads(pickled_elsewhere(unpickled))
    assert [type(k) for k in kernels(back)] == [type(k) for k in kernels(qmodel)]
    assert torch.equal(back(X), qmodel(X))


def test_a_form_has_the_tensors_of_its_kernel_as_they_are(monkeypatch):
    qmodel = quantized()
    conv = next(k for k in kernels(qmodel) if isinstance(k, OnednnConv))
    conv.bias.mul_(-2)
    expected = qmodel(X)
    written = pickled_elsewhere(qmodel)
    monkeypatch.setattr(OnednnConv, "check", refuse)
    with pytest.warns(FxqWarning, match="another machine"):
        unpickled = pickle.loads(written)
    torch.testing.assert_close(unpickled(X), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    (form, *_) = (k for k in kernels(unpickled) if isinstance(k, FallbackKernel))
    form.bias.mul_(-0.5)
    original = quantized()(X)
    torch.testing.assert_close(unpickled(X), original, rtol=0, atol=0.02 * float(original.abs().max()))


def test_a_kernel_that_is_wrong_here_is_found(monkeypatch):
    qmodel = quantized()
    written, expected, copied = pickled_elsewhere(qmodel), qmodel(X), copy.deepcopy(qmodel)
    qmodel.verify()
    right = OnednnConv._plan

    def wrong(self, shape):
        plan = right(self, shape)
        return plan._replace(run=lambda *x: plan.run(*x) // 2)

    monkeypatch.setattr(OnednnConv, "_plan", wrong)
    with pytest.raises(BackendError, match=r"2 of \d kernels .*: 0 \(x86\.conv\): it is off by \d+ steps; 2 "):
        copied.verify()
    with pytest.warns(FxqWarning, match=r"it is off by \d+ steps"):
        unpickled = pickle.loads(written)
    torch.testing.assert_close(unpickled(X), expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_autocast_is_no_reason_to_blame_a_kernel(recwarn):
    mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    qmodel = fxq.quantize(mlp, fxq.Recipe.static(optimize="coverage"), data=[torch.randn(8, 16)])
    written = pickled_elsewhere(qmodel)
    recwarn.clear()
    with torch.autocast("cpu", torch.bfloat16):
        qmodel.verify()
        unpickled = pickle.loads(written)
    assert not recwarn.list and not any(isinstance(kernel, FallbackKernel) for kernel in kernels(unpickled))


def test_a_kernel_without_a_form_is_refused(monkeypatch):
    qmodel = quantized()
    conv = next(k for k in kernels(qmodel) if isinstance(k, OnednnConv))
    conv.form = None
    written = pickled_elsewhere(qmodel)
    monkeypatch.setattr(OnednnConv, "check", refuse)
    with pytest.raises(
        BackendError,
        match=r"x86\.conv, which was inserted by hand and has no q/dq form, is wrong on this machine: not here",
    ):
        pickle.loads(written)


def test_a_table_is_asked_for_rows_that_it_has():
    torch.manual_seed(0)
    tables = nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 2)).eval()
    x = torch.tensor([[0, 2, 1]])
    for recipe in (fxq.Recipe.weight_only(), fxq.Recipe.dynamic(optimize="coverage")):
        qmodel = fxq.quantize(tables, recipe, example_inputs=x)
        there = pickle.loads(pickled_elsewhere(qmodel))
        torch.testing.assert_close(there(x), qmodel(x))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_weight_that_was_written_to_is_found(backend, tmp_path):
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 7)).eval()
    recipe = fxq.Recipe.weight_only(bits=4, backend=backend, optimize="coverage")
    qmodel = fxq.quantize(model, recipe, example_inputs=torch.randn(2, 40))
    qmodel.save(tmp_path / "m.fxq")
    copies = qmodel, copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))
    for copied in (*copies, fxq.load(tmp_path / "m.fxq")):
        copied(torch.randn(3, 40))
        copied.verify()
        name, stored = next((name, t) for name, t in copied.named_buffers() if t.dtype in (torch.uint8, torch.int8))
        stored[1, 2] ^= 4
        with pytest.raises(BackendError, match=rf"{name}.*not the values that fxq.quantize stored"):
            copied.verify()
        stored[1, 2] ^= 4
        copied.verify()


def test_weights_that_load_state_dict_sets_are_not_damaged(tmp_path):
    recipe, x = fxq.Recipe.weight_only(bits=4, optimize="coverage"), torch.randn(2, 40)
    models = [fxq.quantize(nn.Sequential(nn.Linear(40, 24)).eval(), recipe, example_inputs=x) for _ in range(2)]
    nn.ModuleList(models[:1]).load_state_dict(nn.ModuleList(models[1:]).state_dict())  # as a part of another module
    first, second = models
    assert torch.equal(first(x), second(x))
    first.verify()
    first.save(tmp_path / "m.fxq")
    for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), fxq.load(tmp_path / "m.fxq")):
        copied.verify()
        copied.load_state_dict(second.state_dict())
        copied.verify()


def test_models_of_earlier_versions_have_no_checksums(tmp_path):
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(40, 24)).eval(), "weight_only", example_inputs=torch.randn(2, 40))
    del qmodel.record.__dict__["stored"]
    loaded = pickle.loads(pickle.dumps(qmodel))
    assert loaded.record.stored is None
    loaded.verify()
    loaded.save(tmp_path / "m.fxq")
    fxq.load(tmp_path / "m.fxq").verify()


def test_a_process_that_only_unpickles_a_model_verifies_it(tmp_path):
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(40, 24)).eval(), "weight_only", example_inputs=torch.randn(2, 40))
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(qmodel))
    program = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb')).verify(); print('verified')"
    result = in_new_python(program, tmp_path / "m.pkl")
    assert result.stdout.strip() == "verified", result.stderr
