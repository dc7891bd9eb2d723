"""The entry point for checkpoints of every format: a file, shards with an index, or a folder."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bertscope import __version__
from bertscope.checkpoints import INDEX, SUFFIXES, weights_in
from bertscope.checkpoints.files import Budget, OpenFile, StoredFile, opened
from bertscope.checkpoints.safetensors import read_safetensors
from bertscope.checkpoints.torch_files import LEGACY, read_legacy, read_zip
from bertscope.errors import SelectionError, SourceError
from bertscope.reports.checkpoint import CheckpointReport, DtypeRow, Stored, StoredRow, StoredTensor
from bertscope.reports.layer_ranges import collapse, in_order

MAX_INDEX_BYTES = 16 << 20
MAX_SHARDS = 10_000
_FOREIGN = {
    b"GGUF": "a GGUF file, of llama.cpp",
    b"\x89HDF": "an HDF5 file, of Keras",
    b"version https://git-lfs": "a Git LFS pointer and not the file itself ('git lfs pull' fetches it)",
    b"<": "a page of HTML or XML",
    b"\x1f\x8b": "a gzip file; unpack it first",
    b"\x93NUMPY": "a NumPy array",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StoredFile):
    """The contents of a checkpoint over all its files."""

    name: str
    path: Path
    files: tuple[str, ...]


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Return the checkpoint in a file or a folder; raises SourceError for one that is broken, hostile or foreign.

    >>> bertscope.read_checkpoint("my-bert").files  # a folder with model.safetensors
    ('model.safetensors',)
    """
    path = Path(path)
    found = weights_in(path) or path
    budget = Budget(found)
    if found.name.endswith(INDEX):
        return _sharded(found, budget)
    return Checkpoint(name=path.name, path=found, files=(found.name,), **vars(_read_file(found, budget)))


def _read_file(path: Path, budget: Budget) -> StoredFile:
    with opened(path, budget) as file:
        start = file.stream.read(32)
        file.stream.seek(0)
        if start.startswith(b"PK\x03\x04"):
            return read_zip(file)
        if start.startswith(LEGACY):
            return read_legacy(file)
        if start[8:9] != b"{":
            _refuse_foreign(file, start)
        return read_safetensors(file)


def _refuse_foreign(file: OpenFile, start: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if start.startswith(magic):
            raise file.broken(f"{what}; a checkpoint is .safetensors or what torch.save writes")
    if file.path.suffix != ".safetensors":
        empty = "" if start else ": the file is empty"
        raise file.broken(f"neither safetensors nor what torch.save writes{empty}")


def _sharded(path: Path, budget: Budget) -> Checkpoint:
    """Read all shards of an index; raise SourceError unless each tensor is in the shard that the index names."""
    with opened(path, budget) as index:
        places = _weight_map(index)
    shards = {name: _read_file(path.parent / name, budget) for name in dict.fromkeys(places.values())}
    stored = {(tensor.file, tensor.name): tensor for shard in shards.values() for tensor in shard.tensors}
    for name, shard in places.items():
        if (shard, name) not in stored:
            raise index.broken(f"the index says that {name[:60]!r} lies in {shard}, and it does not")
    extra = [name for shard, name in stored if places.get(name) != shard]
    problems = [problem for shard in shards.values() for problem in shard.problems]
    if extra:
        problems.append(f"{len(extra)} tensors of the shards are not in the index, {extra[0][:60]!r} the first")
    return Checkpoint(
        name=path.parent.name or path.name,
        path=path,
        format=next(iter(shards.values())).format,
        files=tuple(shards),
        tensors=tuple(stored[shard, name] for name, shard in places.items()),
        parts=tuple(part for shard in shards.values() for part in shard.parts),
        metadata={key: value for shard in shards.values() for key, value in shard.metadata.items()},
        problems=tuple(problems),
    )


def _weight_map(index: OpenFile) -> dict[str, str]:
    raw = index.stream.read(MAX_INDEX_BYTES + 1)
    if len(raw) > MAX_INDEX_BYTES:
        raise index.broken(f"an index of more than {MAX_INDEX_BYTES:,} bytes")
    found: Any = index.json(raw, "the index")
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not places:
        raise index.broken("an index needs a weight_map of tensors and their files")
    if not all(map(_is_shard_name, places.values())):
        raise index.broken("a shard must be the plain name of a file in the folder of the index")
    if len(set(places.values())) > MAX_SHARDS:
        raise SourceError(f"more than {MAX_SHARDS:,} shards", where=str(index.path))
    return places


def _is_shard_name(value: Any) -> bool:
    """Return False for a name outside the folder and for one that is not of weights."""
    is_plain = isinstance(value, str) and PurePosixPath(value).name == value and not set(value) & set("\\\0:")
    return is_plain and value != ".." and value.endswith(SUFFIXES)


# ---- contents of a checkpoint: its tensors in rows, and the sums, from its header and without torch ----


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
