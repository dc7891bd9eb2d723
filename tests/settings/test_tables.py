"""The tables of optimizers, strategies and precisions: a new row is the whole change."""

from __future__ import annotations

import pytest
import torch

from bertscope.analyses.memory import optimizers
from bertscope.analyses.memory.step import TORCH_DTYPES, make_optimizer
from bertscope.errors import SelectionError
from bertscope.gpus import GPUS
from bertscope.settings import checkpointing as tables
from bertscope.settings.checkpointing import Checkpointing, Strategy
from bertscope.settings.optimizers import IMPLEMENTATIONS, OPTIMIZERS
from bertscope.settings.run_config import SETTINGS, RunConfig
from bertscope.units import PRECISIONS


def matrix() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, 3))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_keeps_the_state_that_the_table_names(name):
    row, param = OPTIMIZERS[name], matrix()
    optimizer = make_optimizer([param], RunConfig(optimizer=name))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert type(optimizer) is getattr(torch.optim if row.in_torch else optimizers, row.class_name)
    kept = {key for key, value in optimizer.state[param].items() if isinstance(value, torch.Tensor)}
    assert kept == set(row.state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_implementations_that_the_table_names(name):
    row = OPTIMIZERS[name]
    for word, arguments in IMPLEMENTATIONS.items():
        if row.has(word):
            assert make_optimizer([matrix()], RunConfig(optimizer=name, optimizer_implementation=word))
        else:
            with pytest.raises(
                SelectionError,
                match=f"{word} of optimizer {name}; choose one of default",
            ):
                RunConfig(optimizer=name, optimizer_implementation=word)
            if row.in_torch:
                with pytest.raises((TypeError, RuntimeError)):
                    getattr(torch.optim, row.class_name)([matrix()], **arguments)


@pytest.mark.parametrize("change", [{"checkpointing": "none"}, {"mode": "inference"}, {"optimizer": "none"}])
def test_a_changed_run_leaves_out_what_has_no_effect_any_more(change):
    run = RunConfig(checkpointing="full", reentrant=True, optimizer="sgd", momentum=0.9, accumulate=2)
    changed = run.changed(**change).flat()
    for name, value in run.flat().items():
        assert changed[name] in (value, change.get(name), SETTINGS[name].default)
        if not SETTINGS[name].concerns:
            assert changed[name] == change.get(name, value)
    assert changed["reentrant"] is (change == {"optimizer": "none"})
    assert run.changed() == run


def test_on_cuda_the_default_is_torchs_own():
    def foreach(name: str, **given: str) -> object:
        return RunConfig(optimizer=name, **given).optimizer_arguments.get("foreach")

    assert foreach("adamw", device="cuda") is True
    assert foreach("adafactor", device="cuda") is None
    assert foreach("adamw", device="cuda", optimizer_implementation="loop") is False
    assert foreach("adamw") is None


def test_each_row_of_the_table_is_a_word_of_the_setting():
    assert [*SETTINGS["optimizer"].words] == ["none", *OPTIMIZERS]
    assert [*SETTINGS["gpu"].words] == [*GPUS]


def test_a_row_more_is_a_strategy_more(monkeypatch):
    row = Strategy(
        form="from-K", example="from-2", pattern=r"from-(\d)",
        settings=lambda first: {"layers": frozenset(range(int(first), 12))}, reentrant=False,
    )  # fmt: skip
    with pytest.raises(SelectionError, match="unknown checkpointing strategy 'from-2'"):
        RunConfig(checkpointing="from-2")
    assert not tables.are_strategies("none,from-2")
    monkeypatch.setattr(tables, "_STRATEGIES", (*tables._STRATEGIES, row))
    assert tables.are_strategies("none,from-2")
    assert tables.parse_strategies("none,from-2,full") == ("none", "from-2", "full")
    assert not tables.takes_reentrant(RunConfig(checkpointing="from-2").checkpointing)
    chosen = Checkpointing.parse("from-2")
    assert chosen.kept_in("encoder.layer", 4) == [None, None, frozenset(), frozenset()]


def test_the_default_strategies_of_fit_are_strategies_and_each_example_is_one():
    assert tables.are_strategies(tables.CHEAPEST_FIRST)
    assert all(tables.are_strategies(example) for example in tables.EXAMPLE_STRATEGIES)


def test_a_period_begins_with_the_first_layer():
    assert Checkpointing.parse("every-3").kept_in("encoder.layer", 5) == [frozenset(), None, None, frozenset(), None]


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision_is_torchs(name):
    row = PRECISIONS[name]
    assert TORCH_DTYPES[name].itemsize == row.size_bytes
    assert str(TORCH_DTYPES[name]) == f"torch.{row.torch_name}"
