"""Training on several ranks: the same scales and weights as one process on the joined batch; sharded parameters."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxq
from fxq.errors import InputError
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight
from tests.support.processes import on_ranks
from tests.support.trainings import W4, prepared


class Plain(nn.Module):
    """Without batch norm, whose statistics are each rank's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.head(torch.relu(self.second(y) + y).mean((2, 3)))


def _loop(model, rank=0, ranks=1, rate=0.1, steps=4):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        x, y = torch.randn(8, 3, 10, 10), torch.randint(0, 4, (8,))
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("learned", [False, True])
def test_two_ranks_train_as_one_process_on_the_joined_batch(tmp_path, learned):
    torch.manual_seed(0)
    model, x = Plain().eval(), torch.randn(8, 3, 10, 10)
    recipe = fxq.Recipe.qat(backend="reference", learned=learned)
    steps = 2 if learned else 4  # a weight that training moves to the middle between integers may fall on either side

    def work(rank):
        trainee = prepared(model, x, recipe)
        _loop(DistributedDataParallel(trainee), rank, 2, steps=steps)
        return trainee.state_dict()

    alone = prepared(model, x, recipe)
    _loop(alone, steps=steps)
    first, second = on_ranks(2, tmp_path / "ddp", work)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_sharded_parameters(tmp_path):
    torch.manual_seed(0)
    model, x = Plain().eval(), torch.randn(8, 3, 10, 10)
    recipe = fxq.Recipe.qat(backend="reference", learned=True)

    def work(rank):
        whole = prepared(model, x, recipe)
        _loop(DistributedDataParallel(whole), rank, 2)
        sharded = prepared(model, x, recipe)
        fully_shard(sharded)
        _loop(sharded, rank, 2)
        return fxq.convert(whole)(x), fxq.convert(sharded)(x)

    for whole, sharded in on_ranks(2, tmp_path / "fsdp", work):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-5)


def test_sharding_that_the_forward_does_not_undo(tmp_path):
    model, x = Plain().eval(), torch.randn(8, 3, 10, 10)

    def work(rank):
        layers, halved = prepared(model, x), prepared(model, x)
        fully_shard(layers.get_submodule("first"))
        fully_shard(layers)
        fully_shard(halved, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        results = []
        for sharded in (layers, halved):
            with pytest.raises(InputError) as error:
                sharded(x)
            results.append(str(error.value))
        return results

    for layers, halved in on_ranks(2, tmp_path / "layers", work):
        assert "is sharded in the forward: call fully_shard on the whole model, not on layers" in layers
        assert "is torch.bfloat16, but was torch.float32 when the model was prepared" in halved


@pytest.mark.slow
def test_sharded_weights_are_frozen_as_whole_ones(tmp_path):
    torch.manual_seed(0)
    model, x = Plain().eval(), torch.randn(8, 3, 10, 10)
    recipe = fxq.Recipe.qat(backend="reference", weight=replace(W4, bits=2), learned=True, freeze_weights_over=8)

    def work(rank):
        results = []
        for sharded in (False, True):
            trainee = prepared(model, x, recipe)
            run = (fully_shard(trainee) or trainee) if sharded else DistributedDataParallel(trainee)
            for _ in range(4):
                _loop(run, rank, 2, rate=2.0)
            frozen = [m.oscillation.frozen for m in trainee.modules() if isinstance(m, FakeQuantizeWeight)]
            results.append((torch.cat([f.flatten() for f in frozen]), fxq.convert(trainee)(x)))
        return results

    for (whole, wanted), (sharded, output) in on_ranks(2, tmp_path / "frozen", work):
        assert whole.any()
        assert torch.equal(sharded, whole)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


def test_a_rank_by_itself(tmp_path):
    model, x = Plain().eval(), torch.randn(8, 3, 10, 10)

    def work(rank):
        trainee = prepared(model, x)
        trainee.group = None
        trainee(x * (rank + 1))
        trainee.use_ranges()
        return [float(m.high) for m in trainee.modules() if isinstance(m, FakeQuantizeValue)]

    first, second = on_ranks(2, tmp_path / "alone", work)
    assert second[0] == 2 * first[0]
