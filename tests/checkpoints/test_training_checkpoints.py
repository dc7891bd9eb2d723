"""Weights inside what trainers save: the largest table of tensors, wherever it is and whatever the file is called."""

import json
from collections import OrderedDict

import numpy
import pytest
import torch
from torch import nn

from tests import hostile
from tests.conftest import run_cli

NET = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 10))
PARAMS = 20 * 30 + 30 + 2 * 30 + 30 * 10 + 10


def trained() -> dict:
    """The state of AdamW, of which the largest tensor has two moments."""
    optimizer = torch.optim.AdamW(NET.parameters())
    NET(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


WEIGHTS, OPTIMIZER = NET.state_dict(), trained()
# What is saved -> what is left out.
NESTED = {
    "tutorial": ({"epoch": 5, "model_state_dict": WEIGHTS, "optimizer_state_dict": OPTIMIZER,
                  "loss": torch.tensor(0.4)}, ("epoch", "optimizer_state_dict", "loss")),
    "epoch": ({"epoch": torch.tensor(3), "state_dict": WEIGHTS}, ("epoch",)),
    "flat": (WEIGHTS, ()),
    "norm": ({"state_dict": WEIGHTS, "mean": torch.zeros(3), "std": torch.ones(3)}, ("mean", "std")),
    "net": ({"net": WEIGHTS, "acc": 0.9}, ("acc",)),
    "deep": ({"a": {"b": [{"c": WEIGHTS, "step": 3}]}, "best": torch.tensor(1.0)}, ("a.b.0.step", "best")),
    "list": ([{"epoch": 1}, WEIGHTS], ()),
    "rng": ({"model": WEIGHTS, "optimizer": OPTIMIZER, "rng_state": torch.get_rng_state()}, ("optimizer", "rng_state")),
    "ema": ({"model": WEIGHTS, "ema": {name: value.clone() for name, value in WEIGHTS.items()}}, ("ema",)),
    "ema alone": ({"ema": OrderedDict(WEIGHTS), "optimizers": [OPTIMIZER]}, ("optimizers",)),
    "array": ({"state_dict": WEIGHTS, "classes": numpy.arange(3)}, ("classes (NumPy array)",)),
    "in a list with a tensor": ({"models": [WEIGHTS, torch.tensor(2.0)], "mean": torch.zeros(3)}, ["mean", "models.1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
def test_the_weights_are_the_largest_table_and_what_is_left_out_is_named(tmp_path, name, is_zip):
    saved, left_out = NESTED[name]
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    found = run_cli("count", tmp_path / "x.pt", "--format", "json").json["stored"]
    assert found["distinct_params"] == PARAMS
    named = found["metadata"].get("left out", "")
    assert all(key in named for key in left_out), named
    assert not named or "left out" in run_cli("count", tmp_path / "x.pt").out


def test_two_networks_are_two_tables(tmp_path):
    other = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 1))
    saved = {"generator": WEIGHTS, "discriminator": other.state_dict(), "optG": OPTIMIZER, "step": torch.tensor(1)}
    torch.save(saved, tmp_path / "gan.pt")
    found = run_cli("count", tmp_path / "gan.pt", "--by", "parameter", "--format", "json").json
    assert found["stored"]["distinct_params"] == PARAMS + 10 * 5 + 5 + 5 + 1
    assert {row["name"].split(".")[0] for row in found["rows"]} == {"generator", "discriminator"}


@pytest.mark.parametrize("name", ["checkpoint.pth.tar", "checkpoint_last", "model.PT", "weights.pkl"])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
def test_the_content_of_a_file_decides_and_not_its_name(tmp_path, name, is_zip):
    torch.save({"state_dict": WEIGHTS}, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    assert run_cli("count", tmp_path / name, "--format", "json").json["stored"]["distinct_params"] == PARAMS


def test_a_safetensors_file_without_its_suffix_is_read(tmp_path):
    written(tmp_path / "weights", [3, 2])
    assert run_cli("count", tmp_path / "weights", "--format", "json").json["stored"]["distinct_params"] == 6


def test_two_tables_whose_keys_have_one_text_are_both_counted(tmp_path):
    torch.save({1: nn.Linear(3, 4).state_dict(), "1": nn.Linear(5, 6).state_dict()}, tmp_path / "two.pt")
    found = run_cli("count", tmp_path / "two.pt", "--format", "json").json
    assert found["stored"]["distinct_params"] == 3 * 4 + 4 + 5 * 6 + 6


def test_a_table_that_contains_itself_is_read_once(tmp_path):
    saved = {"model": WEIGHTS}
    saved["self"] = saved
    torch.save(saved, tmp_path / "x.pt")
    assert run_cli("count", tmp_path / "x.pt", "--format", "json").json["stored"]["distinct_params"] == PARAMS


@pytest.mark.parametrize(
    "saved", [{"w": numpy.ones((3, 2))}, {"weights": {"w": numpy.ones(3)}}, numpy.ones(3)], ids=str
)
def test_arrays_alone_are_named_and_are_no_weights(tmp_path, saved):
    torch.save(saved, tmp_path / "x.pt")
    numpy.save(tmp_path / "x.npy", numpy.ones((200, 200)))
    numpy.savez(tmp_path / "x.npz", w=numpy.ones(3))
    for name in ("x.pt", "x.npy", "x.npz"):
        result = run_cli("count", tmp_path / name)
        assert (result.code, result.out) == (2, "")
        assert "NumPy" in result.err


@pytest.mark.parametrize("saved", [torch.ones(2, 2), 5, None, "text"], ids=str)
def test_a_value_that_is_no_table_is_said_to_be_none(tmp_path, saved):
    torch.save(saved, tmp_path / "x.pt")
    result = run_cli("count", tmp_path / "x.pt")
    assert (result.code, result.out) == (2, "")
    assert "it holds no table of tensors" in result.err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_layer_that_torch_quantized_has_the_parameters_of_the_layer(tmp_path):
    layer = torch.nn.Linear(6, 4)
    torch.save(torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer)).state_dict(), tmp_path / "q.pt")
    stored = run_cli("count", tmp_path / "q.pt", "--format", "json").json["stored"]
    assert {row["dtype"]: row["params"] for row in stored["dtypes"]} == {"qint8": 24, "float32": 4}
    assert sum(row["params"] for row in stored["dtypes"]) == sum(tensor.numel() for tensor in layer.parameters())


def written(path, shape):
    """Write a file of safetensors with one tensor."""
    size = 4 * shape[0] * shape[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(hostile.safetensors({"w": hostile.entry(shape, 0, size)}, bytes(size)))


@pytest.mark.parametrize("layout", ["before 2.0", "Router"])
def test_a_folder_of_sentence_transformers_in_another_layout_has_all_its_modules(tmp_path, layout):
    kind = "sentence_transformers.models."
    first = "0_Transformer" if layout == "before 2.0" else ""
    listed = [{"path": first, "type": f"{kind}{'Transformer' if first else 'Router'}"},
              {"path": "2_Dense", "type": f"{kind}Dense"}]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    routes = ["query_0_Transformer", "document_0_Transformer"] if not first else [first]
    for route in routes:
        written(tmp_path / route / "model.safetensors", [5, 8])
    written(tmp_path / "2_Dense" / "model.safetensors", [3, 8])
    if not first:
        types = dict.fromkeys(routes, f"{kind}Transformer")
        (tmp_path / "router_config.json").write_text(json.dumps({"types": types}))
    found = run_cli("count", tmp_path, "--format", "json").json["stored"]
    assert found["distinct_params"] == len(routes) * 5 * 8 + 3 * 8


@pytest.mark.parametrize("types", [["x"], {"../x": "a"}, {"a/b": "c"}, 3, {str(n): "" for n in range(101)}], ids=str)
def test_a_router_that_leads_outside_is_refused(tmp_path, types):
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "Router"}, {"path": "D", "type": "Dense"}]))
    (tmp_path / "router_config.json").write_text(json.dumps({"types": types}))
    written(tmp_path / "D" / "model.safetensors", [3, 8])
    result = run_cli("count", tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
