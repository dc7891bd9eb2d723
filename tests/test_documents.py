"""Every figure and print of the five documents comes out of the tool."""

import re
from itertools import pairwise

import pytest

import bertscope
from tests.conftest import GOLDEN, ROOT


@pytest.mark.parametrize("command", ["tree", "count"])
def test_the_style_torchinfo_is_the_documents_table_to_the_letter(cli, command):
    result = cli(command, "bert-base-cased", "--style", "torchinfo")
    assert result.out == (GOLDEN / "torchinfo-bert-base-cased.txt").read_text()
    assert "108,340,804 unique parameters" in result.err


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


ROWS = [  # a bar inside a cell is written `\|`
    [cell.replace("\\|", "|") for cell in line.strip("| ").split(" | ")]
    for line in (ROOT / "docs" / "documents.md").read_text().splitlines()
    if "| `bertscope " in line or '| " |' in line
]
for above, row in pairwise(ROWS):
    if row[-2] == '"':
        row[-2] = above[-2]
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
