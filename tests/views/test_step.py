"""The columns of a StepCost: a new one is in every report on a step, and a cost says the same sentence everywhere."""

import csv
import io
from dataclasses import replace

import pytest

from bertscope.reports.base import Subject
from bertscope.reports.memory import (
    FitReport,
    FitRow,
    LengthsReport,
    LengthsRow,
    Memory,
    MemoryReport,
    RankRow,
    SweepReport,
    SweepRow,
    Variant,
)
from bertscope.reports.page import ComparisonReport
from bertscope.reports.plan import PlanReport, PlanRow
from bertscope.reports.run import RunFit, RunFitReport, RunPhase, RunReport
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost, StepTime, TimeRange
from bertscope.settings.run_config import RunConfig
from bertscope.views import step
from bertscope.views.columns import Column
from bertscope.views.console import Target
from bertscope.views.memory import ranks_table
from bertscope.views.step import on_gpu, strategy_names, time_text, verdict_text
from bertscope.views.views import view_of
from tests.conftest import GOLDEN

GIB = 2**30
PEAK = PhasePeak(phase="backward", peak_bytes=4 * GIB, path="", operator="mm", parts=Parts(activations=4 * GIB))
SMALL = replace(PEAK, peak_bytes=0, parts=Parts())
FITS = StepCost(peak=PEAK, reserved=ByteRange(low_bytes=4 * GIB, high_bytes=5 * GIB),
                context=ByteRange(high_bytes=GIB), limit_bytes=8 * GIB, shortfall=ByteRange())  # fmt: skip
UNCERTAIN = replace(FITS, shortfall=ByteRange(high_bytes=GIB))
LACKS = replace(UNCERTAIN, context=ByteRange(high_bytes=4 * GIB),
                shortfall=ByteRange(low_bytes=GIB, high_bytes=2 * GIB))  # fmt: skip
CONTEXT = StepCost(peak=SMALL, context=ByteRange(high_bytes=GIB // 2), limit_bytes=GIB)
SUBJECT = Subject(name="tiny", architecture="BertModel", dtype="fp32", torch_version="2", bertscope_version="1")
ABOUT = {"subject": SUBJECT, "run": RunConfig()}
MEMORY = Memory(obtained="estimated", cost=FITS, phases=(PEAK,), saved=())
RANK = RankRow(ranks=(0,), cost=FITS, state_bytes=0, phases=(PEAK,), traffic=())
ONE = Variant(checkpointing="none", reentrant=False, estimated=MEMORY)
ESTIMATE = MemoryReport(**ABOUT, machine="", variants=(ONE,))
FIT = FitReport(**ABOUT, budget_bytes=8 * GIB, gpu=None, asked_batch=None, rows=(
    FitRow(seq=8, checkpointing="none", precision="fp32", batch=1, batch_by_bytes=2, cost=FITS, next_peak_bytes=GIB),
))  # fmt: skip
REPORTS = [
    ESTIMATE,
    ComparisonReport(of="memory", reports=(ESTIMATE, ESTIMATE)),
    FIT,
    PlanReport(**ABOUT, budget_bytes=8 * GIB, layers_flops=1, rows=(
        PlanRow(checkpointing="none", cost=FITS, recompute_share=0.0, batch=1, accumulate=1,
                recompute_moved_bytes=0),)),
    LengthsReport(**ABOUT, source="", sequences=1, truncated=0, shortest=8, longest=8, mean=8.0, traced=(8,), rows=(
        LengthsRow(name="fixed", batch=1, batches=1, padding=0.0, expected_bytes=1, cost=FITS, worst_batch=1,
                   worst_seq=8, epoch_flops=1),)),
    SweepReport(grid="", varied={}, rows=(SweepRow(key="0", point={}, cost=FITS),)),
    RunReport(script="a.py", arguments=(), gpu=None, budget_bytes=None, updates=1, cost=FITS,
              phases=(RunPhase(step=1, cost=FITS, left_bytes=0, line=""),)),
    RunFitReport(script="a.py", arguments=(), argument="n", low=1, high=2, largest=1, gpu=None, budget_bytes=1,
                 rows=(RunFit(value=1, cost=FITS),)),
]  # fmt: skip


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.kind)
def test_a_new_column_is_in_the_table_csv_and_markdown_of_every_report_on_a_step(report, monkeypatch):
    """A property of StepCost and a line here: energy in joules, 3 for each GiB of the peak."""
    monkeypatch.setattr(StepCost, "joules", property(lambda cost: 3 * cost.peak_bytes // GIB), raising=False)
    energy = Column("energy", lambda cost: f"{cost.joules} J", {"joules": lambda cost: cost.joules}, right=True)
    monkeypatch.setattr(step, "COST_COLUMNS", (*step.COST_COLUMNS, energy))
    view = view_of(report.kind)
    for text in (view.table(report, Target()), view.markdown(report)):
        assert "energy" in text
        assert "12 J" in text
    (record, *_) = csv.DictReader(io.StringIO(view.csv(report)))
    assert record["joules"] == "12"


@pytest.mark.parametrize("name", ["plan-table.txt", "lengths-table.txt", "sweep-table.txt", "run-table.txt"])
def test_the_form_of_a_report_is_that_of_its_golden_file(name):
    report = next(report for report in REPORTS if report.kind == name.partition("-")[0])
    assert view_of(report.kind).table(report, Target()) == (GOLDEN / name).read_text()


def test_the_rows_of_real_ranks_have_the_columns_too():
    variant = replace(ESTIMATE.variants[0], rank_rows=(RANK, RANK))
    assert "on the GPU" in ranks_table(replace(ESTIMATE, variants=(variant,))).text(Target())


@pytest.mark.parametrize(
    ("cost", "fits", "sentence"),
    [
        (FITS, "yes", "needs 6.00 of 8.00 GiB"),
        (UNCERTAIN, "may fit", "needs 6.00 of 8.00 GiB"),
        (replace(UNCERTAIN, context=ByteRange(high_bytes=4 * GIB)), "may fit",
         "needs 4.00 to 9.00 of 8.00 GiB"),
        (LACKS, "no, needs 1.00 GiB more", "needs 1.00 GiB more than 8.00 GiB"),
        (replace(LACKS, limit_bytes=10 * GIB), "no, out of memory at 4.00 GiB", "needs 9.00 of 10.00 GiB"),
        (StepCost(peak=PEAK, limit_bytes=8 * GIB, shortfall=ByteRange()), "yes", "needs 4.00 of 8.00 GiB"),
        (replace(CONTEXT, context=ByteRange(high_bytes=GIB - 2**16)), "", "needs 1,023.94 of 1,024.00 MiB"),
        (replace(CONTEXT, limit_bytes=16 * GIB), "", "needs 0.50 of 16.00 GiB"),
    ],
)  # fmt: skip
def test_a_cost_is_one_phrase_with_one_unit_and_one_word(cost, fits, sentence):
    assert (verdict_text(cost), on_gpu(cost)) == (fits, sentence)


def test_the_answer_names_the_changes_with_which_a_plan_may_fit():
    (row,) = next(report for report in REPORTS if report.kind == "plan").rows
    rows = (replace(row, cost=LACKS), replace(row, cost=UNCERTAIN, changes={"optimizer": "sgd"}))
    answer = view_of("plan").answer(PlanReport(**ABOUT, budget_bytes=8 * GIB, layers_flops=1, rows=rows))
    assert answer == "Only a plan with sgd may fit on a CPU: needs 6.00 of 8.00 GiB."


def test_a_search_over_what_changes_no_peak_names_no_largest_value():
    rows = tuple(RunFit(value=value, cost=FITS) for value in (1, 2))
    report = replace(next(report for report in REPORTS if report.kind == "run_fit"), rows=rows, largest=2)
    assert view_of("run_fit").answer(report).startswith("Every value of n from 1 to 2 fits")


def test_the_time_of_a_step_names_the_data_sheet():
    timed = replace(FITS, time=StepTime(step=TimeRange(low_seconds=0.066, high_seconds=0.14)))
    assert step.step_time(timed) == ", 66 to 140 ms a step (data sheet)"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (("a" * 20, (" b", 1), " c"), f"A{'a' * 19} b c."),
        (("a" * 76, (" b", 1), " c"), f"A{'a' * 75} c."),
        (("a" * 70, (" bbbbb", 2), (" ccccc", 1)), f"A{'a' * 69} bbbbb."),
        (("a" * 120,), f"A{'a' * 96}..."),
    ],
)
def test_a_sentence_has_as_many_facts_as_a_line_has_room_for(facts, text):
    assert step.line_of(*facts) == text


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"reserved": ByteRange(low_bytes=GIB, high_bytes=GIB)}, "peak <= reserved"),
        ({"reserved": ByteRange(low_bytes=5 * GIB, high_bytes=4 * GIB)}, "peak <= reserved"),
        ({"limit_bytes": 5 * GIB}, "a step that fits is within the limit"),
        ({"margin": 0.3}, "a step that fits is within the limit and its margin"),
        ({"step_flops": 1, "recompute_flops": 2}, "recomputation is a part of the step"),
    ],
)
def test_a_cost_that_contradicts_itself_is_not_made(change, law):
    with pytest.raises(ValueError, match=law):
        replace(FITS, **change)


def test_a_peak_whose_parts_do_not_add_up_is_not_made():
    with pytest.raises(ValueError, match="the parts add up to 4,294,967,296 bytes, the peak is 1"):
        replace(PEAK, peak_bytes=1)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(7380, 7380, "2.05 h"), (0.0661, 0.1414, "66 to 140 ms"), (0.4123, 0.4123, "412 ms"), (1.04, 1.05, "1 to 1.1 s")],
)
def test_a_time_has_three_digits_and_a_range_two(low, high, text):
    assert time_text(TimeRange(low_seconds=low, high_seconds=high)) == text


def test_the_times_of_a_column_have_one_unit():
    spans = [TimeRange(low_seconds=low, high_seconds=high) for low, high in ((200, 420), (9000, 18_000))]
    costs = [replace(FITS, time=StepTime(step=spans[0], epoch=epoch)) for epoch in spans]
    column = next(column for column in step.COST_COLUMNS if column.title == "epoch time").among([*costs, FITS])
    assert [column.text(cost) for cost in (*costs, FITS)] == ["3.3 to 7 min", "150 to 300 min", ""]


def test_two_strategies_of_a_table_never_have_the_same_name():
    start = "save:encoder.layer=addmm.0-3+addmm.5+bmm.0-1+mul.3@0"
    found = [f"{start}-{layers}" for layers in (1, 2)] + ["save:a.layer=mm.0", "save:b.layer=mm.0", "save:mm.1", "none"]
    name = strategy_names(found)
    assert list(map(name, found[2:])) == ["save:mm.0 (1)", "save:mm.0 (2)", "save:mm.1", "none"]
    assert [name(text)[-7:] for text in found[:2]] == ["... (1)", "... (2)"]
    variants = tuple(replace(ONE, checkpointing=text) for text in found)
    table = view_of("memory").tables(replace(ESTIMATE, variants=variants), None)[0]
    titles = [column.title for column in table.columns]
    assert len(set(titles)) == len(titles)
    others = replace(ESTIMATE, variants=(replace(ONE, checkpointing=f"{start}-9"),))
    below = view_of("memory").compared.table(ESTIMATE).columns[0]  # names the rows of both reports
    assert below.text(others.variants[0]) == f"{start}-9"
