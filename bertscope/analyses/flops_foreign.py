"""`flops` of a module from elsewhere: every layer is run, and what is known of BERTs alone is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from bertscope._torch import nn, torch
from bertscope.analyses.conventions import conventions
from bertscope.analyses.count import freeze
from bertscope.analyses.flops import flops
from bertscope.analyses.flops_model import FlopsRun, flops_model, sweep_point
from bertscope.analyses.foreign import build_any, told
from bertscope.analyses.foreign_inputs import inputs_for
from bertscope.errors import SelectionError
from bertscope.flops_reports import FlopsReport
from bertscope.foreign import ForeignSource
from bertscope.sources import AnyModel

# The kernel to run on meta: transformers' sdpa looks at values, and the matrix products are the same.
RUN_ATTENTION = "eager"


def flops_any(
    source: AnyModel, batches: Sequence[int] = (1,), seqs: Sequence[int] = (128,), *, mode: str = "inference",
    checkpointing: str = "none", patterns: Sequence[str] = (),
) -> FlopsReport:  # fmt: skip
    """The report of whatever MODEL names, at the first batch and sequence, with a sweep over all."""
    if not isinstance(source, ForeignSource):
        run = FlopsRun(source=source, mode=mode, checkpointing=checkpointing, freeze=tuple(patterns))
        return flops_model(run, batches, seqs)
    foreign = _ForeignRun(source, mode, checkpointing, tuple(patterns))
    reports = [foreign.at(batch, seq) for batch in batches for seq in seqs]
    made = conventions(reports[0], None, 0, batches[0], seqs[0])
    return replace(reports[0], sweep=tuple(map(sweep_point, reports)), conventions=tuple(made))


def forward_flops(source: AnyModel, batch: int, seq: int) -> int:
    """Matrix products of one forward pass of whatever MODEL names."""
    if isinstance(source, ForeignSource):
        return _ForeignRun(source).at(batch, seq).rows[0].forward.matmul_flops
    return FlopsRun(source=source).at(batch, seq).rows[0].forward.matmul_flops


def runnable_model(source: AnyModel, built: nn.Module) -> nn.Module:
    """The model to run where `built` is the one to show: itself, or with the kernel that runs on meta."""
    is_foreign = isinstance(source, ForeignSource) and source.origin == "transformers"
    return build_any(source, attention=RUN_ATTENTION) if is_foreign else built


@contextmanager
def on_meta(source: AnyModel) -> Iterator[None]:
    """A run of whatever MODEL names: what a foreign forward makes anew is on meta too, and its errors are told."""
    with ExitStack() as stack:
        if isinstance(source, ForeignSource):
            stack.enter_context(told(f"{source.name} cannot be run on meta tensors"))
            stack.enter_context(torch.device("meta"))
        yield


@dataclass(frozen=True)
class _ForeignRun:
    source: ForeignSource
    mode: str = "inference"
    checkpointing: str = "none"
    patterns: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """The model on meta, in the mode and with the checkpointing asked for."""
        model = build_any(self.source, attention=RUN_ATTENTION).train(self.mode == "training")
        freeze(model, self.patterns)
        if self.checkpointing != "none":
            checkpoint(model, self.checkpointing)
        return model

    def at(self, batch: int, seq: int) -> FlopsReport:
        """The report at one batch and sequence length."""
        model = self.model()
        inputs = inputs_for(model, batch, seq, labels=self.mode == "training")
        with on_meta(self.source):
            return flops(model, inputs, mode=self.mode, name=self.source.name, checkpointing=self.checkpointing,
                         batch=batch, seq=seq)  # fmt: skip


def checkpoint(model: nn.Module, strategy: str, *, reentrant: bool = False) -> None:
    """Have a foreign model recompute its layers; raises SelectionError for what its class does not do."""
    if strategy != "full" or not getattr(model, "supports_gradient_checkpointing", False):
        raise SelectionError(f"{type(model).__name__} takes --checkpointing none, or full where its class supports it")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
