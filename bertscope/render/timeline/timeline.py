"""Live bytes over a step, as a picture (HTML, SVG, PNG) or as data (CSV, JSON); nothing is computed here."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import groupby, pairwise
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from bertscope.errors import SelectionError, install_command
from bertscope.render.columns import Column, csv_only, csv_text, values
from bertscope.render.console import variable
from bertscope.render.footer import title
from bertscope.render.page.templating import filled
from bertscope.render.timeline.panels import (
    COLORS,
    Panel,
    Pictured,
    part_name,
    pictured,
    run_text,
    variant_name,
)
from bertscope.reports.base import SCHEMA
from bertscope.reports.memory import Memory, MemoryReport
from bertscope.units import bytes_text, json_text


def html(report: MemoryReport) -> str:
    """Return the page."""
    return filled("timeline.html", title=title(report), timeline=memory_charts(report, with_parts=True))


def memory_charts(report: MemoryReport, *, with_parts: bool = False) -> dict[str, Any]:
    """Return what a page shows: a chart for each variant, and the peaks as a table, if wanted with their parts."""
    picture, run = pictured(report), run_text(report.run, inputs_given=report.inputs_given)
    obtained = {variant.memory.obtained for variant in report.variants if variant.memory}
    peaks = [(variant, phase) for variant in report.variants if variant.memory for phase in variant.memory.phases]
    has_paths = any(phase.path for _, phase in peaks)
    return {
        "run": f"{run}; {report.machine}" if "measured" in obtained else run,
        "colors": {part_name(part): variable("part", part) for part in picture.parts},
        "panels": [(panel, figure(panel, picture) if panel.samples else None) for panel in picture.panels],
        "columns": _columns(picture.parts if with_parts else (), are_mixed=len(obtained) > 1, has_paths=has_paths),
        "peaks": peaks,
        "is_highest": lambda row: row[1] == row[0].memory.peak,
    }


def figure(panel: Panel, picture: Pictured) -> dict[str, Any]:
    """Return the data of the chart of one variant; each part is its changes, in bytes."""
    columns = [
        [sample.phase for sample in panel.samples],
        [sample.path for sample in panel.samples],
        [sample.operator for sample in panel.samples],
    ]
    names = [{text: place for place, text in enumerate(dict.fromkeys(column))} for column in columns]
    heights = [[getattr(sample.parts, part) for sample in panel.samples] for part in picture.parts]
    return {
        "kind": "memory",
        "scale": "memory",
        "top": max(sample.parts.total for sample in panel.samples) or 1,
        "rows": 1 + max((mark.row for mark in panel.marks), default=0),
        "x": "in the order of allocations (not time)",
        "total": "total",
        "whole": "Back",
        "parts": [(part_name(part), variable("part", part)) for part in picture.parts],
        "changes": [_changes(sizes) for sizes in heights],
        "names": [list(known) for known in names],
        "places": [[known[text] for text in column] for known, column in zip(names, columns, strict=True)],
        "marks": [(mark.phase, mark.peak_text, mark.start, mark.end, mark.row, mark.at_end) for mark in panel.marks],
        "peak": (panel.peak_index, panel.peak_text),
    }


def _changes(sizes: Sequence[int]) -> list[int | str]:
    """Return the changes from sample to sample; as text the number of samples without one."""
    runs = groupby((size - before for before, size in pairwise([0, *sizes])), bool)
    return [item for is_change, run in runs for item in (run if is_change else [str(len([*run]))])]


def _columns(parts: Sequence[str], *, are_mixed: bool, has_paths: bool) -> list[Column]:
    """Return the columns of the peaks; `are_mixed` if some are measured and some estimated."""
    return [
        Column("checkpointing", lambda row: variant_name(row[0])),
        *([Column("obtained", lambda row: row[0].memory.obtained)] if are_mixed else []),
        Column("phase", lambda row: row[1].phase),
        Column("peak", lambda row: bytes_text(row[1].peak_bytes), right=True),
        *(
            Column(
                part_name(part), partial(lambda part, row: bytes_text(getattr(row[1].parts, part)), part), right=True
            )
            for part in parts
        ),
        Column("operator", lambda row: row[1].operator),
        *([Column("module", lambda row: row[1].path)] if has_paths else []),
    ]


LIBRARIES = {"html": "", "svg": "matplotlib", "png": "matplotlib", "csv": "", "json": ""}


def timeline(report: MemoryReport, suffix: str) -> bytes:
    """Return the file for `--timeline out.SUFFIX`; raises SelectionError as `check_suffix` does."""
    suffix = check_suffix(suffix)
    if suffix == "html":
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
