"""Code and settings that train with a plan: `emitted` writes the first row of a report in one of FORMS.

`torch`, `trainer` and `lightning` are Python with the two functions of bertscope/model/keep.py. The settings of other
libraries keep operators by name in all layers, so they cannot express each plan.
"""

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.resources import files
from textwrap import indent, wrap

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.memory import YES
from bertscope.reports.plan import PlanList, PlanOperator, PlanReport, PlanRow
from bertscope.settings.checkpointing import ranges_text
from bertscope.settings.run_config import AUTOCAST
from bertscope.units import bytes_text, visible

_WIDTH = 100
_ATTENTION = "scaled_dot_product_attention"
# The fused kernels of torch 2.6 to 2.13: native_functions.yaml
_KERNELS = tuple(f"aten::_scaled_dot_product_{kernel}" for kernel in (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"))  # fmt: skip
_REMEDY = "use --emit torch"

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
_ARGUMENTS = """
from transformers import TrainingArguments

arguments = TrainingArguments(
    output_dir="output",
{settings}
)
"""
_OF_ALL_LAYERS = (
    "gradient_checkpointing=True,",
    'gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": partial(keep_contexts, KEPT)},',
    'report_to="none",  # the logs of TensorBoard and others write the arguments as JSON, which has no functions',
)
_CALL = "# Before Trainer(model=model, args=arguments, ...): keep_operators(model, PLAN)\n"

# torchtitan 0.3.0 (2026-09), torchtitan/distributed/activation_checkpoint.py, pull request 3674 of 2026-06-15; earlier
# versions have a fixed list. The policy recomputes every second mm.
_TORCHTITAN = """\
{about}
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
    """Return the first plan of a report as code or settings to paste.

    Raises SelectionError for an unknown form, a report without plans, and a plan that the form cannot express.
    """
    if into not in FORMS:
        raise SelectionError("no form {name!r} of a plan; {words}", name=into[:40], words=suggestion(into, FORMS))
    if into == "json":
        return report.to_json()
    if not report.fits:
        raise SelectionError("no plan fits, so there is none to emit")
    refused: SelectionError | None = None
    for row in report.rows:  # the cheapest one that the form can express
        if row.answer == YES:
            try:
                return _WRITERS[into](replace(report, rows=(row,)))
            except SelectionError as error:
                refused = refused or error
    raise refused or SelectionError("no plan fits, so there is none to emit")


def _trainer(report: PlanReport) -> str:
    """Return Python of transformers with context_fn, or, if not all layers are alike, with keep_operators."""
    row = report.rows[0]
    precision = str(row.changes.get("precision", report.run.precision))
    reason = _difference(row) or ("" if _recomputed(row) else "no layer is recomputed")
    if not reason and any(item.layer_paths for item in row.lists):
        reason = "other modules than numbered layers are recomputed"
    lines = [f"per_device_train_batch_size={row.batch},", f"gradient_accumulation_steps={row.accumulate},"]
    lines += [f"{precision.removeprefix(AUTOCAST)}=True,"] if precision.startswith(AUTOCAST) else []
    lines += [f"gradient_checkpointing=False,  # it is of all layers: {reason}"] if reason else _OF_ALL_LAYERS
    arguments = _ARGUMENTS.format(settings=indent("\n".join(lines), "    "))
    if reason:
        return _python(report) + arguments + _CALL
    source = _source(("call_name", "keep_contexts"), also="partial")
    return f"{_docstring(report)}\n\n{source}\n\n\nKEPT = {_set_text(row.lists[0].kept)}\n{arguments}"


def _trl(report: PlanReport) -> str:
    """Return YAML of SFTConfig of trl.

    `selective` keeps attention and nothing else: pull request 7194 of 2026-09-12, in trl 1.16.0 (2026-10),
    trl/models/selective_activation_checkpointing.py.
    """
    kept = _kept_in_all(report, "trl")
    if others := sorted({item.name for item in kept or ()} - {_ATTENTION}):
        raise SelectionError("trl keeps the output of attention only, and this plan keeps {names}; {remedy}",
                             names=", ".join(others), remedy=_REMEDY)  # fmt: skip
    is_kept = _names(kept or (), "trl", (_ATTENTION,))
    lines = _yaml(report, "per_device_train_batch_size", kept is not None)
    return _settings(report, [*lines, *(["  selective: true  # of SFTConfig, trl 1.16.0"] if is_kept else [])])


def _axolotl(report: PlanReport) -> str:
    """Return YAML of axolotl.

    `selective_checkpointing.save`: axolotl 0.18.0, pull request 3786 of 2026-07-03, monkeypatch/
    selective_checkpointing.py; parts of the names of operators, or `attention` for the fused kernels.
    `save_modules`: axolotl 0.21.0 (2026-10), utils/schemas/training.py; the modules that call mm and addmm.
    """
    kept = _kept_in_all(report, "axolotl")
    lines = _yaml(report, "micro_batch_size", kept is not None)
    if kept:
        partly = _partly(kept)
        is_linear = all(item.name in ("mm", "addmm") and item.module for item in partly)
        modules = partly if is_linear and len({item.module for item in partly}) == len(partly) else []
        save = _names([item for item in kept if item not in modules], "axolotl", ("attention",))
        lines += ["selective_checkpointing:", f"  save: {json.dumps(save)}"]
        paths = [path for item in report.rows[0].lists for path in _module_paths(item, modules)]
        lines += ["  save_modules:  # axolotl 0.21.0 or later"] if paths else []
        lines += [f"  - {json.dumps(path)}" for path in paths]
    return _settings(report, lines)


def _prime_rl(report: PlanReport) -> str:
    """Return TOML of prime-rl.

    Pull request 3419 of 2026-08-27, src/prime_rl/trainer/activation_checkpointing.py: full names of operators, or
    namespaces, which replace the default list. Its attention is that of the packages flash_attn.
    """
    kept = _kept_in_all(report, "prime-rl")
    if kept is None:  # the default of model.ac is mode full; how TOML says None is not known
        raise SelectionError(
            "prime-rl recomputes layers unless its command has --model.ac None, and this plan keeps all"
        )
    names = _names(kept, "prime-rl", (*_KERNELS, "flash_attn", "flash_attn_3"))
    mode = ['mode = "selective"', f"targets = {json.dumps(names)}"] if names else ['mode = "full"']
    lines = ["[model.ac]  # since 2026-08-27; of sft.toml, in rl.toml [trainer.model.ac]", *mode]
    return _settings(report, lines)


def _torchtitan(report: PlanReport) -> str:
    """Return Python of torchtitan, whose policy recomputes every second mm."""
    kept = _kept_in_all(report, "torchtitan")
    if kept is None:
        return _settings(report, ["activation_checkpoint = None"])
    products = [item for item in kept if item.name == "mm"]
    numbers = {item.number for item in products}
    if products and numbers != set(range(0, products[0].calls, 2)):
        raise SelectionError("torchtitan keeps every second mm, and this plan keeps {kept} of {calls}; {remedy}",
                             kept=f"mm.{ranges_text(numbers)}", calls=products[0].calls, remedy=_REMEDY)  # fmt: skip
    names = _names([item for item in kept if item.name != "mm"], "torchtitan", _KERNELS)
    full = ", ".join(f"torch.ops.{_attribute(name)}" for name in [*names, *(["aten::mm"] if products else [])])
    return _TORCHTITAN.format(about=_comment(report), operators=f"{{{full}}}" if full else "set()")


def _recomputed(row: PlanRow) -> list[PlanList]:
    return [item for item in row.lists if item.recomputed]


def _difference(row: PlanRow) -> str:
    """Return how layers differ, empty if all are recomputed and keep the same operators."""
    for item in row.lists:
        if len(item.recomputed) < item.layers and _recomputed(row):
            return f"{visible(item.path)} recomputes {len(item.recomputed)} of its {item.layers} layers"
    kept = {frozenset((one.name, one.number) for one in item.kept) for item in row.lists}
    return "the lists of layers keep different operators" if len(kept) > 1 else ""


def _kept_in_all(report: PlanReport, form: str) -> tuple[PlanOperator, ...] | None:
    """Return the operators that each layer keeps, None if no layer is recomputed; raises SelectionError."""
    row = report.rows[0]
    if not _recomputed(row):
        return None
    if reason := _difference(row):
        raise SelectionError("{form} treats all layers alike, and in this plan {reason}; {remedy}",
                             form=form, reason=reason, remedy=_REMEDY)  # fmt: skip
    return row.lists[0].kept


def _partly(kept: Iterable[PlanOperator]) -> list[PlanOperator]:
    """Return the operators of which a layer recomputes another call."""
    kept = list(kept)
    numbers = Counter(item.name for item in kept)
    return [item for item in kept if numbers[item.name] != item.calls]


def _names(kept: Iterable[PlanOperator], form: str, attention: tuple[str, ...]) -> list[str]:
    """Return the names of operators such as `aten::addmm`; raises SelectionError if another call is recomputed."""
    kept = list(kept)
    for item in _partly(kept):
        numbers = ranges_text(other.number for other in kept if other.name == item.name)
        raise SelectionError("{form} keeps operators by name, and this plan keeps {kept} of {calls} calls; {remedy}",
                             form=form, kept=f"{item.name}.{numbers}", calls=item.calls or "an unknown number of",
                             remedy=_REMEDY)  # fmt: skip
    full = [(item.torch_name if "::" in item.torch_name else f"aten::{item.torch_name}",) for item in kept]
    names = (attention if item.name == _ATTENTION else own for item, own in zip(kept, full, strict=True))
    return list(dict.fromkeys(name for some in names for name in some))


def _yaml(report: PlanReport, batch: str, is_on: bool) -> list[str]:
    """Return the lines that trl and axolotl have from transformers' TrainingArguments, with their name of the batch."""
    row = report.rows[0]
    lines = [f"{batch}: {row.batch}", f"gradient_accumulation_steps: {row.accumulate}"]
    keywords = ["gradient_checkpointing_kwargs:", "  use_reentrant: false"] if is_on else []
    return [*lines, f"gradient_checkpointing: {json.dumps(is_on)}", *keywords]


def _module_paths(item: PlanList, kept: Iterable[PlanOperator]) -> list[str]:
    """Return the paths of the modules of kept operators, as globs such as `layer.[0-9].output.dense` for ten layers."""
    digits = range(1, len(str(item.layers - 1)) + 1)
    layers = item.layer_paths or [f"{item.path}.{'[0-9]' * count}" for count in digits]
    return [f"{layer}.{one.module}" for one in kept for layer in layers]


def _python(report: PlanReport) -> str:
    """Return Python that defines keep_operators and PLAN."""
    source = _source(("call_name", "keep_contexts", "keep_operators"))
    return f"{_docstring(report)}\n\n{source}\n\n\n{_plan(report)}\n"


def _docstring(report: PlanReport) -> str:
    about = _about(report).replace("\\", "\\\\").replace('"', "'")
    return '"""{}"""'.format("\n".join(wrap(about, _WIDTH)))


def _plan(report: PlanReport) -> str:
    lines = []
    for item in _recomputed(report.rows[0]):
        modules = ", ".join(visible(one.module) or one.name for one in item.kept)
        lines += [f"# {line}" for line in wrap(f"keeps {modules or 'nothing'}", _WIDTH)]
        kept = _set_text(item.kept)
        if item.layer_paths:
            paths = [item.layer_paths[number] for number in item.recomputed]
            lines += [f"{json.dumps(path)}: {kept}," for path in paths]
        else:
            path = json.dumps(item.path.replace("{", "{{").replace("}", "}}") + ".")[:-1]
            lines.append(f'**{{f{path}{{number}}": {kept} for number in {_numbers(item.recomputed)}}},')
    return "\n".join(["PLAN = {", *(f"    {line}" for line in lines), "}"])


def _set_text(kept: Iterable[PlanOperator]) -> str:
    names = [json.dumps(f"{item.name}.{item.number}") for item in kept]
    return f"{{{', '.join(names)}}}" if names else "set()"


def _numbers(numbers: tuple[int, ...]) -> str:
    """Return the numbers as Python: `range(12)`, or `[*range(6), 8]`."""
    runs = [tuple(map(int, part.split("-"))) for part in ranges_text(numbers).split(",")]
    texts = [f"range({f'{run[0]}, ' if run[0] else ''}{run[-1] + 1})" for run in runs]
    return texts[0] if len(texts) == 1 else f"[{', '.join(f'*{text}' for text in texts)}]"


def _source(functions: tuple[str, ...], also: str = "") -> str:
    """Return functions of bertscope/model/keep.py with the imports that they need; importing it would load torch."""
    text = (files("bertscope") / "model" / "keep.py").read_text(encoding="utf-8")
    body = ast.parse(text).body
    nodes = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in functions]
    used = {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)} | {also}
    imports = []
    for node in body:
        if isinstance(node, ast.ImportFrom) and (names := [item.name for item in node.names if item.name in used]):
            imports.append(f"from {node.module} import {', '.join(names)}")
    first = next(number for number, line in enumerate(imports) if line.startswith("from torch"))
    imports.insert(first, "")
    return "\n\n\n".join(["\n".join(imports), *(ast.get_source_segment(text, node) or "" for node in nodes)])


def _about(report: PlanReport) -> str:
    """Return the sentences that say for which model and run a plan is, and its peak."""
    row, subject, run = report.rows[0], report.subject, report.run
    settings = {"attention": subject.attention, "precision": run.precision, "optimizer": run.optimizer, **row.changes}
    settings |= {"accumulate": row.accumulate} if row.accumulate > 1 else {}
    device = report.card.name if report.card else bytes_text(report.budget_bytes)
    tools = (f"bertscope {subject.bertscope_version}", f"torch {subject.torch_version}", subject.implementation or "")
    return visible(
        f"Recompute layers of {subject.name}: {row.checkpointing}. Peak {bytes_text(row.peak_bytes)} on {device} with "
        f"batch {row.batch} x {run.seq}, {', '.join(f'{name} {value}' for name, value in settings.items() if value)}. "
        f"Made with {', '.join(filter(None, tools))}."
    )


def _comment(report: PlanReport) -> str:
    return "\n".join(f"# {line}" for line in wrap(_about(report), _WIDTH))


def _settings(report: PlanReport, lines: Iterable[str]) -> str:
    return "\n".join([_comment(report), *lines, ""])


def _attribute(name: str) -> str:
    """Return the path of an operator below torch.ops: `aten.addmm.default` for `aten::addmm`."""
    space, _, operator = name.partition("::")
    return f"{space}.{operator}" if "." in operator else f"{space}.{operator}.default"


_WRITERS: dict[str, Callable[[PlanReport], str]] = {
    "torch": lambda report: _python(report) + _TORCH,
    "trainer": _trainer,
    "lightning": lambda report: _python(report) + _LIGHTNING,
    "trl": _trl,
    "axolotl": _axolotl,
    "prime-rl": _prime_rl,
    "torchtitan": _torchtitan,
}
FORMS = (*_WRITERS, "json")
