"""A sandbox of Linux namespaces: a process that reads all files, whose writes vanish, and that has no network.

Every writable file system is covered by an overlay, whose upper layer is in memory. Standard library only: it is set up
before a script's process imports anything else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import string
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bertscope.processes.child import die_with_parent

_NEW = {"user": 0x10000000, "mount": 0x00020000, "ipc": 0x08000000, "pid": 0x20000000, "network": 0x40000000}
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV, _DETACH = 0x1000, 0x4000, 1 << 18, 2, 4, 2
_PIVOT_ROOT, _MOUNT_SETATTR = (155, 442) if os.uname().machine == "x86_64" else (41, 442)  # numbers of system calls
# Of the kernel's filter: the architecture, the calls that make a socket, and the kinds that are allowed: of files, IP,
# IPv6 and with the kernel. No network namespace holds the other kinds, such as from a virtual machine to its host.
_ARCHITECTURE, _SOCKET = (0xC000003E, 41) if os.uname().machine == "x86_64" else (0xC00000B7, 198)
_OTHER_CALLS, _IO_RING, _SOCKETS = 0x40000000, 425, (1, 2, 10, 16)
_KEYS = (248, 249, 250) if os.uname().machine == "x86_64" else (217, 218, 219)  # of the session, outside all namespaces
_AT_RECURSIVE, _READ_ONLY = 0x8000, 1
_NO_NEW_PRIVILEGES, _DROP_BOUND, _SECURE_BITS, _FILTER, _DUMPABLE = 38, 24, 28, 22, 4
_NO_ROOT = 0b101111  # uid 0 has no privileges, nor gets any; locked
_KINDS = (
    "proc sysfs cgroup cgroup2 devpts mqueue devtmpfs debugfs tracefs securityfs bpf pstore configfs fusectl hugetlbfs "
    "binfmt_misc autofs rpc_pipefs efivarfs"
)
_VIRTUAL = frozenset(_KINDS.split())  # file systems that hold no files
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_SHARED = "/dev/shm"  # noqa: S108  of the sandbox, which nobody shares
# Of a script: workers for each core, and no more, since a fork bomb makes and ends some tens in a second.
_MOST_PROCESSES, _SECONDS = 100 + 4 * (os.cpu_count() or 1), 0.05  # and the time between two counts
_MOST_WRITTEN = "8g"  # bytes that a script may write, all files together


def _call(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


_LIBRARY = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (text.encode() or None for text in (source, target, kind))
    _call(_LIBRARY.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _call(_LIBRARY.syscall(_MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE, attributes, 32), f"mount {path}")


def enter(folder: str, *, network: bool = False) -> None:
    """Put this process and those that it starts into the sandbox; `folder` is an empty one, for the mounts.

    The process that returns is a child of the one that calls, which waits for it and ends as it does. Raises OSError
    where the system does not allow it; nothing has changed then, but for the process's user namespace.
    """
    if sys.platform != "linux":
        raise OSError(0, "it needs Linux")
    user, group = os.getuid(), os.getgid()
    spaces = sum(value for name, value in _NEW.items() if name != "network" or not network)
    _call(_LIBRARY.unshare(spaces), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    ready, told = os.pipe()
    if child := os.fork():  # the first process of the new namespace: all others end with it
        os.close(told)
        with os.fdopen(ready, "rb") as pipe:
            if reason := pipe.read():
                os.waitpid(child, 0)
                raise OSError(0, reason.decode(errors="replace"))
        _wait_and_leave(child)
    try:
        os.close(ready)
        die_with_parent()
        _cover(folder)
        _drop_privileges()
    except (OSError, ValueError) as error:
        os.write(told, str(error).encode()[:500] or b"refused")
        os._exit(1)
    os.close(told)
    if child := os.fork():  # the first process only removes those that end, and counts the others
        _LIBRARY.prctl(_DUMPABLE, 0, 0, 0, 0)  # nor may the script trace it, which would stop it
        _wait_and_leave(child, _MOST_PROCESSES)
    die_with_parent()


def _wait_and_leave(child: int, most: int = 0) -> None:
    """Wait for the child and end as it does, or when there are more processes: with the first one all others end."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG if most else 0)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            # Else a container's, which shows other processes.
            is_own = bool(most) and os.readlink("/proc/self") == str(os.getpid())
            if is_own and sum(name[0] in string.digits for name in os.listdir("/proc")) > most:
                os.write(2, f"it started more than {most:,} processes\n".encode())
                os._exit(1)
            time.sleep(0 if pid else _SECONDS)
    finally:  # such as by a limit that the script sets for this process
        os._exit(1)


class _Cover:
    """A new root in a folder: overlays of all folders, which hide no mount below them, and the rest read-only.

    A user namespace may not take a folder with mounts below it as a lower layer, since that would show what they hide.
    So such a folder is made anew, and what is in it is covered separately.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.root = folder, f"{folder}/root"
        self.mounts: dict[str, str] = {}  # path -> the kind of the file system; of several at one path the last
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            self.mounts[before.split(" ")[4].encode().decode("unicode_escape")] = after.split(" ")[0]
        self.number = 0
        _mount("", "/", flags=_RECURSIVE | _PRIVATE)
        _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, f"size={_MOST_WRITTEN},nr_inodes=1m,mode=0700")
        os.mkdir(self.root)
        _mount(self.root, self.root, flags=_BIND)  # a new root has to be a mount

    def add(self, path: str) -> None:
        if path in ("/dev", "/proc", "/sys", self.folder) or self.mounts.get(path) in _VIRTUAL:
            return
        target = self.root + path
        start = path.rstrip("/") + "/"
        if not any(mount.startswith(start) for mount in self.mounts):
            try:
                self.overlay(path)
            except OSError:  # such as a file system that is no lower layer
                _mount(path, target, flags=_BIND | _RECURSIVE)
                _make_read_only(target)
            return
        os.chmod(target, os.stat(path).st_mode & 0o7777)
        for entry in os.scandir(path):
            covered = self.root + entry.path
            with suppress(FileNotFoundError):  # another process has removed it
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), covered)
                elif entry.is_dir():
                    os.mkdir(covered)
                    with suppress(PermissionError):  # what this user may not read
                        self.add(entry.path)
                elif entry.is_file():
                    Path(covered).touch()
                    _mount(entry.path, covered, flags=_BIND)
                    _make_read_only(covered)

    def overlay(self, path: str) -> None:
        self.number += 1
        upper, work = (f"{self.folder}/{self.number}-{name}" for name in ("upper", "work"))
        os.mkdir(upper)
        os.mkdir(work)
        os.chmod(upper, os.stat(path).st_mode & 0o7777)
        lower = re.sub(r"([\\:,])", r"\\\1", path)
        options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        _mount("overlay", self.root + path, "overlay", _NOSUID | _NODEV, options)


def _cover(folder: str) -> None:
    """Build the new root, with devices that hold nothing, and change to it."""
    here, cover = os.getcwd(), _Cover(folder)
    cover.add("/")
    root = cover.root
    _mount("tmpfs", f"{root}/dev", "tmpfs", _NOSUID, "size=1m,mode=0755")
    for name in _DEVICES:
        Path(f"{root}/dev/{name}").touch()
        _mount(f"/dev/{name}", f"{root}/dev/{name}", flags=_BIND)
    os.mkdir(f"{root}{_SHARED}")
    _mount("tmpfs", root + _SHARED, "tmpfs", _NOSUID | _NODEV, "size=2g,nr_inodes=1m,mode=1777")
    for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{number}", f"{root}/dev/{name}")
    try:
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    except OSError:  # a container hides parts of it
        _mount("/proc", f"{root}/proc", flags=_BIND | _RECURSIVE)
    _make_read_only(f"{root}/proc")
    if os.path.isdir("/sys"):
        _mount("/sys", f"{root}/sys", flags=_BIND | _RECURSIVE)
        _make_read_only(f"{root}/sys")
    os.chdir(root)
    _call(_LIBRARY.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _call(_LIBRARY.umount2(b".", _DETACH), "umount")
    os.chdir(here)


def _drop_privileges() -> None:
    """Give up what the user namespace allows, so that the script cannot undo the mounts."""
    prctl: Callable[..., int] = _LIBRARY.prctl
    for number in range(64):
        prctl(_DROP_BOUND, number, 0, 0, 0)
    prctl(_SECURE_BITS, _NO_ROOT, 0, 0, 0)
    _call(prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "privileges")
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _call(_LIBRARY.capset(header, none), "privileges")
    _call(prctl(_FILTER, 2, ctypes.byref(_SocketFilter()), 0, 0), "sockets")


class _SocketFilter(ctypes.Structure):
    """A program of the kernel's filter: it refuses sockets outside network namespaces, other ways to one, and keys."""

    _fields_ = (("length", ctypes.c_ushort), ("rows", ctypes.c_char_p))

    def __init__(self) -> None:
        load, equal, least, end, allow, deny = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x00050000 | errno.EPERM
        call, kind = 0, 16  # where the number of a call is, and its first argument
        rows = [
            (load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURE), (end, 0, 0, deny),
            (load, 0, 0, call), (least, 1, 0, _OTHER_CALLS), (equal, 0, 1, _IO_RING), (end, 0, 0, deny),
            *(row for number in _KEYS for row in ((equal, 0, 1, number), (end, 0, 0, deny))),
            (equal, 1, 0, _SOCKET), (end, 0, 0, allow), (load, 0, 0, kind),
        ]  # fmt: skip
        for number in _SOCKETS:
            rows += [(equal, 0, 1, number), (end, 0, 0, allow)]
        rows.append((end, 0, 0, deny))
        super().__init__(len(rows), b"".join(struct.pack("HBBI", *row) for row in rows))
