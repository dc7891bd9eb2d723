"""The reasons for the memory in a history: known faults, and what each remedy frees."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from bertscope.analyses.memory.why.history import History
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


class Evidence:
    """The blocks of a history at the moment, by part and by forward pass."""

    def __init__(self, history: History) -> None:
        self.history, self.live = history, history.live
        self.total = max(self.size(self.live), 1)
        self.kind, self.event = history.moment
        _, self.phase, self.last_pass = history.phase_at(self.event)

    def size(self, blocks: Iterable[int]) -> int:
        """Return the bytes of blocks."""
        return sum(map(self.history.sizes.__getitem__, blocks))

    def of(self, part: str, mark: str = "") -> list[int]:
        """Return the blocks of a part at the moment, with a mark of their stacks."""
        history = self.history
        return [n for n in self.live if history.parts[n] == part and (not mark or mark in history.kinds[n].marks)]

    def marked(self, mark: str) -> list[int]:
        """Return the blocks of all parts at the moment whose stacks have a mark."""
        return [number for number in self.live if mark in self.history.kinds[number].marks]

    def caller(self, blocks: Sequence[int]) -> str:
        """Return the line outside all modules that most bytes of the blocks have."""
        sizes: Counter[str] = Counter()
        for number in blocks:
            sizes[self.history.kinds[number].caller] += self.history.sizes[number]
        return max(sizes, key=lambda line: sizes[line], default="")

    def line(self, blocks: Sequence[int]) -> str:
        """Return the innermost line of the largest block."""
        return self.history.kinds[max(blocks, key=self.history.sizes.__getitem__)].line if blocks else ""

    @cached_property
    def has_backward(self) -> bool:
        """Return True if the history has a backward pass."""
        return any(phase == BACKWARD for _, phase, _ in self.history.phases)

    def is_evaluation(self, blocks: Sequence[int]) -> bool:
        """Return True if the blocks are of forward passes after which no backward pass comes."""
        marked = [number for number in blocks if EVALUATION in self.history.kinds[number].marks]
        is_first = self.kind == OOM and self.last_pass == 1  # of a training, maybe
        is_unused = not self.has_backward and not is_first
        return is_unused or self.size(marked) > self.size(blocks) / 2


def findings(history: History) -> tuple[WhyFinding, ...]:
    """Return the findings, the one whose remedy frees most first."""
    evidence = Evidence(history)
    if not evidence.live:
        return ()
    found = [reason for rule in _RULES for reason in rule(evidence)]
    return tuple(sorted(found, key=lambda reason: -reason.frees_bytes))


def finding(key: str, size: int, frees: int | None = None, **values: str | int) -> WhyFinding:
    """Return a finding on `size` bytes, whose remedy frees them all if `frees` does not say less."""
    return WhyFinding(key=f"why_{key}", values={"size": size, **values}, frees_bytes=size if frees is None else frees)


def _leaks(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what lives on from earlier forward passes: their graphs, outputs or losses, or the cache of generate."""
    history = of.history
    cache = of.marked(KEY_VALUES)
    if cache and of.size(cache) > _LARGE * of.total:
        yield finding("cache", of.size(cache), line=of.caller(cache))
    old = [
        n for n in of.live
        if 1 <= history.passes[n] < of.last_pass and KEY_VALUES not in history.kinds[n].marks
        and (history.phase(n) == USER or history.parts[n] in ("activations", "temporaries"))
    ]  # fmt: skip
    passes = {history.passes[n] for n in old}
    if not old:
        yield from _open_graph(of)
        return
    if len(passes) == 1 and max(passes) < of.last_pass - 1:
        return  # made once for all passes, such as the copies of weights that autocast keeps
    lived: dict[int, set[int]] = defaultdict(set)  # the passes of each stack
    for number in old:
        lived[history.stacks[number]].add(history.passes[number])
    blocks = [n for n in old if len(lived[history.stacks[n]]) > 1] or old
    size, count = of.size(blocks), len({history.passes[n] for n in blocks})
    stacks = {history.stacks[n] for n in blocks if history.phase(n) == FORWARD}
    own = [n for n in blocks if history.phase(n) == USER]
    if len(stacks) >= _GRAPH_STACKS and size > _SMALL * of.total:
        key = "grad_eval" if of.is_evaluation(blocks) else "graph"
        yield finding(key, size, passes=count, line=of.caller(own or blocks))
    elif len(passes) == 1:
        if size > _SMALL * of.total:
            yield finding("previous", size, line=of.caller(blocks))
    else:
        key = "losses" if size <= _SCALARS * count else "outputs"
        yield finding(key, size, passes=count, line=of.caller(blocks), each=size // count)


def _open_graph(of: Evidence) -> Iterator[WhyFinding]:
    """Yield the graph of a forward pass of an evaluation that runs at the moment."""
    history = of.history
    own = [n for n, number in enumerate(history.passes) if number == of.last_pass and history.phase(n) == FORWARD]
    live = set(of.live)
    blocks = [n for n in own if n in live and history.parts[n] == "activations"]
    is_kept = of.size(blocks) > _KEPT * max(of.size(own), 1) and len({history.stacks[n] for n in blocks}) > 3
    if of.last_pass and is_kept and of.is_evaluation(blocks) and of.size(blocks) > _LARGE * of.total:
        yield finding("grad_eval", of.size(blocks), passes=1, line=of.caller(blocks))


def _models(of: Evidence) -> Iterator[WhyFinding]:
    """Yield parameters that are on the card twice."""
    history = of.history
    if copied := of.of("parameters", COPIED):
        yield finding("copy", of.size(copied), line=of.caller(copied))
    blocks = [number for number in of.of("parameters") if COPIED not in history.kinds[number].marks]
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number in blocks:
        lines = history.kinds[number].lines
        groups[tuple(line for line in lines if not line.endswith("__init__)"))].append(number)
    ordered = sorted((group for group in groups.values() if len(group) > 1), key=of.size)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if _alike(of, one, other) and of.size(one) > _LARGE * of.total:
                yield finding("models", of.size(one), line=of.line(one), other=of.line(other))
                return
    half = len(blocks) // 2
    sizes = [history.sizes[number] for number in blocks]
    if len(blocks) % 2 == 0 and half >= _UNIT and sizes[:half] == sizes[half:]:
        yield finding("models", of.size(blocks[half:]), line=of.line(blocks), other=of.line(blocks[half:]))


def _alike(of: Evidence, one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if nearly all bytes of one set have blocks of equal sizes in the other, and are as many."""
    first, second = (Counter(of.history.sizes[number] for number in blocks) for blocks in (one, other))
    common = sum(size * count for size, count in (first & second).items())
    return common > _ALIKE * max(of.size(one), of.size(other))


def _optimizer(of: Evidence) -> Iterator[WhyFinding]:
    """Yield optimizer state of the same parameters that exists twice."""
    history, state = of.history, of.of("optimizer_state")
    groups: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for number in state:
        lines = history.kinds[number].lines  # the moments of Adam are made at two lines of one step
        groups[history.passes[number], tuple(line for line in lines if not line.endswith("step)"))].append(number)
    ordered = sorted(groups.values(), key=lambda group: history.born[group[0]])
    for number, one in enumerate(ordered):
        if any(_alike(of, one, other) for other in ordered[number + 1 :]):
            yield finding("optimizers", of.size(one), line=of.caller(one))
            return
    if of.size(state) > _LARGE * of.total:
        yield finding("optimizer", of.size(state), of.size(state) * 3 // 4)  # 8-bit states are a quarter of fp32's


def _gradients(of: Evidence) -> Iterator[WhyFinding]:
    """Yield gradients that the optimizer has used and that exist in a forward pass."""
    history = of.history
    used = [event for event, phase, _ in history.phases if phase == OPTIMIZER and event <= of.event]
    old = [n for n in of.of("gradients") if used and history.born[n] < used[-1]]
    if of.phase == FORWARD and old:
        yield finding("gradients", of.size(old))


def _fragmentation(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what torch has reserved and cannot give out."""
    history = of.history
    reserved = history.reserved_bytes or 0
    unusable = reserved - of.total
    tried = history.oom[1] if history.oom else 0
    if (of.kind == OOM and unusable >= tried) or unusable > max(_FRAGMENTED * reserved, _SEGMENTS):
        sizes: dict[int, set[int]] = defaultdict(set)
        for number, stack in enumerate(history.stacks):
            if history.phase(number) == FORWARD:
                sizes[stack].add(history.sizes[number])
        varied = max(sizes, key=lambda stack: len(sizes[stack]), default=0)
        if len(sizes.get(varied, ())) > 2:
            line = next(k.caller for k, s in zip(history.kinds, history.stacks, strict=True) if s == varied)
            yield finding("lengths", unusable, line=line, size_low=min(sizes[varied]), size_high=max(sizes[varied]))
        else:
            yield finding("fragmentation", unusable)
    for key in ("private", "waiting"):
        size = getattr(history.segments, f"{key}_bytes")
        if of.kind in (OOM, END) and size > _LARGE * reserved:
            yield finding(key, size)


def _kinds(of: Evidence) -> Iterator[WhyFinding]:
    """Yield what single operators and the code of the user hold."""
    history = of.history
    tried, kind = (history.oom[1], history.oom_kind) if history.oom else (0, None)
    for key, mark in (("attention", ATTENTION_SCORES), ("logits", LOGITS)):
        blocks = [n for n in of.marked(mark) if history.phase(n) == FORWARD]
        largest = max((history.sizes[n] for n in blocks), default=0)
        blocks = [n for n in blocks if 2 * history.sizes[n] > largest]  # and not the small ones next to them
        size = of.size(blocks) + (tried if kind and mark in kind.marks else 0)
        if size > 2 * _LARGE * of.total:
            yield finding(key, size, line=of.line(blocks) or (kind.line if kind else ""))
    foreach = of.of("temporaries", FOREACH)
    if of.phase == OPTIMIZER and of.size(foreach) > _SMALL * of.total:
        yield finding("foreach", of.size(foreach))
    buckets = of.of("communication", BUCKETS)
    if of.size(buckets) > _LARGE * of.total:
        yield finding("buckets", of.size(buckets), line=of.caller(buckets))
    data = [number for number in of.of(TENSORS) if not history.passes[number]]
    if of.size(data) > _LARGE * of.total and (of.last_pass or of.kind == OOM):
        yield finding("data", of.size(data), line=of.line(data))
    if kind is not None and tried > of.total:
        yield finding("request", tried, line=kind.line or kind.module)


def _parts(of: Evidence) -> Iterator[WhyFinding]:
    """Yield the parts of a step that has no fault."""
    history, kept = of.history, [n for n in of.of("activations") if of.history.passes[n] == of.last_pass]
    copies = Counter(history.stacks[number] for number in kept)
    repeated = [number for number in kept if copies[history.stacks[number]] > 1]
    if of.size(kept) > _LARGE * of.total:
        layers = Counter(copies[history.stacks[number]] for number in repeated).most_common(1)
        usual = Counter(history.sizes[number] for number in repeated).most_common(1)
        count = layers[0][0] if layers else 1
        inputs = count * usual[0][0] if usual else 0  # a checkpointed layer keeps its input
        frees = max(of.size(repeated) * (count - 1) // count - inputs, 0)
        line = of.caller(kept)
        yield finding("activations", of.size(kept), frees, line=line, layers=count, size_frees=frees)
    if (size := of.size(of.of("parameters"))) > _LARGE * of.total:
        yield finding("parameters", size, 0)
    if (size := of.size(of.of(BEFORE))) > _LARGE * of.total:
        yield finding("before", size, 0)


_RULES: tuple[Callable[[Evidence], Iterator[WhyFinding]], ...] = (
    _leaks, _models, _optimizer, _gradients, _fragmentation, _kinds, _parts,
)  # fmt: skip
