"""The estimate of modules of the user's own, next to a plain training loop."""

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from bertscope import estimate, fit, profile
from bertscope.errors import SelectionError
from tests.conftest import kinds
from tests.memory.plain_loop import peak_bytes


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


class Keep(torch.autograd.Function):
    """A function that keeps a tensor with the graph, besides what it saves."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.kept = inputs * 2
        return inputs + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class Stack(nn.Module):
    """Layers in a row, the first of which may be frozen, whose output is of one of these kinds."""

    def __init__(self, kind, *layers, is_frozen=False):
        super().__init__()
        self.kind, self.layers = kind, nn.Sequential(*layers)
        self.layers[0].requires_grad_(not is_frozen)

    def forward(self, inputs):
        return self.kind(self.layers(inputs), inputs)


class TwoHeads(nn.Module):
    """A body with two heads; the loss uses the first."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = (
            nn.Sequential(nn.Linear(64, 64), nn.GELU()),
            nn.Linear(64, 3),
            nn.Linear(64, 90),
        )

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.head(hidden), self.unused(hidden)


def pair(*tensors: torch.Tensor) -> Any:
    """Return a tuple, the plain kind of output."""
    return tensors


def ids():
    return torch.randint(50, (4, 9))


def patches():
    """Return a transformer's first layer for images, whose result nothing saves for backward."""
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.Linear(128, 4))


MODULES = {
    "a narrow Linear": (lambda: Stack(pair, nn.Linear(40, 3)), lambda: torch.rand(4, 40)),
    "a dataclass": (lambda: Stack(Output, nn.Linear(40, 60), nn.Sigmoid()), lambda: torch.rand(4, 40)),
    "frozen parts": (
        lambda: Stack(pair, nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3), is_frozen=True), lambda: torch.rand(4, 40),
    ),
    "GRU": (lambda: Recurrent(nn.GRU), ids),
    "attention": (Attention, lambda: torch.rand(4, 9, 16)),
    "fused attention": (lambda: Attention(is_fused=True), lambda: torch.rand(4, 40, 16)),
    "an encoder": (
        lambda: Stack(pair, nn.TransformerEncoderLayer(16, 2, 40, batch_first=True)), lambda: torch.rand(4, 9, 16),
    ),
    "shared parameters": (Tied, ids),
    "a kept tensor": (
        lambda: Stack(lambda out, given: (Keep.apply(out),), nn.Linear(4, 999)), lambda: torch.rand(40, 4),
    ),
    "a head that no loss uses": (TwoHeads, lambda: torch.rand(40, 64)),
}  # fmt: skip


@kinds("name, precision, loop", MODULES, ["stored", "autocast-bf16"], ["plain", "trainer"])
def test_the_estimate_of_a_module_is_the_peak_of_a_plain_loop(name, precision, loop):
    make, make_input = MODULES[name]
    given, autocast = make_input(), torch.bfloat16 if precision != "stored" else None
    if autocast and name == "fused attention" and torch.cpu._is_amx_tile_supported():
        pytest.skip("with AMX this kernel packs 16-bit operands, which no estimate has")
    (variant,) = estimate(make(), {"inputs": given}, precision=precision, loop=loop).variants
    plain = peak_bytes(make, lambda module: {"inputs": given.clone()}, torch.optim.AdamW, autocast=autocast, loop=loop)
    assert variant.estimated.peak.peak_bytes == pytest.approx(plain, rel=1e-3)
    assert not_counted(make(), given) == []


CHOICES = {  # the gradient of each is written into zeros
    "gather": lambda scores: torch.log_softmax(scores, -1).gather(1, torch.zeros(32, 1, dtype=torch.long)),  # DPO's
    "index": lambda scores: scores[torch.arange(32), torch.zeros(32, dtype=torch.long)],
    "max": lambda scores: scores.max(1)[0],
    "topk": lambda scores: scores.topk(3)[0],
    "median": lambda scores: scores.median(1)[0],
    "take": lambda scores: scores.take(torch.zeros(9, dtype=torch.long)),
    "cummax": lambda scores: scores.cummax(1)[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHOICES)
def test_the_gradient_of_chosen_elements_is_written_into_zeros_in_place(name, dtype):
    def make():
        return Stack(lambda out, given: (CHOICES[name](out),), nn.Linear(4, 4000)).to(dtype)

    given = torch.ones(32, 4, dtype=dtype)
    plain = peak_bytes(make, lambda module: {"inputs": given.clone()}, lambda params: torch.optim.SGD(params, lr=0.0))
    (variant,) = estimate(make(), {"inputs": given}, optimizer="sgd").variants
    assert variant.estimated.peak.peak_bytes == plain


def not_counted(module, given, **settings):
    """What the answer says is not counted."""
    answer = str(estimate(module, given, **settings)).partition("\n\n")[0]
    return [line.partition(";")[0] for line in answer.splitlines()[1:] if "not counted" in line]


UNCOUNTED = {
    "convolutions": (patches, lambda: torch.rand(4, 3, 16, 16)),
    "LSTMs": (lambda: Recurrent(nn.LSTM), ids),
    "convolutions and LSTMs": (lambda: nn.Sequential(nn.Conv1d(5, 5, 3), nn.LSTM(8, 4)), lambda: torch.rand(4, 5, 10)),
}


@pytest.mark.parametrize(
    ("kernels", "mode"), [(name, "inference" if "and" in name else "training") for name in UNCOUNTED]
)
def test_an_estimate_for_a_cpu_says_that_the_scratch_of_convolutions_and_lstms_is_not_counted(kernels, mode):
    make, make_input = UNCOUNTED[kernels]
    given, expected = make_input(), f"scratch of {kernels} on a CPU is not counted"
    assert not_counted(make(), given, mode=mode) == [expected]
    on_gpu = not_counted(make(), given, mode=mode, device="cuda")
    assert on_gpu == ["cuDNN workspaces (0 to 3.3 GiB) not counted"] * ("convolutions" in kernels)
    assert expected not in str(profile(make(), given, mode=mode, steps=1))  # which measures it


def test_an_estimate_without_the_scratch_of_a_convolution_is_below_the_measured_peak():
    given = torch.rand(4, 3, 64, 64)
    found = profile(nn.Conv2d(3, 40, 5), given, mode="inference", steps=1)["none"]
    assert found.estimated.peak.peak_bytes < found.measured.peak.peak_bytes


def test_fit_for_a_cpu_says_that_the_scratch_of_convolutions_is_not_counted():
    found = fit(patches(), "1GiB", input_size=(4, 3, 16, 16), device="cpu", checkpointing="none")
    assert "scratch of convolutions on a CPU is not counted" in str(found)
    assert "not counted" not in str(fit(nn.Linear(4, 4), "1GiB", input_size=(4, 4), device="cpu"))


SCRIPTED = """
import torch

@torch.jit.script
def scaled(given: torch.Tensor, count: int) -> torch.Tensor:
    if given.size(0) > 1:
        given = torch.relu(given * count)
    return given

class Net(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return scaled(super().forward(given), 3)
"""


def test_a_function_of_torchscript_has_the_memory_of_its_python(tmp_path, monkeypatch):
    (tmp_path / "scripted_net.py").write_text(SCRIPTED)
    monkeypatch.syspath_prepend(tmp_path)
    net = import_module("scripted_net").Net(40, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = profile(net, torch.ones(16, 40), steps=0)
    assert report["none"].error == pytest.approx(0, abs=1e-3)
    assert net(torch.ones(2, 40)).shape == (2, 30)


def test_a_module_is_measured_in_this_process_so_settings_of_a_new_one_are_refused():
    for name, value in {"threads": 1, "seed": 1, "memory_limit": "2GiB", "timeout": 5.0, "nproc": 2}.items():
        with pytest.raises(SelectionError, match=rf"^{name} is for a new process"):
            profile(nn.Linear(4, 2), torch.randn(3, 4), steps=0, **{name: value})
