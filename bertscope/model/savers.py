"""Ways to save memory in a training loop, in plain torch; `bertscope plan --emit torch` writes this code."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def chunked_loss(model: Any, batch: Mapping[str, Any], chunks: int, *, is_causal: bool) -> torch.Tensor:
    """Return the cross-entropy of a language model whose logits exist for one of `chunks` parts of each sequence.

    The model runs without labels up to its last layer, whose products are recomputed in backward, chunk by chunk.
    A causal one predicts the next token.

    hidden (batch, seq, hidden_size) -> logits of a chunk (batch, seq / chunks, vocab_size)
    """
    unwrapped = getattr(model, "get_base_model", None)  # of peft's wrapper
    last, labels = (unwrapped() if unwrapped else model).get_output_embeddings(), batch["labels"]
    labels = functional.pad(labels, (0, 1), value=-100)[:, 1:] if is_causal else labels
    chunk = partial(_chunk_loss, last.forward)

    def summed(hidden: torch.Tensor) -> Any:
        """Return the sum of all losses instead of logits: FSDP has gathered the weights here."""
        total: Any = 0.0
        for part in zip(hidden.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True):
            total = total + checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False)
        return total

    with patch.object(last, "forward", summed):
        output = model(**{name: value for name, value in batch.items() if name != "labels"})
    return output.logits / (labels != -100).sum()  # type: ignore[no-any-return]


def _chunk_loss(forward: Callable[..., Any], hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = forward(hidden.flatten(0, 1)).float()  # the same operators whatever the strides are
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum")


class StepInBackward:
    """An optimizer for each parameter, which updates it in backward and frees its gradient.

    Backward does what `step` and `zero_grad` of another optimizer do. Lv et al. 2023, arXiv:2306.09782.
    """

    def __init__(self, params: Iterable[nn.Parameter], make: MakeOptimizer) -> None:
        self.optimizers: dict[Any, Any] = {param: make([param]) for param in params if param.requires_grad}
        for param in self.optimizers:
            param.register_post_accumulate_grad_hook(self.update)

    def update(self, param: torch.Tensor) -> None:
        """Update a parameter by its gradient."""
        self.optimizers[param].step()
        self.optimizers[param].zero_grad()


class HostOptimizer:
    """An optimizer on the CPU of copies of the parameters: gradients move there in backward, weights come back.

    Ren et al. 2021, arXiv:2101.06840.
    """

    def __init__(self, params: Iterable[nn.Parameter], make: MakeOptimizer, host: str = "cpu") -> None:
        self.params = [param for param in params if param.requires_grad]
        self.copies = [nn.Parameter(param.detach().to(host)) for param in self.params]
        self.optimizer = make(self.copies)
        for param, copy in zip(self.params, self.copies, strict=True):
            param.register_post_accumulate_grad_hook(partial(self.move, copy))

    def move(self, copy: nn.Parameter, param: torch.Tensor) -> None:
        """Move the gradient of a parameter to its copy."""
        gradient: Any = param.grad
        moved = gradient.to(copy.device)
        copy.grad = moved if copy.grad is None else copy.grad + moved
        param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the copies, and copy them to the parameters."""
        self.optimizer.step()
        for param, copy in zip(self.params, self.copies, strict=True):
            param.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none)
