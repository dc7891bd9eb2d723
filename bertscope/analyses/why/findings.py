"""The reasons for the memory in a snapshot or in an out-of-memory message, and what remedies each."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from bertscope.analyses.why.history import (
    ATTENTION_SCORES,
    BUCKETS,
    COPIED,
    EVALUATION,
    FOREACH,
    KEY_VALUES,
    LOGITS,
    NEVER,
    USER,
    HeldBlock,
    History,
    StackKind,
    read_history,
    size_of,
    stack_kind,
)
from bertscope.errors import SourceError
from bertscope.reports.base import Note
from bertscope.reports.memory import FORWARD, OPTIMIZER
from bertscope.reports.why import (
    BEFORE,
    END,
    MESSAGE,
    OOM,
    SNAPSHOT,
    TENSORS,
    WhyFinding,
    WhyPart,
    WhyReport,
    WhyRow,
    WhySample,
)
from bertscope.units import parse_bytes

_GRAPH_STACKS = 4  # distinct stacks of one forward pass that live on: fewer are its outputs
_SCALARS = 4096  # bytes of a pass that are losses and metrics: 8 blocks of 512 bytes, the allocator's least
_SMALL = 0.01  # a share of the memory below which nothing but a leak is named
_LARGE = 0.05
_FAULT = 0.1
_NEEDED = {"why_activations", "why_optimizer", "why_parameters", "why_before"}
_ALIKE = 0.8  # share of equal sizes at which two sets of tensors belong to one model
_UNIT = 24  # tensors of a model that is twice on the GPU: two layers of a BERT have 16 each
_KEPT = 0.3  # share of what a forward pass allocates that lives on; without gradients it is less
_FRAGMENTED, _SEGMENTS = 0.2, 10 * 20 * 2**20  # unusable: a share of what is reserved, and ten of torch's segments
_MOST_ROWS = 100
_SAMPLES = 200  # of the history

_Key = TypeVar("_Key", bound=Hashable)


def snapshot_report(data: Any, name: str) -> WhyReport:
    """Return a snapshot's report; raises SourceError for data of another structure."""
    history = read_history(data)
    tried, free = history.oom[1:] if history.oom else (None, None)
    has_no_frames = history.all_blocks and not history.has_frames
    groups = _grouped(history.blocks, attrgetter("part"))
    parts = [WhyPart(part=part, held_bytes=size_of(blocks), blocks=len(blocks)) for part, blocks in groups.items()]
    return WhyReport(
        name=name, source=SNAPSHOT, moment=history.moment, tried_bytes=tried, free_bytes=free,
        allocated_bytes=size_of(history.blocks),
        reserved_bytes=history.reserved_bytes,
        largest_free_bytes=history.largest_free_bytes or None,
        phase=history.phase, line=history.running.line or history.running.module,
        passes=history.phases[-1].forward_pass, events=history.events,
        parts=_largest(parts, "held_bytes"), rows=_rows(history), findings=findings(history),
        timeline=_samples(history), notes=(Note(key="why_no_frames"),) if has_no_frames else (),
    )  # fmt: skip


def _largest(items: Iterable[_Key], size: str) -> tuple[_Key, ...]:
    return tuple(sorted(items, key=attrgetter(size), reverse=True))


def _rows(history: History) -> tuple[WhyRow, ...]:
    groups = _grouped(history.blocks, attrgetter("part", "kind.line", "kind.module"))
    rows = []
    for (part, line, module), blocks in groups.items():
        sizes = [block.size for block in blocks]
        passes = len({block.forward_pass for block in blocks} - {0})
        span = {"held_bytes": sum(sizes), "smallest_bytes": min(sizes), "largest_bytes": max(sizes)}
        rows.append(WhyRow(part=part, line=line, module=module, blocks=len(blocks), passes=passes, **span))
    return _largest(rows, "held_bytes")[:_MOST_ROWS]


def _samples(history: History) -> tuple[WhySample, ...]:
    changes = list[tuple[int, str, int]]()
    for block in history.all_blocks if history.events > 1 else ():
        changes.append((max(block.born, 0), block.part, block.size))
        if block.died != NEVER:
            changes.append((block.died, block.part, -block.size))
    held, total = Counter[str](), 0
    highest = dict[int, tuple[int, WhySample]]()
    for event, part, size in sorted(changes, key=itemgetter(0)):
        held[part] += size
        total += size
        span = event * _SAMPLES // history.events
        if span not in highest or total > highest[span][0]:
            highest[span] = total, WhySample(event=event, held={part: max(size, 0) for part, size in held.items()})
    return tuple(sample for _, sample in highest.values())


def findings(history: History) -> tuple[WhyFinding, ...]:
    """Return the findings in their order."""
    rules = (_leaks, _models, _optimizer, _fragmentation, _operators, _activations, _parts)
    return main_first((reason for rule in rules if history.blocks for reason in rule(history)), history.total)


def main_first(reasons: Iterable[WhyFinding], held_bytes: int) -> tuple[WhyFinding, ...]:
    """Return the findings, the one whose remedy frees most first.

    What every step needs comes after a fault that holds a tenth of the memory: to repair a fault costs nothing.
    """

    def rank(reason: WhyFinding) -> tuple[bool, int, bool]:
        is_fault = reason.key not in _NEEDED and reason.frees_bytes > _FAULT * held_bytes
        return is_fault, reason.frees_bytes, reason.key != "why_fragmentation"

    return tuple(sorted(reasons, key=rank, reverse=True))


def finding(key: str, size: int, frees: int | None = None, **values: str | int) -> WhyFinding:
    """Return a finding on `size` bytes, whose remedy frees them all if `frees` does not say less."""
    return WhyFinding(key=f"why_{key}", values={"size": size, **values}, frees_bytes=size if frees is None else frees)


def _caller(blocks: list[HeldBlock]) -> str:
    groups = _grouped(blocks, attrgetter("kind.caller"))
    return max(groups, key=lambda line: size_of(groups[line]), default="")


def _line(blocks: list[HeldBlock]) -> str:
    return max(blocks, key=attrgetter("size")).kind.line if blocks else ""


def _grouped(blocks: Iterable[HeldBlock], key: Callable[[HeldBlock], _Key]) -> dict[_Key, list[HeldBlock]]:
    groups: dict[_Key, list[HeldBlock]] = defaultdict(list)
    for block in blocks:
        groups[key(block)].append(block)
    return groups


def _by_stack(blocks: Iterable[HeldBlock]) -> Iterable[list[HeldBlock]]:
    return _grouped(blocks, lambda block: id(block.kind)).values()


def _leaks(history: History) -> Iterator[WhyFinding]:
    earlier = (block for block in history.blocks if 1 <= block.forward_pass < history.last_pass)
    outside = (block for block in earlier if KEY_VALUES not in block.kind.marks)  # of the cache of generate()
    old = [block for block in outside if block.phase == USER or block.part in ("activations", "temporaries")]
    passes = {block.forward_pass for block in old}
    if not old:
        yield from _open_graph(history)
        return
    if len(passes) == 1 and max(passes) < history.last_pass - 1:
        return  # made once for all passes, such as the copies of weights that autocast keeps
    repeated = [group for group in _by_stack(old) if len({block.forward_pass for block in group}) > 1]
    blocks = [block for group in repeated for block in group] or old
    size, count = size_of(blocks), len({block.forward_pass for block in blocks})
    stacks = {id(block.kind) for block in blocks if block.phase == FORWARD}
    if len(stacks) >= _GRAPH_STACKS and size > _SMALL * history.total:
        user_blocks = [block for block in blocks if block.phase == USER]
        key = "grad_eval" if history.is_evaluation(blocks) else "graph"
        yield finding(key, size, passes=count, line=_caller(user_blocks or blocks))
    elif len(passes) > 1:
        key = "losses" if size <= _SCALARS * count else "outputs"
        yield finding(key, size, passes=count, line=_caller(blocks), each=size // count)
    elif size > _SMALL * history.total:
        yield finding("previous", size, line=_caller(blocks))


def _open_graph(history: History) -> Iterator[WhyFinding]:
    all_blocks, blocks = (
        [block for block in some if block.forward_pass == history.last_pass and block.phase == FORWARD]
        for some in (history.all_blocks, history.of("activations"))
    )
    size = size_of(blocks)
    is_kept = size > _KEPT * max(size_of(all_blocks), 1) and len({id(block.kind) for block in blocks}) > 3
    if history.last_pass and is_kept and history.is_evaluation(blocks) and size > _LARGE * history.total:
        yield finding("grad_eval", size, passes=1, line=_caller(blocks))


def _models(history: History) -> Iterator[WhyFinding]:
    blocks = [block for block in history.of("parameters") if COPIED not in block.kind.marks]
    groups = _grouped(blocks, lambda block: tuple(line for line in block.kind.lines if not line.endswith("__init__)")))
    alike = _alike(sorted((group for group in groups.values() if len(group) > 1), key=size_of))
    if not alike or size_of(alike[0]) <= _LARGE * history.total:
        sizes, count = [block.size for block in blocks], len(blocks)
        # A unit of few tensors is a layer: the model has equal ones, and nothing else. So the smallest unit decides.
        units = (unit for unit in range(1, count // 2 + 1) if sizes == sizes[:unit] * (count // unit))
        unit = next(units, 0)
        alike = [blocks[start : start + unit] for start in range(0, count, unit)] if unit >= _UNIT else []
    if alike:
        size = sum(map(size_of, alike[1:]))
        yield finding("models", size, line=_line(alike[0]), other=_line(alike[1]), times=len(alike))


def _alike(groups: list[list[HeldBlock]]) -> list[list[HeldBlock]]:
    """Return the groups of which nearly all bytes are in blocks of the sizes of another; empty without such groups."""
    for number, one in enumerate(groups):
        first = Counter(block.size for block in one)
        alike = [one]
        for other in groups[number + 1 :]:
            common = first & Counter(block.size for block in other)
            if sum(size * count for size, count in common.items()) > _ALIKE * max(size_of(one), size_of(other)):
                alike.append(other)
        if len(alike) > 1:
            return alike
    return []


def _optimizer(history: History) -> Iterator[WhyFinding]:
    state = history.of("optimizer_state")
    # The moments of Adam are made at two lines of one step.
    groups = _grouped(state, lambda block: (block.forward_pass, *(x for x in block.kind.lines if x[-5:] != "step)")))
    if alike := _alike(sorted(groups.values(), key=lambda group: group[0].born)):
        yield finding("optimizers", sum(map(size_of, alike[:-1])), line=_caller(alike[0]))
    elif size_of(state) > _LARGE * history.total:
        yield finding("optimizer", size_of(state), size_of(state) * 3 // 4)  # 8-bit states are a quarter of fp32's


def _fragmentation(history: History) -> Iterator[WhyFinding]:
    reserved = history.reserved_bytes or 0
    unusable = reserved - history.total
    if (history.moment == OOM and unusable >= history.tried) or unusable > max(_FRAGMENTED * reserved, _SEGMENTS):
        stacks = _by_stack(block for block in history.all_blocks if block.phase == FORWARD)
        varied = max(stacks, key=lambda blocks: len({block.size for block in blocks}), default=[])
        sizes = {block.size for block in varied}
        if len(sizes) > 2:
            yield finding("lengths", unusable, line=varied[0].kind.caller, size_low=min(sizes), size_high=max(sizes))
        else:
            yield finding("fragmentation", unusable)
    for key, size in (("private", history.private_bytes), ("waiting", history.waiting_bytes)):
        if history.moment in (OOM, END) and size > _LARGE * reserved:
            yield finding(key, size)


def _operators(history: History) -> Iterator[WhyFinding]:
    kind = history.oom_kind
    for key, mark in (("attention", ATTENTION_SCORES), ("logits", LOGITS)):
        blocks = [block for block in history.of(mark=mark) if block.phase == FORWARD]
        largest = max((block.size for block in blocks), default=0)
        blocks = [block for block in blocks if 2 * block.size > largest]  # and not the small ones next to them
        size = size_of(blocks) + (history.tried if mark in kind.marks else 0)
        if size > 2 * _LARGE * history.total:
            yield finding(key, size, line=_line(blocks) or kind.line)
    if history.tried > history.total:
        yield finding("request", history.tried, line=kind.line or kind.module)


def _activations(history: History) -> Iterator[WhyFinding]:
    """Yield what the forward pass keeps for the backward pass; checkpointing keeps an input for each layer."""
    saved = [block for block in history.of("activations") if block.forward_pass == history.last_pass]
    copies = Counter(id(block.kind) for block in saved)
    repeated = [block for block in saved if copies[id(block.kind)] > 1]
    if size_of(saved) > _LARGE * history.total:
        layers = Counter[int]()  # the bytes of stacks with as many blocks: most are one block for each layer
        for block in repeated:
            layers[copies[id(block.kind)]] += block.size
        usual = Counter(block.size for block in repeated).most_common(1)
        count = max(layers, key=layers.__getitem__, default=1)
        inputs = count * usual[0][0] if usual else 0
        frees = max(size_of(repeated) * (count - 1) // count - inputs, 0)
        yield finding("activations", size_of(saved), frees, line=_caller(saved), layers=count, size_frees=frees)


def _parts(history: History) -> Iterator[WhyFinding]:
    """Yield the parts that are large, whose sentences need no more than their size and a line."""
    used = [block for block in history.of("gradients") if block.born < history.last_update]  # by the optimizer
    data = [block for block in history.of(TENSORS) if not block.forward_pass]
    # The blocks, if they are above a share of the memory, and if the remedy frees all of them or nothing.
    for key, share, is_freed, blocks in (
        ("cache", _LARGE, True, history.of(mark=KEY_VALUES)),
        ("copy", 0, True, history.of("parameters", COPIED)),
        ("gradients", 0, True, used if history.phase == FORWARD else []),
        ("foreach", _SMALL, True, history.of("temporaries", FOREACH) if history.phase == OPTIMIZER else []),
        ("buckets", _LARGE, True, history.of("communication", BUCKETS)),
        ("data", _LARGE, True, data if history.last_pass or history.moment == OOM else []),
        ("parameters", _LARGE, False, history.of("parameters")),
        ("before", _LARGE, False, history.of(BEFORE)),
    ):
        if (size := size_of(blocks)) > share * history.total:
            yield finding(key, size, size if is_freed else 0, line=_caller(blocks))


# ---- a message of torch in a text, in the forms of CUDACachingAllocator.cpp from 1.0 on (CUDA, HIP), XPU and MPS ----

_SIZE = r"([0-9][0-9,]{0,15}(?:\.[0-9]{1,4})?)\s{0,2}(bytes|[KMGT]i?B)"
# The start of a message, and how far behind it its numbers are: a message with 20 other processes has 1,500 letters.
_START = re.compile(r"(?:CUDA|HIP|XPU) out of memory\.|MPS backend out of memory|(?<!\w)Tried to allocate (?=[0-9])"
                    r"|Currently allocated\s{0,9}: (?=[0-9])")  # fmt: skip
_REACH = 4000
_MOST_STARTS = 1000  # from the end of the text: a hostile one has a million
_NUMBERS = {
    # The last form of each is from the backend cudaMallocAsync.
    "tried": rf"(?:Tried to allocate {_SIZE}|Requested : {_SIZE})",
    "total": rf"(?:{_SIZE} total capacity|total capac\w{{1,4}} of {_SIZE}|max allowed: {_SIZE}|Device limit : {_SIZE})",
    "free": rf"(?:{_SIZE} free;|of which\s?{_SIZE} is free|Free \(according to CUDA\): {_SIZE})",
    "allocated": rf"(?:{_SIZE} already allocated|allocated memory {_SIZE} is allocated|MPS allocated: {_SIZE}|"
    rf"Currently allocated : {_SIZE})",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "unallocated": rf"(?:{_SIZE} cached|{_SIZE} is reserved by PyTorch but unallocated)",
    # A container lists the process by its number: if it is the only one, it is this one.
    "own": rf"(?:this process has {_SIZE} memory in use|free\. Process [0-9]{{1,10}} has {_SIZE} memory in use\. Of)",
    "limit": rf"{_SIZE} allowed;",
    "private": rf"with {_SIZE} allocated in private pools",
    "driver": rf"other allocations: {_SIZE}",
}
_COLOR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_FRAME = re.compile(r'File "([^"\n]{1,500})", line ([0-9]{1,9}), in (\S{1,200})')
# Memory of a process outside torch's allocator: the context is at most 1,486 MiB (gpus.py), NCCL and others add some.
_OUTSIDE = 2 * 2**30
_FULL_SHARE, _LARGE_SHARE, _SMALL_SHARE = 0.8, 0.5, 0.1  # of the GPU


def message_report(text: str, name: str) -> WhyReport:
    """Return the report of the last out-of-memory message in a text; raises SourceError if there is none."""
    numbers, kind = _read(text, name)
    allocated, total = numbers.get("allocated", 0), numbers.get("total")
    reserved = numbers.get("reserved", allocated + numbers.get("unallocated", 0))
    other = _other(numbers, reserved)
    outside = numbers.get("driver", numbers.get("own", 0) - reserved)
    values = {**numbers, "unallocated": max(reserved - allocated, 0), "other": other, "driver": outside}
    reasons = main_first(_findings(values, kind), allocated)
    if reasons and reasons[0].frees_bytes and allocated < _FULL_SHARE * (total or allocated):
        reasons = tuple(reason for reason in reasons if reason.key != "why_full")
    return WhyReport(
        name=name, source=MESSAGE, moment=OOM, allocated_bytes=allocated, reserved_bytes=reserved,
        tried_bytes=numbers.get("tried"), free_bytes=numbers.get("free"), total_bytes=total, other_bytes=other,
        phase=kind.phase, line=kind.line or kind.module, findings=reasons,
    )  # fmt: skip


def _read(text: str, name: str) -> tuple[dict[str, int], StackKind]:
    text = _COLOR.sub("", text)
    starts, is_cut = deque((match.start() for match in _START.finditer(text)), _MOST_STARTS), False
    for start in reversed(starts):
        message = " ".join(text[start : start + _REACH].split())
        following = _START.search(message, 200)  # of the next message, in a log of several ranks
        message = message[: following.start()] if following else message
        matches = {name: re.search(pattern, message) for name, pattern in _NUMBERS.items()}
        sizes = {name: _bytes(match) for name, match in matches.items() if match}
        numbers = {name: size for name, size in sizes.items() if size < 2**60}  # 17179869184.00 GiB: below 0
        is_cut |= numbers.get("tried", 0) > 0 and "total" in numbers
        if numbers.get("tried") and "allocated" in numbers:
            first_frame = max(text.rfind("Traceback (most recent call last)", 0, start), 0)
            frames = reversed(_FRAME.findall(text, first_frame, start))
            named = [{"filename": file, "line": int(line), "name": name.rstrip(",")} for file, line, name in frames]
            kind = stack_kind(named)
            is_evaluation = EVALUATION in kind.marks and kind.phase in (USER, FORWARD)
            return numbers, replace(kind, phase=EVALUATION) if is_evaluation else kind
    if is_cut:
        raise SourceError("the message ends before the memory that PyTorch has allocated; give all of it", where=name)
    raise SourceError(
        "no out-of-memory message of torch with its numbers ('Tried to allocate ...'), and no memory snapshot; give "
        "the complete message, or what torch.cuda.memory._dump_snapshot wrote",
        where=name,
    )


def _bytes(match: re.Match[str]) -> int:
    """Return the bytes of `1.24 GiB`, or in some languages `1,24 GiB`; MPS says GB and means GiB."""
    amount, unit = filter(None, match.groups())
    point = "." if amount[-3:-2] == "," else ""  # torch writes two digits behind it
    return parse_bytes(f"{amount.replace(',', point)}{'B' if unit == 'bytes' else f'{unit[0]}iB'}")


def _other(numbers: dict[str, int], reserved: int) -> int:
    """Return what other processes hold; a container may list the process itself by its number."""
    if "total" not in numbers or "free" not in numbers:
        return 0
    used = numbers["total"] - numbers["free"]
    in_process = numbers.get("own", 0)  # NVML does not see a process in a container, and says 0 bytes
    rest, least = (used - in_process, 0) if in_process >= reserved else (used - reserved, _OUTSIDE)
    if not numbers.keys() & {"own", "reserved", "unallocated"}:  # cudaMallocAsync: its pool may hold what is cached
        least = numbers["total"] // 2
    return rest if rest > max(least, 0.01 * numbers["total"]) else 0


def _findings(of: dict[str, int], kind: StackKind) -> Iterator[WhyFinding]:
    tried, total, free, allocated = (of.get(key, 0) for key in ("tried", "total", "free", "allocated"))
    unusable, other = of["unallocated"], of["other"]
    if unusable >= tried > free:  # if it is a small share, tensors fill the GPU: a later request would fail, too
        is_large = unusable > _SMALL_SHARE * (total or unusable)
        yield finding("fragmentation", unusable, unusable if is_large else 0)
    if other:
        yield finding("other", other, other if free < tried else 0, size_total=total)
    if of.get("limit"):
        yield finding("limit", of["limit"], free)
    elif of["driver"] > allocated:
        yield finding("driver", of["driver"])
    elif allocated > total > 0:
        yield finding("shared", allocated, 0, size_total=total)
    elif free >= tried:
        yield finding("free", free, 0, size_tried=tried)
    private = [finding("private", of["private"], 0)] if of.get("private") else []
    if private and of["private"] > allocated - of["private"]:
        yield private.pop()
    if tried > _LARGE_SHARE * (total or tried) or tried > max(allocated, free, _SMALL_SHARE * total):
        named = [key for key, mark in (("attention", ATTENTION_SCORES), ("logits", LOGITS)) if mark in kind.marks]
        yield finding(named[0] if named else "request", tried, line=kind.line or kind.module)
    if total >= allocated > 0 and free < tried:
        yield finding("full", allocated, 0, size_total=total)
    yield from private
