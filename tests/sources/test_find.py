"""MODEL: presets, hub names, the user's own files, each a source; every broken file gets one line with its place."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertscope.errors import BertscopeError, ConfigError, SourceError
from bertscope.files import read_json, read_yaml
from bertscope.sources.bert import preset_dir, preset_paths, read_preset
from bertscope.sources.find import load
from tests.conftest import cases

GOOD = """\
# mine
description: "mine"
architecture: BertModel
config:
  vocab_size: 100
  hidden_size: 24
  num_attention_heads: 3
  layer_norm_eps: 1e-12
"""


@pytest.mark.parametrize("name", preset_paths(".yaml"))
def test_a_preset_is_complete_in_itself_and_says_its_source(name):
    path = preset_dir() / f"{name}.yaml"
    source = read_preset(path)
    shaping = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
               "max_position_embeddings", "type_vocab_size", "hidden_act", "layer_norm_eps")  # fmt: skip
    assert set(shaping) <= set(source.config_lines)
    assert {item.key.split(".")[0] for item in source.expected if item.value} >= {
        "distinct_params", "layer_params", "groups", "layers",
    }  # fmt: skip


def write(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_users_own_file_works_wherever_a_name_does(tmp_path):
    source = load(write(tmp_path, GOOD))
    assert (source.name, source.config.hidden_size, source.config.layer_norm_eps) == ("mine", 24, 1e-12)
    assert load(write(tmp_path, GOOD, "other.yml")).name == "other"


BROKEN = [
    *cases("broken_models.yaml", "presets"),
    ("config:\n  vocab_size: " + "9" * 5000, 5, "unreasonable"),
    ("config:\n  vocab_size: 5\x00", 5, "not valid YAML"),
]


@pytest.mark.parametrize(("text", "line", "words"), BROKEN)
def test_a_broken_preset_is_told_with_file_and_line(tmp_path, text, line, words):
    path = write(tmp_path, "# one\n# two\narchitecture: BertModel\n" + text)
    with pytest.raises(BertscopeError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *cases("broken_models.yaml", "files"),
        (b"\x81\x80\x82", "not UTF-8"),
        (b"\x80\x04\x95\x00", "is a pickle that torch.save did not write"),  # of NumPy arrays, as detectron2's
        (b"\x1f\x8b\x08\x00" + b"x" * 2**18, "is compressed with gzip"),
        (b"\x7fELF\x00\x01\x02\xff", "not UTF-8"),
        ("[" * 2_000, "nested too deeply"),
        ("x" * (1 << 17) + "x", "larger than 128 KiB"),
    ],
)
def test_a_file_that_is_no_preset_is_told(tmp_path, text, words):
    with pytest.raises(BertscopeError, match=words) as caught:
        load(write(tmp_path, text))
    assert "mine.yaml" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


JSON_BROKEN = [
    *cases("broken_models.yaml", "config_json"),
    ('{"vocab_size": ' + "9" * 5000 + "}", 1, "not valid JSON"),
    ('{"a": ' + "[" * 100_000 + "}", 1, "nested too deeply"),
    ('{\n "a": ' + "[" * 600 + "]" * 600 + "}", 2, "nested more than 64 levels"),
    ('{\n "a": ' + '{"b": ' * 300 + "1" + "}" * 301, 2, "nested more than 64 levels"),
]


@pytest.mark.parametrize(("text", "line", "words"), JSON_BROKEN)
def test_a_broken_config_json_is_told_with_file_and_line(tmp_path, text, line, words):
    path = write(tmp_path, text, "config.json")
    with pytest.raises(BertscopeError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_a_folder_a_missing_file_and_a_pipe_are_told(tmp_path):
    with pytest.raises(SourceError, match=r"has no config\.json"):
        load(tmp_path)
    with pytest.raises(SourceError, match="No such file"):
        load(tmp_path / "absent.yaml")
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(SourceError, match="not a regular file"):
        load(pipe)
    with pytest.raises(SourceError, match="no preset or file"):
        load("x\x00y")
    with pytest.raises(SourceError, match="no preset or file"):
        load("n" * 5000)


def test_a_file_without_permission_is_told(tmp_path, monkeypatch):
    path = write(tmp_path, GOOD)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, whom no mode keeps out
    with pytest.raises(SourceError, match="Permission denied; check the path and its permissions"):
        load(path)


def test_a_pooler_is_asked_for_of_bert_model_alone():
    assert load("bert-large-zh").add_pooling_layer is False
    assert load("bert-large-zh", add_pooling_layer=True).add_pooling_layer is True
    with pytest.raises(ConfigError, match="only BertModel"):
        load("bert-large-zh", architecture="BertForMaskedLM", add_pooling_layer=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-12", 1e-12), ("1.0e-12", 1e-12), ("0x10", "0x10"), ("010", 10), ("1_000", 1000), ("no", "no"),
        ("~", None), ("null", None), ("true", True), ("'5'", "5"), ('"true"', "true"), ("-3", -3), (".5", 0.5),
        ("5.", 5.0), ("-.inf", float("-inf")), ("2024-01-01", "2024-01-01"), ("+7", 7), ("", None),
    ],
)  # fmt: skip
def test_scalars_are_read_by_the_rules_of_yaml_1_2(text, value):
    got = read_yaml(f"key: {text}\n", Path("x.yaml"))["key"].value
    assert got == value
    assert type(got) is type(value)


def test_a_small_json_file_has_the_values_that_it_shows():
    text = '{"a": [1, 2.5, null], "b": "\\u00e9", "c": true}'
    assert read_json(text, Path("x.json")).plain() == {"a": [1, 2.5, None], "b": "é", "c": True}


_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=5), _values | st.lists(_values, max_size=3), max_size=5))
def test_json_is_read_as_the_standard_library_reads_it(data):
    assert read_json(json.dumps(data, indent=1), Path("x.json")).plain() == data


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_dtype_of_the_weights_is_read_under_both_of_its_names(tmp_path, key):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", key: "float16"}))
    assert load(path).stored_dtype == "float16"


@pytest.mark.parametrize(("own", "name"), [
    ({"_name_or_path": "acme/bert-x", "architectures": ["BertForMaskedLM"]}, "acme/bert-x"),
    ({"_name_or_path": "/home/me/out/", "architectures": ["BertForMaskedLM"]}, "out"),
    ({"_name_or_path": "./", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    ({}, "w"),
    ({"_name_or_path": 3}, "w"),
], ids=str)  # fmt: skip
def test_a_config_json_names_its_model_itself_and_a_folder_has_its_own_name(tmp_path, own, name):
    (tmp_path / "w").mkdir()
    write(tmp_path / "w", json.dumps({"model_type": "bert", **own}), "config.json")
    assert load(str(tmp_path / "w" / "config.json")).name == name
    assert load(str(tmp_path / "w")).name == "w"
