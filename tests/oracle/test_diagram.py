"""The class diagram read off transformers' live classes holds the document's, bases and mixins included."""

from __future__ import annotations

import pytest

from tests.analyses.diagram.test_diagram import DOCUMENT, DOCUMENT_CONFIG, document_attributes
from tests.conftest import GOLDEN
from tests.test_documents import OF_TRANSFORMERS, check_statements

MIXINS = ("Module", "ModuleUtilsMixin", "GenerationMixin", "PushToHubMixin", "PeftAdapterMixin")
ADDRESSES = {
    "Module": "torch.nn.Module",
    "ModuleUtilsMixin": "transformers.modeling_utils.ModuleUtilsMixin",
    "GenerationMixin": "transformers.generation.GenerationMixin",
    "PushToHubMixin": "transformers.utils.PushToHubMixin",
    "PeftAdapterMixin": "transformers.integrations.PeftAdapterMixin",
    "PreTrainedModel": "transformers.modeling_utils.PreTrainedModel",
    "BertPreTrainedModel": "transformers.models.bert.BertPreTrainedModel",
    **{name: f"transformers.models.bert.{name}" for name in DOCUMENT},
}


@pytest.fixture
def boxes(cli):
    result = cli("diagram", "bert-base-uncased", "--implementation", "transformers", "--format", "json")
    assert (result.code, result.err) == (0, "")
    return {box["name"]: box for box in result.json["classes"]}


def test_the_documents_classes_have_its_addresses_bases_and_attributes(boxes):
    assert {name: boxes[name]["address"] for name in ADDRESSES} == ADDRESSES
    assert tuple(boxes["PreTrainedModel"]["bases"]) == MIXINS
    assert boxes["BertPreTrainedModel"]["bases"] == ["PreTrainedModel"]
    assert boxes["BertModel"]["bases"] == ["BertPreTrainedModel"]
    held = [(item["name"], item["type"]) for item in boxes["PreTrainedModel"]["attributes"]]
    assert held == [("config", "PretrainedConfig"), ("name_or_path", "str"), ("warnings_issued", "dict"),
                    ("generation_config", "GenerationConfig")]  # fmt: skip
    for name in DOCUMENT:
        found = {item["name"]: item["type"] for item in boxes[name]["attributes"]}
        wanted = dict(document_attributes(name))
        if name == "BertIntermediate":
            assert boxes[found["intermediate_act_fn"]]["bases"] == ["Module"]
            wanted["intermediate_act_fn"] = found["intermediate_act_fn"]
        assert {key: found[key] for key in wanted} == wanted


def test_the_config_is_the_documents(boxes):
    found = {item["name"]: item["default"] for item in boxes["BertConfig"]["attributes"]}
    assert found == {name: repr(value) for name, value in DOCUMENT_CONFIG.items()}


def test_the_documents_first_diagram_is_the_golden_one(cli):
    text = cli(
        "diagram", "bert-base-uncased", "--implementation", "transformers", "--class", "BertModel", "--nn-module"
    ).out
    assert text == (GOLDEN / "diagram-class-transformers.mmd").read_text()


@pytest.mark.parametrize("command", OF_TRANSFORMERS)
def test_each_statement_of_the_documents_is_in_the_diagram(printed, command):
    check_statements(printed, command)
