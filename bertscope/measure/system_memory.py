"""The memory of this machine and of a process on it, as Linux reports them; None where the system does not."""

import os
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # of a container, version 2


def proc_bytes(path: str, field: str) -> int | None:
    """Return a field of a file such as /proc/meminfo, whose lines are `MemAvailable:  1024 kB`."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def machine_bytes() -> int | None:
    """Return the machine's memory, or the limit of its control group."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not available on this system
        return None
    limit = _group_bytes("max")
    return whole if limit is None else min(whole, limit)


def available_bytes() -> int | None:
    """Return the memory that a process can still get on the machine and in its control group."""
    available = proc_bytes("/proc/meminfo", "MemAvailable")
    limit, used = _group_bytes("max"), _group_bytes("current")
    return available if None in (available, limit, used) else min(available, limit - used)  # type: ignore[type-var, operator]


def _group_bytes(name: str) -> int | None:
    """Return a number of the control group; None without one, and for `max`, which means no limit."""
    try:
        return int((_GROUP / f"memory.{name}").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
