"""The check report for people, for GitHub's annotations, and as JUnit."""

from __future__ import annotations

from html import escape  # xml.sax.saxutils would import urllib.request, 27 ms on every command

from bertscope.errors import one_line
from bertscope.reports import CheckReport, Finding


def text(report: CheckReport) -> str:
    """`file:line: model: what was expected, what was got`, and a last line with the sums.

    Files that could not be checked are not data: they go to stderr, one line each, by the command.
    """
    return "".join(f"{_place(finding)}\n" for finding in report.having("failed")) + _summary(report)


def _place(finding: Finding) -> str:
    return one_line(f"{finding.path}:{finding.line}: {finding.model}: {finding.message}")


def _summary(report: CheckReport) -> str:
    passed, failed, errors = (len(report.having(status)) for status in ("passed", "failed", "error"))
    files = f"{report.files} {'file' if report.files == 1 else 'files'}"
    text = f"{files}: {passed} expected counts hold, {failed} do not"
    return text + (f", {errors} {'file' if errors == 1 else 'files'} could not be checked\n" if errors else "\n")


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
    return escape(one_line(value))
