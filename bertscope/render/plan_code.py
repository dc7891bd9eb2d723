"""Code and settings that train with a plan: `emitted` writes a row of a report in one of FORMS.

`torch`, `trainer` and `lightning` are Python with the functions of bertscope/model/keep.py. The settings of other
libraries keep operators by name in all layers, so they cannot express each plan.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from itertools import chain
from textwrap import wrap

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.memory import YES
from bertscope.reports.plan import PlanList, PlanOperator, PlanReport, PlanRow
from bertscope.settings.checkpointing import ATTENTION, ranges_text
from bertscope.settings.run_config import AUTOCAST
from bertscope.units import BF16, FP16, bytes_text, visible

_WIDTH = 100
_REMEDY = "use --emit torch"
# The fused kernels of torch 2.6 to 2.13: native_functions.yaml
_KERNELS = tuple(f"aten::_scaled_dot_product_{kernel}" for kernel in (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"))  # fmt: skip
# The words for attention of the forms that keep operators by name:
# trl 1.16.0 (2026-10), pull request 7194 of 2026-09-12, trl/models/selective_activation_checkpointing.py;
# axolotl 0.18.0, pull request 3786 of 2026-07-03, monkeypatch/selective_checkpointing.py: parts of names;
# prime-rl, pull request 3419 of 2026-08-27, trainer/activation_checkpointing.py: full names or namespaces, which
# replace the default list; its attention is that of the packages flash_attn;
# torchtitan 0.3.0 (2026-09), pull request 3674 of 2026-06-15, distributed/activation_checkpoint.py.
_ATTENTION_WORDS = {"trl": ("attention",), "axolotl": ("attention",), "torchtitan": _KERNELS,
                    "prime-rl": (*_KERNELS, "flash_attn", "flash_attn_3")}  # fmt: skip

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

# Earlier versions of torchtitan have a fixed list. The policy recomputes every second mm.
_TORCHTITAN = """\
from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC


class PlannedAC(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return {operators}


# torchtitan 0.3.0 or later, in Trainer.Config(...) of config_registry.py:
activation_checkpoint = PlannedAC.Config(force_recompute_mm_shapes_by_fqns=[])
"""


def emitted(report: PlanReport, into: str) -> str:
    """Return the cheapest plan of a report that the form can express, as code or settings to paste.

    Raises SelectionError for an unknown form, a report without plans, and plans that the form cannot express.
    """
    if into not in FORMS:
        raise SelectionError(f"no form {into[:40]!r} of a plan; {suggestion(into, FORMS)}")
    if into == "json":
        return report.to_json()
    refused: SelectionError | None = None
    for row in report.rows if report.fits else ():
        if row.answer == YES:
            try:
                return _about(report, row) + _WRITERS[into](report, row)
            except SelectionError as error:
                refused = refused or error
    raise refused or SelectionError("no plan fits, so there is none to emit")


def _about(report: PlanReport, row: PlanRow) -> str:
    """Return comments that say for which model and run a plan is, and its peak."""
    subject, run = report.subject, report.run
    settings = {"attention": subject.attention, "precision": run.precision, "optimizer": run.optimizer, **row.changes}
    settings |= {"accumulate": row.accumulate} if row.accumulate > 1 else {}
    device = report.card.name if report.card else bytes_text(report.budget_bytes)
    tools = (f"bertscope {subject.bertscope_version}", f"torch {subject.torch_version}", subject.implementation or "")
    text = visible(
        f"Recompute layers of {subject.name}: {row.checkpointing}. Peak {bytes_text(row.peak_bytes)} on {device} with "
        f"batch {row.batch} x {run.seq}, {', '.join(f'{name} {value}' for name, value in settings.items() if value)}. "
        f"Made with {', '.join(filter(None, tools))}."
    )
    return "".join(f"# {line}\n" for line in wrap(text, _WIDTH))


# ---- Python ----


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
        lines += [f"# {line}" for line in wrap(f"keeps {modules or 'nothing'}", _WIDTH)]
        kept, numbers = _set_text(item.kept), range(item.recomputed[0], item.recomputed[-1] + 1)
        if item.layer_paths:
            lines += [f"{json.dumps(item.layer_paths[number])}: {kept}," for number in item.recomputed]
        else:
            shown = numbers if tuple(numbers) == item.recomputed else list(item.recomputed)
            lines.append(f"**{{{json.dumps(f'{item.path}.')} + str(number): {kept} for number in {shown}}},")
    return "\n".join(["PLAN = {", *(f"    {line}" for line in lines), "}\n"])


def _set_text(kept: Iterable[PlanOperator]) -> str:
    names = [json.dumps(f"{item.name}.{item.number}") for item in kept]
    return f"{{{', '.join(names)}}}" if names else "set()"


# ---- the settings of libraries that treat all layers alike ----


def _trl(report: PlanReport, row: PlanRow) -> str:
    kept = _kept_in_all(row, "trl")
    if others := sorted({item.name for item in kept} - {ATTENTION}):
        raise SelectionError(
            f"trl keeps the output of attention only, and this plan keeps {', '.join(others)}; {_REMEDY}"
        )
    selective = "  selective: true  # of SFTConfig, trl 1.16.0\n" if _names(kept, "trl") else ""
    return _yaml(row, "per_device_train_batch_size") + selective


def _axolotl(report: PlanReport, row: PlanRow) -> str:
    """Return YAML of axolotl; `save_modules`, since 0.21.0 (2026-10), are modules that call mm and addmm."""
    text, kept = _yaml(row, "micro_batch_size"), _kept_in_all(row, "axolotl")
    if not kept:
        return text
    partly = _partly(kept)
    is_linear = all(item.name in ("mm", "addmm") and item.module for item in partly)
    modules = partly if is_linear and len({item.module for item in partly}) == len(partly) else []
    save = _names([item for item in kept if item not in modules], "axolotl")
    text += f"selective_checkpointing:\n  save: {json.dumps(save)}\n"
    text += "  save_modules:  # axolotl 0.21.0 or later\n" if modules else ""
    for item in row.lists:  # a glob for the layers with each number of digits
        digits = range(1, len(str(item.layers - 1)) + 1)
        layers = item.layer_paths or [f"{item.path}.{'[0-9]' * count}" for count in digits]
        paths = (f"{layer}.{one.module}" for one in modules for layer in layers)
        text += "".join(f"  - {json.dumps(path)}\n" for path in paths)
    return text


def _prime_rl(report: PlanReport, row: PlanRow) -> str:
    kept = _kept_in_all(row, "prime-rl")
    if not _recomputed(row):  # the default of model.ac is mode full; how TOML says None is not known
        raise SelectionError(
            "prime-rl recomputes layers unless its command has --model.ac None, and this plan keeps all"
        )
    names = _names(kept, "prime-rl")
    mode = f'mode = "selective"\ntargets = {json.dumps(names)}\n' if names else 'mode = "full"\n'
    return f"[model.ac]  # since 2026-08-27; of sft.toml, in rl.toml [trainer.model.ac]\n{mode}"


def _torchtitan(report: PlanReport, row: PlanRow) -> str:
    kept = _kept_in_all(row, "torchtitan")
    if not _recomputed(row):
        return "activation_checkpoint = None\n"
    products = [item for item in kept if item.name == "mm"]
    numbers = {item.number for item in products}
    if products and numbers != set(range(0, products[0].calls, 2)):
        raise SelectionError(
            f"torchtitan keeps every second mm, and this plan keeps mm.{ranges_text(numbers)} of "
            f"{products[0].calls}; {_REMEDY}"
        )
    names = [*_names([item for item in kept if item.name != "mm"], "torchtitan"), *(["aten::mm"] if products else [])]
    paths = (re.sub(r"[^\w.]+", ".", name if "." in name else f"{name}.default") for name in names)
    operators = ", ".join(f"torch.ops.{path}" for path in paths)
    return _TORCHTITAN.format(operators=f"{{{operators}}}" if names else "set()")


def _yaml(row: PlanRow, batch: str) -> str:
    """Return the YAML that trl and axolotl have from transformers' TrainingArguments, with their name of the batch."""
    is_on = bool(_recomputed(row))
    lines = [f"{batch}: {row.batch}", f"gradient_accumulation_steps: {row.accumulate}"]
    keywords = ["gradient_checkpointing_kwargs:", "  use_reentrant: false"] if is_on else []
    return "\n".join([*lines, f"gradient_checkpointing: {json.dumps(is_on)}", *keywords, ""])


def _recomputed(row: PlanRow) -> list[PlanList]:
    return [item for item in row.lists if item.recomputed]


def _difference(row: PlanRow) -> str:
    """Return how layers differ, empty if all are recomputed and keep the same operators."""
    for item in row.lists:
        if len(item.recomputed) < item.layers and _recomputed(row):
            return f"{visible(item.path)} recomputes {len(item.recomputed)} of its {item.layers} layers"
    kept = {frozenset((one.name, one.number) for one in item.kept) for item in row.lists}
    return "the lists of layers keep different operators" if len(kept) > 1 else ""


def _kept_in_all(row: PlanRow, form: str) -> Sequence[PlanOperator]:
    """Return the operators that each recomputed layer keeps; raises SelectionError if layers differ."""
    if (reason := _difference(row)) and _recomputed(row):
        raise SelectionError(f"{form} treats all layers alike, and in this plan {reason}; {_REMEDY}")
    return row.lists[0].kept if _recomputed(row) else ()


def _partly(kept: Sequence[PlanOperator]) -> list[PlanOperator]:
    """Return the operators of which a layer recomputes another call."""
    numbers = Counter(item.name for item in kept)
    return [item for item in kept if numbers[item.name] != item.calls]


def _names(kept: Sequence[PlanOperator], form: str) -> list[str]:
    """Return the names of operators such as `aten::addmm`; raises SelectionError if another call is recomputed."""
    for item in _partly(kept):
        numbers = ranges_text(other.number for other in kept if other.name == item.name)
        raise SelectionError(
            f"{form} keeps operators by name, and this plan keeps {item.name}.{numbers} of "
            f"{item.calls or 'an unknown number of'} calls; {_REMEDY}"
        )
    own = ((item.torch_name if "::" in item.torch_name else f"aten::{item.torch_name}",) for item in kept)
    words = (_ATTENTION_WORDS[form] if item.name == ATTENTION else name for item, name in zip(kept, own, strict=True))
    return list(dict.fromkeys(chain.from_iterable(words)))


_WRITERS: dict[str, Callable[[PlanReport, PlanRow], str]] = {
    "torch": lambda report, row: f"{_source()}\n\n{_plan(row)}{_TORCH}",
    "trainer": _trainer,
    "lightning": lambda report, row: f"{_source()}\n\n{_plan(row)}{_LIGHTNING}",
    "trl": _trl,
    "axolotl": _axolotl,
    "prime-rl": _prime_rl,
    "torchtitan": _torchtitan,
}
FORMS = (*_WRITERS, "json")
