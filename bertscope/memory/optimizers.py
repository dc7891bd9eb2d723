"""Optimizers that torch does not have, with the state and the temporary memory of a published implementation.

Only memory matters here: steps run with a learning rate of 0. A fused kernel allocates nothing, so its step is one
operator in place; its parameters and state do not get the kernel's values.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from bertscope.torch_access import nn, torch

_Trained = Iterator[tuple[Any, Any, dict[str, torch.Tensor], float]]  # parameter, gradient, state and learning rate


class _LoopOptimizer(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 0.0, *, foreach: bool = False, fused: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "foreach": foreach, "fused": fused})
        self.is_fused = fused

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        update = _LoopOptimizer._update if self.is_fused else type(self)._update
        update(self, self._trained())

    def _trained(self) -> _Trained:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(self._new_state(param))
                    yield param, param.grad, state, group["lr"]

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return two moments, the state of most optimizers."""
        return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}

    def _update(self, trained: _Trained) -> None:
        """Update the parameters as a fused kernel does. In others the tensors of an update live until the next one."""
        for param, _, _, lr in trained:
            param.mul_(1 - lr)


class Lamb(_LoopOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962): two moments.

    Temporaries as in cybertronai/pytorch-lamb 0ec8b85 (lamb.py); fused: FusedLAMB of NVIDIA/apex, which has the same
    state.
    """

    def _update(self, trained: _Trained) -> None:
        for param, grad, state, lr in trained:
            state["exp_avg"].lerp_(grad, 0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
            # The last two tensors live until the next parameter assigns the names again, as in the source.
            divisor = state["exp_avg_sq"].sqrt().add(1e-6)
            weight_norm = param.square().sum().sqrt()
            update = state["exp_avg"] / divisor
            trust_ratio = weight_norm / update.square().sum().sqrt()
            param.add_(update.mul_(-lr * trust_ratio))


class Lion(_LoopOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): one moment.

    Temporaries as in google/automl 87461ee (lion/lion_pytorch.py); fused: Lion of bitsandbytes 0.50.2
    (optim/lion.py), whose moment is fp32.
    """

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(param, dtype=torch.float32 if self.is_fused else param.dtype)}

    def _update(self, trained: _Trained) -> None:
        for param, grad, state, lr in trained:
            # It lives until the next parameter assigns the name again, as in the source.
            direction = 0.9 * state["exp_avg"] + 0.1 * grad
            param.add_(direction.sign_(), alpha=-lr)
            state["exp_avg"].lerp_(grad, 0.01)


class AdamW8bit(_LoopOptimizer):
    """AdamW of bitsandbytes with 8 bits for each element of a moment (Dettmers et al. 2022, arXiv:2110.02861).

    State as in Optimizer2State.init_state of bitsandbytes 0.50.2 (optim/optimizer.py), on CUDA: a tensor of at least
    4096 elements has two moments of one byte, and for each block of 256 elements an fp32 maximum of each; all share
    two tables of 256 fp32 values. A smaller tensor has two fp32 moments. Versions before 0.44 have blocks of 2048.
    Embeddings are no exception unless they are registered with GlobalOptimManager, as StableEmbedding is. On CUDA the
    step is one kernel; on a CPU it computes in fp32 copies, with the temporaries of backends/cpu/ops.py.
    """

    MIN_8BIT_SIZE, BLOCK_SIZE, TABLE_SIZE = 4096, 256, 256

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.0, **implementation: bool) -> None:
        super().__init__(params, lr, **implementation)
        self.tables: dict[str, torch.Tensor] = {}

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if param.numel() < self.MIN_8BIT_SIZE:
            return {name: torch.zeros_like(param, dtype=torch.float32) for name in ("state1", "state2")}
        if not self.tables:
            self.tables = {name: torch.zeros(self.TABLE_SIZE, device=param.device) for name in ("qmap1", "qmap2")}
        blocks = -(-param.numel() // self.BLOCK_SIZE)
        bytes_ = {name: torch.zeros_like(param, dtype=torch.uint8) for name in ("state1", "state2")}
        maxima = {name: torch.zeros(blocks, device=param.device) for name in ("absmax1", "absmax2")}
        return bytes_ | maxima | self.tables

    def _update(self, trained: _Trained) -> None:
        for param, grad, state, lr in trained:
            self._update_one(param, grad, state, lr)

    def _update_one(self, param: Any, gradient: Any, state: dict[str, torch.Tensor], lr: float) -> None:
        is_small = "absmax1" not in state
        grad, weights = gradient.float() * 1.0, param.float()
        first, second = (state[name] if is_small else state[name].float() for name in ("state1", "state2"))
        first.mul_(0.9).add_(grad, alpha=0.1)
        second.mul_(0.999).addcmul_(grad, grad, value=0.001)
        if is_small:
            weights.add_(first / (second.sqrt() + 1e-8), alpha=-lr)
        else:
            weights.addcdiv_(first, (second.sqrt() / 1.0).add_(1e-8), value=-lr)
        param.copy_(weights)
        for number, moment in enumerate(() if is_small else (first, second), 1):
            state[f"absmax{number}"].copy_(torch.empty_like(state[f"absmax{number}"]))
            state[f"state{number}"].copy_(moment.to(torch.uint8))


class TransformersAdamW(_LoopOptimizer):
    """The AdamW in transformers up to 4, `adamw_hf`: two moments; temporaries as in 4.43.4 (optimization.py)."""

    def _update(self, trained: _Trained) -> None:
        for param, grad, state, lr in trained:
            state["exp_avg"].lerp_(grad, 0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
            divisor = state["exp_avg_sq"].sqrt().add_(1e-8)  # lives until the next one replaces it
            param.addcdiv_(state["exp_avg"], divisor, value=-lr)


class TransformersAdafactor(_LoopOptimizer):
    """The Adafactor in transformers (Shazeer and Stern 2018, arXiv:1804.04235), as its Trainer makes it.

    The means of squared gradients over rows and columns, without momentum; temporaries as in 4.43.4 (optimization.py).
    """

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if param.dim() < 2:
            return {"exp_avg_sq": torch.zeros_like(param, dtype=torch.float32)}
        rows, columns = param.shape[:-1], param.shape[:-2] + param.shape[-1:]
        return {
            "exp_avg_sq_row": torch.zeros(rows, device=param.device),
            "exp_avg_sq_col": torch.zeros(columns, device=param.device),
        }

    def _update(self, trained: _Trained) -> None:
        for param, gradient, state, lr in trained:
            grad, weights = gradient.float(), param.float()  # copies only of 16-bit tensors
            update = grad.square() + 1e-30
            if "exp_avg_sq" in state:
                update = state["exp_avg_sq"].lerp_(update, 0.1).rsqrt().mul_(grad)
            else:
                rows = state["exp_avg_sq_row"].lerp_(update.mean(-1), 0.1)
                columns = state["exp_avg_sq_col"].lerp_(update.mean(-2), 0.1)
                update = (rows / rows.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
                update.mul_(grad)
            weights.add_(-update.mul_(lr))
            if weights is not param:
                param.copy_(weights)
