"""Live bytes over a step, as a picture (HTML, SVG, PNG) or as data (CSV, JSON); nothing is computed here."""

from dataclasses import asdict
from importlib.util import find_spec
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from bertscope.errors import SelectionError, install_command
from bertscope.render.table import csv_only, csv_text, values
from bertscope.render.timeline.panels import COLORS, variant_name
from bertscope.reports.base import SCHEMA
from bertscope.reports.memory import Memory, MemoryReport
from bertscope.texts import in_language
from bertscope.units import json_text

LIBRARIES = {"html": "plotly", "svg": "matplotlib", "png": "matplotlib", "csv": "", "json": ""}


def timeline(report: MemoryReport, suffix: str) -> bytes:
    """Return the file for `--timeline out.SUFFIX`; raises SelectionError as `check_suffix` does."""
    suffix = check_suffix(suffix)
    with in_language("en"):  # the fonts of a picture may have no Chinese characters
        if suffix == "html":
            from bertscope.render.timeline.html import html

            return html(report).encode()
        if suffix in ("svg", "png"):
            from bertscope.render.timeline.panels import image

            return image(report, suffix)
        return (csv(report) if suffix == "csv" else json_report(report)).encode()


def check_suffix(suffix: str) -> str:
    """Return the format that `html` or `.HTML` names; a command asks before it measures for minutes.

    Raises SelectionError for a format that there is not, or whose drawing library is not installed.
    """
    name = suffix.lower().removeprefix(".")
    if name not in LIBRARIES:
        raise SelectionError(f"a timeline is written as {', '.join(LIBRARIES)}; got {name[:40]!r}: name such a file")
    library = LIBRARIES[name]
    if library and find_spec(library) is None:
        raise SelectionError(
            f"a timeline as {name} needs {library}, which is not installed: "
            f"{install_command('plot')}, or name a .csv or .json file"
        )
    return name


_BYTES = {f"{part}_bytes": attrgetter(f"sample.parts.{part}") for part in (*COLORS, "total")}
_COLUMNS = (csv_only(values("variant", "obtained", "index") | values("phase", of="sample") | _BYTES),)


def csv(report: MemoryReport) -> str:
    """Return one record for each sample of each variant, in bytes."""
    return csv_text(_COLUMNS, [
        SimpleNamespace(variant=variant_name(variant), obtained=memory.obtained, index=index, sample=sample)
        for variant in report.variants
        for memory in (variant.memory,)
        if memory is not None
        for index, sample in enumerate(memory.timeline)
    ])  # fmt: skip


def json_report(report: MemoryReport) -> str:
    """Return the data of the picture: the samples of each variant, the peaks of the phases and the highest of them."""
    return json_text({
        "schema": SCHEMA,
        "kind": "timeline",
        "subject": asdict(report.subject),
        "run": asdict(report.run),
        "machine": report.machine,
        "variants": [
            {"variant": variant_name(variant), "checkpointing": variant.checkpointing, "reentrant": variant.reentrant,
             "failure": variant.failure, **_memory_data(variant.memory)}
            for variant in report.variants
        ],
    })  # fmt: skip


def _memory_data(memory: Memory | None) -> dict[str, Any]:
    if memory is None:
        return {"obtained": None, "phases": [], "timeline": []}
    return {
        "obtained": memory.obtained,
        "peak": asdict(memory.peak),
        "phases": [asdict(phase) for phase in memory.phases],
        "timeline": [asdict(sample) | {"total_bytes": sample.parts.total} for sample in memory.timeline],
    }
