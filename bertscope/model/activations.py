"""The activations for `hidden_act` as modules, so that a printed model shows them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class GELUActivation(nn.Module):
    """The exact GELU, x * Phi(x). Source: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return functional.gelu(hidden)


class NewGELUActivation(nn.Module):
    """The tanh form of GELU, step by step, as google-research/bert and GPT-2 compute it."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        inner = math.sqrt(2.0 / math.pi) * (hidden + 0.044715 * torch.pow(hidden, 3.0))
        return 0.5 * hidden * (1.0 + torch.tanh(inner))


class FastGELUActivation(nn.Module):
    """The tanh form of GELU with its constant rounded to 0.79788456."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return 0.5 * hidden * (1.0 + torch.tanh(hidden * 0.7978845608 * (1.0 + 0.044715 * hidden * hidden)))


class PythonGELUActivation(nn.Module):
    """The exact GELU written with erf, which keeps its intermediate tensors."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return hidden * 0.5 * (1.0 + torch.erf(hidden / math.sqrt(2.0)))


class PytorchGELUTanh(nn.Module):
    """The tanh form of GELU in torch's fused kernel."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return functional.gelu(hidden, approximate="tanh")


class QuickGELUActivation(nn.Module):
    """GELU approximated by x * sigmoid(1.702 x)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return hidden * torch.sigmoid(1.702 * hidden)


class LinearActivation(nn.Module):
    """The identity function."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input."""
        return hidden


_CLASSES: dict[str, type[nn.Module]] = {
    "gelu": GELUActivation,
    "gelu_fast": FastGELUActivation,
    "gelu_new": NewGELUActivation,
    "gelu_python": PythonGELUActivation,
    "gelu_pytorch_tanh": PytorchGELUTanh,
    "leaky_relu": nn.LeakyReLU,
    "linear": LinearActivation,
    "mish": nn.Mish,
    "quick_gelu": QuickGELUActivation,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


def activation(hidden_act: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the activation for a name that the configuration has checked; return a callable unchanged."""
    return hidden_act if callable(hidden_act) else _CLASSES[hidden_act]()
