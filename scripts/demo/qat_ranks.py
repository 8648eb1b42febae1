"""Train with fake quantizers on several processes: they have the scales and weights of one process on the joined batch.

    torchrun --nproc-per-node 2 scripts/demo/qat_ranks.py

Each trains FSRCNN's 4-bit form on its share of every batch, in DistributedDataParallel and with sharded parameters
(`fully_shard`). Rank 0 prints how far both are from one process that has all of it.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxq
from scripts.demo.data import Pair, training_pairs
from scripts.networks.demo import load_demo_networks

STEPS, BATCH = 20, 16
WEIGHT = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")


def loop(model: nn.Module, pairs: Pair, rank: int = 0, ranks: int = 1) -> None:
    """Train on a share of every batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    order = torch.randperm(len(pairs.low), generator=torch.Generator().manual_seed(0))
    for chosen in order.split(BATCH)[:STEPS]:
        share = chosen.chunk(ranks)[rank]
        optimizer.zero_grad()
        F.mse_loss(model(pairs.low[share]), pairs.high[share]).backward()
        optimizer.step()


def apart(state: dict[str, Tensor], other: dict[str, Tensor], of: str) -> float:
    """The largest difference, relative to the largest value, of the tensors whose names hold a word."""
    losses = [
        float((other[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-12))
        for name, tensor in state.items()
        if of in name and tensor.is_floating_point()
    ]
    return max(losses)


def main() -> None:
    """Train alone and together, and compare."""
    warnings.simplefilter("ignore", fxq.FxqWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    network, pairs = load_demo_networks()[0], training_pairs()
    rows: list[Any] = []
    for learned in (False, True):
        recipe = fxq.Recipe.qat(weight=WEIGHT, learned=learned)
        first: Any = fxq.prepare(network, recipe, example_inputs=pairs.low[:64])
        alone, whole, sharded = first, copy.deepcopy(first), copy.deepcopy(first)
        alone.group = None
        loop(alone, pairs)
        loop(DistributedDataParallel(whole), pairs, rank, ranks)
        fully_shard(sharded)
        loop(sharded, pairs, rank, ranks)
        gathered = {
            name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in sharded.state_dict().items()
        }
        scales = "factor" if learned else "scale"
        for how, state in (("DistributedDataParallel", whole.state_dict()), ("fully_shard", gathered)):
            distances = (apart(alone.state_dict(), state, word) for word in (scales, "weight"))
            rows.append(("learned scales" if learned else "ranges", how, *(f"{value:.1e}" for value in distances)))
    if rank == 0:
        print(tabulate(rows, ("", f"{ranks} ranks", "scales apart by", "weights apart by"), tablefmt="github"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
