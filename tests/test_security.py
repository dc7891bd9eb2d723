"""The page about security says what the code does."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
LIMITS = re.findall(r"^\| ([\d,]+) \| (.+) \| `([\w.]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("figure", "what", "name"), LIMITS, ids=[f"{what} {name}" for _, what, name in LIMITS])
def test_a_limit_of_the_page_is_that_of_the_code(figure, what, name):
    module, _, constant = name.rpartition(".")
    value = getattr(importlib.import_module(module), constant)
    if isinstance(value, dict):
        value = value[what.partition(" over all")[0]]
    assert int(figure.replace(",", "")) == value


def test_every_limit_over_all_files_is_on_the_page():
    from bertscope.checkpoints.files import LIMITS as over_all

    assert {what.partition(" over all")[0] for _, what, name in LIMITS if name.endswith(".LIMITS")} == set(over_all)


def test_the_page_is_linked_and_short():
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
    assert len(PAGE.splitlines()) <= 110


def test_every_test_of_the_page_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in tests] == []
