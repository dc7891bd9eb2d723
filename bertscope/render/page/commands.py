"""The commands that give the numbers of a page, with the options of the model and of the step."""

import shlex
from collections.abc import Sequence

from bertscope.reports.base import Subject
from bertscope.reports.memory import FitReport
from bertscope.reports.page import DiffReport, ModelPart, PageReport
from bertscope.units import FP32, bytes_text, parse_bytes

STORED = "stored"  # the precision of parameters in their own dtypes

# Field of a run -> the option that sets it.
STEP_OPTIONS = {
    "mode": "--mode",
    "optimizer": "--optimizer",
    "implementation": "--optimizer-implementation",
    "model_implementation": "--implementation",
    "padding": "--padding",
    "dropout": "--no-dropout",
    "freeze": "--freeze",
    "accumulate": "--accumulate",
    "keep_gradients": "--keep-gradients",
    "momentum": "--momentum",
    "amsgrad": "--amsgrad",
    "ema": "--ema",
    "clip_grad_norm": "--clip-grad-norm",
    "hold_outputs": "--hold-outputs",
    "grad_scaler": "--grad-scaler",
    "sdpa_kernel": "--sdpa-kernel",
    "alloc_conf": "--alloc-conf",
    "inputs": "--input",
}


def model_command(model: ModelPart, name: str, words: str = "") -> str:
    """Return a command about a model."""
    return _command(name, words, model.tree.subject)


def _command(name: str, words: str, subject: Subject, *others: Subject) -> str:
    """Return a command about a model, with the options that select its class if they hold for the others too."""
    chosen = _model_words(subject) if {_model_words(other) for other in others} <= {_model_words(subject)} else ""
    return _joined(f"bertscope {name}", shlex.quote(subject.name), words, chosen)


def flops_command(model: ModelPart, words: str, *, is_training: bool = False) -> str:
    """Return a command of `flops`; only the FLOPs of training depend on frozen parameters."""
    fields = ("freeze", "inputs") if is_training else ("inputs",)
    mode = "--mode training" if is_training else ""
    return model_command(model, "flops", _joined(f"--batch {model.batch} {words}", mode, _step_words(model, fields)))


def estimate_command(model: ModelPart) -> str:
    """Return the command that estimates the step of the page."""
    run, variants = model.memory.run, model.memory.variants
    dtype = run["autocast"] or run["dtype"]
    kernel = "" if run["sdpa_kernel"] == "auto" else f"--sdpa-kernel {run['sdpa_kernel']}"  # that of the GPU
    return model_command(model, "estimate", _joined(
        f"--batch {model.batch} --seq {model.seq}", "" if dtype in (FP32.name, STORED) else f"--dtype {dtype}",
        "--autocast" if run["autocast"] else "", "" if run["device"] == "cpu" else f"--device {run['device']}",
        _step_words(model, [name for name in STEP_OPTIONS if name != "sdpa_kernel"]), kernel,
        "" if run["mode"] == "inference" else f"--checkpointing {','.join(row.checkpointing for row in variants)}",
        "--reentrant" if any(row.reentrant for row in variants) else "",
    ))  # fmt: skip


def fit_command(model: ModelPart, fit: FitReport) -> str:
    """Return the command that gives a fit table of the page."""
    asked, table = f"--batch {fit.asked_batch}" if fit.asked_batch else "", model.fit or fit
    return model_command(model, "fit", _joined(
        _file_words(model), _budget_words(fit), f"--seq {model.seq}", asked,
        _variant_words(table), _place_words(fit), _step_words(model)
    ))  # fmt: skip


def page_command(report: PageReport) -> str:
    """Return the command that writes the page."""
    model = report.models[0]
    fit = model.fit
    compared = "".join(f"--compare {shlex.quote(other.tree.subject.name)}" for other in report.models[1:])
    if fit is not None:
        words = _joined(_budget_words(fit), _variant_words(fit), _place_words(fit), _step_words(model))
    else:
        run, strategies = model.memory.run, ",".join(row.checkpointing for row in model.memory.variants)
        precision = f"autocast-{run['autocast']}" if run["autocast"] else run["dtype"]
        words = _joined("--no-fit", "" if precision == STORED else f"--precision {precision}",
                        "" if run["mode"] == "inference" else f"--checkpointing {strategies}",
                        "" if run["device"] == "cpu" else f"--device {run['device']}", _step_words(model))  # fmt: skip
    words = _joined(compared, _file_words(model), f"--batch {model.batch} --seq {model.seq}", words)
    return _command("report", words, *(part.tree.subject for part in report.models))


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


def _file_words(model: ModelPart) -> str:
    """Return the file of --from if only it says that checkpointing is reentrant."""
    file = model.memory.training_file
    is_needed = file is not None and any(row.reentrant for row in model.memory.variants)
    return f"--from {shlex.quote(file.path)}" if file and is_needed else ""


def _step_words(model: ModelPart, names: Sequence[str] = tuple(STEP_OPTIONS)) -> str:
    """Return the options of the step that are not at their default."""
    words = []
    for name in names:
        value = model.options.get(name)
        if isinstance(value, bool):
            words.append(STEP_OPTIONS[name])
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"{STEP_OPTIONS[name]} {shlex.quote(str(item))}" for item in values]
    return _joined(*words)


def _budget_words(fit: FitReport) -> str:
    if fit.card is not None:
        return f"--gpu {fit.card.name}"
    budget = bytes_text(fit.budget_bytes).replace(" ", "").replace(",", "")
    if parse_bytes(budget) != fit.budget_bytes:  # `16.00GiB` would be rounded
        budget = f"{fit.budget_bytes}B"
    return f"--budget {budget}"


def _variant_words(fit: FitReport) -> str:
    """Return the precisions and strategies of the rows; parameters in their own dtypes need no option."""
    precisions = [_precision_word(row.precision) for row in fit.rows]
    known = ",".join(dict.fromkeys(name for name in precisions if name != STORED))
    strategies = ",".join(dict.fromkeys(row.checkpointing for row in fit.rows))
    is_stored = STORED in precisions
    return _joined("" if is_stored else f"--precision {known}",
                   "" if fit.run["mode"] == "inference" else f"--checkpointing {strategies}")  # fmt: skip


def _precision_word(precision: str) -> str:
    """Return `autocast-bf16` for `bf16 autocast`."""
    name, _, is_autocast = precision.partition(" ")
    return f"autocast-{name}" if is_autocast else name


def _place_words(fit: FitReport) -> str:
    """Return the device if it is not that of the budget, and the CUDA context if it is given."""
    usual = "cuda" if fit.card else "cpu"
    device = "" if fit.run["device"] == usual else f"--device {fit.run['device']}"
    context = fit.context_low_bytes, fit.context_high_bytes
    published = (fit.card.context_low_bytes, fit.card.context_high_bytes) if fit.card else None
    is_given = context[0] == context[1] > 0 and context != published
    return _joined(device, f"--context {context[0]}B" if is_given else "")
