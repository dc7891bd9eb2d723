"""`estimate`: the memory of a step on fake tensors, which allocate nothing.

Forward, backward, recomputation and the optimizer step are dispatched as in a real run. If all layers are equal,
two shallow models run instead of the deep one; the repetition of a layer must turn the first trace into the second.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any
from unittest.mock import patch

from bertscope.config import check_traced
from bertscope.errors import BertscopeError, BertscopeWarning, SelectionError, UnknownValueError, name_of, one_line
from bertscope.memory.derived_traces import in_loop, same_events, with_copies
from bertscope.memory.fake_run import fake_run
from bertscope.memory.kernels import device_semantics
from bertscope.memory.ranks import (
    bucket_sizes,
    fake_ranks,
    layers_of,
    parallelize_fakes,
    rank_groups,
    units_text,
    zero_ranks,
    zero_shares,
)
from bertscope.memory.step import STEP_END, Loss, ModelStep, counted_model, logits_of, meta_inputs, run_model
from bertscope.memory.summary import ModelFacts, estimated
from bertscope.memory.trace import LARGE_BATCH, SMALLEST, UPDATE, Collective, MemoryTrace
from bertscope.reports.memory import BROADCAST, EVALUATING, FORWARD, OPTIMIZER, Memory
from bertscope.settings.parallelism import MAX_WORLD_SIZE, ONE_PROCESS
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import mini_batch
from bertscope.sources.model_source import ModelSource, all_parameters, built_for_counting
from bertscope.torch_access import compiled_paths, nn, torch, tree_map, value_errors, without_compiler
from bertscope.tracing.fake_tensors import fake_copy, fake_like, fake_tensors
from bertscope.tracing.flops import step_flops
from bertscope.tracing.inputs import arguments, inputs_for, loss_of, running, running_module
from bertscope.tracing.losses import loss_function
from bertscope.tracing.module_tree import read, row_paths, subject, totals
from bertscope.tracing.repeat import RAN, LayerStack, layer_stacks, shortened

_KEPT_RUNS = 16
_VERIFIED_BATCHES = 3  # of an evaluation: the first, the last, and one between in which the model does not run
# The peaks of compiled steps by the peaks of eager ones: measured, with one recomputation estimated (docs/memory.md).
_ENCODERS, _LOWEST, _HIGHEST = 10, 0.6, 1.1


class MemoryTraces:
    """Traces one source on fake tensors; it caches runs, and what was verified for each kind of run."""

    def __init__(self, source: ModelSource) -> None:
        check_traced(source.layers)
        self.source = source
        self.verified: dict[RunConfig, bool] = {}
        self.freed = lru_cache(maxsize=_KEPT_RUNS)(self._freed)  # whatever the loop of the run is
        self.stacks = cache(partial(layer_stacks, self.source))
        self.parameters = cache(lambda run_config: list(all_parameters(counted_model(source, run_config))))

    def trace(self, run_config: RunConfig) -> MemoryTrace:
        """Return the step's trace, from runs of this batch."""
        kind, repeats = _kind(run_config), bool(self._repeats(run_config))
        if repeats and kind not in self.verified:
            samples = min(run_config.eval_samples, _VERIFIED_BATCHES * run_config.batch)
            few = replace(run_config, eval_samples=samples)
            longer = self._repeated(self._shallow(few, RAN), few, RAN, RAN + 1)
            self.verified[kind] = same_events(longer, self._shallow(few, RAN + 1))
        if repeats and self.verified[kind]:
            return self._finished(self._repeated(self._shallow(run_config, RAN), run_config, RAN), run_config)
        return self._finished(self.freed(_in_any_loop(run_config)), run_config)

    def scalable_trace(self, run_config: RunConfig) -> MemoryTrace | None:
        """Return a step's memory as a function of the batch; None if its events change with the batch.

        With mini-batches it is a function of the examples after the first one. If layers may repeat, the run with the
        larger batch has one unit more than the other: the two verify both, that layers repeat and that bytes grow
        evenly.
        """
        if run_config.compile:
            return None  # the batch decides inductor's program
        first = mini_batch(run_config.loss)
        one, large = (
            replace(run_config, batch=first + batch, loop=run_config.traced_loop) for batch in (SMALLEST, LARGE_BATCH)
        )
        scalable: MemoryTrace | None = None
        if self._repeats(run_config):
            longer = self._repeated(self._shallow(one, RAN), one, RAN, RAN + 1)
            scalable = longer.with_slopes(self._shallow(large, RAN + 1))
            scalable = scalable and self._repeated(scalable, run_config, RAN + 1)
        if scalable is None:
            scalable = self.freed(one).with_slopes(self.freed(large))
        return scalable and self._finished(scalable, run_config)

    def inputs(self, run_config: RunConfig) -> Any:
        """Return example inputs of a run on meta."""
        model = built_for_counting(self.source)
        return inputs_for(model, run_config.batch, run_config.seq, described=run_config.input)

    def flops(self, run_config: RunConfig) -> int:
        """Return a step's FLOPs."""
        return step_flops(self.source, run_config)

    def facts(self, run_config: RunConfig) -> ModelFacts:
        """Return the model's facts as the run has it."""
        parallelism, path = run_config.parallelism, self.source.layer_path
        model = counted_model(self.source, run_config)
        return ModelFacts(
            subject=subject(model, self.source.name, run_config.dtype),
            params=totals(read(model), None).distinct_params,
            rows=dict(row_paths(model)),
            units=units_text(model, parallelism, path),
            groups=rank_groups(model, parallelism, path),
            buckets=len(bucket_sizes(model)),
            strategies=tuple(self.source.strategies(model)),
        )

    def _repeats(self, run_config: RunConfig) -> tuple[LayerStack, ...]:
        """Return the stacks of layers of which few run, if that takes less time; () if every layer has to run."""
        if run_config.compile or run_config.objects:  # a graph has no layers, and the caller's code may know them
            return ()
        stacks = self.stacks(checkpointing=run_config.checkpointing, frozen=run_config.freeze)
        some, more = (sum(len(stack.few(units)) for stack in stacks) for units in (RAN, RAN + 1))
        runs_twice = 2 * some + more < 2 * sum(len(stack.kinds) for stack in stacks)  # such as with another batch
        return stacks if runs_twice else ()

    def _shallow(self, run_config: RunConfig, units: int) -> MemoryTrace:
        """Trace a model in which each run of equal layers has at most that many units.

        Nothing outlives its use in it.
        """
        stacks = self._repeats(run_config)
        few = {stack.path: stack.few(units) for stack in stacks}
        run_config = replace(run_config, checkpointing=shortened(run_config.checkpointing, few))
        counts = tuple((stack.field, len(few[stack.path])) for stack in stacks)
        return self.freed(_in_any_loop(run_config), counts)

    def _finished(self, trace: MemoryTrace, run_config: RunConfig) -> MemoryTrace:
        """Return the memory in the run's loop, with the update of a rank that has some of the parameters."""
        if run_config.parallelism.row.divides_optimizer:
            trace = _with_update(trace, self.parameters(_kind(run_config)), run_config)
        return trace if run_config.evaluates_only else in_loop(trace, run_config)

    def _freed(self, run_config: RunConfig, counts: tuple[tuple[str, int], ...] = ()) -> MemoryTrace:
        source = self.source.with_layer_counts(dict(counts)) if counts else self.source
        if not run_config.parallelism.row.divides_optimizer:
            return source_trace(source, run_config)
        # A rank that updates nothing, without the broadcasts of the parameters, of which a deeper model has more.
        idle = replace(run_config.parallelism, world_size=MAX_WORLD_SIZE, mesh="", rank=MAX_WORLD_SIZE - 1)
        trace = source_trace(source, replace(run_config, parallelism=idle))
        calls = [(call, slope) for call, slope in trace.calls if (call.phase, call.kind) != (OPTIMIZER, BROADCAST)]
        return replace(trace, calls=calls)

    def _repeated(self, trace: MemoryTrace, run_config: RunConfig, ran: int, wanted: int | None = None) -> MemoryTrace:
        stacks = self._repeats(run_config)
        for stack in stacks:
            trace = with_copies(trace, stack.path, stack.copies(ran, wanted))
        return replace(trace, traced_layers=sum(len(stack.few(RAN)) for stack in stacks))


def _in_any_loop(run_config: RunConfig) -> RunConfig:
    """Return the run whose trace `in_loop` turns into the trace in any loop; an evaluation keeps its loop."""
    return run_config if run_config.evaluates_only else replace(run_config, loop=run_config.traced_loop)


def _kind(run_config: RunConfig) -> RunConfig:
    """Return what runs of all sizes and loops have in common."""
    return replace(run_config, batch=1, seq=1, loop=run_config.traced_loop)


def source_trace(source: ModelSource, run_config: RunConfig) -> MemoryTrace:
    """Return a step's trace with every layer of the source, in which nothing outlives its use."""
    model = run_model(source, run_config)
    inputs = meta_inputs(model, run_config)
    with running(source, model, "fake tensors", run_config.input):
        return module_trace(model, inputs, run_config, loss_function(run_config, is_short=True), source.layer_path)


def module_memory(module: nn.Module, inputs: Any, run_config: RunConfig) -> Memory:
    """Return the memory that a step takes with any module; `inputs` are real or on meta."""
    with running_module(type(module).__name__, module, "fake tensors"):
        trace = in_loop(module_trace(module, inputs, run_config, loss_function(run_config)), run_config)
    return estimated(trace, run_config, row_paths(module))


def module_trace(
    module: nn.Module, inputs: Any, run_config: RunConfig, loss: Loss | None, layer_path: str = ""
) -> MemoryTrace:
    """Trace a step with any module, on one rank of a job; its layers are at `layer_path`.

    Nothing outlives its use in it; `in_loop` adds what does. A note says which modules are compiled unless the run says
    it, and why a step that torch does not compile on fake tensors is eager.
    """
    paths = [""] if run_config.compile else compiled_paths(module)
    eager = run_config.changed(compile=False)
    if not paths:
        return _traced(module, inputs, eager, loss, layer_path)
    if run_config.parallelism.world_size > 1:
        raise SelectionError(
            "a compiled step is estimated on one rank only, since inductor's programs for the collectives of several "
            "need real ranks; leave the compilation out, or the ranks"
        )
    if not run_config.compile:
        names = ", ".join(path or "the model" for path in paths[:3]) + (" ..." if paths[3:] else "")
        text = f"compiled: {names}; estimated as torch.compile runs it with inductor"
        warnings.warn(BertscopeWarning(text), stacklevel=2)
    from bertscope.processes.folders import compile_environment
    from bertscope.torch_access.compiled import inductor_without_kernels

    module = without_compiler(module)
    try:
        with patch.dict(os.environ, compile_environment()), inductor_without_kernels():  # whose import makes a folder
            return _traced(module, inputs, eager.changed(compile=paths == [""]), loss, layer_path, paths)
    except Exception as error:  # of dynamo, inductor or a name that this torch has not; an eager step shows any other
        if isinstance(error, BertscopeError) and not isinstance(error, UnknownValueError):
            raise
        text = (
            f"estimated as eager: torch {torch.__version__} compiles nothing of it on fake tensors "
            f"({one_line(str(error), limit=160)}); the peaks of compiled steps of {_ENCODERS} encoders were {_LOWEST} "
            f"to {_HIGHEST} times those of eager ones"
        )
    warnings.warn(BertscopeWarning(text), stacklevel=2)
    return _traced(module, inputs, eager, loss, layer_path)


def _traced(
    module: nn.Module, inputs: Any, run_config: RunConfig, loss: Loss | None, layer_path: str,
    compiled: Collection[str] = (),
) -> MemoryTrace:  # fmt: skip
    """Return a step's trace with these modules compiled, in the context that compiles on fake tensors."""
    parallelism = zero_ranks(module, run_config.parallelism)
    batch, how = named_inputs(inputs, loss)
    ranks: AbstractContextManager[Any] = fake_ranks(parallelism) if parallelism.world_size > 1 else nullcontext()
    with ranks as meshes, fake_tensors(), device_semantics(run_config):
        copied = fake_copy(module).train(not run_config.is_eval)
        for path in filter(None, compiled):  # a copy is not compiled; the step compiles the whole model
            copied.get_submodule(path).compile(dynamic=False)
        buckets = {}
        if meshes is not None:
            buckets = parallelize_fakes(copied, layers_of(copied, layer_path), parallelism, meshes)
        try:
            kind = _Evaluation if run_config.evaluates_only else ModelStep
            trace = fake_run(kind(copied, fake_like(batch), run_config, loss=how, buckets=buckets))
            if parallelism == run_config.parallelism:
                return trace
            calls = [(call._replace(ranks=run_config.parallelism.world_size), slope) for call, slope in trace.calls]
            return replace(trace, calls=calls)
        except value_errors() as error:
            raise UnknownValueError(
                f"the operators of {type(module).__name__} depend on the values of its tensors ({error}), which an "
                f"estimate does not have; '{name_of('bertscope profile')}' measures a step"
            ) from None
        except (RuntimeError, NotImplementedError) as error:  # of DTensor, for an operator that it does not divide
            if meshes is None:
                raise
            raise SelectionError(
                f"torch does not run this step with {parallelism.strategy} ({one_line(str(error), limit=160)}); choose "
                "another optimizer, option or strategy"
            ) from None


@dataclass
class _Evaluation(ModelStep):
    """An evaluation only, in whose batches between the first and the last the model does not run."""

    predictions: int = 0
    logits: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def _loop(self, run_config: RunConfig) -> Iterator[str]:
        self.held_out = lambda: self.inputs
        while True:
            self.predictions = 0
            yield EVALUATING
            self.evaluate()
            yield STEP_END

    def predict(self, batch: dict[str, Any]) -> Any:
        self.predictions += 1
        last = self.run_config.eval_batches
        if self.predictions not in (1, last):
            return [torch.empty(shape, dtype=dtype) for shape, dtype in self.logits]
        waits = self.run_config.waiting_batches > 0 and self.predictions < last
        following = tree_map(torch.empty_like, batch) if waits else None  # which Trainer's data loader has
        output = super().predict(batch)
        del following
        self.logits = tuple((part.shape, part.dtype) for part in logits_of(self.called, output))
        return output


def named_inputs(inputs: Any, loss: Callable[..., Any] | None) -> tuple[dict[str, Any], Loss]:
    """Return the inputs by name, and the function that computes the loss from them; `loss` takes module and inputs."""
    is_named = isinstance(inputs, Mapping)
    tensors = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    named = dict(inputs) if is_named else {f"input {number}": value for number, value in enumerate(tensors)}

    def call(module: nn.Module, batch: dict[str, Any]) -> Any:
        values = tuple(batch.values())
        taken: Any = batch if is_named else values if isinstance(inputs, (tuple, list)) else values[0]
        if loss is not None:
            return loss(module, taken)
        args, kwargs = arguments(taken)
        return loss_of(module(*args, **kwargs))[0]

    return named, call


# ---- the update of a rank of ZeroRedundancyOptimizer ----
#
# Its step, clipping included, is the step of a rank without a parameter; its update is added.


_PATH = "update.params"  # of the parameters that are updated
Sort = tuple[torch.Size, torch.dtype, bool]  # of a parameter: True if it has a gradient


def _with_update(trace: MemoryTrace, params: Sequence[tuple[str, nn.Parameter]], run_config: RunConfig) -> MemoryTrace:
    """Return what a rank needs from what an idle rank needs; `params` are all parameters with their paths."""
    ranks, rank = run_config.parallelism.world_size, run_config.parallelism.rank
    calls = [(call._replace(ranks=ranks), slope) for call, slope in trace.calls]
    marks = {number for number, where in enumerate(trace.places) if where[2] == UPDATE}
    at = next((event for event, number in enumerate(trace.place_of) if number in marks), None)
    if at is None:  # no optimizer step
        return replace(trace, calls=calls)
    trained = [(path, param) for path, param in params if param.requires_grad]
    calls += [(Collective(OPTIMIZER, BROADCAST, "", param.nbytes, ranks), 0) for _, param in trained]
    shares = zero_shares([param.numel() for _, param in trained], ranks)
    updated = [trained[number] for number in shares[rank]] if rank < len(shares) else []
    with_gradient = {kind.block.path for kind in trace.kinds if kind.block.operator == UPDATE}
    kinds = [(param.shape, param.dtype, path in with_gradient) for path, param in updated]
    update = _traced_update(kinds, run_config)

    def renamed(path: str) -> str:
        number, dot, rest = path.removeprefix(f"{_PATH}.").partition(".")
        return f"{updated[int(number)][0]}{dot}{rest}" if path.startswith(f"{_PATH}.") else path

    added = [kind._replace(block=kind.block._replace(path=renamed(kind.block.path))) for kind in update.kinds]
    places = trace.places + [(phase, renamed(path), operator) for phase, path, operator in update.places]
    first, first_place = len(trace.kinds), len(trace.places)
    state = [first + number for number in update.held if update.kinds[number].block.part == "optimizer_state"]
    changes, place_of = list(trace.changes), list(trace.place_of)
    changes[at:at] = [number + first if number >= 0 else number - first for number in update.changes]
    place_of[at:at] = [first_place + number for number in update.place_of]
    added, held = trace.kinds + added, trace.held + state
    return replace(trace, kinds=added, held=held, changes=changes, places=places, place_of=place_of, calls=calls)


def _traced_update(kinds: Sequence[Sort], run_config: RunConfig) -> MemoryTrace:
    run_config = replace(run_config, parallelism=ONE_PROCESS, batch=1, seq=1, loop=run_config.traced_loop, accumulate=1,
                         clip_grad_norm=False, grad_scaler=False, ema=False, keep_gradients=True)  # fmt: skip
    with fake_tensors(), device_semantics(run_config):
        model = nn.Module()
        model.update = nn.Module()
        model.update.params = nn.ParameterList(torch.empty(shape, dtype=dtype) for shape, dtype, _ in kinds)
        return fake_run(_Update(model, {}, run_config, trained=[kind[2] for kind in kinds]))


@dataclass
class _Update(ModelStep):
    """A step of an optimizer only: the gradients exist and stay."""

    trained: Sequence[bool] = ()

    def _loop(self, run_config: RunConfig) -> Iterator[str]:
        while True:
            for _ in range(run_config.accumulate):
                yield FORWARD
                for param, is_trained in zip(self.model.parameters(), self.trained, strict=True):
                    if is_trained and param.grad is None:
                        param.grad = torch.empty_like(param)
            if self.optimizer is not None:
                yield OPTIMIZER
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
            yield STEP_END
