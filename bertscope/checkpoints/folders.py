"""Folders that trainers and sentence-transformers write: DeepSpeed's ZeRO, FSDP's `.distcp` files, `modules.json`.

Sources: `deepspeed/runtime/engine.py` and `utils/zero_to_fp32.py` of DeepSpeed 0.19; `metadata.py` in
`torch.distributed.checkpoint` of torch 2.13; `SentenceTransformer.save` of sentence-transformers 6.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from bertscope.checkpoints.files import (
    ITEM_BYTES,
    Budget,
    OpenFile,
    StoredFile,
    is_plain,
    is_size,
    json_in,
    use_of,
)
from bertscope.checkpoints.torch_files import (
    MAX_PICKLE_BYTES,
    Global,
    Opaque,
    PickledDict,
    Tensor,
    described_in,
    read_zip,
    top_level,
)
from bertscope.reports.checkpoint import FilePart, StoredTensor

MODULES = "modules.json"
MAX_MODULES = 100
_MAX_TEXT_BYTES = 1 << 20  # of modules.json, and of the configuration of a module
_SHAPES = ("param_shapes", "frozen_param_shapes")
_RANK = re.compile(r"(mp_rank_[0-9]+)_model_states\.pt$")


def read_distcp(file: OpenFile) -> StoredFile:
    """Return the tensors in an open `.metadata` of torch.distributed.checkpoint, without those of an optimizer."""
    metadata = described_in(file, BytesIO(file.whole(MAX_PICKLE_BYTES)))
    if not isinstance(metadata, Opaque) or metadata.function.name != "Metadata":
        raise file.broken("not the metadata of torch.distributed.checkpoint")
    entries, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, PickledDict) or not isinstance(places, PickledDict):
        raise file.broken("metadata without tensors, or without their files")
    used = _distcp_files(file, places)
    first = next(iter(used), file.path.name)
    tensors = [_distcp_tensor(file, name, entry, first) for name, entry in entries.items()
               if isinstance(entry, Opaque) and entry.function.name == "TensorStorageMetadata"]  # fmt: skip
    tensors = [tensor for tensor in tensors if use_of(tensor.name) == "tensors"]  # not of an optimizer
    if not tensors:
        raise file.broken("metadata without a tensor of a model")
    return file.stored("distcp", tensors, {"header": file.size}, used)


def _distcp_tensor(file: OpenFile, name: str, entry: Opaque, stored_in: str) -> StoredTensor:
    shape, properties = entry.get("size"), entry.get("properties")
    state = properties.state if isinstance(properties, Opaque) else None
    found = [state.get("dtype")] if isinstance(state, PickledDict) else state
    dtype = found[0] if isinstance(found, (list, tuple)) and found else None
    if not isinstance(shape, tuple) or not isinstance(dtype, Global) or dtype.name not in ITEM_BYTES:
        raise file.broken(f"tensor {str(name)[:60]!r} has no shape or dtype")
    return file.tensor(str(name), dtype.name, shape, file=stored_in)


def _distcp_files(file: OpenFile, places: PickledDict) -> dict[str, Counter[str]]:
    """Return the bytes of each file by their use; a place is a file, an offset and a length."""
    used: dict[str, Counter[str]] = {}
    for key, place in places.others:
        record = place if isinstance(place, Opaque) else Opaque(Global("", ""), ())
        name, length = record.get("relative_path"), record.get("length")
        if not is_plain(name) or not is_size(length):
            raise file.broken("a record that is not in a file of the folder")
        used.setdefault(str(name), Counter())[use_of(str(key.get("fqn")))] += length
    return used


# ---- DeepSpeed ----


def zero_states(folder: Path) -> Path | None:
    """Return the file with the model's states in a folder of DeepSpeed, or in that which its file `latest` names."""
    latest = folder / "latest"
    if latest.is_file() and latest.stat().st_size <= 256:
        name = latest.read_text(errors="replace").strip()
        folder = folder / name if is_plain(name) else folder
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_zero(file: OpenFile) -> StoredFile:
    """Return the tensors of a model trained by DeepSpeed: stored as they are, or by their shapes (ZeRO-3)."""
    top = top_level(file)
    module = top.get("module") if isinstance(top, PickledDict) else None
    if not isinstance(module, PickledDict):
        raise file.broken("not the states of a model that DeepSpeed writes")
    ranks = {name[1] for path in file.path.parent.iterdir() if (name := _RANK.search(path.name))}
    if len(ranks) > 1:
        shown = ", ".join(sorted(ranks)[:4])
        raise file.broken(
            f"a tensor-parallel part of a model in {len(ranks)} ({shown}); merge them and count the result"
        )
    groups = [group for field in _SHAPES for group in _listed(top.get(field)) if isinstance(group, PickledDict)]
    shapes = {str(name): shape for group in groups for name, shape in group.items() if isinstance(shape, tuple)}
    parts = [FilePart(file=path.name, what=_use(path), bytes=path.stat().st_size)
             for path in sorted(file.path.parent.iterdir()) if _use(path)]  # fmt: skip
    stored = {name: value for name, value in module.items() if isinstance(value, Tensor)}
    if not shapes or any(value.shape == shapes.get(name) for name, value in stored.items()):
        file.stream.seek(0)
        found = read_zip(file)
        others = [part for part in parts if part.file != file.path.name]
        return replace(found, format="deepspeed", parts=(*found.parts, *others))
    names = [name for name in _listed(top.get("buffer_names")) if isinstance(name, str)]
    rows = [(name, "float32", shape) for name, shape in shapes.items()]  # the copies of the optimizer
    rows += [(name, stored[name].dtype, stored[name].shape) for name in names if name in stored]
    tensors = tuple(file.tensor(*row) for row in rows)
    return StoredFile(format="deepspeed ZeRO-3", tensors=tensors, parts=tuple(parts))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _use(path: Path) -> str:
    uses = {"model_states.pt": "model states", "optim_states.pt": "optimizer state"}
    return next((use for end, use in uses.items() if path.name.endswith(end) and path.is_file()), "")


# ---- sentence-transformers ----


def modules_of(folder: Path, budget: Budget) -> Iterator[tuple[str, Path, str]]:
    """Yield path in the folder, folder and description of each module in a `modules.json`."""
    file, listed = json_in(folder / MODULES, budget, _MAX_TEXT_BYTES)
    if not isinstance(listed, list) or len(listed) > MAX_MODULES or not all(isinstance(item, dict) for item in listed):
        raise file.broken(f"it is no list of at most {MAX_MODULES} modules")
    for item in listed:
        path, kind = item.get("path"), str(item.get("type")).rpartition(".")[2]
        if not isinstance(path, str) or (path and not is_plain(path)):
            raise file.broken("a module that is not in the folder")
        yield path, folder / path, f"{kind}{_pooling(folder / path / 'config.json', budget)}"
        for name, own in _routes(folder / path, budget).items() if kind == "Router" else ():
            inside = f"{path}/{name}" if path else name
            yield inside, folder / inside, own.rpartition(".")[2]


def _routes(folder: Path, budget: Budget) -> dict[str, str]:
    """Return the folders of the modules of a Router, each with its class."""
    file, config = json_in(folder / "router_config.json", budget, _MAX_TEXT_BYTES)
    types = config.get("types") if isinstance(config, dict) else None
    if not isinstance(types, dict) or len(types) > MAX_MODULES or not all(map(is_plain, types)):
        raise file.broken(f"it names no table of types with at most {MAX_MODULES} folders")
    return {name: str(kind) for name, kind in types.items()}


def _pooling(path: Path, budget: Budget) -> str:
    """Return the modes of a Pooling module by its configuration: ` (mean)`; empty for another module."""
    if not path.is_file():
        return ""
    _, config = json_in(path, budget, _MAX_TEXT_BYTES)
    found = config if isinstance(config, dict) else {}
    modes = [key.removeprefix("pooling_mode_").partition("_token")[0] for key, value in found.items()
             if key.startswith("pooling_mode_") and value is True]  # fmt: skip
    modes += [mode] if isinstance(mode := found.get("pooling_mode"), str) else []  # since version 6
    return f" ({', '.join(modes)})" if modes else ""
