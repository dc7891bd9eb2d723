"""Folders of a run among the temporary files: of mode 0700, removed at its end or, if it was killed, by the next."""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from bertscope.errors import SelectionError, WorkerError
from bertscope.processes import signals

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_PREFIX, _LOCK = "bertscope-", "bertscope.lock"


class OwnFolder(tempfile.TemporaryDirectory[str]):
    """A folder that only this user reads; its lock shows that its process runs."""

    def __init__(self) -> None:
        remove_abandoned()
        try:
            super().__init__(prefix=_PREFIX, ignore_cleanup_errors=True)
        except OSError as error:
            raise WorkerError(f"no folder for temporary files: {error.strerror}; let TMPDIR name one") from None
        self.lock = locked(Path(self.name))

    def cleanup(self) -> None:
        """Remove the folder, and give the lock back."""
        super().cleanup()
        if self.lock is not None:
            self.lock.close()


@cache
def compile_folder() -> str:
    """Return the folder for what torch.compile writes in this process and in its children.

    Its default is a folder with a known name among the temporary files of all users, who could make it first: what is
    in it is loaded.
    """
    folder, pid = OwnFolder(), os.getpid()

    def remove() -> None:
        if os.getpid() == pid:  # no fork
            folder.cleanup()

    signals.cleanups.append(remove)
    atexit.register(remove)
    return folder.name


def compile_cache() -> dict[str, str]:
    """Return the variable with which torch.compile keeps code in `compile_folder`, or where the user wants it to.

    Raises SelectionError if that is no folder and cannot become one: torch would fail, each time in another way.
    """
    if folder := os.environ.get(_COMPILED):
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SelectionError(f"{_COMPILED} names {folder[:100]!r}: {reason}; name a folder, or unset it") from None
    return {_COMPILED: folder or compile_folder()}


def compile_environment() -> dict[str, str]:
    """Return that variable and the folder for temporary files, where precompiled headers are in any case."""
    return compile_cache() | {"TMPDIR": compile_folder()}


def locked(folder: Path) -> IO[bytes] | None:
    """Return a locked file in a folder, which shows that its process runs; None where files have no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = open(folder / f"{_LOCK}.new", "wb")  # noqa: SIM115 it stays open as long as the run
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(file.name, folder / _LOCK)  # a file of this name is locked or abandoned
    return file


def remove_abandoned() -> None:
    """Remove the folders of runs of this user that were killed: those with a lock that nobody holds."""
    with suppress(OSError, ImportError):
        import fcntl

        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(descriptor)
