"""How long a quantized model takes to write and to read, and how large its file is.

    python -m scripts.bench.files            resnet50, without weights of its own, calibrated on 128 images

Reading is timed in a process of its own, after `import fxq`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxq
from scripts.bench import history
from scripts.networks import resnet

READ = """
import sys, time, torch, fxq
torch.set_num_threads(1)
begin = time.perf_counter()
fxq.load(sys.argv[1])
print(time.perf_counter() - begin)
"""


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def read_elsewhere(path: Path) -> float:
    """Seconds to load a file in a fresh process."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(network: nn.Module, images: torch.Tensor, repeats: int) -> tuple[dict[str, float], int, int, bool]:
    """Seconds to quantize, save and load, and the bytes of both files."""
    qmodel, quantize = timed(lambda: fxq.quantize(network, "static", data=images.split(8)))
    x = images[:1]
    with tempfile.TemporaryDirectory() as folder:
        path, floats = Path(folder) / "model.fxq", Path(folder) / "float.pt"
        save = min(timed(lambda: qmodel.save(path))[1] for _ in range(repeats))
        load = min(read_elsewhere(path) for _ in range(repeats))
        torch.save(network.state_dict(), floats)
        same = torch.equal(fxq.load(path)(x), qmodel(x))
        return {"quantize": quantize, "save": save, "load": load}, path.stat().st_size, floats.stat().st_size, same


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", default="resnet50", help="a function of scripts/networks/resnet.py")
    parser.add_argument("--size", type=int, default=224, help="pixels of the images")
    parser.add_argument("--images", type=int, default=128, help="images to calibrate with")
    parser.add_argument("--repeats", type=int, default=3, help="the shortest of so many counts")
    history.add_argument(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    network = getattr(resnet, options.network)().eval()
    shape = options.images, 3, options.size, options.size
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    seconds, size, float_size, same = measure(network, images, options.repeats)
    numbers = [(options.network, f"time to {step}", duration, "s") for step, duration in seconds.items()]
    numbers.append((options.network, "file size, of the float file", size / float_size, "times"))
    history.append(options.history, "bench.files", numbers)
    for operation, times in seconds.items():
        print(f"{operation:<10} {times:8.2f} s")
    print(f"loading is {seconds['quantize'] / seconds['load']:.0f} times as fast as quantizing")
    print(f"{'file':<10} {size / 1e6:8.1f} MB\n{'float':<10} {float_size / 1e6:8.1f} MB")
    print("the loaded model computes the same, bit for bit" if same else "THE LOADED MODEL COMPUTES OTHER NUMBERS")


if __name__ == "__main__":
    main()
