"""`diff MODEL CHECKPOINT`: a checkpoint is the model's, or every way in which it is not."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import bertscope
from bertscope.checkpoints.reading import read_checkpoint
from bertscope.sources.bert import BertSource
from tests.conftest import cases

BERT = "bert.encoder.layer"


@pytest.fixture
def source(tiny):
    return BertSource(name="tiny", config=tiny, architecture="BertForMaskedLM")


@pytest.fixture
def state(tiny):
    return dict(bertscope.BertForMaskedLM(tiny).state_dict())


@pytest.fixture
def verified(tmp_path, source):
    """Saves a state dict and verifies it."""

    def run(state, about=source, **options):
        torch.save(state, tmp_path / "pytorch_model.bin")
        return bertscope.verify(about, read_checkpoint(tmp_path), **options)

    return run


def told(report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in report.rows:
        found.setdefault(row.status, []).append(row.name)
    return found


def test_a_missing_tensor_of_every_layer_is_one_row(verified, state):
    for layer in range(2):
        del state[f"{BERT}.{layer}.output.dense.bias"]
    report = verified(state)
    assert not report.fits
    (row,) = report.rows
    assert (row.status, row.name, row.copies, row.shape) == ("missing", f"{BERT}.0-1.output.dense.bias", 2, (8,))


def test_a_tie_that_is_left_out_is_filled_in(verified, state):
    del state["cls.predictions.decoder.weight"], state["cls.predictions.bias"]
    report = verified(state)
    assert report.fits
    assert told(report) == {"tied": ["cls.predictions.bias", "cls.predictions.decoder.weight"]}
    del state["bert.embeddings.word_embeddings.weight"]
    assert told(verified(state))["missing"] == [
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.weight",
    ]


def test_a_tie_that_is_stored_apart_and_one_storage_for_two_tensors_are_told(verified, state):
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"].clone()
    state[f"{BERT}.1.output.dense.bias"] = state[f"{BERT}.0.output.dense.bias"]
    report = verified(state)
    assert report.fits
    assert told(report) == {"duplicate": ["cls.predictions.decoder.weight"], "shared": [f"{BERT}.1.output.dense.bias"]}
    assert report.stored.distinct_params == report.model_distinct_params + 32 * 8 - 8


def test_a_pooler_nobody_asked_for_is_unexpected_and_can_be_allowed(verified, state):
    state["bert.pooler.dense.weight"] = torch.ones(8, 8)
    report = verified(state)
    assert not report.fits
    assert told(report) == {"unexpected": ["bert.pooler.dense.weight"]}
    allowed = verified(state, allow=["unexpected"])
    assert allowed.fits
    assert told(allowed) == told(report)


def test_another_shape_is_wrong_and_cannot_be_allowed(verified, state):
    state["bert.embeddings.LayerNorm.bias"] = torch.ones(7)
    report = verified(state, allow=["missing", "unexpected", "dtype"])
    (row,) = report.rows
    assert (report.fits, row.status, row.shape, row.stored_shape) == (False, "shape", (8,), (7,))


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_bert_in_front_is_taken_off_or_put_on(verified, tiny, architecture):
    body = BertSource(name="tiny", config=tiny, architecture=architecture)
    other = "BertForMaskedLM" if architecture == "BertModel" else "BertModel"
    weights = bertscope.build(tiny, other, device="cpu").state_dict()
    report = verified(weights, body, allow=["missing", "unexpected"])
    assert report.fits
    assert report.matched_tensors >= 37
    (renamed,) = [row for row in report.rows if row.status == "renamed"]
    assert renamed.note == f"prefix bert. only in the {'file' if architecture == 'BertModel' else 'model'}"


def test_a_name_under_two_spellings_is_told(verified, state):
    state["bert.embeddings.LayerNorm.gamma"] = torch.ones(8)
    (row,) = verified(state).rows
    assert (row.status, row.name) == ("unexpected", "bert.embeddings.LayerNorm.gamma")
    assert "stored as well" in row.note


def test_dtypes_are_compared_where_they_are_said(verified, state, source):
    half = {name: tensor.half() for name, tensor in state.items()}
    assert verified(half).fits
    assert not verified(half, dtype="fp32").fits
    assert verified(half, dtype="fp16").fits
    said = replace(source, stored_dtype="float32")
    assert {row.status for row in verified(half, said).rows if row.is_wrong} == {"dtype"}
    assert verified(half, said, allow=["dtype"]).fits
    state["bert.embeddings.LayerNorm.bias"] = torch.ones(8, dtype=torch.long)
    assert told(verified(state)) == {"dtype": ["bert.embeddings.LayerNorm.bias"]}


def test_the_class_that_fits_is_named(verified, tiny, source):
    weights = bertscope.BertForPreTraining(tiny).state_dict()
    assert verified(weights).fitting == ("BertForPreTraining",)
    assert verified(weights, replace(source, architecture="BertForPreTraining")).fitting == ()


def test_verify_says_what_load_state_dict_says(verified, tiny, state):
    del state["cls.predictions.transform.dense.weight"]
    state["cls.seq_relationship.weight"] = torch.ones(2, 8)
    result = bertscope.BertForMaskedLM(tiny).load_state_dict(state, strict=False)
    found = told(verified(state))
    assert (found["missing"], found["unexpected"]) == (result.missing_keys, result.unexpected_keys)


def test_every_byte_of_a_gigabyte_is_explained_without_being_read(tmp_path, cli):
    source = bertscope.load("bert-large-uncased", architecture="BertForPreTraining")
    model = bertscope.build(source.config, source.architecture)
    header, place = {}, 0
    for name, tensor in model.state_dict().items():
        end = place + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + place)  # a hole: nothing is on the disk to be read
    result = cli("diff", "bert-large-uncased", path, "-a", "BertForPreTraining", "--format", "json")
    assert result.code == 0
    stored = result.json["stored"]
    assert stored["file_bytes"] == path.stat().st_size > 1 << 30
    assert {part["what"]: part["bytes"] for part in stored["parts"]} == {
        "header length": 8, "header": len(raw), "tensors": place,
    }  # fmt: skip


def test_the_answer_is_the_exit_code(cli, tmp_path):
    torch.save(bertscope.build(bertscope.load("bert-tiny").config, device="cpu").state_dict(), tmp_path / "x.bin")
    assert cli("diff", "bert-tiny", tmp_path / "x.bin").code == 0
    no = cli("diff", "bert-mini", tmp_path / "x.bin")
    assert no.code == 1
    assert no.out.startswith("no: x.bin does not hold bert-mini (BertModel): 32 missing, 39 of another shape\n")
    for fmt in ("csv", "markdown"):
        assert cli("diff", "bert-mini", tmp_path / "x.bin", "--format", fmt).out.count("shape") >= 23
    for arguments in (("diff", "bert-tiny"), ("diff", "bert-tiny", tmp_path / "x.bin", "--allow", "all")):
        result = cli(*arguments)
        assert (result.code, result.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(("by", "rows"), [("layer", 23), ("parameter", 39), ("module", 21)])
def test_count_shows_what_is_stored(cli, tmp_path, by, rows):
    torch.save(bertscope.build(bertscope.load("bert-tiny").config, device="cpu").state_dict(), tmp_path / "x.bin")
    data = cli("count", tmp_path / "x.bin", "--by", by, "--format", "json").json
    assert (data["kind"], len(data["rows"])) == ("checkpoint", rows)
    assert sum(row["params"] for row in data["rows"]) == data["stored"]["stored_params"] == 4_385_920
    for fmt in ("csv", "markdown", "table"):
        assert cli("count", tmp_path / "x.bin", "--by", by, "--format", fmt).code == 0
    if by == "layer":
        assert "as expected" in cli("count", tmp_path / "x.bin", "--expect", "4385920").err
        assert "no groups" in cli("count", tmp_path / "x.bin", "--by", "group").err


# ---- what `diff` takes for a checkpoint ----


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The working directory: a model with weights, a folder with weights only, a file, and a folder with a config."""
    monkeypatch.chdir(tmp_path)
    config = bertscope.load("bert-tiny").config
    state = bertscope.build(config, device="cpu").state_dict()
    for name in ("my-bert", "stored", "described"):
        (tmp_path / name).mkdir()
    for name in ("my-bert", "described"):
        (tmp_path / name / "config.json").write_text(json.dumps(config.to_dict()))
    for name in ("my-bert/model.safetensors", "stored/model.safetensors"):
        save_file(state, tmp_path / name)
    torch.save(state, tmp_path / "x.bin")


@pytest.mark.parametrize(("words", "kind", "name"), cases("compared.yaml", "diff"))
def test_a_model_and_a_checkpoint_are_verified_and_two_of_a_kind_are_compared(cli, folders, words, kind, name):
    result = cli("diff", *words.split(), "--format", "json")
    assert (result.code, result.json["kind"]) == (0, kind), result.err
    assert (result.json["stored"] if kind == "verify" else result.json["b"])["name"] == name
