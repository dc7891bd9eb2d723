"""The JSON Schemas, against the real output of every command, and the reports whose commands are not here."""

from __future__ import annotations

import dataclasses
import json

import pytest
from jsonschema import Draft202012Validator

import bertscope
from bertscope.config import BertConfig
from bertscope.errors import ConfigError
from bertscope.gpus import Gpu
from bertscope.reports import base
from bertscope.reports.base import Subject, to_json
from bertscope.reports.json import report_classes, schema
from bertscope.reports.memory import FitReport, FitRow, MemoryReport, ProcessMemory, Timing, Variant
from bertscope.settings.run_config import RunConfig

OUTPUTS = {
    "count": ["count bert-tiny", "count --by parameter --shapes", "count bert-tiny --by group --freeze embeddings",
              "count bert-tiny --by module -a BertForMaskedLM"],
    "tree": ["tree bert-tiny", "tree --shapes --depth 3"],
    "flops": ["flops bert-tiny --mode training --checkpointing full --seq 8,16", "flops bert-base-uncased --depth 1"],
    "explain": ["explain bert-tiny", "explain bert-large-zh --lang zh",
                "explain bert-tiny encoder --lora r=2"],
    "diff": ["diff bert-tiny bert-mini", "diff bert-tiny bert-tiny"],
    "diagram": ["diagram bert-tiny", "diagram bert-tiny --kind forward", "diagram bert-tiny --kind tree",
                "diagram bert-tiny encoder.layer.0.attention.self --kind forward"],
    "print": ["tree bert-tiny --style torch"],
    "presets": ["presets"],
    "check": ["check bert-tiny bert-base-cased", "check mine.bertscope.yaml"],
    "memory": ["estimate bert-tiny --checkpointing none,full",
    "estimate bert-tiny --device cuda --precision autocast-bf16",
               "profile bert-tiny --batch 1 --seq 16 --steps 1 --optimizer sgd"],
    "fit": ["fit bert-tiny --budget 200MiB --seq 64 --checkpointing none --precision fp32 --optimizer sgd",
            "fit bert-tiny --budget 2GiB -s 64 -b 4 --checkpointing none,full --precision fp32 --optimizer sgd"],
    "comparison": ["count bert-tiny bert-mini --by group", "flops bert-tiny bert-mini --seq 8,16",
                   "estimate bert-tiny bert-mini --seq 16 --optimizer sgd",
                   "fit bert-tiny --gpu t4,a10 -s 64 -b 4 --checkpointing none --precision fp32 --optimizer sgd"],
    "report": ["report bert-tiny --compare bert-mini --no-fit --seq 16 --optimizer sgd"],
    "schemas": ["schema"],
    "sweep": ["sweep grid.yaml -o rows.jsonl --workers 1"],
    "doctor": ["doctor"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "command"), [(kind, line) for kind, lines in OUTPUTS.items() for line in lines])
def test_the_output_of_every_command_is_as_its_schema_says_and_reads_back(cli, tmp_path, monkeypatch, kind, command):
    monkeypatch.chdir(tmp_path)
    reports = []
    real = base.to_json
    monkeypatch.setattr(base, "to_json", lambda report: reports.append(report) or real(report))
    (tmp_path / "mine.bertscope.yaml").write_text("model: bert-tiny\nexpected: {ties: {a: b}, distinct_params: 5}\n")
    (tmp_path / "grid.yaml").write_text("model: bert-tiny\nseq: 16\noptimizer: sgd\nworld_size: [1, 2]\n")
    document = json.loads(cli("schema", kind).out)
    Draft202012Validator.check_schema(document)
    result = cli(*command.split(), "--format", "json")
    Draft202012Validator(document).validate(result.json)
    assert [bertscope.from_json(result.out)] == reports


def test_the_reports_on_memory_are_as_their_schema_says():
    from bertscope.analyses.memory.steps import estimate_memory

    source = bertscope.load("bert-tiny")
    subject = bertscope.count(bertscope.build(source.config)).subject
    run_config = RunConfig(device="cuda", freeze=("embeddings",))
    estimated = estimate_memory(source, run_config)
    timing = Timing(warmup_seconds=1.0, step_seconds=(0.5, 1), median_seconds=0.75, tokens_per_second=1e3, flops=5,
                    flops_per_second=5.0)  # fmt: skip
    process = ProcessMemory(resident_before_bytes=1, high_water_bytes=2, run_high_water_bytes=3)
    variants = (
        Variant(checkpointing="none", reentrant=False, estimated=estimated),
        Variant(checkpointing="full", reentrant=True, measured=estimated, timing=timing, process=process),
        Variant(checkpointing="full", reentrant=True, failure="killed"),
    )
    report = MemoryReport(subject=subject, run=run_config, machine="cpu", variants=variants)
    validate(report)


@pytest.mark.parametrize("card", [None, Gpu(name="H200", memory_bytes=2**37, source="vendor")])
def test_the_report_on_what_fits_is_as_its_schema_says(card):
    row = FitRow(seq=1, checkpointing="none", precision="fp32", batch=1, batch_by_bytes=2, answer="yes",
                 peak_bytes=1, reserved_bytes=2, card_bytes=3,
                 next_peak_bytes=2, fits=True, step_flops=1, extra_flops=0.3)  # fmt: skip
    subject = Subject(name="x", architecture="BertModel", dtype="stored", torch_version="2", bertscope_version="1")
    validate(FitReport(subject=subject, run=RunConfig(), budget_bytes=1, overhead_bytes=0,
                       card=card, asked_batch=None if card else 8, rows=(row,)))  # fmt: skip


def validate(report) -> None:
    """Through JSON, as a reader gets it."""
    Draft202012Validator(schema(report.kind)).validate(json.loads(to_json(report)))


def test_every_report_has_its_schema_and_every_schema_its_test(cli):
    kinds = {row["report"] for row in cli("schema", "--format", "json").json["rows"]}
    assert kinds == set(report_classes())
    assert kinds >= {*OUTPUTS, "memory", "fit"}
    for kind in kinds:
        Draft202012Validator.check_schema(schema(kind))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("totals"),
        lambda data: data.update(more=1),
        lambda data: data.update(schema=1),
        lambda data: data.update(kind="tree"),
        lambda data: data["totals"].update(distinct_params="4385920"),
        lambda data: data["rows"][0].update(params=None),
        lambda data: data["rows"][-2]["parts"][0].pop("path"),
        lambda data: data["rows"][0].update(shapes=[["a"]]),
    ],
)
def test_what_is_not_as_the_schema_says_is_found(cli, spoil):
    data = cli("count", "bert-tiny", "--format", "json").json
    validator = Draft202012Validator(schema("count"))
    assert validator.is_valid(data)
    spoil(data)
    assert not validator.is_valid(data)


def test_a_schema_is_json_and_a_kind_that_is_not_there_is_told(cli):
    assert cli("schema", "count", "--format", "json").json == schema("count")
    assert "did you mean 'count'" in cli("schema", "coun").err
    assert cli("schema", "count", "--format", "csv").code == 2


def test_pairs_and_mappings_have_their_schema():
    @dataclasses.dataclass(frozen=True)
    class Example:
        """One."""

        pair: tuple[int, str]
        table: dict[str, int]
        maybe: tuple[float, ...] | None

    from bertscope.reports.json import _object_schema

    made = Draft202012Validator(_object_schema(Example, {}))
    assert made.is_valid({"pair": [1, "a"], "table": {"x": 1}, "maybe": None})
    for wrong in ({"pair": [1]}, {"pair": [1, "a", 2]}, {"pair": ["a", 1]}, {"table": {"x": "y"}}, {"maybe": ["x"]}):
        assert not made.is_valid({"pair": [1, "a"], "table": {}, "maybe": []} | wrong)


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
