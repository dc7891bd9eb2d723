"""The update of a rank of ZeroRedundancyOptimizer, which has some of the parameters.

All else of its step, clipping included, is that of a rank without a parameter. The parameters of one rank are in runs
of equal ones, of which few are updated in place of many.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from bertscope.memory.deepening import with_copies
from bertscope.memory.fake_run import fake_run
from bertscope.memory.kernels import cuda_semantics
from bertscope.memory.parallel.collectives import Collective
from bertscope.memory.parallel.strategies import zero_shares
from bertscope.memory.step import ModelStep
from bertscope.memory.trace import UPDATE, MemoryTrace, same_events
from bertscope.reports.memory import BROADCAST, OPTIMIZER
from bertscope.settings.parallelism import MAX_WORLD_SIZE, ONE_PROCESS, Parallelism
from bertscope.settings.run_config import FREED, RunConfig
from bertscope.torch_access import nn, torch
from bertscope.tracing.fake_tensors import fake_tensors
from bertscope.tracing.repeat import RAN, LayerStack

_PATH = "update.params"  # of the parameters that are updated
Sort = tuple[torch.Size, torch.dtype, bool]  # of a parameter: True if it has a gradient


def idle(parallelism: Parallelism) -> Parallelism:
    """Return the same job for a rank that updates nothing."""
    return replace(parallelism, world_size=MAX_WORLD_SIZE, mesh="", rank=MAX_WORLD_SIZE - 1)


def without_broadcasts(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace without the broadcasts of the parameters, of which a deeper model has more."""
    calls = [(call, slope) for call, slope in trace.calls if (call.phase, call.kind) != (OPTIMIZER, BROADCAST)]
    return replace(trace, calls=calls)


def with_update(trace: MemoryTrace, params: Sequence[tuple[str, nn.Parameter]], run_config: RunConfig) -> MemoryTrace:
    """Return the memory of a rank from that of an idle one; `params` are all of the model with their paths."""
    ranks, rank = run_config.parallelism.world_size, run_config.parallelism.rank
    calls = [(call._replace(ranks=ranks), slope) for call, slope in trace.calls]
    marks = {number for number, place in enumerate(trace.places) if place[2] == UPDATE}
    at = next((number for number, place in enumerate(trace.place_of) if place in marks), None)
    if at is None:  # no optimizer step
        return replace(trace, calls=calls)
    trained = [(path, param) for path, param in params if param.requires_grad]
    calls += [(Collective(OPTIMIZER, BROADCAST, "", param.nbytes, ranks), 0) for _, param in trained]
    shares = zero_shares([param.numel() for _, param in trained], ranks)
    own = [trained[number] for number in shares[rank]] if rank < len(shares) else []
    with_gradient = {kind.block.path for kind in trace.kinds if kind.block.operator == UPDATE}
    kinds = [(param.shape, param.dtype, path in with_gradient) for path, param in own]
    update = _renamed(_update(kinds, run_config), [path for path, _ in own])
    first, place = len(trace.kinds), len(trace.places)
    held = [first + number for number in update.held if update.kinds[number].block.part == "optimizer_state"]
    changes, place_of = list(trace.changes), list(trace.place_of)
    changes[at:at] = [number + first if number >= 0 else number - first for number in update.changes]
    place_of[at:at] = [place + number for number in update.place_of]
    return replace(trace, kinds=trace.kinds + update.kinds, held=trace.held + held, changes=changes,
                   places=trace.places + update.places, place_of=place_of, calls=calls)  # fmt: skip


def _update(kinds: Sequence[Sort], run_config: RunConfig) -> MemoryTrace:
    stack = LayerStack.of(_PATH, "", kinds)
    few, more = (_traced(stack.few(units), run_config) for units in (RAN, RAN + 1))
    if not same_events(with_copies(few, _PATH, stack.copies(RAN, RAN + 1)), more):
        return _traced(kinds, run_config)
    return with_copies(few, _PATH, stack.copies(RAN))


def _renamed(trace: MemoryTrace, paths: Sequence[str]) -> MemoryTrace:

    def renamed(path: str) -> str:
        number, dot, rest = path.removeprefix(f"{_PATH}.").partition(".")
        return f"{paths[int(number)]}{dot}{rest}" if path.startswith(f"{_PATH}.") else path

    kinds = [kind._replace(block=kind.block._replace(path=renamed(kind.block.path))) for kind in trace.kinds]
    places = [(phase, renamed(path), operator) for phase, path, operator in trace.places]
    return replace(trace, kinds=kinds, places=places)


def _traced(kinds: Sequence[Sort], run_config: RunConfig) -> MemoryTrace:
    run_config = replace(run_config, parallelism=ONE_PROCESS, batch=1, seq=1, loop=FREED, accumulate=1,
                         clip_grad_norm=False, grad_scaler=False, ema=False, keep_gradients=True)  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if run_config.device == "cuda":
            stack.enter_context(cuda_semantics(run_config))
        model = nn.Module()
        model.update = nn.Module()
        model.update.params = nn.ParameterList(torch.empty(shape, dtype=dtype) for shape, dtype, _ in kinds)
        return fake_run(_Update(model, {}, run_config, trained=[kind[2] for kind in kinds]))


@dataclass
class _Update(ModelStep):
    """A step of an optimizer only: the gradients exist and stay."""

    trained: Sequence[bool] = ()

    def run_micro_batch(self, *_: Any, **__: Any) -> None:
        for param, is_trained in zip(self.model.parameters(), self.trained, strict=True):
            if is_trained and param.grad is None:
                param.grad = torch.empty_like(param)
