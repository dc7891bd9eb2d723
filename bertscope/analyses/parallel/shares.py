"""The share of the parameters that each rank updates, from shapes and mesh alone."""

import heapq
from collections.abc import Iterator
from itertools import groupby, pairwise
from math import prod

from bertscope.analyses.parallel.strategies import divided_shape
from bertscope.reports.parallel import RankGroup
from bertscope.settings.parallelism import TENSOR, Parallelism
from bertscope.torch_access import nn


def rank_groups(model: nn.Module, parallelism: Parallelism, layer_path: str = "") -> tuple[RankGroup, ...]:
    """Return the ranks in groups that update the same number of the model's trained parameters."""
    runs = (
        _zero_runs(model, parallelism) if parallelism.row.divides_optimizer else _runs(model, parallelism, layer_path)
    )
    groups: list[RankGroup] = []
    first = 0
    for count, run in groupby(runs, key=lambda run: run[1]):
        last = first + sum(ranks for ranks, _ in run) - 1
        groups.append(RankGroup(first=first, last=last, updated_params=count))
        first = last + 1
    return tuple(groups)


def _runs(model: nn.Module, parallelism: Parallelism, layer_path: str) -> Iterator[tuple[int, int]]:
    """Yield how many ranks follow each other with a share of so many parameters."""
    size = dict(zip(parallelism.row.dimensions, parallelism.sizes, strict=True))
    tensor_ranks = size.get(TENSOR, 1)
    sharding = parallelism.world_size // parallelism.replicas // tensor_ranks
    shapes = [
        divided_shape(path, tuple(param.shape), layer_path, tensor_ranks)
        for path, param in model.named_parameters()
        if param.requires_grad
    ]
    # FSDP2 gives each rank the same number of rows, rounded up, as long as there are any.
    places = {0, sharding}
    for rows in {shape[0] if shape else 1 for shape in shapes}:
        full = rows // -(-rows // sharding)
        places |= {min(full, sharding), min(full + 1, sharding)}
    groups = []
    for first, last in pairwise(sorted(places)):
        count = sum(_rows(shape, first, sharding) * prod(shape[1:]) for shape in shapes)
        groups.append((tensor_ranks * (last - first), count))
    for _ in range(parallelism.replicas):
        yield from groups


def _rows(shape: tuple[int, ...], rank: int, ranks: int) -> int:
    """Return the rows that a rank has of a tensor."""
    rows = shape[0] if shape else 1
    most = -(-rows // ranks)
    return min(most, max(rows - rank * most, 0))


def _zero_runs(model: nn.Module, parallelism: Parallelism) -> Iterator[tuple[int, int]]:
    """Yield each rank with its share: the largest parameter that is left goes to the rank with the fewest numbers."""
    shares = [(0, rank) for rank in range(parallelism.world_size)]
    for count in sorted((param.numel() for param in model.parameters() if param.requires_grad), reverse=True):
        least, rank = shares[0]
        heapq.heapreplace(shares, (least + count, rank))
    for _, count in sorted((rank, count) for count, rank in shares):
        yield 1, count
