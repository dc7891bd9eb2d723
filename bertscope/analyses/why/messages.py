"""An out-of-memory message of torch in a text: its numbers, and what they say together.

The forms are those of CUDACachingAllocator.cpp from torch 1.0 on (CUDA, and HIP on ROCm), of XPU and of MPS.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from bertscope.analyses.why.findings import finding
from bertscope.analyses.why.stacks import ATTENTION_SCORES, LOGITS, StackKind, stack_kind
from bertscope.errors import SourceError
from bertscope.reports.why import MESSAGE, OOM, WhyFinding, WhyReport
from bertscope.units import parse_bytes

_SIZE = r"([0-9][0-9,]{0,15}(?:\.[0-9]{1,4})?)\s{0,2}(bytes|[KMGT]i?B)"
# The start of a message, and how far behind it its numbers are: a message with 20 other processes has 1,500 letters.
_START = re.compile(r"(?:CUDA|HIP|XPU) out of memory\.|MPS backend out of memory|(?<!\w)Tried to allocate (?=[0-9])"
                    r"|Currently allocated\s{0,9}: (?=[0-9])")  # fmt: skip
_REACH = 4000
_MOST_STARTS = 1000  # from the end of the text: a hostile one has a million
_NUMBERS = {
    # The last form of each is that of the backend cudaMallocAsync.
    "tried": rf"(?:Tried to allocate {_SIZE}|Requested : {_SIZE})",
    "total": rf"(?:{_SIZE} total capacity|total capac\w{{1,4}} of {_SIZE}|max allowed: {_SIZE}|Device limit : {_SIZE})",
    "free": rf"(?:{_SIZE} free;|of which\s?{_SIZE} is free|Free \(according to CUDA\): {_SIZE})",
    "allocated": rf"(?:{_SIZE} already allocated|allocated memory {_SIZE} is allocated|MPS allocated: {_SIZE}|"
    rf"Currently allocated : {_SIZE})",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "unallocated": rf"(?:{_SIZE} cached|{_SIZE} is reserved by PyTorch but unallocated)",
    "own": rf"this process has {_SIZE} memory in use",
    "limit": rf"{_SIZE} allowed;",
    "private": rf"with {_SIZE} allocated in private pools",
    "driver": rf"other allocations: {_SIZE}",
}
_FRAME = re.compile(r'File "([^"\n]{1,500})", line ([0-9]{1,9}), in (\S{1,200})')
# Memory of a process outside torch's allocator: the context is at most 1,486 MiB (gpus.py), NCCL and others add some.
_OUTSIDE = 2 * 2**30
_FULL_SHARE, _LARGE_SHARE, _SMALL_SHARE = 0.8, 0.5, 0.1  # of the card


def message_report(text: str, name: str) -> WhyReport:
    """Return the report of the last out-of-memory message in a text; raises SourceError if there is none."""
    numbers, kind = _read(text, name)
    allocated, total = numbers.get("allocated", 0), numbers.get("total")
    reserved = numbers.get("reserved", allocated + numbers.get("unallocated", 0))
    other = _other(numbers, reserved)
    values = {**numbers, "unallocated": max(reserved - allocated, 0), "other": other}
    found = sorted(_findings(values, kind), key=lambda reason: -reason.frees_bytes)
    if len(found) > 1 and allocated < _FULL_SHARE * (total or allocated):
        found = [reason for reason in found if reason.key != "why_full"]
    return WhyReport(
        name=name, source=MESSAGE, moment=OOM, allocated_bytes=allocated, reserved_bytes=reserved,
        tried_bytes=numbers.get("tried"), free_bytes=numbers.get("free"), total_bytes=total, other_bytes=other,
        phase=kind.phase, line=kind.line or kind.module,
        findings=tuple(found),
    )  # fmt: skip


def _read(text: str, name: str) -> tuple[dict[str, int], StackKind]:
    """Return the numbers of the last message with any, and the stack of the last traceback before it."""
    starts = deque((match.start() for match in _START.finditer(text)), _MOST_STARTS)
    for start in reversed(starts):
        message = " ".join(text[start : start + _REACH].split())
        following = _START.search(message, 200)  # of the next message, in a log of several ranks
        message = message[: following.start()] if following else message
        found = {name: re.search(pattern, message) for name, pattern in _NUMBERS.items()}
        numbers = {name: _bytes(match) for name, match in found.items() if match}
        if numbers.get("tried") and ("allocated" in numbers or "total" in numbers):
            first_frame = max(text.rfind("Traceback (most recent call last)", 0, start), 0)
            frames = [{"filename": file, "line": int(line), "name": name.rstrip(",")}
                      for file, line, name in _FRAME.findall(text, first_frame, start)]  # fmt: skip
            return numbers, stack_kind(frames[::-1])
    raise SourceError(
        "no out-of-memory message of torch with its numbers ('Tried to allocate ...'), and no memory snapshot; give "
        "the whole message, or what torch.cuda.memory._dump_snapshot wrote",
        where=name,
    )


def _bytes(match: re.Match[str]) -> int:
    """Return the bytes of `1.24 GiB`; MPS says GB and means GiB."""
    amount, unit = filter(None, match.groups())
    return parse_bytes(f"{amount.replace(',', '')}{'B' if unit == 'bytes' else f'{unit[0]}iB'}")


def _other(numbers: dict[str, int], reserved: int) -> int:
    """Return what other processes hold; a container may list the process itself by its number."""
    if "total" not in numbers or "free" not in numbers:
        return 0
    used = numbers["total"] - numbers["free"]
    own = numbers.get("own", 0)  # NVML does not see a process in a container, and says 0 bytes
    rest, least = (used - own, 0) if own >= reserved else (used - reserved, _OUTSIDE)
    return rest if rest > max(least, 0.01 * numbers["total"]) else 0


def _findings(of: dict[str, int], kind: StackKind) -> Iterator[WhyFinding]:
    tried, total, free, allocated = (of.get(key, 0) for key in ("tried", "total", "free", "allocated"))
    unusable, other = of["unallocated"], of["other"]

    if unusable >= tried > free:
        yield finding("fragmentation", unusable)
    if other:
        yield finding("other", other, other if free < tried else 0, size_total=total)
    if of.get("limit"):
        yield finding("limit", of["limit"], free)
    elif of.get("driver", 0) > allocated:
        yield finding("driver", of["driver"])
    elif allocated > total > 0:
        yield finding("shared", allocated, 0, size_total=total)
    elif free >= tried:
        yield finding("free", free, 0, size_tried=tried)
    if of.get("private"):
        yield finding("private", of["private"], 0)
    if tried > _LARGE_SHARE * (total or tried) or tried > max(allocated, free, _SMALL_SHARE * total):
        named = [key for key, mark in (("attention", ATTENTION_SCORES), ("logits", LOGITS)) if mark in kind.marks]
        yield finding(named[0] if named else "request", tried, line=kind.line or kind.module)
    if total >= allocated > 0 and free < tried:
        yield finding("full", allocated, 0, size_total=total)
