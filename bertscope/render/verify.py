"""A verification as text, CSV and Markdown: yes or no first, then what is wrong, then what is worth knowing."""

from collections import Counter

from bertscope.errors import one_line
from bertscope.render.checkpoint import stored_lines
from bertscope.render.console import Target
from bertscope.render.footer import lines_markdown, lines_text
from bertscope.render.table import Column, copies_text, csv_only, csv_text, markdown_text, number, table_text, values
from bertscope.reports.base import Shape
from bertscope.reports.checkpoint import VerifyReport, VerifyRow
from bertscope.units import count_text, shape_text


def _label(row: VerifyRow) -> str:
    name = f"{row.stored_name} -> {row.name}" if row.status == "renamed" else row.name
    return one_line(name) + copies_text(row.copies)


def _side(shape: Shape, dtype: str | None) -> str:
    if shape is None:
        return ""
    return shape_text(shape) + ("" if dtype in (None, "float32") else f" {dtype}")


_COLUMNS = (
    Column("", lambda row: "no" if row.is_wrong else "ok", values("is_wrong")),
    Column("what", lambda row: row.status, values("status")),
    Column("tensor", _label, values("name", "stored_name", "copies")),
    Column("in the model", lambda row: _side(row.shape, row.dtype), values("shape"), give_up=2),
    Column("in the file", lambda row: _side(row.stored_shape, row.stored_dtype), values("stored_shape"), give_up=2),
    csv_only(values("dtype", "stored_dtype")),
    number("params", "params", give_up=3),
    Column("note", lambda row: one_line(row.note), values("note"), give_up=1),
)


def answer(report: VerifyReport) -> str:
    """Return one sentence: the checkpoint holds the model, or it does not."""
    subject, stored = report.subject, one_line(report.stored.name, limit=120)
    model = f"{one_line(subject.name, limit=120)} ({subject.architecture})"
    if report.fits:
        return f"yes: {stored} holds {model}"
    wrong = Counter[str]()
    for row in report.rows:
        if row.is_wrong:
            wrong[row.status] += row.copies
    found = [f"{count} {_WORDS[status]}" for status, count in wrong.items()]
    found += [f"{len(report.stored.problems)} problems of the file"] if report.stored.problems else []
    return f"no: {stored} does not hold {model}: {', '.join(found)}"


_WORDS = {"missing": "missing", "unexpected": "unexpected", "shape": "of another shape", "dtype": "of another dtype"}


def _footer(report: VerifyReport) -> list[tuple[str, str]]:
    counted = f"{count_text(report.matched_tensors)} of {count_text(report.model_tensors)} names are stored"
    lines = [("model", f"{count_text(report.model_distinct_params)} unique parameters; {counted}")]
    lines += stored_lines(report.stored)
    if report.fitting:
        lines.append(("what fits", f"--architecture {', '.join(report.fitting)}"))
    return [*lines, ("verified", report.obtained)]


def table(report: VerifyReport, target: Target) -> str:
    """Return the report for the terminal."""
    body = table_text(_COLUMNS, report.rows, target, lambda row: row.is_wrong) if report.rows else ""
    return f"{answer(report)}\n{body}{lines_text(_footer(report), 17)}"


def markdown(report: VerifyReport) -> str:
    """Return the report for a pull request."""
    rows = markdown_text(_COLUMNS, report.rows) + "\n" if report.rows else ""
    return f"**{answer(report)}**\n\n{rows}{lines_markdown(_footer(report))}"


def csv(report: VerifyReport) -> str:
    """Return the findings for a spreadsheet."""
    return csv_text(_COLUMNS, report.rows)
