"""Laws of settings: equal words give the equal run in every front end; a new row of a table is the whole change."""

from contextlib import suppress
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
import yaml

import bertscope
from bertscope.analyses.sweep.grid import points, read_grid
from bertscope.api.requests import request_of
from bertscope.commands.registry import typer_command
from bertscope.commands.table import Command
from bertscope.errors import SelectionError, naming, shown
from bertscope.files import read_mapping
from bertscope.memory import optimizers
from bertscope.memory.step import TORCH_DTYPES, make_optimizer
from bertscope.settings import checkpointing as tables
from bertscope.settings import generate
from bertscope.settings.checkpointing import Checkpointing, Strategy
from bertscope.settings.request import Request, read_settings
from bertscope.settings.rows import Row, SettingError, rows
from bertscope.settings.run_config import ESTIMATED, MEASURED, QUESTIONS, SETTINGS, SWEPT, RunConfig
from bertscope.settings.training import IMPLEMENTATIONS, OPTIMIZERS
from bertscope.sources.bert import read_expectations
from bertscope.units import PRECISIONS

# Values that a rule of a row's own asks for; every other row tells its values itself.
EXAMPLES = {
    "checkpointing": "every-2", "input": ("a=BxS:int64",), "freeze": ("embeddings",), "mesh": "2x2", "gpu": "t4",
    "optimizer_implementation": "foreach", "torch": "2.6", "price": "t4=0.35",
}  # fmt: skip


def example(own: Row) -> Any:
    """A value that is not the default."""
    if own.name in EXAMPLES:
        return EXAMPLES[own.name]
    if own.kind is bool:
        return not own.default
    if own.choices:
        return next(word for word in own.choices if word != own.default)
    return own.kind(own.low + 2 if own.below > own.low + 2 else own.low + 0.25)


def candidates(own: Row) -> list[Any]:
    return [*own.choices, True, False, 8, 2, "2x2", "t4", "1GiB"] if own.name != "mesh" else ["2x2"]


def needed(name: str, value: Any, table: dict[str, Row]) -> dict[str, Any]:
    """The settings without which this one has no effect."""
    given = {name: value}
    for _ in range(4):
        values = {other: own.default for other, own in table.items()} | given
        gaps = [
            (other, test) for key in given for other, test in table[key].concerns.items() if not test(values[other])
        ]
        if "mesh" in given:
            return given | {"strategy": "hsdp"}
        for other, test in gaps:
            kind = table[other].kind
            given[other] = next(word for word in candidates(table[other]) if type(word) is kind and test(word))
        if given.keys() & {"strategy", "rank"} and not given.keys() & {"world_size", "mesh"}:
            given["world_size"] = 8
        if given.keys() & {"rank", "world_size"} and "strategy" not in given:
            given["strategy"] = "ddp"
    return given


def settings_of(name: str, table: dict[str, Row] = SETTINGS) -> dict[str, Any]:
    return needed(name, example(table[name]), table)


@cache
def command() -> tuple[Any, list[Request]]:
    """A command with all settings and the requests that it was called with."""
    got: list[Request] = []
    row = Command("bertscope.api.memory:lengths", "*", "Take all settings.\n\nexamples:\n", group="Memory")
    monkey = pytest.MonkeyPatch()
    monkey.setattr("bertscope.commands.memory.lengths", lambda call: got.append(call.request), raising=False)
    return typer_command(row), got


def by_command(settings: dict[str, Any]) -> tuple[Any, ...]:
    """The records of the words of a command line, parsed by Click."""
    words = [word for name, value in settings.items() for word in generate.option_words(SETTINGS[name], value)]
    parsed, got = command()
    parsed.main(words, standalone_mode=False)
    return got.pop().resolved()[0]


def by_python(settings: dict[str, Any]) -> tuple[Any, ...]:
    return request_of("lengths", None, settings).resolved()[0]


def plain(settings: dict[str, Any]) -> tuple[Any, ...]:
    return Request(question="lengths", sources=(read_settings(settings),)).resolved()[0]


def by_grid(settings: dict[str, Any], folder: Any) -> tuple[Any, ...]:
    path = folder / "grid.yaml"
    lists = {name: [list(value)] if isinstance(value, tuple) else value for name, value in settings.items()}
    path.write_text(yaml.safe_dump({"batch": 1, **lists}))
    (point,) = points(read_grid(path))
    return point.records[1:]


def by_project(settings: dict[str, Any], folder: Any) -> tuple[Any, ...]:
    lines = [f"{name} = {_toml(value)}" for name, value in settings.items()]
    (folder / "pyproject.toml").write_text("\n".join(["[tool.bertscope]", *lines]))
    return by_command({})


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SETTINGS)
def test_equal_words_are_the_equal_run_in_every_front_end(name, here):
    settings = settings_of(name)
    expected = plain(settings)
    assert by_python(settings) == by_command(settings) == by_grid(settings, here) == expected
    assert by_project(settings, here) == expected


def test_a_file_instead_of_yes_or_no_is_the_equal_setting_in_every_front_end(here):
    settings = {"calibration": "card.json"}
    expected = plain(settings)
    assert (expected[0].device, expected[1].calibration) == ("cuda", "card.json")
    assert by_python(settings) == by_command(settings) == by_grid(settings, here) == expected
    assert by_project(settings, here) == expected


@pytest.mark.parametrize("name", [name for name in rows(RunConfig) if name not in ("batch", "seq")])
def test_an_expectation_file_takes_each_setting_of_a_run(name, here):
    settings = {**settings_of(name, rows(RunConfig)), "batch": 2, "seq": 8}
    run = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    memory = {"fine": {"mode": "training", **run, "peak_bytes": "9GiB"}}
    path = here / "a.bertscope.yaml"
    path.write_text(yaml.safe_dump({"model": "bert-tiny", "expected": {"memory": memory}}))
    (found,) = [item.run for item in read_expectations(read_mapping(path).get("expected")) if item.run is not None]
    assert found == plain(settings)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_command_of_a_run_gives_the_run_again(name, here):
    records = plain(settings_of(name))
    words = generate.setting_options(generate.changed(*records)).split()
    assert by_command(dict(zip_words(words))) == records


def zip_words(words: list[str]) -> Any:
    """The settings of options, each with the text that follows."""
    names = {generate.option_name(name): name for name in SETTINGS}
    for place, word in enumerate(words):
        option, _, text = word.partition("=")
        if option.startswith("--"):
            own = SETTINGS[names.get(option) or names[option.replace("--no-", "--")]]
            following = text or (words[place + 1] if place + 1 < len(words) else "")
            value = "--no-" not in option if own.kind is bool else following
            yield own.name, (value,) if own.is_list else own.values(value, is_text=True)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_without_effect_is_an_error_in_python_and_on_the_command_line(name):
    own = SETTINGS[name]
    for other in own.concerns:
        if other not in own.implies and not own.concerns[other](SETTINGS[other].default):
            with pytest.raises(SettingError, match=f"{name} has no effect with"):
                by_python({name: example(own)})
            option = generate.option_name(name)
            with pytest.raises(SettingError) as raised:
                by_command({name: example(own)})
            with naming(generate.option_form):
                assert f"{option} has no effect with" in shown(raised.value.message)
            break


def test_every_pair_of_settings_gives_runs_or_an_error_of_its_own():
    for one, other in permutations(SETTINGS, 2):
        sources = (read_settings(settings_of(one) | settings_of(other)),)
        with suppress(SettingError):
            assert Request(question="estimate", subject="bert-tiny", sources=sources).resolved()


def test_each_setting_has_a_keyword_a_line_of_help_and_words_in_a_report():
    documented = bertscope.estimate.__doc__ or ""
    for name, own in SETTINGS.items():
        assert own.help.endswith(".")
        assert f"        {name}: {own.help}" in documented or name in QUESTIONS["estimate"].unused
        assert generate.row_words(name, example(own))


def test_names_are_declared_once():
    with pytest.raises(TypeError, match="settings declared twice: threads"):
        rows(*MEASURED, *SWEPT[:1])
    assert set(rows(*ESTIMATED)) == set(SETTINGS)


def test_reentrant_checkpointing_is_answered_for_a_gpu_as_for_a_cpu():
    run = {"seq": 8, "checkpointing": "full", "reentrant": True, "gpu": "t4"}
    assert bertscope.estimate("bert-tiny", batch=1, **run).variants[0].answer == "yes"
    assert bertscope.fit("bert-tiny", batch=1, precision="fp32", **run).rows[0].fits


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
            with pytest.raises(SelectionError, match=f"{word} of optimizer {name}; choose one of default"):
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
    assert chosen.saved_in("encoder.layer", 4) == [None, None, frozenset(), frozenset()]


def test_the_default_strategies_of_fit_are_strategies_and_each_example_is_one():
    assert tables.are_strategies(tables.CHEAPEST_FIRST)
    assert all(tables.are_strategies(example) for example in tables.EXAMPLE_STRATEGIES)


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision_is_torchs(name):
    row = PRECISIONS[name]
    assert TORCH_DTYPES[name].itemsize == row.size_bytes
    assert str(TORCH_DTYPES[name]) == f"torch.{row.torch_name}"
