"""A dry run holds what a real run of the same program holds, and what an estimate of the same step says."""

import json
import subprocess

import pytest

import bertscope
from tests.child_server import loaded
from tests.conftest import ROOT
from tests.dry_run.loops import SETTINGS, source
from tests.dry_run.programs import PROGRAMS

# Of these the real run differs by less than a part in ten thousand: what peft, Trainer, lengths and losses make.
NEARLY = {
    "losses_whose_mean_keeps_their_elements",
    "lora",
    "trainer_that_keeps_logits",
    "beam_search_to_the_longest_sequence",
}
# A GradScaler keeps its scale and its counter on the card, 512 bytes each; the estimate has no scaler.
OF_SCALER = {"forward": 1024, "backward": 0, "optimizer": 512}


def printed(module):
    """What a module of the tests prints in a process of its own, which installs the card; EVERY_CASE adds settings."""
    done = subprocess.run(loaded(module), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def measured(once):
    return once(printed)("tests.dry_run.programs")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_dry_run_has_the_peaks_of_the_real_run_of_the_same_program(measured, name):
    real, dry = (measured[kind][name] for kind in ("real", "dry"))
    if name not in NEARLY:
        assert dry == real
        return
    for ours, theirs in zip([*dry["steps"], [dry["after"]]], [*real["steps"], [real["after"]]], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_step_can_be_checked_by_hand(measured):
    # When its loss exists there are the batch of 32 x 64 numbers, the product and its square, of 32 x 512 each.
    peak, left = measured["dry"]["own_function"]["steps"][-1]
    assert peak - left == 4 * (32 * 64 + 2 * 32 * 512 + 1)


@pytest.fixture(scope="module")
def loops(once):
    return once(printed)("tests.dry_run.loops")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loop_as_a_script_takes_what_its_estimate_says(loops, name):
    model, settings = source(SETTINGS[name])
    report = bertscope.estimate(model, **settings)
    for phase in report.variants[0].estimated.phases:
        more = OF_SCALER[phase.phase] if "grad_scaler" in settings else 0
        assert loops[name][phase.phase][0] == phase.peak_bytes + more, phase.phase
