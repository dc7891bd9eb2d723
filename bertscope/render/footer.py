"""The lines under a table: every total under the name of its convention."""

from __future__ import annotations

from bertscope.errors import one_line
from bertscope.reports.explain import ExplainReport
from bertscope.reports.flops import FlopsReport
from bertscope.reports.memory import FitReport, MemoryReport
from bertscope.reports.params import CountReport, TreeReport
from bertscope.units import bytes_text, count_text

SHOWN_TIES = 8


def title(report: CountReport | TreeReport | FlopsReport | ExplainReport | MemoryReport | FitReport) -> str:
    """Return `bert-large-zh: BertModel, sdpa attention`."""
    subject = report.subject
    head = f"{one_line(subject.name, limit=120)}: " if subject.name != subject.architecture else ""
    attention = f", {subject.attention} attention" if subject.attention else ""
    return f"{head}{subject.architecture}{attention}"


def footer(report: CountReport | TreeReport) -> list[tuple[str, str]]:
    """Return the names and figures of the totals, one line each."""
    totals = report.totals
    lines = [
        ("unique parameters", f"{count_text(totals.distinct_params)} (every tensor once)"),
        ("sum over layers", f"{count_text(totals.layer_params)} {_tie_words(report)}"),
        *_tie_lines(report),
        ("trainable", _trainable(report)),
        ("buffers", f"{count_text(totals.buffer_params)} elements ({bytes_text(totals.buffer_bytes)})"),
        ("size", _size(report)),
    ]
    if report.unknown:
        lines.append(("not counted", f"{len(report.unknown)} not yet initialised: {', '.join(report.unknown)}"))
    subject = report.subject
    lines.append((subject.obtained, f"from the torch modules' own tensors; torch {subject.torch_version}"))
    return lines


def _tie_words(report: CountReport | TreeReport) -> str:
    return "(a tied tensor at every layer that uses it)" if report.ties else "(nothing is tied)"


def _tie_lines(report: CountReport | TreeReport) -> list[tuple[str, str]]:
    lines = [("", f"{tie.path} is {tie.is_path} ({count_text(tie.params)})") for tie in report.ties[:SHOWN_TIES]]
    more = len(report.ties) - SHOWN_TIES
    return [*lines, ("", f"and {more} more ties; --format json lists them all")] if more > 0 else lines


def _trainable(report: CountReport | TreeReport) -> str:
    totals = report.totals
    text = f"{count_text(totals.trainable_params)}, frozen {count_text(totals.frozen_params)}"
    if report.ties:
        over = f"{count_text(totals.trainable_layer_params)}, frozen {count_text(totals.frozen_layer_params)}"
        text += f" (sum over layers {over})"
    return text


def _size(report: CountReport | TreeReport) -> str:
    totals = report.totals
    text = f"{bytes_text(totals.fp32_bytes)} in fp32, {bytes_text(totals.bf16_bytes)} in bf16"
    return f"{text} (unique parameters; 1 MiB = 2**20 B)"


def footer_text(report: CountReport | TreeReport) -> str:
    """Return the footer for the terminal."""
    return "".join(f"{name:<24}{value}".rstrip() + "\n" for name, value in footer(report))


def footer_markdown(report: CountReport | TreeReport) -> str:
    """Return the footer as a list."""
    lines = [f"- {name}: {value}" if name else f"  - {value}" for name, value in footer(report)]
    return "\n".join(line.replace("_", "\\_").replace("*", "\\*") for line in lines) + "\n"
