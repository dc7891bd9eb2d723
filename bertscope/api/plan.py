"""`bertscope.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from bertscope.api.arguments import Model, inputs_of
from bertscope.api.memory import Work
from bertscope.api.requests import requested, resolved, with_settings
from bertscope.config import LORA_EXAMPLE
from bertscope.errors import SelectionError, suggestion
from bertscope.gpus import Gpu, half_precision
from bertscope.memory.plan import plan_report
from bertscope.memory.simulator import Simulator
from bertscope.reports.plan import PlanReport
from bertscope.settings.optimizers import LEANER
from bertscope.settings.request import Request, read_settings
from bertscope.settings.run_config import AUTOCAST, RunConfig
from bertscope.sources.find import source_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import FitSettings


@with_settings
def plan(
    model: Model | Request,
    budget: int | str | None = None,
    *,
    inputs: Any = None,
    batch: int | None = None,
    batch_total: int | None = None,
    may_change: str | Sequence[str] = (),
    name: str | None = None,
    **settings: Unpack[FitSettings],
) -> PlanReport:
    """Find which operators to keep for backward so that a step fits in a budget or on a `gpu` with the fewest FLOPs.

    On a calibrated card it is with the least time. The layers of any model whose layers repeat keep the outputs of some
    matrix products and compute the rest again. With `batch_total`, the batch of an optimizer step, the micro-batch is
    chosen too. `may_change` names what else may change: lora, freeze, 8bit, precision, sgd. `report.apply(module)`
    installs the answer on a live module; `report.emitted("torch")` is code that does so. Raises SelectionError for a
    setting that the model does not have.

    >>> report = bertscope.plan("bert-tiny", "220MiB", batch=64, seq=128)
    >>> report.fits, report.rows[0].peak_bytes <= 220 * 2**20 < report.cheaper.peak_bytes
    (True, True)
    """
    own_inputs = inputs_of(inputs, settings)
    own = {key: value for key, value in (("budget", budget), ("batch", batch)) if value is not None}
    request = requested("plan", model, {**settings, **own})
    if batch_total is not None:
        if request.named & {"batch", "accumulate"}:
            raise request.error(
                "{batch} is the micro-batch and {batch_total} that of an optimizer step; give one of them"
            )
        request = request.without("batch", "accumulate")
    source = source_of(request.subject, name=name, inputs=own_inputs)
    work = Work.of(request, source)
    is_timed = work.limit.time or work.calibration is not None
    simulator = work.simulator(known=Simulator(source, one_batch=True), is_timed=is_timed)

    def changed_run(changes: dict[str, Any]) -> RunConfig:
        """Return the run with other settings."""
        others = read_settings({name: value for name, value in changes.items() if name != "lora"})
        return resolved(request.over(others), source).runs[0]

    report = plan_report(
        simulator, work.run, changes=_changes(may_change, work.card), changed_run=changed_run, batch_total=batch_total
    )
    return work.finished(report, report.rows, is_timed=is_timed)


def _changes(may_change: str | Sequence[str], card: Gpu | None) -> list[dict[str, Any]]:
    """Return the changes of settings to try, for a card: each alone, then those that go together."""
    known: dict[str, dict[str, Any]] = {
        "precision": {"precision": f"{AUTOCAST}{half_precision(card)}"},
        **{word: {"optimizer": name} for word, name in LEANER.items()},
        "freeze": {"freeze": ("embeddings",)},
        "lora": {"lora": LORA_EXAMPLE},
    }
    words = may_change.split(",") if isinstance(may_change, str) else may_change
    names = dict.fromkeys(word.strip() for word in words if word.strip())
    for name in names:
        if name not in known:
            raise SelectionError(
                f"a plan may change {', '.join(known)}; got {name[:40]!r}; {suggestion(name[:40], known)}"
            )
    together = [known[name] for name in ("precision", "8bit", "lora") if name in names]
    several = [dict(chain.from_iterable(map(dict.items, together)))] if len(together) > 1 else []
    return [*map(known.__getitem__, names), *several]
