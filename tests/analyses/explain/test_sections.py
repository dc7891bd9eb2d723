"""The sections of `explain` on the whole model: each shape is that of a real run."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.analyses.explain.steps import SECTIONS
from bertscope.config import ARCHITECTURES
from bertscope.errors import SelectionError
from bertscope.render.explain import LANGUAGES, in_language, section_text, section_title, texts

pytestmark = pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")

BATCH, SEQ = 2, 5
SIZES = {
    "vocab_size": 30, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 7, "attn_implementation": "eager", "num_labels": 2,
}  # fmt: skip
DECODER = {"is_decoder": True, "add_cross_attention": True}


def source(architecture: str = "BertModel", **fields):
    found = bertscope.load("bert-tiny", architecture=architecture)
    return replace(found, config=replace(found.config, **SIZES, **fields))


def section(key: str, architecture: str = "BertModel", **fields):
    report = bertscope.explain(source(architecture, **fields), key, batch=BATCH, seq=SEQ)
    assert (report.steps, report.sums, report.questions) == ((), (), ())
    (found,) = report.sections
    assert found.key == key
    return found


def sizes_of(value: object) -> str:
    """Return `3 x 2 x [2, 5, 12]` for nested tuples of tensors."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return f"{len(value)} x {sizes_of(value[0])}"


def test_the_configuration_has_the_values_types_and_defaults_of_the_fields_of_the_api_document():
    found = section("config", is_decoder=True)
    points = {point.name: point for point in found.points}
    assert list(points)[:3] == ["vocab_size", "hidden_size", "num_hidden_layers"]
    assert set(points) >= {
        "num_attention_heads", "intermediate_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob",
        "max_position_embeddings", "type_vocab_size", "initializer_range", "layer_norm_eps", "position_embedding_type",
        "is_decoder", "use_cache", "classifier_dropout",
    }  # fmt: skip
    assert (points["vocab_size"].sizes, points["vocab_size"].type) == ("30", "int = 30522")
    assert (points["is_decoder"].sizes, points["is_decoder"].type) == ("True", "bool = False")
    assert (points["classifier_dropout"].sizes, points["classifier_dropout"].type) == ("None", "float | None = None")
    assert "truncated_normal" in section_text(found, "initializer_range")
    assert "here add_pooling_layer=True" in section_text(found, "pooling")
    assert "pooling" not in section("config", "BertForMaskedLM").notes


def test_inputs_and_outputs_have_the_types_of_the_forward_and_of_its_class():
    assert section("inputs").points[0].type == "torch.Tensor | None = None"
    assert section("inputs").points[9].type == "bool | None = None"
    outputs = section("outputs", **DECODER)
    assert [point.type for point in outputs.points] == [
        "torch.Tensor | None", "torch.Tensor | None", "tuple[tuple[torch.Tensor, ...], ...] | None",
        *["tuple[torch.Tensor, ...] | None"] * 3,
    ]  # fmt: skip
    assert "BaseModelOutputWithPoolingAndCrossAttentions" in section_text(outputs, "class")
    assert "MaskedLMOutput" in section_text(section("outputs", "BertForMaskedLM"), "class")


def test_the_inputs_are_the_13_arguments_of_the_forward_in_their_order():
    points = section("inputs").points
    assert [point.name for point in points] == list(inspect.signature(bertscope.BertModel.forward).parameters)[1:]
    assert len(points) == 13
    assert points[0].sizes == "[2, 5]"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_takes_inputs_of_the_shapes_that_are_listed(architecture):
    found = source(architecture)
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


@pytest.mark.parametrize("fields", [{}, DECODER, {"is_decoder": True}], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_outputs_have_the_places_and_shapes_of_a_run(architecture, fields):
    points = section("outputs", architecture, **fields).points
    model = getattr(bertscope, architecture)(source(architecture, **fields).config).eval()
    shape = (BATCH, 2, SEQ) if architecture == "BertForMultipleChoice" else (BATCH, SEQ)
    given = {"input_ids": torch.zeros(shape, dtype=torch.long)}
    if any("cross_attentions" in point.name for point in points):
        given["encoder_hidden_states"] = torch.zeros(BATCH, SEQ, 12)
    out = model(**given, output_attentions=True, output_hidden_states=True, return_dict=False)
    listed = [point for point in points if point.name != "output[0] loss"]  # no labels were given
    assert [point.sizes for point in listed][: len(out)] == [sizes_of(value) for value in out[: len(listed)]]
    assert [point.name.partition(" ")[0] for point in points] == [f"output[{place}]" for place in range(len(points))]


def test_the_wrong_shape_of_output_3_is_named():
    outputs = section("outputs")
    attentions = outputs.points[3]
    assert (attentions.name, attentions.sizes) == ("output[3] attentions", "3 x [2, 2, 5, 5]")
    wrong = "(batch, layers, seq, seq), which some texts give for output[3], is wrong"
    assert wrong in section_text(section("outputs"), attentions.key)


def test_a_model_without_pooler_keeps_the_place_of_the_pooled_output():
    found = replace(source(), add_pooling_layer=False)
    (outputs,) = bertscope.explain(found, "outputs", seq=SEQ).sections
    assert section_text(outputs, outputs.points[1].key).startswith("None")
    out = bertscope.BertModel(found.config, add_pooling_layer=False)(torch.zeros(1, SEQ).long(), return_dict=False)
    assert out[1] is None


def test_the_four_cases_have_the_shapes_of_a_decoders_cache():
    caches = section("caches", **DECODER)
    model = bertscope.BertModel(source(**DECODER).config).eval()
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
        attention = bertscope.BertModel(source(position_embedding_type=kind).config).encoder.layer[0].attention.self
        assert attention.distance_embedding.weight.numel() == 78


def test_checkpointing_recomputes_the_layers_and_saves_their_inputs():
    found = section("checkpointing")
    assert "3 x 2 x 5 x 12 x 4 bytes = 1.41 KiB" in section_text(found, found.points[1].key)
    again = [
        bertscope.flops(source(), mode="training", checkpointing=how, batch=BATCH, seq=SEQ).rows[0].total.matmul_flops
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


def test_the_command_shows_the_sections_last_and_each_one_by_its_name(cli):
    out = cli("explain", "bert-tiny").out
    places = [
        out.index(title) for title in ("Why do published", "Inputs of", "Outputs of", "Key and value", "Gradient")
    ]
    assert places == sorted(places)
    assert cli("explain", "bert-tiny", "inputs").out.splitlines()[2] == "Inputs of BertModel.forward: 13"
    assert (
        "1. input\\_ids [batch, seq] = [1, 128] (torch.Tensor | None = None): "
        in cli("explain", "bert-tiny", "inputs", "-f", "markdown").out
    )
    assert [item["key"] for item in cli("explain", "bert-tiny", "--format", "json").json["sections"]] == list(SECTIONS)
    with pytest.raises(SelectionError, match="did you mean 'caches'"):
        bertscope.explain(bertscope.load("bert-tiny"), "cache")


def test_chinese_text_fits_the_terminal_and_no_line_begins_with_its_punctuation(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("explain", "bert-large-zh", "--lang", "zh").out
    assert "324,472,832 个参数（统计得 324,472,832）" in out.replace("\n  ", " ")
    for line in out.splitlines():
        assert len(line) + len(re.findall("[\u3000-\u9fff\uff00-\uff60]", line)) <= 80
        assert not line.strip() or line.strip()[0] not in "，。；：）、"
