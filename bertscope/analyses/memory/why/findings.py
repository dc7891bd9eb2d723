"""The reasons for the memory in a history: known faults, and what each remedy frees."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from bertscope.analyses.memory.why.history import HeldBlock, History
from bertscope.analyses.memory.why.stacks import (
    ATTENTION_SCORES,
    BUCKETS,
    COPIED,
    EVALUATION,
    FOREACH,
    KEY_VALUES,
    LOGITS,
    USER,
)
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER
from bertscope.reports.why import BEFORE, END, OOM, TENSORS, WhyFinding

_GRAPH_STACKS = 4  # distinct stacks of one forward pass that live on: fewer are its outputs
_SCALARS = 4096  # bytes of a pass that are losses and metrics: 8 blocks of 512 bytes, the allocator's least
_SMALL = 0.01  # a share of the memory below which nothing but a leak is named
_LARGE = 0.05
_ALIKE = 0.8  # share of equal sizes at which two sets of tensors are those of one model
_UNIT = 24  # tensors of a model that is twice on the card: two layers of a BERT have 16 each
_KEPT = 0.3  # share of what a forward pass allocates that lives on; without gradients it is less
_FRAGMENTED, _SEGMENTS = 0.2, 10 * 20 * 2**20  # unusable: a share of what is reserved, and ten of torch's segments

_Key = TypeVar("_Key", bound=Hashable)


class Evidence:
    """The blocks of a history at the moment, and the phase and forward pass that runs."""

    def __init__(self, history: History) -> None:
        self.history, self.blocks = history, history.blocks
        self.total = max(size_of(self.blocks), 1)
        self.kind, event = history.moment
        _, self.phase, self.last_pass = history.phase_at(event)
        self.tried = history.oom[1] if history.oom else 0
        phases = [(start, phase) for start, phase, _ in history.phases]
        self.has_backward = any(phase == BACKWARD for _, phase in phases)
        self.last_update = max((start for start, phase in phases if phase == OPTIMIZER and start <= event), default=-1)

    def of(self, part: str = "", mark: str = "") -> list[HeldBlock]:
        """Return the blocks of a part, with a mark of their stacks."""
        return [b for b in self.blocks if part in ("", b.part) and (not mark or mark in b.kind.marks)]

    def is_evaluation(self, blocks: Sequence[HeldBlock]) -> bool:
        """Return True if the blocks are of forward passes after which no backward pass comes."""
        marked = [block for block in blocks if EVALUATION in block.kind.marks]
        is_first = self.kind == OOM and self.last_pass == 1  # of a training, maybe
        is_unused = not self.has_backward and not is_first
        return is_unused or size_of(marked) > size_of(blocks) / 2


def size_of(blocks: Iterable[HeldBlock]) -> int:
    """Return the bytes of blocks."""
    return sum(block.size for block in blocks)


def findings(history: History) -> tuple[WhyFinding, ...]:
    """Return the findings, the one whose remedy frees most first."""
    evidence = Evidence(history)
    if not evidence.blocks:
        return ()
    found = [reason for rule in _RULES for reason in rule(evidence)]
    return tuple(sorted(found, key=lambda reason: -reason.frees_bytes))


def finding(key: str, size: int, frees: int | None = None, **values: str | int) -> WhyFinding:
    """Return a finding on `size` bytes, whose remedy frees them all if `frees` does not say less."""
    return WhyFinding(key=f"why_{key}", values={"size": size, **values}, frees_bytes=size if frees is None else frees)


def _caller(blocks: Sequence[HeldBlock]) -> str:
    """Return the line outside all modules that most bytes of the blocks have."""
    groups = grouped(blocks, lambda block: block.kind.caller)
    return max(groups, key=lambda line: size_of(groups[line]), default="")


def _line(blocks: Sequence[HeldBlock]) -> str:
    """Return the innermost line of the largest block."""
    return max(blocks, key=lambda block: block.size).kind.line if blocks else ""


def grouped(blocks: Iterable[HeldBlock], key: Callable[[HeldBlock], _Key]) -> dict[_Key, list[HeldBlock]]:
    """Return the blocks of each key."""
    found: dict[_Key, list[HeldBlock]] = defaultdict(list)
    for block in blocks:
        found[key(block)].append(block)
    return found


def _leaks(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what lives on from earlier forward passes: their graphs, outputs or losses."""
    old = [
        block for block in of.blocks
        if 1 <= block.forward_pass < of.last_pass and KEY_VALUES not in block.kind.marks
        and (block.phase == USER or block.part in ("activations", "temporaries"))
    ]  # fmt: skip
    passes = {block.forward_pass for block in old}
    if not old:
        yield from _open_graph(of)
        return
    if len(passes) == 1 and max(passes) < of.last_pass - 1:
        return  # made once for all passes, such as the copies of weights that autocast keeps
    by_stack = grouped(old, lambda block: block.stack).values()
    repeated = [group for group in by_stack if len({block.forward_pass for block in group}) > 1]
    blocks = [block for group in repeated for block in group] or old
    size, count = size_of(blocks), len({block.forward_pass for block in blocks})
    stacks = {block.stack for block in blocks if block.phase == FORWARD}
    if len(stacks) >= _GRAPH_STACKS and size > _SMALL * of.total:
        own = [block for block in blocks if block.phase == USER]
        key = "grad_eval" if of.is_evaluation(blocks) else "graph"
        yield finding(key, size, passes=count, line=_caller(own or blocks))
    elif len(passes) == 1:
        if size > _SMALL * of.total:
            yield finding("previous", size, line=_caller(blocks))
    else:
        key = "losses" if size <= _SCALARS * count else "outputs"
        yield finding(key, size, passes=count, line=_caller(blocks), each=size // count)


def _open_graph(of: Evidence) -> Iterator[WhyFinding]:
    """Yield the graph of a forward pass of an evaluation that runs at the moment."""
    blocks = [block for block in of.of("activations") if block.forward_pass == of.last_pass and block.phase == FORWARD]
    size, made = size_of(blocks), of.history.forward_bytes(of.last_pass)
    is_kept = size > _KEPT * max(made, 1) and len({block.stack for block in blocks}) > 3
    if of.last_pass and is_kept and of.is_evaluation(blocks) and size > _LARGE * of.total:
        yield finding("grad_eval", size, passes=1, line=_caller(blocks))


def _models(of: Evidence) -> Iterator[WhyFinding]:
    """Yield parameters that are on the card several times: loaded by several lines, or by one line in a loop."""
    blocks = [block for block in of.of("parameters") if COPIED not in block.kind.marks]
    groups = grouped(blocks, lambda block: tuple(line for line in block.kind.lines if not line.endswith("__init__)")))
    alike = _alike(sorted((group for group in groups.values() if len(group) > 1), key=size_of))
    if not alike or size_of(alike[0]) <= _LARGE * of.total:
        sizes = [block.size for block in blocks]
        unit = next((unit for unit in range(1, len(sizes) // 2 + 1)
                     if len(sizes) % unit == 0 and sizes == sizes[:unit] * (len(sizes) // unit)), 0)  # fmt: skip
        # A unit of few tensors is a layer: the model has equal ones, and nothing else.
        alike = [blocks[start : start + unit] for start in range(0, len(blocks), unit)] if unit >= _UNIT else []
    if alike:
        size = sum(map(size_of, alike[1:]))
        yield finding("models", size, line=_line(alike[0]), other=_line(alike[1]), times=len(alike))


def _alike(groups: Iterable[list[HeldBlock]]) -> list[list[HeldBlock]]:
    """Return the groups of which nearly all bytes are in blocks of the sizes of another; empty without such groups."""
    found = list(groups)
    for place, one in enumerate(found):
        first = Counter(block.size for block in one)
        alike = [one]
        for other in found[place + 1 :]:
            common = first & Counter(block.size for block in other)
            if sum(size * count for size, count in common.items()) > _ALIKE * max(size_of(one), size_of(other)):
                alike.append(other)
        if len(alike) > 1:
            return alike
    return []


def _optimizer(of: Evidence) -> Iterator[WhyFinding]:
    """Yield optimizer state of the same parameters that exists twice, or the state."""
    state = of.of("optimizer_state")
    # The moments of Adam are made at two lines of one step.
    groups = grouped(state, lambda block: (block.forward_pass, *(x for x in block.kind.lines if x[-5:] != "step)")))
    if alike := _alike(sorted(groups.values(), key=lambda group: group[0].born)):
        yield finding("optimizers", sum(map(size_of, alike[:-1])), line=_caller(alike[0]))
    elif size_of(state) > _LARGE * of.total:
        yield finding("optimizer", size_of(state), size_of(state) * 3 // 4)  # 8-bit states are a quarter of fp32's


def _fragmentation(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what torch has reserved and cannot give out."""
    history = of.history
    reserved = history.reserved_bytes or 0
    unusable = reserved - of.total
    if (of.kind == OOM and unusable >= of.tried) or unusable > max(_FRAGMENTED * reserved, _SEGMENTS):
        sizes: dict[int, set[int]] = defaultdict(set)
        for number, stack in enumerate(history.stacks):
            if history.phase(number) == FORWARD:
                sizes[stack].add(history.sizes[number])
        varied = max(sizes, key=lambda stack: len(sizes[stack]), default=0)
        if len(sizes.get(varied, ())) > 2:
            line = history.kinds[history.stacks.index(varied)].caller
            yield finding("lengths", unusable, line=line, size_low=min(sizes[varied]), size_high=max(sizes[varied]))
        else:
            yield finding("fragmentation", unusable)
    for key in ("private", "waiting"):
        size = getattr(history, f"{key}_bytes")
        if of.kind in (OOM, END) and size > _LARGE * reserved:
            yield finding(key, size)


def _operators(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what single operators hold or ask for."""
    kind = of.history.oom_kind
    for key, mark in (("attention", ATTENTION_SCORES), ("logits", LOGITS)):
        blocks = [block for block in of.of(mark=mark) if block.phase == FORWARD]
        largest = max((block.size for block in blocks), default=0)
        blocks = [block for block in blocks if 2 * block.size > largest]  # and not the small ones next to them
        size = size_of(blocks) + (of.tried if mark in kind.marks else 0)
        if size > 2 * _LARGE * of.total:
            yield finding(key, size, line=_line(blocks) or kind.line)
    if of.tried > of.total:
        yield finding("request", of.tried, line=kind.line or kind.module)


def _activations(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what the forward pass keeps for the backward pass; checkpointing keeps an input for each layer."""
    kept = [block for block in of.of("activations") if block.forward_pass == of.last_pass]
    copies = Counter(block.stack for block in kept)
    repeated = [block for block in kept if copies[block.stack] > 1]
    if size_of(kept) > _LARGE * of.total:
        layers = Counter(copies[block.stack] for block in repeated).most_common(1)
        usual = Counter(block.size for block in repeated).most_common(1)
        count = layers[0][0] if layers else 1
        inputs = count * usual[0][0] if usual else 0
        frees = max(size_of(repeated) * (count - 1) // count - inputs, 0)
        yield finding("activations", size_of(kept), frees, line=_caller(kept), layers=count, size_frees=frees)


# A finding on blocks above a share of the memory: the remedy frees all of them, or nothing.
_PARTS: tuple[tuple[str, float, bool, Callable[[Evidence], list[HeldBlock]]], ...] = (
    ("cache", _LARGE, True, lambda of: of.of(mark=KEY_VALUES)),
    ("copy", 0, True, lambda of: of.of("parameters", COPIED)),
    ("gradients", 0, True, lambda of: [block for block in of.of("gradients")  # that the optimizer has used
                                       if of.phase == FORWARD and block.born < of.last_update]),
    ("foreach", _SMALL, True, lambda of: of.of("temporaries", FOREACH) if of.phase == OPTIMIZER else []),
    ("buckets", _LARGE, True, lambda of: of.of("communication", BUCKETS)),
    ("data", _LARGE, True, lambda of: [block for block in of.of(TENSORS) if not block.forward_pass
                                       and (of.last_pass or of.kind == OOM)]),
    ("parameters", _LARGE, False, lambda of: of.of("parameters")),
    ("before", _LARGE, False, lambda of: of.of(BEFORE)),
)  # fmt: skip


def _parts(of: Evidence) -> Iterator[WhyFinding]:
    """Yield the parts that are large, whose sentences need no more than their size and a line."""
    for key, share, is_freed, blocks_of in _PARTS:
        blocks = blocks_of(of)
        if (size := size_of(blocks)) > share * of.total:
            yield finding(key, size, size if is_freed else 0, line=_caller(blocks))


_RULES: tuple[Callable[[Evidence], Iterator[WhyFinding]], ...] = (
    _leaks, _models, _optimizer, _fragmentation, _operators, _activations, _parts,
)  # fmt: skip
