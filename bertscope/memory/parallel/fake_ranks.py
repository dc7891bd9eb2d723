"""One process in place of all ranks of a job: collectives return at once, and this rank has its part of the model."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from bertscope.errors import SelectionError
from bertscope.memory.parallel.strategies import Meshes, make_meshes, parallelize
from bertscope.settings.parallelism import Parallelism
from bertscope.torch_access import has_kernel, nn, torch, tree_leaves
from bertscope.torch_access.distributed import TorchFunctionMode, fake_store, forget_meshes, real_tensors


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
    with _Shortcuts():
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


class _Shortcuts(TorchFunctionMode):
    """A mode for the division of parameters without values.

    `torch.chunk` returns one tensor for all parts of equal size, the empty ones too: FSDP divides each parameter by all
    ranks, which takes minutes for thousands of them. Real tensors, which are numbers of ranks, stay real.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is torch.chunk:
            return _equal_parts(*args, **named)
        given = {type(leaf) for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)}
        with real_tensors() if given == {torch.Tensor} else nullcontext():
            return function(*args, **named)


def _equal_parts(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the parts of torch.chunk, those of equal size first, and an empty one for each that it leaves out."""
    size = max(-(-input.shape[dim] // chunks), 1)
    number, rest = divmod(input.shape[dim], size)
    parts = (input.narrow(dim, 0, size),) * number
    if rest:
        parts += (input.narrow(dim, number * size, rest),)
    return parts + (input.new_empty(0),) * (chunks - len(parts))
