"""The strategies and meshes by which the ranks of a training job share the model and the batch."""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from bertscope.errors import SelectionError, suggestion
from bertscope.units import PRECISIONS

MAX_WORLD_SIZE = 2**20
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """A way to train on several ranks, and the names of the dimensions of its mesh.

    Ranks along `replicate` and `shard` have batches of their own; those along `tensor` compute the same batch together.
    """

    name: str
    help: str
    dimensions: tuple[str, ...]

    @property
    def is_sharded(self) -> bool:
        """Return True if FSDP2 shards the parameters."""
        return SHARD in self.dimensions

    @property
    def has_buckets(self) -> bool:
        """Return True if DDP reduces the gradients, in buckets."""
        return self.dimensions == (REPLICATE,)


SINGLE = "none"
DDP, ZERO1, FSDP, NO_RESHARD, HSDP, TP, TP_FSDP = "ddp", "zero1", "fsdp", "fsdp-no-reshard", "hsdp", "tp", "tp+fsdp"
STRATEGIES = {
    row.name: row
    for row in (
        ParallelStrategy(name=SINGLE, help="one process", dimensions=("rank",)),
        ParallelStrategy(name=DDP, dimensions=(REPLICATE,),
                         help="DistributedDataParallel: each rank has the whole model; gradients are averaged"),
        ParallelStrategy(name=ZERO1, dimensions=(REPLICATE,),
                         help="DDP with ZeroRedundancyOptimizer: each rank has the optimizer state of some parameters"),
        ParallelStrategy(name=FSDP, dimensions=(SHARD,),
                         help="FSDP2: parameters, gradients and optimizer state sharded; parameters gathered layer by "
                         "layer, in forward and again in backward"),
        ParallelStrategy(name=NO_RESHARD, dimensions=(SHARD,),
                         help="FSDP2 that keeps the gathered parameters from forward to backward"),
        ParallelStrategy(name=HSDP, dimensions=(REPLICATE, SHARD),
                         help="FSDP2 inside groups of ranks, gradients averaged between the groups"),
        ParallelStrategy(name=TP, dimensions=(TENSOR,),
                         help="tensor parallelism: each rank has some heads and some of the intermediate layer"),
        ParallelStrategy(name=TP_FSDP, dimensions=(SHARD, TENSOR),
                         help="tensor parallelism inside groups of ranks, FSDP2 between them"),
    )
}  # fmt: skip
# The numbers of ranks that a search tries: one, those of a node, then whole nodes of eight.
WORLD_SIZES = (*range(1, 9), *range(16, 1025, 8))
# Those whose ranks have batches of their own and one dimension; of equally many ranks the first strategy is the answer.
TRIED = (DDP, ZERO1, NO_RESHARD, FSDP)
# torch's defaults: bucket_cap_mb of DistributedDataParallel, and _DEFAULT_FIRST_BUCKET_BYTES of torch.distributed.
BUCKET_CAP_MB, FIRST_BUCKET_BYTES = 25, 2**20


@dataclass(frozen=True)
class Parallelism:
    """A strategy and its mesh: the number of ranks in each dimension.

    `param_dtype` and `reduce_dtype` are those of FSDP2's MixedPrecisionPolicy: of gathered parameters and computation,
    and of the reduction of gradients. `bucket_cap_mb` and `gradient_as_bucket_view` are arguments of DDP. `rank` is the
    rank that is estimated.
    """

    strategy: str = SINGLE
    mesh: tuple[int, ...] = (1,)
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    bucket_cap_mb: int = BUCKET_CAP_MB
    gradient_as_bucket_view: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SelectionError(f"no strategy {self.strategy[:40]!r}; {suggestion(self.strategy, STRATEGIES)}")
        row = STRATEGIES[self.strategy]
        if len(self.mesh) != len(row.dimensions) or min(self.mesh) < 1:
            form = "x".join(f"({name} ranks)" for name in row.dimensions)
            raise SelectionError(f"the mesh of {self.strategy} has the form {form}; got {self.mesh_text}")
        if self.world_size > MAX_WORLD_SIZE:
            raise SelectionError(f"a mesh has at most {MAX_WORLD_SIZE:,} ranks; got {self.world_size:,}")
        if self.strategy == SINGLE and self.world_size > 1:
            names = ", ".join(name for name in STRATEGIES if name != SINGLE)
            raise SelectionError(f"{self.world_size:,} ranks need a strategy; choose one of {names}")
        if not 0 <= self.rank < self.world_size:
            raise SelectionError(f"the ranks are 0 to {self.world_size - 1:,}; got rank {self.rank:,}")
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in PRECISIONS:
                raise SelectionError(f"{name} must be one of {', '.join(PRECISIONS)}; got {value[:40]!r}")
            if value is not None and not row.is_sharded:
                raise SelectionError(f"{name} concerns FSDP2; {self.strategy} has none, use autocast")
        if not 1 <= self.bucket_cap_mb <= 2**20:
            raise SelectionError(f"bucket_cap_mb must be from 1 to 2**20; got {self.bucket_cap_mb}")
        for name in ("bucket_cap_mb", "gradient_as_bucket_view"):
            if getattr(self, name) != getattr(Parallelism, name) and not row.has_buckets:
                raise SelectionError(f"{name} concerns {DDP} and {ZERO1}; {self.strategy} has no buckets")

    @property
    def row(self) -> ParallelStrategy:
        """Return the strategy's row of STRATEGIES."""
        return STRATEGIES[self.strategy]

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.mesh)

    @property
    def batches(self) -> int:
        """Return the number of ranks that have a batch of their own."""
        return prod(size for name, size in zip(self.row.dimensions, self.mesh, strict=True) if name != TENSOR)

    @property
    def replicas(self) -> int:
        """Return the number of groups of ranks whose members have the same parameters."""
        return self.mesh[0] if self.row.dimensions[0] == REPLICATE else 1

    @property
    def mesh_text(self) -> str:
        """Return the mesh as it is written, such as 8x8."""
        return "x".join(map(str, self.mesh))


def parse_parallelism(
    strategy: str | None = None, world_size: int | None = None, mesh: str | None = None, **settings: Any
) -> Parallelism:
    """Return the Parallelism of a strategy with a number of ranks, or with a mesh such as `8x8`.

    `settings` are further fields of Parallelism; those that are None keep their defaults. Raises SelectionError.

    >>> parse_parallelism("hsdp", mesh="2x4").world_size
    8
    """
    name = strategy or SINGLE
    if name not in STRATEGIES:
        raise SelectionError(f"no strategy {name[:40]!r}; {suggestion(name, STRATEGIES)}")
    dimensions = STRATEGIES[name].dimensions
    if mesh is not None and not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})?", mesh, re.ASCII):
        raise SelectionError(f"--mesh has the form 8 or 2x4; got {mesh[:40]!r}")
    if mesh is None and len(dimensions) > 1:
        raise SelectionError(f"{name} needs --mesh, the numbers of ranks of {' x '.join(dimensions)}, such as 2x4")
    if mesh is None and world_size is None and name != SINGLE:
        raise SelectionError(f"{name} needs --world-size, the number of ranks, such as 8")
    sizes = (world_size or 1,) if mesh is None else tuple(map(int, mesh.split("x")))
    if world_size is not None and prod(sizes) != world_size:
        raise SelectionError(f"--mesh {mesh} has {prod(sizes):,} ranks and --world-size is {world_size:,}; give one")
    return Parallelism(name, sizes, **{field: value for field, value in settings.items() if value is not None})


ONE_PROCESS = Parallelism()
