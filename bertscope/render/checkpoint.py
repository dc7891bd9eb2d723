"""The contents of a checkpoint as a table, CSV and Markdown."""

from collections import Counter

from bertscope.errors import one_line
from bertscope.render.console import Target
from bertscope.render.footer import lines_markdown, lines_text
from bertscope.render.table import Column, copies_text, csv_text, markdown_text, number, table_text, values
from bertscope.reports.checkpoint import CheckpointReport, Stored
from bertscope.units import bytes_text, count_text, shape_text

_SHOWN_FILES = 3


def _columns(report: CheckpointReport) -> list[Column]:
    return [
        Column("tensor", lambda row: one_line(row.name) + copies_text(row.copies), values("name")),
        Column("dtype", lambda row: row.dtype, values("dtype"), give_up=2),
        Column("shape", lambda row: "" if row.shape is None else shape_text(row.shape), values("shape", "copies"),
               give_up=4),
        number("params", "params"),
        number("bytes", "bytes", bytes_text, give_up=3),
        Column("shares the storage of", lambda row: one_line(row.shares or ""), values("shares"), give_up=1,
               shown=any(row.shares for row in report.rows)),
    ]  # fmt: skip


def title(report: CheckpointReport) -> str:
    """Return `model.safetensors: safetensors, 62 tensors`."""
    stored = report.stored
    return f"{one_line(stored.name, limit=120)}: {stored.format}, {count_text(stored.tensors)} tensors"


def stored_lines(stored: Stored) -> list[tuple[str, str]]:
    """Return the sums: parameters, dtypes, and the file's size to the last byte."""
    dtypes = ", ".join(f"{count_text(row.params)} in {row.dtype} ({bytes_text(row.bytes)})" for row in stored.dtypes)
    sums = Counter[str]()
    for part in stored.parts:
        sums[part.what] += part.bytes
    parts = " + ".join(f"{count_text(count)} {what}" for what, count in sums.items())
    lines = [("stored", f"{count_text(stored.distinct_params)} elements (every storage once): {dtypes}")]
    if stored.stored_params != stored.distinct_params:
        lines.append(("under all names", count_text(stored.stored_params)))
    lines.append(("size", f"{count_text(stored.file_bytes)} bytes ({bytes_text(stored.file_bytes)}) = {parts}"))
    if len(stored.files) > 1:
        names = ", ".join(map(one_line, stored.files[:_SHOWN_FILES]))
        more = f" and {len(stored.files) - _SHOWN_FILES} more" if len(stored.files) > _SHOWN_FILES else ""
        lines.append(("files", f"{len(stored.files)}: {names}{more}"))
    return lines + [("problem", one_line(problem)) for problem in stored.problems]


def _footer(report: CheckpointReport) -> list[tuple[str, str]]:
    lines = stored_lines(report.stored)
    if report.stored.metadata:
        metadata = ", ".join(f"{key}: {value}" for key, value in report.stored.metadata.items())
        lines.append(("metadata", one_line(metadata, limit=200)))
    return [*lines, ("read", "only the header; nothing was loaded or run")]


def table(report: CheckpointReport, target: Target) -> str:
    """Return the report for the terminal."""
    return f"{title(report)}\n{table_text(_columns(report), report.rows, target)}{lines_text(_footer(report), 17)}"


def markdown(report: CheckpointReport) -> str:
    """Return the report for a pull request or a page."""
    body = markdown_text(_columns(report), report.rows)
    return f"**{title(report)}**\n\n{body}\n{lines_markdown(_footer(report))}"


def csv(report: CheckpointReport) -> str:
    """Return the tensors for a spreadsheet."""
    return csv_text(_columns(report), report.rows)
