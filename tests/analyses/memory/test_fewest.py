"""`fit --batch-total`: the fewest ranks, against a search of every number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import bertscope
from bertscope.analyses.memory.fit import fewest_report
from bertscope.errors import SelectionError
from bertscope.settings.parallelism import SEARCHED, ranks_of
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import torch
from tests.analyses.memory.steps import small, whole_trace

STEP = RunConfig()
SIZES = (1, 2, 3, 4)
TOTAL = 24


@pytest.fixture(scope="module")
def source():
    return small(vocab_size=400)


@pytest.fixture(scope="module")
def peaks(source):
    """The peak of a rank by strategy and number of ranks, for the batch of all."""

    def peak(strategy, size):
        run_config = replace(STEP, batch=-(-TOTAL // size), seq=8, parallelism=ranks_of(strategy, size))
        return whole_trace(source, run_config).peak_bytes

    return {strategy: [peak(strategy, size) for size in SIZES] for strategy in ("ddp", "fsdp")}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_the_number_of_ranks_is_the_least_whose_peak_fits(source, peaks, strategy, place):
    budget = peaks[strategy][place]
    (row,) = fewest_report(
        source, [STEP], [8], budget, TOTAL, strategies=[ranks_of(strategy, 2)], world_sizes=SIZES
    ).rows
    expected = next(size for size, peak in zip(SIZES, peaks[strategy], strict=True) if peak <= budget)
    assert (row.ranks, row.batch, row.peak_bytes) == (expected, -(-TOTAL // expected), budget)


def test_where_no_number_of_ranks_fits_the_answer_is_no_with_the_most(source, peaks):
    (row,) = fewest_report(source, [STEP], [8], 1000, TOTAL, strategies=[ranks_of("ddp", 2)], world_sizes=SIZES).rows
    assert (row.fits, row.ranks, row.peak_bytes) == (False, 4, peaks["ddp"][-1])


def test_the_strategy_with_the_fewest_ranks_is_first(source, peaks):
    budget = (peaks["fsdp"][2] + min(peaks["ddp"][2], peaks["fsdp"][1])) // 2
    report = fewest_report(source, [STEP], [8], budget, TOTAL, world_sizes=SIZES)
    assert {row.strategy for row in report.rows} == set(SEARCHED)
    assert [row.ranks for row in report.rows if row.fits] == sorted(row.ranks for row in report.rows if row.fits)
    assert (report.rows[0].ranks, report.batch_total) == (3, TOTAL)


def test_the_first_strategy_wins_of_equals_and_ends_the_search(source, peaks):
    budget = max(peaks["ddp"][1], peaks["fsdp"][1])
    report = fewest_report(source, [STEP], [8], budget, TOTAL, world_sizes=SIZES)
    assert [(row.strategy, row.ranks) for row in report.rows] == [("ddp", 2)]


def test_python_takes_the_settings_of_ranks():
    one, eight = (bertscope.estimate("bert-tiny", seq=8, **ranks)["none"].memory.peak.parts
                  for ranks in ({}, {"strategy": "fsdp", "world_size": 8}))  # fmt: skip
    assert 7 < one.optimizer_state / eight.optimizer_state < 8
    settings = {"seq": 8, "checkpointing": "none", "precision": "fp32"}
    report = bertscope.fit("bert-tiny", "120MiB", batch_total=64, strategy="ddp", world_size=2, **settings)
    assert [(row.strategy, row.ranks, row.batch) for row in report.rows] == [("ddp", 2, 32)]
    with pytest.raises(SelectionError, match="strategy is determined by the module"):
        bertscope.estimate(torch.nn.Linear(2, 2), input_size=(1, 2), strategy="fsdp", world_size=2)
    with pytest.raises(SelectionError, match="batch_total searches the number of ranks"):
        bertscope.fit("bert-tiny", "1GiB", batch_total=64, rank=1)
    with pytest.raises(SelectionError, match="nproc starts 2 ranks; mesh has 4"):
        bertscope.profile("bert-tiny", nproc=2, strategy="hsdp", mesh="2x2")


def test_a_search_takes_the_settings_of_ranks_for_the_strategies_that_have_them(cli):
    def rows(*words):
        result = cli("fit", "bert-tiny", "--budget", "120MiB", "--batch-total", "64", "--seq", "8", "--checkpointing",
                     "none", "--precision", "fp32", "--format", "json", *words)  # fmt: skip
        assert result.code == 0, result.err
        return {row["strategy"]: (row["ranks"], row["peak_bytes"]) for row in result.json["rows"]}

    plain, gathered = rows("--world-size", "4"), rows("--world-size", "4", "--param-dtype", "bf16")
    assert {ranks for ranks, _ in plain.values()} == {4}
    assert set(plain) == set(gathered) == set(SEARCHED)
    assert {name for name in plain if plain[name] != gathered[name]} == {"fsdp", "fsdp-no-reshard"}
    assert rows("--world-size", "4", "--strategy", "fsdp").keys() == {"fsdp"}
