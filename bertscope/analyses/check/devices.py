"""What there is to run on, as torch sees it; a process of its own, since a broken torch may end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bertscope.analyses.memory.child import child_command
from bertscope.errors import one_line
from bertscope.reports.tool import DeviceRow

_TIMEOUT_SECONDS = 120  # of an import that takes one, on a machine that is busy


def devices() -> tuple[str | None, tuple[DeviceRow, ...], tuple[str, ...]]:
    """The version of the torch that loads, the devices, and what is wrong: without torch, the processor alone."""
    told, problem = _ask()
    cpu = DeviceRow(name="cpu", description=_processor(), threads=told.get("threads") or os.cpu_count(),
                    memory_bytes=_memory_bytes())  # fmt: skip
    cards = tuple(DeviceRow(threads=None, **card) for card in told.get("cards", ()))
    problems = (*([problem] if problem else ()), *told.get("problems", ()))
    return told.get("version"), (cpu, *cards), problems


def _ask() -> tuple[dict[str, Any], str]:
    try:
        command = child_command("bertscope.analyses.check.devices:tell")
        done = subprocess.run(command, capture_output=True, text=True,  # noqa: S603 words of this program
                              timeout=_TIMEOUT_SECONDS, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {}, f"import torch takes longer than {_TIMEOUT_SECONDS} s"
    except OSError as error:
        return {}, f"{sys.executable} cannot be started: {error.strerror}"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return {}, f"torch does not load: {one_line(last, limit=300)}"


def tell() -> None:
    """What the child says: one line of JSON, or why torch does not load."""
    try:
        from bertscope.torch_access import torch
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    told: dict[str, Any] = {"version": str(torch.__version__), "threads": torch.get_num_threads(), "problems": []}
    try:
        told["cards"] = [_card(number) for number in range(torch.cuda.device_count())]
    except Exception as error:  # a driver may fail in any way, and is told of
        told["problems"].append(f"CUDA does not answer: {one_line(str(error), limit=300)}")
    sys.stdout.write(json.dumps(told) + "\n")


def _card(number: int) -> dict[str, Any]:
    from bertscope.torch_access import torch

    found = torch.cuda.get_device_properties(number)
    description = f"{found.name}, compute capability {found.major}.{found.minor}"
    return {"name": f"cuda:{number}", "description": description, "memory_bytes": found.total_memory}


def _processor() -> str:
    import platform

    return platform.machine() or "unknown"


def _memory_bytes() -> int | None:
    """The machine's memory, or what its control group may take of it."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no such question on this system
        return None
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole
