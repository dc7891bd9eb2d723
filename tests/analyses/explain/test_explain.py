"""`explain`: formulas that agree with the built model, sections with the shapes of a run, texts in both languages."""

import ast
import inspect
import json
import re
from dataclasses import replace
from string import Formatter

import pytest
import torch

import bertscope
from bertscope.analyses.explain import SECTIONS
from bertscope.analyses.explain_modules import value_of
from bertscope.config import ARCHITECTURES
from bertscope.errors import SelectionError
from bertscope.views.console import Target, wrapped
from bertscope.views.explain import LANGUAGES, in_language, section_text, section_title, texts
from tests.conftest import ROOT, kinds

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


@kinds("architecture, variant", ARCHITECTURES, VARIANTS)
def test_the_formulas_hold_for_every_class_and_setting(architecture, variant):
    for size in ((3, 20),) if variant else ((1, 1), (3, 20)):
        report = bertscope.explain(source(architecture=architecture, **variant), batch=size[0], seq=size[1])
        assert all(item.agrees for item in report.sums), report.sums


def test_large_zh_walks_as_its_document_does(cli):
    report = bertscope.explain(bertscope.load("bert-large-zh"))
    assert [(step.number, step.name, step.params.value) for step in report.steps if step.params] == [
        (3, "Embedding-Token", 21_635_072),
        (4, "Embedding-Segment", 2_048),
        (6, "Embedding-Position", 524_288),
        (7, "Embedding-Norm", 2_048),
        (9, "Transformer-0-23-MultiHeadSelfAttention", 4_198_400),
        (12, "Transformer-0-23-MultiHeadSelfAttention-Norm", 2_048),
        (13, "Transformer-0-23-FeedForward", 8_393_728),
        (16, "Transformer-0-23-FeedForward-Norm", 2_048),
    ]
    ends = ("Input-Token", "Input-Segment", "-Token-Segment", "-Dropout", "-Dropout", "-Add", "-Dropout", "-Add")
    without = [step.name for step in report.steps if not step.params]
    assert all(name.endswith(end) for name, end in zip(without, ends, strict=True))
    sums = {item.group: item.params for item in report.sums}
    assert sums == {"embeddings": 22_163_456, "layer (each of 24)": 12_596_224, "total": 324_472_832}
    out = cli("explain", "bert-large-zh").out
    for text in (
        "vocab_size x hidden_size = 21128 x 1024 = 21,635,072",
        "4 x (1024 x 1024 + 1024) = 4,198,400",
        "(1024 x 4096 + 4096) + (4096 x 1024 + 1024) = 4,198,400 + 4,195,328 = 8,393,728",
        "22,163,456 + 24 x 12,596,224 = 324,472,832 parameters (counted 324,472,832)",
        "equal to the built model",
        "What do the 2,048 parameters of a LayerNorm do?",
        "340M (335,141,888, rounded)",
    ):
        assert text in out
    assert "NOT equal" not in out
    out = cli("explain", "bert-large-zh", "Transformer-0-FeedForward", "-b", "1", "-s", "512").out
    assert "13. Transformer-0-FeedForward" in out
    assert "[batch, seq, hidden_size] -> [batch, seq, hidden_size]  =  [1, 512, 1024] -> [1, 512, 1024]" in out


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
    if path == "encoder.layer.3":  # whose number is kept
        assert (report.steps[0].name, report.steps[0].copies) == ("Transformer-3-MultiHeadSelfAttention", 1)
        assert report.steps[0].path.startswith("bert.encoder.layer.3.attention")


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_module_that_is_no_step_is_found_with_and_without_the_prefix_of_a_head(prefix):
    given = bertscope.load("bert-base-cased" if prefix else "bert-tiny")
    hidden = given.config.hidden_size
    report = bertscope.explain(given, f"{prefix}encoder.layer.1.attention.self")
    written = report.sums[0]
    assert (written.symbols, written.params) == (f"3 x ({hidden} x {hidden} + {hidden})", 3 * hidden * (hidden + 1))
    assert written.agrees
    assert [step.params.value for step in report.steps if step.params] == [hidden * (hidden + 1)] * 3
    (step,) = bertscope.explain(given, f"{prefix}encoder.layer.0.intermediate.dense").steps
    assert step.params.value == 4 * hidden * (hidden + 1)
    assert step.path.removeprefix("bert.") == "encoder.layer.0.intermediate.dense"


def test_the_three_vocabularies_stand_side_by_side_and_every_format_holds_the_formulas(cli):
    for naming in ("hf", "tf", "keras"):
        out = cli("explain", "bert-base-cased", "embeddings.word_embeddings", "--naming", naming).out
        for name in ("bert.embeddings.word_embeddings", "bert/embeddings/word_embeddings", "Embedding-Token"):
            assert name in out
    for fmt in ("csv", "markdown", "json"):
        assert "vocab_size x hidden_size" in cli("explain", "bert-tiny", "--format", fmt).out.replace("\\", "")


def test_the_data_are_the_same_in_both_languages(cli):
    chinese, english = (
        cli("explain", "bert-large-zh", "--lang", name, "--format", "json").out for name in ("zh", "en")
    )
    assert chinese == english
    assert len(json.loads(english)["questions"]) == 4
    with pytest.raises(SelectionError, match="en, zh"):
        bertscope.explain(bertscope.load()).shown("printed", lang="de")
    report = bertscope.explain("bert-tiny", "pooler")
    assert "参数量：hidden_size x hidden_size" in report.shown("printed", lang="zh")
    assert str(report).count("parameters: ") == 1


@pytest.mark.parametrize("text", ["__import__('os')", "2 ** 9", "a", "1.5", "True", "'x' * 9", "f(2)", "+" * 501])
def test_what_is_no_formula_is_not_evaluated(text):
    with pytest.raises((ValueError, SyntaxError)):
        value_of(text)


BATCH, SEQ = 2, 5
SIZES = {
    "vocab_size": 30, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 7, "attn_implementation": "eager", "num_labels": 2,
}  # fmt: skip
DECODER = {"is_decoder": True, "add_cross_attention": True}


def small(architecture: str = "BertModel", **fields):
    found = bertscope.load("bert-tiny", architecture=architecture)
    return replace(found, config=replace(found.config, **SIZES, **fields))


def section(key: str, architecture: str = "BertModel", **fields):
    report = bertscope.explain(small(architecture, **fields), key, batch=BATCH, seq=SEQ)
    assert (report.steps, report.sums, report.questions) == ((), (), ())
    (found,) = report.sections
    assert found.key == key
    return found


def sizes_of(value: object) -> str:
    """Return `3 x 2 x [2, 5, 12]` for nested tuples of tensors."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return f"{len(value)} x {sizes_of(value[0])}"


def test_the_configuration_has_the_values_types_and_defaults_of_its_fields():
    found = section("config", is_decoder=True)
    points = {point.name: (point.sizes, point.type) for point in found.points}
    assert list(points)[:3] == ["vocab_size", "hidden_size", "num_hidden_layers"]
    assert points["vocab_size"] == ("30", "int = 30522")
    assert points["is_decoder"] == ("True", "bool = False")
    assert points["classifier_dropout"] == ("None", "float | None = None")
    assert "truncated_normal" in section_text(found, "initializer_range")
    assert "here add_pooling_layer=True" in section_text(found, "pooling")
    assert "pooling" not in section("config", "BertForMaskedLM").notes


def test_inputs_and_outputs_have_the_names_and_types_of_the_forward_and_of_its_class():
    points = section("inputs").points
    assert [point.name for point in points] == list(inspect.signature(bertscope.BertModel.forward).parameters)[1:]
    assert (points[0].sizes, points[0].type) == ("[2, 5]", "torch.Tensor | None = None")
    assert points[9].type == "bool | None = None"
    outputs = section("outputs", **DECODER)
    assert [point.type for point in outputs.points] == [
        "torch.Tensor | None", "torch.Tensor | None", "tuple[tuple[torch.Tensor, ...], ...] | None",
        *["tuple[torch.Tensor, ...] | None"] * 3,
    ]  # fmt: skip
    assert "BaseModelOutputWithPoolingAndCrossAttentions" in section_text(outputs, "class")
    assert "MaskedLMOutput" in section_text(section("outputs", "BertForMaskedLM"), "class")
    wrong = "(batch, layers, seq, seq), which some texts give for output[3], is wrong"
    assert wrong in section_text(section("outputs"), "attentions")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_takes_inputs_of_the_shapes_that_are_listed(architecture):
    found = small(architecture)
    points = {point.name: point for point in section("inputs", architecture).points}
    zeros = {
        name: torch.zeros([int(size) for size in re.findall(r"\d+", point.sizes)], dtype=torch.long)
        for name, point in points.items()
        if point.sizes
        and name not in ("inputs_embeds", "past_key_values", "encoder_hidden_states", "encoder_attention_mask")
    }
    model = bertscope.BertForMaskedLM if architecture == "BertForMaskedLM" else getattr(bertscope, architecture)
    model(found.config)(**zeros)
    assert {name for name in points if f"explain_inputs_{name}" not in texts("en")} == set()


@pytest.mark.parametrize("fields", [{}, DECODER], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_outputs_have_the_places_and_shapes_of_a_run(architecture, fields):
    points = section("outputs", architecture, **fields).points
    model = getattr(bertscope, architecture)(small(architecture, **fields).config).eval()
    shape = (BATCH, 2, SEQ) if architecture == "BertForMultipleChoice" else (BATCH, SEQ)
    given = {"input_ids": torch.zeros(shape, dtype=torch.long)}
    if any("cross_attentions" in point.name for point in points):
        given["encoder_hidden_states"] = torch.zeros(BATCH, SEQ, 12)
    out = model(**given, output_attentions=True, output_hidden_states=True, return_dict=False)
    listed = [point for point in points if point.name != "output[0] loss"]  # no labels were given
    assert [point.sizes for point in listed][: len(out)] == [sizes_of(value) for value in out[: len(listed)]]
    assert [point.name.partition(" ")[0] for point in points] == [f"output[{place}]" for place in range(len(points))]


def test_a_model_without_pooler_keeps_the_place_of_the_pooled_output():
    found = replace(small(), add_pooling_layer=False)
    (outputs,) = bertscope.explain(found, "outputs", seq=SEQ).sections
    assert section_text(outputs, outputs.points[1].key).startswith("None")
    out = bertscope.BertModel(found.config, add_pooling_layer=False)(torch.zeros(1, SEQ).long(), return_dict=False)
    assert out[1] is None


def test_the_four_cases_have_the_shapes_of_a_decoders_cache():
    caches = section("caches", **DECODER)
    model = bertscope.BertModel(small(**DECODER).config).eval()
    encoder = torch.zeros(BATCH, SEQ, 12)
    first = model(torch.zeros(BATCH, SEQ - 1).long(), encoder_hidden_states=encoder)
    last = model(torch.zeros(BATCH, 1).long(), encoder_hidden_states=encoder, past_key_values=first.past_key_values)
    key, _, cross_key, _ = last.past_key_values[0]
    assert [point.sizes for point in caches.points] == [*[sizes_of(cross_key)] * 2, *[sizes_of(key)] * 2]
    assert f"4 + 1 = {SEQ}" in section_text(caches, caches.points[2].key)
    numel = sum(tensor.numel() for layer in last.past_key_values for tensor in layer)
    assert f"3 x 4 x 2 x 2 x 5 x 6 = {numel:,} numbers" in section_text(caches, caches.notes[0])
    assert section("caches").notes[-1] == "no_cache"


@pytest.mark.parametrize(("kind", "steps"), [("relative_key", 4), ("relative_key_query", 5), ("absolute", 5)])
def test_relative_positions_have_the_table_and_the_distances_of_the_model(kind, steps):
    positions = section("positions", position_embedding_type=kind)
    assert len(positions.points) == steps
    assert positions.notes == (*(["absolute"] if kind == "absolute" else []), "sources")
    assert "from 2 to 10" in section_text(positions, positions.points[0].key)  # 6 - 4 to 6 + 4
    assert "= 78 parameters" in section_text(positions, positions.points[1].key)
    if kind != "absolute":
        attention = bertscope.BertModel(small(position_embedding_type=kind).config).encoder.layer[0].attention.self
        assert attention.distance_embedding.weight.numel() == 78


def test_checkpointing_recomputes_the_layers_and_saves_their_inputs():
    found = section("checkpointing")
    assert "3 x 2 x 5 x 12 x 4 bytes = 1.41 KiB" in section_text(found, found.points[1].key)
    again = [
        bertscope.flops(small(), mode="training", checkpointing=how, batch=BATCH, seq=SEQ).rows[0].total.matmul_flops
        for how in ("full", "none")
    ]
    assert f"= {again[0] - again[1]:,} FLOPs" in section_text(found, found.points[3].key)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_section_has_the_values_of_its_sentences_in_both_languages(language):
    for key in SECTIONS:
        found = section(key, **DECODER)
        with in_language(language):
            words = [section_title(found), *(section_text(found, item) for item in found.notes)]
            words += [section_text(found, point.key) for point in found.points]
        assert bool(re.search("[\u4e00-\u9fff]", "".join(words))) == (language == "zh")
        assert "{" not in "".join(words)


def test_chinese_text_fits_the_terminal_and_no_line_begins_with_its_punctuation(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("explain", "bert-large-zh", "--lang", "zh").out
    assert "324,472,832 个参数（统计得 324,472,832）" in out.replace("\n  ", " ")
    assert "LayerNorm 的 2,048 个参数有什么作用？" in out
    for line in out.splitlines():
        assert len(line) + len(re.findall("[\u3000-\u9fff\uff00-\uff60]", line)) <= 80
        assert not line.strip() or line.strip()[0] not in "，。；：）、"


VIEW = ROOT / "bertscope" / "views" / "explain.py"
ENGLISH, CHINESE = map(texts, LANGUAGES)


def test_both_languages_have_the_same_keys_and_values():
    assert [*ENGLISH] == [*CHINESE]
    for key, text in ENGLISH.items():
        fields, others = ({*Formatter().parse(words)} for words in (text, CHINESE[key]))
        assert {(name, form) for _, name, form, _ in fields if name} == {
            (name, form) for _, name, form, _ in others if name
        }, key


def test_every_text_that_the_view_asks_for_is_there_and_every_text_is_asked_for():
    calls = [node for node in ast.walk(ast.parse(VIEW.read_text())) if isinstance(node, ast.Call)]
    asked = [call.args[0] for call in calls if getattr(call.func, "id", "") == "say"]
    keys = {node.value for item in asked for node in ast.walk(item) if isinstance(node, ast.Constant)} & {*ENGLISH}
    assert {item.value for item in asked if isinstance(item, ast.Constant)} <= keys
    kinds = "step", "question", "answer", "title", "point", *SECTIONS
    others = {key for key in ENGLISH if not key.startswith(tuple(f"explain_{kind}_" for kind in kinds))}
    assert others - keys == {"explain_no_forward"}  # the key of a report's note


# Other words for the terms of the Chinese texts: 梯度检查点, 批大小, 参数量, 激活值, 估算, 一步, 任务头, 矩阵乘法,
# 优化器更新, 按层累加; 检查点文件 is a file, 激活函数 a function.
OTHER_TERMS = re.compile(
    "(?<!梯度)检查点(?!文件)|批次大小|批量|参数数量|激活(?![值函])|估计|单步|输出头|头部|矩阵乘积|优化器步|逐层求和|显存/内存"
)


def test_a_term_has_one_chinese_word():
    read = [*CHINESE.values(), (ROOT / "README.zh.md").read_text()]
    assert [(found[0], text) for text in read for found in OTHER_TERMS.finditer(text)] == []


@pytest.mark.parametrize("width", [30, 41, 80])
def test_a_chinese_line_is_not_wider_than_the_terminal(width):
    text = "可以：t4 上批大小 2,178 放得下（序列长度 512，fp32，检查点 full）：峰值 13.65 GiB，预留 14.56 GiB；" * 2
    lines = wrapped(text, Target(width=width), 2).splitlines()
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    for line in lines:
        assert len(line) + len(re.findall(r"[^\x00-\xff]", line)) <= width
        assert line.lstrip()[0] not in "，；：）"
        assert line[-1] != "（"
        assert line.count("GiB") == len(re.findall(r"\d GiB", line))
