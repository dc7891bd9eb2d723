"""`benchmarks/published.py`: what ran is not answered with no, what failed not with yes; a few of its rows."""

from __future__ import annotations

import importlib.util
import sys
import warnings

import pytest

from bertscope.analyses.memory.steps import estimate_report
from bertscope.errors import BertscopeWarning
from bertscope.reports.memory import NO, YES
from bertscope.sources.find import find
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
RESERVED = [row for row in ROWS if row.quantity == PUBLISHED.RESERVED]
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


@pytest.mark.parametrize(
    "row",
    [row for row in RESERVED if row.settings.get("world_size") != 128],
    ids=lambda row: f"{row.model}-{row.run_text}",
)
def test_the_reserved_bytes_of_programs_with_a_model_in_no_package_are_those_published(row):
    """A loop of GPT-2 on an A100, and Llama 3.1 8B by torchtitan on 8 H100 (of 128: the benchmark): within 0.6 %."""
    assert PUBLISHED.reserved_bytes(row) == pytest.approx(row.value_bytes, rel=0.006)


def test_the_published_memory_of_llama_lies_between_full_and_selective_checkpointing_of_transformers(tmp_path):
    """82.4 GiB with torchtitan, which saves every second product; transformers' logits are in fp32."""
    transformers = pytest.importorskip("transformers", reason="the model is a class of transformers")
    transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    (published,) = [row for row in RESERVED if row.settings.get("world_size") == 8]
    runs = [published.run_config.changed(checkpointing=name, loop="plain") for name in ("full", "selective")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BertscopeWarning)  # on the device of its buffers, once in a process
        report = estimate_report(find(tmp_path), runs)
    full, selective = (variant.estimated.peak.peak_bytes for variant in report.variants)
    assert full < published.value_bytes < selective
    assert report.units == "32 x LlamaDecoderLayer"


def test_every_published_row_has_a_source_and_every_figure_a_value():
    for row in ROWS:
        assert row.source
        assert (row.value_bytes > 0) == (
            row.quantity in (PUBLISHED.NVIDIA_SMI, PUBLISHED.ALLOCATED, PUBLISHED.RESERVED)
        )
        assert (row.value_seconds > 0) == (row.quantity == PUBLISHED.SECONDS)
