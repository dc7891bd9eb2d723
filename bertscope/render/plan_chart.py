"""The plans of a report as a chart (SVG): the memory that each needs against the FLOPs that it computes again."""

from __future__ import annotations

from bertscope.reports.plan import PlanPoint, PlanReport
from bertscope.units import binary_unit, bytes_text, html_text

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 320, 70, 45, 20, 20
_TICKS = 4


def plan_svg(report: PlanReport) -> str:
    """Return the picture; the limit is a line, and a plan that does not fit is hollow."""
    points = sorted({(point.recompute_share, point.cost.gpu_bytes): point for point in report.front}.items())
    limit = report.budget_bytes
    unit, name = binary_unit(limit)
    top = max([limit, *(size for (_, size), _ in points)]) * 1.1

    def place(share: float, size: float) -> tuple[float, float]:
        x = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        return round(x, 1), round(_HEIGHT - _BOTTOM - size / top * (_HEIGHT - _BOTTOM - _TOP), 1)

    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    _, line = place(0, limit)
    way = " ".join(f"{x},{y}" for x, y in (place(*key) for key, _ in points))
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{base}H{right}" fill="none" stroke="currentColor"/>',
        _text((_LEFT + right) / 2, _HEIGHT - 8, "recomputed", "middle"),
        _text(6, 13, f"on the GPU, {name}", "start"),
        f'<path d="M{_LEFT} {line}H{right}" stroke="currentColor" stroke-dasharray="6 4"/>',
        _text(right, line - 5, f"limit {bytes_text(limit)}", "end"),
        f'<polyline points="{way}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>',
        *(_circle(*place(*key), point, point.cost.gpu_bytes <= limit) for key, point in points),
    ]
    for number in range(_TICKS + 1):
        x, y = place(number / _TICKS, top * number / _TICKS)
        parts.append(_text(x, base + 16, f"{100 * number // _TICKS} %", "middle"))
        parts.append(_text(_LEFT - 6, y + 4, f"{top * number / _TICKS / unit:.1f}", "end"))
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>', *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html_text(words)}</text>'


def _circle(x: float, y: float, point: PlanPoint, is_filled: bool) -> str:
    share = f"{100 * point.recompute_share:.0f} %"
    words = f"{point.checkpointing}: {bytes_text(point.cost.gpu_bytes)}, {share} recomputed"
    fill = "currentColor" if is_filled else "none"
    title = f"<title>{html_text(words)}</title>"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="currentColor">{title}</circle>'
