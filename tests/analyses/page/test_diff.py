"""Two models side by side."""

from dataclasses import replace

import pytest

import bertscope
from bertscope.sources.bert import preset_dir


def source(preset: str = "bert-tiny", architecture: str | None = None, **fields):
    found = bertscope.load(preset, architecture=architecture)
    return replace(found, config=replace(found.config, **fields))


pytestmark = pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")  # relative positions on sdpa

PAIRS = [
    (source(), source("bert-mini")),
    (source(), source(num_hidden_layers=5)),
    (source(), source(architecture="BertForMaskedLM")),
    (source(), source(position_embedding_type="relative_key")),
    (source(architecture="BertForMaskedLM"), source(architecture="BertForMaskedLM", tie_word_embeddings=False)),
    (source("bert-base-cased"), source("bert-base-uncased")),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_rows_explain_the_difference_of_the_totals_and_the_other_way_round_is_the_mirror_image(a, b):
    there, back = bertscope.diff(a, b), bertscope.diff(b, a)
    assert not there.is_empty
    assert [(c.field, c.a, c.b) for c in there.fields] == [(c.field, c.b, c.a) for c in back.fields]
    mirrored = {"added": "removed", "removed": "added", "changed": "changed"}
    assert {(r.path, r.status, r.shape_a, r.shape_b, r.params_a, r.params_b) for r in there.rows} == {
        (r.path, mirrored[r.status], r.shape_b, r.shape_a, r.params_b, r.params_a) for r in back.rows
    }
    assert (there.totals_a, there.forward_flops_a) == (back.totals_b, back.forward_flops_b)
    explained = sum(row.params_b - row.params_a for row in there.rows)
    assert explained == there.totals_b.distinct_params - there.totals_a.distinct_params


def test_a_body_and_the_same_body_under_a_head_agree():
    report = bertscope.diff(source(), source(architecture="BertForSequenceClassification"))
    assert {row.path for row in report.rows} == {"classifier.weight", "classifier.bias"}


def test_both_models_take_the_attention_that_is_asked_for(cli, tmp_path):
    mine = tmp_path / "config.json"
    mine.write_text('{"model_type": "bert", "attn_implementation": "eager"}')
    kinds = [cli("diff", mine, mine, *asked, "--format", "json").json["a"]["attention"]
             for asked in ((), ("--attention", "sdpa"))]  # fmt: skip
    assert kinds == ["eager", "sdpa"]


def test_the_command_shows_what_differs_and_exits_as_asked(cli, tmp_path):
    result = cli("diff", "bert-base-uncased", "bert-large-uncased", "-a", "BertModel")
    assert result.code == 0
    assert "encoder.layer.12-23.attention.self.query.weight (12 x)" in result.out
    assert "+225,659,648" in result.out
    assert cli("diff", "bert-tiny", "bert-mini", "--exit-code").code == 1
    mine = tmp_path / "mine.yaml"
    mine.write_text((preset_dir() / "bert-tiny.yaml").read_text())
    same = cli("diff", mine, "bert-tiny", "--exit-code")
    assert (same.code, same.out.splitlines()[0]) == (0, "No differences.")
    data = cli("diff", "bert-tiny", "bert-mini", "--format", "json").json
    assert (data["kind"], data["fields"][0]["field"]) == ("diff", "hidden_size")
