"""`convert`: a preset and a config.json say the same, and nothing is lost on the way there and back."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import bertscope
from bertscope.sources.convert import config_members, preset_data, yaml_text
from bertscope.sources.find import load
from bertscope.sources.presets import preset_dir, preset_of, preset_paths
from bertscope.text_files import read_json, read_mapping, read_yaml

SAVED = {
    "_name_or_path": "my: model #1", "architectures": ["BertForSequenceClassification"], "directionality": "bidi",
    "hidden_act": "gelu_new", "hidden_size": 48, "id2label": {"0": "no", "1": "1e-12", "2": "2020-01-01"},
    "label2id": {"no": 0, "1e-12": 1, "2020-01-01": 2}, "layer_norm_eps": 1e-12, "model_type": "bert",
    "num_attention_heads": 4, "num_hidden_layers": 2, "pooler_fc_size": 768, "pruned_heads": {"0": [1, 2]},
    "task_specific_params": {"a": {"b": [1, {"c": None}], "d": [], "e": {}}}, "torch_dtype": "float32",
    "transformers_version": "4.40", "vocab_size": 100, "classifier_dropout": None, "use_cache": True,
}  # fmt: skip


def there_and_back(members: dict, tmp_path) -> dict:
    """config.json -> preset -> config.json, through text."""
    text = yaml_text(preset_data(members))
    return config_members(read_yaml(text, tmp_path).plain())


@pytest.mark.parametrize("name", preset_paths())
def test_every_preset_survives_the_way_there_and_back(cli, tmp_path, name):
    path = tmp_path / "config.json"
    assert cli("convert", name, "--lossless", "-o", path).code == 0
    assert load(str(path)).config.to_dict() | {"architectures": None} == load(name).config.to_dict()
    assert load(str(path)).architecture == load(name).architecture
    back = cli("convert", path).out
    mine = tmp_path / f"{name}.yaml"
    mine.write_text(back)
    assert read_mapping(mine).plain() == read_mapping(preset_paths()[name]).plain()
    assert cli("check", mine).code == 0


def test_a_config_json_survives_the_way_there_and_back_to_the_byte(cli, tmp_path):
    path, preset = tmp_path / "config.json", tmp_path / "mine.yaml"
    whole = json.dumps(SAVED, indent=2, sort_keys=True) + "\n"
    path.write_text(whole)
    assert cli("convert", path, "--output", preset).code == 0
    assert load(str(preset)).config.num_labels == 3
    assert cli("convert", preset).out == whole
    assert cli("count", preset, "--format", "json").json["totals"] == cli("count", path, "-f", "json").json["totals"]


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"model_type": "bert"},
        {"architectures": None},
        {"architectures": []},
        {"architectures": ["BertForMaskedLM", "BertModel"]},
        {"num_labels": 2, "id2label": {"0": "a", "1": "b"}},
        {"num_labels": 5, "id2label": {"0": "a", "1": "b"}},
        {"id2label": None},
        {"torchscript": True},
        {"torchscript": True, "tie_word_embeddings": True, "return_dict": True},
        {"torchscript": False, "tie_word_embeddings": False},
        {"bertscope": "mine", "extra": {"config": 1}, "expected": [1]},
        {"bertscope": {"description": "x", "hub_names": ["a/b"], "expected": {"distinct_params": 5}}},
        {"é": "ü\n\t\x07\ud800 \u2028", "": "", "a: b": " x ", "null": None, "-": "-", "y": "yes", "[": "~"},
    ],
)
def test_members_of_every_kind_survive(tmp_path, members):
    assert there_and_back(members, tmp_path) == members


def test_what_only_a_preset_says_is_read_from_its_config_json_too(cli, tmp_path):
    preset, path = tmp_path / "mine.yaml", tmp_path / "config.json"
    preset.write_text(
        "description: small\nhub_names: [me/mine]\narchitecture: BertModel\nadd_pooling_layer: false\n"
        "config: {vocab_size: 7, hidden_size: 8, num_attention_heads: 2, num_hidden_layers: 1,"
        " intermediate_size: 16, max_position_embeddings: 4}\nexpected: {distinct_params: 720}\n"
    )
    assert cli("convert", preset, "--lossless", "-o", path).code == 0
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


def test_a_config_json_has_no_block_of_ours_unless_asked_and_a_note_names_what_is_left_out(cli):
    plain, whole = cli("convert", "bert-base-cased"), cli("convert", "bert-base-cased", "--lossless")
    assert set(whole.json) - set(plain.json) == {"bertscope"}
    assert "leaves out description, hub_names, expected of the preset; --lossless adds them" in plain.err
    assert whole.err == ""
    assert "describes the model with its pooler; --lossless adds it" in cli("convert", "bert-large-zh").err


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(extra=st.dictionaries(st.text(max_size=8).map(lambda key: f"_{key}"), _values, max_size=4),
       layers=st.integers(0, 5), dropout=st.floats(0, 1))  # fmt: skip
def test_whatever_a_config_json_holds_beside_its_fields_survives(tmp_path_factory, extra, layers, dropout):
    members = extra | {"num_hidden_layers": layers, "hidden_dropout_prob": dropout, "vocab_size": 7}
    assert there_and_back(members, tmp_path_factory.getbasetemp()) == members
    text = json.dumps(members)
    assert read_json(text, tmp_path_factory.getbasetemp()).plain() == members


def test_texts_are_quoted_for_readers_of_either_yaml():
    text = yaml_text(preset_data(SAVED))
    assert yaml.safe_load(text)["extra"]["id2label"] == SAVED["id2label"]
    assert "'2020-01-01'" in text
    assert "layer_norm_eps: 1e-12\n" in text


def test_the_reference_reads_what_is_written(tmp_path, cli):
    transformers = pytest.importorskip("transformers", reason="the oracle is in the extra 'test'")
    assert cli("convert", "bert-base-uncased", "-o", tmp_path / "config.json").code == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (type(config).__name__, config.vocab_size, config.architectures) == ("BertConfig", 30522, ["BertModel"])
    config.save_pretrained(tmp_path / "again")
    saved = bertscope.convert(str(tmp_path / "again" / "config.json"))
    assert preset_of(read_yaml(saved, tmp_path), tmp_path).config.vocab_size == 30522


MINE = """\
# at the top
description: "quoted"   # a word on it
architecture: BertForMaskedLM
hub_names:
  - me/mine  # there
config:
  # the width
  hidden_size: 768  # wide
  num_attention_heads: 12
  layer_norm_eps: 1e-12

  # of padding
  pad_token_id: 1
# before the numbers
expected:
  distinct_params: 5  # five
# at the end
"""


def comments(text: str) -> list[str]:
    return sorted(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)


@pytest.fixture
def mine(tmp_path):
    pytest.importorskip("ruamel.yaml", reason="keeping comments needs the extra 'convert'")
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return path


def test_a_preset_that_exists_keeps_its_comments_and_what_only_it_says(cli, tmp_path, mine):
    path = tmp_path / "config.json"
    path.write_text(
        '{"hidden_size": 384, "num_attention_heads": 12, "layer_norm_eps": 1e-12, "vocab_size": 9, "x": [1]}'
    )
    result = cli("convert", path, "-o", mine)
    assert (result.code, result.out) == (0, "")
    text = mine.read_text()
    assert comments(text) == comments(MINE)
    assert 'description: "quoted"   # a word on it\narchitecture: BertModel\nhub_names:\n  - me/mine  # there\n' in text
    assert "  hidden_size: 384  # wide\n" in text
    assert "pad_token_id" not in text
    source = load(str(mine))
    assert source.config == load(str(path)).config.__class__(
        hidden_size=384, layer_norm_eps=1e-12, vocab_size=9, architectures=()
    )
    assert json.loads(cli("convert", mine).out)["x"] == [1]


def test_a_preset_that_says_the_same_already_stays_as_it_is(cli, tmp_path, mine):
    for path in (mine, *preset_paths().values()):
        copy, members = tmp_path / "copy.yaml", tmp_path / "config.json"
        for newline in ("\n", "\r\n"):
            whole = path.read_text().replace("\n", newline)
            copy.write_bytes(whole.encode())
            assert cli("convert", copy, "-o", members).code == 0
            assert cli("convert", members, "-o", copy).code == 0
            assert copy.read_bytes().decode() == whole


def test_keys_that_are_numbers_in_yaml_are_found_again(cli, tmp_path, mine):
    head = "architecture: BertModel\nconfig: {num_labels: 2}\nextra:\n  id2label:\n"
    mine.write_text(f"{head}    0: a  # first\n    1: b\n")
    path = tmp_path / "config.json"
    path.write_text('{"id2label": {"0": "a", "1": "c", "2": "d"}}')
    assert cli("convert", path, "-o", mine).code == 0
    assert "    0: a  # first\n    1: c\n" in mine.read_text()
    assert json.loads(cli("convert", mine).out)["id2label"] == {"0": "a", "1": "c", "2": "d"}


def test_without_ruamel_a_preset_that_exists_is_left_alone(cli, tmp_path, mine, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    result = cli("convert", path, "-o", mine)
    assert result.code == 2
    assert "pip install 'bertscope[convert]'; or name a file that does not exist" in result.err
    assert mine.read_text() == MINE
    assert cli("convert", path, "-o", tmp_path / "new.yaml").code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "architecture: BertModel\nconfig: {num_labels: 3}\nextra: {id2label: {a: b}}\n",
            "num_labels 3 in config and 1",
        ),
        ("architecture: BertModel\nconfig: {architectures: [BertForMaskedLM]}\n", "change one"),
        ("architecture: BertModel\nconfig: {hidden_size: 24}\nextra: {hidden_size: 48}\n", "hidden_size 24 in config"),
        ("architecture: BertModel\nconfig: {}\nextra: 5\n", "extra must hold"),
        ("architecture: BertModel\nconfig: {}\nextra: {id2label: 5}\n", "id2label must map"),
    ],
)
def test_a_preset_that_contradicts_itself_is_told(cli, tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    result = cli("convert", path)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_the_wrong_direction_is_told(cli, tmp_path):
    assert "the other of json and yaml" in cli("convert", "bert-tiny", "--to", "yaml").err
    assert "ending of the other format" in cli("convert", "bert-tiny", "-o", tmp_path / "x.yaml").err
    assert cli("convert").code == 2
    assert cli("convert", "bert-tiny", "--to", "json").out == cli("convert", preset_dir() / "bert-tiny.yaml").out
