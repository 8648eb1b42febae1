"""Networks whose trained weights come out of packages that need more than torch: MTCNN's three, and CREPE.

Layers have the names that the packages' files give them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ProposalNet(nn.Module):
    """MTCNN's first: which places of a picture may hold a face of 12 pixels.

    Source: Zhang et al. 2016, "Joint Face Detection and Alignment", figure 2, as in facenet-pytorch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.pool1 = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.conv2, self.prelu2 = nn.Conv2d(10, 16, 3), nn.PReLU(16)
        self.conv3, self.prelu3 = nn.Conv2d(16, 32, 3), nn.PReLU(32)
        self.conv4_1, self.conv4_2 = nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, h, w) from -1 to 1 -> corrections of boxes (N, 4, h', w'), probabilities (N, 2, h', w')."""
        x = self.pool1(self.prelu1(self.conv1(x)))
        x = self.prelu3(self.conv3(self.prelu2(self.conv2(x))))
        return self.conv4_2(x), self.conv4_1(x).softmax(1)


class RefinementNet(nn.Module):
    """MTCNN's second: whether 24x24 pixels are a face, and where exactly.

    Source: as of `ProposalNet`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 28, 3), nn.PReLU(28)
        self.pool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2, self.prelu2 = nn.Conv2d(28, 48, 3), nn.PReLU(48)
        self.pool2 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv3, self.prelu3 = nn.Conv2d(48, 64, 2), nn.PReLU(64)
        self.dense4, self.prelu4 = nn.Linear(576, 128), nn.PReLU(128)
        self.dense5_1, self.dense5_2 = nn.Linear(128, 2), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, 24, 24) from -1 to 1 -> corrections of boxes (N, 4), probabilities (N, 2)."""
        x = self.pool1(self.prelu1(self.conv1(x)))
        x = self.pool2(self.prelu2(self.conv2(x)))
        x = self.prelu3(self.conv3(x))
        x = self.prelu4(self.dense4(x.permute(0, 3, 2, 1).flatten(1)))
        return self.dense5_2(x), self.dense5_1(x).softmax(1)


class OutputNet(nn.Module):
    """MTCNN's last: whether 48x48 pixels are a face, where exactly, and where its eyes, nose and mouth are.

    Source: as of `ProposalNet`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 32, 3), nn.PReLU(32)
        self.pool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2, self.prelu2 = nn.Conv2d(32, 64, 3), nn.PReLU(64)
        self.pool2 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv3, self.prelu3 = nn.Conv2d(64, 64, 3), nn.PReLU(64)
        self.pool3 = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.conv4, self.prelu4 = nn.Conv2d(64, 128, 2), nn.PReLU(128)
        self.dense5, self.prelu5 = nn.Linear(1152, 256), nn.PReLU(256)
        self.dense6_1, self.dense6_2, self.dense6_3 = nn.Linear(256, 2), nn.Linear(256, 4), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, 3, 48, 48) from -1 to 1 -> corrections of boxes (N, 4), probabilities (N, 2), landmarks (N, 10)."""
        x = self.pool1(self.prelu1(self.conv1(x)))
        x = self.pool2(self.prelu2(self.conv2(x)))
        x = self.pool3(self.prelu3(self.conv3(x)))
        x = self.prelu4(self.conv4(x))
        x = self.prelu5(self.dense5(x.permute(0, 3, 2, 1).flatten(1)))
        return self.dense6_2(x), self.dense6_1(x).softmax(1), self.dense6_3(x)


class Crepe(nn.Module):
    """CREPE in its smallest form: the pitch of 64 ms of sound.

    Source: Kim et al. 2018, "CREPE: A Convolutional Representation for Pitch Estimation", section 2, as in torchcrepe.
    """

    def __init__(self, channels: tuple[int, ...] = (128, 16, 16, 16, 32, 64), pitches: int = 360) -> None:
        super().__init__()
        inputs = (1, *channels[:-1])
        for i, (before, after) in enumerate(zip(inputs, channels, strict=True), 1):
            conv = nn.Conv2d(before, after, (64 if i > 1 else 512, 1), (1 if i > 1 else 4, 1))
            self.add_module(f"conv{i}", conv)
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(after, eps=0.0010000000474974513))
        self.layers = len(channels)
        self.classifier = nn.Linear(4 * channels[-1], pitches)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1024) samples at 16 kHz, of mean 0 and deviation 1 -> how likely each pitch is, (N, 360)."""
        x = x[:, None, :, None]
        for i in range(1, self.layers + 1):
            x = F.pad(x, (0, 0, 31, 32) if i > 1 else (0, 0, 254, 254))
            x = F.relu(self.get_submodule(f"conv{i}")(x))
            x = F.max_pool2d(self.get_submodule(f"conv{i}_BN")(x), (2, 1))
        y: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()
        return y
