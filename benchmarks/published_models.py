"""The models of published programs that are in no package, in as few lines as their memory needs.

`Gpt` is that of rasbt/LLMs-from-scratch, chapter 5; `Llama` that of pytorch/torchtitan of December 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_PRODUCT = "aten::mm"
_ATTENTION = ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention")


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the loss of the next words, of the logits in fp32 if the model asks for it; the logits are freed."""
    logits = model(inputs["words"]).flatten(0, 1)
    return functional.cross_entropy(logits.float() if isinstance(model, Llama) else logits, inputs["next"].flatten())


# ---- Gpt: operators of its own, or those of torch ----


class OwnNorm(nn.Module):
    """LayerNorm in separate operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        norm = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * norm + self.shift


class OwnGelu(nn.Module):
    """GELU by tanh in separate operators."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        factor = torch.sqrt(torch.tensor(2 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class TanhGelu(nn.GELU):
    """GELU by tanh in one operator."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


class OwnAttention(nn.Module):
    """Causal attention with three projections and a mask that is filled in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the context of (batch, length, width)."""
        batch, length, width = x.shape
        key, query, value = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.key, self.query, self.value)
        )
        hidden = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        scores = query @ key.transpose(2, 3)
        scores.masked_fill_(hidden, -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class FusedAttention(nn.Module):
    """Causal attention with one projection and scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the context of (batch, length, width)."""
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(context.transpose(1, 2).contiguous().view(batch, length, width))


class GptBlock(nn.Module):
    """A block of attention and two products, each behind a norm."""

    def __init__(self, width: int, heads: int, dropout: float, norm: Any, gelu: Any, attention: Any) -> None:
        super().__init__()
        self.attention = attention(width, heads, dropout)
        self.products = nn.Sequential(nn.Linear(width, 4 * width), gelu(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states behind the block."""
        for norm, part in zip(self.norms, (self.attention, self.products), strict=True):
            x = self.dropout(part(norm(x))) + x
        return x


class Gpt(nn.Module):
    """GPT-2 of 124 million parameters, with a separate output matrix."""

    def __init__(
        self, norm: Any = nn.LayerNorm, gelu: Any = TanhGelu, attention: Any = FusedAttention,
        width: int = 768, layers: int = 12, words: int = 50257, length: int = 1024, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(GptBlock(width, 12, dropout, norm, gelu, attention) for _ in range(layers)))
        self.norm, self.out = norm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        positions = self.positions(torch.arange(words.shape[1], device=words.device))
        return self.out(self.norm(self.layers(self.dropout(self.words(words) + positions))))


# ---- Llama ----


class RmsNorm(nn.Module):
    """Root mean square normalisation in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class LlamaBlock(nn.Module):
    """Attention with rotary positions and fewer keys than queries, and a gated product."""

    def __init__(self, width: int, heads: int, keys: int, inner: int) -> None:
        super().__init__()
        linear, self.size, self.times = partial(nn.Linear, bias=False), width // heads, heads // keys
        self.wq, self.wk = linear(width, width), linear(width, keys * self.size)
        self.wv, self.wo = linear(width, keys * self.size), linear(width, width)
        self.w1, self.w2, self.w3 = linear(width, inner), linear(inner, width), linear(width, inner)
        self.norms = nn.ModuleList(RmsNorm(width) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return the hidden states behind the block."""
        hidden = x + self._attend(self.norms[0](x), turns)
        narrow = self.norms[1](hidden)
        return hidden + self.w2(functional.silu(self.w1(narrow)) * self.w3(narrow))

    def _attend(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (project(x).view(batch, length, -1, self.size) for project in (self.wq, self.wk, self.wv))
        turned = [_turned(tensor, turns) for tensor in (query, key)]
        query, key = (wide.type_as(query) for wide in turned)
        del turned
        key, value = (self._repeated(tensor) for tensor in (key, value))
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        context = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(context.transpose(1, 2).contiguous().view(batch, length, -1))

    def _repeated(self, x: Tensor) -> Tensor:
        batch, length, keys, size = x.shape
        return x[:, :, :, None].expand(batch, length, keys, self.times, size).reshape(batch, length, -1, size)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3)


def every_second_product() -> tuple[Any, Any]:
    """Return the contexts of torchtitan's selective checkpointing: attention and each odd product are saved."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name()
        products[context.is_recompute] += name == _PRODUCT
        is_saved = name in _ATTENTION or (name == _PRODUCT and products[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Llama 3.1 8B."""

    def __init__(
        self, width: int = 4096, layers: int = 32, heads: int = 32, keys: int = 8, inner: int = 14336,
        words: int = 128256, length: int = 8192,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, keys, inner) for _ in range(layers))
        self.norm, self.out = RmsNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("turns", torch.zeros(length, width // heads // 2, dtype=torch.complex64))
        self.run: Callable[..., Tensor] = lambda layer, *given: layer(*given)

    def recompute(self, strategy: str) -> None:
        """Make backward recompute the layers: `full` or `selective`."""
        options = {"context_fn": every_second_product} if strategy == "selective" else {}
        self.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **options)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.words(words)
        for layer in self.layers:
            hidden = self.run(layer, hidden, self.turns)
        return self.out(self.norm(hidden))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2 124M, own operators": partial(Gpt, OwnNorm, OwnGelu, OwnAttention),
    "GPT-2 124M, LayerNorm and GELU of torch": partial(Gpt, attention=OwnAttention),
    "GPT-2 124M, sdpa": Gpt,
    "Llama 3.1 8B": Llama,
}
