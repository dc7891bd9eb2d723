"""The model by itself: initialisation, ties that survive, meta, prints, outputs by name and index."""

import copy
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import bertscope
from bertscope.config import ARCHITECTURES
from bertscope.errors import BertscopeWarning
from bertscope.model import CLASSES, build
from bertscope.model import attention as attention_module


def is_tied(model) -> bool:
    predictions = model.cls.predictions
    word = model.bert.embeddings.word_embeddings.weight
    return predictions.decoder.weight is word and predictions.decoder.bias is predictions.bias


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_builds_on_meta_without_a_byte(tiny, name):
    model = build(tiny, name)
    assert type(model).__name__ == name
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_model_built_by_its_class_is_real_and_initialised(tiny):
    torch.manual_seed(0)
    config = replace(tiny, hidden_size=64, vocab_size=500, initializer_range=0.05, pad_token_id=3)
    model = bertscope.BertForMaskedLM(config)
    words = model.bert.embeddings.word_embeddings.weight
    assert not words.is_meta
    assert words[3].eq(0).all()
    assert words.std().item() == pytest.approx(0.05, rel=0.05)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.bias.eq(0).all()
            assert module.weight.std().item() == pytest.approx(0.05, rel=0.1)
        if isinstance(module, nn.LayerNorm):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model,
        lambda model: model.half(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="cpu"),
        lambda model: copy.deepcopy(model),
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: nn.Sequential(model).to("meta")[0],
    ],
    ids=["built", "half", "bf16", "meta", "to_empty", "deepcopy", "pickle", "inside"],
)
def test_the_decoder_stays_tied(tiny, change):
    model = change(bertscope.BertForMaskedLM(tiny))
    assert is_tied(model)
    assert len(list(model.parameters())) == len(list(build(tiny, "BertForMaskedLM").parameters()))


def test_the_kernel_shows_in_the_print(tiny):
    assert "BertSdpaSelfAttention" in str(build(tiny))
    eager = str(build(replace(tiny, attn_implementation="eager")))
    assert "(self): BertSelfAttention(" in eager


def test_outputs_are_mappings_that_accelerate_converts(tiny):
    from accelerate.utils import convert_to_fp32

    output = bertscope.BertModel(tiny).bfloat16()(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)
    assert isinstance(output, Mapping)
    assert dict(**output).keys() == output.keys() == {"last_hidden_state", "pooler_output", "hidden_states"}
    converted = convert_to_fp32(output)
    assert type(converted) is type(output)
    assert [converted[0].dtype, converted.hidden_states[2].dtype, output[0].dtype] == [
        torch.float32, torch.float32, torch.bfloat16,
    ]  # fmt: skip
    assert converted.attentions is None
    assert output == output
    assert output != converted


def test_sdpa_says_once_that_it_falls_back(tiny, monkeypatch):
    monkeypatch.setattr(attention_module, "_said", set())
    model = bertscope.BertModel(tiny).eval()
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.warns(BertscopeWarning, match="cannot serve output_attentions; eager"):
        model(ids, output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, output_attentions=True)


def test_chunking_runs_the_feed_forward_in_pieces(tiny):
    model = bertscope.BertModel(replace(tiny, chunk_size_feed_forward=2)).eval()
    lengths = []
    model.encoder.layer[0].intermediate.register_forward_hook(lambda module, given, out: lengths.append(out.shape[1]))
    model(torch.ones(1, 6, dtype=torch.long))
    assert lengths == [2, 2, 2]


def test_a_decoder_that_the_user_untied_stays_untied(tiny):
    model = bertscope.BertForMaskedLM(tiny)
    decoder = model.cls.predictions.decoder
    decoder.weight = nn.Parameter(decoder.weight.clone())
    for change in (model.double, model.float, lambda: model.to("meta")):
        change()
        assert decoder.weight is not model.bert.embeddings.word_embeddings.weight


def test_parametrised_and_pruned_decoders_can_be_moved(tiny):
    model = bertscope.BertForMaskedLM(tiny)
    nn.utils.parametrizations.weight_norm(model.cls.predictions.decoder)
    model.double().float()
    model = bertscope.BertForMaskedLM(tiny)
    prune.random_unstructured(model.cls.predictions.decoder, "weight", 0.5)
    model(torch.ones(1, 2, dtype=torch.long))
    model.float()
    model(torch.ones(1, 2, dtype=torch.long))


def test_all_classes_are_public_names_of_the_package():
    assert set(ARCHITECTURES) <= set(bertscope.__all__)


def test_question_answering_with_another_number_of_labels_counts_and_does_not_run(tiny, tmp_path, cli):
    (tmp_path / "config.json").write_text(json.dumps({**tiny.to_dict(), "num_labels": 3}))
    question = (tmp_path / "config.json", "-a", "BertForQuestionAnswering")
    assert cli("count", *question).code == 0
    for command in ("estimate", "flops"):
        result = cli(command, *question, "--batch", "1", "--seq", "4")
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert "question answering has two labels, start and end; num_labels is 3" in result.err
