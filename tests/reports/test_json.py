"""Reports as JSON: the schemas against real output; every kind read back; other text refused in one line."""

import json
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import bertscope
from bertscope.config import BertConfig
from bertscope.errors import ConfigError, SelectionError, SourceError
from bertscope.reports import base
from bertscope.reports.base import to_json
from bertscope.reports.json import _object_schema, report_classes, schema, typed
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost, StepTime
from bertscope.reports.tool import PresetRow, PresetsReport
from bertscope.settings.rows import Row, Settings, rows
from tests.conftest import data

OUTPUTS = data("outputs.yaml")["commands"]


@pytest.mark.parametrize(("kind", "command"), [(kind, line) for kind, lines in OUTPUTS.items() for line in lines])
def test_the_output_of_every_command_is_as_its_schema_says_and_reads_back(cli, tmp_path, monkeypatch, kind, command):
    monkeypatch.chdir(tmp_path)
    reports = []
    real = base.to_json
    monkeypatch.setattr(base, "to_json", lambda report: reports.append(report) or real(report))
    (tmp_path / "mine.bertscope.yaml").write_text("model: bert-tiny\nexpected: {ties: {a: b}, distinct_params: 5}\n")
    (tmp_path / "grid.yaml").write_text("model: bert-tiny\nseq: 16\noptimizer: sgd\nworld_size: [1, 2]\n")
    document = json.loads(cli("schema", kind, "--format", "json").out)
    Draft202012Validator.check_schema(document)
    result = cli(*command.split(), "--format", "json")
    Draft202012Validator(document).validate(result.json)
    assert bertscope.from_json(result.out) == reports[-1]  # those before it are saved


def test_every_report_has_its_schema_and_every_schema_its_test(cli):
    kinds = {row["report"] for row in cli("schema", "--format", "json").json["rows"]}
    assert kinds == set(report_classes())
    assert kinds >= {*OUTPUTS, "memory", "fit"}
    for kind in kinds:
        Draft202012Validator.check_schema(schema(kind))


def test_the_schema_of_a_config_takes_what_a_config_takes(cli):
    validator = Draft202012Validator(cli("schema", "config").json)
    Draft202012Validator.check_schema(validator.schema)
    for name in ("bert-tiny", "bert-base-cased"):
        assert [*validator.iter_errors(cli("presets", name, "--config").json)] == []
    for key, value in {"hidden_act": "gelu2", "hidden_size": 0, "classifier_dropout": 2, "use_cache": "no"}.items():
        assert not validator.is_valid({key: value})
        with pytest.raises(ConfigError):
            BertConfig.from_dict({key: value})
    assert validator.is_valid({"classifier_dropout": None, "id2label": {}})
    assert "did you mean 'config'" in cli("schema", "confg").err


CLASSES = [item for classes in report_classes().values() for item in classes]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=5), values, max_size=2),
    max_leaves=3,
)
SCALARS = {int: st.integers(), float: st.floats(allow_nan=False), str: st.text(max_size=5), bool: st.booleans(),
           type(None): st.none(), Any: PLAIN}  # fmt: skip


def values(hint: Any, inside: tuple[type, ...] = ()) -> st.SearchStrategy:
    """Values of a type; a dataclass that contains itself does so once."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if is_dataclass(hint) and issubclass(hint, Settings):
        return st.lists(st.sampled_from([*rows(hint).values()]).flatmap(setting), max_size=2).map(partial(record, hint))
    if hint in LAWFUL:
        return LAWFUL[hint]()
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(
            hint, **{item.name: values(hints[item.name], (*inside, hint)) for item in fields(hint) if item.init}
        )
    if origin in (Union, UnionType):
        return st.one_of(values(argument, inside) for argument in arguments)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(SCALARS[str], values(arguments[1], inside), max_size=2)
    if origin is tuple and arguments[-1] is Ellipsis:
        most = 0 if arguments[0] in inside else 2
        return st.lists(values(arguments[0], inside), max_size=most).map(tuple) if most else st.just(())
    assert origin is tuple, hint
    return st.tuples(*(values(argument, inside) for argument in arguments))


def peak_of(parts: Parts, path: str) -> PhasePeak:
    return PhasePeak(phase="forward", peak_bytes=parts.total, path=path, operator="mm", parts=parts)


def cost_of(peak: PhasePeak, more: int, lacking: int | None, time: StepTime | None) -> StepCost:
    """A cost that does not contradict itself."""
    low = peak.peak_bytes + more
    reserved, context = (ByteRange(low_bytes=size, high_bytes=size + more) for size in (low, 0))
    limit = None if lacking is None else low + 2 * more - lacking
    shortfall = ByteRange(low_bytes=(lacking or 0) // 3, high_bytes=lacking or 0)
    return StepCost(peak=peak, reserved=reserved if more else None, context=context,
                    limit_bytes=limit, shortfall=shortfall, step_flops=more, recompute_flops=more // 2,
                    time=time)  # fmt: skip


SIZES = st.integers(0, 2**40)
LAWFUL = {
    PhasePeak: lambda: st.builds(peak_of, st.builds(Parts, parameters=SIZES, inputs=SIZES), SCALARS[str]),
    StepCost: lambda: st.builds(cost_of, values(PhasePeak), SIZES, st.none() | SIZES, st.none() | values(StepTime)),
}  # kinds of which not every combination of values is one


def setting(own: Row) -> st.SearchStrategy:
    """The name of a setting with its values."""
    numbers = st.integers(int(own.low), int(min(own.below - 1, 1000)))
    found = numbers.map(float) if own.kind is float else numbers
    found = st.sampled_from(own.choices) if own.choices else found if own.kind is not str else st.just("2x2")
    found = st.booleans() if own.kind is bool else found
    return st.tuples(st.just(own.name), found.map(lambda value: (value,)) if own.is_list else found)


def record(kind: type[Settings], given: list[tuple[str, Any]]) -> Settings:
    """Return the record of these settings; of the first, or of none, if no run has them together."""
    with suppress(SelectionError):
        return kind.of(dict(given))
    return record(kind, given[:-1])


@pytest.mark.parametrize("kind", CLASSES, ids=lambda item: item.__name__)
def test_a_report_of_every_kind_is_as_its_schema_says_and_read_back_as_it_was(kind):
    validator = Draft202012Validator(schema(kind.kind))

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(values(kind))
    def law(report):
        text = bertscope.to_json(report)
        validator.validate(json.loads(text))
        assert bertscope.from_json(text) == report

    law()


def test_a_report_that_a_reader_can_check_by_hand_is_read_back():
    row = PresetRow(name="tiny", family="bert", architecture="BertModel", distinct_params=7, layer_params=None,
                    hidden_size=2, num_hidden_layers=1, requires="", description="é", hub_names=("a", "b"),
                    path="tiny.yaml")  # fmt: skip
    text = (
        '{"schema": 6, "kind": "presets", "rows": [{"name": "tiny", "family": "bert", "architecture": "BertModel", '
        '"distinct_params": 7, "layer_params": null, "hidden_size": 2, "num_hidden_layers": 1, "requires": "", '
        '"description": "é", "hub_names": ["a", "b"], "path": "tiny.yaml"}]}'
    )
    assert bertscope.from_json(text) == bertscope.from_json(text.encode()) == PresetsReport(rows=(row,))


@pytest.mark.parametrize("field", ["schema", "kind", "subject", "totals", "rows"])
def test_a_report_without_a_field_it_needs_is_refused(field):
    data = json.loads(to_json(bertscope.count(bertscope.build(bertscope.load("bert-tiny").config))))
    del data[field]
    with pytest.raises(SourceError):
        bertscope.from_json(json.dumps(data))


@pytest.mark.parametrize("number", [2**200, -(10**4000)], ids=["2**200", "-10**4000"])
def test_a_number_that_is_no_float_is_refused(number):
    """Else the report raises OverflowError when it is shown: sizes are quotients."""
    data = bertscope.count("bert-tiny").to_dict()
    data["totals"]["param_bytes"] = number
    with pytest.raises(SourceError, match=r"totals\.param_bytes is a number that no report has: -?1"):
        bertscope.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON: Expecting value"),
        (b"\xff\xfe\xff", "not JSON"),
        ("[" * 200_000, "nested too deep"),
        ("9" * 5000, "not JSON"),
        ("[1]", "must be a JSON object; got a list"),
        ('{"kind": "cuont"}', "no report of kind \"cuont\"; did you mean 'count'?"),
        ('{"kind": ["count"]}', "no report of kind a list"),
        ('{"kind": "presets", "rows": []}', "the report has schema null; this version reads 6"),
        (
            '{"schema": 1, "kind": "presets", "rows": []}',
            "the report has schema 1; this version reads 6: write the rep",
        ),
        ('{"schema": true, "kind": "presets", "rows": []}', "schema true"),
        ('{"schema": 6, "kind": "presets"}', "presets lacks the field 'rows'"),
        ('{"schema": 6, "kind": "presets", "rows": {}}', "presets.rows must be a list; got an object"),
        ('{"schema": 6, "kind": "presets", "rows": [3]}', "presets.rows[0] must be an object; got 3"),
        ('{"schema": 6, "kind": "presets", "rows": [], "row\\n": 1}', 'presets has no field "row\\n"; did you mean'),
        ('{"schema": 6, "kind": "presets", "rows": [{"name": true}]}', "presets.rows[0].name must be text; got true"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_report_is_one_line_that_says_why(text, words):
    with pytest.raises(SourceError) as found:
        bertscope.from_json(text)
    assert words in str(found.value)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) <= 620


def test_a_run_that_cannot_be_is_one_line_with_its_place():
    data = bertscope.estimate("bert-tiny", seq=8).to_dict()
    for changed, words in (({"batch": 0}, r"run: batch takes a whole number of at least 1; got 0"),
                           ({"mode": "inference", "ema": True}, "run: ema has no effect with mode inference"),
                           ({"dtype": "fp32"}, r'run has no field "dtype"')):  # fmt: skip
        with pytest.raises(SourceError, match=words):
            bertscope.from_json(json.dumps(data | {"run": data["run"] | changed}))


@dataclass(frozen=True, kw_only=True)
class Example:
    """One field of each form."""

    size: Literal["s", "m"] = "s"
    pair: tuple[int, str] = (1, "a")
    table: dict[str, float] | None = None
    either: int | str = 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"size": "xl"}, "size must be one of s, m; got"),
        ({"size": 1}, "size must be one of s, m"),
        ({"pair": [1]}, "pair must be a list of 2"),
        ({"pair": [True, "a"]}, "pair[0] must be an integer; got true"),
        ({"table": {"x": "1"}}, "table.x must be a number"),
        ({"either": 1.5}, "either must be an integer or text; got 1.5"),
        ({"either": None}, "either must be an integer or text; got null"),
    ],
    ids=str,
)
def test_every_form_of_type_is_checked(data, words):
    assert typed(Example, {"pair": [2, "b"], "table": {"x": 1}}, "it") == Example(pair=(2, "b"), table={"x": 1})
    with pytest.raises(SourceError) as found:
        typed(Example, data, "it")
    assert words in str(found.value)
    validator = Draft202012Validator(_object_schema(Example, {}))
    whole = {"size": "m", "pair": [1, "a"], "table": None, "either": "x"}
    assert validator.is_valid(whole)
    assert not validator.is_valid(whole | data)
