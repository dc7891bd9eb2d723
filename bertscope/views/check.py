"""The check report for people, for GitHub's annotations, as JUnit, and finding by finding as a table."""

from typing import Any

from bertscope.errors import one_line
from bertscope.reports.tool import CheckReport, Finding
from bertscope.units import count_text, html_text, signed_text
from bertscope.views.columns import Column, csv_only, values
from bertscope.views.console import Target
from bertscope.views.views import Table, View


def text(report: CheckReport) -> str:
    """Return a line `file:line: model: message` for each failure, and a last line with the sums.

    Files that could not be checked are not data: they go to stderr, one line each, by the command. Nothing else is said
    if no file could be checked.
    """
    if report.findings and len(report.having("error")) == len(report.findings):
        return ""
    return "".join(f"{line(finding)}\n" for finding in report.having("failed")) + _summary(report)


def line(finding: Finding) -> str:
    """Return one finding as `file:line: model: message`."""
    if finding.status == "error":
        return one_line(finding_message(finding))
    return one_line(f"{finding.path}:{finding.line}: {finding.model}: {finding_message(finding)}")


def finding_message(finding: Finding) -> str:
    """Return the message in the chosen language; the place in front of one is the same in all."""
    path, line, text = finding.message.partition(f":{finding.line}: ")
    return f"{path}{line}{text}" if line else finding.message


def _summary(report: CheckReport) -> str:
    passed, failed, errors = (len(report.having(status)) for status in ("passed", "failed", "error"))
    files = "1 file" if report.files == 1 else f"{report.files} files"
    expectations = "1 expectation" if passed == 1 else f"{passed} expectations"
    unread = f", {errors} could not be checked" if errors else ""
    return f"{files}: {expectations} passed, {failed} failed{unread}" + "\n"


def github(report: CheckReport) -> str:
    """Return workflow commands that GitHub shows at the file and line of the expectation."""
    text = ""
    for finding in report.findings:
        if finding.status != "passed":
            path = _escaped(finding.path).replace(":", "%3A").replace(",", "%2C")
            text_shown = _escaped(f"{finding.model}: {finding_message(finding)}")
            text += f"::error title=bertscope check,file={path},line={finding.line}::{text_shown}\n"
    return text + _summary(report)


def _escaped(value: str) -> str:
    return one_line(value).replace("%", "%25")


def junit(report: CheckReport) -> str:
    """Return one test case for each expectation."""
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
    shown = _xml(finding_message(finding))
    return f'  {case}><{tag} message="{shown}">{shown}</{tag}></testcase>\n'


def _xml(value: str) -> str:
    """Escape the text, and what XML 1.0 cannot hold: controls, surrogates, non-characters."""
    return html_text(one_line(value))


_STATUS = {"passed": "ok", "failed": "FAILED", "error": "ERROR"}


def _table(report: CheckReport, *_: Any) -> list[Table]:
    columns = [
        Column("", lambda finding: _STATUS[finding.status], values("status")),
        Column("model", lambda finding: one_line(finding.model, limit=120), values("model")),
        Column("expectation", lambda finding: one_line(finding.key), values("key")),
        Column("expected", lambda finding: _value(finding.expected), values("expected"), right=True),
        Column("got", lambda finding: _value(finding.got) or one_line(finding_message(finding)), values("got"),
               right=True),
        Column("difference", lambda finding: signed_text(finding.difference) if finding.difference else "",
               values("difference", "tolerance"), right=True,
               shown=any(finding.difference for finding in report.findings)),
        Column("place", lambda row: "" if row.status == "passed" else one_line(f"{row.path}:{row.line}"),
               values("path", "line"), below=1),
        csv_only(values("message")),
    ]  # fmt: skip
    return [Table(columns, report.findings, lambda finding: finding.status != "passed")]


def _value(value: int | str | None) -> str:
    if value is None:
        return ""
    return count_text(value) if isinstance(value, int) else one_line(value)


_FINDINGS = View(tables=_table)
csv = _FINDINGS.csv


def table(report: CheckReport, target: Target) -> str:
    """Return every finding for the terminal."""
    return _FINDINGS.table(report, target) + _summary(report)


def markdown(report: CheckReport) -> str:
    """Return the report for a pull request."""
    return f"{_FINDINGS.markdown(report)}\n{_summary(report)}"
