"""Products of which the tests run one case of each kind, and large models; `.ci/versions every` runs this file."""

import warnings

import pytest

from bertscope.errors import BertscopeWarning
from bertscope.memory.simulator import Simulator
from bertscope.reports.step import NO, YES
from bertscope.sources.find import find
from tests.test_benchmarks import CHOSEN, PUBLISHED, RESERVED, ROWS
from tests.test_docs import one_for_each_option, runs, without_output
from tests.test_keywords import MORE_CALLS, try_keywords


@pytest.mark.parametrize("command", sorted({*without_output()} - {*one_for_each_option()}))
def test_a_documented_command_runs(printed, command):
    runs(printed, command)


@pytest.mark.parametrize("call", MORE_CALLS)
def test_each_keyword_changes_the_report_or_is_refused(call, tmp_path, monkeypatch):
    try_keywords(call, tmp_path, monkeypatch)


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: f"{row.gpu}-{row.quantity}-{row.batch}")
def test_what_ran_may_fit_and_what_failed_does_not_for_certain(row):
    assert row.answer() != (NO if row.quantity == "ran" else YES)


def test_nvidia_smi_on_a_v100_is_within_4_percent_of_the_upper_estimate():
    """transformers documentation, model memory anatomy; MiB, of which 1343 were there before anything was loaded."""
    rows = [row for row in ROWS if row.quantity == PUBLISHED.NVIDIA_SMI and row.gpu == "v100-16gb"]
    assert {row.value_bytes // 2**20 for row in rows} == {8681, 14949, 6775, 12295, 13939}
    for row in rows[:3]:  # all by the script
        low, high = row.shown_bytes()
        assert low < 0.96 * row.value_bytes < high < row.value_bytes


@pytest.mark.parametrize(
    "row", [row for row in RESERVED if "world_size" not in row.settings], ids=lambda row: f"{row.model}-{row.run_text}"
)
def test_the_reserved_bytes_of_programs_with_a_model_in_no_package_are_those_published(row):
    """A loop of GPT-2 on an A100."""
    assert PUBLISHED.reserved_bytes(row) == pytest.approx(row.value_bytes, rel=0.006)


def test_the_reserved_bytes_of_llama_on_8_cards_are_those_published():
    (row,) = [row for row in RESERVED if row.settings.get("world_size") == 8]
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
        report = Simulator(find(tmp_path)).report(runs)
    full, selective = (variant.estimated.peak.peak_bytes for variant in report.variants)
    assert full < published.value_bytes < selective
    assert report.units == "32 x LlamaDecoderLayer"
