"""Files written by transformers' `save_pretrained` give exactly transformers' own counts; other families too."""

import json
from pathlib import Path

import pytest
import safetensors
import torch
import transformers

import bertscope
from bertscope.checkpoints.reading import read_checkpoint, stored_report
from bertscope.errors import SelectionError
from bertscope.model import CLASSES
from bertscope.sources.find import find
from tests.conftest import kinds

SMALL = {"vocab_size": 60, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 20, "max_position_embeddings": 40}  # fmt: skip
FAMILIES = {
    "roberta": ("RobertaForMaskedLM", SMALL),
    "albert": ("AlbertForMaskedLM", SMALL | {"embedding_size": 8}),
    "deberta-v2": ("DebertaV2ForMaskedLM", SMALL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                                                   "position_buckets": 8, "share_att_key": True}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 60, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 40}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 60, "d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2,
                                          "num_heads": 3}),
}  # fmt: skip
FORMS = {
    "safetensors": {},
    "bin": {"safe_serialization": False},
    "sharded": {"max_shard_size": "8KB"},
    "sharded bin": {"max_shard_size": "8KB", "safe_serialization": False},
}
if int(transformers.__version__.split(".")[0]) >= 5:  # which writes safetensors only
    FORMS = {form: options for form, options in FORMS.items() if "safe_serialization" not in options}


def reference(family: str) -> transformers.PreTrainedModel:
    name, fields = FAMILIES[family]
    cls = getattr(transformers, name)
    return cls(cls.config_class(**fields, attn_implementation="eager")).eval()


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Family -> its model, and the folder it was saved in."""
    made = {}

    def give(family: str) -> tuple[transformers.PreTrainedModel, Path]:
        if family not in made:
            made[family] = reference(family), tmp_path_factory.mktemp(family)
            made[family][0].save_pretrained(made[family][1])
        return made[family]

    return give


def distinct(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@kinds("name, form", CLASSES, FORMS)
def test_every_form_of_every_bert_gives_transformers_own_count(tmp_path, name, form):
    model = getattr(transformers, name)(transformers.BertConfig(**SMALL))
    model.save_pretrained(tmp_path, **FORMS[form])
    checkpoint = read_checkpoint(tmp_path)
    assert stored_report(checkpoint).stored.distinct_params == distinct(model)
    assert len(checkpoint.files) > 1 or "sharded" not in form
    report = bertscope.verify(find(tmp_path), checkpoint)
    assert report.fits
    assert {row.status for row in report.rows} <= {"tied"}
    assert report.model_distinct_params == distinct(model)
    files = [path for path in tmp_path.iterdir() if path.name in checkpoint.files]
    assert sum(part.bytes for part in checkpoint.parts) == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("form", FORMS)
def test_names_shapes_and_dtypes_are_those_that_the_official_readers_give(tmp_path, form):
    model = transformers.BertForPreTraining(transformers.BertConfig(**SMALL)).half()
    model.save_pretrained(tmp_path, **FORMS[form])
    checkpoint = read_checkpoint(tmp_path)
    found = {item.name: (item.shape, item.dtype) for item in checkpoint.tensors}
    official = {}
    for file in checkpoint.files:
        if file.endswith(".safetensors"):
            with safetensors.safe_open(tmp_path / file, "pt") as opened:
                official |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        else:
            official |= torch.load(tmp_path / file, weights_only=True)
    assert found == {key: (tuple(value.shape), str(value.dtype)[6:]) for key, value in official.items()}


def test_old_names_written_by_hand_are_read_as_transformers_reads_them(tmp_path):
    model = transformers.BertForPreTraining(transformers.BertConfig(**SMALL))
    model.config.architectures = ["BertForPreTraining"]
    model.config.save_pretrained(tmp_path)
    old = {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
           for key, value in model.state_dict().items()}  # fmt: skip
    old["bert.embeddings.position_ids"] = torch.arange(40).unsqueeze(0)
    torch.save(old, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    _, info = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    report = bertscope.verify(find(tmp_path), read_checkpoint(tmp_path))
    assert report.fits
    assert not info["missing_keys"]
    assert sum(row.params for row in report.rows if row.status == "buffer") == 40


def test_shared_layers_hold_their_parameters_once_and_work_each_time(cli, kept):
    _, folder = kept("albert")
    config = json.loads((folder / "config.json").read_text())
    counts, works = [], []
    for layers in (1, 2, 4):
        (folder / "more.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        counts.append(cli("count", folder / "more.json", "--format", "json").json["totals"]["distinct_params"])
        rows = cli("flops", folder / "more.json", "--seq", 8, "--format", "json").json["rows"]
        works.append(next(row for row in rows if row["name"] == "albert_layer_groups")["forward"]["matmul_flops"])
    assert len(set(counts)) == 1
    assert works == [works[0], 2 * works[0], 4 * works[0]]


@pytest.mark.parametrize("family", ["albert", "t5"])
def test_every_command_answers_for_another_family(cli, kept, family):
    _, folder = kept(family)
    tree = cli("tree", folder, "--shapes", "--seq", 8, "--format", "json")
    assert tree.json["rows"][0]["outputs"], tree.err
    for command in (
        ("count", folder), ("count", folder, "--shapes", "--seq", 8), ("tree", folder, "--style", "torch"),
        ("diff", folder, "bert-tiny", "--seq", 8),
        ("flops", folder, "--seq", "8,16", "--operators"), ("diagram", folder, "--kind", "tree"), ("diff", folder),
        ("count", folder / "model.safetensors"), ("explain", folder, "--seq", 8), ("diagram", folder, "-k", "class"),
    ):  # fmt: skip
        result = cli(*command)
        assert (result.code, result.err) == (0, ""), (command, result.err)
    result = cli("explain", folder, "--naming", "tf")
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_a_sequence_beyond_the_positions_is_one_line(cli, kept):
    assert "at most the model's 38 positions" in cli("flops", kept("roberta")[1], "--seq", 39).err
    assert cli("flops", kept("roberta")[1], "--seq", 38).code == 0
    assert "at most the model's 40 positions" in cli("flops", kept("gpt2")[1], "--seq", 41).err


def test_another_class_of_the_family_can_be_asked_for(cli, kept):
    _, folder = kept("roberta")
    data = cli("count", folder, "-a", "RobertaForSequenceClassification", "--format", "json").json
    assert data["subject"]["architecture"] == "RobertaForSequenceClassification"
    eager = cli("tree", kept("gpt2")[1], "--style", "torch", "--attention", "eager").out
    assert "(attn): GPT2Attention" in eager  # as torch prints it


def test_a_file_of_weights_next_to_the_configuration_of_another_model_is_no_model(tmp_path, family, kept):
    """Of another family none of its tensors are the model's; of another size their shapes are not."""
    name, fields = FAMILIES[family]
    folder = kept(family)[1]
    assert find(folder / "model.safetensors").architecture == name
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({"model": {"emb.table": torch.ones(4, 3)}, "epoch": 3}, tmp_path / "own.pt")
    cls = getattr(transformers, name)
    sizes = {key: 2 * value for key, value in fields.items() if key in ("hidden_size", "n_embd", "d_model")}
    torch.save(cls(cls.config_class(**fields | sizes)).state_dict(), tmp_path / "wide.pt")
    for file, why in (("own.pt", "it has none of that model's tensors, but emb.table"), ("wide.pt", "in that model")):
        with pytest.raises(SelectionError, match=f"{file} does not belong to .*config.json.*{why}; name the"):
            bertscope.estimate(tmp_path / file)
        assert bertscope.count(tmp_path / file).stored.distinct_params > 0
