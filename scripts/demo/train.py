"""Train the demo's two networks on the CPU and write their weights next to this file.

    python -m scripts.demo.train            train, write demo_weights.safetensors, report
    python -m scripts.demo.train --report   only report on the weights that are there

Seeded: on one machine, with the same number of threads, two runs write the same file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

from scripts.demo.data import Digits, Pair, bicubic, digits, held_out_pairs, psnr, training_pairs
from scripts.networks.demo import DEMO_WEIGHTS, FSRCNN, DigitsNet, load_demo_networks


def train_fsrcnn(pairs: Pair, steps: int, batch: int = 16, rate: float = 3e-3, seed: int = 0) -> FSRCNN:
    """FSRCNN on mean squared error: Adam, one-cycle learning rate, patches flipped and turned at random."""
    torch.manual_seed(seed)
    network = FSRCNN()
    start_as_bicubic(network)
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps, pct_start=0.1)
    for _ in track(range(steps), "FSRCNN"):
        chosen = torch.randint(len(pairs.low), (batch,))
        low, high = turned(pairs.low[chosen], pairs.high[chosen])
        loss = F.mse_loss(network(low), high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def start_as_bicubic(network: FSRCNN) -> None:
    """Initialize the network as bicubic interpolation plus small noise: 1500 steps then gain more than 8000 do without.

    Channel 0 of every convolution passes the picture on. Its kernel in the transposed convolution is Keys' cubic
    (a = -0.75, as torch has it) at (k - 4.5) / 2, the distance that stride 2 and padding 4 give tap k. The other
    channels start as in Dong et al. 2016, section 4.1.
    """
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=0.25)  # 0.25 is the slope nn.PReLU starts with
            layer.weight[0] = 0
            layer.weight[0, 0, layer.kernel_size[0] // 2, layer.kernel_size[1] // 2] = 1
    nn.init.normal_(network.upsample.weight, std=1e-3)
    distance = (torch.arange(9) - 4.5).abs() / 2
    near = 1.25 * distance**3 - 2.25 * distance**2 + 1
    far = -0.75 * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    taps = torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros(())))
    network.upsample.weight[0, 0] = torch.outer(taps, taps)


def train_digits(data: Digits, epochs: int, batch: int = 64, rate: float = 3e-3, seed: int = 0) -> DigitsNet:
    """DigitsNet on cross entropy: AdamW, one-cycle learning rate, light noise on the images."""
    torch.manual_seed(seed)
    network = DigitsNet()
    steps = epochs * (len(data.train_images) // batch)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    for _ in track(range(steps), "DigitsNet"):
        chosen = torch.randint(len(data.train_images), (batch,))
        images = data.train_images[chosen]
        noisy = images + 0.05 * torch.randn(images.shape)
        loss = F.cross_entropy(network(noisy), data.train_labels[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def turned(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Both batches (N, 1, h, h) in the same one of the eight orientations of a square, drawn at random."""
    quarter, flip = divmod(int(torch.randint(8, ())), 2)
    sides = [3] if flip else []
    return low.rot90(quarter, (2, 3)).flip(sides), high.rot90(quarter, (2, 3)).flip(sides)


def save(fsrcnn: FSRCNN, digits_net: DigitsNet, path: Path) -> None:
    """Write both state dicts to one file, with the prefixes that `load_demo_networks` takes apart."""
    networks = {"fsrcnn": fsrcnn, "digits": digits_net}
    tensors = {f"{name}.{key}": value for name, net in networks.items() for key, value in net.state_dict().items()}
    save_file(tensors, path)


@torch.no_grad()
def report(fsrcnn: FSRCNN, digits_net: DigitsNet, console: Console) -> None:
    """Print PSNR on every held-out region against bicubic, and accuracy on the test digits."""
    table = Table("held-out region", "size", "bicubic dB", "FSRCNN dB", "gain dB")
    for name, (low, high) in held_out_pairs().items():
        before, after = psnr(bicubic(low), high), psnr(fsrcnn(low), high)
        size = f"{high.shape[2]}x{high.shape[3]}"
        table.add_row(name, size, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    console.print(table)

    slopes = torch.cat([layer.weight for layer in fsrcnn.modules() if isinstance(layer, nn.PReLU)])
    console.print(f"PReLU slopes: {slopes.min():.2f} to {slopes.max():.2f}, standard deviation {slopes.std():.2f}")

    data = digits()
    right = int((digits_net(data.test_images).argmax(1) == data.test_labels).sum())
    console.print(f"Digits: {right} of {len(data.test_labels)} right, {100 * right / len(data.test_labels):.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000, help="FSRCNN batches (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="DigitsNet epochs (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    parser.add_argument("--out", type=Path, default=DEMO_WEIGHTS, help="weights file (default %(default)s)")
    parser.add_argument("--report", action="store_true", help="do not train, only report on the weights file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)

    console = Console()
    if not arguments.report:
        start = time.perf_counter()
        fsrcnn = train_fsrcnn(training_pairs(), arguments.steps)
        digits_net = train_digits(digits(), arguments.epochs)
        save(fsrcnn, digits_net, arguments.out)
        size = arguments.out.stat().st_size / 1e3
        console.print(f"Trained in {time.perf_counter() - start:.0f} s, wrote {arguments.out} ({size:.0f} kB)")
    report(*load_demo_networks(arguments.out), console)


if __name__ == "__main__":
    main()
