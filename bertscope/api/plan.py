"""`bertscope.plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from bertscope.analyses.memory.plan import plan_report
from bertscope.api.asked import Asked, Model, TrainingArguments, calibration_for, card_for
from bertscope.api.memory import no_time_notes, timer_for
from bertscope.config import LORA_EXAMPLE
from bertscope.errors import BertscopeError, SelectionError, suggestion
from bertscope.gpus import Gpu, half_precision
from bertscope.reports.base import Note
from bertscope.reports.plan import PlanReport
from bertscope.settings.generate import with_settings
from bertscope.settings.optimizers import LEANER
from bertscope.settings.resolve import Layer
from bertscope.settings.run_config import AUTOCAST, DEFAULTS, ESTIMATED, RunConfig
from bertscope.sources.find import source_of
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import FitSettings


def _optimizer(name: str, card: Gpu | None) -> dict[str, Any]:
    return {"optimizer": name}


# What a plan may change besides checkpointing: the settings for a card.
CHANGES: dict[str, Callable[[Gpu | None], dict[str, Any]]] = {
    "precision": lambda card: {"precision": f"{AUTOCAST}{half_precision(card)}"},
    **{word: partial(_optimizer, name) for word, name in LEANER.items()},
    "freeze": lambda card: {"freeze": ("embeddings",)},
    "lora": lambda card: {"lora": LORA_EXAMPLE},
}
_ALL = ("precision", "8bit", "lora")  # those that go together


@with_settings(*ESTIMATED)
def plan(
    model: Model,
    budget: int | str | None = None,
    *,
    inputs: Any = None,
    batch: int | None = None,
    batch_total: int | None = None,
    may_change: str | Sequence[str] = (),
    name: str | None = None,
    training_file: TrainingArguments = None,
    layers: Sequence[Layer] = (),
    **settings: Unpack[FitSettings],
) -> PlanReport:
    """Find which operators to keep for backward so that a step fits in a budget or on a `gpu` with the fewest FLOPs.

    The layers of any model whose layers repeat keep the outputs of some matrix products and compute the rest again.
    With `batch_total`, the batch of an optimizer step, the micro-batch is chosen too. `may_change` names what else may
    change: lora, freeze, 8bit, precision, sgd. `report.apply(module)` installs the answer on a live module;
    `report.emitted("torch")` is code that does so. Raises SelectionError for a setting that the model does not have.

    >>> report = bertscope.plan("bert-tiny", "220MiB", batch=64, seq=128)
    >>> report.fits, report.rows[0].peak_bytes <= 220 * 2**20 < report.cheaper.peak_bytes
    (True, True)
    """
    own = {"budget": budget, "batch": batch}
    given = {**settings, **{key: value for key, value in own.items() if value is not None}}
    asked = Asked.of(given, layers, training_file=training_file)
    if batch_total is not None:
        if asked.named & {"batch", "accumulate"}:
            raise asked.error("{batch} is the micro-batch and batch_total that of an optimizer step; give one of them")
        asked = asked.without("batch", "accumulate")
    changes = _changes(may_change)
    source = source_of(model, name=name, inputs=inputs)
    ((run, limit),) = asked.resolved(source, **DEFAULTS["plan"]).points
    card = card_for(limit, run)
    memory = card or limit.budget
    if memory is None:
        raise asked.error("give either {budget}, such as 16GiB, or {gpu}, such as t4", "budget", "gpu")
    runs: list[tuple[RunConfig, dict[str, Any]]] = [(run, {})]
    notes: list[Note] = []
    for names in changes:
        changed = dict(chain.from_iterable(CHANGES[name](card).items() for name in names))
        try:
            runs.append((_run_with(asked, source, changed), changed))
        except BertscopeError as error:
            notes.append(Note(key="plan_unchanged", values={"names": ", ".join(names), "why": str(error)}))
    is_timed = limit.time or calibration_for(limit, run)
    report = plan_report(
        source, runs, memory, batch_total=batch_total, context_bytes=limit.context,
        timer_of=lambda steps: timer_for(card, steps, limit, run) if is_timed else None,
    )  # fmt: skip
    why = no_time_notes(limit, run, report.rows) if is_timed else ()
    return replace(report, training_file=asked.noted([run]), notes=(*notes, *report.notes, *why))


def _changes(may_change: str | Sequence[str]) -> list[tuple[str, ...]]:
    """Return the sets of changes to try: each alone, then those that go together."""
    words = may_change.split(",") if isinstance(may_change, str) else may_change
    names = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    for name in names:
        if name not in CHANGES:
            raise SelectionError("a plan may change {names}; got {word!r}; {hint}", names=", ".join(CHANGES),
                                 word=name[:40], hint=suggestion(name[:40], CHANGES))  # fmt: skip
    together = tuple(name for name in _ALL if name in names)
    return [*((name,) for name in names), *([together] if len(together) > 1 else [])]


def _run_with(asked: Asked, source: ModelSource, changed: dict[str, Any]) -> RunConfig:
    """Return the run with other settings."""
    settings = {name: value for name, value in changed.items() if name != "lora"}
    layers = (Layer(settings), *asked.layers)
    return Asked(layers, asked.compared, asked.records).resolved(source, **DEFAULTS["plan"]).runs[0]
