"""The check report for people, for GitHub's annotations, as JUnit, and finding by finding as a table."""

from __future__ import annotations

from bertscope.errors import one_line
from bertscope.render.console import Target
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.check import CheckReport, Finding
from bertscope.units import count_text, html_text, signed_text


def text(report: CheckReport) -> str:
    """`file:line: model: what was expected, what was got`, and a last line with the sums.

    Files that could not be checked are not data: they go to stderr, one line each, by the command.
    """
    return "".join(f"{line(finding)}\n" for finding in report.having("failed")) + _summary(report)


def line(finding: Finding) -> str:
    """One finding as `file:line: model: message`."""
    if finding.status == "error":
        return one_line(finding.message)
    return one_line(f"{finding.path}:{finding.line}: {finding.model}: {finding.message}")


def _summary(report: CheckReport) -> str:
    passed, failed, errors = (len(report.having(status)) for status in ("passed", "failed", "error"))
    files = f"{report.files} {'file' if report.files == 1 else 'files'}"
    text = f"{files}: {passed} {'expectation holds' if passed == 1 else 'expectations hold'}, {failed} do not"
    return text + (f", {errors} could not be checked\n" if errors else "\n")


def github(report: CheckReport) -> str:
    """Workflow commands that GitHub shows at the file and line of the expectation."""
    lines = [
        f"::error title=bertscope check,file={_escape(finding.path, True)},line={finding.line}::"
        f"{_escape(f'{finding.model}: {finding.message}')}\n"
        for finding in report.findings
        if finding.status != "passed"
    ]
    return "".join(lines) + _summary(report)


def _escape(value: str, is_property: bool = False) -> str:
    value = one_line(value)
    value = value.replace("%", "%25")
    return value.replace(":", "%3A").replace(",", "%2C") if is_property else value


def junit(report: CheckReport) -> str:
    """One test case for each expectation."""
    failures, errors = len(report.having("failed")), len(report.having("error"))
    head = f'<testsuite name="bertscope check" tests="{len(report.findings)}" failures="{failures}" errors="{errors}">'
    cases = "".join(_case(finding) for finding in report.findings)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>{head}\n{cases}</testsuite></testsuites>\n'


def _case(finding: Finding) -> str:
    name, model, path = (_xml(text) for text in (finding.key or "readable", finding.model, finding.path))
    case = f'<testcase name="{name}" classname="{model}" file="{path}" line="{finding.line}"'
    if finding.status == "passed":
        return f"  {case}/>\n"
    tag = "error" if finding.status == "error" else "failure"
    message = _xml(finding.message)
    return f'  {case}><{tag} message="{message}">{message}</{tag}></testcase>\n'


def _xml(value: str) -> str:
    """Escaped, and without what XML 1.0 cannot hold: controls, surrogates, non-characters."""
    return html_text(one_line(value))


_COLUMNS = (
    Column("", lambda finding: {"passed": "ok", "failed": "FAILED", "error": "ERROR"}[finding.status]),
    Column("model", lambda finding: one_line(finding.model, limit=120), give_up=1),
    Column("expectation", lambda finding: one_line(finding.key)),
    Column("expected", lambda finding: _value(finding.expected), right=True),
    Column("got", lambda finding: _value(finding.got) or one_line(finding.message), right=True),
    Column("difference", lambda finding: signed_text(finding.difference) if finding.difference else "", right=True),
    Column("place", lambda finding: one_line(f"{finding.path}:{finding.line}"), give_up=2),
)


def _columns(report: CheckReport) -> list[Column]:
    """Without differences no column of them."""
    some = any(finding.difference for finding in report.findings)
    return [column for column in _COLUMNS if some or column.title != "difference"]


def _value(value: int | str | None) -> str:
    if value is None:
        return ""
    return count_text(value) if isinstance(value, int) else one_line(value)


def table(report: CheckReport, target: Target) -> str:
    """For the terminal: every finding."""
    body = table_text(_columns(report), report.findings, target, lambda finding: finding.status != "passed")
    return body + _summary(report)


def markdown(report: CheckReport) -> str:
    """For a pull request."""
    return f"{markdown_text(_columns(report), report.findings)}\n{_summary(report)}"


_FIELDS = ("status", "model", "key", "expected", "got", "difference", "tolerance", "path", "line", "message")


def csv(report: CheckReport) -> str:
    """For a spreadsheet."""
    return csv_text(_FIELDS, [[getattr(finding, field) for field in _FIELDS] for finding in report.findings])
