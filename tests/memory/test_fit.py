"""`fit`: the largest batch that a budget holds, what a batch costs, and how a memory report looks."""

import functools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bertscope
from bertscope.errors import SelectionError
from bertscope.gpus import GPUS, find_gpu
from bertscope.memory import estimate
from bertscope.memory.caching_allocator import replayed, requests
from bertscope.memory.derived_traces import in_loop, ordered_frees
from bertscope.memory.estimate import MemoryTraces
from bertscope.memory.fit import fit_row
from bertscope.memory.kernel_rules import SUM, overhead, placements
from bertscope.memory.simulator import Simulator, largest, near
from bertscope.memory.trace import LARGE_BATCH, SMALLEST, Block, Kind, MemoryTrace
from bertscope.reports.base import Subject
from bertscope.reports.memory import (
    BreakEven,
    BreakEvenPoint,
    FitReport,
    Memory,
    MemoryReport,
    ProcessMemory,
    SavedRow,
    Timing,
    Variant,
)
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_of
from bertscope.units import parse_bytes
from bertscope.views.console import Target
from bertscope.views.views import view_of
from tests.conftest import EVERY_CASE, GOLDEN, kinds
from tests.memory.steps import SMALL_YAML, estimated_trace, fit_report, small, whole_trace
from tests.memory.test_quantized import LLAMA
from tests.smoke import (  # noqa: F401  # pytest does not collect that file by itself
    test_estimates_are_the_known_numbers,
    test_fit_finds_the_known_batch,
)

MIB = 2**20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(SMALL_YAML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Branching(torch.nn.Module):
    """A user's own code whose step needs more above a batch that no scaled trace has seen."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 32)

    def forward(self, x):
        output = self.linear(x)
        return torch.cat([output] * 8).exp() if len(x) > 2 * LARGE_BATCH else output


@pytest.mark.parametrize(("budget", "is_scaled"), [("32MiB", True), ("64MiB", False)])
def test_a_fit_of_own_code_is_verified_by_steps_of_its_batch_and_the_next(budget, is_scaled, monkeypatch):
    batches, trace = [], MemoryTraces.trace
    monkeypatch.setattr(MemoryTraces, "trace", lambda self, run: batches.append(run.batch) or trace(self, run))
    settings = {"device": "cuda", "context": "1MiB", "precision": "fp32", "checkpointing": "none", "exact": True}
    inputs = torch.zeros(2, 32, 16)
    (row,) = bertscope.fit(Branching(), budget, inputs=inputs, **settings).rows
    assert (len(batches) < 12) == is_scaled
    assert (row.batch < 2 * LARGE_BATCH - 10) == is_scaled
    for batch, fits in ((row.batch, True), (row.batch + 1, False)):
        (other,) = bertscope.fit(Branching(), budget, inputs=inputs, batch=batch, **settings).rows
        assert (other.answer == "yes") == fits


# The law.


@settings(max_examples=3 if EVERY_CASE else 1, deadline=None)
@given(
    st.integers(200_000, 200 * MIB), st.sampled_from(["none", "full", "selective"]), st.sampled_from(["cpu", "cuda"])
)
@example(10_000, "none", "cpu")
@example(20 * MIB, "full", "cuda")
def test_a_batch_fits_and_one_more_does_not(budget, checkpointing, device):
    source, run_config = small(), RunConfig(checkpointing=checkpointing, device=device, seq=8, optimizer="sgd")
    context = 0
    (row,) = fit_report(source, [run_config], [8], budget, context_bytes=context).rows
    extra = overhead(run_config, context).highest_bytes
    traces = {batch: estimated_trace(source, replace(run_config, batch=batch))
              for batch in (row.batch, row.batch + 1, row.batch_by_bytes, row.batch_by_bytes + 1) if batch}  # fmt: skip
    one_more = traces[row.batch + 1].peak_bytes
    assert row.fits == (row.answer == "yes") == (row.batch > 0)
    assert row.batch <= row.batch_by_bytes
    assert traces[row.batch_by_bytes + 1].peak_bytes + extra > budget
    assert row.next_peak_bytes == one_more
    if row.batch_by_bytes:
        assert traces[row.batch_by_bytes].peak_bytes + extra <= budget
    if row.fits:
        assert row.peak_bytes == traces[row.batch].peak_bytes <= row.cost.gpu_bytes - extra
        assert row.cost.gpu_bytes <= budget  # without a context
    if device == "cpu":
        assert row.batch == row.batch_by_bytes
        assert (row.cost.gpu_bytes, row.cost.reserved) == (row.peak_bytes, None)
        assert one_more > budget
    else:  # the allocator serves the batch and not one more
        for batch, is_served in ((row.batch, True), (row.batch + 1, False)):
            if batch:
                assert is_served_everywhere(traces[batch], run_config, extra, budget) == is_served


@pytest.mark.parametrize(("budget", "batch"), [(129, 0), (130, 1), (219, 3), (220, 4), (1000, 30)])
def test_of_30_bytes_a_sequence_and_100_for_the_model_as_many_fit_as_a_hand_finds(budget, batch):
    block = Block("activations", "", "add")
    kinds = [Kind(block, 100, 0, ()), Kind(block, 30 * SMALLEST, 30, ())]
    trace = MemoryTrace(kinds, [0], [1, ~1], [("forward", "", "add")], [0, 0])
    assert largest(lambda size: trace.scaled(size).peak_bytes <= budget) == batch


def test_the_search_needs_no_memory_growth(monkeypatch):
    source, ways = small(), [RunConfig(optimizer="sgd"), RunConfig(optimizer="sgd", device="cuda")]
    budgets = dict(zip(ways, (MIB // 2, 60 * MIB), strict=True))

    def rows():
        return [fit_report(source, [way], [8], budgets[way], context_bytes=0).rows for way in ways]

    by_growth = rows()
    monkeypatch.setattr(Simulator, "scalable_trace", lambda steps, run_config: None)
    assert rows() == by_growth


DEEP = small(num_hidden_layers=6)


@settings(max_examples=100)
@example(most=2**20, answer=365_668, near=2**20)
@given(st.integers(1, 2**20), st.integers(0, 2**20), st.integers(0, 2**21))
def test_a_search_from_any_guess_finds_the_largest_with_few_tries(most, answer, near):
    tries = []
    found = largest(lambda number: tries.append(number) or number <= answer, most, near)
    assert found == min(answer, most)
    assert len(tries) <= 44  # 22 doubled steps, and 22 halves
    assert all(1 <= number <= most for number in tries)


def test_a_peak_that_grows_little_up_to_the_batch_of_the_growth_is_searched_in_few_steps(monkeypatch):
    """Checkpointed sequences of one token: at batch 1,021 the peak is still that of the optimizer step.

    There a sequence adds 152 bytes, those of its inputs and outputs, and above thousands.
    """
    steps, run = Simulator(small("BertModel", vocab_size=100_000)), RunConfig(seq=1, checkpointing="full")

    def peak_bytes(batch):
        return steps.scalable_trace(run).scaled(batch).peak_bytes

    assert peak_bytes(LARGE_BATCH) - peak_bytes(SMALLEST) == (LARGE_BATCH - SMALLEST) * 152
    budget = peak_bytes(300_000)
    assert abs(near(peak_bytes, budget) - 300_000) < 10
    tried, real = [], steps.trace
    monkeypatch.setattr(steps, "trace", lambda run: tried.append(run.batch) or real(run))
    assert steps.limited(run, budget).largest_by_bytes(run) == 300_000
    assert len(tried) < 50


OWN = """import torch


class Capped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("bank", torch.zeros(100, 8))

    def forward(self, x):
        return self.linear(x) + self.bank[: x.shape[0]]
"""


def test_a_model_that_takes_no_batch_above_100_has_an_answer(tmp_path):
    """At batch b: weight and bias and their gradients 576, the bank 3,200, input, output and sum 3 x 32 b."""
    (tmp_path / "capped.py").write_text(OWN)
    report = bertscope.fit(f"{tmp_path / 'capped.py'}:Capped", input=["x=Bx8:float32"], budget=8_000, optimizer="sgd",
                           precision="stored", margin=0, exact=True)  # fmt: skip
    assert 20 < report.rows[0].batch < 100
    peaks = [report.rows[0].peak_bytes, report.rows[0].next_peak_bytes]
    assert peaks[0] <= 8_000 < peaks[1]


@kinds("device, checkpointing", ["cuda", "cpu"], ["full", "none"])
def test_two_shallow_runs_give_the_growth_of_a_deep_model_and_verify_it(device, checkpointing, monkeypatch):
    run_config = RunConfig(seq=8, device=device, checkpointing=checkpointing, optimizer="sgd")
    runs, traced = [], estimate.source_trace
    monkeypatch.setattr(
        estimate, "source_trace", lambda source, run: runs.append((source.layers, run.batch)) or traced(source, run)
    )
    scalable = MemoryTraces(DEEP).scalable_trace(run_config)
    assert runs == [(3, SMALLEST), (4, LARGE_BATCH)]
    whole = whole_trace(DEEP, replace(run_config, batch=7))
    assert (scalable.scaled(7).state, scalable.scaled(7).peaks()) == (whole.state, whole.peaks())


def test_layers_that_do_not_repeat_are_found_and_all_run(monkeypatch):
    traced = estimate.source_trace

    def uneven(source, run_config):
        trace = traced(source, run_config)
        events = [
            event._replace(size_bytes=2 * event.size_bytes) if ".layer.2.intermediate" in event.block.path else event
            for event in trace.events
        ]
        return MemoryTrace.of(trace.state, events, trace.granule_bytes)

    monkeypatch.setattr(estimate, "source_trace", uneven)
    run_config = RunConfig(seq=8, batch=5, optimizer="sgd")
    traces = MemoryTraces(DEEP)
    expected = in_loop(uneven(DEEP, run_config), run_config)
    assert ordered_frees(traces.scalable_trace(run_config).scaled(5).events) == ordered_frees(expected.events)
    assert traces.trace(run_config) == expected
    assert list(traces.verified.values()) == [False]


def test_a_batch_turned_around_is_sorted_by_what_it_costs():
    ways = [RunConfig(checkpointing=strategy, optimizer="sgd") for strategy in ("full", "none", "selective")]
    source = small(num_hidden_layers=2)
    simulator = Simulator(source)
    peaks = {way.checkpointing: simulator.needed_bytes(replace(way, seq=32, batch=64)) for way in ways}
    report = fit_report(source, ways, [32], peaks["none"] - 1, batch=64)
    assert [row.fits for row in report.rows] == [True, True, False]
    costs = [row.cost.extra_flops for row in report.rows if row.fits]
    assert costs == sorted(costs)
    assert report.rows[0].checkpointing == "selective"
    assert report.rows[-1].checkpointing == "none"
    assert {row.checkpointing: row.peak_bytes for row in report.rows} == peaks


def test_a_second_budget_traces_no_step_again(monkeypatch):
    ways, known = [RunConfig(optimizer="sgd")], Simulator(small())
    (first,) = fit_report(small(), ways, [8], 50 * MIB, batch=4, known=known).rows
    monkeypatch.setattr(estimate, "source_trace", lambda *_: pytest.fail("the step was traced again"))
    (second,) = fit_report(small(), ways, [8], 60 * MIB, batch=4, known=known).rows
    assert replace(second, cost=replace(second.cost, limit_bytes=first.cost.limit_bytes)) == first


def test_flops_of_the_step_are_those_of_all_its_sequences():
    ways = [RunConfig(checkpointing=strategy, optimizer="sgd") for strategy in ("none", "full")]
    none, full = fit_report(small(), ways, [8], MIB, batch=3).rows
    one = fit_report(small(), ways[:1], [8], MIB, batch=1).rows[0]
    none, full, one = (row.cost for row in (none, full, one))
    assert none.step_flops == 3 * one.step_flops
    assert none.extra_flops == 0
    assert full.extra_flops == full.recompute_flops / none.step_flops > 0
    assert full.step_flops == none.step_flops + full.recompute_flops


def test_between_what_the_allocator_serves_and_what_the_tensors_need_it_is_not_certain():
    run_config = RunConfig(device="cuda", seq=32, batch=64)
    extra = overhead(run_config, 0).highest_bytes
    trace = estimated_trace(small(), run_config)
    peaks = [replayed(requests(trace, laid)).peak_reserved_bytes for laid in placements(run_config, extra)]
    reserved = max(peaks) - extra
    assert trace.peak_bytes < reserved
    for budget, answer in ((trace.peak_bytes - 1, "no"), (trace.peak_bytes, "uncertain"), (reserved, "yes")):
        report = fit_report(small(), [run_config], [32], budget + extra, batch=64, context_bytes=0)
        assert (report.rows[0].answer, report.answer, report.fits) == (answer, answer, answer == "yes")


@pytest.mark.parametrize("attention", ["sdpa", *EVERY_CASE * ("eager",)])
def test_the_context_of_a_card_is_taken_at_its_upper_end_and_leaves_a_range_of_uncertain_batches(attention):
    source, run_config = small(attention=attention), RunConfig(device="cuda", seq=32, optimizer="sgd")
    card = replace(find_gpu("t4"), memory_bytes=GPUS["t4"].context_high_bytes + 90 * MIB)
    report = fit_report(source, [run_config], [32], card)
    low, high = card.context_low_bytes, card.context_high_bytes
    (row,) = report.rows
    cost = row.cost
    assert cost.context == ByteRange(low_bytes=low, high_bytes=high)
    at_high, at_low = (
        fit_report(source, [run_config], [32], card, context_bytes=context).rows[0] for context in (high, low)
    )
    assert row.batch_by_bytes == at_low.batch_by_bytes > row.batch
    assert row.batch == at_high.batch
    limit = card.memory_bytes - overhead(run_config, None, card).context.high_bytes
    assert limit == card.memory_bytes - high
    for batch, is_served in ((row.batch, True), (row.batch + 1, False)):
        trace = estimated_trace(source, replace(run_config, batch=batch))
        assert is_served_everywhere(trace, run_config, cost.workspace_bytes, limit) == is_served


def is_served_everywhere(trace, run_config, workspaces, limit):
    """Return True if a step fits wherever the workspaces lie."""
    found = [requests(trace, laid) for laid in placements(run_config, workspaces)]
    return all(replayed(asked, limit).missing_bytes == 0 for asked in found)


def test_reserved_is_a_range_where_the_places_of_the_workspaces_matter_and_a_batch_is_promised_by_its_end():
    run_config = RunConfig(device="cuda", seq=32, batch=128)
    trace, extra = estimated_trace(small(), run_config), overhead(run_config, 0).highest_bytes
    places = placements(run_config, extra)
    assert len(places) == 5
    assert len(placements(replace(run_config, mode="inference"), extra)) == 3  # with one workspace two are equal
    peaks = [replayed(requests(trace, laid)).peak_reserved_bytes for laid in places]
    cost = Simulator(small()).cost(run_config)
    assert (cost.reserved.low_bytes, cost.reserved_bytes) == (cost.max_allocated_bytes, max(peaks))
    assert min(peaks) < cost.max_allocated_bytes  # of the step, and of workspaces that lie somewhere
    for budget, answer in ((max(peaks), "yes"), (max(peaks) - MIB, "uncertain")):
        limited = Simulator(small()).limited(run_config, budget, 0)
        assert limited.answer(run_config) == answer
        assert limited.cost(run_config).reserved.high_bytes <= max(peaks)


def test_eager_attention_also_saves_the_inputs_of_softmax_before_torch_1_11():
    """A tensor as large as the probabilities, for each layer, and one as large as the logits."""
    run_config = RunConfig(device="cuda", seq=32, batch=64)
    trace = estimated_trace(small(attention="eager"), run_config)
    old = Simulator(small(attention="eager")).trace(replace(run_config, torch="1.10"))
    scores, logits = 64 * 2 * 32 * 32 * 4, 64 * 32 * 99 * 4  # of two heads; of 99 words
    assert old.peak_bytes == trace.peak_bytes + scores + logits
    now, before = ({event.block.dtype for event in each.events} for each in (trace, old))
    assert now - before == {SUM}  # a bias is added to the product, and its gradient is summed before the others exist
    assert old.live_bytes()[-1] == trace.live_bytes()[-1]
    fused = Simulator(small())
    forward = run_config.changed(mode="forward")
    assert fused.trace(replace(forward, torch="1.10")).peaks() == fused.trace(forward).peaks()


@pytest.mark.parametrize(("optimizer", "lists"), [("adam", 1), ("adamw", 1), ("sgd", 0)])
def test_before_torch_2_1_the_foreach_step_of_adam_has_a_second_list_of_the_parameters(optimizer, lists):
    run_config = RunConfig(seq=2, device="cuda", optimizer=optimizer, torch="2.1")
    source = small("BertForSequenceClassification", vocab_size=5000)
    now, before = (
        Simulator(source).trace(replace(run_config, torch=version)).peaks()[-1].live_bytes for version in ("2.1", "2.0")
    )
    parameters = sum(4 * tensor.numel() for tensor in source.build(device="meta").parameters())
    assert before - now == pytest.approx(lists * parameters, rel=0.05)  # each is rounded up to 512 bytes


@pytest.mark.parametrize(("version", "blas", "lt"), [("1.10", 0, 0), ("2.0", 2, 0), ("2.6.1", 2, 0), ("2.7", 2, 1)])
def test_the_workspaces_are_those_of_the_version_of_torch(version, blas, lt):
    cost = Simulator(small()).cost(RunConfig(device="cuda", seq=32, torch=version))
    assert cost.workspace_bytes == blas * 8_519_680 + lt * MIB


def test_another_common_head_is_tried_for_an_asked_batch():
    masked, classifier = small(vocab_size=5000), small("BertForSequenceClassification", vocab_size=5000)
    run_config = RunConfig(batch=200, seq=32)
    peaks = [estimated_trace(source, run_config).peak_bytes for source in (classifier, masked)]
    between = sum(peaks) // 2
    report = fit_report(masked, [run_config], [32], between, batch=200)
    assert (report.rows[0].answer, report.rows[0].other_head_answer) == ("no", "yes")
    text = view_of("fit").table(report, Target(verbose=True))
    assert "With BertForSequenceClassification (architecture) this batch fits fp32 without checkpointing" in text
    report = fit_report(classifier, [run_config], [32], between, batch=200)
    assert (report.rows[0].answer, report.rows[0].other_head_answer) == ("yes", "no")
    report = fit_report(masked, [run_config], [32], 2 * peaks[1], batch=200)
    assert "With Bert" not in view_of("fit").table(report, Target(verbose=True))


def test_a_card_before_ampere_has_no_fused_kernel_for_bf16(cli, folder):
    """torch's memory-efficient kernel takes bf16 from compute capability 8.0 on, and flash anything."""
    asked = ("--attention", "sdpa", "--seq", "32", "--checkpointing", "none", "--format", "json", "--precision",
             "autocast-bf16,autocast-fp16", "--optimizer", "sgd", "--context", "0")  # fmt: skip
    batches = {}
    for name in ("v100-16gb", "a100-40gb"):
        rows = json.loads(cli("fit", "small.yaml", "--gpu", name, *asked, "--batch", "64").out)["rows"]
        batches[name] = {row["precision"]: row["cost"]["peak"]["peak_bytes"] for row in rows}
    old, new = batches["v100-16gb"], batches["a100-40gb"]
    scores = 64 * 2 * 32 * 32 * (4 + 1 + 4)  # probabilities, masks and what is left of them
    assert old["autocast-bf16"] > new["autocast-bf16"] + scores / 2
    assert old["autocast-fp16"] < new["autocast-fp16"] + scores / 2
    table = cli(
        "fit", "small.yaml", "--gpu", "t4", *asked[:6], "--precision", "autocast-bf16", "--batch", "2", "-v"
    ).out
    assert "t4 has no fused attention kernel for bf16" in table


@pytest.mark.parametrize("precision", ["fp32", "autocast-fp16"])
def test_grouped_heads_are_computed_in_parts_on_a_card_without_flash(precision):
    """torch's memory-efficient kernel wants as many heads of keys as of queries."""
    model = source_of(LLAMA | {"num_key_value_heads": 1})
    old, new = (bertscope.estimate(model, gpu=gpu, precision=precision, seq=64).peak_bytes for gpu in ("t4", "l4"))
    assert old > new or (precision == "fp32" and old == new)


# The command.


def test_the_precisions_to_try_follow_the_card(cli, folder):
    asked = ("--seq", "8", "--batch", "1", "--checkpointing", "none", "--optimizer", "sgd", "--format", "json")
    for place, half in ((("--gpu", "t4"), "fp16"), (("--gpu", "a10"), "bf16"), (("--budget", "1GiB"), "bf16")):
        rows = json.loads(cli("fit", "small.yaml", *place, *asked).out)["rows"]
        assert {row["precision"] for row in rows} == {"fp32", f"autocast-{half}"}


@pytest.mark.parametrize(("budget", "code"), [(16, 1), (17, 1), (200, 0)])
def test_the_exit_code_is_0_only_if_it_fits_for_certain(cli, folder, budget, code):
    result = cli("fit", "small.yaml", "--budget", f"{budget}MiB", "--device", "cuda", "--context", "0", "--seq", "8",
                 "--batch", "1", "--checkpointing", "none", "--precision", "fp32", "--format", "json")  # fmt: skip
    (row,) = result.json["rows"]
    assert (result.code, row["cost"]["verdict"] == "yes") == (code, code == 0)


def test_no_card_has_more_memory_than_its_name_says():
    for known in GPUS.values():
        assert 0 < known.context_low_bytes <= known.context_high_bytes < known.memory_bytes / 4  # of the smallest, 6 GB
        if known.name.endswith("gb"):
            assert known.memory_bytes <= int(known.name.rpartition("-")[2][:-2]) * 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 * 2**30), ("16 GB", 16 * 10**9), ("512M", 512 * MIB), ("1.5GiB", 3 * 2**29), ("100", 100),
     ("100B", 100), ("2k", 2048), ("0.1KB", 100), ("9.5EiB", 19 * 2**59)],
)  # fmt: skip
def test_sizes_are_read_as_they_are_meant(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "1,5GiB", "16 gigs", "٣GiB", "nan"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="^" + text.replace("٣", ".")[:1]):
        parse_bytes(text)


# How it looks.

SUBJECT = Subject(name="bert-tiny", architecture="BertForMaskedLM", dtype="fp32", attention="sdpa", torch_version="0",
                  bertscope_version="0")  # fmt: skip


def made_up(scale: int, obtained: str) -> Memory:
    """A memory with round numbers."""
    parts = Parts(parameters=40 * MIB, optimizer_state=80 * MIB, gradients=40 * MIB, activations=scale * MIB,
                  temporaries=20 * MIB, inputs=1024)  # fmt: skip
    peaks = (("forward", "encoder.layer.*.output", "addmm", 60), ("backward", "", "_log_softmax_backward_data", 0),
             ("optimizer", "", "div", 90))  # fmt: skip
    phases = tuple(
        PhasePeak(phase=name, path=path, operator=operator,
                  peak_bytes=parts.total - less * MIB, parts=replace(parts, temporaries=(20 - less) * MIB))
        for name, path, operator, less in peaks
    )  # fmt: skip
    row = SavedRow(path="encoder.layer.0-1.intermediate.dense", operator="addmm", what="activation's input",
                  shape=(64, 512), dtype="float32", tensors=2, total_bytes=scale * MIB)  # fmt: skip
    return Memory(obtained=obtained, cost=cost_of(phases, saved_bytes=scale * MIB), phases=phases, saved=(row,))


def cost_of(phases: tuple[PhasePeak, ...], **others: Any) -> StepCost:
    peak = max(phases, key=lambda phase: phase.peak_bytes)
    return StepCost(peak=peak, **others)


def profiled() -> MemoryReport:
    """A report of `profile` in which a clock stood still."""
    timing = Timing(warmup_seconds=1.0, step_seconds=(0.5, 0.25, 0.75), median_seconds=0.5, tokens_per_second=2048.0,
                    flops=10**9, flops_per_second=2e9)  # fmt: skip
    process = ProcessMemory(resident_before_bytes=300 * MIB, high_water_bytes=420 * MIB, run_high_water_bytes=500 * MIB)
    none = Variant(checkpointing="none", reentrant=False, estimated=made_up(100, "estimated"),
                   measured=made_up(100, "measured"), timing=timing, process=process)  # fmt: skip
    full = Variant(checkpointing="full", reentrant=True, estimated=made_up(10, "estimated"),
                   measured=made_up(10, "measured"), process=process,
                   timing=replace(timing, median_seconds=0.75, flops=4 * 10**9 // 3))  # fmt: skip
    dead = Variant(checkpointing="selective", reentrant=False, estimated=made_up(50, "estimated"),
                   failure="the child was killed by SIGKILL while timing step 1 of 3")  # fmt: skip
    outlook = BreakEven(
        pays_from_batch=4, points=(BreakEvenPoint(batch=8, first_bytes=300 * MIB, own_bytes=200 * MIB),)
    )
    late = Variant(checkpointing="every-2", reentrant=False, estimated=made_up(100, "estimated"), break_even=outlook)
    run = RunConfig(batch=8, seq=128)
    return MemoryReport(subject=SUBJECT, run=run, machine="a machine", variants=(none, full, dead, late))


@functools.cache
def fitted() -> FitReport:
    report = fit_report(small(num_hidden_layers=2), [RunConfig(), RunConfig(checkpointing="full")], [8, 32], 2 * MIB)
    return replace(report, subject=SUBJECT)


@functools.cache
def fitted_on_a_gpu() -> FitReport:
    """Batch 64 with bf16, for which a T4 has no fused kernel, and on a GPU with room for little."""
    runs = [RunConfig(device="cuda", precision="autocast-bf16", optimizer="sgd", checkpointing=name)
            for name in ("none", "full")]  # fmt: skip
    card = replace(find_gpu("t4"), memory_bytes=GPUS["t4"].context_high_bytes + 60 * MIB)
    return replace(fit_report(small(), runs, [32], card, batch=999), subject=SUBJECT)


GOLDENS = {
    "fit-gpu-table.txt": lambda: view_of("fit").table(fitted_on_a_gpu(), Target(verbose=True)),
    "profile-table.txt": lambda: view_of("memory").table(profiled(), Target(verbose=True)),
    "profile-table-narrow.txt": lambda: view_of("memory").table(profiled(), Target(width=80, unicode=False)),
    "profile-markdown.md": lambda: view_of("memory").markdown(profiled()),
    "profile.csv": lambda: view_of("memory").csv(profiled()),
    "fit-table.txt": lambda: view_of("fit").table(fitted(), Target()),
    "fit-markdown.md": lambda: view_of("fit").markdown(fitted()),
    "fit.csv": lambda: view_of("fit").csv(fitted()),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_a_report_looks_as_it_did(name):
    assert GOLDENS[name]() == (GOLDEN / name).read_text(), "the form has changed; where that is meant, write it anew"


def test_parts_below_a_thousandth_of_every_peak_are_one_row():
    memory = made_up(100, "estimated")
    parts = replace(memory.phases[1].parts, buffers=8, inputs=16)
    phases = (replace(memory.phases[1], parts=parts, peak_bytes=parts.total),)
    memory = replace(memory, phases=phases, cost=cost_of(phases))
    report = replace(profiled(), variants=(Variant(checkpointing="none", reentrant=False, estimated=memory),))
    assert re.search(r"^ buffers, inputs +24 B$", view_of("memory").table(report, Target()), re.MULTILINE)
    assert re.search(r"^ inputs +16 B$", view_of("memory").table(report, Target(verbose=True)), re.MULTILINE)


def same(cost: dict[str, Any]) -> dict[str, Any]:
    """What two reports both say about a step."""
    names = ("peak", "saved_bytes", "workspace_bytes", "reserved", "context", "gpu_bytes", "limit_bytes", "margin",
             "shortfall", "verdict")  # fmt: skip
    return {name: cost[name] for name in names}


def test_estimate_on_a_gpu_answers_for_a_batch_as_fit_does(cli):
    loop = ("bert-tiny", "--seq", "512", "--gpu", "gtx-1080-ti", "--checkpointing", "none,full")
    precision = ("--precision", "fp32")
    rows = {row["checkpointing"]: row for row in cli("fit", *loop, *precision, "--format", "json").json["rows"]}
    edges = {row[key] + more for row in rows.values() for key in ("exact_batch", "batch_by_bytes") for more in (0, 1)}
    for batch in sorted(edges):
        fits = cli("fit", *loop, *precision, "--batch", batch, "--format", "json").json["rows"]
        variants = cli("estimate", *loop, "--batch", batch, "--format", "json").json["variants"]
        costs = {variant["checkpointing"]: variant["estimated"]["cost"] for variant in variants}
        for row in fits:
            assert same(row["cost"]) == same(costs[row["checkpointing"]]), batch
        assert [cost["verdict"] for cost in costs.values()] == [
            "yes" if batch <= row["exact_batch"] else "uncertain" if batch <= row["batch_by_bytes"] else "no"
            for row in rows.values()
        ], batch  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", *EVERY_CASE * ("cpu",)])
def test_a_batch_leaves_the_margin_free_and_one_more_does_not(device):
    """Both verdicts are those of one step in `estimate`, and the rounded batch is a multiple of 8 that fits."""
    source, run_config = small(), RunConfig(device=device, seq=8, optimizer="sgd")
    simulator = Simulator(source).limited(run_config, 60 * MIB, 0, 0.25)
    exact, rounded = (fit_row(simulator, run_config, is_exact=is_exact) for is_exact in (True, False))
    answers = [simulator.answer(replace(run_config, batch=exact.batch + more)) for more in (0, 1)]
    assert answers == ["yes", "uncertain"]
    assert exact.cost.gpu_bytes <= 45 * MIB
    assert rounded.batch % 8 == 0
    assert rounded.fits
    assert exact.batch - 8 < rounded.batch <= exact.batch == rounded.exact_batch < exact.batch_without_margin
    whole = fit_row(simulator.with_margin(0.0), run_config)
    assert whole.batch == whole.batch_without_margin == exact.batch_without_margin


def test_a_search_for_the_largest_batch_needs_an_input_that_has_it():
    with pytest.raises(SelectionError, match="no input changes with the batch"):
        bertscope.fit(torch.nn.Linear(8, 8), "1GiB", input=["input=4x8:float32"])
