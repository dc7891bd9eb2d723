"""The strategies and meshes by which the ranks of a training job share the model and the batch."""

from dataclasses import dataclass
from math import prod

from bertscope.errors import SelectionError, suggestion

MAX_WORLD_SIZE = 2**20


@dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """A way to train on several ranks, and the names of the dimensions of its mesh."""

    name: str
    help: str
    dimensions: tuple[str, ...]


SINGLE = "none"
STRATEGIES = {
    row.name: row
    for row in (
        ParallelStrategy(name=SINGLE, help="one process", dimensions=("rank",)),
        ParallelStrategy(name="fsdp", dimensions=("shard",),
                         help="FSDP2: parameters, gradients and optimizer state sharded; parameters gathered layer by "
                         "layer, in forward and again in backward"),
        ParallelStrategy(name="fsdp-no-reshard", dimensions=("shard",),
                         help="FSDP2 that keeps the gathered parameters from forward to backward"),
        ParallelStrategy(name="hsdp", dimensions=("replicate", "shard"),
                         help="FSDP2 inside groups of ranks, gradients averaged between the groups"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Parallelism:
    """A strategy and its mesh: the number of ranks in each dimension."""

    strategy: str = SINGLE
    mesh: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SelectionError(f"no strategy {self.strategy[:40]!r}; {suggestion(self.strategy, STRATEGIES)}")
        wanted = STRATEGIES[self.strategy].dimensions
        if len(self.mesh) != len(wanted) or min(self.mesh) < 1:
            form = "x".join(f"({name} ranks)" for name in wanted)
            raise SelectionError(f"the mesh of {self.strategy} has the form {form}; got {self.mesh_text}")
        if self.world_size > MAX_WORLD_SIZE:
            raise SelectionError(f"a mesh has at most {MAX_WORLD_SIZE:,} ranks; got {self.world_size:,}")
        if self.strategy == SINGLE and self.world_size > 1:
            raise SelectionError(f"{self.world_size} ranks need a strategy; choose one of {', '.join(STRATEGIES)}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.mesh)

    @property
    def mesh_text(self) -> str:
        """Return the mesh as it is written, such as 8x8."""
        return "x".join(map(str, self.mesh))


ONE_PROCESS = Parallelism()
