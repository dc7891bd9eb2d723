"""The reports of `presets`, `schema`, `tree --style torch`, `doctor` and a calibration, each with its view."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from types import SimpleNamespace

from bertscope.errors import one_line
from bertscope.reports.calibration import COPY, CalibrationReport
from bertscope.reports.tool import DoctorReport
from bertscope.units import bytes_text, count_text
from bertscope.views.columns import Column, csv_only, number, optional, values
from bertscope.views.console import Target
from bertscope.views.views import Table, View


def _listing(columns: tuple[Column, ...], *notes: str, details: Sequence[str] = ()) -> View:
    """Return the view of a report that is one table with notes under it, and `details` with -v only."""
    return View(
        tables=lambda report, target: [Table(columns, report.rows)],
        notes=lambda report, target: notes if target and not target.verbose else (*notes, *details),
    )


presets = _listing(
    (
        Column("preset", lambda row: row.name, values("name")),
        Column("class", lambda row: row.architecture, values("architecture")),
        number("unique params", "distinct_params", optional(count_text)),
        number("sum over layers", "layer_params", optional(count_text), detail=True),
        Column("description", lambda row: row.description, values("description")),
        csv_only(values("path")),
    ),
    "unique params: every tensor once; 'bertscope check --presets' verifies those of a preset against the built model",
    details=("sum over layers: a tied tensor at every layer that uses it",),
)
schemas = _listing(
    (
        Column("kind", lambda row: row.report, values("report")),
        Column("report", lambda row: ", ".join(row.classes), {"classes": lambda row: " ".join(row.classes)}),
        Column("content", lambda row: row.description, values("description")),
    ),
    "'bertscope schema KIND' prints the JSON Schema of one",
)
print_model = SimpleNamespace(
    text=lambda report: report.text,
    table=lambda report, target: report.text,
    markdown=lambda report: f"```text\n{report.text}```\n",
)

_PACKAGES = (
    Column("package", lambda row: row.name),
    Column("version", lambda row: row.version or "missing"),
    Column("extra", lambda row: row.extra or "(needed)"),
    Column("purpose", lambda row: row.purpose),
    Column("to install", lambda row: row.remedy),
)
_DEVICES = (
    Column("device", lambda row: row.name),
    Column("type", lambda row: row.description),
    number("threads", "threads", optional(str)),
    number("memory", "memory_bytes", optional(bytes_text)),
)


def _head(report: DoctorReport) -> list[tuple[str, str]]:
    lines = [
        ("bertscope", f"{report.bertscope_version}, {report.bertscope_path}"),
        ("python", f"{report.python_version}, {report.python_path}"),
        ("torch", report.torch_version or "does not load"),
        ("platform", report.platform),
        ("presets", f"{report.presets} in {report.preset_path}"),
        ("calibrated", "; ".join(report.calibrations) or f"no card, by a file in {report.calibration_path}"),
        (
            "cache",
            f"{report.cache_files:,} results, {bytes_text(report.cache_bytes)}, in {report.cache_path}"
            if report.cache_path
            else f"none: {report.no_cache}",
        ),
    ]
    return [(name, one_line(text)) for name, text in lines]


def _tables(report: DoctorReport, target: Target | None) -> list[Table]:
    """Return the packages and the devices; remedies only where a package is missing."""
    packages = _PACKAGES if any(row.remedy for row in report.packages) else _PACKAGES[:-1]
    return [Table(packages, report.packages), Table(_DEVICES, report.devices)]


def _problems(report: DoctorReport, target: Target | None) -> list[str]:
    problems = [f"problem: {one_line(problem)}" for problem in report.problems]
    return problems or ["no problem found"]


_RECORDS = (csv_only({name: itemgetter(place) for place, name in enumerate(("what", "name", "value"))}),)


def _records(report: DoctorReport) -> Table:
    return Table(_RECORDS, [
        *(("about", name, text) for name, text in _head(report)),
        *(("package", row.name, row.version or "") for row in report.packages),
        *(("device", row.name, row.memory_bytes) for row in report.devices),
        *(("problem", "", text) for text in report.problems),
    ])  # fmt: skip


doctor = View(tables=_tables, lines=lambda report, target: _head(report), name_width=12, notes=_problems,
              shows_all_notes=True, records=_records)  # fmt: skip


# ---- the calibration of a card ----


_STEPS = (
    Column("step", lambda row: one_line(row.name), values("name")),
    number("allocated", "allocated_bytes", optional(bytes_text)),
    number("error", "allocated_error", optional(lambda error: f"{100 * error:+.2f} %")),
    number("reserved", "reserved_bytes", optional(bytes_text)),
    number("error", "reserved_error", optional(lambda error: f"{100 * error:+.2f} %")),
    number("context", "context_bytes", optional(bytes_text)),
    number("ms", "median_seconds", optional(lambda seconds: f"{1000 * seconds:,.2f}")),
)


def _card_lines(report: CalibrationReport) -> Iterator[tuple[str, str]]:
    """Yield what belongs to the card and not to a step."""
    machine = report.machine
    yield "card", one_line(f"{machine.card}, {bytes_text(machine.memory_bytes)}")
    versions = f"torch {machine.torch_version}, bertscope {machine.bertscope_version}"
    yield "versions", one_line(f"driver {machine.driver or 'unknown'}, {versions}; {machine.date}")
    for name, rate in report.rates.items():
        yield one_line(f"rate {name}"), f"{rate / 1e9:,.0f} GB/s" if name == COPY else f"{rate / 1e12:,.1f} TFLOP/s"


calibration = View(
    tables=lambda report, target: [Table(_STEPS, report.steps)], lines=lambda report, target: _card_lines(report)
)
