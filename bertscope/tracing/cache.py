"""Results that commands share: what was traced and verified, and FLOPs, in the user's cache folder.

A file is compressed JSON after a line with its digest. Its name is a digest of all that decides the result: the model,
the run, the versions, the files of bertscope, and for a CPU the machine. Nothing here imports torch or runs code, and a
damaged file is as good as none. Without a folder of the user's own there is no cache.
"""

import hashlib
import json
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import bertscope
from bertscope.errors import BertscopeError, BertscopeWarning, SourceError
from bertscope.files import digest, open_file
from bertscope.processes.signals import uninterrupted
from bertscope.settings.run_config import CACHE_VARIABLE, CUDA, RunConfig
from bertscope.sources.find import teachers
from bertscope.sources.model_source import ModelSource

MOST_BYTES, MOST_FILES, MOST_DAYS = 64 * 2**20, 2_000, 30  # of the folder; a file counts from its last use
_MOST_FILE_BYTES, _MOST_TEXT_BYTES = 4 * 2**20, 64 * 2**20
_BEGUN, _SUFFIX = ".bertscope-", ".trace"
_OWN_NAME = re.compile(rf"({re.escape(_BEGUN)}.*|[0-9a-f]{{64}}){re.escape(_SUFFIX)}")
_OWN, _PACKAGES = re.compile(r"torch-.*-info$"), re.compile(r"(torch|transformers|peft)-.*-info$")
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
Result = TypeVar("Result")
_uncached: list[None] = []  # blocks of `uncached` that run


def saved(
    kind: str,
    source: ModelSource,
    run_config: RunConfig,
    compute: Callable[[], Result],
    to_data: Callable[[Result], Any],
    from_data: Callable[[Any], Result],
) -> Result:
    """Return the result in the cache, else the computed one, which is saved; only computed without a cache.

    `from_data` raises an error for data that no result has: a file is believed as far as it was checked.

    A model of the user's own code is computed each time: a digest does not know what its code does. So is a result that
    came with a note, which would be lost.
    """
    path = _place(kind, source, run_config)
    if path is not None:
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, BertscopeError, zlib.error):
            return from_data(json.loads(_read(path)))
    if _chosen:
        _set_threads()
    notes, result = BertscopeWarning.count, compute()
    if path is not None and notes == BertscopeWarning.count:
        with suppress(OSError, OverflowError):  # a full disk is no reason to fail
            _write(path, json.dumps(to_data(result), separators=(",", ":")).encode())
    return result


@contextmanager
def uncached() -> Iterator[None]:
    """Compute everything anew: a check believes no file."""
    _uncached.append(None)
    try:
        yield
    finally:
        _uncached.pop()


def is_saved(kind: str, source: ModelSource, run_config: RunConfig, thread_count: int) -> bool:
    """Return True if the cache has a result for a run with this number of threads."""
    path = _place(kind, source, run_config, thread_count)
    return path is not None and path.is_file()


def _place(kind: str, source: ModelSource, run_config: RunConfig, thread_count: int | None = None) -> Path | None:
    """Return a result's file; None without a cache for this model."""
    try:
        sources = [source, *teachers(run_config.loss)]
        if run_config.objects:
            return None
        folder = None if _uncached or any(one.has_own_dtypes for one in sources) else cache_folder()[0]
        return folder and folder / f"{_key(kind, sources, run_config, str(thread_count or threads()))}{_SUFFIX}"
    except (BertscopeError, OSError):  # a function in place of a name; a file that cannot be read
        return None


def cache_folder() -> tuple[Path | None, str]:
    """Return the cache's folder, made if it does not exist; None without one, and the reason."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "":
        return None, f"{CACHE_VARIABLE} is empty"
    try:
        parent = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
        if chosen is None and os.path.isabs(parent):
            chosen = os.path.join(parent, "bertscope")
        folder = Path(chosen or "~/.cache/bertscope").expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        above = next(filter(_is_open, folder.resolve().parents), None) if os.name == "posix" else None
    except (OSError, RuntimeError, ValueError) as error:
        return None, getattr(error, "strerror", None) or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return None, f"{folder} is a link"
    if os.name == "posix":
        if status.st_mode & 0o022 or status.st_uid != os.getuid():
            return None, f"others can write into {folder} and so change results"
        if above is not None:
            return None, f"others can write into {above} and so replace {folder}"
    return folder, ""


def _is_open(folder: Path) -> bool:
    """Return True if users other than this one and root may rename what is in a folder."""
    status = folder.stat()
    may_write = status.st_mode & 0o002 or (status.st_mode & 0o020 and status.st_gid not in (0, os.getgid()))
    return bool(may_write and not status.st_mode & stat.S_ISVTX) or status.st_uid not in (0, os.getuid())


def _read(path: Path) -> bytes:
    """Return the content of a file; raises ValueError for an incomplete one, and SourceError for a link."""
    with open_file(path, "remove it", _NO_LINK) as file:
        checksum, _, packed = file.read(_MOST_FILE_BYTES).partition(b"\n")
    if checksum.decode("ascii") != hashlib.sha256(packed).hexdigest():
        raise ValueError("damaged")
    with suppress(OSError):
        os.utime(path)
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(packed, _MOST_TEXT_BYTES)
    if not unpacking.eof:
        raise ValueError("longer than a result")
    return text


def _write(path: Path, text: bytes) -> None:
    packed = zlib.compress(text, 3)
    if len(packed) > _MOST_FILE_BYTES - 100 or len(text) > _MOST_TEXT_BYTES:
        return
    with uninterrupted():
        import tempfile  # on writing only: it takes 4 ms

        descriptor, temporary = tempfile.mkstemp(_SUFFIX, _BEGUN, path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    _tidy(path.parent)


def entries(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield the time of the last use, the bytes and the path of each file of the cache."""
    with os.scandir(folder) as files:
        for entry in files:
            if _OWN_NAME.fullmatch(entry.name):
                with suppress(OSError):  # removed by another process
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, status.st_size, entry.path


def _tidy(folder: Path) -> None:
    """Remove the files that were not used for long, and of too many or too large ones the oldest."""
    left_bytes, left_files, oldest = MOST_BYTES, MOST_FILES, time.time() - MOST_DAYS * 86400
    for used, size, path in sorted(entries(folder), reverse=True):
        left_bytes, left_files = left_bytes - size, left_files - 1
        if used < oldest or left_bytes < 0 or left_files < 0:
            with suppress(OSError, SourceError):
                with open_file(path, "", _NO_LINK) as file:
                    is_own = re.match(rb"[0-9a-f]{64}\n|$", file.read(65))  # a name alone may be a user's
                if is_own:
                    os.unlink(path)


def _key(kind: str, sources: Sequence[ModelSource], run_config: RunConfig, thread_count: str) -> str:
    parts: list[Any] = [kind, run_config.flat(), run_config.gpu_threads, _files()]
    for source in sources:
        path = getattr(source, "path", None)
        parts += [type(source).__name__, source.to_data(), str(source.notice), path and digest(path)]
    torch = sys.modules.get("torch")  # of which a program may have set another dtype of new tensors
    parts.append(str(torch.get_default_dtype()) if torch else "torch.float32")
    parts.append(_versions(all(type(source).__name__ == "BertSource" for source in sources)))
    parts.append(None if run_config.device == CUDA else [*_processor(), thread_count])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def threads() -> str:
    """Return the number of threads that torch uses, or what it will take it from; temporaries of a CPU depend on it.

    It may take one thread for each core or for two, or fewer than OMP_NUM_THREADS: only torch knows.
    """
    by_default = f"default of {usable_cores()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"
    torch, access = sys.modules.get("torch"), sys.modules.get("bertscope.torch_access")
    if torch is None:
        return str(_chosen[0]) if _chosen else by_default
    is_default = access is not None and torch.get_num_threads() == access.threads_of_import() and not _chosen
    return by_default if is_default else str(torch.get_num_threads())


_chosen: list[int] = []


def choose_threads(number: int) -> None:
    """Have torch use this number of threads, now or when something is computed."""
    _chosen[:] = [number]
    if "torch" in sys.modules:
        _set_threads()


def _set_threads() -> None:
    from bertscope.torch_access import torch

    torch.set_num_threads(*_chosen)


def default_threads() -> int:
    """Return the number of threads that torch uses by default."""
    try:
        return max(int(os.environ.get("OMP_NUM_THREADS", "")), 1)
    except ValueError:
        return usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _versions(is_own: bool) -> list[str]:
    """Return the versions that decide a result; those of transformers and peft for their models only."""
    versions = [sys.version, bertscope.__version__]
    for folder in sys.path:  # by the names of their folders: importlib.metadata takes 20 ms, most of it to import
        with suppress(OSError):
            versions += sorted(filter((_OWN if is_own else _PACKAGES).match, os.listdir(folder or ".")))
    return versions


@cache
def _processor() -> list[str]:
    """Return what decides torch's choice of kernels on this machine's CPU."""
    chosen = [os.environ.get(name, "") for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_NUM_THREADS")]
    flags = ""
    with suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        flags = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    machine = os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "")
    return [machine, sys.platform, flags, *chosen]


@cache
def _files() -> list[Any]:
    root = os.path.dirname(bertscope.__file__)
    files = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                status = os.stat(os.path.join(folder, name))
                files.append([folder[len(root) :], name, status.st_mtime_ns, status.st_size])
    return sorted(files)
