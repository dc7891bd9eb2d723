"""Code that trains with a plan: `emitted` writes a row of a report in one of FORMS.

`torch`, `trainer` and `lightning` are Python with the functions of bertscope/model/keep.py.
"""

import json
from collections.abc import Callable, Iterable
from importlib.resources import files
from textwrap import wrap

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.plan import PlanList, PlanOperator, PlanReport, PlanRow
from bertscope.reports.step import YES
from bertscope.settings.run_config import AUTOCAST
from bertscope.units import BF16, FP16, bytes_text, visible

_WIDTH = 100

_TORCH = """
# Once, before training and before FSDP, DDP or torch.compile wrap the model: keep_operators(model, PLAN)
"""

_LIGHTNING = '''
from lightning.pytorch import Callback  # or pytorch_lightning


class KeepOperators(Callback):
    """Trainer(callbacks=[KeepOperators("model")]): "model" is an attribute of the LightningModule, "" is itself."""

    def __init__(self, attribute: str = "model") -> None:
        self.attribute, self.is_done = attribute, False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and not self.is_done:
            keep_operators(pl_module.get_submodule(self.attribute), PLAN)
            self.is_done = True
'''

# transformers 4.43.4 to 5.23, PreTrainedModel.gradient_checkpointing_enable: the keywords go to torch's checkpoint.
_TRAINER = """
from transformers import TrainingArguments

arguments = TrainingArguments(
    output_dir="output",
    per_device_train_batch_size={row.batch},
    gradient_accumulation_steps={row.accumulate},
{settings}
)
"""
_OF_ALL_LAYERS = """\
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": partial(keep_contexts, KEPT)},
    report_to="none",  # the logs of TensorBoard and others write the arguments as JSON, which has no functions"""
_CALL = "# Before Trainer(model=model, args=arguments, ...): keep_operators(model, PLAN)\n"


def emitted(report: PlanReport, into: str) -> str:
    """Return the cheapest plan of a report as code to paste, or the report as JSON.

    Raises SelectionError for an unknown form, and for a report without plans that fit.
    """
    if into not in FORMS:
        raise SelectionError(f"no form {into[:40]!r} of a plan; {suggestion(into, FORMS)}")
    if into == "json":
        return report.to_json()
    for row in report.rows if report.fits else ():
        if row.answer == YES:  # the first line decides how Python reads the names that follow
            return "# -*- coding: utf-8 -*-\n" + _about(report, row) + _WRITERS[into](report, row)
    raise SelectionError("no plan fits, so there is none to emit")


def _about(report: PlanReport, row: PlanRow) -> str:
    """Return comments in ASCII that say for which model and run a plan is, and its peak."""
    subject, run = report.subject, report.run
    settings = {"attention": subject.attention, "precision": run.precision, "optimizer": run.optimizer, **row.changes}
    settings |= {"accumulate": row.accumulate} if row.accumulate > 1 else {}
    device = report.card.name if report.card else bytes_text(report.budget_bytes)
    tools = (f"bertscope {subject.bertscope_version}", f"torch {subject.torch_version}", subject.implementation or "")
    text = visible(
        f"Recompute layers of {subject.name!a}: {row.checkpointing}. Peak {bytes_text(row.peak_bytes)} on {device} "
        f"with batch {row.batch} x {run.seq}, "
        f"{', '.join(f'{name} {value}' for name, value in settings.items() if value)}. "
        f"Made with {', '.join(filter(None, tools))}."
    )
    return _comments(text)


def _trainer(report: PlanReport, row: PlanRow) -> str:
    """Return Python of transformers with context_fn, or, if not all layers are alike, with keep_operators."""
    precision = row.changes.get("precision", report.run.precision)
    reason = _difference(row) or ("" if _recomputed(row) else "no layer is recomputed")
    if not reason and any(item.layer_paths for item in row.lists):
        reason = "other modules than numbered layers are recomputed"
    halves = [half for half in (FP16.name, BF16.name) if precision == f"{AUTOCAST}{half}"]
    settings = "".join(f"    {half}=True,\n" for half in halves)
    settings += f"    gradient_checkpointing=False,  # it is of all layers: {reason}" if reason else _OF_ALL_LAYERS
    plan = _plan(row) if reason else f"KEPT = {_set_text(row.lists[0].kept)}\n"
    return f"{_source()}\n\n{plan}{_TRAINER.format(row=row, settings=settings)}{_CALL if reason else ''}"


def _source() -> str:
    """Return the code of bertscope/model/keep.py, whose import would load torch."""
    return "\n" + (files("bertscope") / "model" / "keep.py").read_text(encoding="utf-8").partition('"""\n\n')[2]


def _plan(row: PlanRow) -> str:
    lines = []
    for item in _recomputed(row):
        modules = ", ".join(visible(one.module) or one.name for one in item.kept)
        lines += _comments(f"keeps {modules or 'nothing'}").splitlines()
        kept, numbers = _set_text(item.kept), range(item.recomputed[0], item.recomputed[-1] + 1)
        if item.layer_paths:
            lines += [f"{json.dumps(item.layer_paths[number])}: {kept}," for number in item.recomputed]
        else:
            shown = numbers if tuple(numbers) == item.recomputed else list(item.recomputed)
            lines.append(f"**{{{json.dumps(f'{item.path}.')} + str(number): {kept} for number in {shown}}},")
    return "\n".join(["PLAN = {", *(f"    {line}" for line in lines), "}\n"])


def _comments(text: str) -> str:
    shown = text.encode("ascii", "backslashreplace").decode()
    return "".join(f"# {line}\n" for line in wrap(shown, _WIDTH))


def _set_text(kept: Iterable[PlanOperator]) -> str:
    names = [json.dumps(f"{item.name}.{item.number}") for item in kept]
    return f"{{{', '.join(names)}}}" if names else "set()"


def _recomputed(row: PlanRow) -> list[PlanList]:
    return [item for item in row.lists if item.recomputed]


def _difference(row: PlanRow) -> str:
    """Return how layers differ, empty if all are recomputed and keep the same operators."""
    for item in _recomputed(row):  # layers of one list that keep other operators are another item
        number = sum(len(other.recomputed) for other in row.lists if other.path == item.path)
        if number < item.layers:
            return f"{visible(item.path)} recomputes {number} of its {item.layers} layers"
    kept = {frozenset((one.name, one.number) for one in item.kept) for item in row.lists}
    return "the lists of layers keep different operators" if len(kept) > 1 else ""


_WRITERS: dict[str, Callable[[PlanReport, PlanRow], str]] = {
    "torch": lambda report, row: f"{_source()}\n\n{_plan(row)}{_TORCH}",
    "trainer": _trainer,
    "lightning": lambda report, row: f"{_source()}\n\n{_plan(row)}{_LIGHTNING}",
}
FORMS = (*_WRITERS, "json")
