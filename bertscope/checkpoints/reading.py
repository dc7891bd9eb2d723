"""The entry point for checkpoints of every format: a file, shards with an index, or a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bertscope.checkpoints import INDEX, SUFFIXES, weights_in
from bertscope.checkpoints.budget import Budget
from bertscope.checkpoints.files import StoredFile, broken, opened, strict_json
from bertscope.checkpoints.safetensors import read_safetensors
from bertscope.checkpoints.torch_files import LEGACY, read_legacy, read_zip
from bertscope.errors import SourceError
from bertscope.reports.checkpoint import FilePart, StoredTensor
from bertscope.text_files import readable

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
class Checkpoint:
    """The contents of a checkpoint over all its files."""

    name: str
    path: Path
    format: str
    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    parts: tuple[FilePart, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a file or a folder; raises SourceError for one that is broken, hostile or foreign."""
    with readable(path):
        found = (weights_in(path) or path) if path.is_dir() else path
        budget = Budget(found)
        if found.name.endswith(INDEX):
            return _sharded(found, budget)
        stored = _read_file(found, budget)
    return Checkpoint(
        name=path.name, path=found, format=stored.format, files=(found.name,), tensors=stored.tensors,
        parts=stored.parts, metadata=stored.metadata, problems=stored.problems,
    )  # fmt: skip


def _read_file(path: Path, budget: Budget) -> StoredFile:
    with opened(path) as (file, size):
        budget.add_file(path, file)
        start = file.read(32)
        file.seek(0)
        if start.startswith(b"PK\x03\x04"):
            return read_zip(path, file, size, budget)
        if start.startswith(LEGACY):
            return read_legacy(path, file, size, budget)
        if start[8:9] != b"{":
            _refuse_foreign(path, start)
        return read_safetensors(path, file, size, budget)


def _refuse_foreign(path: Path, start: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if start.startswith(magic):
            raise broken(path, f"{what}; a checkpoint is .safetensors or what torch.save writes")
    if path.suffix != ".safetensors":
        raise broken(path, "neither safetensors nor what torch.save writes" + ("" if start else ": the file is empty"))


def _sharded(path: Path, budget: Budget) -> Checkpoint:
    """Read all shards of an index; raise SourceError unless each tensor is in the shard that the index names."""
    places = _weight_map(path)
    shards = {name: _read_file(path.parent / name, budget) for name in dict.fromkeys(places.values())}
    stored = {(tensor.file, tensor.name): tensor for shard in shards.values() for tensor in shard.tensors}
    for name, shard in places.items():
        if (shard, name) not in stored:
            raise broken(path, f"the index says that {name[:60]!r} lies in {shard}, and it does not")
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


def _weight_map(path: Path) -> dict[str, str]:
    with opened(path) as (file, _):
        raw = file.read(MAX_INDEX_BYTES + 1)
    if len(raw) > MAX_INDEX_BYTES:
        raise broken(path, f"an index of more than {MAX_INDEX_BYTES:,} bytes")
    found: Any = strict_json(path, raw, "the index")
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not places:
        raise broken(path, "an index needs a weight_map of tensors and their files")
    for shard in dict.fromkeys(map(_shard_name, places.values())):
        if not shard:
            raise broken(path, "a shard must be the plain name of a file beside the index")
    if len(set(places.values())) > MAX_SHARDS:
        raise SourceError(f"more than {MAX_SHARDS:,} shards", where=str(path))
    return places


def _shard_name(value: Any) -> str:
    """Return the name, or "" for a name outside the folder or one that is not of weights."""
    is_plain = isinstance(value, str) and PurePosixPath(value).name == value and not set(value) & set("\\\0:")
    return value if is_plain and value != ".." and value.endswith(SUFFIXES) else ""
