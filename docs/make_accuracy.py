"""Write docs/accuracy.svg from docs/accuracy.csv, and print the rows of the summary in docs/accuracy.md.

    python docs/make_accuracy.py

A test compares both with the file.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLAIN, PHASES = "plain", "profiler"
WIDTH, LEFT, RIGHT, ROW, TOP = 760, 250, 24, 44, 52
LOWEST, HIGHEST = -9.0, -2.0  # the powers of ten at the ends of the axis
EXACT = LEFT + 24  # the horizontal place of errors of 0
GROUPS = (  # label, loop, implementation, model ("": any)
    ("BERT of transformers, a step", PLAIN, "transformers", ""),
    ("built-in model, a step", PLAIN, "bertscope", ""),
    ("bert-tiny, each phase", PHASES, "bertscope", "bert-tiny"),
    ("bert-base-uncased, each phase", PHASES, "bertscope", "bert-base-uncased"),
    ("bert-large-zh, each phase", PHASES, "bertscope", "bert-large-zh"),
)
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 11px; fill: #59636e; }
  .line { stroke: #d1d9e0; } .limit { stroke: #b35900; stroke-dasharray: 5 4; } .limit-text { fill: #b35900; }
  .dot { fill: #0072b2; fill-opacity: 0.7; } .ring { fill: none; stroke: #0072b2; stroke-width: 1.5; }
  .paper { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; } text { fill: #e6edf3; } .small { fill: #9198a1; } .line { stroke: #3d444d; }
    .limit { stroke: #e3a04f; } .limit-text { fill: #e3a04f; }
    .dot { fill: #56b4e9; } .ring { stroke: #56b4e9; }
  }
"""


def read() -> list[dict[str, str]]:
    """Return the rows of the file."""
    with (HERE / "accuracy.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def error(row: dict[str, str]) -> float:
    """Return the relative error without its sign."""
    return abs(float(row["error"]))


def of_group(rows: list[dict[str, str]], loop: str, implementation: str, model: str) -> list[dict[str, str]]:
    """Return the rows of a group; of the phases only those that sum up 20 peaks, which the others repeat."""
    return [
        row
        for row in rows
        if (row["loop"], row["implementation"]) == (loop, implementation)
        and row["model"] in (model or row["model"])
        and (loop == PLAIN or int(row["peaks"]) > 1)
    ]


def percent(share: float) -> str:
    """Return an error as a percentage with two digits that count: `0.051 %`, `0.000016 %`."""
    digits = 1 - math.floor(math.log10(100 * share)) if share else 0
    return f"{100 * share:.{digits}f} %"


def summary(rows: list[dict[str, str]]) -> list[str]:
    """Return the rows of the table that come from the file."""
    lines = []
    for what, against, loop, implementation in (
        ("peak of a training step, BERT of transformers 4.43.4", "a plain loop on a CPU", PLAIN, "transformers"),
        ("the same, built-in model", "a plain loop on a CPU", PLAIN, "bertscope"),
        ("peak of each phase, five checkpointing strategies", "bertscope's step on a CPU", PHASES, "bertscope"),
    ):
        found = of_group(rows, loop, implementation, "")
        peaks = sum(int(row["peaks"]) for row in found)
        lines.append(f"| {what} | {against} | {peaks} peaks | {percent(max(map(error, found)))} |")
    return lines


def place(share: float) -> float:
    """Return the horizontal place of an error."""
    if not share:
        return EXACT
    start, end = LEFT + 60, WIDTH - RIGHT
    return start + (end - start) * (math.log10(share) - LOWEST) / (HIGHEST - LOWEST)


def picture(rows: list[dict[str, str]]) -> str:
    """Return the picture: a dot for each peak, a ring for the worst of 20, on a logarithmic axis."""
    bottom = TOP + ROW * len(GROUPS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 64}" role="img" '
        'aria-label="Errors of the estimated peaks, all below 0.1 percent">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{bottom + 64}"/>',
        '<text x="16" y="24" font-weight="600">Error of the estimated peak, as a share of the measured one</text>',
        f'<text class="small" x="{EXACT}" y="{TOP - 13}" text-anchor="middle">0 bytes</text>',
    ]
    for power in range(int(LOWEST), int(HIGHEST) + 1):
        x = place(10.0**power)
        parts.append(f'<line class="line" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}"/>')
        if power % 2:
            label = f"{100 * 10.0**power:.{max(-power - 2, 0)}f} %"
            parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    limit = place(1e-3)
    parts.append(f'<line class="limit" x1="{limit:.1f}" y1="{TOP - 8}" x2="{limit:.1f}" y2="{bottom}"/>')
    parts.append(f'<text class="small limit-text" x="{limit:.1f}" y="{TOP - 13}" text-anchor="middle">0.1 %</text>')
    for number, (label, *group) in enumerate(GROUPS):
        middle = TOP + ROW * number + ROW / 2
        parts.append(f'<text x="16" y="{middle + 4:.1f}">{label}</text>')
        found = of_group(rows, *group)
        exact = [row for row in found if not error(row)]
        if exact:
            parts.append(f'<text x="{EXACT}" y="{middle + 4:.1f}" text-anchor="middle">{len(exact)} x</text>')
        for index, row in enumerate(row for row in found if error(row)):
            mark = "ring" if int(row["peaks"]) > 1 else "dot"
            y = middle + 5 * (index % 5 - 2)
            parts.append(f'<circle class="{mark}" cx="{place(error(row)):.1f}" cy="{y:.1f}" r="4"/>')
    legend = "dot: one peak; ring: the worst of 20 peaks of one model, size, attention and precision"
    parts.append(f'<text class="small" x="16" y="{bottom + 46}">{legend}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "accuracy.svg").write_text(picture(read()), encoding="utf-8")
    print("\n".join(summary(read())))
