"""Run an example of every command and check known numbers; `.ci/versions` does so with the oldest and newest packages.

pytest does not collect this file by itself: the other tests include what is here.
"""

from importlib.metadata import version

import pytest

from tests.conftest import needs_graphviz, shortened
from tests.test_cli import COMMANDS, examples
from tests.test_completion import START_FILES, tab

RUN = ("bert-tiny", "--batch", "2", "--seq", "64", "--format", "json")


def shortest_examples() -> list[str]:
    """Return the shortest example of each command."""
    every = sorted(examples(), key=len)
    return [
        next(line for line in every if line.split()[1] == name) for name in COMMANDS if name != "mcp"
    ]  # which serves


@pytest.mark.parametrize("example", shortest_examples())
def test_an_example_of_every_command_runs(printed, example):
    if ".svg" in example or ".html" in example:  # a page has a diagram
        needs_graphviz()
    result = printed(shortened(example))
    has_fake_card = tuple(map(int, version("torch").split(".")[:2])) >= (2, 10)
    assert result.code == (3 if example.startswith("bertscope run ") and not has_fake_card else 0), result.err


@pytest.mark.parametrize("shell", START_FILES)
def test_tab_completes_and_prints_nothing_else(cli, monkeypatch, shell):
    assert "complete_" in cli("--show-completion", shell).out
    for name, value in tab(shell, "bertscope cou").items():
        monkeypatch.setenv(name, value)
    result = cli()
    assert (result.code, result.err) == (0, "")
    assert "count" in result.out


def test_the_interactive_tree_makes_its_screen(cli, monkeypatch):
    textual = pytest.importorskip("textual.app")
    screens = []
    monkeypatch.setattr("bertscope.commands.model.check_interactive", lambda *_: None)
    monkeypatch.setattr(textual.App, "run", lambda app, *_, **__: screens.append(app))
    result = cli("tree", "bert-tiny", "--interactive")
    assert (result.code, len(screens)) == (0, 1), result.err


@pytest.mark.parametrize(
    ("model", "distinct", "over_layers"),
    [("bert-base-cased", 108340804, 130609732), ("bert-large-zh", 324472832, 324472832)],
)
def test_parameters_are_the_known_numbers(cli, model, distinct, over_layers):
    totals = cli("count", model, "--format", "json").json["totals"]
    assert (totals["distinct_params"], totals["layer_params"]) == (distinct, over_layers)


def test_flops_are_the_known_number(cli):
    (model, *_) = cli("flops", "bert-base-uncased", "--seq", "128", "--format", "json").json["rows"]
    assert model["total"]["matmul_flops"] == 22_348_431_360


@pytest.mark.parametrize(("checkpointing", "kept"), [("none", 2955268), ("full", 339844), ("selective", 1781636)])
def test_estimates_are_the_known_numbers(cli, checkpointing, kept):
    (variant,) = cli("estimate", *RUN, "--checkpointing", checkpointing).json["variants"]
    assert variant["estimated"]["cost"]["saved_bytes"] == kept
    assert [phase["peak_bytes"] for phase in variant["estimated"]["phases"]][-1] == 101309092


def test_reentrant_checkpointing_is_measured_as_estimated(cli):
    (variant,) = cli("profile", *RUN, "--steps", "1", "--checkpointing", "full", "--reentrant").json["variants"]
    estimated, measured = (
        [phase["peak_bytes"] for phase in variant[name]["phases"]] for name in ("estimated", "measured")
    )
    assert estimated == pytest.approx(measured, rel=0.001)


def test_fit_finds_the_known_batch(cli):
    options = ("--budget", "1GiB", "--seq", "128", "--precision", "fp32", "--checkpointing", "none", "--format", "json")
    (row,) = cli("fit", "bert-tiny", *options).json["rows"]
    found = (row["batch"], row["exact_batch"], row["batch_without_margin"])
    assert found == (264, 267, 282), found


def test_the_sums_of_explain_are_what_the_modules_have(cli):
    sums = cli("explain", "bert-base-cased", "--format", "json").json["sums"]
    assert [(item["params"], item["flops"]) for item in sums] == [
        (item["counted_params"], item["counted_flops"]) for item in sums
    ]
    assert (sums[-1]["group"], sums[-1]["params"]) == ("total", 108340804)
