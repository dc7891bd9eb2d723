"""The page of a model, or of two side by side: charts by plotly, pictures by Graphviz, tables that sort and search."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial

from bertscope.errors import MissingExtraError
from bertscope.render import fit as fit_words
from bertscope.render.diagram.diagram import inline_svg, mermaid
from bertscope.render.diff import parts as diff_parts
from bertscope.render.footer import footer, title
from bertscope.render.memory import kept_columns, kept_rows, memory_columns, memory_lines
from bertscope.render.memory_words import conclusions, footnotes
from bertscope.render.page.charts import flops_bars, lengths
from bertscope.render.page.page import chart, legend, page, searchable, tiles
from bertscope.render.page.parameter_map import parameter_map, roles
from bertscope.render.table import Column
from bertscope.render.timeline.html import memory_charts
from bertscope.render.tree import tree_table
from bertscope.reports.diagram import GraphReport
from bertscope.reports.layer_ranges import expand
from bertscope.reports.page import DiffReport, ModelPart, PageReport
from bertscope.units import bytes_text, count_text, html_text, parse_bytes

_SECTIONS = ("overview", "parameters", "FLOPs", "memory", "fit", "forward", "configuration")


def html(report: PageReport) -> str:
    """The page as text; it works offline and asks nothing of the network."""
    names = " and ".join(title(model.tree) for model in report.models)
    sections = _SECTIONS if report.diff is None else ("differences", *_SECTIONS)
    links = "".join(f'<a href="#{name.lower()}">{name}</a> ' for name in sections)
    body = f"<header><h1>{html_text(names)}</h1>\n<nav>{links}</nav></header>\n<main>\n"
    if report.diff is not None:
        body += _section("differences", _differences(report.diff))
    body += "".join(_both(report, name) for name in _SECTIONS)
    return page(f"{names}: bertscope", body + "</main>\n")


def _both(report: PageReport, name: str) -> str:
    """One section for every model, side by side where there is room."""
    memory = partial(_memory, level=3 if len(report.models) == 1 else 4)
    writers: dict[str, Callable[[ModelPart, str], str]] = {
        "overview": _overview, "parameters": _parameters, "FLOPs": _flops, "memory": memory,
        "fit": _fit, "forward": _forward, "configuration": _configuration,
    }  # fmt: skip
    write = writers[name]
    columns = [write(model, f"{name.lower()}-{number}") for number, model in enumerate(report.models)]
    if len(columns) > 1:
        heads = [f"<h3>{html_text(title(model.tree))}</h3>\n" for model in report.models]
        columns = [f"<section>{head}{column}</section>\n" for head, column in zip(heads, columns, strict=True)]
        return _section(name, f'<div class="charts">{"".join(columns)}</div>\n')
    return _section(name, columns[0])


def _section(name: str, content: str) -> str:
    return f'<section id="{name.lower()}">\n<h2>{html_text(name)}</h2>\n{content}</section>\n'


def _notes(lines: list[str], *commands: str) -> str:
    """How the numbers were obtained, and what gives them in a terminal."""
    items = [html_text(line) for line in lines] + [f"<code>{html_text(command)}</code>" for command in commands]
    return f'<ul class="notes">{"".join(f"<li>{item}</li>" for item in items)}</ul>\n'


def _command(model: ModelPart, name: str, words: str = "") -> str:
    """What gives the numbers in a terminal."""
    subject = model.tree.subject
    return (
        f"bertscope {name} {shlex.quote(subject.name)}{words and ' '}{words}"
        f" --architecture {subject.architecture} --attention {subject.attention}"
    )


def _table(ident: str, name: str, columns: Sequence[Column], rows: Sequence[object]) -> str:
    figures = {number for number, column in enumerate(columns) if column.right}
    cells = [[column.text(row) for column in columns] for row in rows]
    return searchable(ident, name, [column.title for column in columns], cells, figures)


def _differences(diff: DiffReport) -> str:
    """What tells the two apart, as the command says it."""
    tables = "".join(
        _table(f"diff-{number}", f"differing {columns[0].title}s", columns, rows)
        for number, (columns, rows) in enumerate(diff_parts(diff))
    )
    a, b = diff.a, diff.b
    words = f"a: {html_text(a.name)} ({a.architecture})<br>b: {html_text(b.name)} ({b.architecture})"
    same = f" --architecture {a.architecture}" if a.architecture == b.architecture else ""
    if a.attention is not None and a.attention == b.attention:
        same += f" --attention {a.attention}"
    sizes = f"--batch {diff.batch} --seq {diff.seq}"
    command = f"bertscope diff {shlex.quote(a.name)} {shlex.quote(b.name)} {sizes}{same}"
    lines = ["FLOPs: matrix products alone, a multiply-add is 2"] + ["the two do not differ"] * diff.is_empty
    return f"<p>{words}</p>\n{tables}{_notes(lines, command)}"


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
    button = f'<p><button type="button" data-chart="{ident}-map">as icicle</button></p>\n'
    columns, rows = tree_table(model.tree)
    picture = chart("parameters by module, down to tensors", drawn, ident=f"{ident}-map")
    notes = _notes(lines, _command(model, "tree"), _command(model, "count", "--by parameter"))
    return legend(roles(drawn)) + picture + button + _table(ident, "modules", columns, rows) + notes


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
    lengths_asked = ",".join(str(point.seq) for point in sorted(flops.sweep, key=lambda point: point.seq))
    asked = (f"--seq {model.seq} --convention torch", f"--seq {model.seq} --mode training", f"--seq {lengths_asked}")
    commands = [_command(model, "flops", f"--batch {model.batch} {words}") for words in asked]
    columns = [
        Column("module", lambda row: row.path or "(model)"),
        Column("type", lambda row: row.type),
        Column("copies", lambda row: count_text(row.copies), right=True),
        Column("FLOPs", lambda row: count_text(row.total.matmul_flops), right=True),
        Column("elementwise", lambda row: count_text(row.total.elementwise_flops), right=True),
        Column("bytes moved", lambda row: bytes_text(row.total.bytes_moved), right=True),
    ]
    charts = chart("forward FLOPs by module", flops_bars(flops)) + chart("forward FLOPs over lengths", lengths(flops))
    return (
        f'<div class="charts">{charts}</div>'
        + _table(ident, "FLOPs by module", columns, flops.rows)
        + _notes(lines, *commands)
    )


def _memory(model: ModelPart, ident: str, level: int) -> str:
    memory = model.memory
    tables = _table(f"{ident}-parts", "parts", memory_columns(memory), list(memory_lines(memory)))
    tables += _table(f"{ident}-kept", "what is kept", kept_columns(memory), kept_rows(memory))
    sizes = f"--batch {model.batch} --seq {model.seq}"
    command = _command(model, "estimate", f"{sizes} --checkpointing none,full")
    return memory_charts(memory, level) + tables + _notes([*conclusions(memory), *footnotes(memory)], command)


def _fit(model: ModelPart, ident: str) -> str:
    if model.fit is None:
        return "<p>not asked for</p>\n"
    fit = model.fit
    heading = f"<p>{html_text(fit_words.heading(fit).strip())}</p>\n"
    lengths = ",".join(str(seq) for seq in dict.fromkeys(row.seq for row in fit.rows))
    strategies = ",".join(dict.fromkeys(row.checkpointing for row in fit.rows))
    asked = f"--budget {_size(fit.budget_bytes)} --seq {lengths} --checkpointing {strategies}"
    table = _table(ident, "ways", fit_words.columns(fit), fit.rows)
    return heading + table + _notes(list(fit_words.notes(fit)), _command(model, "fit", asked))


def _size(budget_bytes: int) -> str:
    """A budget as the command takes it: `16.00GiB`, or the bytes where that is not all."""
    text = bytes_text(budget_bytes).replace(" ", "").replace(",", "")
    return text if parse_bytes(text) == budget_bytes else str(budget_bytes)


def _forward(model: ModelPart, ident: str) -> str:
    graphs = [model.forward] if model.layer is None else [model.forward, model.layer]
    one = [next(expand(graph.path)) for graph in graphs]  # any of the equal layers stands for all
    words = f"--kind forward --batch {model.batch} --seq {model.seq}"
    commands = [_command(model, "diagram", f"{path} {words}".strip()) for path in one]
    return f'<div class="charts">{"".join(map(_picture, graphs))}</div>\n' + _notes([], *commands)


def _picture(graph: GraphReport) -> str:
    where = graph.path or "the whole model"
    try:
        picture = inline_svg(graph)
    except MissingExtraError as error:
        picture = f"<p>{html_text(str(error))}</p>\n<pre>{html_text(mermaid(graph))}</pre>\n"
    return f'<figure class="scroll" tabindex="0"><figcaption>{html_text(where)}</figcaption>\n{picture}</figure>\n'


def _configuration(model: ModelPart, ident: str) -> str:
    columns = [Column("field", lambda pair: pair[0]), Column("value", lambda pair: _value(pair[1]))]
    subject = model.tree.subject
    versions = [f"torch {subject.torch_version}, bertscope {subject.bertscope_version}"]
    return _table(ident, "settings", columns, list((subject.config or {}).items())) + _notes(versions)


def _value(value: object) -> str:
    """As config.json writes it; text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)
