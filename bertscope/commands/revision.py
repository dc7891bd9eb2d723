"""A git revision's files in a temporary folder, for `diff --base`.

git only lists and prints objects: no hook, filter, pager or transport runs, and nothing in the repository changes.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from bertscope.errors import BertscopeError, SourceError, one_line
from bertscope.files import readable
from bertscope.processes import signals
from bertscope.processes.folders import OwnFolder

_LARGEST, MAX_BYTES = 16 << 20, 256 << 20  # of a file, above which it is left out as weights are; of all files
# The last two keep a partial clone from fetching what it lacks; older versions of git know only the first of them.
_OFFLINE = {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}


@contextmanager
def revision(name: str) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns the path of a model at a revision, and remove the files at the end.

    The model is a file or folder of the repository, or code in one (`models.py:build`, `models:build`). Raises
    SourceError for a revision that git does not know, and for a model elsewhere.
    """
    root = Path(os.fsdecode(_git("rev-parse", "--show-toplevel").rstrip(b"\n"))).resolve()
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", known=name).strip()
    folder = OwnFolder()
    signals.cleanups.append(folder.cleanup)
    there = Path(folder.name).resolve() / "tree"

    def at_revision(model: str) -> str:
        path, colon, attribute = in_file(model).partition(":")
        here = Path(os.path.realpath(os.path.expanduser(path)))
        if not here.is_relative_to(root):
            raise SourceError(f"{model[:100]!r} is not a file in the repository in {root}, which --base compares")
        moved = there / here.relative_to(root)
        if not moved.exists():
            raise SourceError(f"{shown} has no {here.relative_to(root)}; name a file that it has")
        return f"{moved}{colon}{attribute}"

    shown = one_line(name, limit=60)
    try:
        with readable(f"the revision {shown}"):  # a tree may have any names and sizes, and lack its files
            _write(commit.decode(), there)
        yield at_revision
    except BertscopeError as error:  # which may name the temporary file
        raise SourceError(str(error).replace(f"{there}{os.sep}", f"{shown}:").replace(str(there), shown)) from None
    finally:
        signals.cleanups.remove(folder.cleanup)
        folder.cleanup()


def in_file(model: str) -> str:
    """Return code as `file.py:attribute`, which two revisions of a module can be, and any other model as it is."""
    module, colon, attribute = model.rpartition(":")
    if not colon or module.endswith(".py"):
        return model
    path = Path(*module.split("."))
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return next((f"{file}:{attribute}" for file in files if file.is_file()), model)


def _write(commit: str, folder: Path) -> None:
    """Write a commit's plain files, without large ones, links and submodules."""
    blobs: dict[Path, bytes] = {}
    total = 0
    for line in _git("ls-tree", "-r", "-z", "--long", "--full-tree", commit).split(b"\0")[:-1]:
        about, _, name = line.partition(b"\t")
        mode, _, blob, size = about.split()
        path = PurePosixPath(os.fsdecode(name))
        is_safe = not path.is_absolute() and not {"..", ".git"} & set(path.parts)
        if mode.startswith(b"100") and is_safe and int(size) <= _LARGEST:
            blobs[folder / path] = blob
            total += int(size)
    if total > MAX_BYTES:
        raise SourceError(f"the revision has {total >> 20:,} MiB; {MAX_BYTES >> 20} MiB is the most for --base")
    content = _git("cat-file", "--batch", stdin=b"\n".join(blobs.values()))
    begin = 0
    for file in blobs:
        head = content.index(b"\n", begin)
        length = int(content[begin:head].split()[2])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content[head + 1 : head + 1 + length])
        begin = head + length + 2


def _git(*arguments: str, known: str | None = None, stdin: bytes = b"") -> bytes:
    command, environment = ["git", "--no-pager", *arguments], os.environ | _OFFLINE
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)  # noqa: S603
    except (OSError, ValueError) as error:  # no git; a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"--base runs git, which cannot be started: {reason}") from None
    if done.returncode and known is not None:
        raise SourceError(f"git has no revision {known[:60]!r} here; fetch it, or name a branch, a tag or a commit")
    if done.returncode:
        said = one_line(done.stderr.decode(errors="replace").strip(), limit=200)
        raise SourceError(f"git failed: {said}; run it in a clone")
    return done.stdout
