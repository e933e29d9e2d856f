"""The models that `scripts/bench` trains and runs, as scripts have them: no word of precision."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F


def mlp(layers: int = 20, width: int = 16) -> nn.Module:
    """Tiny layers: Python and torch's dispatcher take all the time."""
    modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*modules[:-1])


def tanh_net(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two hidden layers: a policy, a vector field, a curve."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18: 11.7 million parameters at its own width of 64."""
    widths = [width * 2**stage for stage in (0, 0, 1, 2, 3)]
    stages = [(i, o, 1 + (i != o)) for i, o in itertools.pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(Block(*stage) for i, o, s in stages for stage in ((i, o, s), (o, o, 1))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], 1000),
    )


def _twice(inputs: int, outputs: int) -> nn.Module:
    layers = [
        layer
        for channels in (inputs, outputs)
        for layer in (
            nn.Conv2d(channels, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )
    ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down `levels` times and up again, across to its like each time (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 32, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        steps = list(itertools.pairwise(widths))
        self.first, self.last = _twice(3, width), nn.Conv2d(width, 2, 1)
        self.downs = nn.ModuleList(_twice(i, o) for i, o in steps)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in reversed(steps))
        self.joins = nn.ModuleList(_twice(2 * i, i) for i, _ in reversed(steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        across = [self.first(x)]
        for down in self.downs:
            across.append(down(F.max_pool2d(across[-1], 2)))
        x = across.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat((across.pop(), up(x)), 1))
        return self.last(x)


def encoder(width: int = 512, heads: int = 8, layers: int = 4) -> nn.Module:
    """torch's own, with dropout."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Past:
    """Keys and values of the tokens so far, one pair a block.

    No list: trainers copy lists on their way into a model.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.length = 0

    def extended(
        self, block: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, these too from now on."""
        if block in self.pairs:
            k, v = (torch.cat(pair, 2) for pair in zip(self.pairs[block], (k, v), strict=True))
        self.pairs[block] = k, v
        return k, v


class Causal(nn.Module):
    """A pre-norm block: attention to what came before, and four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, past: Past | None, index: int) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        if past is not None:
            k, v = past.extended(index, k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.wide(self.norm2(x))


class GPT(nn.Module):
    """Blocks between an embedding and a head; with `past`, one token follows those before."""

    def __init__(self, vocabulary: int, width: int, heads: int, blocks: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Causal(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        first, count = (past.length if past else 0), tokens.shape[1]
        places = torch.arange(first, first + count, device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for index, block in enumerate(self.blocks):
            x = block(x, past, index)
        if past is not None:
            past.length += count
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """Two LSTM layers, and a head on the last state."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class Recommender(nn.Module):
    """Bags of categories and dense features meet pairwise (Naumov et al. 2019, DLRM)."""

    def __init__(self, tables: int = 26, rows: int = 10_000, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 8 * width), nn.ReLU(), nn.Linear(8 * width, width), nn.ReLU()
        )
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))
        self.top = nn.Sequential(
            nn.Linear(width + self.pairs.shape[1], 8 * width), nn.ReLU(), nn.Linear(8 * width, 1)
        )

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(dense)
        bags = [bag(column) for bag, column in zip(self.bags, categories.unbind(1), strict=True)]
        features = torch.stack([dense, *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat((dense, products[:, self.pairs[0], self.pairs[1]]), 1))


def generator(noise: int, width: int) -> nn.Module:
    """Noise to 32x32 images (Radford et al. 2015, DCGAN)."""
    widths = (noise, 4 * width, 2 * width, width)
    layers = [
        layer
        for index, (i, o) in enumerate(itertools.pairwise(widths))
        for layer in (
            nn.ConvTranspose2d(i, o, 4, 2 if index else 1, 1 if index else 0, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(),
        )
    ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


def discriminator(width: int) -> nn.Module:
    """32x32 images to one number."""
    widths = (3, width, 2 * width, 4 * width)
    layers = [
        layer
        for i, o in itertools.pairwise(widths)
        for layer in (nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2))
    ]
    return nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 4), nn.Flatten(0))
