"""Law: equal words give the equal run in every front end; each setting is tried, as its row describes it."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import pytest
import typer
import yaml

import bertscope
from bertscope.analyses.sweep.grid import read_grid
from bertscope.api.asked import Asked
from bertscope.commands.project import WithProjectDefaults
from bertscope.commands.registry import with_bundles
from bertscope.commands.run_options import CommandSettings, Takes
from bertscope.settings import generate
from bertscope.settings.resolve import Layer, resolve
from bertscope.settings.rows import Row, SettingError, rows
from bertscope.settings.run_config import ESTIMATED, MEASURED, SETTINGS, SWEPT, RunConfig
from bertscope.sources.expectations import read_expectations
from bertscope.text_files import read_mapping

# Values that a rule of a row's own asks for; every other row tells its values itself.
EXAMPLES = {
    "checkpointing": "every-2", "input": ("a=BxS:int64",), "freeze": ("embeddings",), "mesh": "2x2", "gpu": "t4",
    "optimizer_implementation": "foreach",
}  # fmt: skip


def example(own: Row) -> Any:
    """A value that is not the default."""
    if own.name in EXAMPLES:
        return EXAMPLES[own.name]
    if own.kind is bool:
        return not own.default
    if own.words:
        return next(word for word in own.words if word != own.default)
    return own.kind(own.low + 2 if own.below > own.low + 2 else own.low + 0.25)


def candidates(own: Row) -> list[Any]:
    return [*own.words, True, False, 8, 2, "2x2", "t4", "1GiB"] if own.name != "mesh" else ["2x2"]


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
            given[other] = next(word for word in candidates(table[other]) if test(word))
        if given.keys() & {"strategy", "rank"} and not given.keys() & {"world_size", "mesh"}:
            given["world_size"] = 8
        if given.keys() & {"rank", "world_size"} and "strategy" not in given:
            given["strategy"] = "ddp"
    return given


def settings_of(name: str, table: dict[str, Row] = SETTINGS) -> dict[str, Any]:
    return needed(name, example(table[name]), table)


@cache
def command() -> tuple[Any, list[CommandSettings]]:
    """A command with all settings, as `estimate` declares them, and a list of what it is called with."""
    got: list[CommandSettings] = []

    def function(*, run: Annotated[CommandSettings, Takes(command="")]) -> None:
        got.append(run)

    app = typer.Typer(add_completion=False)
    app.command(cls=WithProjectDefaults)(with_bundles(function))
    return typer.main.get_command(app), got


def by_command(settings: dict[str, Any]) -> tuple[Any, ...]:
    """The records of the words of a command line, parsed by Click."""
    words = [word for name, value in settings.items() for word in generate.option_words(SETTINGS[name], value)]
    parsed, got = command()
    parsed.main(words, standalone_mode=False)
    return Asked.of({}, **got.pop().keywords).resolved().points[0]


def by_python(settings: dict[str, Any]) -> tuple[Any, ...]:
    return Asked.of(settings).resolved().points[0]


def by_grid(settings: dict[str, Any], folder: Any) -> tuple[Any, ...]:
    path = folder / "grid.yaml"
    plain = {name: [list(value)] if isinstance(value, tuple) else value for name, value in settings.items()}
    path.write_text(yaml.safe_dump({"batch": 1, **plain}))
    (point,) = read_grid(path).points()
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
    expected = resolve(Layer(settings)).points[0]
    assert by_python(settings) == by_command(settings) == by_grid(settings, here) == expected
    assert by_project(settings, here) == expected


def test_a_file_instead_of_yes_or_no_is_the_equal_setting_in_every_front_end(here):
    settings = {"calibration": "card.json"}
    expected = resolve(Layer(settings)).points[0]
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
    assert found == resolve(Layer(settings)).points[0][0]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_command_of_a_run_gives_the_run_again(name, here):
    records = resolve(Layer(settings_of(name))).points[0]
    words = generate.setting_options(generate.changed(*records)).split()
    assert by_command(dict(zip_words(words))) == records


def zip_words(words: list[str]) -> Any:
    """The settings of options, each with the text that follows."""
    names = {option: name for name, option in generate.OPTIONS.items()}
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
            option = generate.OPTIONS[name]
            with pytest.raises(SettingError, match=f"{option.replace('--no-', '--')} has no effect with"):
                by_command({name: example(own)})
            break


def test_each_setting_has_a_keyword_a_line_of_help_and_words_in_a_report():
    documented = bertscope.estimate.__doc__ or ""
    for name, own in SETTINGS.items():
        assert own.help.endswith(".")
        assert f"        {name}: {own.help}" in documented
        assert generate.row_words(name, example(own))
    assert generate.KEYWORDS.read_text() == generate.keywords()


def test_names_are_declared_once():
    with pytest.raises(TypeError, match="settings declared twice: threads"):
        rows(*MEASURED, *SWEPT[:1])
    assert set(rows(*ESTIMATED)) == set(SETTINGS)


def test_reentrant_checkpointing_is_answered_for_a_gpu_as_for_a_cpu():
    run = {"seq": 8, "checkpointing": "full", "reentrant": True, "gpu": "t4"}
    assert bertscope.estimate("bert-tiny", batch=1, **run).variants[0].answer == "yes"
    assert bertscope.fit("bert-tiny", batch=1, precision="fp32", **run).rows[0].fits
