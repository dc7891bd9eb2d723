"""The strategies and meshes by which the ranks of a training job share the model and the batch."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from math import prod
from operator import lt, not_

from bertscope.errors import SelectionError
from bertscope.frozen import Record
from bertscope.settings.rows import SettingError, Settings, row
from bertscope.units import PRECISIONS

MAX_WORLD_SIZE = 2**20
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


class ParallelStrategy(Record):
    """A way to train on several ranks, and its mesh's dimension names.

    Ranks along `replicate` and `shard` have different batches; ranks along `tensor` compute one batch together.
    """

    name: str
    help: str
    dimensions: tuple[str, ...]
    reshards: bool = True  # FSDP2 frees the gathered parameters after forward
    divides_optimizer: bool = False  # ZeroRedundancyOptimizer: the ranks hold the states of different layers
    is_searched: bool = False  # by `fit --batch-total`; of equally many ranks the first of these is the answer

    @property
    def is_sharded(self) -> bool:
        """Return True if FSDP2 shards the parameters."""
        return SHARD in self.dimensions

    @property
    def reduces(self) -> bool:
        """Return True if the ranks average gradients from different batches."""
        return bool({REPLICATE, SHARD}.intersection(self.dimensions))

    @property
    def divided_parts(self) -> tuple[str, ...]:
        """Return the memory parts that shrink with more ranks."""
        state = ("optimizer_state",) if self.divides_optimizer or self.is_sharded else ()
        return (*state, "parameters", "gradients") if self.is_sharded and len(self.dimensions) == 1 else state

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
        ParallelStrategy(name=DDP, dimensions=(REPLICATE,), is_searched=True,
                         help="DistributedDataParallel: each rank has the complete model; gradients are averaged"),
        ParallelStrategy(name=ZERO1, dimensions=(REPLICATE,), divides_optimizer=True, is_searched=True,
                         help="DDP with ZeroRedundancyOptimizer: each rank has the optimizer state of some parameters"),
        ParallelStrategy(name=NO_RESHARD, dimensions=(SHARD,), reshards=False, is_searched=True,
                         help="FSDP2 that keeps the gathered parameters from forward to backward"),
        ParallelStrategy(name=FSDP, dimensions=(SHARD,), is_searched=True,
                         help="FSDP2: parameters, gradients and optimizer state sharded; parameters gathered layer by "
                         "layer, in forward and again in backward"),
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
SEARCHED = tuple(name for name, row in STRATEGIES.items() if row.is_searched)


def _mesh(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})?", text, re.ASCII):
        raise SelectionError(f"write 8 or 2x4; got {text[:40]!r}")
    return text


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Return the ranks in each dimension of a mesh such as `2x4`."""
    return tuple(map(int, text.split("x")))


def _has(property_name: str, strategy: str) -> bool:
    return bool(getattr(STRATEGIES[strategy], property_name))


class Parallelism(Settings):
    """The ranks in a job and how they share the work; the batch is one rank's."""

    # fmt: off
    strategy: str = row(
        SINGLE, "The parallelism, such as ddp or fsdp. "
        f"{'; '.join(f'{strategy.name}: {strategy.help}' for strategy in STRATEGIES.values())}.",
        section="ranks", of_modules=False, choices=tuple(STRATEGIES), text="{}",
        concerns={"world_size": partial(lt, 1)},
    )
    world_size: int = row(
        1, "The number of ranks, one GPU each.", section="ranks", of_modules=False, low=1, below=MAX_WORLD_SIZE + 1,
        text="{} ranks",
    )
    mesh: str = row(
        "", "The device mesh of hsdp or tp+fsdp, such as 2x4. Groups x ranks in a group for hsdp; FSDP x tensor "
        "parallelism for tp+fsdp.", section="ranks", of_modules=False, metavar="AxB", convert=_mesh,
        implies={"world_size": lambda text, values: prod(mesh_sizes(text))},
    )
    rank: int = row(0, "The rank to estimate; 0 needs the most memory.", section="ranks", of_modules=False)
    param_dtype: str | None = row(
        None, "The param_dtype of FSDP2's mixed precision.", section="ranks", of_modules=False,
        choices=tuple(PRECISIONS), concerns={"strategy": partial(_has, "is_sharded")},
    )
    sync_each_batch: bool = row(
        True, "Synchronize gradients after each micro-batch, or only after the last. The latter is DDP's no_sync and "
        "FSDP2's set_requires_gradient_sync(False).", section="ranks", of_modules=False,
        concerns={"accumulate": partial(lt, 1), "strategy": partial(_has, "reduces"),
                  "offload_optimizer": not_},
    )
    # fmt: on

    def complete(self) -> None:
        """Set the mesh from the number of ranks, or the reverse; raises SettingError."""
        names = self.row.dimensions
        form = "a number, such as 8"
        if names[1:]:
            form = f"the numbers of ranks of {' x '.join(names)}, such as 2x4"
        if not self.mesh and names[1:]:
            raise SettingError(f"{{strategy}} {self.strategy} needs {{mesh}}, {form}", ["strategy", "mesh"])
        mesh = self.mesh or str(self.world_size)
        ranks = prod(mesh_sizes(mesh))
        if len(mesh_sizes(mesh)) != len(names):
            text = f"{{mesh}} of {{strategy}} {self.strategy} takes {form}; got {mesh}"
            raise SettingError(text, ["mesh", "strategy"])
        if self.world_size not in (1, ranks):
            raise SettingError(
                f"{{mesh}} {mesh} has {ranks:,} ranks and {{world_size}} is {self.world_size:,}; give one of them",
                ["mesh", "world_size"],
            )
        if ranks > MAX_WORLD_SIZE:
            raise SettingError(f"a {{mesh}} has at most {MAX_WORLD_SIZE:,} ranks; got {ranks:,}", ["mesh"])
        if self.strategy == SINGLE and ranks > 1:
            known = ", ".join(name for name in STRATEGIES if name != SINGLE)
            raise SettingError(f"{ranks:,} ranks need {{strategy}}; choose one of {known}", ["strategy", "world_size"])
        if self.rank >= ranks:
            raise SettingError(f"{{rank}} is from 0 to {ranks - 1:,}; got {self.rank:,}", ["rank"])
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "world_size", ranks)

    def of_size(self, world_size: int) -> Parallelism:
        """Return this many ranks in one dimension with the same strategy; one rank needs none."""
        return ONE_PROCESS if world_size == 1 else replace(self, world_size=world_size, mesh="", rank=0)

    @property
    def row(self) -> ParallelStrategy:
        """Return the strategy's row of STRATEGIES."""
        return STRATEGIES[self.strategy]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many ranks each mesh dimension has."""
        return mesh_sizes(self.mesh)

    @property
    def batches(self) -> int:
        """Return how many ranks have different batches."""
        return prod(size for name, size in zip(self.row.dimensions, self.sizes, strict=True) if name != TENSOR)

    @property
    def replicas(self) -> int:
        """Return how many groups of ranks hold the same parameters."""
        return self.sizes[0] if self.row.dimensions[0] == REPLICATE else 1


ONE_PROCESS = Parallelism()
