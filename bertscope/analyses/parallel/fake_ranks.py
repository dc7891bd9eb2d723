"""One process in place of all ranks of a job: collectives return at once, and this rank has its part of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bertscope.errors import SelectionError
from bertscope.parallelism import STRATEGIES, Parallelism
from bertscope.torch_access import TorchFunctionMode, fake_store, nn, torch


@contextmanager
def fake_ranks(parallelism: Parallelism) -> Iterator[Any]:
    """Make this process rank 0 of a job whose other ranks do not exist; yield the mesh.

    Enter it outside FakeTensorMode, in which the numbers of the ranks would have no values. Raises SelectionError if
    the process already belongs to a job.
    """
    dist = torch.distributed
    if not dist.is_available():
        raise SelectionError("this build of torch has no torch.distributed; install one that has")
    if dist.is_initialized():
        raise SelectionError("this process belongs to a process group; estimate in a process of its own")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", rank=0, world_size=parallelism.world_size, store=fake_store())
    try:
        yield init_device_mesh("cpu", parallelism.mesh, mesh_dim_names=STRATEGIES[parallelism.strategy].dimensions)
    finally:
        dist.destroy_process_group()


def layers_of(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the layers of the list at `path`; none without a path."""
    return list(model.get_submodule(path).children()) if path else []


def parallelize(model: nn.Module, layers: list[nn.Module], parallelism: Parallelism, mesh: Any) -> None:
    """Apply the strategy to a model as a training script does: to each layer, then to what is left.

    The model changes: its parameters become DTensors, which hold the part of this rank.
    """
    from torch.distributed.fsdp import fully_shard

    with _FirstParts():
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=parallelism.strategy != "fsdp-no-reshard")


class _FirstParts(TorchFunctionMode):
    """A mode in which each part of `torch.chunk` is the first, which is the only one that rank 0 has.

    FSDP divides each parameter by all ranks, which takes minutes for thousands of them.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.chunk:
            return function(*args, **(kwargs or {}))
        return _first_parts(*args, **(kwargs or {}))


def _first_parts(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the first part of torch.chunk, as often as there are parts."""
    size = -(-input.shape[dim] // chunks)
    return (input.narrow(dim, 0, size),) * chunks
