"""The target of a table: its width and its colours. Only this file makes rich consoles.

A piped table takes its natural width: rich would assume 80 columns there and drop whole ones.
"""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # rich costs 50 ms, and --help and completion draw nothing
    from rich.console import Console, RenderableType

_UNLIMITED = 10_000
_NARROWEST = 30  # below it a number would lose digits; the terminal wraps instead


@dataclass(frozen=True)
class Target:
    """A place for text: `width` in columns, None for as wide as it gets."""

    width: int | None = None
    color: bool = False
    unicode: bool = True


Color = Literal["auto", "always", "never"]
_chosen: list[Color] = ["auto"]


def choose_color(choice: Color) -> None:
    """Set the value of `--color` for the rest of this run; `auto` leaves it to the terminal and the environment."""
    _chosen[0] = choice


def stdout_target() -> Target:
    """Return the target for standard output, by --color, NO_COLOR, FORCE_COLOR, TERM, COLUMNS and the terminal."""
    is_terminal = sys.stdout.isatty()
    columns = os.environ.get("COLUMNS", "")
    width = None
    if columns.isdecimal() and len(columns) < 6 and int(columns) > 0:
        width = max(int(columns), _NARROWEST)
    elif is_terminal:
        width = max(os.get_terminal_size(sys.stdout.fileno()).columns, _NARROWEST)
    wants = is_terminal and os.environ.get("TERM") != "dumb"
    color = (wants or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    if _chosen[0] != "auto":
        color = _chosen[0] == "always"
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return Target(width=width, color=color, unicode=encoding.startswith("utf"))


def draw(renderable: RenderableType, target: Target) -> str:
    """Return the renderable as text, lines without trailing blanks."""
    console = _console(target)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def natural_width(renderable: RenderableType) -> int:
    """Return the width at which nothing wraps."""
    return _console(Target()).measure(renderable).maximum


def _console(target: Target) -> Console:
    from rich.console import Console

    # markup off: `[768, 3072]` in a cell is data; height: without it rich clamps to 80 under TERM=dumb.
    options: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": False}
    return Console(
        file=io.StringIO(),
        width=target.width or _UNLIMITED,
        height=_UNLIMITED,
        force_terminal=target.color,
        color_system="standard" if target.color else None,
        no_color=not target.color,
        legacy_windows=False,
        **options,
    )
