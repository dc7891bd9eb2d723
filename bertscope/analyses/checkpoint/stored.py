"""Contents of a checkpoint: its tensors in rows, and the sums, from its header and without torch."""

from collections import defaultdict
from collections.abc import Iterator

from bertscope import __version__
from bertscope.checkpoints.reading import Checkpoint
from bertscope.errors import SelectionError
from bertscope.reports.checkpoint import CheckpointReport, DtypeRow, Stored, StoredRow, StoredTensor
from bertscope.reports.layer_ranges import collapse, in_order

_BY = ("layer", "module", "parameter")


def stored_report(checkpoint: Checkpoint, *, by: str = "layer") -> CheckpointReport:
    """Return the checkpoint in rows: its tensors with equal layers folded, one by one ("parameter"), or by module."""
    if by not in _BY:
        raise SelectionError(f"a checkpoint has no groups; it is counted by {', '.join(_BY)}")
    ordered = sorted(checkpoint.tensors, key=lambda tensor: in_order(tensor.name))
    if by == "parameter":
        rows = [_row(tensor.name, [tensor]) for tensor in checkpoint.tensors]
    elif by == "layer":
        keyed = ((tensor.name, (tensor.shape, tensor.dtype, tensor.shares), tensor) for tensor in ordered)
        rows = [_row(name, items) for name, _, items in collapse(keyed)]
    else:
        modules: dict[str, list[StoredTensor]] = defaultdict(list)
        for tensor in ordered:
            modules[tensor.name.rpartition(".")[0] or "(own)"].append(tensor)
        rows = [_row(name, items) for name, items in modules.items()]
    return CheckpointReport(stored=sums(checkpoint), by=by, rows=tuple(rows), bertscope_version=__version__)


def sums(checkpoint: Checkpoint) -> Stored:
    """Return the totals over all files."""
    distinct = [tensor for tensor in checkpoint.tensors if tensor.shares is None]
    return Stored(
        name=checkpoint.name,
        format=checkpoint.format,
        files=checkpoint.files,
        tensors=len(checkpoint.tensors),
        stored_params=sum(tensor.params for tensor in checkpoint.tensors),
        distinct_params=sum(tensor.params for tensor in distinct),
        tensor_bytes=sum(part.bytes for part in checkpoint.parts if part.what == "tensors"),
        file_bytes=sum(part.bytes for part in checkpoint.parts),
        dtypes=tuple(_dtypes(distinct)),
        parts=checkpoint.parts,
        metadata=checkpoint.metadata,
        problems=checkpoint.problems,
    )


def _dtypes(tensors: list[StoredTensor]) -> Iterator[DtypeRow]:
    for dtype in sorted({tensor.dtype for tensor in tensors}):
        found = [tensor for tensor in tensors if tensor.dtype == dtype]
        yield DtypeRow(
            dtype=dtype, tensors=len(found), params=sum(item.params for item in found),
            bytes=sum(item.bytes for item in found),
        )  # fmt: skip


def _row(name: str, tensors: list[StoredTensor]) -> StoredRow:
    first, *others = tensors
    if not others:
        return StoredRow(name=name, dtype=first.dtype, shape=first.shape, copies=1, params=first.params,
                         bytes=first.bytes, shares=first.shares)  # fmt: skip
    shapes, dtypes = {item.shape for item in tensors}, {item.dtype for item in tensors}
    return StoredRow(
        name=name,
        dtype=", ".join(sorted(dtypes)),
        shape=first.shape if len(shapes) == 1 else None,
        copies=len(tensors),
        params=sum(item.params for item in tensors),
        bytes=sum(item.bytes for item in tensors),
        shares=None,
    )
