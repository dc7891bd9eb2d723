"""The end of a dry run: after some optimizer steps and one evaluation, whatever loop the script has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from bertscope.torch_access import nn, torch
from bertscope.torch_access.fake_gpu import Put
from bertscope.tracing.record import Recorder, is_training

# Of an evaluation all of at most so many batches run, else the first few: the first one often begins what is kept, the
# next two show what each adds, and the last one what follows the loop.
MOST_BATCHES, FEW_BATCHES = 50, 4
# After the last one: a loader may have handed out batches before. The epochs then have none, up to an evaluation.
_MORE_STEPS, _MOST_EPOCHS = 3, 1000


class Stop(BaseException):
    """Ends the script, which is no error: no `except Exception` of a script catches it."""


@dataclass
class Evaluated:
    """A pass over a loader in an evaluation: its length, the batches that ran, and its calls of models."""

    total: float  # batches, of which the last may be part of one
    ran: int
    first: int  # number of its first call
    each: int  # calls for a batch
    end: int = sys.maxsize  # the event before the next training step


class Limits:
    """Ends loaders and the script; `evaluations` are the passes over loaders in which the model evaluated."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self.recorder, self.steps = recorder, steps
        self.stop: Callable[[], None] = _raise_stop  # ends the script
        self.evaluations: list[Evaluated] = []
        self.calls: list[int] = []  # of models that evaluate: the event before each
        self.trained = self.evaluated = 0  # calls of models by the script itself
        self.evaluated_then: int | None = None  # when the last step ended
        self.loaders, self.skipped = WeakSet[Any](), 0  # that train, and the passes over them without batches
        recorder.on_root.append(self._called)
        recorder.on_update.append(self._updated)

    @property
    def has_evaluated(self) -> bool:
        """Return True if a model evaluated after the last step."""
        return self.evaluated_then is not None and self.evaluated > self.evaluated_then

    def partial_evaluations(self, live: list[int]) -> Iterator[tuple[Evaluated, list[int], int]]:
        """Yield the evaluations of which a few batches ran, the event before each batch's call, and what each adds."""
        for one in self.evaluations:
            calls = self.calls[one.first : one.first + one.ran * one.each : one.each]
            if one.total > one.ran == len(calls) > 2 and (added := live[calls[-1] - 1] - live[calls[-2] - 1]) > 0:
                yield one, calls, added

    def limit(self, put: Put) -> None:
        """End loaders, and the script."""
        loader = torch.utils.data.DataLoader
        iterate, limits = loader.__iter__, self

        def batches(loader_itself: Any) -> Iterator[Any]:
            if loader_itself not in limits.loaders or limits.recorder.updates < limits.steps + _MORE_STEPS:
                return limits._batches(loader_itself, iterate(loader_itself))
            limits.skipped += 1
            if limits.has_evaluated or limits.skipped > _MOST_EPOCHS:
                limits.stop()
            return iter(())

        put(loader, __iter__=batches)

    def _called(self, model: nn.Module) -> None:
        now = len(self.recorder.log.events)
        if is_training(model):
            if self.recorder.updates >= self.steps and (self.has_evaluated or not self.loaders):
                self.stop()  # the evaluation after the last step is over
            self.trained += 1
            for evaluated in self.evaluations:
                evaluated.end = min(evaluated.end, now)
        else:
            self.evaluated += 1
            self.calls.append(now)

    def _updated(self, updates: int) -> None:
        if updates == self.steps:
            self.evaluated_then = self.evaluated
        if self.has_evaluated or updates > self.steps + (_MORE_STEPS if self.loaders else 0):
            self.stop()

    def _batches(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        recorder, total = self.recorder, 0
        begun = recorder.updates, self.trained, self.evaluated
        with suppress(TypeError):  # of an iterable data set, without a length
            total = len(loader)
        most = total if 0 < total <= MOST_BATCHES else FEW_BATCHES
        for number, batch in enumerate(batches):
            has_trained = self.trained > begun[1]
            self.loaders |= {loader} if has_trained else set()
            if recorder.updates > begun[0] and recorder.updates >= self.steps:
                return
            if self.evaluated > begun[2] and not has_trained and number >= most:
                calls = self.evaluated - begun[2]  # of all batches, or of all but one that was handed out before
                self.evaluations.append(Evaluated(_exact_length(loader, total), number, begun[2], -(-calls // number)))
                return
            yield batch

    def followed(self) -> dict[str, Callable[[Put, Any], None]]:
        """Return, by module, what has trainers of libraries evaluate after the last step, if they do at all."""
        return {"transformers.trainer_callback": self._follow_trainer} | {
            f"{name}.loops.training_epoch_loop": self._follow_lightning
            for name in ("lightning.pytorch", "pytorch_lightning")
        }

    def _follow_trainer(self, put: Put, module: Any) -> None:
        """Let transformers' Trainer save nothing, too, and one that evaluates only after its training end that."""
        flow, limits = module.DefaultFlowCallback, self
        original = flow.on_step_end

        def on_step_end(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control = original(callback, args, state, control, **kwargs)
            evaluates = str(getattr(args, "eval_strategy", "no")).rpartition(".")[2].lower() != "no"
            is_last, control.should_save = state.global_step >= limits.steps, False
            control.should_evaluate |= evaluates and is_last
            control.should_training_stop |= is_last and not evaluates
            return control

        put(flow, on_step_end=on_step_end)

    def _follow_lightning(self, put: Put, module: Any) -> None:
        loop, limits = vars(module)["_TrainingEpochLoop"], self
        original = loop.on_advance_end

        def on_advance_end(loop_itself: Any, *args: Any) -> None:
            if limits.recorder.updates >= limits.steps:
                loop_itself.trainer.val_check_batch = 1  # batches between two validations
            original(loop_itself, *args)

        put(loop, on_advance_end=on_advance_end)


def _exact_length(loader: Any, batches: int) -> float:
    """Return the batches of a loader, of which the last may have fewer rows."""
    with suppress(TypeError, AttributeError):  # without a sampler
        exact = len(loader.batch_sampler.sampler) / loader.batch_sampler.batch_size
        return exact if batches - 1 < exact < batches else batches
    return batches


def _raise_stop() -> None:
    raise Stop
