"""Repeated commands on a busy machine give the same graph, also when several processes share one cache."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, sys
import torch
sys.path.insert(0, sys.argv[1])
import fxq, mobile, resnet
NETWORKS = {
    "resnet18": resnet.resnet18, "mobilenet_v2": mobile.mobilenet_v2,
    "mobilenet_v3_large": mobile.mobilenet_v3_large, "efficientnet_b0": mobile.efficientnet_b0,
}
torch.manual_seed(0)
model = NETWORKS[sys.argv[2]]().eval()
quantized = fxq.quantize(model, fxq.Recipe.static(backend="x86"), data=[torch.randn(2, 3, 64, 64)])
text = fxq.extend.write_graph(quantized, facts=False)
print(hashlib.sha256(text.encode()).hexdigest(), quantized.ledger.count("int8"))
"""


def spin():
    while True:
        pass


@pytest.fixture
def busy():
    """A busy process on each CPU."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"])
def test_three_processes_beside_a_busy_one_on_each_cpu(busy, tmp_path, name):
    scripts = Path(__file__).parents[2] / "scripts" / "networks"
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(scripts), name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FXQ_CACHE": str(tmp_path)}
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [run.communicate()[0].strip() for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert results[0] and set(results) == {results[0]}
