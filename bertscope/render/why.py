"""The report of `why` as a table, CSV and Markdown, and its history as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bertscope.render.columns import Column, number, optional, values
from bertscope.render.console import Target
from bertscope.render.footer import title
from bertscope.render.timeline.panels import COLORS, part_name, run_text
from bertscope.render.views import Table, View
from bertscope.reports.why import MESSAGE, WhyFinding, WhyReport
from bertscope.texts import has_text, say
from bertscope.units import binary_unit, bytes_text, html_text

_ROWS = 10  # without -v
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT, _LEGEND = 720, 320, 60, 30, 20, 10, 150
_TICKS = 4
_GREY = "#9aa0a6"  # of parts that an estimate does not have


def finding_text(finding: WhyFinding) -> str:
    """Return a finding with its remedy."""
    shown = {
        name: bytes_text(value) if name.startswith("size") or name == "each" else value
        for name, value in finding.values.items()
    }
    line = finding.values.get("line", "")
    shown |= {"at": say("why_at", line=line) if line else ""}
    if "part" in shown:
        shown["part"] = part_name(shown["part"])
    return say(finding.key, **shown)


def answer(report: WhyReport) -> str:
    """Return what held the memory and the change that frees most, in a sentence."""
    held = bytes_text(report.allocated_bytes)
    parts = sorted(report.parts, key=lambda part: -part.held_bytes)
    mostly = ""
    if report.source != MESSAGE and parts and report.allocated_bytes:
        share = f"{100 * parts[0].held_bytes / report.allocated_bytes:.0f}"
        mostly = say("why_mostly", percent=share, part=part_name(parts[0].part))
    phase = say(f"why_in_{report.phase}") if has_text(f"why_in_{report.phase}") else ""
    at = say("why_at", line=report.line) if report.line else ""
    tried = bytes_text(report.tried_bytes or 0)
    moment = say(f"why_{report.moment}", held=held, tried=tried, phase=phase, at=at) + mostly
    return say("why_answer", moment=moment, finding=finding_text(report.findings[0])) if report.findings else moment


def _tables(report: WhyReport, target: Target | None) -> Sequence[Table]:
    rows = report.rows if target is None or target.verbose else report.rows[:_ROWS]
    total = max(report.allocated_bytes, 1)
    parts = [
        Column(say("why_part"), lambda part: part_name(part.part), values("part")),
        number(say("why_held"), "held_bytes", bytes_text, shown=report.source != MESSAGE),
        Column(say("why_share"), lambda part: f"{100 * part.held_bytes / total:.0f} %", right=True,
               shown=report.source != MESSAGE),
        number(say("why_blocks"), "blocks", shown=any(part.blocks for part in report.parts)),
        number(say("why_estimated"), "estimated_bytes", optional(bytes_text, "-"), shown=report.run is not None),
    ]  # fmt: skip
    tables = [Table(parts, report.parts)] if report.source != MESSAGE or report.run else []
    return [*tables, *([Table(_row_columns(report), rows)] if report.rows else [])]


def _row_columns(report: WhyReport) -> list[Column]:
    return [
        Column(say("why_line"), lambda row: row.line or "-", values("line")),
        Column(say("why_module"), lambda row: row.module or "-", values("module"), below=1),
        Column(say("why_part"), lambda row: part_name(row.part), values("part")),
        number(say("why_blocks"), "blocks"),
        number(say("why_passes"), "passes", detail=report.passes < 2),
        number(say("why_held"), "held_bytes", bytes_text),
        number(say("why_smallest"), "smallest_bytes", bytes_text, detail=True),
        number(say("why_largest"), "largest_bytes", bytes_text, detail=True),
    ]  # fmt: skip


def _lines(report: WhyReport, target: Target | None) -> Iterator[tuple[str, str]]:
    """Yield each number of the file with its name."""
    unusable = report.unusable_bytes
    sizes = {
        "tried": report.tried_bytes, "allocated": report.allocated_bytes, "unusable": unusable,
        "reserved": report.reserved_bytes, "largest_free": report.largest_free_bytes, "other": report.other_bytes,
        "free": report.free_bytes, "total": report.total_bytes,
    }  # fmt: skip
    for name, size in sizes.items():
        if size is not None and (size or name in ("free", "unusable")):
            yield say(f"why_number_{name}"), bytes_text(size)
    if report.run is not None:
        yield say("why_model"), say("named", name=title(report), text=run_text(report.run))


def _notes(report: WhyReport, target: Target | None) -> Iterator[str]:
    yield from map(finding_text, report.findings[1:])
    yield from (say(note.key, **note.values) for note in report.notes)
    if target is not None and not target.verbose and len(report.rows) > _ROWS:
        yield say("why_more_rows", count=len(report.rows) - _ROWS)


VIEW = View(
    answer=answer,
    tables=_tables,
    lines=_lines,
    notes=_notes,
    shows_all_notes=True,
    records=lambda report: Table(_row_columns(report), report.rows),
)


def history_svg(report: WhyReport) -> str:
    """Return the picture of the history: the bytes of each part, stacked, over the events."""
    names = [part.part for part in report.parts]
    names += [part for sample in report.timeline for part in sample.held if part not in names]
    names = list(dict.fromkeys(names))
    top = max(max(sum(sample.held.values()) for sample in report.timeline), 1)
    unit, unit_name = binary_unit(top)
    right, base = _WIDTH - _RIGHT - _LEGEND, _HEIGHT - _BOTTOM
    last = max(report.timeline[-1].event, 1)

    def place(event: int, size: float) -> str:
        """Return a point of the picture."""
        return f"{_LEFT + event / last * (right - _LEFT):.1f},{base - size / top * (base - _TOP):.1f}"

    below, shapes = [0] * len(report.timeline), []
    for row, part in enumerate(names):
        above = [low + sample.held.get(part, 0) for low, sample in zip(below, report.timeline, strict=True)]
        events = [sample.event for sample in report.timeline]
        points = [*map(place, events, above), *map(place, events[::-1], below[::-1])]
        color = COLORS.get(part, _GREY)
        shapes.append(f'<polygon points="{" ".join(points)}" fill="{color}"/>')
        y = _TOP + 18 * row
        shapes.append(f'<rect x="{right + 12}" y="{y}" width="10" height="10" fill="{color}"/>')
        shapes.append(f'<text x="{right + 27}" y="{y + 10}">{html_text(part_name(part))}</text>')
        below = above
    for tick in range(_TICKS + 1):
        height = base - tick / _TICKS * (base - _TOP)
        size = f"{top * tick / _TICKS / unit:.1f}"
        shapes.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{size}</text>')
    shapes.append(f'<path d="M{_LEFT} {_TOP}V{base}H{right}" fill="none" stroke="currentColor"/>')
    shapes.append(f'<text x="6" y="13">{html_text(f"{unit_name}, {report.name[:80]}")}</text>')
    word = html_text(say("why_events", count=report.events))
    shapes.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{word}</text>')
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>', *shapes, "</svg>\n"])
