"""Results that commands share: with BERTSCOPE_CACHE=FOLDER a memory trace or a FLOP report is computed once.

A file is JSON after a line with its digest. Its name is a digest of all that decides the result: the model, the run,
the machine, the versions, and the files of bertscope. A file that is not whole is as good as none.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import bertscope
from bertscope.errors import BertscopeError, SourceError
from bertscope.settings.run_config import RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import has_bf16_products, torch

VARIABLE = "BERTSCOPE_CACHE"
Result = TypeVar("Result")


def saved(
    kind: str, source: ModelSource, run_config: RunConfig, compute: Callable[[], Result],
    to_data: Callable[[Result], Any], from_data: Callable[[Any], Result],
) -> Result:  # fmt: skip
    """Return the result in the cache, else the computed one, which is saved; only computed without a cache.

    A model of the user's own code is computed each time: a digest does not know what its code does.
    """
    if not os.environ.get(VARIABLE) or source.has_own_dtypes:
        return compute()
    folder = _folder(Path(os.environ[VARIABLE]).expanduser())
    path = folder / f"{_key(kind, source, run_config)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, BertscopeError):
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        if digest == hashlib.sha256(text.encode()).hexdigest():
            return from_data(json.loads(text))
    result = compute()
    text = json.dumps(to_data(result))
    with suppress(OSError):  # a full disk is no reason to fail
        descriptor, temporary = tempfile.mkstemp(dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        os.replace(temporary, path)
    return result


def _folder(folder: Path) -> Path:
    """Return the folder, made if it does not exist; raises SourceError for one that others may write into."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise SourceError("{name}: {words}", name=f"{VARIABLE}={folder}", words=error.strerror or str(error)) from None
    if os.name == "posix" and (found.st_mode & 0o022 or found.st_uid != os.getuid()):
        raise SourceError(f"{VARIABLE}: others may write into {folder}, and so choose results; name a folder of your "
                          "own, with mode 0700")  # fmt: skip
    return folder


def _key(kind: str, source: ModelSource, run_config: RunConfig) -> str:
    path = getattr(source, "path", None)
    content = path.read_bytes() if path is not None and path.is_file() else b""
    parts = [kind, type(source).__name__, source.to_data(), getattr(source, "implementation", ""), run_config.flat(),
             hashlib.sha256(content).hexdigest(), *_surroundings(), torch.get_num_threads()]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _surroundings() -> list[Any]:
    """Return what else decides a result: the versions, the processor, and the files of bertscope."""
    processor = [platform.machine(), torch.backends.cpu.get_cpu_capability(), has_bf16_products()]
    found: list[Any] = [*processor, torch.__version__]
    for package in ("bertscope", "transformers", "peft"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    files = sorted(Path(bertscope.__file__).parent.rglob("*.py"))
    return found + [[str(path), path.stat().st_mtime_ns, path.stat().st_size] for path in files]
