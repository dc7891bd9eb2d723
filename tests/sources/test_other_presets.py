"""Presets of other families, and published configurations whose backbone is named."""

import json

import pytest
from transformers import CONFIG_MAPPING

import bertscope
from bertscope.errors import BertscopeError
from bertscope.sources.find import find
from bertscope.sources.presets import config_paths
from tests.conftest import run_cli

COUNTS = {"modernbert-base": 149_655_232, "modernbert-large": 395_881_664}  # of Warner et al. 2024 (arXiv:2412.13663)
DETR = {
    "model_type": "detr", "architectures": ["DetrForObjectDetection"], "backbone": "resnet50", "backbone_config": None,
    "backbone_kwargs": {"in_chans": 3, "out_indices": [1, 2, 3, 4]}, "use_pretrained_backbone": True,
    "use_timm_backbone": True, "dilation": False, "num_labels": 91,
}  # fmt: skip


def test_the_list_of_presets_has_those_of_other_families():
    rows = {row["name"]: row for row in json.loads(run_cli("presets", "--format", "json").out)["rows"]}
    assert {name: rows[name]["distinct_params"] for name in config_paths()} == COUNTS


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_of_another_family_has_its_counts(name):
    if "modernbert" not in CONFIG_MAPPING:
        with pytest.raises(BertscopeError, match="does not know the model type 'modernbert'; a newer one may"):
            bertscope.count(name)
        return
    totals, config = bertscope.count(name).totals, json.loads(config_paths()[name].read_text())
    assert totals.distinct_params == COUNTS[name]
    assert totals.layer_params == config["bertscope"]["expected"]["layer_params"]
    # by hand: a layer has qkv and output (4 h^2), a gated feed-forward (3 h f) and two norms, the first layer one; the
    # embedding, its norm and the last one; the head's dense and norm, and the decoder's bias
    h, f, n, v = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    assert totals.distinct_params == n * (4 * h * h + 3 * h * f + 2 * h) - h + v * h + 2 * h + h * h + h + v


def test_a_name_on_the_hub_is_that_of_its_preset():
    assert find("answerdotai/ModernBERT-large").name == "modernbert-large"


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
