"""The commands that give the numbers of a page, with the options of the model and of the step."""

import shlex
from typing import Any

from bertscope.reports.base import Subject
from bertscope.reports.memory import FitReport
from bertscope.reports.page import DiffReport, ModelPart, PageReport
from bertscope.settings.generate import changed, setting_options
from bertscope.settings.run_config import CPU, INFERENCE, STORED, RunConfig


def model_command(model: ModelPart, name: str, words: str = "") -> str:
    """Return a command about a model."""
    return _command(name, words, model.tree.subject)


def _command(name: str, words: str, subject: Subject, *others: Subject) -> str:
    """Return a command about a model, with the options that select its class if they hold for the others too."""
    chosen = _model_words(subject) if {_model_words(other) for other in others} <= {_model_words(subject)} else ""
    return _joined(f"bertscope {name}", shlex.quote(subject.name), words, chosen)


def flops_command(model: ModelPart, words: str, *, is_training: bool = False) -> str:
    """Return a command of `flops`; only the FLOPs of training depend on frozen parameters."""
    run = model.memory.run
    values: dict[str, Any] = {"batch": model.batch} | ({"mode": "training"} if is_training else {})
    values |= {"freeze": run.freeze} if is_training and run.freeze else {}
    values |= {"input": run.input} if run.input else {}
    return model_command(model, "flops", _joined(setting_options(values), words))


def _step(model: ModelPart, run: RunConfig, **others: Any) -> dict[str, Any]:
    """Return the settings of a run of the page, with the strategies that it compares."""
    strategies = "" if run.mode == INFERENCE else ",".join(row.checkpointing for row in model.memory.variants)
    named = {"batch": model.batch, "seq": model.seq, "precision": run.precision, "checkpointing": strategies}
    named |= {"reentrant": True} if any(row.reentrant for row in model.memory.variants) else {}
    found = {**named, **{name: value for name, value in changed(run).items() if name not in named}, **others}
    return {name: value for name, value in found.items() if value not in ("", None, STORED)}


def estimate_command(model: ModelPart) -> str:
    """Return the command that estimates the step of the page."""
    return model_command(model, "estimate", setting_options(_step(model, model.memory.run)))


def fit_command(model: ModelPart, fit: FitReport) -> str:
    """Return the command that gives a fit table of the page."""
    return model_command(model, "fit", setting_options(_fit_settings(model, fit, batch=fit.asked_batch)))


def _fit_settings(model: ModelPart, fit: FitReport, **others: Any) -> dict[str, Any]:
    table = model.fit or fit
    strategies = "" if fit.run.mode == INFERENCE else ",".join(dict.fromkeys(row.checkpointing for row in table.rows))
    precisions = ",".join(dict.fromkeys(row.precision for row in table.rows))
    return _step(model, fit.run, checkpointing=strategies, precision=precisions, **_limit(fit), **others)


def page_command(report: PageReport) -> str:
    """Return the command that writes the page."""
    model = report.models[0]
    settings = _step(model, model.memory.run) if model.fit is None else _fit_settings(model, model.fit)
    compared = " ".join(f"--compare {shlex.quote(other.tree.subject.name)}" for other in report.models[1:])
    words = _joined(compared, "--no-fit" if model.fit is None else "", setting_options(settings))
    return _command("report", words, *(part.tree.subject for part in report.models))


def _limit(fit: FitReport) -> dict[str, Any]:
    """Return the GPU or the budget, the device if it is not implied, and the CUDA context if it is given."""
    found: dict[str, Any] = {"gpu": fit.card.name} if fit.card else {"budget": fit.budget_bytes}
    found["device"] = "" if fit.card or fit.run.device == CPU else fit.run.device
    context = fit.context_low_bytes, fit.context_high_bytes
    published = (fit.card.context_low_bytes, fit.card.context_high_bytes) if fit.card else None
    is_given = context[0] == context[1] > 0 and context != published
    return found | ({"context": context[0]} if is_given else {})


def diff_command(diff: DiffReport) -> str:
    """Return the command that gives the differences."""
    a, b = diff.a, diff.b
    same = (("architecture", a.architecture, b.architecture), ("attention", a.attention, b.attention),
            ("lora", a.lora, b.lora))  # fmt: skip
    options = [f"--{name} {shlex.quote(one)}" for name, one, other in same if one and one == other]
    sizes = f"--batch {diff.batch} --seq {diff.seq}"
    return _joined("bertscope diff", shlex.quote(a.name), shlex.quote(b.name), sizes, *options)


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)


def _model_words(subject: Subject) -> str:
    """Return the options that select the model's class; a `module:attribute` decides all of them by itself."""
    given = {"architecture": subject.architecture, "attention": subject.attention, "lora": subject.lora}
    is_own = ":" in subject.name
    return _joined(*(f"--{key} {shlex.quote(value)}" for key, value in given.items() if value and not is_own))
