"""The memory of a CUDA device besides the tensors: cuBLAS's workspaces, the context, and a margin."""

from bertscope.frozen import dataclass
from bertscope.gpus import CONTEXT_BYTES, Gpu, capability, may_have_cuda
from bertscope.reports.memory import BACKWARD, FORWARD
from bertscope.reports.step import ByteRange
from bertscope.settings.run_config import RunConfig

# cuBLAS's workspace for each thread, from capability 9 on and below (parseChosenWorkspaceSize of torch's
# CublasHandlePool.cpp), and cuBLASLt's, which stays as well (measured on an H200 with torch 2.11).
_LARGE_WORKSPACE_BYTES, _WORKSPACE_BYTES, _LARGE_FROM = 32 * 2**20, 8_519_680, 9
LT_WORKSPACE_BYTES = 2**20
MANY_THREADS = 132 * 2048  # of an H100: partial sums are larger than on most other cards
# The share of the memory that a batch with eager attention must leave free on a GPU whose context is not given: on a
# V100 of 2021 nvidia-smi showed up to 3.9 % more (transformers documentation, model memory anatomy, by
# benchmarks/published.py). Fused attention needs torch 2.0 or later, whose context is far below the upper end.
MARGIN = 0.04
EAGER = "eager"


def workspace_bytes(run_config: RunConfig, compute_capability: tuple[int, int] | None = None) -> int:
    """Return the bytes of cuBLAS's workspaces: one for the thread of forward, and in training one for backward's.

    A linear layer with a bias, which runs in cuBLASLt, has a further one.
    Without a compute capability it is that of this machine's GPU, or one below 9.
    """
    if compute_capability is None and may_have_cuda():
        from bertscope.torch_access import torch

        compute_capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return (2 if run_config.mode == "training" else 1) * blas_bytes(compute_capability) + LT_WORKSPACE_BYTES


def blas_bytes(compute_capability: tuple[int, int] | None) -> int:
    """Return the bytes of cuBLAS's workspace of one thread."""
    is_large = compute_capability is not None and compute_capability[0] >= _LARGE_FROM
    return _LARGE_WORKSPACE_BYTES if is_large else _WORKSPACE_BYTES


def card_workspace_bytes(run_config: RunConfig, card: Gpu | None) -> int:
    """Return the bytes of the workspaces on a GPU; None: as `workspace_bytes`."""
    return workspace_bytes(run_config, None if card is None else capability(card))


def by_thread(run_config: RunConfig, workspaces: int) -> tuple[tuple[str, int], ...]:
    """Return the workspaces by the phase whose first product makes them, each with its bytes; none of 0 bytes."""
    if not workspaces:
        return ()
    blas = workspaces - LT_WORKSPACE_BYTES
    if run_config.mode == "training":
        return (FORWARD, blas // 2), (FORWARD, LT_WORKSPACE_BYTES), (BACKWARD, blas - blas // 2)
    return (FORWARD, blas), (FORWARD, LT_WORKSPACE_BYTES)


def resident_threads(run_config: RunConfig) -> int:
    """Return how many threads the GPU runs at once: the run's GPU, else this machine's, else an H100."""
    if not run_config.card_threads and may_have_cuda():
        from bertscope.torch_access import torch

        if torch.cuda.is_available():
            card = torch.cuda.get_device_properties(torch.cuda.current_device())
            return int(card.multi_processor_count * card.max_threads_per_multi_processor)
    return run_config.card_threads or MANY_THREADS


@dataclass(frozen=True)
class Overhead:
    """The memory of a GPU that the tensors cannot use: cuBLAS's workspaces, and the CUDA context as a range.

    `margin` is the share of the rest that must stay free for eager attention if the context is not given: then the
    version of torch may be an old one.
    """

    workspace_bytes: int = 0
    context: ByteRange = ByteRange()
    margin: float = 0.0

    @property
    def lowest_bytes(self) -> int:
        """Return the bytes with the context at the lower end."""
        return self.workspace_bytes + self.context.low_bytes

    @property
    def highest_bytes(self) -> int:
        """Return the bytes with the context at the upper end."""
        return self.workspace_bytes + self.context.high_bytes

    def limit_bytes(self, budget_bytes: int) -> int:
        """Return the bytes of the budget that torch may reserve: without the upper context and the margin."""
        return int((budget_bytes - self.context.high_bytes) * (1 - self.margin))


def overhead(
    run_config: RunConfig, context_bytes: int | None, known: Gpu | None = None, attention: str | None = None
) -> Overhead:
    """Return the memory that tensors cannot use; `context_bytes` instead of what is known of the GPU."""
    is_cuda = run_config.device == "cuda"
    workspaces = card_workspace_bytes(run_config, known) if is_cuda else 0
    if context_bytes is not None or not is_cuda:
        size = context_bytes or 0
        return Overhead(workspaces, ByteRange(low_bytes=size, high_bytes=size))
    is_measured = known is not None and bool(known.calibration)
    return Overhead(workspaces, context_of(known), MARGIN if attention == EAGER and not is_measured else 0.0)


def context_of(card: Gpu | None) -> ByteRange:
    """Return the CUDA context of a GPU; without a known one the range over all GPUs."""
    is_known = card is not None and card.context_high_bytes
    low, high = (card.context_low_bytes, card.context_high_bytes) if card and is_known else CONTEXT_BYTES
    return ByteRange(low_bytes=low, high_bytes=high)
