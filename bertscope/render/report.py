"""The page of a model, or of two side by side: charts by plotly, pictures by Graphviz, tables that sort and search."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bertscope.diagram_reports import GraphReport
from bertscope.errors import MissingExtraError
from bertscope.page_reports import ModelPart, PageReport
from bertscope.render import fit as fit_words
from bertscope.render.columns import Column
from bertscope.render.diagram import inline_svg, mermaid
from bertscope.render.diff import parts as diff_parts
from bertscope.render.footer import footer, title
from bertscope.render.memory import kept_columns, kept_rows, memory_columns, memory_lines
from bertscope.render.memory_words import conclusions, footnotes
from bertscope.render.page import chart, legend, page, searchable, tiles
from bertscope.render.parameter_map import parameter_map, roles
from bertscope.render.report_charts import flops_bars, lengths
from bertscope.render.timeline_html import memory_charts
from bertscope.render.tree import tree_table
from bertscope.units import bytes_text, count_text

_SECTIONS = ("overview", "parameters", "FLOPs", "memory", "fit", "forward", "configuration")


def html(report: PageReport) -> str:
    """The page as text; it works offline and asks nothing of the network."""
    names = " and ".join(title(model.tree) for model in report.models)
    links = "".join(f'<a href="#{name.lower()}">{name}</a> ' for name in _SECTIONS)
    body = f"<header><h1>{escape(names)}</h1>\n<nav>{links}</nav></header>\n<main>\n"
    if report.diff is not None:
        tables = enumerate(diff_parts(report.diff))
        body += _section("differences", "".join(_table(f"diff-{number}", *columns) for number, columns in tables))
    body += "".join(_both(report, name) for name in _SECTIONS)
    return page(f"{names}: bertscope", body + "</main>\n")


def _both(report: PageReport, name: str) -> str:
    """One section for every model, side by side where there is room."""
    write = {"overview": _overview, "parameters": _parameters, "FLOPs": _flops, "memory": _memory,
             "fit": _fit, "forward": _forward, "configuration": _configuration}[name]  # fmt: skip
    columns = [write(model, f"{name.lower()}-{number}") for number, model in enumerate(report.models)]
    if len(columns) > 1:
        heads = [f"<h3>{escape(title(model.tree))}</h3>\n" for model in report.models]
        columns = [f"<section>{head}{column}</section>\n" for head, column in zip(heads, columns, strict=True)]
        return _section(name, f'<div class="charts">{"".join(columns)}</div>\n')
    return _section(name, columns[0])


def _section(name: str, content: str) -> str:
    return f'<section id="{name.lower()}">\n<h2>{escape(name)}</h2>\n{content}</section>\n'


def _notes(lines: list[str], command: str = "") -> str:
    """How the numbers were obtained, and what gives them in a terminal."""
    items = [escape(line) for line in lines] + ([f"<code>{escape(command)}</code>"] if command else [])
    return f'<ul class="notes">{"".join(f"<li>{item}</li>" for item in items)}</ul>\n'


def _command(model: ModelPart, name: str, *words: str) -> str:
    """What gives the numbers in a terminal."""
    subject = model.tree.subject
    return " ".join(
        [
            "bertscope",
            name,
            subject.name,
            "--architecture",
            subject.architecture,
            "--attention",
            f"{subject.attention}",
            *words,
        ]
    )


def _table(ident: str, columns: list[Column] | tuple[Column, ...], rows: Sequence[object]) -> str:
    figures = {number for number, column in enumerate(columns) if column.right}
    cells = [[column.text(row) for column in columns] for row in rows]
    return searchable(ident, [column.title for column in columns], cells, figures)


def _overview(model: ModelPart, ident: str) -> str:
    """The answers in a few figures; each stands below again, with how it was obtained."""
    totals, size = model.tree.totals, f"{model.batch}\u00a0x\u00a0{model.seq}"
    figures = [(count_text(totals.distinct_params), "parameters, every tensor once")]
    if totals.layer_params != totals.distinct_params:
        figures.append((count_text(totals.layer_params), "parameters over layers, tied ones at each"))
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
    return tiles(figures)


def _parameters(model: ModelPart, ident: str) -> str:
    lines = [f"{name}: {value}" if name else value for name, value in footer(model.tree)]
    drawn = parameter_map(model.tensors, model.tree)
    button = f'<p><button type="button" data-chart="{ident}-map">treemap or icicle</button></p>\n'
    columns, rows = tree_table(model.tree)
    picture = chart("parameters by module, down to tensors", drawn, ident=f"{ident}-map")
    notes = _notes(lines, _command(model, "tree"))
    return legend(roles(drawn)) + picture + button + _table(ident, columns, rows) + notes


def _flops(model: ModelPart, ident: str) -> str:
    flops, training = model.flops, model.training
    size = f"batch {model.batch}, sequence {model.seq}"
    lines = [
        f"forward, {size}: {count_text(flops.rows[0].total.matmul_flops)} FLOPs",
        f"training step, {size}: {count_text(training.rows[0].total.matmul_flops)} FLOPs",
        *(f"as {item.name} counts: {count_text(item.value)} {item.unit} ({item.how}; {item.source})"
          for item in flops.conventions),
        "computed: the operators dispatched on meta; matrix products, a multiply-add is 2",
    ]  # fmt: skip
    command = _command(model, "flops", f"--batch {model.batch} --seq {model.seq}")
    columns = [
        Column("module", lambda row: row.path or "(model)"),
        Column("type", lambda row: row.type),
        Column("copies", lambda row: count_text(row.copies), right=True),
        Column("FLOPs", lambda row: count_text(row.total.matmul_flops), right=True),
        Column("elementwise", lambda row: count_text(row.total.elementwise_flops), right=True),
        Column("bytes moved", lambda row: bytes_text(row.total.bytes_moved), right=True),
    ]
    charts = chart("forward FLOPs by module", flops_bars(flops)) + chart("forward FLOPs over lengths", lengths(flops))
    return f'<div class="charts">{charts}</div>' + _table(ident, columns, flops.rows) + _notes(lines, command)


def _memory(model: ModelPart, ident: str) -> str:
    memory = model.memory
    tables = _table(f"{ident}-parts", memory_columns(memory), list(memory_lines(memory)))
    tables += _table(f"{ident}-kept", kept_columns(memory), kept_rows(memory))
    sizes = f"--batch {model.batch} --seq {model.seq}"
    command = _command(model, "estimate", f"{sizes} --checkpointing none,full")
    return memory_charts(memory) + tables + _notes([*conclusions(memory), *footnotes(memory)], command)


def _fit(model: ModelPart, ident: str) -> str:
    if model.fit is None:
        return "<p>not asked for</p>\n"
    heading = f"<p>{escape(fit_words.heading(model.fit).strip())}</p>\n"
    return (
        heading + _table(ident, fit_words.columns(model.fit), model.fit.rows) + _notes(list(fit_words.notes(model.fit)))
    )


def _forward(model: ModelPart, ident: str) -> str:
    return _picture(model.forward) + (_picture(model.layer) if model.layer is not None else "")


def _picture(graph: GraphReport) -> str:
    where = graph.path or "the whole model"
    try:
        picture = inline_svg(graph)
    except MissingExtraError as error:
        picture = f"<p>{escape(str(error))}</p>\n<pre>{escape(mermaid(graph))}</pre>\n"
    return f'<figure class="scroll"><figcaption>{escape(where)}</figcaption>\n{picture}</figure>\n'


def _configuration(model: ModelPart, ident: str) -> str:
    columns = [Column("field", lambda pair: pair[0]), Column("value", lambda pair: str(pair[1]))]
    subject = model.tree.subject
    versions = [f"torch {subject.torch_version}, bertscope {subject.bertscope_version}"]
    return _table(ident, columns, list((subject.config or {}).items())) + _notes(versions)
