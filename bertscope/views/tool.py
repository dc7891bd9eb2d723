"""The reports of `check`, `presets`, `schema`, `tree --style torch`, `doctor` and a calibration, each with its view."""

import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from bertscope.errors import one_line, shown
from bertscope.reports import tool as reports
from bertscope.units import bytes_text, count_text, counted, html_text
from bertscope.views.columns import Column, attribute, csv_only, number, values
from bertscope.views.console import Target, command_text, painted
from bertscope.views.views import Table, View

EXPECTATIONS = (".bertscope.yaml", ".bertscope.yml")  # the ends of files' names

# ---- check: every expectation, for people, for GitHub's annotations, as JUnit, and as a table ----


def line(finding: reports.Finding) -> str:
    """Return one finding as `file:line: model: message`."""
    if finding.status == "error":
        return shown(finding.message)
    return one_line(f"{finding.path}:{finding.line}: {finding.model}: {shown(finding.message)}")


def _failures(report: reports.CheckReport, target: Target = Target()) -> str:  # noqa: B008  it is frozen
    # Files that could not be checked are not data: they go to stderr, by the command, and nothing else if all do.
    if report.findings and len(report.having("error")) == len(report.findings):
        return ""
    failed = report.having("failed")
    failures = "".join(f"{line(finding)}\n" for finding in failed)
    text = failures + painted(_summary(report), "no" if any(map(_is_wrong, report.findings)) else "yes", target)
    files = list(dict.fromkeys(finding.path for finding in failed))
    changes: dict[str, Any] = {"architecture": None}
    if _is_preset(report) and not failed:
        changes |= {"write_to": "models.bertscope.yaml", "files": ["MODEL"]}
        why = "check a model of yours"
    elif files and all(file.endswith(EXPECTATIONS) for file in files):
        changes |= {"update": True, "files": files}
        why = "accept the new values, if they are intended"
    else:
        return text
    command = command_text("check", changes, {}, " ").strip()  # Python has no such call
    return f"{text}\nNext: {why}\n  {command}\n" if command else text


def _is_preset(report: reports.CheckReport) -> bool:
    return report.files == 1 and bool(report.findings) and not report.findings[0].path.endswith(EXPECTATIONS)


def _summary(report: reports.CheckReport) -> str:
    passed, failed, errors = (len(report.having(status)) for status in ("passed", "failed", "error"))
    unread = f", {errors} could not be checked" if errors else ""
    subject = f"preset {report.findings[0].model}" if _is_preset(report) else counted(report.files, "file")
    return f"{subject}: {counted(passed, 'expectation')} passed, {failed} failed{unread}\n"


def _github(report: reports.CheckReport) -> str:
    def escaped(value: str) -> str:
        return one_line(value).replace("%", "%25")

    text = ""
    for finding in report.findings:
        if finding.status != "passed":
            path = escaped(finding.path).replace(":", "%3A").replace(",", "%2C")
            message = escaped(f"{finding.model}: {shown(finding.message)}")
            text += f"::error title=bertscope check,file={path},line={finding.line}::{message}\n"
    return text + _summary(report)


def _junit(report: reports.CheckReport) -> str:
    def escaped(value: str) -> str:
        return html_text(one_line(value))  # without what XML 1.0 cannot hold: controls, surrogates, non-characters

    failures, errors = len(report.having("failed")), len(report.having("error"))
    head = f'<testsuite name="bertscope check" tests="{len(report.findings)}" failures="{failures}" errors="{errors}">'
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>{head}\n'
    for finding in report.findings:
        name, model, path = map(escaped, (finding.key or "readable", finding.model, finding.path))
        text += f'  <testcase name="{name}" classname="{model}" file="{path}" line="{finding.line}"'
        tag = {"passed": "", "failed": "failure", "error": "error"}[finding.status]
        message = escaped(shown(finding.message))
        text += f'><{tag} message="{message}">{message}</{tag}></testcase>\n' if tag else "/>\n"
    return f"{text}</testsuite></testsuites>\n"


def _value(value: int | str) -> str:
    return count_text(value) if isinstance(value, int) else one_line(value)


def _is_wrong(finding: reports.Finding) -> bool:
    return finding.status != "passed"


def _findings(report: reports.CheckReport, target: Target | None) -> list[Table]:
    columns = [
        attribute("", "status", text={"passed": "ok", "failed": "FAILED", "error": "ERROR"}.__getitem__),
        attribute("model", "model", text=partial(one_line, limit=120)),
        attribute("expectation", "key", text=one_line),
        attribute("expected", "expected", text=_value, right=True),
        attribute("got", "got", text=_value, right=True),
        number("difference", "difference", lambda value: f"{value:+,}" if value else "",
               csv=["difference", "tolerance"]),
        Column("place", lambda row: one_line(f"{row.path}:{row.line}") if _is_wrong(row) else "",
               values("path", "line"), is_wide=1),
        Column("message", lambda row: "" if row.got else shown(row.message), values("message"), is_wide=2),
    ]  # fmt: skip
    return [Table(columns, report.findings, _is_wrong, 3)]


_CHECKED = View(tables=_findings)
check = SimpleNamespace(
    text=_failures,
    github=_github,
    junit=_junit,
    csv=_CHECKED.csv,
    table=lambda report, target: _summary(report) + _CHECKED.table(report, target),
    markdown=lambda report: f"{_summary(report)}\n{_CHECKED.markdown(report)}",
)


# ---- lists ----


_SIZES = values("hidden_size", "num_hidden_layers")
_PRESET = (
    number("parameters", "distinct_params"),
    Column("width x layers", "{0.hidden_size} x {0.num_hidden_layers}".format, _SIZES, right=True),
    attribute("family", "family"),
    attribute("needs", "requires", detail=True),
    number("sum over layers", "layer_params", detail=True),
    attribute("description", "description", detail=True),
)


def _by_class(report: reports.PresetsReport, target: Target | None) -> list[Table]:
    """Return a table for each class: next to the names 80 columns have no room for it."""
    classes: dict[str, list[reports.PresetRow]] = {}
    for row in report.rows:
        classes.setdefault(row.architecture, []).append(row)
    titles = {name: name if "For" in name or "Head" in name else f"{name} (no head)" for name in sorted(classes)}
    return [Table((attribute(title, "name"), *_PRESET), classes[name]) for name, title in titles.items()]


def _tip(report: reports.PresetsReport) -> str:
    name = report.rows[0].name if len(report.rows) == 1 else "PRESET"
    return command_text("count", {"model": name}, {}, f"bertscope.count({name!r})")


presets = View(
    answer=lambda report: f"{counted(len(report.rows), 'preset')}.",
    settings=lambda report: (
        "Families other than bert need the package transformers." if any(row.requires for row in report.rows) else ""
    ),
    tables=_by_class,
    records=(attribute("", "name", "architecture"), *_PRESET, csv_only(values("path"))),
    notes=lambda report, target: (
        "parameters: every tensor once; sum over layers: a tied tensor at every layer that uses it",
        "'bertscope check --presets' compares both with the built models",
    ),
    tip=_tip,
)
schemas = View(
    answer=lambda report: f"{len(report.rows)} report kinds.",
    columns=(
        attribute("kind", "report"),
        Column("report", ", ".join, {"classes": " ".join}, detail=True).of("classes"),
        attribute("content", "description", text=lambda text: re.split(r"[.;:] ", text.rstrip("."))[0]),
    ),
    tip=lambda report: "bertscope schema KIND",
)


def _text(report: reports.PrintReport, target: Target | None = None) -> str:
    return report.text


print_model = SimpleNamespace(text=_text, table=_text, markdown=lambda report: f"```text\n{report.text}```\n")


# ---- doctor ----


_PACKAGES = (
    attribute("package", "name"),
    attribute("version", "version", missing="missing"),
    attribute("extra", "extra", missing="(needed)"),
    attribute("purpose", "purpose"),
)
_DEVICES = (
    attribute("device", "name"),
    attribute("type", "description"),
    number("threads", "threads", str),
    number("memory", "memory_bytes", bytes_text),
)


def _environment(report: reports.DoctorReport, target: Target | None = None) -> Iterator[tuple[str, str]]:
    cache = f"none: {report.no_cache}"
    if report.cache_path:
        cache = f"{report.cache_files:,} results, {bytes_text(report.cache_bytes)}, in {report.cache_path}"
    for name, text in {
        "bertscope": f"{report.bertscope_version}, {report.bertscope_path}",
        "python": f"{report.python_version}, {report.python_path}",
        "torch": report.torch_version or "does not load",
        "platform": report.platform,
        "presets": f"{report.presets} in {report.preset_path}",
        "calibrated": "; ".join(report.calibrations) or f"no GPU; a file in {report.calibration_path} adds one",
        "cache": cache,
    }.items():
        yield name, one_line(text)


def _installed(report: reports.DoctorReport, target: Target | None) -> list[Table]:
    """Return the packages and the devices; a terminal has the remedies below them, and not in a wide column."""
    has_column = target is None and any(row.remedy for row in report.packages)
    columns = (*_PACKAGES, *[attribute("to install", "remedy")] * has_column)
    return [Table(columns, report.packages), Table(_DEVICES, report.devices)]


doctor = View(
    answer=lambda report: (
        "\n".join(f"problem: {one_line(problem)}" for problem in report.problems) or "No problem found."
    ),
    verdict=lambda report: "no" if report.problems else "yes",
    tables=_installed,
    tip=lambda report: (
        "\n  ".join(["install what is missing", *remedies])
        if (remedies := [row.remedy for row in report.packages if row.remedy])
        else ""
    ),
    lines=_environment,
    name_width=12,
)


# ---- the calibration of a GPU ----


def _error(name: str, row: reports.CalibrationStep) -> str:
    estimated = getattr(row, f"estimated_{name}_bytes")
    return "" if estimated is None else f"{100 * (estimated / getattr(row, f'{name}_bytes') - 1):+.2f} %"


_STEPS = (
    attribute("step", "name", text=one_line),
    number("allocated", "allocated_bytes", bytes_text),
    Column("error", partial(_error, "allocated"), right=True),
    number("reserved", "reserved_bytes", bytes_text),
    Column("error", partial(_error, "reserved"), right=True),
    number("context", "context_bytes", bytes_text),
    number("ms", "median_seconds", lambda seconds: f"{1000 * seconds:,.2f}"),
)


def _gpu(report: reports.CalibrationReport, target: Target | None) -> Iterator[tuple[str, str]]:
    machine = report.machine
    yield "GPU", one_line(f"{machine.gpu}, {bytes_text(machine.memory_bytes)}")
    versions = f"torch {machine.torch_version}, bertscope {machine.bertscope_version}"
    yield "versions", one_line(f"driver {machine.driver or 'unknown'}, {versions}; {machine.date}")
    for name, rate in report.rates.items():
        text = f"{rate / 1e9:,.0f} GB/s" if name == reports.COPY else f"{rate / 1e12:,.1f} TFLOP/s"
        yield one_line(f"rate {name}"), text


calibration = View(columns=_STEPS, rows="steps", lines=_gpu)
