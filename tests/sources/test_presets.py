"""Presets: their list, their config.json, and what the member "bertscope" of a config.json says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bertscope.sources.find import load
from bertscope.sources.presets import config_paths, preset_paths


def test_a_name_lists_only_that_preset(cli):
    whole = cli("presets", "--format", "json").json["rows"]
    for name in ("bert-tiny", "modernbert-base"):
        assert cli("presets", name, "--format", "json").json["rows"] == [row for row in whole if row["name"] == name]


@pytest.mark.parametrize("words", [("bert-bse-cased",), ("bert-bse-cased", "--config")])
def test_an_unknown_preset_gets_a_suggestion(cli, words):
    result = cli("presets", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: no preset 'bert-bse-cased'; did you mean 'bert-base-cased'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config",), "type 'bertscope presets NAME --config'"),
        (("bert-tiny", "--config", "-f", "csv"), "a config.json is JSON; leave --format csv out"),
    ],
)
def test_the_config_json_of_no_preset_or_in_another_format_is_an_error_that_says_what_to_do(cli, words, message):
    result = cli("presets", *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


@pytest.mark.parametrize("name", preset_paths())
def test_the_config_json_of_every_preset_describes_its_model(cli, tmp_path, name):
    path = tmp_path / "config.json"
    assert cli("presets", name, "--config", "-o", path).code == 0
    assert load(str(path)).config.to_dict() | {"architectures": None} == load(name).config.to_dict()
    assert load(str(path)).architecture == load(name).architecture
    assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=2, sort_keys=True) + "\n"
    assert cli("presets", name, "--config", "--format", "json").out == path.read_text()


@pytest.mark.parametrize("name", config_paths())
def test_the_config_json_of_a_preset_of_another_family_has_no_member_of_bertscope(cli, name):
    members = json.loads(config_paths()[name].read_text())
    del members["bertscope"]
    assert cli("presets", name, "--config").json == members


def test_a_note_says_that_a_config_json_describes_a_pooler(cli):
    assert "describes the model with its pooler" in cli("presets", "bert-large-zh", "--config").err
    assert cli("presets", "bert-base-cased", "--config").err == ""


def test_the_config_json_of_a_preset_does_not_import_torch():
    code = (
        "import sys; from bertscope import cli; sys.argv = ['bertscope', 'presets', 'modernbert-base', '--config'];"
        "cli._run(); sys.exit(' '.join({'torch', 'transformers'} & {*sys.modules}) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_reference_reads_the_config_json(tmp_path, cli):
    transformers = pytest.importorskip("transformers", reason="the oracle is in the extra 'test'")
    assert cli("presets", "bert-base-uncased", "--config", "-o", tmp_path / "config.json").code == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (type(config).__name__, config.vocab_size, config.architectures) == ("BertConfig", 30522, ["BertModel"])


def test_what_only_a_preset_says_is_read_from_a_config_json_too(cli, tmp_path):
    path = tmp_path / "config.json"
    config = {"vocab_size": 7, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
              "intermediate_size": 16, "max_position_embeddings": 4}  # fmt: skip
    own = {"description": "small", "hub_names": ["me/mine"], "add_pooling_layer": False,
           "expected": {"distinct_params": 720}}  # fmt: skip
    path.write_text(json.dumps(config | {"bertscope": own}))
    counted = cli("count", path, "--format", "json", "--expect", "720")
    assert (counted.code, counted.json["totals"]["distinct_params"]) == (0, 720)
    assert "ignored" not in counted.err
    assert (load(str(path)).description, load(str(path)).hub_names) == ("small", ("me/mine",))
    assert cli("check", path).code == 0
    path.write_text(path.read_text().replace("720", "721"))
    done = cli("check", path)
    assert done.code == 1
    assert "721" in done.out


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"add_pooling_layer": 1}, "add_pooling_layer must be true or false"),
        ({"expected": {"params": 1}}, "unknown key 'params' in expected"),
        ({"expected": 5}, "expected"),
    ],
)
def test_what_only_a_preset_says_is_held_to_its_form_in_a_config_json(cli, tmp_path, member, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 7, "bertscope": member}, indent=2))
    done = cli("count", path)
    assert done.code == 2
    assert f"{path}:3: " in done.err
    assert message in done.err


def test_further_members_of_a_presets_config_json_are_a_mapping(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("architecture: BertModel\nconfig: {}\nextra: 5\n")
    result = cli("count", path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "extra must hold" in result.err
