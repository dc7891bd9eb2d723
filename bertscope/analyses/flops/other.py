"""`flops` of a module from elsewhere: every layer is run, and what is known of BERTs alone is left out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bertscope.analyses.flops.conventions import conventions
from bertscope.analyses.flops.count import flops_report, on_meta, run_as_it_is
from bertscope.analyses.flops.sweep import FlopsRun, flops_model, sweep_point
from bertscope.analyses.modules.build import build_any, quiet, told
from bertscope.analyses.modules.freeze import freeze
from bertscope.analyses.tracing.fake_tensors import fake_copy, fake_like, fake_tensors
from bertscope.analyses.tracing.inputs import inputs_for
from bertscope.analyses.tracing.shapes import InOut, shapes, shapes_of
from bertscope.errors import SelectionError
from bertscope.reports.flops import FlopsReport
from bertscope.run_config import FULL, NONE
from bertscope.sources.find import ModelSource
from bertscope.sources.other_models import OtherSource
from bertscope.torch_access import nn, torch

_Found = TypeVar("_Found")
# The kernel to run on meta: transformers' sdpa looks at values, and the matrix products are the same.
RUN_ATTENTION = "eager"


def flops_any(
    source: ModelSource, batches: Sequence[int] = (1,), seqs: Sequence[int] = (128,), *, mode: str = "inference",
    checkpointing: str = NONE, patterns: Sequence[str] = (),
) -> FlopsReport:  # fmt: skip
    """The report of whatever MODEL names, at the first batch and sequence, with a sweep over all."""
    if not isinstance(source, OtherSource):
        run = FlopsRun(source=source, mode=mode, checkpointing=checkpointing, freeze=tuple(patterns))
        return flops_model(run, batches, seqs)
    foreign = _ForeignRun(source, mode, checkpointing, tuple(patterns))
    reports = [foreign.at(batch, seq) for batch in batches for seq in seqs]
    made = conventions(reports[0], None, 0, batches[0], seqs[0])
    return replace(reports[0], sweep=tuple(map(sweep_point, reports)), conventions=tuple(made))


def forward_flops(source: ModelSource, batch: int, seq: int) -> int:
    """Matrix products of one forward pass of whatever MODEL names."""
    if isinstance(source, OtherSource):
        return _ForeignRun(source).at(batch, seq).rows[0].forward.matmul_flops
    return FlopsRun(source=source).at(batch, seq).rows[0].forward.matmul_flops


def shapes_any(source: ModelSource, built: nn.Module, batch: int, seq: int) -> dict[str, InOut]:
    """Path -> shapes of whatever MODEL names; `built` is the one to show, and another may run in its place."""
    if not isinstance(source, OtherSource):
        return shapes(built.eval(), batch, seq)
    model = (build_any(source, attention=RUN_ATTENTION) if source.origin == "transformers" else built).eval()
    return _run(source, model, inputs_for(model, batch, seq), shapes_of)


def _run(source: OtherSource, model: nn.Module, inputs: Any, run: Callable[[nn.Module, Any], _Found]) -> _Found:
    """What `run` gives for a foreign model on meta, with what its forward makes anew on meta too.

    Where that fails it is run on fake tensors of the host: there a program may take the host for its device, and
    transformers 5 knows not to ask whether a mask is all ones.
    """
    with quiet(source), told(f"{source.name} cannot be run on meta tensors"):
        try:
            with torch.device("meta"):
                return run(model, on_meta(inputs))
        except Exception:
            with contextlib.suppress(Exception), fake_tensors():
                return run(fake_copy(model), fake_like(inputs))
            raise


@dataclass(frozen=True)
class _ForeignRun:
    source: OtherSource
    mode: str = "inference"
    checkpointing: str = NONE
    patterns: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """The model on meta, in the mode and with the checkpointing asked for."""
        model = build_any(self.source, attention=RUN_ATTENTION).train(self.mode == "training")
        freeze(model, self.patterns)
        if self.checkpointing != NONE:
            checkpoint(model, self.checkpointing)
        return model

    def at(self, batch: int, seq: int) -> FlopsReport:
        """The report at one batch and sequence length."""
        model = self.model()
        inputs = inputs_for(model, batch, seq, labels=self.mode == "training")
        training = self.mode == "training"
        recorded, loss = _run(self.source, model, inputs, lambda module, given: run_as_it_is(module, given, training))
        return flops_report(model, recorded, self.mode, name=self.source.name, checkpointing=self.checkpointing,
                      batch=batch, seq=seq, loss=loss)  # fmt: skip


def checkpoint(model: nn.Module, strategy: str, *, reentrant: bool = False) -> None:
    """Have a foreign model recompute its layers; raises SelectionError for what its class does not do."""
    if strategy != FULL or not getattr(model, "supports_gradient_checkpointing", False):
        raise SelectionError(
            f"{type(model).__name__} takes --checkpointing {NONE}, or {FULL} where its class supports it"
        )
    with warnings.catch_warnings():  # transformers 5 has another name for it, too
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
