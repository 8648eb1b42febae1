"""Synthetic calibration data: statistics of batch norms are matched, and what cannot be matched is refused."""

import pytest
import torch
from torch import nn

import fxq


def network(seed=0):
    """Small CNN whose batch norms have recorded images with channel means far from 0."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    model.train()
    with torch.no_grad():
        for _ in range(40):
            model(images(16))
    return model.eval()


def images(count):
    return torch.tensor([3.0, -1.0, 0.5])[:, None, None] + torch.randn(count, 3, 16, 16) * 0.5


def distance(model, batch):
    """Mean distance of the means of the batch norms' inputs from the recorded ones, in standard deviations."""
    distances = []

    def record(norm, inputs):
        mean = inputs[0].mean((0, 2, 3))
        distances.append(((mean - norm.running_mean) / norm.running_var.sqrt()).abs().mean())

    hooks = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(distances).mean())


@pytest.mark.slow
def test_the_statistics_are_matched():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(fxq.FxqWarning, match="the calibration data is synthetic"):
        start = fxq.synthetic(model, (8, 3, 16, 16), batches=1, steps=0)[0]
    with pytest.warns(fxq.FxqWarning, match="real data"):
        data = fxq.synthetic(model, (8, 3, 16, 16), batches=2, steps=60)
    assert [tuple(batch.shape) for batch in data] == [(8, 3, 16, 16)] * 2
    assert not torch.equal(data[0], data[1])
    assert distance(model, data[0]) < 0.25 * distance(model, start)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_few_steps_move_the_mean_of_images():
    start, moved = (fxq.synthetic(network(), (8, 3, 16, 16), batches=1, steps=steps)[0] for steps in (0, 10))
    assert distance(network(), moved) < 0.35 * distance(network(), start)


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_images_differ_in_contrast_at_each_scale():
    (batch,) = fxq.synthetic(network(), (16, 3, 128, 128), batches=1, steps=0)
    coarse = torch.nn.functional.avg_pool2d(batch, 32)
    fine = batch - torch.nn.functional.interpolate(coarse, (128, 128), mode="bilinear")
    for contrast in (part.std((1, 2, 3)) for part in (coarse, fine)):
        assert float(contrast.max() / contrast.min()) > 2.5


def test_ranges_come_close_to_those_of_real_data():
    model = network()
    with pytest.warns(fxq.FxqWarning, match="real data"):
        data = fxq.synthetic(model, (8, 3, 16, 16), batches=2)
    real, x = [images(8) for _ in range(2)], images(32)
    noise = [torch.randn(8, 3, 16, 16) for _ in range(2)]
    sqnr = {}
    for name, calibration in {"real": real, "synthetic": data, "noise": noise}.items():
        q = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=calibration)
        error = (model(x) - q(x)).square().sum()
        sqnr[name] = float(10 * torch.log10(model(x).square().sum() / error))
    assert sqnr["synthetic"] > sqnr["noise"] + 3
    assert sqnr["synthetic"] > sqnr["real"] - 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_values_of_images_stay_within_the_bounds():
    low, high = -3.0, 5.0
    data = fxq.synthetic(network(), (8, 3, 16, 16), bounds=(low, high), batches=2, steps=40)
    assert all(low <= float(batch.min()) and float(batch.max()) <= high for batch in data)
    assert distance(network(), data[0]) < 0.1  # in standard deviations


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_bounds_of_inputs_that_are_no_images():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval()
    (batch,) = fxq.synthetic(model, (256, 6), bounds=(0, 1), batches=1, steps=3)
    assert float(batch.min()) >= 0 and float(batch.max()) <= 1


def test_a_warning_advises_bounds():
    with pytest.warns(fxq.FxqWarning, match="pass them as bounds"):
        fxq.synthetic(network(), (2, 3, 16, 16), batches=1, steps=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_computed_where_they_are_off(mode):
    model = network()
    with mode(), pytest.warns(fxq.FxqWarning):
        data = fxq.synthetic(model, (2, 3, 16, 16), batches=1, steps=2)
    assert data[0].isfinite().all()


def test_refusals():
    with pytest.raises(fxq.InputError, match=r"the model has no batch norm with recorded statistics"):
        fxq.synthetic(nn.Linear(3, 3).eval(), (2, 3))
    with pytest.raises(fxq.InputError, match=r"call model.eval\(\) first"):
        fxq.synthetic(nn.BatchNorm1d(3), (2, 3))
    with pytest.raises(fxq.InputError, match=r"not the shape of a batch"):
        fxq.synthetic(network(), (3,))
    with pytest.raises(fxq.InputError, match=r"at least 1 batch"):
        fxq.synthetic(network(), (2, 3, 16, 16), batches=0)
    for bounds in ((1, 0), (0, float("inf")), (float("nan"), 1), (0, 1, 2)):
        with pytest.raises(fxq.InputError, match=r"bounds is .*, not the smallest and the largest value"):
            fxq.synthetic(network(), (2, 3, 16, 16), bounds=bounds)
    unused = nn.Linear(3, 3).eval()
    unused.norm = nn.BatchNorm1d(3).eval()
    with pytest.raises(fxq.InputError, match=r"calls none of its batch norms"):
        fxq.synthetic(unused, (2, 3))


def test_synchronized_batch_norms_count():
    network = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    with pytest.warns(fxq.FxqWarning, match="synthetic"):
        (batch,) = fxq.synthetic(network, (2, 3, 8, 8), batches=1, steps=2)
    assert batch.isfinite().all()


class _TwoInputs(nn.Sequential):
    def forward(self, x, y):
        return super().forward(x + y)


class _WithoutGradients(nn.Sequential):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    ("network_type", "channels", "variance", "reason"),
    [
        (nn.Sequential, 4, 1.0, r"cannot compute a float batch of shape \(2, 4, 8, 8\), as the only input"),
        (_TwoInputs, 3, 1.0, r"as the only input: TypeError.*missing 1 required"),
        (_WithoutGradients, 3, 1.0, r"does not depend on the batch"),
        (nn.Sequential, 3, float("nan"), r"is not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_models_that_cannot_be_matched(network_type, channels, variance, reason):
    network = network_type(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    network[1].running_var.fill_(variance)
    with pytest.raises(fxq.InputError, match=reason):
        fxq.synthetic(network, (2, channels, 8, 8), batches=1, steps=2)
