"""Presets, of other families too: their list, their config.json, and what the member "bertscope" of one says."""

import json
import re

import pytest
from transformers import CONFIG_MAPPING

import bertscope
from bertscope.errors import BertscopeError
from bertscope.sources.bert import preset_paths, presets_by_alias
from bertscope.sources.find import find, load
from bertscope.views.console import Target
from bertscope.views.views import display
from tests.conftest import data


def test_a_name_lists_only_that_preset(cli):
    whole = cli("presets", "--format", "json").json["rows"]
    for name in ("bert-tiny", "modernbert-base"):
        assert cli("presets", name, "--format", "json").json["rows"] == [row for row in whole if row["name"] == name]


@pytest.mark.parametrize("name", preset_paths(".yaml"))
def test_the_config_json_of_every_preset_describes_its_model(cli, tmp_path, name):
    path = tmp_path / "config.json"
    assert cli("presets", name, "--config", "-o", path).code == 0
    assert load(str(path)).config.to_dict() | {"architectures": None} == load(name).config.to_dict()
    assert load(str(path)).architecture == load(name).architecture
    assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=2, sort_keys=True) + "\n"
    assert cli("presets", name, "--config", "--format", "json").out == path.read_text()


@pytest.mark.parametrize("name", ["modernbert-base", "gpt2"])
def test_the_config_json_of_a_preset_of_another_family_has_no_member_of_bertscope(cli, name):
    members = json.loads(preset_paths()[name].read_text())
    del members["bertscope"]
    assert cli("presets", name, "--config").json == members


def test_a_note_says_that_a_config_json_describes_a_pooler(cli):
    assert "describes the model with its pooler" in cli("presets", "bert-large-zh", "--config").err
    assert cli("presets", "bert-base-cased", "--config").err == ""


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


COUNTS = {"modernbert-base": 149_655_232, "modernbert-large": 395_881_664}  # of Warner et al. 2024 (arXiv:2412.13663)
DETR = {
    "model_type": "detr", "architectures": ["DetrForObjectDetection"], "backbone": "resnet50", "backbone_config": None,
    "backbone_kwargs": {"in_chans": 3, "out_indices": [1, 2, 3, 4]}, "use_pretrained_backbone": True,
    "use_timm_backbone": True, "dilation": False, "num_labels": 91,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_of_another_family_has_its_counts(name):
    if "modernbert" not in CONFIG_MAPPING:
        with pytest.raises(BertscopeError, match="does not know the model type 'modernbert'; a newer one may"):
            bertscope.count(name)
        return
    totals, config = bertscope.count(name).totals, json.loads(preset_paths()[name].read_text())
    assert totals.distinct_params == COUNTS[name]
    assert totals.layer_params == config["bertscope"]["expected"]["layer_params"]
    # by hand: a layer has qkv and output (4 h^2), a gated feed-forward (3 h f) and two norms, the first layer one; the
    # embedding, its norm and the last one; the head's dense and norm, and the decoder's bias
    h, f, n, v = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    assert totals.distinct_params == n * (4 * h * h + 3 * h * f + 2 * h) - h + v * h + 2 * h + h * h + h + v


UNPUBLISHED = {"bert-mini", "bert-small", "bert-medium"}  # the oracle compares their counts with transformers
NAMES = data("hub_names.yaml")
UNITS = {"": 1, "M": 1e6, "B": 1e9}


@pytest.mark.parametrize("name", preset_paths())
def test_a_preset_has_its_source_and_the_published_count_of_the_class_named_there(name):
    text = re.sub(r"\n# *", " ", preset_paths()[name].read_text())
    assert text.startswith("# Source: ") or json.loads(text)["bertscope"]["source"]
    published = re.search(r"Published: ([\d.,]+)([MB]?) \((\w+)\)", text)
    assert (published is None) == (name in UNPUBLISHED)
    if published is None or bertscope.presets(name).rows[0].family not in CONFIG_MAPPING:
        return
    number, unit, architecture = published.groups()
    got = bertscope.count(find(name, architecture=architecture)).totals.distinct_params
    tolerance = 0.04 if unit else 0  # a rounded count is of a class with or without its head
    assert got == pytest.approx(float(number.replace(",", "")) * UNITS[unit], rel=tolerance, abs=0)


@pytest.mark.parametrize(("preset", "names"), NAMES["finds"].items())
def test_a_name_on_the_hub_finds_its_preset(preset, names):
    assert {find(name).name for name in names} == {preset}


@pytest.mark.parametrize(("preset", "names"), NAMES["suggests"].items())
def test_the_error_on_a_misspelt_name_names_the_nearest_preset(preset, names):
    for name in names:
        with pytest.raises(BertscopeError, match=f"^no preset or file named .*; did you mean .*'{preset}'"):
            find(name)


def test_the_error_on_a_name_without_a_preset_is_one_line_that_says_how():
    for name in NAMES["says_how"]:
        with pytest.raises(BertscopeError, match=r"^no preset or file named [^\n]*download[^\n]*$"):
            find(name)


@pytest.mark.parametrize("address", ["https://hf.co/mine.yaml", "https://hf.co/../mine.yaml", "hf://os:system"])
def test_the_address_of_a_page_names_neither_a_file_nor_code(address, tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        (folder / "mine.yaml").write_bytes(preset_paths()["bert-tiny"].read_bytes())
    monkeypatch.chdir(tmp_path / "below")
    assert find("mine.yaml").name
    with pytest.raises(BertscopeError, match=r"^(no preset or file named|there is no file|[^ ]* cannot be read)"):
        find(address)


def test_no_name_is_that_of_two_presets():
    names = [name.lower() for row in bertscope.presets().rows for name in {row.name.lower(), *row.hub_names}]
    assert len(names) == len(set(names))
    assert {path.stem for path in presets_by_alias().values()} == set(preset_paths())


def test_presets_lists_a_family_or_those_whose_names_contain_a_text(cli):
    assert {row.family for row in bertscope.presets("deberta-v2").rows} == {"deberta-v2"}
    assert {row.name for row in bertscope.presets("macbert").rows} == {"chinese-macbert-base", "chinese-macbert-large"}
    assert [row.name for row in bertscope.presets("BAAI/BGE-M3").rows] == ["bge-m3"]
    roberta = bertscope.presets("roberta-large").rows
    assert [(row.hidden_size, row.num_hidden_layers, row.requires) for row in roberta] == [(1024, 24, "transformers")]
    shown = display(bertscope.presets(), "table", target=Target(80))
    assert max(map(len, shown.splitlines())) <= 80
    assert all(row.name in shown and str(row.hidden_size) in shown for row in bertscope.presets().rows)
    assert cli("presets", "macbert", "--config").code == 2


def test_a_published_detr_is_built_with_a_resnet_of_transformers(tmp_path, cli):
    (tmp_path / "config.json").write_text(json.dumps(DETR))
    result = cli("count", tmp_path / "config.json", "--format", "json")
    assert result.json["totals"]["distinct_params"] == 41_524_768  # the 41.5 M of Carion et al. 2020 (arXiv:2005.12872)
    assert "without timm and pretrained weights" in result.err


@pytest.mark.parametrize(
    "change", [{"backbone": "./evil"}, {"backbone_kwargs": {"checkpoint_path": "x"}}, {"dilation": True},
               {"use_timm_backbone": False}, {"model_type": "dpt"}], ids=str,
)  # fmt: skip
def test_any_other_named_backbone_is_refused(change, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DETR | change))
    with pytest.raises(BertscopeError, match="backbone"):
        find(tmp_path / "config.json")
