"""Small random models whose forward cannot be traced as a whole: loops and branches on data, searches, own caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Residual convolution block, with an attribute that outer code reads."""

    def __init__(self, channels=16):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.channels = channels

    def forward(self, x):
        return torch.relu(x + self.conv2(torch.relu(self.conv1(x))))


class LoopOnData(nn.Module):
    """Refines its state until a norm is small, at most five times."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.refine = Block()
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        h, steps = self.stem(x) * self.refine.conv1.stride[0], 0
        while h.abs().mean() < 2.0 and steps < 5:
            h, steps = self.refine(h) * 1.25, steps + 1
        return self.head(h.mean((2, 3)))


class MaskAny(nn.Module):
    """Takes another way if a mask has any true entry."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.out = nn.Linear(32, 8)

    def forward(self, x, mask=None):
        for layer in self.layers:
            options = {"src_key_padding_mask": mask} if mask is not None and mask.any() else {}
            x = layer(x, **options)
        return self.out(x)


def overlap(box, boxes):
    """IoU of one box with others, as (x1, y1, x2, y2)."""
    low, high = torch.maximum(box[:2], boxes[:, :2]), torch.minimum(box[2:], boxes[:, 2:])
    inner = (high - low).clamp(min=0).prod(1)
    areas = [(b[..., 2:] - b[..., :2]).prod(-1) for b in (box, boxes)]
    return inner / (areas[0] + areas[1] - inner)


class Detector(nn.Module):
    """Convolutions, then non-maximum suppression in a Python loop."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), Block(), Block())
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 1, 1)

    def forward(self, images):
        results = []
        features = self.backbone(images)
        for boxes, scores in zip(self.boxes(features), self.scores(features), strict=True):
            boxes, scores = boxes.flatten(1).T, scores.flatten().sigmoid()
            boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:].abs() + 0.5], 1)
            order, keep = scores.argsort(descending=True), []
            while len(order) and len(keep) < 5:
                keep.append(int(order[0]))
                order = order[1:][overlap(boxes[order[0]], boxes[order[1:]]) < 0.5]
            results.append({"boxes": boxes[keep], "scores": scores[keep]})
        return results


class BeamSearch(nn.Module):
    """Encoder and a recurrent decoder with a beam search in its forward."""

    def __init__(self, vocabulary=24, width=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width))
        self.embed = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(width, width)
        self.out = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, vocabulary))

    def forward(self, x):
        beams = [([0], 0.0, self.encoder(x))]
        for _ in range(6):
            longer = []
            for tokens, score, state in beams:
                if tokens[-1] == 1:
                    longer.append((tokens, score, state))
                    continue
                state = self.cell(self.embed(torch.tensor([tokens[-1]])), state)
                logits = F.log_softmax(self.out(state), -1)[0]
                best = logits.topk(2)
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    longer.append(([*tokens, token], score + value, state))
            beams = sorted(longer, key=lambda beam: -beam[1])[:2]
        return torch.tensor(beams[0][0]), torch.tensor(beams[0][1])


class Diffusion(nn.Module):
    """Denoises random numbers in steps whose number follows from the input's values."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 16)
        self.unet = nn.Sequential(nn.Conv2d(19, 16, 3, padding=1), nn.SiLU(), Block(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x):
        steps = int(x.mean().abs() * 4) + 2
        noise = torch.randn(x.shape)
        for t in range(steps):
            at = self.time(torch.tensor(t))[None, :, None, None].expand(len(x), -1, *x.shape[2:])
            noise = noise - 0.3 * self.unet(torch.cat([noise + x, at], 1))
        return noise


@dataclass
class OwnCache:
    """Cache of a user's own, which is no container of PyTorch."""

    keys: list = field(default_factory=list)
    values: list = field(default_factory=list)

    def update(self, key, value):
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, 1), torch.cat(self.values, 1)


class CachedLayer(nn.Module):
    """Attention and MLP, with keys and values in an `OwnCache`."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, cache):
        keys, values = cache.update(self.k(x), self.v(x))
        query, keys, values = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(x), keys, values))
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=x.shape[1] > 1)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class CachedDecoder(nn.Module):
    """Language model that generates tokens in its forward until the end token, with a cache of its own."""

    def __init__(self, vocabulary=50, width=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(CachedLayer(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def step(self, ids, caches):
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x[:, -1])

    def forward(self, ids):
        caches, logits = [OwnCache() for _ in self.layers], []
        step = ids
        while len(logits) < 6:
            logits.append(self.step(step, caches))
            step = logits[-1].argmax(-1, keepdim=True)
            if step.item() == 1:
                break
        return torch.stack(logits, 1)


class TiedDecoder(nn.Module):
    """Language model with a loop of its own, that calls its layers on all tokens again and ties its embedding."""

    def __init__(self, vocabulary=50, width=64):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        )

    def forward(self, ids):
        for _ in range(5):
            hidden = self.body(self.decoder.embed(ids))
            token = F.linear(hidden[:, -1:], self.decoder.embed.weight).argmax(-1)
            ids = torch.cat([ids, token], 1)
            if token.item() == 1:
                break
        return hidden


class Speech(nn.Module):
    """Text to speech: the number of frames of each token follows from predicted values."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.duration = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.decoder = nn.Sequential(
            nn.Conv1d(width, 64, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(64, 64, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(64, 20, 1),
        )

    def forward(self, tokens):
        hidden = self.encoder(self.embed(tokens))
        frames = (self.duration(hidden)[..., 0].exp() * 2).round().clamp(1, 8).long()
        mel = hidden.new_zeros(len(hidden), 20, int(frames.sum(1).max()))
        for i, (states, counts) in enumerate(zip(hidden, frames.tolist(), strict=True)):
            spread = torch.cat([state.expand(n, -1) for state, n in zip(states, counts, strict=True)])
            mel[i, :, : len(spread)] = self.decoder(spread.T[None])[0]
        return mel


class Recognizer(nn.Module):
    """Text recognition: convolutions, a recurrent layer, and greedy decoding to lists of characters."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)), Block())
        self.rnn = nn.LSTM(16 * 8, 32, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(64, 12)

    def forward(self, image):
        columns = self.features(image).flatten(1, 2).transpose(1, 2)
        logits = self.classify(self.rnn(columns)[0])
        texts = []
        for row in logits.argmax(-1).tolist():
            texts.append([c for i, c in enumerate(row) if c and (not i or row[i - 1] != c)])
        return logits, texts


IMAGES = (2, 3, 16, 16)
MODELS = {
    "loop on data": (LoopOnData, lambda: (torch.rand(IMAGES),)),
    "mask.any()": (MaskAny, lambda: {"x": torch.randn(2, 6, 32), "mask": torch.rand(2, 6) < torch.rand(()) * 0.5}),
    "detector": (Detector, lambda: (torch.rand(IMAGES),)),
    "beam search": (BeamSearch, lambda: (torch.randn(1, 16),)),
    "diffusion": (Diffusion, lambda: (torch.randn(IMAGES),)),
    "own cache": (CachedDecoder, lambda: (torch.randint(2, 50, (1, 7)),)),
    "custom loop": (TiedDecoder, lambda: (torch.randint(2, 50, (1, 7)),)),
    "speech": (Speech, lambda: (torch.randint(0, 30, (2, 9)),)),
    "recognizer": (Recognizer, lambda: (torch.rand(2, 1, 16, 24),)),
}
"""For each name, the class of the model and a function that draws one batch."""


def model_and_data(name, batches=4):
    """Model in eval mode with seeded weights, and batches for it."""
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model = make().eval()
    return model, [draw() for _ in range(batches)]
