"""The collectives of torch.distributed by kind, and the bytes that one rank sends in a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from bertscope.frozen import dataclass
from bertscope.reports.memory import ALL_GATHER, ALL_REDUCE, BACKWARD, BROADCAST, FORWARD, REDUCE_SCATTER, TrafficRow
from bertscope.settings.parallelism import REPLICATE, Parallelism
from bertscope.sources.model_source import all_parameters

if TYPE_CHECKING:
    from bertscope.torch_access import nn

NAMESPACES = ("c10d", "_c10d_functional")  # of torch.distributed's operators
# torch's defaults: _DEFAULT_FIRST_BUCKET_BYTES of torch.distributed, and bucket_cap_mb of DistributedDataParallel.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20


class Collective(NamedTuple):
    """A call of a collective: its phase, kind and module, the bytes of the whole tensor, and the number of ranks."""

    phase: str
    kind: str
    path: str
    full_bytes: int
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """A kind of collective: how its operators' names begin, and the share of the tensor that a rank sends in a ring.

    The shares are those of Patarasuk and Yuan 2009 (doi 10.1016/j.jpdc.2008.09.002) for n ranks.
    """

    name: str
    prefixes: tuple[str, ...]
    sent: Callable[[int, int], int]  # the bytes of the tensor and the ranks -> the bytes that a rank sends


def _one_way(full_bytes: int, ranks: int) -> int:
    return full_bytes * (ranks - 1) // ranks


COLLECTIVE_KINDS = {
    row.name: row
    for row in (
        CollectiveKind(name=ALL_GATHER, prefixes=("allgather", "all_gather"), sent=_one_way),
        CollectiveKind(name=REDUCE_SCATTER, prefixes=("reduce_scatter",), sent=_one_way),
        CollectiveKind(
            name=ALL_REDUCE, prefixes=("allreduce", "all_reduce"), sent=lambda size, ranks: _one_way(2 * size, ranks)
        ),
        CollectiveKind(name=BROADCAST, prefixes=("broadcast",), sent=_one_way),
    )
}  # fmt: skip


def kind_of(operator: str) -> str:
    """Return the kind of an operator such as `_allgather_base_`, empty if it moves nothing between ranks."""
    name = operator.strip("_")
    return next((row.name for row in COLLECTIVE_KINDS.values() if name.startswith(row.prefixes)), "")


def sent_bytes(kind: str, full_bytes: int, ranks: int) -> int:
    """Return the bytes that each of `ranks` sends in a ring, on average, for a tensor of `full_bytes`.

    >>> sent_bytes("all-reduce", 1000, 4)
    1500
    """
    return COLLECTIVE_KINDS[kind].sent(full_bytes, ranks)


def traffic(
    collectives: Iterable[Collective],
    rows: Mapping[str, str],
    bucket_count: int,
    parallelism: Parallelism,
    micro_batches: int = 1,
) -> tuple[TrafficRow, ...]:
    """Return the traffic of a step of so many micro-batches, from the collectives of one and of the optimizer step.

    `rows` gives the row of each module's path. DDP reduces gradients not by module but in buckets, which are one row;
    `bucket_count` is their number.
    """
    found: dict[tuple[str, str, str, int], TrafficRow] = {}
    reductions = micro_batches if parallelism.sync_each_batch else 1
    buckets = reductions * bucket_count if parallelism.row.has_buckets else 0
    for call in collectives:
        is_in_buckets = parallelism.row.has_buckets and (call.phase, call.kind) == (BACKWARD, ALL_REDUCE)
        path = "" if is_in_buckets else rows.get(call.path, call.path)
        times = 1 if call.phase == "optimizer" else reductions if _reduces(call, parallelism) else micro_batches
        key = (call.phase, call.kind, path, call.ranks)
        row = found.get(key) or TrafficRow(
            phase=call.phase, collective=call.kind, path=path, ranks=call.ranks, calls=0, full_bytes=0, sent_bytes=0
        )
        sent = sent_bytes(call.kind, call.full_bytes, call.ranks)
        found[key] = replace(
            row,
            calls=buckets if is_in_buckets else row.calls + times,
            full_bytes=row.full_bytes + times * call.full_bytes,
            sent_bytes=row.sent_bytes + times * sent,
        )
    return tuple(found.values())


def _reduces(call: Collective, parallelism: Parallelism) -> bool:
    """Return True for what each reduction of gradients has once; DDP broadcasts the buffers after one."""
    is_of_replicas = call.kind == ALL_REDUCE and REPLICATE in parallelism.row.dimensions
    in_backward = call.phase == BACKWARD and (call.kind == REDUCE_SCATTER or is_of_replicas)
    return in_backward or (call.phase, call.kind) == (FORWARD, BROADCAST)


def bucket_sizes(model: nn.Module) -> list[int]:
    """Return the bytes of the buckets into which DDP puts the gradients of a model, the first one first.

    A bucket ends when it reaches its limit; tensors of different dtypes or devices are never in one.
    """
    limits: dict[object, int] = {}
    open_bytes: dict[object, int] = {}
    sizes = []
    for param in [param for _, param in all_parameters(model) if param.requires_grad][::-1]:  # in backward's order
        kind = param.dtype, param.device
        open_bytes[kind] = open_bytes.get(kind, 0) + param.nbytes
        if open_bytes[kind] >= limits.setdefault(kind, _FIRST_BUCKET_BYTES):
            sizes.append(open_bytes.pop(kind))
            limits[kind] = _BUCKET_BYTES
    return [*sizes, *open_bytes.values()]
