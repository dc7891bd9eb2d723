"""`benchmarks/published.py`: what ran is not answered with no, what failed not with yes; a few of its rows."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from bertscope.reports.memory import NO, YES
from tests.conftest import ROOT


def loaded():
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PUBLISHED = loaded()
ROWS = PUBLISHED.published()
RUNS = [row for row in ROWS if row.program == PUBLISHED.TORCH and row.quantity in (PUBLISHED.RAN, PUBLISHED.FAILED)]
# The setups with both a run and a failure, which are the sharpest.
SETUPS = [{row.source + row.run_text for row in RUNS if row.quantity == what} for what in ("ran", "failed")]
CHOSEN = [row for row in RUNS if row.source + row.run_text in SETUPS[0] & SETUPS[1]]


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: f"{row.gpu}-{row.quantity}-{row.batch}")
def test_what_ran_may_fit_and_what_failed_does_not_for_certain(row):
    assert row.answer() != (NO if row.quantity == "ran" else YES)


def test_a_bracket_of_a_t4_is_answered_on_its_near_side():
    """bert-base-cased, 128 tokens, AdamW: 104 ran, 120 ran out of memory."""
    found = {row.batch: row.answer() for row in CHOSEN if row.batch in (104, 120)}
    assert found[104] == YES
    assert found[120] != YES


def test_nvidia_smi_on_a_v100_is_within_4_percent_of_the_upper_estimate():
    """transformers documentation, model memory anatomy; MiB, of which 1343 were there before anything was loaded."""
    rows = [row for row in ROWS if row.quantity == PUBLISHED.NVIDIA_SMI and row.gpu == "v100-16gb"]
    assert {row.value_bytes // 2**20 for row in rows} == {8681, 14949, 6775, 12295, 13939}
    for row in rows[:3]:  # all by the script
        low, high = row.shown_bytes()
        assert low < 0.96 * row.value_bytes < high < row.value_bytes


def test_every_published_row_has_a_source_and_every_figure_a_value():
    for row in ROWS:
        assert row.source
        assert (row.value_bytes > 0) == (row.quantity in (PUBLISHED.NVIDIA_SMI, PUBLISHED.ALLOCATED))
        assert (row.value_seconds > 0) == (row.quantity == PUBLISHED.SECONDS)
