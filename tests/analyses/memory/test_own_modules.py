"""The estimate of modules of the user's own, next to a plain training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from bertscope import estimate
from tests.analyses.memory.plain_loop import peak_bytes


@dataclass
class Output:
    """An output that is a dataclass."""

    scores: torch.Tensor
    inputs: torch.Tensor

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.scores  # what the plain loop sums


class Recurrent(nn.Module):
    """An embedding, a recurrent layer, and a classifier."""

    def __init__(self, layer, width=16, *, is_bidirectional=False):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(width * (1 + is_bidirectional), 3)
        self.layer = layer(16, width, batch_first=True, num_layers=2, bidirectional=is_bidirectional)

    def forward(self, inputs):
        return (self.out(self.layer(self.words(inputs))[0]),)


class Attention(nn.Module):
    """torch's attention of a sequence to itself; without its weights it is fused."""

    def __init__(self, *, is_fused=False):
        super().__init__()
        self.is_fused = is_fused
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, inputs):
        return self.layer(inputs, inputs, inputs, need_weights=not self.is_fused)


class Tied(nn.Module):
    """A classifier with the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, inputs):
        return (self.out(self.words(inputs)),)


class Stack(nn.Module):
    """Layers in a row, the first of which may be frozen, whose output is of one of these kinds."""

    def __init__(self, kind, *layers, is_frozen=False):
        super().__init__()
        self.kind, self.layers = kind, nn.Sequential(*layers)
        self.layers[0].requires_grad_(not is_frozen)

    def forward(self, inputs):
        return self.kind(self.layers(inputs), inputs)


def pair(*tensors: torch.Tensor) -> Any:
    """Return a tuple, the plain kind of output."""
    return tensors


def ids():
    return torch.randint(50, (4, 9))


def images():
    """Return a classifier of images; its parameters are new, so that the profiler sees them."""
    first, second = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(100, 4))
    return Stack(pair, *first, nn.ReLU(), nn.MaxPool2d(2), *second)


MODULES = {
    "a narrow Linear": (lambda: Stack(pair, nn.Linear(40, 3)), lambda: torch.rand(4, 40)),
    "a dataclass": (lambda: Stack(Output, nn.Linear(40, 60), nn.Sigmoid()), lambda: torch.rand(4, 40)),
    "frozen parts": (
        lambda: Stack(pair, nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3), is_frozen=True), lambda: torch.rand(4, 40),
    ),
    "convolutions": (images, lambda: torch.rand(4, 3, 16, 16)),
    "GRU": (lambda: Recurrent(nn.GRU), ids),
    "LSTM": (lambda: Recurrent(nn.LSTM, is_bidirectional=True), ids),
    "LSTM whose rows are padded": (lambda: Recurrent(nn.LSTM, 70), ids),
    "attention": (Attention, lambda: torch.rand(4, 9, 16)),
    "fused attention": (lambda: Attention(is_fused=True), lambda: torch.rand(4, 40, 16)),
    "an encoder": (
        lambda: Stack(pair, nn.TransformerEncoderLayer(16, 2, 40, batch_first=True)), lambda: torch.rand(4, 9, 16),
    ),
    "shared parameters": (Tied, ids),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_the_estimate_of_a_module_is_the_peak_of_a_plain_loop(name):
    make, make_input = MODULES[name]
    given = make_input()
    (variant,) = estimate(make(), {"inputs": given}).variants
    plain = peak_bytes(make, lambda module: {"inputs": given.clone()}, torch.optim.AdamW)
    assert variant.estimated.peak.peak_bytes == pytest.approx(plain, rel=1e-3)
