"""The page of a model, or of two side by side: charts by plotly, pictures by Graphviz, tables that sort and search."""

import json
import shlex
from typing import Any

from bertscope.errors import MissingExtraError
from bertscope.render import fit as fit_words
from bertscope.render.diagram.diagram import inline_svg, mermaid
from bertscope.render.diff import notes as diff_notes
from bertscope.render.diff import parts as diff_parts
from bertscope.render.footer import footer, title
from bertscope.render.memory import kept_columns, kept_rows, memory_columns, memory_lines
from bertscope.render.memory_words import conclusions, footnotes
from bertscope.render.page.charts import flops_bars, lengths, parameter_map, roles
from bertscope.render.page.templating import markup, page
from bertscope.render.table import Column, number
from bertscope.render.timeline.html import memory_charts
from bertscope.render.tree import tree_table
from bertscope.reports.diagram import GraphReport
from bertscope.reports.layer_ranges import expand
from bertscope.reports.memory import FitReport
from bertscope.reports.page import DiffReport, ModelPart, PageReport
from bertscope.units import bytes_text, count_text, parse_bytes


def html(report: PageReport) -> str:
    """Return the page as text; it works offline and asks nothing of the network."""
    return page(
        "report.html",
        title=" and ".join(title(model.tree) for model in report.models),
        models=[{"title": title(model.tree), "sections": _sections(model)} for model in report.models],
        diff=None if report.diff is None else _differences(report.diff),
    )


def _sections(model: ModelPart) -> dict[str, dict[str, Any]]:
    """Return what each section of the page shows, in their order."""
    return {
        "overview": {"figures": _figures(model)},
        "parameters": _parameters(model),
        "FLOPs": _flops(model),
        "memory": _memory(model),
        "fit": {} if model.fit is None else _fit(model, model.fit),
        "forward": _forward(model),
        "configuration": _configuration(model),
    }


def _command(model: ModelPart, name: str, words: str = "") -> str:
    """Return the command that gives the numbers in a terminal."""
    subject = model.tree.subject
    given = {"architecture": subject.architecture, "attention": subject.attention, "lora": subject.lora}
    is_own = ":" in subject.name  # module:attribute, which decides all of them by itself
    options = "".join(f" --{key} {value}" for key, value in given.items() if value and not is_own)
    if name in ("flops", "estimate", "fit"):
        options += "".join(f" --input {text}" for text in model.memory.run["inputs"])
    return f"bertscope {name} {shlex.quote(subject.name)}{words and ' '}{words}{options}"


def _differences(diff: DiffReport) -> dict[str, Any]:
    """Return the differences as `diff` shows them."""
    a, b = diff.a, diff.b
    same = f" --architecture {a.architecture}" if a.architecture == b.architecture else ""
    if a.attention is not None and a.attention == b.attention:
        same += f" --attention {a.attention}"
    if a.lora is not None and a.lora == b.lora:
        same += f" --lora {a.lora}"
    sizes = f"--batch {diff.batch} --seq {diff.seq}"
    return {
        "a": a,
        "b": b,
        "tables": diff_parts(diff),
        "notes": diff_notes(diff),
        "commands": [f"bertscope diff {shlex.quote(a.name)} {shlex.quote(b.name)} {sizes}{same}"],
    }


def _figures(model: ModelPart) -> list[tuple[str, str]]:
    """Return the answers in a few figures; the sections below say how each was obtained."""
    totals, size = model.tree.totals, f"{model.batch}\u00a0x\u00a0{model.seq}"
    figures = [(count_text(totals.distinct_params), "unique parameters, every tensor once")]
    if totals.layer_params != totals.distinct_params:
        figures.append((count_text(totals.layer_params), "parameters as sum over layers, tied ones at each"))
    figures += [
        (bytes_text(totals.fp32_bytes), "of weights in fp32"),
        (count_text(model.flops.rows[0].total.matmul_flops), f"FLOPs forward, {size}"),
        (count_text(model.training.rows[0].total.matmul_flops), f"FLOPs of a training step, {size}"),
    ]
    run = model.memory.run
    step = f"peak of a training step, {size}, {run['dtype']}, {run['optimizer']}, {run['device']}"
    figures += [
        (bytes_text(variant.memory.peak.peak_bytes), f"{step}, checkpointing {variant.checkpointing}")
        for variant in model.memory.variants
        if variant.memory is not None
    ]
    if model.fit is not None:
        budget = bytes_text(model.fit.budget_bytes)
        figures += [
            (count_text(row.batch), f"largest batch in {budget} at length {row.seq}, {row.precision}, "
             f"checkpointing {row.checkpointing}")
            for row in model.fit.rows
            if row.seq == model.fit.rows[-1].seq and row.precision == model.fit.rows[0].precision
        ]  # fmt: skip
    return figures


def _parameters(model: ModelPart) -> dict[str, Any]:
    drawn = parameter_map(model.tensors, model.tree)
    columns, rows = tree_table(model.tree)
    return {
        "map": drawn,
        "roles": roles(drawn),
        "columns": columns,
        "rows": rows,
        "notes": [f"{name}: {value}" if name else value for name, value in footer(model.tree)],
        "commands": [_command(model, "tree"), _command(model, "count", "--by parameter")],
    }


def _flops(model: ModelPart) -> dict[str, Any]:
    flops, training = model.flops, model.training
    size = f"batch {model.batch}, sequence {model.seq}"
    lines = [
        f"forward, {size}: {count_text(flops.rows[0].total.matmul_flops)} FLOPs",
        f"training step, {size}: {count_text(training.rows[0].total.matmul_flops)} FLOPs",
        *(f"as {item.name} counts: {count_text(item.value)} {item.unit} ({item.how}; {item.source})"
          for item in flops.conventions),
        "computed: the operators that torch dispatches; matrix products, a multiply-add is 2",
    ]  # fmt: skip
    lengths_asked = ",".join(str(point.seq) for point in sorted(flops.sweep, key=lambda point: point.seq))
    asked = (f"--seq {model.seq} --convention torch", f"--seq {model.seq} --mode training", f"--seq {lengths_asked}")
    commands = [_command(model, "flops", f"--batch {model.batch} {words}") for words in asked]
    columns = [
        Column("module", lambda row: row.path or "(model)"),
        Column("type", lambda row: row.type),
        number("copies", "copies"),
        number("FLOPs", "total.matmul_flops"),
        number("elementwise", "total.elementwise_flops"),
        number("bytes moved", "total.bytes_moved", bytes_text),
    ]
    return {
        "bars": flops_bars(flops),
        "lengths": lengths(flops),
        "columns": columns,
        "rows": flops.rows,
        "notes": lines,
        "commands": commands,
    }


def _memory(model: ModelPart) -> dict[str, Any]:
    memory = model.memory
    sizes = f"--batch {model.batch} --seq {model.seq}"
    strategies = ",".join(variant.checkpointing for variant in memory.variants)
    return {
        "timeline": memory_charts(memory),
        "columns": memory_columns(memory),
        "rows": list(memory_lines(memory)),
        "kept_columns": kept_columns(memory),
        "kept_rows": kept_rows(memory),
        "notes": [*conclusions(memory), *footnotes(memory)],
        "commands": [_command(model, "estimate", f"{sizes} --checkpointing {strategies}")],
    }


def _fit(model: ModelPart, fit: FitReport) -> dict[str, Any]:
    lengths = ",".join(str(seq) for seq in dict.fromkeys(row.seq for row in fit.rows))
    strategies = ",".join(dict.fromkeys(row.checkpointing for row in fit.rows))
    budget = bytes_text(fit.budget_bytes).replace(" ", "").replace(",", "")
    if parse_bytes(budget) != fit.budget_bytes:  # `16.00GiB` would be rounded
        budget = str(fit.budget_bytes)
    asked = f"--budget {budget} --seq {lengths} --checkpointing {strategies}"
    return {
        "heading": fit_words.heading(fit).strip(),
        "columns": fit_words.columns(fit),
        "rows": fit.rows,
        "notes": list(fit_words.notes(fit)),
        "commands": [_command(model, "fit", asked)],
    }


def _forward(model: ModelPart) -> dict[str, Any]:
    graphs = [graph for graph in (model.forward, model.layer) if graph is not None]
    if not graphs:
        notes = ["left out: the dataflow is drawn for BERTs only; diagram --kind tree draws any model"]
        return {"pictures": [], "notes": notes, "commands": [_command(model, "diagram", "--kind tree")]}
    paths = [next(expand(graph.path)) for graph in graphs]  # any of the equal layers represents all
    words = f"--kind forward --batch {model.batch} --seq {model.seq}"
    commands = [_command(model, "diagram", f"{path} {words}".strip()) for path in paths]
    return {"pictures": [_picture(graph) for graph in graphs], "commands": commands}


def _picture(graph: GraphReport) -> dict[str, Any]:
    """Return the picture, or its Mermaid text where nothing draws it."""
    try:
        return {"path": graph.path, "svg": markup(inline_svg(graph))}
    except MissingExtraError as error:
        return {"path": graph.path, "svg": None, "failure": str(error), "mermaid": mermaid(graph)}


def _configuration(model: ModelPart) -> dict[str, Any]:
    subject = model.tree.subject
    return {
        "columns": [Column("field", lambda pair: pair[0]), Column("value", lambda pair: _value(pair[1]))],
        "rows": list((subject.config or {}).items()),
        "notes": [f"torch {subject.torch_version}, bertscope {subject.bertscope_version}"],
    }


def _value(value: object) -> str:
    """Return a value as config.json writes it, text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)
