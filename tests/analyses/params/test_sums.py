"""The counts of repeated layers as written sums."""

import re

import pytest
from torch import nn

import bertscope
from bertscope.analyses.explain.modules import value_of
from bertscope.analyses.params import count


def written(model: nn.Module) -> dict[str, str]:
    return {item.name: f"{item.terms} = {item.params:,}" for item in count(model).sums}


def test_bert_large_zh_is_the_sum_that_its_document_writes():
    assert written(bertscope.load("bert-large-zh").build()) == {
        "total": "22,163,456 + 24 x 12,596,224 = 324,472,832",
        "layer": "4,198,400 + 2,048 + 8,393,728 + 2,048 = 12,596,224",
        "self_attention": "4 x (1024 x 1024 + 1024) = 4,198,400",
        "feed_forward": "(1024 x 4096 + 4096) + (4096 x 1024 + 1024) = 4,198,400 + 4,195,328 = 8,393,728",
    }


def test_tied_tensors_are_in_the_total_at_each_use():
    total = written(bertscope.load("bert-base-cased").build())["total"]
    assert total == "22,665,216 + 12 x 7,087,872 + 22,890,052 = 130,609,732"


@pytest.mark.parametrize("by", ["group", "layer", "module", "parameter"])
@pytest.mark.parametrize("fields", [{}, {"add_cross_attention": True, "is_decoder": True},
                                    {"position_embedding_type": "relative_key"}])  # fmt: skip
def test_every_sum_has_the_value_that_a_reader_computes(by, fields):
    config = bertscope.BertConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, vocab_size=20, **fields)
    report = bertscope.count(bertscope.BertForMaskedLM(config), by=by)
    for item in report.sums:
        for side in item.terms.split(" = "):
            assert value_of(re.sub(",", "", side).replace(" x ", " * ")) == item.params
    assert report.sums[0].params == report.totals.layer_params


class Stacked(nn.Module):
    """Two layers of two dense layers without bias and one with, after a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(2))
        for layer in self.layers:
            layer.update({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False), "c": nn.Linear(4, 2)})


def test_equal_neighbours_are_one_term_and_a_weight_without_bias_is_written_as_stored():
    assert written(Stacked()) == {
        "total": "20 + 2 x 34 = 88",
        "layer": "2 x 12 + 10 = 34",
        "a": "3 x 4 = 12",
        "b": "3 x 4 = 12",
        "c": "4 x 2 + 2 = 10",
    }


@pytest.mark.parametrize("model", [nn.Linear(3, 4), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_a_model_without_repeated_layers_has_no_sums(model):
    assert written(model) == {}


@pytest.mark.parametrize("width", [80, 100])
def test_no_product_is_broken_in_the_footer(cli, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = cli("count", "bert-large-zh").out
    for text in ("(1024 x 4096 + 4096)", "(4096 x 1024 + 1024)", "22,163,456 + 24 x 12,596,224 = 324,472,832"):
        assert text in out
    assert max(map(len, out.splitlines())) <= width
