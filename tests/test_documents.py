"""Every figure and print of the five documents comes out of the tool."""

from __future__ import annotations

import re

import pytest

import bertscope
from tests.conftest import GOLDEN, ROOT


def rows(result) -> dict[str, dict]:
    return {row["path"]: row for row in result.json["rows"]}


def test_base_cased_has_the_rows_and_totals_of_its_torchinfo_table(cli):
    result = cli("count", "--format", "json")
    assert [row["params"] for row in result.json["rows"]] == [
        22_268_928, 393_216, 1_536, 1_536, 85_054_464, 592_128, 22_297_924,
    ]  # fmt: skip
    totals = result.json["totals"]
    assert totals["layer_params"] == totals["trainable_layer_params"] == 130_609_732
    assert totals["frozen_params"] == 0
    assert totals["distinct_params"] == 108_340_804


def test_tree_at_depth_3_is_the_documents_torchinfo_table(cli):
    result = cli("tree", "--depth", "3", "--format", "json")
    got = [(f"{row['type']}: {row['depth_index']}", row["params"]) for row in result.json["rows"] if row["depth"]]
    document = [
        ("BertModel: 1-1", None),
        ("BertEmbeddings: 2-1", None),
        ("Embedding: 3-1", 22_268_928),
        ("Embedding: 3-2", 393_216),
        ("Embedding: 3-3", 1_536),
        ("LayerNorm: 3-4", 1_536),
        ("Dropout: 3-5", 0),
        ("BertEncoder: 2-2", None),
        ("ModuleList: 3-6", 85_054_464),
        ("BertOnlyMLMHead: 1-2", None),
        ("BertLMPredictionHead: 2-3", None),
        ("BertPredictionHeadTransform: 3-7", 592_128),
        ("Linear: 3-8", 22_297_924),
    ]
    assert [name for name, _ in got] == [name for name, _ in document]
    for (name, params), (_, expected) in zip(got, document, strict=True):
        assert expected is None or params == expected, name
    text = cli("tree", "--depth", "3").out
    assert "ModuleList: 3-6" in text
    assert "130,609,732" in text


@pytest.mark.parametrize("command", ["tree", "count"])
def test_the_style_torchinfo_is_the_documents_table_to_the_letter(cli, command):
    result = cli(command, "bert-base-cased", "--style", "torchinfo")
    assert result.out == (GOLDEN / "torchinfo-bert-base-cased.txt").read_text()
    assert "108,340,804 unique parameters" in result.err


def test_base_uncased_has_the_documents_total_and_shares(cli):
    result = cli("count", "bert-base-uncased", "--by", "group", "--format", "json")
    totals = result.json["totals"]
    assert totals["distinct_params"] == totals["layer_params"] == totals["trainable_params"] == 109_482_240
    assert [row["share"] for row in result.json["rows"]] == [
        0.21772649152958506, 0.776879099295009, 0.005394409175405983,
    ]  # fmt: skip


def test_by_parameter_lists_names_shapes_and_counts_as_the_document_does(cli):
    result = cli("count", "bert-base-uncased", "--by", "parameter", "--format", "json")
    listed = {row["path"]: (row["shapes"], row["params"]) for row in result.json["rows"]}
    assert len(listed) == 199
    assert {name: listed[name] for name in listed if "embedding" in name or "pooler" in name} == {
        "embeddings.word_embeddings.weight": ([[30522, 768]], 23_440_896),
        "embeddings.position_embeddings.weight": ([[512, 768]], 393_216),
        "embeddings.token_type_embeddings.weight": ([[2, 768]], 1_536),
        "embeddings.LayerNorm.weight": ([[768]], 768),
        "embeddings.LayerNorm.bias": ([[768]], 768),
        "pooler.dense.weight": ([[768, 768]], 589_824),
        "pooler.dense.bias": ([[768]], 768),
    }


def test_large_zh_has_the_documents_layers(cli):
    found = {row["name"]: row for row in cli("count", "bert-large-zh", "--format", "json").json["rows"]}
    embeddings = [found[name]["params"] for name in ("token", "token_type", "position", "LayerNorm")]
    assert embeddings == [21_635_072, 2_048, 524_288, 2_048]
    assert sum(embeddings) == 22_163_456
    layer = found["layer"]
    assert (layer["copies"], layer["each_params"]) == (24, 12_596_224)
    assert [(part["name"], part["each_params"]) for part in layer["parts"]] == [
        ("self_attention", 4_198_400),
        ("attention_LayerNorm", 2_048),
        ("feed_forward", 8_393_728),
        ("LayerNorm", 2_048),
    ]
    assert sum(row["params"] for row in found.values()) == 324_472_832


def test_large_zh_with_its_pooler_has_325_522_432(cli):
    result = cli("count", "bert-large-zh", "--pooler", "--format", "json")
    assert result.json["totals"]["distinct_params"] == 325_522_432


def normal(text: str) -> str:
    """Some versions of torch end LayerNorm's print with `, bias=True`."""
    return re.sub(r"(elementwise_affine=True), bias=True", r"\1", text)


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        ((), "print-bert-base-cased.txt"),
        (("bert-base-uncased",), "print-bert-base-uncased.txt"),
        (("bert-base-uncased", "-a", "BertForSequenceClassification"), "print-bert-base-uncased-classifier.txt"),
    ],
)
def test_the_printed_model_is_the_documents(cli, arguments, golden):
    # The document's notebook cuts its two prints of base-uncased off: what it shows must be the beginning.
    printed = normal(cli("tree", "--style", "torch", *arguments).out)
    expected = (GOLDEN / golden).read_text()
    assert printed == expected if golden == "print-bert-base-cased.txt" else printed.startswith(expected)


def test_a_print_that_differs_from_older_torch_says_so_on_stderr(cli):
    result = cli("tree", "bert-tiny", "--style", "torch")
    assert ("bias=True'" in result.err) == ("elementwise_affine=True, bias=True)" in result.out)
    assert cli("tree", "bert-tiny", "--style", "torch", "--format", "json").err == result.err


def test_a_printed_model_is_text_json_and_markdown_and_no_table(cli):
    text = cli("tree", "bert-tiny", "--style", "torch").out
    data = cli("tree", "bert-tiny", "--style", "torch", "--format", "json").json
    assert (data["kind"], data["text"], data["subject"]["name"]) == ("print", text, "bert-tiny")
    assert cli("tree", "bert-tiny", "--style", "torch", "-f", "markdown").out == f"```text\n{text}```\n"
    result = cli("tree", "bert-tiny", "--style", "torch", "-f", "csv")
    assert (result.code, result.out) == (2, "")


@pytest.mark.parametrize("option", ["--depth 2", "--shapes", "--freeze embeddings", "--unfold", "--columns mult_adds"])
def test_an_option_of_the_other_styles_is_refused_for_a_printed_model(cli, option):
    result = cli("tree", "bert-tiny", "--style", "torch", *option.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"leave {option.split()[0]} out" in result.err


def test_every_field_of_the_documents_config_has_its_name_and_default():
    config = bertscope.load("bert-base-cased").config
    document = {
        "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
        "use_cache": True, "vocab_size": 28996,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in document} == document
    read = bertscope.BertConfig.from_dict(
        {**document, "architectures": ["BertForMaskedLM"], "transformers_version": "4.6.0.dev0"}
    )
    assert (read.architectures, read.transformers_version) == (("BertForMaskedLM",), "4.6.0.dev0")
    assert read.ignored == ()
    assert {**read.to_dict(), **document} == read.to_dict()


def test_the_config_json_of_a_preset_is_the_documents_to_the_byte(cli):
    assert cli("presets", "bert-base-cased", "--config").out == (GOLDEN / "config-bert-base-cased.json").read_text()


def test_the_api_documents_defaults_are_ours():
    config = bertscope.BertConfig()
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (30522, 768, 12)
    assert (config.num_attention_heads, config.intermediate_size, config.hidden_act) == (12, 3072, "gelu")
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.1)
    assert (config.max_position_embeddings, config.type_vocab_size, config.initializer_range) == (512, 2, 0.02)
    assert (config.layer_norm_eps, config.position_embedding_type) == (1e-12, "absolute")
    assert (config.is_decoder, config.use_cache, config.classifier_dropout) == (False, True, None)
    assert (config.num_labels, config.tie_word_embeddings) == (2, True)
    assert (config.add_cross_attention, config.chunk_size_feed_forward) == (False, 0)


ROWS = [  # a bar inside a cell is written `\|`
    [cell.replace("\\|", "|") for cell in line.strip("| ").split(" | ")]
    for line in (ROOT / "docs" / "documents.md").read_text().splitlines()
    if "| `bertscope " in line
]
COMMANDS = list(dict.fromkeys(row[-2].strip("`") for row in ROWS))
OF_TRANSFORMERS = [command for command in COMMANDS if "--implementation transformers" in command]  # see tests/oracle


def test_the_table_of_statements_is_complete():
    assert len(ROWS) > 100
    assert all(len(row) in (3, 4) and all(row) for row in ROWS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in OF_TRANSFORMERS])
def test_each_statement_of_the_documents_is_in_the_output_of_its_command(printed, command):
    check_statements(printed, command)


def check_statements(printed, command: str) -> None:
    result = printed(command)
    assert result.code == 0
    out = " ".join(normal(result.out).split())
    for statement, *_, shown in (row for row in ROWS if row[-2].strip("`") == command):
        for text in re.findall("`([^`]+)`", shown):
            assert text in out, statement
