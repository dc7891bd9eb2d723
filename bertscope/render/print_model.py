"""PyTorch's own print of a model, as it is and for a page."""

from __future__ import annotations

from bertscope.reports.tool import PrintReport


def text(report: PrintReport) -> str:
    """As PyTorch prints it."""
    return report.text


def markdown(report: PrintReport) -> str:
    """For a page: as a block of text."""
    return f"```text\n{report.text}```\n"
