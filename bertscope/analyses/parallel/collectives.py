"""The collectives of torch.distributed by kind, and the bytes that one rank sends in a ring."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from bertscope.torch_access import torch

NAMESPACES = ("c10d", "_c10d_functional")  # of torch.distributed's operators


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """A kind of collective: how its operators' names begin, and the share of the tensor that a rank sends in a ring.

    The shares are those of Patarasuk and Yuan 2009 (doi 10.1016/j.jpdc.2008.09.002) for n ranks.
    """

    name: str
    prefixes: tuple[str, ...]
    sent: Callable[[int], Fraction]


def _one_way(ranks: int) -> Fraction:
    return Fraction(ranks - 1, ranks)


KINDS = {
    row.name: row
    for row in (
        CollectiveKind(name="all-gather", prefixes=("allgather", "all_gather"), sent=_one_way),
        CollectiveKind(name="reduce-scatter", prefixes=("reduce_scatter",), sent=_one_way),
        CollectiveKind(name="all-reduce", prefixes=("allreduce", "all_reduce"), sent=lambda ranks: 2 * _one_way(ranks)),
        CollectiveKind(name="broadcast", prefixes=("broadcast",), sent=_one_way),
    )
}


def kind_of(operator: str) -> str:
    """Return the kind of an operator such as `_allgather_base_`, empty if it moves nothing between ranks."""
    name = operator.strip("_")
    return next((row.name for row in KINDS.values() if name.startswith(row.prefixes)), "")


def sent_bytes(kind: str, full_bytes: int, ranks: int) -> int:
    """Return the bytes that each of `ranks` sends in a ring, on average, for a tensor of `full_bytes`.

    >>> sent_bytes("all-reduce", 1000, 4)
    1500
    """
    return int(KINDS[kind].sent(ranks) * full_bytes)


def bucket_bytes(tensors: Iterable[torch.Tensor], limits: tuple[int, int]) -> list[int]:
    """Return the sizes of the buckets into which DDP puts gradients; `limits` are those of the first and of others."""
    given = list(tensors)[::-1]  # in the order in which their gradients are expected
    places, _ = torch.distributed._compute_bucket_assignment_by_size(given, list(limits), [False] * len(given))
    return [sum(given[place].nbytes for place in bucket) for bucket in places]
