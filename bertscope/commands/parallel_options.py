"""Options for a training job of several ranks: of `estimate` and `fit`, and of the real ranks of `profile`."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bertscope.commands.registry import OneOf
from bertscope.errors import SelectionError
from bertscope.parallelism import BUCKET_CAP_MB, MAX_WORLD_SIZE, SINGLE, STRATEGIES, Parallelism, parse_parallelism
from bertscope.units import PRECISIONS

_STRATEGY_HELP = "; ".join(f"{row.name}: {row.help}" for row in STRATEGIES.values())


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Options for what the ranks of a job share; --batch is that of one rank."""

    strategy: Annotated[
        str,
        OneOf(STRATEGIES),
        typer.Option(metavar="STRATEGY", help=f"How the ranks share the work: {_STRATEGY_HELP}."),
    ] = SINGLE
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AxB",
            help="The ranks in two dimensions: groups x ranks of a group for hsdp, FSDP x "
            "tensor parallelism for tp+fsdp.",
        ),
    ] = None
    param_dtype: Annotated[
        str | None,
        OneOf(PRECISIONS),
        typer.Option(help="FSDP2's mixed precision: the dtype of gathered parameters and of the computation."),
    ] = None
    reduce_dtype: Annotated[
        str | None,
        OneOf(PRECISIONS),
        typer.Option(help="FSDP2's mixed precision: the dtype in which gradients are reduced."),
    ] = None
    bucket_cap_mb: Annotated[
        int | None,
        typer.Option(metavar="N", help="The size of DDP's buckets in MiB.", show_default=str(BUCKET_CAP_MB)),
    ] = None
    gradient_as_bucket_view: Annotated[
        bool, typer.Option("--gradient-as-bucket-view", help="Keep DDP's gradients only in its buckets.")
    ] = False

    def of_ranks(self, world_size: int | None, rank: int | None = None) -> Parallelism:
        """Return so many ranks and how they share the work; raises SelectionError."""
        return parse_parallelism(self.strategy, world_size, self.mesh, rank=rank, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the given settings of the strategy, as fields of Parallelism."""
        given = {
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.gradient_as_bucket_view or None,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(StrategyOptions):
    """Options for the ranks of a job that is estimated."""

    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_WORLD_SIZE, help="The number of ranks of a job, one GPU for each."),
    ] = None
    rank: Annotated[
        int | None,
        typer.Option(metavar="R", min=0, help="The rank that is estimated; 0 by default, which has the most."),
    ] = None

    def parallelism(self) -> Parallelism:
        """Return the ranks and how they share the work; raises SelectionError."""
        return self.of_ranks(self.world_size, self.rank)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(StrategyOptions):
    """Options for real ranks, by the names of torchrun."""

    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=1024, help="Run N real ranks on this machine, and measure each."),
    ] = None
    nnodes: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=1024, help="The number of machines; run the command on each, with its --node-rank."
        ),
    ] = 1
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The port of machine 0 where the ranks meet, as for torchrun."),
    ] = None
    node_rank: Annotated[
        int | None,
        typer.Option(metavar="R", min=0, max=1023, help="The number of this machine, from 0, as for torchrun."),
    ] = None

    def parallelism(self) -> Parallelism:
        """Return the ranks of all machines and how they share the work; raises SelectionError."""
        if self.nproc is None:
            if self.strategy != SINGLE or self.mesh is not None or self.nnodes > 1:
                raise SelectionError("profile shares the work among real ranks: give their number, such as --nproc 2")
            return self.of_ranks(None)
        world_size = self.nproc * self.nnodes
        if world_size == 1:
            raise SelectionError("--nproc 1 is a job of one rank; give at least 2, or leave --nproc out")
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise SelectionError("several machines need the place where they meet: --rdzv-endpoint HOST:PORT")
        if (self.nnodes > 1) != (self.node_rank is not None) or (self.node_rank or 0) >= self.nnodes:
            raise SelectionError(
                f"--node-rank is the number of this machine, from 0 to --nnodes - 1 ({self.nnodes - 1})"
            )
        if self.rdzv_endpoint and not re.fullmatch(r"[\w.:\[\]-]{1,255}:\d{1,5}", self.rdzv_endpoint, re.ASCII):
            raise SelectionError(f"--rdzv-endpoint has the form HOST:PORT; got {self.rdzv_endpoint[:60]!r}")
        if self.mesh is None or self.strategy == SINGLE:
            return self.of_ranks(world_size)
        found = self.of_ranks(None)
        if found.world_size != world_size:
            raise SelectionError(
                f"--mesh {self.mesh} has {found.world_size:,} ranks; --nproc and --nnodes start {world_size:,}"
            )
        return found
