"""The page of a model, or of two side by side: charts as SVG, pictures by Graphviz, tables that sort and search."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from bertscope.errors import BertscopeError
from bertscope.reports.base import Subject
from bertscope.reports.diagram import GraphReport
from bertscope.reports.layer_ranges import expand
from bertscope.reports.memory import FitReport, Memory
from bertscope.reports.page import DiffReport, ModelPart, PageReport
from bertscope.reports.plan import PlanReport
from bertscope.reports.step import YES
from bertscope.settings.generate import changed, setting_options
from bertscope.settings.run_config import CPU, CUDA, INFERENCE, STORED, RunConfig
from bertscope.units import bytes_text, count_text, flops_text, html_text
from bertscope.views import fit as fit_words
from bertscope.views import plan as plan_words
from bertscope.views.columns import Column, csv_only, csv_text, fits_word, number
from bertscope.views.console import PARTS, Target, variable
from bertscope.views.diagram import inline_svg, mermaid, width_points
from bertscope.views.diff import notes as diff_notes
from bertscope.views.diff import parts as diff_parts
from bertscope.views.footer import footer, subtitle, title
from bertscope.views.memory import conclusions, footnotes, kept_cells, kept_columns, variants_table
from bertscope.views.modules import tree_table
from bertscope.views.page.charts import flops_bars, lengths, parameter_map, roles
from bertscope.views.page.templating import filled, markup
from bertscope.views.plan import plan_svg
from bertscope.views.step import assumed, needs, part_name, run_text
from bertscope.views.timeline import memory_charts


def model_command(model: ModelPart, name: str, words: str = "") -> str:
    """Return a command about a model."""
    return _command(name, words, model.tree.subject)


def _command(name: str, words: str, subject: Subject, *others: Subject) -> str:
    chosen = _model_words(subject) if {*map(_model_words, others)} <= {_model_words(subject)} else ""
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
    card = model.memory.card
    limit = _limit(model.fit) if card and model.fit else {"gpu": card.name, "device": ""} if card else {}
    return model_command(model, "estimate", setting_options(_step(model, model.memory.run, **limit)))


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
    own = fit.rows[0].cost.context
    context = own.low_bytes, own.high_bytes
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


RESERVED, CONTEXT = "reserved", "context"  # what a GPU has besides tensors


def verdict(model: ModelPart) -> dict[str, Any]:
    """Return the answer for the step of the page, the memory of each variant, and what was assumed."""
    first, fit, asked = model.memory.variants[0], model.fit, model.asked
    peak = bytes_text(first.memory.cost.peak_bytes) if first.memory else "--"
    size = f"batch {count_text(model.batch)}, sequence length {count_text(model.seq)}"
    cost, sentences, rows = first.cost, [], []
    known = [variant.memory.cost.peak_bytes for variant in model.memory.variants if variant.memory]
    has_no_effect = any(size >= known[0] for size in known[1:])
    if has_no_effect:
        rows.append((_sentence("checkpointing"), list(conclusions(model.memory))))
    if asked is None or fit is None:
        answer, heading = "unasked", f"Peak {peak}"
        settings = [subtitle(model.memory), run_text(model.memory.run)]
    else:
        wanted = model.memory.run.precision, first.checkpointing
        row = next(row for row in asked.rows if (row.precision, row.checkpointing) == wanted)
        cost, answer, heading = row.cost, row.answer, f"{_sentence(fits_word(row.answer))} {place(fit)}"
        if row.answer != YES and (others := [fit_words.way_of(other) for other in asked.rows if other.answer == YES]):
            sentences.append(f"This batch fits with {'; '.join(others)}.")
        largest = (
            f"{count_text(found.batch) if found.fits else 'none'} with {fit_words.way_of(found)}" for found in fit.rows
        )
        rows.insert(0, ("Largest batch", ["; ".join(largest)]))
        settings = [assumed(fit)]
    rows.append(("Assumed", [", ".join(settings)]))
    way = fit_words.way(model.memory.run.precision, first.checkpointing)
    sentences.insert(0, f"{size}, {way}: {'nothing was estimated' if cost is None else needs(cost)}.")
    return {
        "answer": answer,
        "heading": heading,
        "sentences": [_sentence(text) for text in sentences],
        "bars": _bars(model),
        "first_rows": rows[:-1] if has_no_effect else [],  # what equal bars do not show comes before them
        "rows": rows[-1:] if has_no_effect else rows,
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def place(fit: FitReport) -> str:
    """Return the budget, or the GPU and its memory."""
    memory = bytes_text(fit.budget_bytes)
    return f"on {fit.card.name if fit.card else ''} ({memory})" if fit.card else f"in {memory}"


def _color(part: str) -> str:
    return f"var(--{part})" if part in (RESERVED, CONTEXT) else variable("part", part)


def _parts(memory: Memory, context: int) -> dict[str, int]:
    """Return what the memory at the peak consists of: tensors by use, on CUDA the rest of the reserved, the context."""
    sizes = {part: getattr(memory.peak.parts, part) for part in PARTS}
    if (reserved := memory.cost.reserved_bytes) is not None:
        sizes |= {RESERVED: max(reserved - memory.cost.peak_bytes, 0), CONTEXT: context}
    return {part: size for part, size in sizes.items() if size}


def _bars(model: ModelPart) -> dict[str, Any]:
    """Return the memory of each variant in parts, as shares of the budget, or of the largest sum if it is higher."""
    budget, context = (model.fit.budget_bytes, model.fit.rows[0].cost.context.high_bytes) if model.fit else (0, 0)
    known = [
        (variant.checkpointing, _parts(variant.memory, context)) for variant in model.memory.variants if variant.memory
    ]
    whole = max([budget, *(sum(sizes.values()) for _, sizes in known)]) or 1
    quantity = "peak {}" if model.memory.run.device != CUDA else "{} on the GPU" if model.fit else "reserved {}"
    bars = []
    for strategy, sizes in known:
        texts = {part: f"{part_name(part)} {bytes_text(size)}" for part, size in sizes.items()}
        way = fit_words.way(model.memory.run.precision, strategy)
        bars.append({
            "name": way,
            "label": f"parts of the memory, {way}: {', '.join(texts.values())}",
            "value": quantity.format(bytes_text(sum(sizes.values()))),
            "parts": [(_color(part), round(100 * size / whole, 3), texts[part]) for part, size in sizes.items()],
        })  # fmt: skip
    used = {part for _, sizes in known for part in sizes}
    memory, card = bytes_text(budget), model.fit.card if model.fit else None
    limit = f"{card.name}: {memory}" if card else f"limit {memory}"
    return {
        "bars": bars,
        "budget": round(100 * budget / whole, 3) if budget else None,
        "limit": limit if model.fit else "",
        "colors": {part_name(part): _color(part) for part in (*PARTS, RESERVED, CONTEXT) if part in used},
    }


def figures(model: ModelPart, *, are_tied: bool) -> list[tuple[str, str, str, str]]:
    """Return names, figures, their exact values and how each was obtained; `are_tied`: with the sum over layers."""
    totals = model.tree.totals
    how = ", ".join((f"batch {count_text(model.batch)}", f"sequence {count_text(model.seq)}"))
    flops = (
        ("Forward pass", model.flops.rows[0].total.matmul_flops),
        ("Training step", model.training.rows[0].total.matmul_flops),
    )
    found = [(_sentence("unique parameters"), count_text(totals.distinct_params), "", "every tensor once")]
    if are_tied:
        how_tied = "tied tensors at each layer" if totals.layer_params != totals.distinct_params else "nothing is tied"
        found.append((_sentence("sum over layers"), count_text(totals.layer_params), "", how_tied))
    weights = f"{bytes_text(totals.bf16_bytes)} in bf16"
    found.append(("Weights in fp32", bytes_text(totals.fp32_bytes), f"{count_text(totals.fp32_bytes)} B", weights))
    found += [(name, flops_text(count), f"{count_text(count)} FLOP", how) for name, count in flops]
    return found


def table(report: PageReport, target: Target) -> str:
    """Return the tables of all parts for the terminal."""
    return "\n".join(part.shown("table", target=target) for part in report.tables)


def markdown(report: PageReport) -> str:
    """Return the tables of all parts for a page or a pull request."""
    return "\n".join(part.to_markdown() for part in report.tables)


def csv(report: PageReport) -> str:
    """Return a record for each module of each model: the name of the model, and what `tree` has."""
    columns = sorted(tree_table(report.models[0].tree).columns, key=lambda column: column.csv_order)
    reads = {name: lambda record, read=read: read(record[1])
             for column in columns for name, read in column.csv.items()}  # fmt: skip
    records = [(model.name, line) for model in report.models for line in tree_table(model.tree).rows]
    return csv_text([csv_only({"model": itemgetter(0), **reads})], records)


def html(report: PageReport) -> str:
    """Return the page as text; it works offline and asks nothing of the network."""
    subject = report.models[0].tree.subject
    names = [model.tree.subject.name for model in report.models]
    titles = [title(model.tree) for model in report.models]
    subtitles = list(dict.fromkeys(subtitle(model.tree) for model in report.models))
    totals = [model.tree.totals for model in report.models]
    are_tied = any(found.layer_params != found.distinct_params for found in totals)
    differ_by_name = len(subtitles) == 1 and len(set(names)) == len(names)
    headings = names if differ_by_name else titles
    return filled(
        "report.html",
        title=", ".join(titles),
        shown_names=names,
        subtitles=subtitles,
        models=[
            {"title": heading, "sections": _sections(model, are_tied=are_tied)}
            for heading, model in zip(headings, report.models, strict=True)
        ],
        diff=None if report.diff is None else _differences(report.diff),
        written=f"Written on {report.written} by bertscope {subject.bertscope_version} "
        f"with torch {subject.torch_version}.",
        command=page_command(report),
    )


def _sections(model: ModelPart, *, are_tied: bool) -> dict[str, dict[str, Any]]:
    return {
        "overview": {"verdict": verdict(model), "figures": figures(model, are_tied=are_tied)},
        "fit": {} if model.fit is None else _fit(model, model.fit),
        "memory": _memory(model),
        "parameters": _parameters(model),
        "FLOPs": _flops(model),
        "forward": _forward(model),
        "configuration": _configuration(model),
    }


def _differences(diff: DiffReport) -> dict[str, Any]:
    sides = (("a", diff.a), ("b", diff.b))
    tables = [(f"differing {part.columns[0].title}s", part.columns, part.rows) for part in diff_parts(diff)]
    return {
        "sides": [f"{key}: {side.name} ({side.architecture})" for key, side in sides],
        "tables": tables,
        "notes": diff_notes(diff),
        "commands": [diff_command(diff)],
    }


def _numbers_first(columns: Sequence[Column]) -> list[Column]:
    """Return the columns in the order in which a narrow screen shows them: names, numbers, words, details last."""
    return [columns[0], *sorted(columns[1:], key=lambda column: (not column.right, column.detail or column.below > 0))]


def _parameters(model: ModelPart) -> dict[str, Any]:
    drawn = parameter_map(model.tensors, model.tree)
    table = tree_table(model.tree)
    return {
        "map": drawn,
        "roles": roles([color for *_, color, _ in drawn["nodes"]]),
        "columns": _numbers_first(table.columns),
        "rows": table.rows,
        "notes": [f"{name}: {value}" if name else value for name, value in footer(model.tree)],
        "commands": [model_command(model, "tree"), model_command(model, "count", "--by parameter")],
    }


def _flops(model: ModelPart) -> dict[str, Any]:
    flops, training = model.flops, model.training
    size = f"batch {model.batch}, sequence length {model.seq}"
    lines = [
        f"forward, {size}: {count_text(flops.rows[0].total.matmul_flops)} FLOPs",
        f"training step, {size}: {count_text(training.rows[0].total.matmul_flops)} FLOPs",
        *(f"as {item.name} counts: {count_text(item.value)} "
f"{item.unit} ({item.how}; {item.source})" for item in flops.conventions),
        "computed: the operators that torch dispatches; matrix products, a multiply-add is 2",
    ]  # fmt: skip
    lengths_asked = ",".join(str(point.seq) for point in sorted(flops.sweep, key=lambda point: point.seq))
    columns = [
        Column("module", lambda row: row.path or "(model)"),
        number("copies", "copies"),
        number("FLOPs", "total.matmul_flops", flops_text),
        number("elementwise", "total.elementwise_flops", flops_text),
        number("bytes moved", "total.bytes_moved", bytes_text),
        Column("type", lambda row: row.type),
    ]
    bars = flops_bars(flops)
    return {
        "bars": bars,
        "roles": roles([color for *_, color in bars["bars"]]),
        "lengths": lengths(flops),
        "columns": columns,
        "rows": flops.rows,
        "notes": lines,
        "commands": [
            flops_command(model, f"--seq {model.seq} --convention torch"),
            flops_command(model, f"--seq {model.seq}", is_training=True),
            flops_command(model, f"--seq {lengths_asked}"),
        ],
    }


def _memory(model: ModelPart) -> dict[str, Any]:
    memory, table = model.memory, variants_table(model.memory)
    return {
        "timeline": memory_charts(memory),
        "columns": table.columns,
        "rows": table.rows,
        "strong": table.strong,
        "kept_columns": _numbers_first(kept_columns(memory)),
        "kept_rows": kept_cells(memory),
        "notes": [
            *conclusions(memory),
            (
                "A long step is thinned out: in each stretch the highest and the last point are drawn, "
                "so the peak is never lost."
            ),
            *footnotes(memory),
        ],
        "commands": [estimate_command(model)],
    }


def _fit(model: ModelPart, fit: FitReport) -> dict[str, Any]:
    reports = [report for report in (fit, model.asked) if report is not None]
    return {
        "heading": f"Largest batches that fit {place(fit)} at sequence length {model.seq}",
        "columns": fit_words.columns(replace(fit, length_given=True)),  # the heading has the length
        "rows": fit.rows,
        "notes": list(fit_words.notes(fit)),
        "commands": [fit_command(model, report) for report in reports],
        "plan": {} if model.plan is None else _plan(model.plan),
    }


def _plan(plan: PlanReport) -> dict[str, Any]:
    return {
        "answer": plan_words.verdict(plan),
        "columns": plan_words.columns(plan),
        "rows": plan.rows,
        "svg": markup(plan_svg(plan)),
        "caption": "Each plan that was run: what it needs on the GPU, and the share of the layers' FLOPs to recompute",
    }


def _forward(model: ModelPart) -> dict[str, Any]:
    graphs = [graph for graph in (model.forward, model.layer) if graph is not None]
    if not graphs:
        return {"pictures": [], "commands": [model_command(model, "diagram", "--kind tree")]}
    paths = [next(expand(graph.path)) for graph in graphs]  # any of the equal layers represents all
    options = f"--kind forward --batch {model.batch} --seq {model.seq}"
    commands = [model_command(model, "diagram", f"{path} {options}".strip()) for path in paths]
    return {"pictures": [_picture(graph) for graph in graphs], "commands": commands}


def _picture(graph: GraphReport) -> dict[str, Any]:
    """Return the wide and the narrow picture and the width of the wide one, or Mermaid text if nothing draws them."""
    caption = graph.path or "the whole model"
    try:
        drawn = [inline_svg(graph, is_narrow) for is_narrow in (False, True)]
    except BertscopeError as error:
        return {"caption": caption, "svg": None, "failure": str(error), "mermaid": mermaid(graph)}
    wide, narrow = (_drawing(picture, kind, caption) for kind, picture in zip(("wide", "narrow"), drawn, strict=True))
    return {"caption": caption, "svg": markup(f"{wide}\n{narrow}"), "points": width_points(drawn[0])}


def _drawing(picture: str, kind: str, caption: str) -> str:
    drawn = re.sub(r' id="[^"]*"', "", picture)  # a page has several pictures, and one of each id
    # A text of 11 pt has 11 CSS pixels where the picture has a pixel for each point.
    named = (
        f'<svg class="{kind}" style="--points:{width_points(picture):g}" role="img" aria-label="{html_text(caption)}" '
    )
    return drawn.replace("<svg ", named, 1)


def _configuration(model: ModelPart) -> dict[str, Any]:
    subject = model.tree.subject
    # As config.json writes it, text without its quotes.
    value = Column("value", lambda pair: pair[1] if isinstance(pair[1], str) else json.dumps(pair[1]))
    return {"columns": [Column("field", itemgetter(0)), value], "rows": list((subject.config or {}).items())}
