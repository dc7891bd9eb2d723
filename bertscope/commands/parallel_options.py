"""Options for a training job of several ranks, which `estimate`, `fit` and `profile` share."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bertscope.commands.registry import OneOf
from bertscope.parallelism import BUCKET_CAP_MB, MAX_WORLD_SIZE, SINGLE, STRATEGIES, Parallelism, parse_parallelism
from bertscope.units import PRECISIONS

_STRATEGY_HELP = "; ".join(f"{row.name}: {row.help}" for row in STRATEGIES.values())


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Options for the ranks of a job and what they share; --batch is that of one rank."""

    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_WORLD_SIZE, help="The number of ranks of a job, one GPU for each."),
    ] = None
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
    rank: Annotated[
        int | None,
        typer.Option(metavar="R", min=0, help="The rank that is estimated; 0 by default, which has the most."),
    ] = None

    def parallelism(self) -> Parallelism:
        """Return the ranks and how they share the work; raises SelectionError."""
        return parse_parallelism(
            self.strategy,
            self.world_size,
            self.mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view or None,
            rank=self.rank,
        )
