"""The reports of `presets`, `schema`, `tree --style torch`, `doctor` and `calibrate`, each with its renderer."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from types import SimpleNamespace

from bertscope.errors import Text, one_line
from bertscope.render.columns import Column, csv_only, number, optional, values
from bertscope.render.console import Target
from bertscope.render.views import Table, View
from bertscope.reports.calibration import COPY, LIMIT, PLANNED, STEP, CalibrationReport, CalibrationRow
from bertscope.reports.tool import DoctorReport
from bertscope.texts import phrase, say
from bertscope.units import bytes_text, count_text


def _listing(columns: tuple[Column, ...], *notes: str, details: Sequence[str] = ()) -> View:
    """Return the view of a report that is one table with notes under it, and `details` with -v only."""
    return View(
        tables=lambda report, target: [Table(columns, report.rows)],
        notes=lambda report, target: map(phrase, notes if target and not target.verbose else (*notes, *details)),
    )


presets = _listing(
    (
        Column("preset", lambda row: row.name, values("name")),
        Column("class", lambda row: row.architecture, values("architecture"), detail=True),
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
    Column("version", lambda row: row.version or phrase("missing")),
    Column("extra", lambda row: row.extra or phrase("(needed)")),
    Column("purpose", lambda row: phrase(row.purpose)),
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
        ("torch", report.torch_version or phrase("does not load")),
        ("platform", report.platform),
        ("presets", say("count_in", count=report.presets, path=report.preset_path)),
        ("calibrated", "; ".join(report.calibrations) or say("no_calibration", path=report.calibration_path)),
        (
            "cache",
            say("cache", files=report.cache_files, size=bytes_text(report.cache_bytes), path=report.cache_path)
            if report.cache_path
            else say("no_cache", words=report.no_cache),
        ),
    ]
    return [(phrase(name), one_line(text)) for name, text in lines]


def _tables(report: DoctorReport, target: Target | None) -> list[Table]:
    """Return the packages and the devices; remedies only where a package is missing."""
    packages = _PACKAGES if any(row.remedy for row in report.packages) else _PACKAGES[:-1]
    return [Table(packages, report.packages), Table(_DEVICES, report.devices)]


def _problems(report: DoctorReport, target: Target | None) -> list[str]:
    problems = [phrase(Text("problem: {words}", words=one_line(problem))) for problem in report.problems]
    return problems or [phrase("no problem found")]


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


# ---- calibrate ----

_SHOWN = ("allocated_bytes", "reserved_bytes", "context_bytes", "smi_bytes")


def _percent(error: float) -> str:
    return f"{100 * error:+.2f} %"


def _settings(row: CalibrationRow) -> str:
    """Return the settings of a point without its kind."""
    return row.name.removeprefix(f"{row.point.kind} ")


def _tflops(row: CalibrationRow) -> str:
    """Return the FLOP/s of the matrix products that the step reached."""
    if row.work is None or not row.median_seconds:
        return ""
    return f"{sum(row.work.matmul_flops.values()) / row.median_seconds / 1e12:,.1f}"


_STEPS = (
    Column("step", _settings),
    number("allocated", "allocated_bytes", optional(bytes_text)),
    number("error", "allocated_error", optional(_percent)),
    number("reserved", "reserved_bytes", optional(bytes_text)),
    number("error", "reserved_error", optional(_percent)),
    number("context", "context_bytes", optional(bytes_text)),
    number("nvidia-smi", "smi_bytes", optional(bytes_text)),
    number("ms", "median_seconds", optional(lambda seconds: f"{1000 * seconds:,.2f}")),
    Column("TFLOP/s", _tflops, right=True),
)
_LIMITS = (
    Column("limit", _settings),
    number("batch", "batch", optional(count_text)),
    Column("result", lambda row: "ran" if row.ran else "out of memory"),
    Column("fit", lambda row: "right" if row.is_right else "wrong"),
)
_POINTS = (
    Column("", str, values("name", "outcome", "reason", "batch", "ran", *_SHOWN)),
    Column("", str, values("estimated_allocated_bytes", "estimated_reserved_bytes", "allocated_error")),
    Column("", str, values("reserved_error", "median_seconds")),
)


def _calibration_verdict(report: CalibrationReport) -> str:
    """Return the largest errors and the answers of `fit` in a sentence."""
    if report.machine is None:
        return f"{len(report.rows)} points, each in a new process; 'bertscope calibrate' measures them"
    steps, limits = report.measured(STEP), [row for row in report.measured(LIMIT) if row.is_right is not None]
    words = [f"{len(steps)} steps"]
    for name in ("allocated", "reserved"):
        errors = [error for row in steps if (error := getattr(row, f"{name}_error")) is not None]
        if errors:
            words.append(f"largest error of {name} {_percent(max(errors, key=abs))}")
    if limits:
        words.append(f"fit right at {sum(row.is_right is True for row in limits)} of {len(limits)} limits")
    left = sum(row.outcome == PLANNED for row in report.rows)
    return ", ".join([*words, *([f"{left} points left"] if left else []), f"{len(report.failed)} failed"])


def _card_lines(report: CalibrationReport) -> Iterator[tuple[str, str]]:
    """Yield what belongs to the card and not to a step."""
    machine = report.machine
    if machine is None:
        return
    major, minor = machine.capability
    yield "card", one_line(f"{machine.card}, compute capability {major}.{minor}, {bytes_text(machine.memory_bytes)}")
    yield (
        "versions",
        one_line(
            f"driver {machine.driver or 'unknown'}, torch {machine.torch_version}, CUDA {machine.cuda_version}, "
            f"Python {machine.python_version}, bertscope {machine.bertscope_version}; {machine.date}"
        ),
    )
    if found := report.context_bytes:
        yield "context in a step", f"{bytes_text(found[0])} to {bytes_text(found[1])}"
    for row in report.rows:
        if row.workspaces:
            sizes = ", ".join(f"{one_line(name)} {bytes_text(size)}" for name, size in row.workspaces.items())
            yield row.name, sizes
    for name, rate in report.rates.items():
        yield one_line(f"rate {name}"), f"{rate / 1e9:,.0f} GB/s" if name == COPY else f"{rate / 1e12:,.1f} TFLOP/s"
    for row in report.rows:
        if row.reason:
            yield one_line(f"{row.outcome}: {row.name}"), one_line(row.reason, limit=300)


def _calibration_tables(report: CalibrationReport, target: Target | None) -> list[Table]:
    if report.machine is None:
        return [Table([Column("point", lambda row: row.name, values("name"))], report.rows)]
    found = [Table(_STEPS, report.measured(STEP)), Table(_LIMITS, report.measured(LIMIT))]
    return [table for table in found if table.rows]


calibrate = View(
    answer=_calibration_verdict,
    tables=_calibration_tables,
    lines=lambda report, target: _card_lines(report),
    name_width=28,
    records=lambda report: Table(_POINTS, report.rows),
)
