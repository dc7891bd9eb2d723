"""The report of `plan` as a table, CSV and Markdown, as a chart (SVG), and as code that trains with a plan."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from textwrap import wrap
from types import SimpleNamespace
from typing import Any

from bertscope.errors import SelectionError, named, suggestion
from bertscope.reports.plan import TIME, PlanList, PlanOperator, PlanReport, PlanRow
from bertscope.reports.step import UNCERTAIN, YES
from bertscope.settings.checkpointing import ATTENTION, ranges_text
from bertscope.settings.generate import changed, option_words, row_words
from bertscope.settings.rows import rows
from bertscope.settings.run_config import CUDA, PLAN_FORMS, RunConfig
from bertscope.settings.training import KEEPING_RESULTS, LEANER, QUANTIZING, TRAINER_OPTIMIZERS, predicts_next
from bertscope.units import (
    FP16,
    FP32,
    PRECISIONS,
    QUANTIZED,
    bytes_text,
    count_text,
    counted,
    decimal,
    flops_text,
    html_text,
    visible,
)
from bertscope.views import step
from bertscope.views.columns import Column, csv_only, listed, values
from bertscope.views.console import Target
from bertscope.views.page.templating import filled, markup
from bertscope.views.timeline import Chart
from bertscope.views.views import Heading, View

# The end of a module's path in its layer -> what the module computes; the first row that matches. A path without a row
# is shown itself.
_ROLES = (
    (r"query|q_proj|q_lin|q", "q"), (r"key|k_proj|k_lin|k", "k"), (r"value|v_proj|v_lin|v", "v"),
    (r"qkv|Wqkv|c_attn|query_key_value|in_proj|qkv_proj", "qkv"),
    (r"attention\.output\.dense|out_proj|o_proj|out_lin|attn\.Wo|attn\.c_proj|o", "output"),
    (r"intermediate\.dense|fc1|up_proj|gate_up_proj|c_fc|mlp\.Wi|wi|wi_0|wi_1|lin1|linear1", "FFN-up"),
    (r"gate_proj", "FFN-gate"),
    (r"output\.dense|fc2|down_proj|mlp\.c_proj|mlp\.Wo|wo|lin2|linear2", "FFN-down"),
)  # fmt: skip

_LABEL = 40  # characters of a plan in the table
_BELOW = "partial"
_MOST_NAMED = 5  # of more products those that are not saved are named
_COSTS = {  # of a setting that a plan changes
    "lora": "With LoRA only the adapters are trained; the model is no longer fine-tuned in full.",
    "quantize": "Quantized weights are rounded, and each product unpacks its weight, forward and backward.",
}


def product_role(product: PlanOperator) -> str:
    """Return what a product computes, such as `FFN-up`; the module's path if it is not known."""
    path, _, adapter = re.sub(r"\.base_layer$", "", product.module).partition(".lora_")
    cross = "cross-" if re.search(r"cross|EncDec", path) else ""
    if product.name == ATTENTION:
        return cross + "attention"
    if product.name in ("bmm", "baddbmm"):
        is_second = bool(product.number & 1)
        return cross + ("attention context" if is_second else "attention scores")
    name = next((word for ends, word in _ROLES if re.search(rf"(^|\.)({ends})$", path)), path or product.name)
    return f"{cross}{name}{'.lora_' if adapter else ''}{adapter.partition('.')[0]}"


def label(row: PlanRow) -> str:
    """Return a plan in words: `save FFN-down; FFN-up in layers 20-23`."""
    if not row.lists:
        return "no checkpointing"
    if all(len(item.recomputed) == item.layers for item in row.lists):
        if not any(item.saved for item in row.lists):
            return "full checkpointing"
        if not any(item.recomputed_operators for item in row.lists):
            return "save all matrix products"
    lists: dict[str, list[PlanList]] = {}
    for item in row.lists:
        lists.setdefault(item.path, []).append(item)
    return f"save {'; '.join(f'{path}: ' * (len(lists) > 1) + _saved_words(same) for path, same in lists.items())}"


def _saved_words(lists: Sequence[PlanList]) -> str:
    """Return what one list's layers save: first the products that all save, then what only some do."""
    savers = {product: list[int]() for item in lists for product in (*item.saved, *item.recomputed_operators)}
    for item in lists:
        for product in item.saved:
            savers[product] = sorted((*savers[product], *item.recomputed))
    layers = sorted(number for item in lists for number in item.recomputed)
    spans = sorted({tuple(numbers) for numbers in savers.values()}, key=len, reverse=True)
    by_span = {span: _joined(one for one, numbers in savers.items() if tuple(numbers) == span) for span in spans}
    not_all = _joined(one for one, numbers in savers.items() if len(numbers) < len(layers))
    first = by_span.pop(tuple(layers), "")
    if sum(len(numbers) == len(layers) for numbers in savers.values()) > max(len(savers) // 2, _MOST_NAMED - 1):
        first = f"all matrix products except {not_all}" if not_all else "all matrix products"
    by_span.pop((), None)
    texts = [first, *(f"{names} in {_layers(span)}" for span, names in by_span.items())]
    if not_recomputed := sorted({*range(lists[0].layers)} - {*layers}):
        texts.append(f"everything in {_layers(not_recomputed)}")
    return "; ".join(filter(None, texts)) or "no product"


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {ranges_text(numbers)}"


def _short(row: PlanRow, limit: int) -> str:
    """Return a plan in words, or the kind of one whose words are below the table."""
    text = label(row)
    return text if len(text) <= limit else {"full checkpointing": "full", "no checkpointing": "none"}.get(text, _BELOW)


def plan_lines(report: PlanReport, target: Target | None = None) -> list[tuple[str, str]]:
    """Return in words the plans that the table has by number, and where none fits what else saves memory."""
    limit, lines = _limit(report), enumerate(report.rows, 1)
    loop = "" if report.fits else step.other_loop(report.run, report.first.cost)
    plans = [(f"plan {n}", label(row)) for n, row in lines if _short(row, limit) == _BELOW]
    return [*plans, *[("loop", loop)] * bool(loop)]


def _joined(products: Iterable[PlanOperator]) -> str:
    roles = dict.fromkeys(map(product_role, products))
    return listed(roles) if roles else ""


def share(row: PlanRow) -> str:
    """Return the share of the layers' FLOPs in matrix products that is recomputed."""
    is_little = 0 < row.recompute_share < 0.005
    return "under 1 %" if is_little else f"{100 * row.recompute_share:.0f} %"


def verdict(report: PlanReport) -> str:
    """Return the answer in a sentence: what the plan needs and recomputes, or what the leanest plan lacks."""
    row, on, time = report.first, step.limit_text(report), (step.step_time(report.first.cost), 1)
    short_on = on if report.gpu else f"on {on.rpartition(' on ')[2]}"  # the need has the limit
    if not report.fits:
        leanest = "full checkpointing" if label(row) == "full checkpointing" else "the leanest one"
        text = f"No plan fits {on}: {leanest} {step.on_gpu(row.cost)}{step.in_evaluation(row.cost)}"
        largest = (f"; batch {count_text(report.largest_batch)} fits" * bool(report.largest_batch), 1)
        if maybe := next((other for other in (row, *report.rows) if other.answer == UNCERTAIN), None):
            text = f"Only {leanest if maybe is row else f'a plan with {_changed(maybe)}'} may fit {short_on}"
            return step.line_of(text, (f": {step.on_gpu(maybe.cost)}", 2), largest)
        return step.line_of(text, largest)
    size = f" as {count_text(row.accumulate)} micro-batches of {count_text(row.batch)}" * (row.accumulate > 1)
    effect = " (same result)" * row.keeps_result + " (not full fine-tuning)" * ("lora" in row.changes)
    changes = f" with {_changed(row)}{effect}" if row.changes else ""
    changes += ", without a change" * bool(report.may_change and not row.changes)
    logits = "the logits" * ("loss_chunks" in row.changes)
    none = "no matrix products" if row.lists else "nothing"
    recomputed = f", recomputing {share(row) if row.recompute_share else logits or none}"
    extra: step.Fact = recomputed if logits else (recomputed, 4)  # the table has the layers' share
    of_layers = (" of layer FLOPs" * bool(row.recompute_share), 2)
    need = (f": {step.on_gpu(row.cost)}{step.in_evaluation(row.cost)}", 5)
    more = (f" and {logits}" * bool(row.recompute_share and logits), 2)
    costs = ", without clipping" * ("step_in_backward" in row.changes)
    costs += f", copying {step.copied_text(row.cost.copied_bytes)}" if row.cost.copied_bytes else ""
    return step.line_of(f"Fits {short_on}", (size, 3), changes, need, extra, of_layers, more, costs, time)


def _has_sizes(report: PlanReport) -> bool:
    return len({(row.batch, row.accumulate) for row in report.rows}) > 1 or report.batch_total is not None


def _limit(report: PlanReport) -> int:
    return 0 if any(row.changes for row in report.rows) else _LABEL - 8 * _has_sizes(report)


def columns(report: PlanReport) -> list[Column]:
    """Return the columns."""
    several, has_gpu = _has_sizes(report), report.run.device == CUDA
    has_changes, limit = any(row.changes for row in report.rows), _limit(report)
    costs = step.cost_columns(without=["fits"] * all(row.fits for row in report.rows), has_gpu=has_gpu)
    if has_changes:
        costs = [replace(one, is_wide=one.is_wide + (one.title != "fits")) for one in costs]
    numbers = {id(row): str(number) for number, row in enumerate(report.rows, 1)}
    has_lines = any(_short(row, limit) == _BELOW for row in report.rows)
    return [
        *[Column("#", lambda row: numbers[id(row)], right=True)] * has_lines,
        Column("checkpointing" if has_changes else "plan", lambda row: _short(row, limit), values("checkpointing")),
        Column("micro-batch", "{0.batch} x {0.accumulate}".format, values("batch", "accumulate"), True, shown=several),
        Column("what changes", _changed, shown=has_changes),
        *costs,
        Column("recomputed", share, values("recompute_share"), right=True, is_wide=2 * has_changes),
        csv_only({"changes": lambda row: _options(row.changes) or "-"} | values("recompute_moved_bytes")),
        step.parts_csv(),
    ]


def _changed(row: PlanRow) -> str:
    """Return what a plan changes in the words of --may-change, or the precision: `8bit, lora, autocast-fp16`."""
    known = {optimizer: word for word, optimizer in LEANER.items()} | {word: word for word in QUANTIZING}
    known |= {precision: precision for precision in [row.changes.get("precision")] if precision}
    return ", ".join(known.get(value, name.replace("_", "-")) for name, value in row.changes.items()) or "-"


def _options(settings: dict[str, Any]) -> str:
    table, options = rows(RunConfig), list[str]()
    for name, value in settings.items():
        options += option_words(table[name], value) if name in table else [f"--{name}", str(value)]
    return shlex.join(options)


def _sizes(report: PlanReport) -> list[str]:
    sizes = step.sizes(report)[bool(report.batch_total) :]
    return [*sizes, step.precision_text(report, report.run.precision)]


def _settings(report: PlanReport) -> str:
    return step.settings_line(report, *_sizes(report))


def _tip(report: PlanReport) -> str:
    run, why = report.run, "allow other changes too"
    batch = {"batch": None, "batch_total": report.batch_total} if report.batch_total else {"batch": run.batch}
    if report.fits:
        if not (first := report.first).lists and not first.changes and first.accumulate == 1:
            changes: dict[str, Any] = {"batch": first.batch, "batch_total": None}
            return step.next_command(report, "estimate", "see what the step needs, part by part", **changes)
        changes = {"may_change": ",".join(report.may_change) or None, **batch, "emit": "torch", "output": "plan.py"}
        return step.next_command(report, "plan", "write the code to plan.py", 'report.emitted("torch")', **changes)
    if smaller := step.smaller_evaluation(report, "plan", report.first.cost, **batch):
        return smaller
    if report.batch_total is None and run.batch > 1 and report.largest_batch:
        why = f"make batch {count_text(run.batch)} fit, with micro-batches"
        return step.next_command(report, "plan", why, batch=None, batch_total=run.batch)
    changes = {"may_change": "lora,freeze,8bit,precision,sgd", **batch}
    return "" if report.may_change else step.next_command(report, "plan", why, **changes)


def notes(report: PlanReport, target: Target | None = None) -> Iterator[str]:
    """Yield the next faster plan first, then how the numbers were obtained."""
    yield Heading("Settings")
    order = "shortest step by the calibration" if report.objective == TIME else "fewest recompute FLOPs"
    yield f"{step.assumed(report, *_sizes(report))}; {order} first"
    yield Heading("What the table says")
    row = report.first
    if row.changes:
        keywords = ", ".join(f"{name}={value!r}" for name, value in row.changes.items())
        yield f"What it changes: {keywords if named('batch') == 'batch' else _options(row.changes)}."
    if (cheaper := report.cheaper) is not None and report.fits:
        excess = cheaper.cost.gpu_bytes - cheaper.cost.usable_bytes
        more = f", {bytes_text(excess)} too much" if excess > 0 else ""
        size = bytes_text(cheaper.cost.gpu_bytes)
        yield f"The next faster plan ({label(cheaper)}, {share(cheaper)}) needs {size}{more}."
    if row.lists:
        yield f"recomputed: of the layers' forward pass, {flops_text(report.layers_flops)} for one micro-batch."
    yield from (text for name, text in _COSTS.items() if name in row.changes)
    if more := step.other_loop(report.run, row.cost):
        yield more
    yield Heading("How the numbers were obtained")
    yield f"{counted(report.tried, 'plan')} simulated with the device's kernels, nothing allocated."
    if report.gpu:
        yield f"Memory of {report.gpu.name}: {report.gpu.source}."
    yield step.margin_note(row.cost)
    yield from step.time_notes(row.cost for row in report.rows)
    yield step.UNITS_NOTE


VIEW = View(
    answer=verdict,
    settings=_settings,
    tip=_tip,
    columns=columns,
    strong=lambda report, row: row is report.first,
    lines=plan_lines,
    name_width=12,
    notes=notes,
)


# ---- the chart (SVG): the memory that each plan needs against the FLOPs that it recomputes ----


def plan_svg(report: PlanReport) -> str:
    """Return the picture; the limit is a line, and a plan that does not fit is hollow."""
    points = sorted({(point.recompute_share, point.cost.gpu_bytes): point for point in report.front}.items())
    limit = report.budget_bytes
    chart = Chart(1.1 * max([limit, *(size for (_, size), _ in points)]), "on the GPU", "recomputed")
    _, line = chart.at(0, limit)
    curve = " ".join(f"{x},{y}" for x, y in (chart.at(*key) for key, _ in points))
    shapes = [
        f'<path d="M70 {line}H620" stroke="currentColor" stroke-dasharray="6 4"/>',
        chart.text(620, line - 5, f"limit {bytes_text(limit)}", "end"),
        f'<polyline points="{curve}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>',
    ]
    for (recomputed, size), point in points:
        x, y = chart.at(recomputed, size)
        title = html_text(f"{point.checkpointing}: {bytes_text(size)}, {100 * recomputed:.0f} % recomputed")
        dot = f'cx="{x}" cy="{y}" r="4" fill="{"currentColor" if size <= limit else "none"}" stroke="currentColor"'
        shapes.append(f"<circle {dot}><title>{title}</title></circle>")
    return chart.svg(shapes, ("0 %", "25 %", "50 %", "75 %", "100 %"))


# ---- the code that trains with a plan: Python with the functions of bertscope/model/save_policy.py ----


_COMMENT_WIDTH = 100

_ROOTS = "QUANTIZATION adapted PLAN save_operators train_step make_optimizer arguments SaveOperators"


def emitted(report: PlanReport, into: str) -> str:
    """Return the cheapest plan of a report as code to paste, or the report as JSON.

    Raises SelectionError for an unknown form, and for a report without plans that fit.
    """
    if into not in PLAN_FORMS:
        raise SelectionError(f"no form {into[:40]!r} of a plan; {suggestion(into, PLAN_FORMS)}")
    if into == "json":
        return report.to_json()
    row = next((row for row in report.rows if report.fits and row.answer == YES), None)
    if row is None:
        raise SelectionError("no plan fits, so there is none to emit")
    run = report.run.changed(**{name: row.changes[name] for name in rows(RunConfig) if name in row.changes})
    has_savers = any(getattr(run, name) for name in KEEPING_RESULTS)
    if has_savers and into != "torch":
        raise SelectionError(f"{into} has no argument for the step that this plan takes; emit torch")
    half = run.autocast or ""
    contexts = [f"torch.autocast({run.device!r}, torch.{PRECISIONS[half].torch_name})"] if half else []
    contexts += ["torch.autograd.graph.save_on_cpu(pin_memory=True)"] * run.offload_activations
    policy, savers = (
        # The files of bertscope/model, whose import would load torch, without their docstrings.
        (files("bertscope") / "model" / name).read_text(encoding="utf-8").partition('"""\n\n')[2]
        for name in ("save_policy.py", "savers.py")
    )
    recomputes = any(item.recomputed for item in row.lists)
    has_loop = has_savers or row.accumulate > 1 or not recomputes
    run = run.changed(grad_scaler=run.grad_scaler or (half == FP16.name and not run.step_in_backward))
    values = {"into": into, "row": row, "run": run, "half": half, "contexts": contexts, "has_loop": has_loop}
    values |= {"recomputes": recomputes, **_prepared(run, row)}
    values |= {"is_causal": predicts_next(report.subject.architecture), "source": markup(savers * has_savers)}
    # The first line decides how Python reads the names that follow.
    about = f"# -*- coding: utf-8 -*-\n{_about(report, run, row, into)}"
    planned = f"{policy}\n\n{_plan(row)}" if recomputes else ""
    return f"{about}\n{_used(planned + filled('plan.txt', **values))}"


def _used(code: str) -> str:
    """Return code without the imports, functions and classes that nothing in it uses, and its last comments."""
    imports, parts = dict[str, str](), dict[str, str]()
    for part in re.findall(r"^[^\s#)}].*\n(?:(?:[ \t)}].*)?\n)*", code, re.MULTILINE):
        start, listed, name = re.findall(r"^((?:from \S+ )?import )?(?:def |class )?((\w+).*)", part)[0]
        if start:
            imports |= dict.fromkeys(listed.split(", "), start)
        else:
            parts[name] = part.strip()
    used, todo = set[str](), parts.keys() & _ROOTS.split()
    while todo:
        used |= todo
        mentioned = {name for part in todo for name in re.findall(r"\w+", parts.get(part, ""))}
        todo = mentioned & (parts | imports).keys() - used
    heads = dict[str, list[str]]()
    for name in sorted(used & imports.keys()):
        heads.setdefault(imports[name], []).append(name)
    lines = [f"{start}{', '.join(heads[start])}" for start in sorted(heads)]
    blocks = ["\n".join(lines), *(parts[name] for name in parts if name in used)]
    blocks += ["\n".join(re.findall(r"^#.*", code, re.MULTILINE))]
    return "\n\n\n".join(filter(None, blocks)) + "\n"


def _prepared(run: RunConfig, row: PlanRow) -> dict[str, Any]:
    """Return how the model of a plan's run is loaded and adapted."""
    kind = run.quantize.partition("-")[0] if run.quantize in QUANTIZED else ""
    dtype = f"torch.{PRECISIONS.get(run.compute_precision, FP32).torch_name}"
    is_half = kind != "int8" or not run.autocast  # peft makes fp32 of what is not in 4 bits
    parts = [part.partition("=")[::2] for part in str(row.changes.get("lora", "")).split(",")]
    names = [word for word, name in TRAINER_OPTIMIZERS.items() if name == row.changes.get("optimizer")]
    return {
        "kind": kind, "is_double": run.quantize.endswith("-dq"), "dtype": dtype, "optim": names[:1],
        "loaded": dtype if is_half else "torch.float32", "converts": kind and run.autocast and is_half,
        "adapters": [(name if name == "r" else f"lora_{name}", value) for name, value in parts
                     if name in ("r", "alpha", "dropout") and decimal(value.replace(".", "", 1)) is not None],
    }  # fmt: skip


def _about(report: PlanReport, run: RunConfig, row: PlanRow, into: str) -> str:
    subject = report.subject
    settings: dict[str, Any] = {"attention": subject.attention, "precision": run.precision}
    settings |= {"optimizer": run.optimizer, "lora": subject.lora}
    settings |= {"quantize": run.quantize if run.quantize in QUANTIZED else ""} | row.changes
    settings |= {"accumulate": row.accumulate} if row.accumulate > 1 else {}
    table = rows(RunConfig)
    left = [row_words(name, value) for name, value in changed(run).items() if into not in table[name].emitted]
    tools = (f"bertscope {subject.bertscope_version}", f"torch {subject.torch_version}", subject.implementation or "")
    listed, listed_sizes = ", ".join(left), ", ".join([f"batch {row.batch}", *step.sizes(report)[1:]])
    text = visible(
        f"{f'Recompute layers of {subject.name!a}: {row.checkpointing}' if row.lists else f'Train {subject.name!a}'}. "
        f"Peak {bytes_text(row.peak_bytes)} {step.limit_text(report)} with {listed_sizes}, "
        f"{', '.join(f'{name} {value}' for name, value in settings.items() if value)}. "
        f"{f'Not in this code: {listed}. ' * bool(listed)}Made with {', '.join(filter(None, tools))}."
    )
    return _comments(text)


def _plan(row: PlanRow) -> str:
    lines = []
    for item in (item for item in row.lists if item.recomputed):
        modules = ", ".join(visible(one.module) or one.name for one in item.saved)
        lines += _comments(f"saves {modules or 'nothing'}").splitlines()
        names = ", ".join(json.dumps(f"{one.name}.{one.number}") for one in item.saved)
        saved, numbers = f"{{{names}}}" if names else "set()", range(item.recomputed[0], item.recomputed[-1] + 1)
        if item.layer_paths:
            lines += [f"{json.dumps(item.layer_paths[number])}: {saved}," for number in item.recomputed]
        else:
            shown = numbers if tuple(numbers) == item.recomputed else list(item.recomputed)
            lines.append(f"**{{{json.dumps(f'{item.path}.')} + str(number): {saved} for number in {shown}}},")
    return "\n".join(["PLAN = {", *(f"    {line}" for line in lines), "}\n"])


def _comments(text: str) -> str:
    shown = text.encode("ascii", "backslashreplace").decode()
    return "".join(f"# {line}\n" for line in wrap(shown, _COMMENT_WIDTH))


code = SimpleNamespace(emitted=emitted)
