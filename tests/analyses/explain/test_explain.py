"""The walk: formulas that agree with the built model, in three vocabularies and two languages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import bertscope
from bertscope.analyses.explain.modules import value_of
from bertscope.config import ARCHITECTURES
from bertscope.errors import SelectionError
from bertscope.sources.presets import preset_paths

# The sdpa kernel falls back to eager for relative positions, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")

VARIANTS = [
    {},
    {"tie_word_embeddings": False},
    {"position_embedding_type": "relative_key"},
    {"position_embedding_type": "relative_key_query", "num_hidden_layers": 5},
    {"is_decoder": True, "add_cross_attention": True},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 1, "num_labels": 2, "type_vocab_size": 3},
]


def source(preset: str = "bert-tiny", architecture: str | None = None, **fields):
    found = bertscope.load(preset, architecture=architecture)
    return replace(found, config=replace(found.config, **fields))


@pytest.mark.parametrize("preset", preset_paths())
def test_the_formulas_of_every_preset_equal_the_built_model(preset):
    report = bertscope.explain(bertscope.load(preset), batch=2, seq=17)
    assert [item.group for item in report.sums][-1] == "total"
    assert all(item.agrees for item in report.sums), report.sums


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_formulas_hold_for_every_class_and_setting(architecture, variant):
    for size in ((3, 20),) if variant else ((1, 1), (3, 20)):
        report = bertscope.explain(source(architecture=architecture, **variant), batch=size[0], seq=size[1])
        assert all(item.agrees for item in report.sums), report.sums


def test_large_zh_walks_as_its_document_does():
    report = bertscope.explain(bertscope.load("bert-large-zh"))
    assert [(step.name, step.params.value if step.params else 0) for step in report.steps] == [
        ("Input-Token", 0),
        ("Input-Segment", 0),
        ("Embedding-Token", 21_635_072),
        ("Embedding-Segment", 2_048),
        ("Embedding-Token-Segment", 0),
        ("Embedding-Position", 524_288),
        ("Embedding-Norm", 2_048),
        ("Embedding-Dropout", 0),
        ("Transformer-0-23-MultiHeadSelfAttention", 4_198_400),
        ("Transformer-0-23-MultiHeadSelfAttention-Dropout", 0),
        ("Transformer-0-23-MultiHeadSelfAttention-Add", 0),
        ("Transformer-0-23-MultiHeadSelfAttention-Norm", 2_048),
        ("Transformer-0-23-FeedForward", 8_393_728),
        ("Transformer-0-23-FeedForward-Dropout", 0),
        ("Transformer-0-23-FeedForward-Add", 0),
        ("Transformer-0-23-FeedForward-Norm", 2_048),
    ]
    sums = {item.group: item.params for item in report.sums}
    assert sums == {"embeddings": 22_163_456, "layer (each of 24)": 12_596_224, "total": 324_472_832}
    assert report.steps[2].params.symbols == "vocab_size x hidden_size"
    assert report.steps[2].params.numbers == "21128 x 1024"


def test_the_command_prints_formula_sum_and_answers(cli):
    out = cli("explain", "bert-large-zh").out
    for text in (
        "vocab_size x hidden_size = 21128 x 1024 = 21,635,072",
        "4 x (1024 x 1024 + 1024) = 4,198,400",
        "(1024 x 4096 + 4096) + (4096 x 1024 + 1024) = 4,198,400 + 4,195,328 = 8,393,728",
        "22,163,456 + 24 x 12,596,224 = 324,472,832 parameters (counted 324,472,832)",
        "equal to the built model",
        "What do the 2,048 parameters of a LayerNorm do?",
        "Why is token_type_ids all zeros",
        "What does padding_idx mean?",
        "340M (335,141,888, rounded)",
    ):
        assert text in out
    assert "NOT equal" not in out


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("encoder.layer.3", 8), ("bert.encoder.layer.3.attention", 4), ("Transformer-0-FeedForward", 4),
        ("Transformer-3-MultiHeadSelfAttention-Norm", 1), ("bert/encoder/layer_11/output", 3), ("layer", 8),
        ("embeddings", 8), ("Embedding-Token", 2), ("cls.predictions.decoder", 1), ("head", 2),
    ],
)  # fmt: skip
def test_a_path_in_any_vocabulary_shows_its_steps(path, count):
    report = bertscope.explain(bertscope.load("bert-base-cased"), path)
    assert len(report.steps) == count


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("preset", ["bert-large-zh", "bert-base-cased"])
def test_a_module_that_is_no_step_is_found_with_and_without_the_prefix_of_a_head(preset, prefix):
    hidden = bertscope.load(preset).config.hidden_size
    report = bertscope.explain(bertscope.load(preset), f"{prefix}encoder.layer.3.attention.self")
    written = report.sums[0]
    assert (written.symbols, written.params) == (f"3 x ({hidden} x {hidden} + {hidden})", 3 * hidden * (hidden + 1))
    assert written.agrees
    assert [step.params.value for step in report.steps if step.params] == [hidden * (hidden + 1)] * 3
    (step,) = bertscope.explain(bertscope.load(preset), f"{prefix}encoder.layer.0.intermediate.dense").steps
    assert step.params.value == 4 * hidden * (hidden + 1)
    assert step.path.removeprefix("bert.") == "encoder.layer.0.intermediate.dense"


def test_steps_have_the_documents_numbers_and_the_sizes_that_the_user_gives(cli):
    numbers = {step.name: step.number for step in bertscope.explain(bertscope.load("bert-large-zh")).steps}
    assert (numbers["Input-Token"], numbers["Embedding-Dropout"]) == (1, 8)
    assert numbers["Transformer-0-23-MultiHeadSelfAttention"] == 9
    assert numbers["Transformer-0-23-FeedForward-Norm"] == 16
    out = cli("explain", "bert-large-zh", "Transformer-0-FeedForward", "-b", "1", "-s", "512").out
    assert "13. Transformer-0-FeedForward" in out
    assert "[batch, seq, hidden_size] -> [batch, seq, hidden_size]  =  [1, 512, 1024] -> [1, 512, 1024]" in out


def test_a_layers_number_is_kept():
    (step, *_) = bertscope.explain(bertscope.load("bert-base-cased"), "encoder.layer.3").steps
    assert (step.name, step.copies) == ("Transformer-3-MultiHeadSelfAttention", 1)
    assert step.path.startswith("bert.encoder.layer.3.attention")


@pytest.mark.parametrize(
    ("path", "hint"),
    [("encoder.layer.12", "the layers are 0-11"), ("pooler", "try embeddings"), ("output", "did you mean 'outputs'"),
     ("nonsense", "try embeddings"), ("", "try embeddings")],
)  # fmt: skip
def test_a_path_that_no_step_has_is_refused(path, hint):
    with pytest.raises(SelectionError, match=f"no step is called .*; {hint}"):
        bertscope.explain(bertscope.load("bert-base-cased"), path)


def test_the_three_vocabularies_stand_side_by_side(cli):
    for naming in ("hf", "tf", "keras"):
        out = cli("explain", "bert-base-cased", "embeddings.word_embeddings", "--naming", naming).out
        for name in ("bert.embeddings.word_embeddings", "bert/embeddings/word_embeddings", "Embedding-Token"):
            assert name in out
    assert "Transformer-0-11-FeedForward" in cli("explain", "--naming", "tf").out


def test_questions_are_answered_in_both_languages_and_the_data_are_the_same(cli):
    out = cli("explain", "bert-large-zh", "--lang", "zh").out
    assert "残差连接" in out
    assert "LayerNorm 的 2,048 个参数有什么作用？" in out
    chinese, english = (
        cli("explain", "bert-large-zh", "--lang", name, "--format", "json").out for name in ("zh", "en")
    )
    assert chinese == english
    assert len(json.loads(english)["questions"]) == 4
    with pytest.raises(SelectionError, match="en, zh"):
        bertscope.explain(bertscope.load()).shown("printed", lang="de")


def test_every_format_holds_the_formulas(cli):
    for fmt in ("csv", "markdown", "json"):
        assert "vocab_size x hidden_size" in cli("explain", "bert-tiny", "--format", fmt).out.replace("\\", "")


@pytest.mark.parametrize(
    ("formula", "value"),
    [("7", 7), ("2 * 3 + 4", 10), ("2 * (3 + 4)", 14), ("6 * 4 / 2", 12), ("(2 * 512 - 1) * 64", 65472)],
)
def test_a_formula_has_the_value_that_a_reader_computes(formula, value):
    assert value_of(formula) == value


@pytest.mark.parametrize("text", ["__import__('os')", "2 ** 9", "a", "1.5", "True", "'x' * 9", "f(2)", "+" * 501])
def test_what_is_no_formula_is_not_evaluated(text):
    with pytest.raises((ValueError, SyntaxError)):
        value_of(text)
