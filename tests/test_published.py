"""`benchmarks/published.py`: what ran is not answered with no, what failed not with yes; a few of its runs."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from bertscope.reports.memory import NO, YES
from tests.conftest import ROOT

MIB = 2**20


def published():
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PUBLISHED = published()
# Those with both a run and a failure, which are the sharpest, and one of each other kind of card.
CHOSEN = [run for run in PUBLISHED.RUNS if run.software == PUBLISHED.TORCH and run.ran and run.failed]


@pytest.mark.parametrize("run", CHOSEN, ids=lambda run: f"{run.gpu}-{run.ran}-{run.failed}")
def test_what_ran_may_fit_and_what_failed_does_not_for_certain(run):
    assert {run.answer(batch) for batch in run.ran}.isdisjoint({NO})
    assert {run.answer(batch) for batch in run.failed}.isdisjoint({YES})


def test_a_bracket_of_a_t4_is_answered_on_its_near_side():
    """bert-base-cased, 128 tokens, AdamW: 104 ran, 120 ran out of memory."""
    (run,) = [run for run in PUBLISHED.RUNS if run.ran == (104,)]
    assert run.answer(104) == YES
    assert run.answer(120) != YES


def test_nvidia_smi_on_a_v100_is_within_4_percent_of_the_upper_estimate():
    """transformers documentation, model memory anatomy; MiB, of which 1343 were there before anything was loaded."""
    assert {shown for _, _, shown in PUBLISHED.FIGURES} == {
        8681,
        14949,
        6775,
        12295,
        13939,
    }  # three are asked here, all by the script
    for batch, fields, shown_mib in PUBLISHED.FIGURES[:3]:
        run = PUBLISHED.Run(gpu="v100-16gb", model=PUBLISHED.LARGE, architecture=PUBLISHED.CLASSIFIER, seq=512,
                            run=fields, source="")  # fmt: skip
        low, high = run.shown_bytes(batch)
        assert low < 0.96 * shown_mib * MIB < high < shown_mib * MIB


def test_every_published_run_has_a_source():
    for run in PUBLISHED.RUNS:
        assert run.source
        assert run.ran or run.failed
        assert run.software in (PUBLISHED.TORCH, PUBLISHED.FUSED, PUBLISHED.TENSORFLOW)
