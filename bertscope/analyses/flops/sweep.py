"""`flops` of one of our models: a sweep, the polynomial, the conventions, and few layers for many.

The work of equal layers is equal, so three are run and, when they prove alike, stand for all; where
something tells them apart (frozen ones, a strategy that chooses layers), all are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertscope.analyses.flops.conventions import conventions
from bertscope.analyses.flops.count import flops_report, run_example
from bertscope.analyses.modules.freeze import freeze
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.params.count import count
from bertscope.model import BertPreTrainedModel, build
from bertscope.reports.flops import FlopsReport, Polynomial, SweepPoint
from bertscope.run_config import NONE, Checkpointing
from bertscope.sources.presets import Source

RUN_LAYERS = 3
_SAMPLES = ((1, 2), (1, 3), (1, 4))
_WITNESS = (3, 7)


@dataclass(frozen=True, kw_only=True)
class FlopsRun:
    """What is asked of a model: how it runs, at which sizes."""

    source: Source
    mode: str = "inference"
    checkpointing: str = NONE
    freeze: tuple[str, ...] = ()

    def model(self, layers: int) -> BertPreTrainedModel:
        """The model on meta with so many layers."""
        config = replace(self.source.config, num_hidden_layers=layers)
        model = build(config, self.source.architecture, add_pooling_layer=self.source.add_pooling_layer)
        model.gradient_checkpointing_enable(strategy=self.checkpointing)
        freeze(model, self.freeze)
        return model

    def layers_alike(self) -> bool:
        """Whether nothing in the question tells one layer from another."""
        config = self.source.config
        chosen = Checkpointing.parse(self.checkpointing)
        alike = not self.freeze and not config.pruned_heads and (chosen is None or chosen.period == 1)
        return alike and config.num_hidden_layers > RUN_LAYERS

    def at(self, batch: int, seq: int) -> FlopsReport:
        """The report at one batch and sequence length."""
        layers = self.source.config.num_hidden_layers
        if self.layers_alike():
            try:
                return self._report(batch, seq, RUN_LAYERS, layers)
            except ValueError as error:
                if str(error) != "the layers differ":
                    raise
        return self._report(batch, seq, layers, None)

    def _report(self, batch: int, seq: int, run: int, stands_for: int | None) -> FlopsReport:
        model = self.model(run)
        recorded, loss = run_example(model, batch, seq, self.mode)
        made = flops_report(model, recorded, self.mode, name=self.source.name, checkpointing=self.checkpointing,
                      batch=batch, seq=seq, loss=loss, layers=stands_for)  # fmt: skip
        about = subject(model, self.source.name)
        return replace(made, subject=replace(about, config=self.source.config.to_dict()))


def flops_model(run: FlopsRun, batches: Sequence[int] = (1,), seqs: Sequence[int] = (128,)) -> FlopsReport:
    """The report at the first batch and sequence, with a sweep over all, the polynomial and the conventions."""
    reports = {(batch, seq): run.at(batch, seq) for batch in batches for seq in seqs}
    first = next(iter(reports.values()))
    made = conventions(first, run.source.config, distinct_params(run), batches[0], seqs[0])
    return replace(
        first,
        sweep=tuple(sweep_point(found) for found in reports.values()),
        polynomial=_polynomial(run),
        conventions=tuple(made),
    )


def distinct_params(run: FlopsRun) -> int:
    """The distinct parameters of the whole model, from a model with few layers."""
    layers = run.source.config.num_hidden_layers
    if not run.layers_alike():
        return count(run.model(layers)).totals.distinct_params
    two, three = (count(run.model(number)).totals.distinct_params for number in (2, 3))
    return three + (layers - 3) * (three - two)


def sweep_point(found: FlopsReport) -> SweepPoint:
    """The report as one point of a sweep."""
    row = found.rows[0]
    return SweepPoint(
        batch=found.batch or 0,
        seq=found.seq or 0,
        forward_flops=row.forward.matmul_flops,
        backward_flops=row.backward.matmul_flops,
        recompute_flops=row.recompute.matmul_flops,
        total_flops=row.total.matmul_flops,
    )


def _polynomial(run: FlopsRun) -> Polynomial | None:
    """Found from three points and verified at a fourth; None where it does not hold or cannot be run."""
    config = run.source.config
    if config.max_position_embeddings < _WITNESS[1] or config.chunk_size_feed_forward > 1:
        return None
    two, three, four = (sweep_point(run.at(*sample)).total_flops for sample in _SAMPLES)
    quadratic = (four - 2 * three + two) // 2
    linear = three - two - 5 * quadratic
    constant = two - 2 * linear - 4 * quadratic
    batch, seq = _WITNESS
    expected = batch * (constant + linear * seq + quadratic * seq * seq)
    if sweep_point(run.at(batch, seq)).total_flops != expected:
        return None
    return Polynomial(constant=constant, linear=linear, quadratic=quadratic, verified_at=_WITNESS)
