"""Files of llama.cpp, ONNX and of trainers, and quantized weights: counted by their headers."""

import json
import os
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

import bertscope
from bertscope.checkpoints.gguf import TYPES
from bertscope.checkpoints.reading import read_checkpoint, stored_report
from bertscope.errors import SelectionError
from bertscope.sources.bert import BertSource
from tests import hostile, stored_files
from tests.stored_files import field, gguf, gguf_text, onnx, onnx_external, onnx_tensor


def stored(path: Path):
    return stored_report(read_checkpoint(path)).stored


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def packed(
    folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], values: dict[str, bytes] | None = None
) -> Path:
    """Write a safetensors file: name -> dtype and shape; its values are zero but for the given ones."""
    sizes = {"F32": 4, "F16": 2, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        raw = (values or {}).get(name, bytes(sizes[dtype] * torch.Size(shape).numel()))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return write(folder / "model.safetensors", hostile.safetensors(header) + data)


# ---- formats ----


def test_a_gguf_file_of_two_tensors_has_the_bits_found_by_hand(tmp_path):
    """32 elements of Q4_0 are a scale of 2 bytes and 32 halves of a byte: 18 bytes."""
    words = gguf_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + gguf_text("a") + gguf_text("b")
    name = gguf_text("general.name") + struct.pack("<I", 8) + gguf_text("mine")
    tensors = {"blk.0.attn_q.weight": ((32, 2), 2, 0), "blk.0.attn_q.bias": ((2,), 0, 64)}
    found = stored(write(tmp_path / "a.gguf", gguf(tensors, [words, name], 72)))
    assert (found.weights, found.weight_bytes) == (64 + 2, 2 * 18 + 2 * 4)
    assert [(row.dtype, row.packing, row.params) for row in found.dtypes] == [
        ("Q4_0", "GGUF", 64),
        ("float32", None, 2),
    ]
    assert found.metadata == {"general.name": "mine"}
    assert sum(part.bytes for part in found.parts) == (tmp_path / "a.gguf").stat().st_size


@pytest.mark.parametrize("kind", TYPES)
def test_the_bits_of_every_type_of_gguf_are_at_most_ten_or_those_of_a_number(kind):
    _, elements, size = TYPES[kind]
    assert (1 <= 8 * size / elements <= 10) if elements > 1 else size in (1, 2, 4, 8)


def test_the_splits_of_a_gguf_model_are_counted_together(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"m-0000{number}-of-00002.gguf", gguf({f"t{number}": ((4,), 0, 0)}, data=16))
    assert stored(tmp_path / "m-00002-of-00002.gguf").weights == stored(tmp_path).weights == 8


def test_the_initializers_of_an_onnx_file_are_counted_and_its_integers_are_no_weights(tmp_path):
    """A branch of a node has its own graph: attribute (field 5) with a graph (field 6)."""
    branch = field(5, onnx_tensor("c", (5,), bytes(20)))
    model = onnx(onnx_tensor("a", (2, 3), bytes(24)), onnx_tensor("axes", (2,), bytes(16), kind=7))
    model += field(7, field(1, field(5, field(6, branch))))
    found = stored(write(tmp_path / "m.onnx", model))
    assert (found.weights, found.distinct_params) == (2 * 3 + 5, 2 * 3 + 5 + 2)
    assert sum(part.bytes for part in found.parts) == len(model)


def test_a_constant_of_onnx_is_a_weight_and_a_single_number_is_none(tmp_path):
    """A node has its output in field 2, and its value in an attribute (5, 5); a name of a tensor is not needed."""
    weight, number = (
        field(1, field(2, name) + field(4, "Constant") + field(5, field(1, "value") + field(5, tensor)))
        for name, tensor in (("w", onnx_tensor("", (2, 3), bytes(24))), ("s", onnx_tensor("", (), bytes(4))))
    )
    path = write(tmp_path / "m.onnx", onnx(onnx_tensor("a", (5,), bytes(20))) + field(7, weight + number))
    assert [(row.name, row.shape) for row in read_checkpoint(path).tensors] == [("a", (5,)), ("w", (2, 3))]
    assert stored(path).weights == 2 * 3 + 5


def test_external_data_of_onnx_is_the_size_of_its_file(tmp_path):
    tensors = (
        onnx_external("a", (4,), location="m.data", offset=8, length=16),
        onnx_external("b", (2,), location="m.data"),
    )
    write(tmp_path / "m.data", bytes(30))
    found = stored(write(tmp_path / "m.onnx", onnx(*tensors)))
    assert (found.weights, found.tensor_bytes, found.files) == (6, 24, ("m.onnx", "m.data"))
    assert found.file_bytes == (tmp_path / "m.onnx").stat().st_size + 30


def test_links_of_a_model_and_its_external_data_into_one_folder_are_followed(tmp_path):
    """So the Hugging Face cache keeps them."""
    write(tmp_path / "blobs/2", bytes(16))
    write(tmp_path / "blobs/1", onnx(onnx_external("a", (4,), location="m.data")))
    (tmp_path / "snapshot").mkdir()
    for name, blob in (("m.onnx", "1"), ("m.data", "2")):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / blob)
    assert stored(tmp_path / "snapshot/m.onnx").weights == 4


FOREIGN = {
    "m.ckpt.index": "a TensorFlow checkpoint",
    "m.ckpt.data-00000-of-00002": "a TensorFlow checkpoint",
    "tf_model.h5": "an HDF5 file of Keras",
    "flax_model.msgpack": "weights of Flax",
    "m.keras": "a model of Keras",
    "saved_model.pb": "a SavedModel of TensorFlow",
}
READ = "only safetensors, PyTorch, GGUF and ONNX files are read; "


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_tensorflow_keras_or_flax_is_named_in_one_line_that_says_how_to_convert_it(cli, tmp_path, name):
    for content in (b"", bytes(99), b"PK\x03\x04" if name == "m.keras" else b"\xff" * 99):
        result = cli("count", write(tmp_path / name, content))
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert f"{name}: {FOREIGN[name]}; {READ}" in result.err
    assert "safetensors" in result.err.partition(READ)[2]  # what to do


@pytest.mark.parametrize("name", ["bert_model.ckpt.index", "tf_model.h5", "flax_model.msgpack", "saved_model.pb"])
def test_a_folder_with_a_file_of_another_framework_alone_is_refused_by_that_file(cli, tmp_path, name):
    write(tmp_path / name, bytes(99))
    result = cli("count", tmp_path)
    assert (result.code, f"{name}: " in result.err, READ in result.err) == (2, True, True)
    write(tmp_path / "m.gguf", gguf({"a": ((2,), 0, 0)}, data=8))  # which is read
    assert stored(tmp_path).weights == 2


def test_a_tensorflow_checkpoint_is_known_by_the_front_of_its_names_and_hdf5_by_its_first_bytes(cli, tmp_path):
    write(tmp_path / "m.ckpt.index", bytes(99))
    assert "m.ckpt.index: a TensorFlow checkpoint; " in cli("count", tmp_path / "m.ckpt").err
    path = write(tmp_path / "pytorch_model.bin", b"\x89HDF\r\n\x1a\n" + bytes(99))
    assert "an HDF5 file of Keras; " in cli("count", path).err


# ---- quantized weights ----

STATE = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [8, 32]}).encode()
# Packing -> tensors of a weight (8, 32) as the package stores it, dtype and bytes of all of them.
PACKED = {
    "bitsandbytes nf4": ({"a.weight": ("U8", (128, 1)), "a.weight.absmax": ("F32", (4,)),
                          "a.weight.quant_map": ("F32", (16,)),
                          "a.weight.quant_state.bitsandbytes__nf4": ("U8", (len(STATE),))},
                         "nf4", 128 + 16 + 64 + len(STATE)),
    "bitsandbytes int8": ({"a.weight": ("I8", (8, 32)), "a.SCB": ("F32", (8,)), "a.weight_format": ("U8", ())},
                          "int8", 256 + 32 + 1),
    "GPTQ int4": ({"a.qweight": ("I32", (4, 8)), "a.qzeros": ("I32", (2, 1)), "a.scales": ("F16", (2, 8)),
                   "a.g_idx": ("I32", (32,))}, "int4", 128 + 8 + 32 + 128),
    "GPTQ int3": ({"a.qweight": ("I32", (3, 8)), "a.scales": ("F16", (2, 8)), "a.g_idx": ("I32", (32,))},
                  "int3", 96 + 32 + 128),
    "AWQ gemm": ({"a.qweight": ("I32", (32, 1)), "a.qzeros": ("I32", (2, 1)), "a.scales": ("F16", (2, 8))},
                 "int4", 128 + 8 + 32),
    "AWQ gemv": ({"a.qweight": ("I32", (8, 4)), "a.qzeros": ("I32", (8, 1)), "a.scales": ("F16", (8, 3))},
                 "int4", 128 + 32 + 48),
    "compressed-tensors int4": ({"a.weight_packed": ("I32", (8, 4)), "a.weight_scale": ("F16", (8, 1)),
                                 "a.weight_shape": ("I64", (2,))}, "int4", 128 + 16 + 16),
    "compressed-tensors fp4": ({"a.weight_packed": ("U8", (8, 16)), "a.weight_scale": ("F8_E4M3", (8, 2)),
                                "a.weight_global_scale": ("F32", (1,))}, "fp4", 128 + 16 + 4),
    "fp8 with scales": ({"a.weight": ("F8_E4M3", (8, 32)), "a.weight_scale_inv": ("F32", (1, 1)),
                         "a.input_scale": ("F32", ())}, "float8_e4m3fn", 256 + 4 + 4),
    "torchao int8": ({"a._weight_qdata": ("I8", (8, 32)), "a._weight_scale": ("F32", (8, 1))}, "int8", 256 + 32),
    "quanto int8": ({"a.weight._data": ("I8", (8, 32)), "a.weight._scale": ("F16", (8, 1)),
                     "a.input_scale": ("F32", ())}, "int8", 256 + 16 + 4),
    "quanto int4": ({"a.weight._data._data": ("U8", (4, 32)), "a.weight._scale": ("F16", (8, 1)),
                     "a.weight._shift": ("F16", (8, 1))}, "int4", 128 + 16 + 16),
    "NVFP4 of modelopt": ({"a.weight": ("U8", (8, 16)), "a.weight_scale": ("F8_E4M3", (8, 2)),
                           "a.weight_scale_2": ("F32", ())}, "fp4", 128 + 16 + 4),
}  # fmt: skip
VALUES = {"a.weight.quant_state.bitsandbytes__nf4": STATE, "a.weight_shape": struct.pack("<qq", 8, 32)}


@pytest.mark.parametrize("name", PACKED)
def test_a_quantized_weight_is_one_tensor_of_its_shape_with_all_its_bytes(tmp_path, name):
    tensors, dtype, size = PACKED[name]
    path = packed(tmp_path, tensors | {"a.bias": ("F16", (8,))}, {key: VALUES[key] for key in VALUES if key in tensors})
    weight, bias = sorted(read_checkpoint(path).tensors, key=lambda tensor: -tensor.params)
    assert (weight.name, weight.dtype, weight.shape, weight.bytes) == ("a.weight", dtype, (8, 32), size)
    assert (bias.name, bias.packing) == ("a.bias", None)
    assert stored(path).weights == 8 * 32 + 8
    assert stored(path).tensors == len(tensors) + 1


def test_experts_of_mxfp4_are_two_elements_a_byte(tmp_path):
    path = packed(tmp_path, {"up_blocks": ("U8", (2, 3, 4, 16)), "up_scales": ("U8", (2, 3, 4))})
    assert [(row.name, row.shape, row.dtype) for row in read_checkpoint(path).tensors] == [("up", (2, 3, 128), "mxfp4")]


@pytest.mark.parametrize("tensors", [
    {"a.weight": ("F32", (8, 4)), "a.weight_scale": ("F32", (8,))},  # a weight norm, not quantized
    {"a.qweight": ("I32", (4, 7)), "a.scales": ("F16", (2, 9))},
    {"a.weight_packed": ("I32", (8, 4)), "a.weight_scale": ("F16", (8, 1)), "a.weight_shape": ("I64", (2,))},
], ids=["floats", "other sizes", "a shape of zeros"])  # fmt: skip
def test_tensors_that_only_have_the_names_stay_as_they_are(tmp_path, tensors):
    assert {row.name for row in read_checkpoint(packed(tmp_path, tensors)).tensors} == set(tensors)


@pytest.mark.parametrize(
    ("tensors", "method", "packing"),
    [
        ({"a.W_q": ("U8", (128, 1)), "a.scale": ("F16", (8, 1))}, "hqq", "HQQ"),
        ({"a._weight_qdata": ("U8", (8, 16)), "a._weight_scale": ("F32", (8, 1))}, "torchao", "torchao"),
        ({"a.weight_packed": ("I32", (2, 8)), "a.scale_packed": ("F16", (1, 8))}, None, "Marlin 2:4"),
        ({"a.secret": ("I32", (8, 4))}, "spqr", "spqr"),
        ({"a.weight": ("F32", (8, 4))}, "spqr", ""),  # dequantized
    ],
)
def test_a_packing_that_is_not_known_is_named_and_counted_as_stored(cli, tmp_path, tensors, method, packing):
    path = packed(tmp_path, tensors)
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": method} if method else 1})
    )
    assert stored(path).unknown_packing == packing
    assert {row.name for row in read_checkpoint(path).tensors} == set(tensors)
    assert (f"{packing}: packed in a way" in " ".join(cli("count", path).out.split())) == bool(packing)


def test_a_quantized_onnx_weight_is_counted_once(tmp_path):
    """onnxruntime stores `w` as w_quantized, w_scale and w_zero_point."""
    tensors = (onnx_tensor("w_quantized", (4, 5), bytes(20), kind=3), onnx_tensor("w_scale", (), bytes(4)),
               onnx_tensor("w_zero_point", (), bytes(1), kind=3))  # fmt: skip
    found = stored(write(tmp_path / "m.onnx", onnx(*tensors)))
    assert (found.weights, found.weight_bytes) == (20, 25)


# ---- folders of trainers ----


def test_a_checkpoint_of_lightning_is_counted_by_its_state_dict(tmp_path):
    from argparse import Namespace

    state = {"model.weight": torch.zeros(3, 2), "model.bias": torch.zeros(3)}
    about = {"hyper_parameters": Namespace(lr=0.1, path=Path("x")), "callbacks": {"Early": {"best": torch.tensor(1.0)}}}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3, 2)}}, "param_groups": [{"betas": (0.9, 0.99)}]}
    saved = {"epoch": 3, "state_dict": OrderedDict(state), "optimizer_states": [optimizer], **about}
    torch.save(saved, tmp_path / "last.ckpt")
    assert stored(tmp_path / "last.ckpt").weights == 3 * 2 + 3


def test_a_folder_of_distcp_is_counted_by_its_metadata(tmp_path):
    model = torch.nn.Linear(3, 2)
    optim = {"state": {"weight": {"exp_avg": torch.zeros(2, 3)}}}
    state = {"model": model.state_dict(), "optim": optim, "step": 3}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    found = stored(tmp_path / "step-3")
    assert (found.weights, found.format) == (3 * 2 + 2, "distcp")
    assert {part.what for part in found.parts} >= {"tensors", "optimizer state"}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_of_deepspeed_is_counted_by_the_states_of_its_model(tmp_path, stage):
    """ZeRO-3 has empty tensors in the module, and the shapes next to it; the buffers are whole."""
    own = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
    module = own if stage == 2 else {name: torch.zeros(0) for name in own}
    states = {"module": OrderedDict(module | {"ids": torch.zeros(5, dtype=torch.int64)}), "buffer_names": ["ids"],
              "param_shapes": [OrderedDict((name, value.shape) for name, value in own.items())]}  # fmt: skip
    name = "mp_rank_00_model_states.pt" if stage == 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    folder = tmp_path / "run" / "global_step3"
    folder.mkdir(parents=True)
    torch.save(states, folder / name)
    write(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", bytes(100))
    write(tmp_path / "run/latest", b"global_step3\n")
    for path in (tmp_path / "run", folder):
        found = stored(path)
        assert (found.weights, found.distinct_params) == (4 * 3 + 4, 4 * 3 + 4 + 5)
        assert sum(part.bytes for part in found.parts if part.what == "optimizer state") == 100


def test_a_part_of_a_tensor_parallel_model_is_refused(cli, tmp_path):
    for rank in (0, 1):
        torch.save({"module": {"w": torch.zeros(2)}}, tmp_path / f"mp_rank_0{rank}_model_states.pt")
    for path in (tmp_path, tmp_path / "mp_rank_01_model_states.pt"):
        result = cli("count", path)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert "part of a model in 2 (mp_rank_00, mp_rank_01)" in result.err


@pytest.fixture
def sentences(tmp_path, tiny):
    """A folder of sentence-transformers: a BERT, mean pooling and a Dense of 8 to 3."""
    model = bertscope.BertModel(tiny)
    folder = tmp_path / "st"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertModel"], **tiny.to_dict()})
    )
    parts = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")
    listed = [
        {"idx": idx, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    packed(folder / "2_Dense", {"linear.weight": ("F32", (3, 8)), "linear.bias": ("F32", (3,))})
    return folder, sum(parameter.numel() for parameter in model.parameters())


def test_a_folder_of_sentence_transformers_is_counted_with_its_dense(cli, sentences):
    folder, params = sentences
    found = stored(folder)
    assert found.weights == params + 3 * 8 + 3
    assert found.metadata["modules"] == "Transformer, Pooling, Dense"
    assert f"{found.weights:,}" in cli("count", folder).out
    assert cli("diff", folder).code == 0  # the Dense is no part of the BERT


# ---- verify, tree, diff ----


@pytest.fixture
def source(tiny):
    return BertSource(name="tiny", config=tiny, architecture="BertForSequenceClassification")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.bert_model."])
def test_a_prefix_of_all_names_is_one_finding_and_can_be_left_out(tmp_path, source, prefix):
    state = bertscope.BertForSequenceClassification(source.config).state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "a.bin")
    report = bertscope.verify(source, tmp_path / "a.bin")
    (row,) = report.rows
    assert (row.status, row.name, row.copies, report.fits) == ("prefix", prefix, len(state), False)
    for given in (prefix, "auto"):
        report = bertscope.verify(source, tmp_path / "a.bin", strip_prefix=given)
        assert (report.fits, report.rows) == (True, ())
    with pytest.raises(SelectionError, match="no name in the file begins with"):
        bertscope.verify(source, tmp_path / "a.bin", strip_prefix="x.")


def test_a_head_that_the_file_does_not_have_is_named(cli, tmp_path, source):
    state = bertscope.BertForSequenceClassification(source.config).state_dict()
    body = {name: tensor for name, tensor in state.items() if not name.startswith("classifier")}
    torch.save(body, tmp_path / "a.bin")
    assert bertscope.verify(source, tmp_path / "a.bin").new_modules == ("classifier",)
    del body["bert.embeddings.LayerNorm.bias"]  # then the file does not hold the body either
    torch.save(body, tmp_path / "a.bin")
    assert bertscope.verify(source, tmp_path / "a.bin").new_modules == ()


def test_the_names_of_llama_cpp_are_those_of_the_model(tmp_path, tiny):
    body = BertSource(name="tiny", config=tiny, architecture="BertModel")
    llama = {"token_embd.weight": ((8, 32), 0, 0), "blk.0.ffn_up.bias": ((16,), 0, 1024)}
    report = bertscope.verify(body, read_checkpoint(write(tmp_path / "m.gguf", gguf(llama, data=1088))))
    assert "unexpected" not in {row.status for row in report.rows}


def test_a_file_with_tensors_has_a_tree_and_is_compared_with_another(cli, tmp_path):
    one = packed(tmp_path / "a", {"l.0.w": ("F32", (2, 2)), "l.1.w": ("F32", (2, 2)), "h.b": ("F32", (3,))})
    other = write(tmp_path / "b.gguf", gguf({"l.0.w": ((2, 2), 1, 0), "l.1.w": ((3, 2), 1, 32)}, data=44))
    out = cli("tree", one, "--format", "csv").out
    assert [line.split(",")[0] for line in out.splitlines()[1:]] == ["(all)", "h", "l", "l.0-1"]
    assert "l.0-1,float32,,2,8" in out.replace("\r", "")
    told = cli("diff", one, other, "--format", "csv").out
    assert [line.split(",")[:2] for line in told.splitlines()[1:]] == [["h.b", "removed"], ["l.1.w", "changed"]]
    assert cli("tree", one, "--shapes").code == 2


# ---- hostile files ----


def _outside(folder: Path, location: str) -> Path:
    return write(folder / "in/m.onnx", onnx(onnx_external("a", (4,), location=location)))


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../data", "x/../../data", "a\\b", "", "link", "pipe", "absent", ".", "m.onnx"]
)
def test_external_data_outside_of_the_folder_is_refused(cli, tmp_path, location):
    write(tmp_path / "data", bytes(16))
    path = _outside(tmp_path, location)
    (tmp_path / "in/link").symlink_to(tmp_path / "data")
    os.mkfifo(tmp_path / "in/pipe")
    result = cli("count", path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "external data" in result.err


@pytest.mark.parametrize(
    "name", ["m.bin", "m.safetensors", "m.gguf", "m.onnx", "m.index", ".metadata", "latest", "modules.json"]
)
def test_a_pipe_or_a_loop_of_links_in_place_of_a_file_is_one_line(cli, tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert cli("count", tmp_path / name).code == 2
    assert name in ("latest", "modules.json") or "not a regular file" in cli("count", tmp_path / name).err
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / name)
    result = cli("count", tmp_path / name)
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_a_sparse_file_of_a_terabyte_takes_no_time(cli, tmp_path):
    path = write(tmp_path / "m.gguf", gguf({"a": ((2**38,), 0, 0)}))
    os.truncate(path, 2**41)
    assert stored(path).weights == 2**38
    text = onnx_tensor("a", (1,), bytes(4))
    path = write(tmp_path / "m.onnx", onnx(text) + field(9, b"")[:1] + stored_files.varint(2**40))
    os.truncate(path, 2**41)
    assert cli("count", path).code == 2  # what follows the field is no field


@pytest.mark.parametrize(
    "listed", [b"{}", b"[1]", b'[{"path": "../x", "type": "a"}]', b'[{"path": "/etc"}]', b"[", b"[]"]
)
def test_a_modules_json_that_leads_outside_is_refused(cli, tmp_path, listed):
    packed(tmp_path / "inner", {"a": ("F32", (2,))})
    write(tmp_path / "modules.json", listed)
    result = cli("count", tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_a_split_that_is_absent_is_named(cli, tmp_path):
    result = cli("count", write(tmp_path / "m-00001-of-00900.gguf", gguf({})))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "m-00002-of-00900.gguf cannot be read: No such file" in result.err
    result = cli("count", write(tmp_path / "m-00001-of-01001.gguf", gguf({})))
    assert (result.code, "one of 1,001 splits; at most 1,000 are read" in result.err) == (2, True)


def test_a_latest_that_names_another_folder_is_not_followed(cli, tmp_path):
    write(tmp_path / "run/latest", b"../other")
    write(tmp_path / "other/mp_rank_00_model_states.pt", b"PK\x03\x04")
    assert cli("count", tmp_path / "run").code == 2
