import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fxq
from fxq.graph.region import Weight
from fxq.ledger.layer_qparams import LayerQParams
from fxq.quant.qparams import QParams
from tests.support.graphs import expected

EIGHT = QParams(torch.tensor([0.5, 0.25]), torch.zeros(2, dtype=torch.int32), -127, 127, torch.int8, 0)
BLOCKS = QParams(torch.tensor([[0.5, 1.0], [2.0, 4.0]]), torch.zeros(2, 2, dtype=torch.int32), -7, 7, torch.int8, 1, 2)


def ints(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.int8).reshape(shape)


LAYERS = {
    "conv": LayerQParams(
        weights={"weight": Weight(ints(2, 3), EIGHT)},
        gates={},
        biases={"bias": torch.tensor([7, -3], dtype=torch.int32)},
        bias_scale=torch.tensor([0.05, 0.025]),
        float_bias_reason="",
        reads="integers",
        input_scale=0.1,
        input_zero_point=128,
        output_scale=0.2,
        output_zero_point=0,
        node="conv_relu",
    ),
    "rnn": LayerQParams(
        weights={"weight_ih": Weight(ints(2, 4), EIGHT), "weight_hh": Weight(ints(2, 4), BLOCKS)},
        gates={"r": slice(0, 1), "z": slice(1, 2)},
        biases={"bias_ih": torch.tensor([0.5, 1.5]), "bias_hh": torch.tensor([1.0, 2.0])},
        bias_scale=None,
        float_bias_reason="its input is float",
        reads="float",
        input_scale=None,
        input_zero_point=None,
        output_scale=None,
        output_zero_point=None,
        node="gru",
    ),
}
TABLE = fxq.results.ModelQParams(LAYERS)


def test_as_a_table():
    assert TABLE.to_text() == expected("""
        2 layers with integer weights: 0.0 kB without scales and biases
        layer    weight              scale      zero point    per                 bias                         input     output
        -------  ------------------  ---------  ------------  ------------------  ---------------------------  --------  --------
        conv     int8 2×3            0.25..0.5  0             channel, axis 0     int32                        0.1, 128  0.2, 0
        rnn      weight_ih int8 2×4  0.25..0.5  0             channel, axis 0     float32: its input is float  float     float
                 weight_hh int4 2×4  0.5..4     0             block of 2, axis 1
    """)  # noqa: E501
    assert repr(TABLE) == "<ModelQParams: 2 layers>" and "block of 2" in TABLE._repr_html_()


def test_one_layer_and_none():
    assert fxq.results.ModelQParams({}).to_text() == "0 layers with integer weights: 0.0 kB without scales and biases"
    assert fxq.results.ModelQParams({"conv": LAYERS["conv"]}).to_text().startswith("1 layer with")


def test_as_a_mapping():
    assert dict(TABLE) == LAYERS and TABLE["conv"] is LAYERS["conv"] and "fc" not in TABLE
    with pytest.raises(KeyError):
        TABLE["fc"]


def test_as_a_dict():
    data = TABLE.to_dict()
    assert data["conv"]["weight"] is LAYERS["conv"].weight and data["conv"]["weight_scale"] is EIGHT.scale
    assert {key: value for key, value in data["rnn"].items() if not isinstance(value, torch.Tensor)} == {
        "weight_ih_axis": 0,
        "weight_ih_block": None,
        "weight_ih_bits": 8,
        "weight_hh_axis": 1,
        "weight_hh_block": 2,
        "weight_hh_bits": 4,
        "gates": {"r": [0, 0], "z": [1, 1]},
        "bias_scale": None,
        "float_bias_reason": "its input is float",
        "reads": "float",
        "input_scale": None,
        "input_zero_point": None,
        "output_scale": None,
        "output_zero_point": None,
        "node": "gru",
        "input_factors": None,
        "input_rotation": None,
    }


def read_npz(path):
    with np.load(path) as file:
        arrays = dict(file)
    return arrays, json.loads(str(arrays.pop("layers")))


def read_safetensors(path):
    with safe_open(path, "np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["layers"])  # noqa: SIM118


@pytest.mark.parametrize(("name", "read"), [("a/p.npz", read_npz), ("a/p.SafeTensors", read_safetensors)])
def test_as_a_file(name, read, tmp_path):
    path = TABLE.save(tmp_path / name)
    assert path == tmp_path / name
    arrays, texts = read(path)
    want = {
        f"{layer}.{key}": value
        for layer, entry in TABLE.to_dict().items()
        for key, value in entry.items()
        if isinstance(value, (torch.Tensor, int, float))
    }
    assert arrays.keys() == want.keys()
    for key, value in want.items():
        value = value.numpy() if isinstance(value, torch.Tensor) else np.array(value)
        np.testing.assert_array_equal(arrays[key], value)
        assert (arrays[key].dtype, arrays[key].shape) == (value.dtype, value.shape)
    assert arrays["rnn.bias_hh"].dtype == np.float32 and arrays["conv.bias"].dtype == np.int32
    conv = {"gates": {}, "float_bias_reason": "", "reads": "integers", "node": "conv_relu"}
    rnn = {"gates": {"r": [0, 0], "z": [1, 1]}, "float_bias_reason": "its input is float"}
    assert texts == {"conv": conv, "rnn": {**rnn, "reads": "float", "node": "gru"}}


def test_a_real_model_and_its_channels_last_weights(tmp_path):
    model = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval().to(memory_format=torch.channels_last)
    )
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[torch.randn(2, 3, 6, 6)])
    layers = qmodel.qparams()
    for read, path in ((read_npz, "p.npz"), (read_safetensors, "p.safetensors")):
        arrays, _ = read(layers.save(tmp_path / path))
        for name, layer in layers.items():
            assert np.array_equal(arrays[f"{name}.weight"], layer.weight.numpy())
            bias = model[int(name)].bias.detach().double().numpy()
            real = arrays[f"{name}.bias"] * arrays[f"{name}.bias_scale"].astype(np.float64)
            assert np.abs(real - bias).max() <= 0.5001 * arrays[f"{name}.bias_scale"].max()


@pytest.mark.parametrize("name", ["p.txt", "p"])
def test_another_ending_is_refused(name, tmp_path):
    with pytest.raises(fxq.RenderError, match=f"cannot save to '{name}': .* must be .npz or .safetensors"):
        TABLE.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_is_no_path_is_refused():
    with pytest.raises(fxq.InputError, match="named by a str or a path, not by 3"):
        TABLE.save(3)


def test_weights_in_float16(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2)).eval()
    layer_qparams = fxq.quantize(
        model, fxq.Recipe.weight_only(dtype=torch.float16), example_inputs=torch.rand(3, 4)
    ).qparams()
    assert "float16 2×4" in str(layer_qparams) and layer_qparams.to_dict()["0"]["weight_bits"] == 16
    layer_qparams.save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as file:
        assert file["0.weight"].dtype == np.float16 and "allow_pickle" not in file
