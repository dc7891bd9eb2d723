"""The import of torch, what it needs, and what a process may leave out of it; nothing here imports torch itself."""

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from bertscope.errors import importing

_META_KERNELS = "torch._meta_registrations"


@contextmanager
def quick_import() -> Iterator[bool]:
    """Import torch without garbage collections, and without its warning that numpy is missing; yield if it is new.

    The import creates about a million objects that stay alive; collections would take a third of its time.
    """
    _check_limits()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings(), importing("torch", "TORCH_", "PYTORCH_", "TQDM_"):
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch without numpy is fine
            yield "torch" not in sys.modules
    finally:
        if collecting:
            gc.enable()


def _check_limits() -> None:
    """Raise MemoryError below limits at which the import of torch may abort the process or never end."""
    with suppress(ImportError):  # Windows
        import resource

        for limit, option, needed_mib in ((resource.RLIMIT_AS, "-v", 600), (resource.RLIMIT_DATA, "-d", 190)):
            allowed, _ = resource.getrlimit(limit)
            if 0 <= allowed < needed_mib << 20:
                raise MemoryError(f"'ulimit {option}' allows {allowed >> 20} MiB; torch needs {needed_mib} MiB")


class _LaterKernels(ModuleType):
    """torch's module of meta kernels before its code has run, which happens when an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        load_meta_kernels()
        return getattr(sys.modules[self.__name__], name)


def without_meta_kernels() -> None:
    """Have torch leave out its meta kernels written in Python when it is imported, a fifth of the import.

    For a process that builds a model on meta, which needs none, and hardly ever runs it:
    `load_meta_kernels` makes up for it. Without effect once torch is imported.
    """
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = _LaterKernels(_META_KERNELS)


def load_meta_kernels() -> None:
    """Load the meta kernels that were left out; call this before operators run on meta."""
    if isinstance(sys.modules.get(_META_KERNELS), _LaterKernels):
        del sys.modules[_META_KERNELS]
        with quick_import():
            import_module(_META_KERNELS)
