"""The page of a model, or of two side by side: charts as SVG, pictures by Graphviz, tables that sort and search."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

from bertscope.errors import BertscopeError
from bertscope.reports.diagram import GraphReport
from bertscope.reports.layer_ranges import expand
from bertscope.reports.memory import FitReport
from bertscope.reports.modules import CountReport, CountRow, FlopsReport, TreeReport
from bertscope.reports.page import DiffReport, ModelPart, PageReport
from bertscope.settings.checkpointing import with_checkpointing
from bertscope.settings.generate import changed, setting_options
from bertscope.settings.run_config import CPU, CUDA, INFERENCE, STORED, RunConfig
from bertscope.units import bytes_text, count_text, counted, flops_text, html_text, share_text
from bertscope.views import fit as fit_words
from bertscope.views import plan as plan_words
from bertscope.views.columns import Column, attribute, csv_only, csv_text, listed, number
from bertscope.views.console import PARTS, ROLES, Target, variable
from bertscope.views.diagram import inline_svg, mermaid
from bertscope.views.diff import notes as diff_notes
from bertscope.views.diff import parts as diff_parts
from bertscope.views.footer import footer, subtitle, title
from bertscope.views.memory import conclusions, footnotes, saved_table, variants_table
from bertscope.views.memory import verdict as peak_answer
from bertscope.views.modules import flops as flops_view
from bertscope.views.modules import tree_table
from bertscope.views.page.templating import filled, markup
from bertscope.views.step import assumed, margin_text, part_name, precision_name, run_text
from bertscope.views.timeline import memory_charts
from bertscope.views.views import Heading, Table

# ---- the commands that give the numbers of a page ----


def _command(name: str, models: Sequence[ModelPart], *texts: str) -> str:
    """Return a command about a model, with the options that select its class if all these models have the same."""
    options, subjects = set(), [model.tree.subject for model in models]
    for subject in subjects:
        selected = {"architecture": subject.architecture, "attention": subject.attention, "lora": subject.lora}
        is_own = ":" in subject.name  # a `module:attribute` decides all of them by itself
        options.add(" ".join(f"--{key} {shlex.quote(text)}" for key, text in selected.items() if text and not is_own))
    chosen = options.pop() if len(options) == 1 else ""
    return " ".join(filter(None, (f"bertscope {name}", shlex.quote(subjects[0].name), *texts, chosen)))


def _sizes(*models: ModelPart, **sizes: Any) -> dict[str, Any]:
    """Return these of batch and seq, or else both of the page, without those that have no effect."""
    sizes = sizes or {"batch": models[0].batch, "seq": models[0].seq}
    return {name: size for name, size in sizes.items() if not all(name in model.idle for model in models)}


def _sizes_text(model: ModelPart) -> str:
    labels = {"batch": "batch", "seq": "sequence length"}
    return ", ".join(f"{labels[name]} {count_text(size)}" for name, size in _sizes(model).items())


def flops_command(model: ModelPart, seq: Any, *texts: str, is_training: bool = False) -> str:
    """Return a command of `flops`; only the FLOPs of training depend on frozen parameters."""
    run = model.memory.run
    values = {"mode": "training" * is_training, "freeze": run.freeze * is_training, "input": run.input}
    values |= _sizes(model, batch=model.batch, seq=seq)
    return _command("flops", [model], setting_options({name: value for name, value in values.items() if value}), *texts)


def _step(model: ModelPart, run: RunConfig, fit: FitReport | None = None, **changes: Any) -> str:
    """Return the options of a step, with the strategies of the page's step or of its table of what fits."""
    rows: Sequence[Any] = (model.fit or fit).rows if fit else model.memory.variants
    strategies, precisions = (
        ",".join(dict.fromkeys(getattr(row, name, run.precision) for row in rows))
        for name in ("checkpointing", "precision")
    )
    named: dict[str, Any] = {**_sizes(model), "precision": precisions}
    named["checkpointing"] = "" if run.mode == INFERENCE else strategies
    named |= {"reentrant": True} if any(row.reentrant for row in model.memory.variants) else {}
    settings = named | {name: value for name, value in changed(run).items() if name not in {*named, "batch", "seq"}}
    settings |= (_limit(fit) if fit else {}) | changes
    return setting_options({name: value for name, value in settings.items() if value not in ("", None, STORED)})


def estimate_command(model: ModelPart) -> str:
    """Return the command that estimates the page's step."""
    gpu = model.memory.gpu
    limit = _limit(model.fit) if gpu and model.fit else {"gpu": gpu.name, "device": ""} if gpu else {}
    return _command("estimate", [model], _step(model, model.memory.run, **limit))


def fit_command(model: ModelPart, fit: FitReport) -> str:
    """Return the command that gives a fit table of the page."""
    return _command("fit", [model], _step(model, fit.run, fit, batch=fit.asked_batch))


def page_command(report: PageReport) -> str:
    """Return the command that writes the page."""
    model, *rest = report.models
    compared = [f"--compare {shlex.quote(other.name)}" for other in rest]
    run = model.fit.run if model.fit else model.memory.run
    return _command("report", report.models, *compared, "" if model.fit else "--no-fit", _step(model, run, model.fit))


def _limit(fit: FitReport) -> dict[str, Any]:
    """Return the GPU or the budget, the device if it is not implied, and the CUDA context if it is given."""
    limit: dict[str, Any] = {"gpu": fit.gpu.name} if fit.gpu else {"budget": fit.budget_bytes}
    limit["device"] = "" if fit.gpu or fit.run.device == CPU else fit.run.device
    context = fit.rows[0].cost.context
    published = (fit.gpu.context_low_bytes, fit.gpu.context_high_bytes) if fit.gpu else None
    is_given = context.low_bytes == context.high_bytes > 0 and (context.low_bytes, context.high_bytes) != published
    return limit | ({"context": context.low_bytes} if is_given else {})


# ---- the answer and its figures ----


RESERVED, CONTEXT = "reserved", "context"  # what a GPU has besides tensors


def verdict(model: ModelPart) -> dict[str, Any]:
    """Return the answer for the step of the page, the memory of each variant, and what was assumed."""
    memory, fit, question = model.memory, model.fit, model.batch_fit
    peaks = [variant.cost.peak_bytes for variant in memory.variants if variant.cost]
    has_no_effect = any(size >= peaks[0] for size in peaks[1:])
    rows = [("Checkpointing", [*conclusions(memory)])] * has_no_effect
    if question is None or fit is None:
        answer, heading, assumption = "unasked", peak_answer(memory), f"{subtitle(memory)}, {run_text(memory)}"
    else:
        answer, heading, assumption = question.answer, fit_words.verdict(question), assumed(fit)
        batches = ((row, count_text(row.batch) if row.fits else "none") for row in fit.rows)
        fitting = (f"{batch} in {fit_words.way(row.precision, row.checkpointing)}" for row, batch in batches)
        rows.insert(0, ("Largest batch", ["; ".join(fitting)]))
    rows.append(("Assumed", [assumption]))
    size = _sizes_text(model)
    ways = listed(with_checkpointing(variant.checkpointing) for variant in memory.variants)
    first = f"{precision_name(memory.run.precision)} {ways}"
    return {
        "answer": answer,
        "heading": heading,
        "sentences": [f"The page is about {size}, {first}."],
        "bars": _bars(model),
        "first_rows": rows[:-1] if has_no_effect else [],  # what equal bars do not show comes before them
        "rows": rows[-1:] if has_no_effect else rows,
    }


def _color(part: str) -> str:
    return f"var(--{part})" if part in (RESERVED, CONTEXT) else variable("part", part)


def _bars(model: ModelPart) -> dict[str, Any]:
    """Return each variant's memory in parts, as shares of the budget, or of the largest sum if it is higher.

    The parts are the tensors by use; on CUDA also the rest of the reserved memory, and the context.
    """
    fit, precision = model.fit, model.memory.run.precision
    budget, context = (fit.budget_bytes, fit.rows[0].cost.context.high_bytes) if fit else (0, 0)
    known = []
    for variant in model.memory.variants:
        if variant.cost is not None:
            sizes = {part: getattr(variant.cost.peak.parts, part) for part in PARTS}
            if (reserved := variant.cost.reserved_bytes) is not None:
                sizes |= {RESERVED: max(reserved - variant.cost.peak_bytes, 0), CONTEXT: context}
            setting = fit_words.way(precision, variant.checkpointing)
            known.append((setting, {part: size for part, size in sizes.items() if size}))
    whole = max([budget, *(sum(sizes.values()) for _, sizes in known)]) or 1
    quantity = "peak {}" if model.memory.run.device != CUDA else "{} on the GPU" if fit else "reserved {}"
    bars = []
    for setting, sizes in known:
        texts = {part: f"{part_name(part)} {bytes_text(size)}" for part, size in sizes.items()}
        bars.append({
            "name": setting,
            "label": f"parts of the memory, {setting}: {', '.join(texts.values())}",
            "value": quantity.format(bytes_text(sum(sizes.values()))),
            "parts": [(_color(part), round(100 * size / whole, 3), texts[part], bytes_text(size))
                      for part, size in sizes.items()],
        })  # fmt: skip
    used = {part for _, sizes in known for part in sizes}
    limit = f"{fit.gpu.name if fit.gpu else 'limit'}{':' if fit.gpu else ''} {bytes_text(budget)}" if fit else ""
    return {
        "bars": bars,
        "budget": round(100 * budget / whole, 3) if budget else None,
        "limit": limit,
        "colors": {part_name(part): _color(part) for part in (*PARTS, RESERVED, CONTEXT) if part in used},
    }


def figures(model: ModelPart, *, are_tied: bool) -> list[tuple[str, str, str, str]]:
    """Return names, figures, their exact values and how each was obtained; `are_tied`: with the sum over layers."""
    totals = model.tree.totals
    rows = [("Unique parameters", count_text(totals.distinct_params), "", "every tensor once")]
    if are_tied:
        how = "tied tensors at each layer" if totals.layer_params != totals.distinct_params else "nothing is tied"
        rows.append(("Sum over layers", count_text(totals.layer_params), "", how))
    weights = f"{bytes_text(totals.bf16_bytes)} in bf16"
    rows.append(("Weights in fp32", bytes_text(totals.fp32_bytes), f"{count_text(totals.fp32_bytes)} B", weights))
    sizes = _sizes_text(model)
    for name, report in (("Forward pass", model.flops), ("Training step", model.training)):
        flops = report.rows[0].total.matmul_flops
        rows.append((name, flops_text(flops), f"{count_text(flops)} FLOP", sizes))
    return rows


def table(report: PageReport, target: Target) -> str:
    """Return the tables of all parts for the terminal."""
    *first, last = report.tables
    texts = [part.shown("table", target=target, has_tip=False) for part in first]
    return "\n".join([*texts, last.shown("table", target=target)])


def markdown(report: PageReport) -> str:
    """Return the tables of all parts for a page or a pull request."""
    return "\n".join(part.to_markdown() for part in report.tables)


def csv(report: PageReport) -> str:
    """Return a record for each module of each model: the name of the model, and what `tree` has."""
    tables = [(model.name, tree_table(model.tree)) for model in report.models]
    columns = [column.of(itemgetter(1)) for column in tables[0][1].columns]
    records = [(name, line) for name, table in tables for line in table.rows]
    return csv_text([csv_only({"model": itemgetter(0)}), *columns], records)


def html(report: PageReport) -> str:
    """Return the page as text; it works offline and asks nothing of the network."""
    subject = report.models[0].tree.subject
    names = [model.name for model in report.models]
    titles = [title(model.tree) for model in report.models]
    subtitles = list(dict.fromkeys(subtitle(model.tree) for model in report.models))
    totals = [model.tree.totals for model in report.models]
    are_tied = any(total.layer_params != total.distinct_params for total in totals)
    headings = names if len(subtitles) == 1 and len(set(names)) == len(names) else titles
    return filled(
        "report.html",
        title=", ".join(titles),
        shown_names=names,
        subtitles=subtitles,
        models=[
            {"title": heading, "sections": _sections(model, are_tied=are_tied)}
            for heading, model in zip(headings, report.models, strict=True)
        ],
        diff=None if report.diff is None else _differences(report.diff, report.models),
        written=f"Written on {report.written} by bertscope {subject.bertscope_version} "
        f"with torch {subject.torch_version}.",
        command=page_command(report),
    )


def _sections(model: ModelPart, *, are_tied: bool) -> dict[str, dict[str, Any]]:
    drawn, config = parameter_map(model.tensors, model.tree), model.tree.subject.config or {}
    # As config.json writes it, text without its quotes.
    value = Column("value", lambda pair: pair[1] if isinstance(pair[1], str) else json.dumps(pair[1]))
    return {
        "overview": {"verdict": verdict(model), "figures": figures(model, are_tied=are_tied)},
        "fit": {} if model.fit is None else _fit(model, model.fit),
        "memory": _memory(model),
        "parameters": {
            "map": drawn,
            "roles": _roles(color for *_, color, _ in drawn["nodes"]),
            "table": _numbers_first(tree_table(model.tree)),
            "notes": [f"{name}: {value}" if name else value for name, value in footer(model.tree)],
            "commands": [_command("tree", [model]), _command("count", [model], "--by parameter")],
        },
        "FLOPs": _flops(model),
        "forward": _forward(model),
        "configuration": {"table": Table([Column("field", itemgetter(0)), value], list(config.items()))},
    }


def _differences(diff: DiffReport, models: Sequence[ModelPart]) -> dict[str, Any]:
    a, b = diff.a, diff.b
    names = ("architecture", "attention", "lora")
    same = {name: one for name in names if (one := getattr(a, name)) == getattr(b, name)}
    options = [f"--{name} {shlex.quote(one)}" for name, one in same.items() if one]
    sizes = setting_options(_sizes(*models, batch=diff.batch, seq=diff.seq))
    command = "bertscope diff", shlex.quote(a.name), shlex.quote(b.name), sizes
    return {
        "sides": [f"{key}: {side.name} ({side.architecture})" for key, side in (("a", a), ("b", b))],
        "tables": [table for table in diff_parts(diff) if table.rows],
        "notes": diff_notes(diff),
        "commands": [" ".join([*command, *options])],
    }


def _numbers_first(table: Table) -> Table:
    """Return the table with the columns as a narrow screen shows them: names, numbers, words, details last."""
    first, *rest = table.columns
    rest.sort(key=lambda column: (not column.right, column.detail))
    return replace(table, columns=[first, *rest])


def _flops(model: ModelPart) -> dict[str, Any]:
    flops, training, lines = model.flops, model.training, [*flops_view.lines(model.flops, None)]
    lines.append(("training step", f"{count_text(training.rows[0].total.matmul_flops)} FLOPs"))
    for item in flops.conventions:
        lines.append((f"as {item.name} counts", f"{count_text(item.value)} {item.unit} ({item.how}; {item.source})"))
    points = sorted((point.seq, point.forward_flops) for point in flops.sweep)
    bars = flops_bars(flops)
    columns = [
        attribute("module", "path", missing="(model)"),
        number("copies", "copies"),
        number("FLOPs", "total.matmul_flops", flops_text),
        number("elementwise", "total.elementwise_flops", flops_text),
        number("bytes moved", "total.bytes_moved", bytes_text),
        attribute("type", "type"),
    ]
    return {
        "bars": bars,
        "roles": _roles(color for *_, color in bars["bars"]),
        "lengths": {
            "kind": "line",
            "scale": "lengths",
            "top": max(flops for _, flops in points) or 1,
            "longest": points[-1][0],
            "x": "sequence length",
            "y": "forward FLOPs, matrix products",
            "points": [(seq, flops, f"{flops_text(flops)} ({count_text(flops)})") for seq, flops in points],
        },
        "table": Table(columns, flops.rows),
        "notes": [f"{name}: {text}" for name, text in lines],
        "commands": [
            flops_command(model, model.seq, "--convention torch"),
            flops_command(model, model.seq, is_training=True),
            *([flops_command(model, ",".join(str(seq) for seq, _ in points))] if len(points) > 1 else []),
        ],
    }


def _memory(model: ModelPart) -> dict[str, Any]:
    memory = model.memory
    return {
        "timeline": memory_charts(memory),
        "table": variants_table(memory),
        "saved": _numbers_first(saved_table(memory)),
        "notes": [
            *conclusions(memory),
            "A long step is thinned out: in each stretch the highest and the last point are drawn, so the peak is "
            "never lost.",
            *footnotes(memory),
        ],
        "commands": [estimate_command(model)],
    }


def _fit(model: ModelPart, fit: FitReport) -> dict[str, Any]:
    margin = fit.rows[0].cost.margin
    free = f", with a margin of {margin_text(margin)}" * bool(margin)
    memory = bytes_text(fit.budget_bytes)
    where = f"on {fit.gpu.name} ({memory})" if fit.gpu else f"in {memory}"
    at = "" if "seq" in model.idle else f" at sequence length {model.seq}"
    section: dict[str, Any] = {
        "heading": f"Largest batches that fit {where}{at}{free}",
        "table": Table(fit_words.columns(replace(fit, length_given=True)), fit.rows),  # the heading has the length
        "notes": [note for note in fit_words.notes(fit) if not isinstance(note, Heading)],
        "commands": [fit_command(model, report) for report in (fit, model.batch_fit) if report],
    }
    if (plan := model.plan) is not None:
        section |= {"plan_answer": plan_words.verdict(plan), "plan_lines": plan_words.plan_lines(plan)}
        columns = [column for column in plan_words.columns(plan) if column.title != "extra FLOPs"]  # as `recomputed`
        section["plans"] = Table(columns, plan.rows)
        section["plan_chart"] = markup(plan_words.plan_svg(plan))
    return section


def _forward(model: ModelPart) -> dict[str, Any]:
    graphs = [graph for graph in (model.forward, model.layer) if graph is not None]
    options = f"--kind forward {setting_options(_sizes(model))}".strip()
    paths = [next(expand(graph.path)) for graph in graphs]  # any of the equal layers represents all
    commands = [_command("diagram", [model], path, options) for path in paths]
    commands = commands or [_command("diagram", [model], "--kind tree")]
    return {"pictures": [_picture(graph) for graph in graphs], "commands": commands}


def _picture(graph: GraphReport) -> dict[str, Any]:
    """Return the picture, or Mermaid text if nothing draws one."""
    caption = graph.path or "the model"
    try:
        drawn = re.sub(r' id="[^"]*"', "", inline_svg(graph))  # a page has several pictures, and one of each id
    except BertscopeError as error:
        return {"caption": caption, "svg": None, "failure": str(error), "mermaid": mermaid(graph)}
    named = f'<svg role="img" aria-label="{html_text(caption)}" '
    return {"caption": caption, "svg": markup(drawn.replace("<svg ", named, 1))}


# ---- the data of the charts, which charts.js draws; those of one `scale` share the axis up to their highest `top` ----


# The role of a module -> the names and classes of that module or of one around it, of BERTs and of other families.
_ROLES = {
    "LayerNorm": "LayerNorm|RMSNorm|^ln_\\w",
    "attention": "[Aa]ttention|^attn$",
    "embeddings": "[Ee]mbedding",
    "feed-forward": "^intermediate$|^output$|MLP|FeedForward|FFN|MoeBlock|Dense\\w*Dense|^mlp$|^fc[12]$",
    "pooler and heads": "[Pp]ooler|[Hh]ead$|^cls$|^classifier$|_outputs$|^score$",
}


def role(path: str, types: Mapping[str, str]) -> str:
    """Return the role of a module or tensor, by its path and the classes on it; empty for several roles or another."""
    parts = path.split(".")
    around = accumulate(parts, "{}.{}".format)
    names = [*parts, *(types.get(outer, "") for outer in around)]
    return next((role for role, pattern in _ROLES.items() if any(re.search(pattern, name) for name in names)), "")


def _role_color(path: str, types: Mapping[str, str]) -> str:
    return variable("role", known) if (known := role(path, types)) else "var(--mixed)"


def _roles(shown: Iterable[str]) -> dict[str, str]:
    used = set(shown)
    return {name: color for name in ROLES if (color := variable("role", name)) in used}


def parameter_map(tensors: CountReport, tree: TreeReport) -> dict[str, Any]:
    """Draw a treemap of every tensor in its module, equal layers in one box; a tied tensor is where it counts."""
    shown = {path: row.path for row in tree.rows for path in expand(row.path)}  # the tree shows equal layers once
    leaves: dict[str, list[CountRow]] = {}
    sizes, inside = Counter[str](), dict[str, dict[str, None]]()  # of each path: its elements, the paths directly in it
    for tensor in tensors.rows:
        if tensor.in_layer_sum:
            module, dot, name = tensor.path.rpartition(".")
            leaf = f"{shown.get(module, module)}{dot}{name}"
            leaves.setdefault(leaf, []).append(tensor)
            paths = ["", *accumulate(leaf.split("."), "{}.{}".format)]
            sizes.update(dict.fromkeys(paths, tensor.params))
            for outer, path in pairwise(paths):
                inside.setdefault(outer, {})[path] = None
    types = {row.path: row.type for row in tree.rows}
    nodes: list[tuple[int, str, int, str, list[str]]] = []
    waiting = [("", "", -1)]  # paths with the one around them, and its number
    while waiting:
        path, outer, parent = waiting.pop()
        while len(inside.get(path, ())) == 1:  # no box that holds only one other
            [path] = inside[path]
        lines = [path or "(model)", *([types[path]] if path in types else [])]
        if path in leaves:
            copies = len(leaves[path])
            lines.append((f"{copies} x " if copies > 1 else "") + str(list(leaves[path][0].shapes[0] or ())))
        lines.append(f"{counted(sizes[path], 'parameter')}, {share_text(sizes[path] / (sizes[''] or 1))}")
        name = path[len(outer) :].lstrip(".") if nodes else tree.subject.architecture
        waiting += [(inner, path, len(nodes)) for inner in reversed(inside.get(path, {}))]
        nodes.append((parent, name, sizes[path], _role_color(path, types), lines))
    return {"kind": "map", "scale": "parameters", "top": sizes[""], "back_label": "Back", "nodes": nodes}


def flops_bars(report: FlopsReport) -> dict[str, Any]:
    """Draw each module's FLOPs without its parts, equal layers together; the bars add up to the model."""
    flops_of = {row.path: row.forward.matmul_flops for row in report.rows}
    types = {row.path: row.type for row in report.rows}
    inner = set()
    for row in report.rows[1:]:
        parent = row.path.rpartition(".")[0]
        flops_of[parent] -= row.forward.matmul_flops
        inner.add(parent)
    whole, bars = sum(flops_of.values()), []
    for flops, path in sorted(((flops, path) for path, flops in flops_of.items() if flops > 0), reverse=True):
        before, layer, rest = path.partition("layer.")
        short = layer + rest if layer and before.endswith("encoder.") else path or "(model)"
        text = f"{flops_text(flops)} ({count_text(flops)}), {share_text(flops / whole)}"
        label = f"{short}{' itself' * (path in inner)}  {flops_text(flops)}, {100 * flops / whole:.0f} %"
        bars.append((path or "(model)", label, flops, text, _role_color(path, types)))
    return {
        "kind": "bars",
        "scale": "flops",
        "top": bars[0][2] if bars else 1,
        "x": "forward FLOPs, matrix products",
        "bars": bars,
    }
