"""Damaged and forged files: each is an error that says so, or the same model; none runs code or fills the memory."""

import copy
import os
import random
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import fxq
from tests.support.hostile import Parts

pytestmark = [pytest.mark.any_cpu, pytest.mark.last]  # the audit hook of this module stays
X = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
STRANGE = ("this", "antigravity", "turtledemo")
"""Modules of Python that no library imports, and whose import has visible effects."""


class Watch:
    """Audit hook that records forbidden events and imports while it is on."""

    def __init__(self):
        self.on, self.seen = False, []

    def hook(self, event, args):
        if self.on and (event in FORBIDDEN or (event == "import" and args[0] in STRANGE)):
            self.seen.append((event, str(args)[:80]))


WATCH = Watch()


class Net(nn.Module):
    """Kernels, units in float, a float layer, a constant, a check of sizes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        self.inputs = {"size": (8, 8), "names": ["x"]}
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x, scale: float = 1.0):
        y = torch.relu(self.a(x))
        y = torch.relu(self.b(y) + y).mean((2, 3)) + self.shift
        return self.c(y) * scale


@pytest.fixture(autouse=True, scope="module")
def watched():
    """Python has no way to remove an audit hook."""
    sys.addaudithook(WATCH.hook)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    recipe = fxq.Recipe.static(backend="reference").override("c", fxq.FLOAT)
    models = {}
    for backend in ("reference", "auto"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = fxq.quantize(Net().eval(), recipe.with_backend(backend).with_optimize("coverage"), data=[X])
        models[backend] = model, model.save(tmp_path_factory.mktemp("files") / f"{backend}.fxq")
    return models


def load(path, data):
    """The model that is loaded from a file of these bytes, or the message of the error."""
    path.write_bytes(data)
    WATCH.seen, WATCH.on = [], True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fxq.load(path)
    except fxq.FxqError as error:
        assert isinstance(error, fxq.FileError), repr(error)
        return str(error)
    finally:
        WATCH.on = False
        assert WATCH.seen == []


def check(path, data, model):
    """It is refused, or is the same model."""
    loaded = load(path, data)
    if isinstance(loaded, str):
        assert str(path) in loaded and len(loaded) < 2000
    else:
        assert torch.equal(loaded(X), model(X))
    return loaded


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_damaged_files(saved, tmp_path, backend):
    """Cut off, a bit turned, bytes put in, anywhere: found by checksums, or in what says nothing."""
    model, path = saved[backend]
    good, draw = path.read_bytes(), random.Random(0)
    length = int.from_bytes(good[:8], "little")
    cut = [good[: draw.randrange(len(good))] for _ in range(20)]
    turned = []
    for at in [
        *range(8),
        *(draw.randrange(8, 8 + length) for _ in range(60)),
        *(draw.randrange(len(good)) for _ in range(20)),
    ]:
        turned.append(good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :])
    put_in = []
    for _ in range(10):
        at = draw.randrange(len(good))
        put_in.append(good[:at] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9))) + good[at:])
    results = [
        check(tmp_path / "m.fxq", data, model) for data in (*cut, *turned, *put_in, b"", b"\0" * 64, good + b"\0")
    ]
    assert all(isinstance(outcome, str) for outcome in results[: len(cut)])
    assert sum(isinstance(outcome, str) for outcome in results) > 0.9 * len(results)


LINES = [
    "y = __import__('os').system('touch HERE')",
    "y = os.system('touch HERE')",
    "y = eval('1')",
    "y = torch.load('HERE')",
    "y = torch.ops.load_library('HERE')",
    "y = torch.zeros(10 ** 9)",
    "y = operator.attrgetter('system')",
    "y = getattr(XX, '__class__')",
    "s = input(default='__class__')\ny = getattr(XX, s)",
    "y = XX.__class__()",
    "y = XX.apply_(len)",
    "self = relu(XX)",
    "y = input('self')",
    "y = input('a')\nz = input('a')",
    "y = input(default=relu)",
    "y = relu(XX, Plan(decision=Decision('float', text='__import__(\"os\")')))",
    "y = relu(XX, {Plan(decision=Decision('float')): 1})",
    "y = make_output('subprocess:Popen', {'args': 'touch HERE'})",
    "y = make_output('shelve:DbfilenameShelf', {'filename': 'HERE'})",
    "y = make_output('fxq.recipe.recipe:Recipe', {'backend': 'this:x'})",
    "y = torch.nn.functional.triplet_margin_with_distance_loss(XX, XX, XX, distance_function=XX)",
    "modules['y'] = os.system('touch HERE')",
    "modules['y'] = x86.conv()",
    "modules['y'] = x86.conv(x=1, weight=tensor('c.weight'))",
    "modules['y'] = cpu.lookup(table=tensor('c.weight'))",
    "modules['y'] = observer(spec=TensorSpec(observer='this:x'), axis=None)",
    "modules['y'] = leaf('Linear')",
    "modules['__class__'] = cpu.mean()",
    "y: float32[1000000000, 1000000000, 1000000000] = relu(XX)",
    "y = relu(" + "(" * 5000 + "XX" + ")" * 5000 + ")",
    "y = relu(" + "-" * 100_000 + "1)",
    "y = relu(" + "1+" * 10_000 + "1)",
    "y = relu(" + "0," * 600_000 + ")",
    "y = relu('" + "x" * 3_000_000 + "')",
    "y = relu(XX)  # " + "[" * 300,
    "XX = relu(XX)",
    "return XX",
    "def relu(x):\n    return x",
    "def again():\n    def again():\n        return 1",
    "y = tensor('../../etc/passwd')",
    "y = tensor('c.weight.data')",
    "import os",
    "\0",
    "y = relu(XX)\r\nimport os",
]


def first_input(text):
    return next(line for line in text.splitlines() if "= input(" in line and not line.startswith(" "))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_forged_graphs(saved, tmp_path, backend):
    """Forged lines after the first line, with correct checksums."""
    model, path = saved[backend]
    home = tmp_path / "here"
    home.mkdir()
    for line in LINES:
        if len(line) > 10_000 and backend == "reference":
            continue
        parts = Parts(path)
        first = first_input(parts.texts["graph"])
        name = first.partition(":")[0]
        line = line.replace("XX", name).replace("HERE", str(home / "touched"))
        for text in ("graph", "forms") if backend == "auto" and len(line) < 10_000 else ("graph",):
            anchor = first if text == "graph" else parts.texts["forms"].split("\n", 1)[0]
            forged = parts.texts[text].replace(anchor, f"{anchor}\n{line}", 1) if anchor else line
            outcome = check(tmp_path / "m.fxq", parts.data({text: forged}), model)
            if text == "graph":
                assert isinstance(outcome, str), line[:80]
        assert list(home.iterdir()) == []


def places(data, collected=()):
    """Where in plain data something stands."""
    yield collected
    if isinstance(data, (dict, list)):
        for key in data if isinstance(data, dict) else range(min(len(data), 3)):
            yield from places(data[key], (*collected, key))


def changed(data, place, value):
    if not place:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


STRANGERS = [None, True, -1, 10**30, 1e400, float("nan"), "", "os:system", "this:x", [], [[]], {}, {"a": {}}, ["x"] * 3]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("part", ["model", "tensors", "history", "recipe"])
def test_forged_records(saved, tmp_path, backend, part):
    """Another kind of value in every place, with checksums that are right."""
    model, path = saved[backend]
    good, draw = getattr(Parts(path), part), random.Random(0)
    everywhere = list(places(good))
    for place in draw.sample(everywhere, min(len(everywhere), 60)):
        parts = Parts(path)
        setattr(parts, part, changed(good, place, draw.choice(STRANGERS)))
        loaded = load(tmp_path / "m.fxq", parts.data())
        if not isinstance(loaded, str):
            loaded.recipe, loaded.history, loaded.ledger  # noqa: B018
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert loaded(X).shape == model(X).shape


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"backend": "this:x"}, "loading a file imports no code: `import this` first"),
        ({"backend": "os:system"}, "is not a subclass of Backend"),
        ({"extensions": ["this:x"]}, "loading a file imports no code"),
        ({"extensions": ["os:system"]}, "is neither an op nor a kernel"),
        ({"fusions": ["antigravity:fly"]}, "loading a file imports no code"),
        ({"fusions": ["os:system"]}, "is not a fusion"),
        ({"pass": [{"insert": "this:P", "after": "fuse"}]}, "loading a file imports no code"),
        (
            {"pass": [{"insert": "subprocess:Popen", "after": "fuse", "options": {"args": "ls"}}]},
            "not a subclass of Pass",
        ),
        ({"override": [{"module": "turtledemo:M", "config": {}}]}, "loading a file imports no code"),
        ({"config": {"activation": {"observer": "this:x"}}}, "loading a file imports no code"),
        ({"preset": "statik"}, "unknown preset"),
        ({"mood": "good"}, "unknown recipe key"),
    ],
)
def test_forged_recipes(saved, tmp_path, data, why):
    parts = Parts(saved["auto"][1])
    parts.recipe = {**parts.recipe, **data}
    assert why in load(tmp_path / "m.fxq", parts.data())


def test_forged_tensors(saved, tmp_path):
    """Of another type, shape, place or name."""
    for model, path in saved.values():
        names = [name for name, about in Parts(path).header.items() if about["shape"]]
        for name in names:
            for change in (
                {"dtype": "F64"},
                {"shape": [0]},
                {"shape": [10**12]},
                {"shape": [2**62, 4]},
                {"data_offsets": [0, 1]},
            ):
                parts = Parts(path)
                parts.header[name].update(change)
                assert isinstance(check(tmp_path / "m.fxq", parts.data(), model), str)
            same = {"U8": "I8", "I8": "U8", "F32": "I32", "I32": "F32", "I64": "F64"}[Parts(path).header[name]["dtype"]]
            named = {"U8": "uint8", "I8": "int8", "F32": "float32", "I32": "int32", "F64": "float64"}[same]
            parts = Parts(path)
            parts.header[name]["dtype"] = same
            parts.tensors[name]["type"] = f"{named}[{parts.tensors[name]['type'].partition('[')[2]}"
            loaded = load(tmp_path / "m.fxq", parts.data())
            assert isinstance(loaded, str), f"{name} as {same}"
            parts = Parts(path)
            shape = parts.header[name]["shape"]
            if len(shape) > 1 or shape[0] > 1:
                flat = [*shape[1:], shape[0]] if len(set(shape)) > 1 else [1, *shape]
                parts.header[name]["shape"] = flat
                parts.tensors[name] = {
                    **parts.tensors[name],
                    "type": parts.tensors[name]["type"].partition("[")[0] + str(flat),
                }
                parts.tensors[name].pop("stride", None)
                check(tmp_path / "m.fxq", parts.data(), model)  # a kernel may take scales of another shape


def test_swapped_and_missing_tensors(saved, tmp_path):
    for model, path in saved.values():
        good = Parts(path)
        for a, b in zip(good.header, [*good.header][1:], strict=False):
            swapped = Parts(path)
            swapped.header[a], swapped.header[b] = swapped.header[b], swapped.header[a]
            check(tmp_path / "m.fxq", swapped.data({"tensors": good.texts["tensors"]}), model)  # some have equal values
        gone = Parts(path)
        del gone.header[next(iter(gone.header))]
        assert isinstance(check(tmp_path / "m.fxq", gone.data(), model), str)
        strange = Parts(path)
        strange.tensors["more"] = {"type": "float32[4]", "same_as": "nothing"}
        assert "which is missing" in check(tmp_path / "m.fxq", strange.data(), model)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ({"version": "2"}, "version 2 of the format, and this fxq reads version 1: install a newer fxq"),
        ({"version": "-1"}, "not a model file of fxq"),
        ({"version": "9" * 5000}, "not a model file of fxq"),
        ({"version": "¹"}, "not a model file of fxq"),
        ({"format": "pt"}, "not a model file of fxq"),
        ({"model": "[" * 100_000}, "its JSON is invalid"),
        ({"model": "{}"}, "a StoredModel has the fields"),
        ({"model": "null"}, "expected a StoredModel"),
        ({"tensors": '{"a": 1, "a": 1}'}, "has a key twice"),
        ({"history": '{"views": [], "steps": [], "first_loss": null} x'}, "its JSON is invalid"),
        ({"graph": ""}, "the text ends too early"),
        ({"forms": "x = input()"}, "form"),
    ],
)
def test_forged_texts(saved, tmp_path, texts, why):
    model, path = saved["auto"]
    assert why in check(tmp_path / "m.fxq", Parts(path).data(texts), model)


def test_none_of_them_fills_the_memory(saved, tmp_path):
    """Shapes of many gigabytes, also in a file from another machine, whose kernels are tried out on made-up values."""
    _, path = saved["auto"]
    large = ("float32[1, 3, 8, 8]", "float32[100000, 300, 800, 8]"), ("uint8[1, 8, 8, 8]", "uint8[10000000, 8, 80, 80]")
    for i, there in enumerate([{}, {"CPU": "another"}]):
        parts = Parts(path)
        parts.model["made_on"] = {**parts.model["made_on"], **there}
        texts = {}
        for text in ("graph", "forms"):
            texts[text] = parts.texts[text]
            for small, big in large:
                texts[text] = texts[text].replace(small, big)
        (tmp_path / f"{i}.fxq").write_bytes(parts.data(texts))
    parts = Parts(path)
    (tmp_path / "2.fxq").write_bytes(parts.data({"graph": "y = f(" + "0," * 3_000_000 + ")"}))
    code = f"""
import resource, sys, warnings, fxq
warnings.simplefilter("ignore")
fxq.load({str(path)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(3):
    try:
        fxq.load({str(tmp_path)!r} + f"/{{i}}.fxq")
    except fxq.FileError as error:
        print(str(error)[:200])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100_000, done.stdout  # kB
