"""`bertscope doctor`."""

from __future__ import annotations

from bertscope.commands import options
from bertscope.commands.output import show
from bertscope.render.tool import doctor as renderer

EPILOG = """\b
examples:
  bertscope doctor
  bertscope doctor --format json
  bertscope doctor --format markdown --output environment.md
"""


def doctor(fmt: options.Format = "table", output: options.Output = None) -> None:
    """Say what bertscope runs on: versions, devices, extras found and missing, where presets come from.

    It answers where torch is missing or broken, too, and exits 0.
    """
    from bertscope.analyses.check.doctor import doctor as analyse

    show(analyse(), renderer, fmt, output)
