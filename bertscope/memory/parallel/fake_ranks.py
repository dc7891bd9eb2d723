"""One process in place of all ranks of a job: collectives return at once, and this rank has its part of the model.

All of a rank's step with ZeroRedundancyOptimizer, clipping included, is that of a rank without a parameter; its update
is added. The parameters of one rank are in runs of equal ones, of which few are updated in place of many.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from bertscope.errors import SelectionError
from bertscope.memory.deepening import with_copies
from bertscope.memory.fake_run import fake_run
from bertscope.memory.kernels import cuda_semantics
from bertscope.memory.parallel.collectives import Collective
from bertscope.memory.parallel.strategies import Meshes, make_meshes, parallelize, zero_shares
from bertscope.memory.step import STEP_END, ModelStep
from bertscope.memory.trace import UPDATE, MemoryTrace, same_events
from bertscope.reports.memory import BROADCAST, FORWARD, OPTIMIZER
from bertscope.settings.parallelism import MAX_WORLD_SIZE, ONE_PROCESS, Parallelism
from bertscope.settings.run_config import FREED, RunConfig
from bertscope.torch_access import has_kernel, nn, torch
from bertscope.torch_access.distributed import fake_store, forget_meshes, real_tensors
from bertscope.tracing.fake_tensors import fake_tensors
from bertscope.tracing.repeat import RAN, LayerStack


@contextmanager
def fake_ranks(parallelism: Parallelism) -> Iterator[Meshes]:
    """Make this process one rank of a job whose other ranks do not exist; yield its meshes.

    Enter it outside FakeTensorMode, in which the numbers of the ranks would have no values. Raises SelectionError if
    the process already belongs to a job.
    """
    dist = torch.distributed
    if not dist.is_available():
        raise SelectionError("this build of torch has no torch.distributed; install one that has")
    if not has_kernel(torch.ops.c10d.broadcast_.default, "Meta"):
        raise SelectionError(
            f"torch {torch.__version__} does not run collectives without values; estimates of several ranks are tested "
            "with torch 2.11 and newer"
        )
    if dist.is_initialized():
        raise SelectionError("this process belongs to a process group; run the estimate in another process")
    logger = logging.getLogger("torch.distributed.tensor")  # it warns that two all-reduces could be one
    level = logger.level
    logger.setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=parallelism.rank, world_size=parallelism.world_size, store=fake_store())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # whose output is a view, such as logits
            yield make_meshes(parallelism, "cpu")
    finally:
        dist.destroy_process_group()
        forget_meshes()
        logger.setLevel(level)


def parallelize_fakes(
    model: nn.Module, layers: list[nn.Module], parallelism: Parallelism, meshes: Meshes
) -> dict[str, torch.Tensor]:
    """Apply the strategy to a model of fake tensors, and return the buckets of DDP, one for each trained parameter."""
    if parallelism.row.has_buckets:
        return _with_buckets(model)
    # The parameters are fake tensors in any case, and the numbers of ranks in a mesh have to have values.
    with real_tensors(), patch.object(torch, "chunk", _equal_parts):
        parallelize(model, layers, parallelism, meshes)
    return {}


def _with_buckets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Have backward reduce the gradient of each parameter in a bucket for that parameter, and return the buckets.

    DDP itself reads values, which fake tensors do not have; one of its buckets holds several gradients. It broadcasts
    the buffers before forward, and copies each gradient to its bucket, which exists between the steps too.
    """
    dist = torch.distributed
    replicated: Any = model
    replicated.require_backward_grad_sync = True  # as DDP names it
    buckets = {path: torch.zeros_like(param) for path, param in model.named_parameters() if param.requires_grad}

    def broadcast(*_: Any) -> None:
        buffers = list(model.buffers())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            flat = torch.cat([buffer.flatten() for buffer in buffers if buffer.dtype == dtype])
            dist.broadcast(flat, src=0)

    def reduce(bucket: torch.Tensor, param: torch.Tensor) -> None:
        """Reduce the bucket of a gradient, which stays a separate tensor."""
        if replicated.require_backward_grad_sync:
            dist.all_reduce(bucket)

    model.register_forward_pre_hook(broadcast)
    for path, param in model.named_parameters():
        if path in buckets:
            param.register_post_accumulate_grad_hook(partial(reduce, buckets[path]))
    return buckets


def _equal_parts(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the parts of torch.chunk, those of equal size first, and an empty one for each that it leaves out.

    All parts of equal size are one tensor, and so are the empty ones: FSDP divides each parameter by all ranks, which
    takes minutes for thousands of them.
    """
    size = max(-(-input.shape[dim] // chunks), 1)
    number, rest = divmod(input.shape[dim], size)
    parts = (input.narrow(dim, 0, size),) * number
    if rest:
        parts += (input.narrow(dim, number * size, rest),)
    return parts + (input.new_empty(0),) * (chunks - len(parts))


# ---- the update of a rank of ZeroRedundancyOptimizer ----


_PATH = "update.params"  # of the parameters that are updated
Sort = tuple[torch.Size, torch.dtype, bool]  # of a parameter: True if it has a gradient


def idle(parallelism: Parallelism) -> Parallelism:
    """Return the same job for a rank that updates nothing."""
    return replace(parallelism, world_size=MAX_WORLD_SIZE, mesh="", rank=MAX_WORLD_SIZE - 1)


def without_broadcasts(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace without the broadcasts of the parameters, of which a deeper model has more."""
    calls = [(call, slope) for call, slope in trace.calls if (call.phase, call.kind) != (OPTIMIZER, BROADCAST)]
    return replace(trace, calls=calls)


def with_update(trace: MemoryTrace, params: Sequence[tuple[str, nn.Parameter]], run_config: RunConfig) -> MemoryTrace:
    """Return the memory of a rank from that of an idle one; `params` are all of the model with their paths."""
    ranks, rank = run_config.parallelism.world_size, run_config.parallelism.rank
    calls = [(call._replace(ranks=ranks), slope) for call, slope in trace.calls]
    marks = {number for number, place in enumerate(trace.places) if place[2] == UPDATE}
    at = next((number for number, place in enumerate(trace.place_of) if place in marks), None)
    if at is None:  # no optimizer step
        return replace(trace, calls=calls)
    trained = [(path, param) for path, param in params if param.requires_grad]
    calls += [(Collective(OPTIMIZER, BROADCAST, "", param.nbytes, ranks), 0) for _, param in trained]
    shares = zero_shares([param.numel() for _, param in trained], ranks)
    own = [trained[number] for number in shares[rank]] if rank < len(shares) else []
    with_gradient = {kind.block.path for kind in trace.kinds if kind.block.operator == UPDATE}
    kinds = [(param.shape, param.dtype, path in with_gradient) for path, param in own]
    update = _renamed(_update(kinds, run_config), [path for path, _ in own])
    first, place = len(trace.kinds), len(trace.places)
    held = [first + number for number in update.held if update.kinds[number].block.part == "optimizer_state"]
    changes, place_of = list(trace.changes), list(trace.place_of)
    changes[at:at] = [number + first if number >= 0 else number - first for number in update.changes]
    place_of[at:at] = [place + number for number in update.place_of]
    return replace(trace, kinds=trace.kinds + update.kinds, held=trace.held + held, changes=changes,
                   places=trace.places + update.places, place_of=place_of, calls=calls)  # fmt: skip


def _update(kinds: Sequence[Sort], run_config: RunConfig) -> MemoryTrace:
    stack = LayerStack.of(_PATH, "", kinds)
    few, more = (_traced(stack.few(units), run_config) for units in (RAN, RAN + 1))
    if not same_events(with_copies(few, _PATH, stack.copies(RAN, RAN + 1)), more):
        return _traced(kinds, run_config)
    return with_copies(few, _PATH, stack.copies(RAN))


def _renamed(trace: MemoryTrace, paths: Sequence[str]) -> MemoryTrace:

    def renamed(path: str) -> str:
        number, dot, rest = path.removeprefix(f"{_PATH}.").partition(".")
        return f"{paths[int(number)]}{dot}{rest}" if path.startswith(f"{_PATH}.") else path

    kinds = [kind._replace(block=kind.block._replace(path=renamed(kind.block.path))) for kind in trace.kinds]
    places = [(phase, renamed(path), operator) for phase, path, operator in trace.places]
    return replace(trace, kinds=kinds, places=places)


def _traced(kinds: Sequence[Sort], run_config: RunConfig) -> MemoryTrace:
    run_config = replace(run_config, parallelism=ONE_PROCESS, batch=1, seq=1, loop=FREED, accumulate=1,
                         clip_grad_norm=False, grad_scaler=False, ema=False, keep_gradients=True)  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if run_config.device == "cuda":
            stack.enter_context(cuda_semantics(run_config))
        model = nn.Module()
        model.update = nn.Module()
        model.update.params = nn.ParameterList(torch.empty(shape, dtype=dtype) for shape, dtype, _ in kinds)
        return fake_run(_Update(model, {}, run_config, trained=[kind[2] for kind in kinds]))


@dataclass
class _Update(ModelStep):
    """A step of an optimizer only: the gradients exist and stay."""

    trained: Sequence[bool] = ()

    def _loop(self, run_config: RunConfig) -> Iterator[str]:
        while True:
            for _ in range(run_config.accumulate):
                yield FORWARD
                for param, is_trained in zip(self.model.parameters(), self.trained, strict=True):
                    if is_trained and param.grad is None:
                        param.grad = torch.empty_like(param)
            if self.optimizer is not None:
                yield OPTIMIZER
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
            yield STEP_END
