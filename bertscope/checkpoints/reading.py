"""The entry point for checkpoints in every format: a file, shards with an index, or a folder.

sentence-transformers writes a `modules.json`; source: `SentenceTransformer.save` of sentence-transformers 6.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertscope import __version__
from bertscope.checkpoints import INDEX, LEGACY, SUFFIXES, has_modules, refused, weights_in
from bertscope.checkpoints.files import Budget, StoredFile, is_plain, json_in, opened
from bertscope.checkpoints.gguf import read_gguf, splits
from bertscope.checkpoints.onnx import read_onnx
from bertscope.checkpoints.packing import unpacked, unread
from bertscope.checkpoints.safetensors import read_safetensors
from bertscope.checkpoints.torch_files import read_distcp, read_legacy, read_zero, read_zip, zero_states
from bertscope.errors import SelectionError, SourceError, typed_arguments
from bertscope.reports.checkpoint import CheckpointReport, DtypeRow, Stored, StoredRow, StoredTensor
from bertscope.reports.layer_ranges import collapse, in_order

MAX_INDEX_BYTES = 16 << 20
MAX_SHARDS = 10_000
_HDF5 = b"\x89HDF"
_FOREIGN = {
    b"version https://git-lfs": "a Git LFS pointer and not the file itself ('git lfs pull' fetches it)",
    b"<": "a page of HTML or XML",
    b"\x1f\x8b": "a gzip file; unpack it first",
    b"\x93NUMPY": "a NumPy array",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StoredFile):
    """A checkpoint's contents over all its files."""

    name: str
    path: Path
    files: tuple[str, ...]
    unknown_packing: str = ""  # of tensors that are counted as stored
    modules: tuple[str, ...] = ()  # prefixes of further modules of sentence-transformers


@typed_arguments
def read_checkpoint(path: Path | str) -> Checkpoint:
    """Return the checkpoint in a file or a folder; raises SourceError for one that is broken, hostile or foreign.

    >>> bertscope.read_checkpoint("my-bert").files  # a folder with model.safetensors
    ('model.safetensors',)
    """
    path = Path(path)
    if has_modules(path):
        return _of_modules(path, Budget(path))
    return _read(path, Budget(path))


def _read(path: Path, budget: Budget) -> Checkpoint:
    file = weights_in(path) or path
    file = zero_states(file.parent) or file if file.name == "latest" else file
    if not file.exists() and (index := file.with_name(f"{file.name}.index")).exists():
        file = index  # TensorFlow's users name the front of its files
    if file.name.endswith(INDEX):
        return _sharded(file, budget)
    return _joined(path.name, file, [_read_file(shard, budget) for shard in splits(file)])


def _joined(name: str, path: Path, shards: Iterable[StoredFile], **fields: Any) -> Checkpoint:
    files = list(shards)
    values = {name: value for file in files for name, value in file.values.items()}
    parts = tuple(part for file in files for part in file.parts)
    whole: dict[str, Any] = {
        "name": name, "path": path, "format": files[0].format, "parts": parts, "values": values,
        "files": tuple(dict.fromkeys(part.file for part in parts)),
        "metadata": {key: value for file in files for key, value in file.metadata.items()},
        "problems": tuple(problem for file in files for problem in file.problems),
        "tensors": tuple(tensor for file in files for tensor in file.tensors),
    } | fields  # fmt: skip
    whole["tensors"] = tensors = unpacked(whole["tensors"], values, files[0].format)
    config, method = (path if path.is_dir() else path.parent) / "config.json", ""
    with suppress(SourceError):
        _, members = json_in(config, Budget(config), MAX_INDEX_BYTES)
        settings = members.get("quantization_config") if isinstance(members, dict) else None
        method = str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
    return Checkpoint(**whole, unknown_packing=unread(tensors, method))


def _of_modules(folder: Path, budget: Budget) -> Checkpoint:
    files, kinds, fronts = list[StoredFile](), list[str](), list[str]()
    for path, position, kind in modules_of(folder, budget):
        kinds.append(kind)
        if weights_in(position) is None:
            continue
        one = _read(position, budget)
        front = f"{path}." if files else ""
        fronts += [front] if front else []
        inside = f"{path}/" if path else ""
        tensors = (replace(tensor, name=front + tensor.name, file=inside + tensor.file,
                           shares=tensor.shares and front + tensor.shares) for tensor in one.tensors)  # fmt: skip
        parts = (replace(part, file=inside + part.file) for part in one.parts)
        files.append(replace(one, tensors=tuple(tensors), parts=tuple(parts)))
    if not files:
        raise SourceError("modules.json names no module with weights", where=str(folder))
    metadata = {"modules": ", ".join(kinds)}
    return _joined(folder.name, folder, files, metadata=metadata, modules=tuple(fronts))


def _read_file(path: Path, budget: Budget) -> StoredFile:
    with opened(path, budget) as file:
        start = file.stream.read(32)
        file.stream.seek(0)
        if path.name == ".metadata":
            return read_distcp(file)
        if path.name.endswith("_model_states.pt"):
            return read_zero(file)
        if start.startswith(b"PK\x03\x04") and path.suffix != ".keras":
            return read_zip(file)
        if start.startswith(LEGACY):
            return read_legacy(file)
        if start.startswith(b"GGUF"):
            return read_gguf(file)
        if what := refused(path.name) or (refused(".h5") if start.startswith(_HDF5) else ""):
            raise file.broken(what)
        if path.suffix == ".onnx":
            return read_onnx(file)
        if start[8:9] != b"{":
            if foreign := next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), ""):
                raise file.broken(f"{foreign}; a checkpoint is .safetensors or what torch.save writes")
            if path.suffix != ".safetensors":
                empty = "" if start else ": the file is empty"
                raise file.broken(f"neither safetensors nor what torch.save writes{empty}")
        return read_safetensors(file)


def _sharded(path: Path, budget: Budget) -> Checkpoint:
    index, names = json_in(path, budget, MAX_INDEX_BYTES, "the index")
    places = names.get("weight_map") if isinstance(names, dict) else None
    if not isinstance(places, dict) or not places:
        raise index.broken("an index needs a weight_map of tensors and their files")
    if not all(is_plain(name) and name.endswith(SUFFIXES) for name in places.values()):
        raise index.broken("a shard must be the plain name of a file in the folder of the index")
    if len(set(places.values())) > MAX_SHARDS:
        raise SourceError(f"more than {MAX_SHARDS:,} shards", where=str(path))
    shards = {name: _read_file(path.parent / name, budget) for name in dict.fromkeys(places.values())}
    stored = {(tensor.file, tensor.name): tensor for shard in shards.values() for tensor in shard.tensors}
    for name, shard in places.items():
        if (shard, name) not in stored:
            raise index.broken(f"the index says that {name[:60]!r} lies in {shard}, and it does not")
    extra = [name for shard, name in stored if places.get(name) != shard]
    tensors = tuple(stored[shard, name] for name, shard in places.items())
    whole = _joined(path.parent.name or path.name, path, shards.values(), files=tuple(shards), tensors=tensors)
    if not extra:
        return whole
    problem = f"{len(extra)} tensors of the shards are not in the index, {extra[0][:60]!r} the first"
    return replace(whole, problems=(*whole.problems, problem))


# ---- contents of a checkpoint: its tensors in rows, and the sums, from its header and without torch ----


_BY = ("layer", "module", "parameter", "tree")
_MAX_DEPTH = 16  # of a tree; what lies deeper is in the sums


def stored_report(checkpoint: Checkpoint, *, by: str = "layer", depth: int | None = None) -> CheckpointReport:
    """Return the checkpoint in rows: its tensors with equal layers folded, one by one ("parameter"), or by module.

    In a tree, each module down to `depth` has a row with the sums of all tensors at and below it.
    """
    if by not in _BY:
        raise SelectionError(f"a checkpoint has no groups; it is counted by {', '.join(_BY)}")
    ordered = sorted(checkpoint.tensors, key=lambda tensor: in_order(tensor.name))
    if by == "parameter":
        rows = [_row(tensor.name, [tensor]) for tensor in checkpoint.tensors]
    elif by == "layer":
        keyed = ((tensor.name, (tensor.shape, tensor.dtype, tensor.shares), tensor) for tensor in ordered)
        rows = [_row(name, items) for name, _, items in collapse(keyed)]
    elif by == "tree":
        rows = [*_tree(ordered, _MAX_DEPTH if depth is None else min(depth, _MAX_DEPTH))]
    else:
        modules: dict[str, list[StoredTensor]] = defaultdict(list)
        for tensor in ordered:
            modules[tensor.name.rpartition(".")[0] or "(own)"].append(tensor)
        rows = [_row(name, items) for name, items in modules.items()]
    return CheckpointReport(stored=sums(checkpoint), by=by, rows=tuple(rows), bertscope_version=__version__)


def _tree(tensors: list[StoredTensor], depth: int) -> Iterator[StoredRow]:
    modules: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        parts = re.split(r"[./]", tensor.name)[:-1]
        for level in range(min(len(parts), depth) + 1):
            modules[".".join(parts[:level])].append(tensor)
    rows = [replace(_row(name, items), shape=None, copies=1) for name, items in modules.items()]
    for name, _, items in collapse((row.name, (row.params, row.dtype, row.packing), row) for row in rows):
        params, size = (sum(getattr(item, field) for item in items) for field in ("params", "bytes"))
        yield replace(items[0], name=name or "(all)", copies=len(items), params=params, bytes=size)


def sums(checkpoint: Checkpoint) -> Stored:
    """Return the totals over all files."""
    distinct = [tensor for tensor in checkpoint.tensors if tensor.shares is None]
    groups: dict[tuple[str, str], list[StoredTensor]] = defaultdict(list)
    for tensor in distinct:
        groups[tensor.dtype, tensor.packing or ""].append(tensor)
    dtypes = (
        DtypeRow(
            dtype=dtype, tensors=sum(item.tensors for item in members), params=sum(item.params for item in members),
            bytes=sum(item.bytes for item in members), packing=packing or None,
        )
        for (dtype, packing), members in sorted(groups.items())
    )  # fmt: skip
    equal = ("name", "format", "files", "parts", "metadata", "problems", "unknown_packing")
    return Stored(
        **{name: getattr(checkpoint, name) for name in equal},
        tensors=sum(tensor.tensors for tensor in checkpoint.tensors),
        stored_params=sum(tensor.params for tensor in checkpoint.tensors),
        distinct_params=sum(tensor.params for tensor in distinct),
        weights=sum(tensor.params for tensor in distinct if tensor.is_weight),
        weight_bytes=sum(tensor.bytes for tensor in distinct if tensor.is_weight),
        tensor_bytes=sum(part.bytes for part in checkpoint.parts if part.what == "tensors"),
        file_bytes=sum(part.bytes for part in checkpoint.parts),
        dtypes=tuple(dtypes),
    )


def _row(name: str, tensors: list[StoredTensor]) -> StoredRow:
    shapes = {item.shape for item in tensors}
    return StoredRow(
        name=name,
        dtype=", ".join(sorted({item.dtype for item in tensors})),
        shape=shapes.pop() if len(shapes) == 1 else None,
        copies=len(tensors),
        params=sum(item.params for item in tensors),
        bytes=sum(item.bytes for item in tensors),
        shares=tensors[0].shares if len(tensors) == 1 else None,
        packing=", ".join(sorted({item.packing for item in tensors if item.packing})) or None,
    )


MODULES = "modules.json"
MAX_MODULES = 100
_MAX_TEXT_BYTES = 1 << 20  # of modules.json, and of the configuration of a Router


# ---- sentence-transformers ----


def modules_of(folder: Path, budget: Budget) -> Iterator[tuple[str, Path, str]]:
    """Yield each module's path in the folder, folder and class from a `modules.json`."""
    file, listed = json_in(folder / MODULES, budget, _MAX_TEXT_BYTES)
    if not isinstance(listed, list) or len(listed) > MAX_MODULES or not all(isinstance(item, dict) for item in listed):
        raise file.broken(f"it is not a list of at most {MAX_MODULES} modules")
    for item in listed:
        path, kind = item.get("path"), str(item.get("type")).rpartition(".")[2]
        if not isinstance(path, str) or (path and not is_plain(path)):
            raise file.broken("a module that is not in the folder")
        yield path, folder / path, kind
        for name, routes in _routes(folder / path, budget).items() if kind == "Router" else ():
            inside = f"{path}/{name}" if path else name
            yield inside, folder / inside, routes.rpartition(".")[2]


def _routes(folder: Path, budget: Budget) -> dict[str, str]:
    file, config = json_in(folder / "router_config.json", budget, _MAX_TEXT_BYTES)
    types = config.get("types") if isinstance(config, dict) else None
    if not isinstance(types, dict) or len(types) > MAX_MODULES or not all(map(is_plain, types)):
        raise file.broken(f"it names no table of types with at most {MAX_MODULES} folders")
    return {name: str(kind) for name, kind in types.items()}
