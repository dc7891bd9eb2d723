"""A simulation of CUDA's caching allocator over a memory trace: the bytes it reserves, and if they fit in a limit.

Rules and constants are from torch's c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp. Sizes are
rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, below 10 MiB from segments of 20 MiB; a
larger block gets a separate segment, rounded up to 2 MiB. The allocator splits the smallest free block that fits,
merges free neighbours, and releases entirely free segments at the limit.

Of free blocks of one size it takes that with the lowest address, so the addresses of segments matter. cudaMalloc hands
out ranges of 32 MiB, each below the last one; a segment takes the lowest range with room (seen on an H200, driver 580:
docs/accuracy.md).

With expandable segments each pool is one range of addresses, to whose pages memory is mapped: 2 MiB for small
blocks, 20 MiB for others. A block that no free block serves extends the mapped range.

`torch.cuda.memory_allocated` adds the sizes of blocks with the rests that are not split off, of up to 1 MiB in blocks
above 1 MiB (should_split and alloc_found_block in CUDACachingAllocator.cpp).
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from bertscope.frozen import Record
from bertscope.memory.kernel_rules import MATRICES
from bertscope.memory.trace import Layout, MemoryEvent, MemoryTrace
from bertscope.reports.memory import BACKWARD, EVALUATING, OPTIMIZER
from bertscope.reports.step import RunHistory

_MIB = 2**20
_STEP, _SMALL = 512, _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_FROM, _OWN_STEP = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB
_RANGE = 32 * _MIB  # of addresses, which cudaMalloc hands out whole
_ADDRESSES = 2**20 * _LARGE_SEGMENT  # of one expandable segment: more than any GPU has memory
PoolKey = tuple[str, bool]  # the stream of its blocks, and if they are small
_MOST_LAYOUTS = 16  # of steps whose requests are kept
STEPS = 4  # the first, which lays down the state of the optimizer, and three with this state


class SegmentBlock:
    """A used, free or unmapped block of a segment, with its neighbours."""

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(
        self, address: int, size: int, pool: PoolKey, is_mapped: bool = True, before: SegmentBlock | None = None,
        after: SegmentBlock | None = None
    ) -> None:  # fmt: skip
        self.address, self.size, self.pool = address, size, pool  # of a pool of blocks of up to 1 MiB, or of others
        self.is_free, self.is_mapped = False, is_mapped
        self.before, self.after = before, after

    @property
    def reach_bytes(self) -> int:
        """Return the size to which the block can extend: with the unmapped block behind it."""
        return self.size + (self.after.size if self.after is not None and not self.after.is_mapped else 0)

    def split(self, size: int) -> SegmentBlock:
        """Reduce the block to this size, and return the block of the rest."""
        rest = SegmentBlock(self.address + size, self.size - size, self.pool, self.is_mapped, self, self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Take over the memory of the block behind this one, if there is one."""
        if self.after is not None:
            self.size += self.after.size
            self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class Allocator:
    """The memory pools of the streams; `limit_bytes` limits the reserved bytes.

    A free block serves only requests of its stream (BlockComparatorSize and get_free_block).
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        self.limit_bytes, self.expandable_segments = limit_bytes, expandable_segments
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0  # sums of whole blocks, as torch.cuda.memory_allocated
        self.grown_step = 0  # the last one in which the reserved bytes grew beyond all before
        self.missing_bytes = 0  # above the limit, at the first request that exceeded it; 0 if none did
        self.lowest_address = 0  # of all ranges that cudaMalloc handed out
        self.room: list[tuple[int, int]] = []  # the addresses left in these ranges, and their number
        # The free blocks of each pool: the smallest first, of equal ones the one with the lowest address.
        self.free_blocks: dict[PoolKey, list[tuple[int, int, SegmentBlock]]] = defaultdict(list)
        # The blocks of each pool's expandable segment without memory, by address.
        self.unmapped: dict[PoolKey, list[tuple[int, SegmentBlock]]] = {}

    def malloc(self, size_bytes: int, stream: str = "") -> SegmentBlock:
        """Return a block of this size for a stream, from new memory if no free block fits."""
        size = -(-size_bytes // _STEP) * _STEP or _STEP
        pool = stream, size <= _SMALL
        is_expandable = self.expandable_segments
        if is_expandable and pool not in self.unmapped:
            base = len(self.unmapped) * _ADDRESSES
            self.unmapped[pool] = [(base, SegmentBlock(base, _ADDRESSES, pool, is_mapped=False))]
        free = self.free_blocks[pool]
        index = bisect_left(free, (size,))
        if self.unmapped:  # a block that can extend counts with the size that it can get
            while index + 1 < len(free) and free[index + 1][2].reach_bytes < free[index][2].reach_bytes:
                index += 1
        if index < len(free):
            block = free.pop(index)[2]
        else:
            block = self._mapped(size, pool) if is_expandable else self._new_segment(size, pool)
        block.is_free = False
        rest = block.size - size
        if rest >= _STEP if pool[1] or is_expandable else rest > _SMALL:
            self._set_free(block.split(size))
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def _new_segment(self, size: int, pool: PoolKey) -> SegmentBlock:
        separate = -(-size // _OWN_STEP) * _OWN_STEP
        whole = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT if size < _OWN_FROM else separate
        if self._exceeds(whole):
            self.release_free_memory()
        self._reserve(whole)
        address, room = next((left for left in self.room if left[1] >= whole), (0, 0))
        if room:
            self.room.remove((address, room))
        else:
            room = -(-whole // _RANGE) * _RANGE
            self.lowest_address = address = self.lowest_address - room
        if room > whole:
            insort(self.room, (address + whole, room - whole))
        return SegmentBlock(address, whole, pool)

    def _exceeds(self, more_bytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + more_bytes > self.limit_bytes

    def _reserve(self, more_bytes: int) -> None:
        self.reserved_bytes += more_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if self.limit_bytes is not None and not self.missing_bytes:
            self.missing_bytes = max(self.reserved_bytes - self.limit_bytes, 0)

    def _mapped(self, size: int, pool: PoolKey) -> SegmentBlock:
        """Return a block of at least this size from neighbours that are free, or to which pages are mapped for it."""
        blocks, pages = self._room(size, pool)
        if self._exceeds(sum(pages)):
            self.release_free_memory()
            blocks, pages = self._room(size, pool)
        self._reserve(sum(pages))
        first = blocks[0]
        for block, mapped in zip(blocks, pages, strict=True):
            if block.is_mapped:
                self._remove(block)
            else:
                unmapped = self.unmapped[pool]
                del unmapped[bisect_left(unmapped, (block.address,))]
                if mapped < block.size:
                    rest = block.split(mapped)
                    insort(unmapped, (rest.address, rest))
                block.is_mapped = True
            if block is not first:
                first.absorb_next()
        if first.after is not None and first.after.is_free:
            self._remove(first.after)
            first.absorb_next()
        return first

    def _room(self, size: int, pool: PoolKey) -> tuple[list[SegmentBlock], list[int]]:
        """Return the free and unmapped neighbours with room at the lowest address, and the bytes to map in each."""
        page = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        for _, unmapped in self.unmapped[pool]:
            before = unmapped.before
            block: SegmentBlock | None = before if before is not None and before.is_free else unmapped
            blocks: list[SegmentBlock] = []
            pages: list[int] = []
            missing = size
            while missing > 0 and block is not None and (block.is_free or not block.is_mapped):
                blocks.append(block)
                pages.append(0 if block.is_mapped else min(-(-missing // page) * page, block.size))
                missing -= block.size
                block = block.after
            if missing <= 0:
                break
        return blocks, pages  # the last unmapped block has room for everything

    def free(self, block: SegmentBlock) -> None:
        """Free a block and merge it with free neighbours."""
        self.allocated_bytes -= block.size
        after, before = block.after, block.before
        if after is not None and after.is_free:
            self._remove(after)
            block.absorb_next()
        if before is not None and before.is_free:
            block = before
            self._remove(block)
            block.absorb_next()
        self._set_free(block)

    def _set_free(self, block: SegmentBlock) -> None:
        block.is_free = True
        insort(self.free_blocks[block.pool], (block.size, block.address, block))

    def _remove(self, block: SegmentBlock) -> None:
        pool = self.free_blocks[block.pool]
        del pool[bisect_left(pool, (block.size, block.address))]
        block.is_free = False

    def release_free_memory(self) -> None:
        """Return the segments that are entirely free to the device, of expandable ones the pages that are."""
        for pool in self.free_blocks.values():
            for _, _, block in list(pool):
                if self.unmapped:
                    self._unmap(block)
                elif block.before is None and block.after is None:  # all of a segment
                    self._remove(block)
                    self.reserved_bytes -= block.size
                    insort(self.room, (block.address, block.size))

    def _unmap(self, block: SegmentBlock) -> None:
        page = _SMALL_SEGMENT if block.pool[1] else _LARGE_SEGMENT
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        self._remove(block)
        if last < block.address + block.size:
            self._set_free(block.split(last - block.address))
        if first > block.address:
            rest = block.split(first - block.address)
            self._set_free(block)
            block = rest
        self.reserved_bytes -= block.size
        block.is_mapped = False
        unmapped = self.unmapped[block.pool]
        after, before = block.after, block.before
        if after is not None and not after.is_mapped:
            del unmapped[bisect_left(unmapped, (after.address,))]
            block.absorb_next()
        if before is not None and not before.is_mapped:
            del unmapped[bisect_left(unmapped, (before.address,))]
            before.absorb_next()
            block = before
        insort(unmapped, (block.address, block))


class Requests(Record, kw_only=False):
    """A run's requests to its allocator: a number allocates this block, its complement `~number` frees it."""

    sizes: list[int]  # of the blocks
    streams: list[str]  # of the blocks
    start: list[int]  # before the first step
    first: list[int]  # the first step, which lays down gradients that stay and the optimizer state
    step: list[int]  # each further step
    renamed: dict[int, int]  # blocks that a variable of the loop refers to -> the same of the step before

    def of_sizes(self, sizes: list[int]) -> Requests:
        """Return the same requests with other sizes of the blocks, without blocks of 0 bytes."""
        requests = [self.start, self.first, self.step]
        if not all(sizes[number] for numbers in requests for number in numbers if number >= 0):
            requests = [[number for number in numbers if sizes[max(number, ~number)]] for numbers in requests]
        start, first, step = requests
        return Requests(sizes, self.streams, start, first, step, self.renamed)


# What a process did before the run: the model came from the CPU; a checkpoint lay on the GPU while the model was made
# there; the same run of an equal model ended before, and its blocks stayed in the cache.
MOVED, LOADED, AFTER_ANOTHER = "moved from the CPU", "checkpoint loaded on the GPU", "after another model"


def replayed(
    run: Requests, limit_bytes: int | None = None, *, expandable_segments: bool = False, steps: int = STEPS,
    history: str = MOVED
) -> Allocator:  # fmt: skip
    """Return the allocator after this number of steps; or after the first that exceeds the limit.

    It is empty at first, unless `history` says what came before.
    """
    allocator = Allocator(limit_bytes, expandable_segments=expandable_segments)
    if history == AFTER_ANOTHER:
        for block in list(_take_steps(allocator, [run] * steps).values()):
            allocator.free(block)
    checkpoint = [allocator.malloc(run.sizes[number]) for number in run.start] if history == LOADED else []
    _take_steps(allocator, [run] * steps, checkpoint)
    return allocator


def history(runs: Sequence[Requests], *, expandable_segments: bool = False) -> RunHistory:
    """Return what torch reserves in steps of different sizes, and what emptying the cache would save.

    At a limit the allocator frees cached segments itself.
    """
    allocator, emptied = (Allocator(expandable_segments=expandable_segments) for _ in range(2))
    _take_steps(allocator, runs)
    _take_steps(emptied, runs, empties=True)
    capped = Allocator(emptied.peak_reserved_bytes, expandable_segments=expandable_segments)
    _take_steps(capped, runs)
    sizes = {"reserved_bytes": allocator.peak_reserved_bytes, "emptied_bytes": emptied.peak_reserved_bytes}
    return RunHistory(**sizes, grown_step=allocator.grown_step, runs_in_emptied=not capped.missing_bytes)


def _take_steps(
    allocator: Allocator, runs: Sequence[Requests], checkpoint: Sequence[SegmentBlock] = (), *, empties: bool = False
) -> dict[int, SegmentBlock]:
    """Take the steps, the first after the checkpoint is freed; return the blocks in use at the end.

    With `empties` the script calls torch.cuda.empty_cache() after each step.
    """
    malloc, free = allocator.malloc, allocator.free
    used: dict[int, SegmentBlock] = {}
    parts = [(runs[0], runs[0].start), (runs[0], runs[0].first), *((run, run.step) for run in runs[1:])]
    for step, (run, part) in enumerate(parts):
        sizes, streams, before = run.sizes, run.streams, allocator.peak_reserved_bytes
        if step > 1:
            allocator.peak_allocated_bytes = allocator.allocated_bytes
            used |= {previous: used.pop(number) for number, previous in run.renamed.items()}
        for number in part:
            if number >= 0:
                used[number] = malloc(sizes[number], streams[number])
            else:
                free(used.pop(~number))
        if not step:
            for block in checkpoint:
                free(block)
        if empties:
            allocator.release_free_memory()
        if allocator.peak_reserved_bytes > before:
            allocator.grown_step = step
        if allocator.missing_bytes:
            break
    return used


# ---- the requests of a step ----


Workspaces = Sequence[tuple[str, int]]  # phase and bytes


def requests(trace: MemoryTrace, workspaces: Workspaces = ()) -> Requests:
    """Return the requests of a run whose steady step this is.

    Each workspace has the phase whose first product makes it, an empty one if it was made before the run.
    """
    kinds = trace.kind_bytes
    sizes = [kinds[number] for number in trace.held]
    sizes += [kinds[number] if number >= 0 else 0 for number in trace.changes]
    run = _requests(trace.layout, tuple(phase for phase, _ in workspaces))
    return run.of_sizes([*sizes, *(size for _, size in workspaces)])


@lru_cache(_MOST_LAYOUTS)
def _requests(layout: Layout, workspaces: Sequence[str]) -> Requests:
    """Return the requests at all batches, without sizes.

    A run moves the parameters to the device in the order of the model. The first optimizer step creates the state
    of every parameter before it updates any. Gradients that exist before a step of the trace are laid down by a
    backward pass before it, each when backward reaches its module. The workspaces, given by their phases, are
    laid down by the first matrix product there, and stay: they may split a free block that a later step needs.
    What a variable of the loop refers to is allocated in each step while the block of the step before still exists.
    """
    trace, blocks, places = layout.trace, [kind.block for kind in layout.trace.kinds], layout.places
    held = [blocks[kind] for kind in trace.held]
    step = list(trace.matched())
    made_by = {number: blocks[kind] for number, kind in enumerate(trace.changes, len(held)) if kind >= 0}
    state = [number for number, block in enumerate(held) if block.part == "optimizer_state"]
    # Dictionaries instead of ordered sets.
    gradients = dict.fromkeys(n for n, block in enumerate(held) if block.part == "gradients" and not block.variable)
    previous = dict.fromkeys(number for number, block in enumerate(held) if block.variable)
    referred = dict.fromkeys(number for _, number in step if number >= 0 and made_by[number].variable)
    later = {*gradients, *state, *previous}
    after = (OPTIMIZER, EVALUATING)
    passes = [(places[event], number) for event, number in step if places[event][0] not in after]
    micro_batch = [number for _, number in passes]
    update = [number for event, number in step if places[event][0] in after]
    update += [number for number in _left(number for _, number in step) if ~number not in referred]
    freed = {~number for _, number in step if number < 0}
    repeated = [number for number in gradients if number in freed]  # in each step
    # FSDP without a reduction in each micro-batch: only the last one has blocks of reduced gradients.
    is_last = any(~number in gradients for number in micro_batch if number < 0)
    sums = {number for number, block in made_by.items() if is_last and block.part == "gradients"}

    def laying(laid: Iterable[int]) -> list[int]:
        """Return the requests of a micro-batch that lays these gradients down; it frees none, and no variable."""
        waiting: dict[str, list[int]] = defaultdict(list)
        for number in laid:
            waiting[held[number].path.rpartition(".")[0]].append(number)
        requests: list[int] = []
        for (phase, path, _), number in passes:
            if phase == BACKWARD:
                requests += waiting.pop(path, ())
            requests.append(number)
        requests += [*chain.from_iterable(waiting.values()), *_left(micro_batch)]
        return [n for n in requests if ~n not in previous and ~n not in gradients and max(n, ~n) not in sums]

    laid_first = laying(gradients) if gradients else ()
    first = [*laid_first, *(n for n in micro_batch if ~n not in previous), *state, *update]
    numbered = list(enumerate(workspaces, len(held) + len(trace.changes)))
    for number, phase in reversed(numbered):  # so that workspaces of one phase follow its product in their order
        products = (n for where, n in passes if n >= 0 and where[0] == phase and where[2] in MATRICES)
        product = next(products, None)
        if phase:
            first.insert(0 if product is None else first.index(product) + 1, number)
    streams = [made_by[number].stream if number in made_by else "" for number in range(len(held) + len(trace.changes))]
    return Requests(
        sizes=[],
        streams=[*streams, *("" for _ in workspaces)],
        start=[
            *(number for number, phase in numbered if not phase),
            *(number for number in range(len(held)) if number not in later),
        ],
        first=first,
        step=[*(laying(repeated) if repeated else ()), *micro_batch, *update],
        renamed=dict(zip(referred, previous, strict=True)),
    )


def _left(numbers: Iterable[int]) -> list[int]:
    """Return the frees of the blocks that the requests leave."""
    left: dict[int, None] = {}
    for number in numbers:
        if number >= 0:
            left[number] = None
        else:
            left.pop(~number, None)
    return [~number for number in left]


# ---- the file of a trace for PyTorch's memory viewer (pytorch.org/memory_viz, or torch.cuda._memory_viz) ----


def snapshot(trace: MemoryTrace) -> bytes:
    """Return the pickle that `torch.cuda.memory._dump_snapshot` would write for the step, with invented addresses."""
    entries: list[dict[str, Any]] = []
    addresses: dict[int, int] = {}  # of the blocks by number
    next_address = _STEP
    before = [MemoryEvent(size, block, "before the step", "", "") for block, size in trace.state]
    events = (*before, *trace.events)
    steps = [*enumerate(range(len(before))), *((event + len(before), number) for event, number in trace.matched())]
    for time, (event, number) in enumerate(steps):
        size, block, phase, *_ = events[event]
        if number >= 0:
            addresses[number] = next_address
            next_address += size + _STEP
        names = (block.operator or "(before the step)", block.path or "(model)", f"{block.part}, {phase}")
        frames = [{"name": name, "filename": "", "line": 0} for name in names]
        for action in ("alloc",) if number >= 0 else ("free_requested", "free_completed"):
            entries.append({"action": action, "addr": addresses[max(number, ~number)], "size": abs(size), "stream": 0,
                            "frames": frames, "time_us": time})  # fmt: skip
    return pickle.dumps({"segments": [], "device_traces": [entries]}, protocol=4)
