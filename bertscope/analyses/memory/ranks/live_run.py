"""A real step of a rank and its memory trace: a dispatch mode sees each tensor that is allocated, and its free.

torch's profiler does not see what the threads of gloo free. Temporary memory inside a kernel is not counted.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bertscope.analyses.memory.events import MemoryTrace
from bertscope.analyses.memory.fake_run import RunMode
from bertscope.analyses.memory.step import ModelStep, Phase
from bertscope.analyses.parallel.collectives import NAMESPACES, kind_of
from bertscope.reports.parallel import ALL_REDUCE
from bertscope.torch_access import DispatchMode, in_backward, operator_name, storage_key, torch, tree_leaves
from bertscope.torch_access.distributed import is_wrapper

_PAUSE_SECONDS = 0.05  # for the threads of gloo to free what they hold of the last collective
_STEPS = 2  # such a thread may be late all the same: of several steps the one with the lowest peaks counts


def live_run(step: ModelStep, phase: Phase) -> MemoryTrace:
    """Return the trace of a step with its collectives; the step must be in the steady state.

    `phase` is entered with each phase too.
    """
    return min((_live_run(step, phase) for _ in range(_STEPS)), key=_peaks_bytes)


def _live_run(step: ModelStep, phase: Phase) -> MemoryTrace:
    mode = _LiveRunMode(step)

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        time.sleep(_PAUSE_SECONDS)
        with phase(name), mode.phase(name):
            yield

    with mode.watching():
        mode.add_state()
        step.run(recorded)
    return mode.trace()


def _peaks_bytes(trace: MemoryTrace) -> int:
    return sum(moment.live_bytes for moment in trace.peaks())


class BucketMode(DispatchMode):
    """A mode that finds the buckets of DDP: it makes views of them when it is built, and reduces them in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward():
            is_use = operator.namespace in NAMESPACES and kind_of(operator_name(operator)) == ALL_REDUCE
        else:
            is_use = operator is torch.ops.aten.as_strided.default
        if is_use:
            self.found |= {storage_key(leaf): leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        return operator(*args, **(kwargs or {}))

    @property
    def buckets(self) -> dict[str, torch.Tensor]:
        """Return the buckets by number."""
        return {str(number): bucket for number, bucket in enumerate(self.found.values())}


class _LiveRunMode(RunMode):
    """A mode that records the memory of real tensors."""

    def __init__(self, step: ModelStep) -> None:
        super().__init__(step)
        self.scratch_bytes = lambda operator, args: 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operators on the tensors inside come next
        run = self.recorded if self.is_recording else self.result
        return run(operator, args, kwargs or {})

    def result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator."""
        return operator(*args, **kwargs)

    def true_bytes(self, operator: Any, args: Any, number: int, tensor: torch.Tensor) -> int | None:
        """Return None, for the true size; 0 for a tensor on another device, such as a step counter beside a GPU."""
        return None if tensor.device.type == self.step.device else 0
