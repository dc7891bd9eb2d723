"""Checkpoints by their headers: what good ones hold, and that broken, hostile and foreign ones run nothing."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bertscope
from bertscope.checkpoints.files import Budget, OpenFile
from bertscope.checkpoints.reading import read_checkpoint, stored_report
from bertscope.checkpoints.safetensors import DTYPES
from bertscope.checkpoints.torch_files import described_in
from bertscope.errors import BertscopeError, SourceError
from tests.conftest import run_python
from tests.hostile import entry
from tests.hostile import safetensors as header


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def saved(state, folder: Path, name: str = "pytorch_model.bin", **options) -> Path:
    torch.save(state, folder / name, **options)
    return folder / name


@pytest.fixture
def model(tiny):
    return bertscope.BertForMaskedLM(tiny)


# ---- good files ----


_shapes = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.tuples(_shapes, st.sampled_from(["F32", "F16", "I64"])), max_size=5
    )
)
def test_a_safetensors_file_is_explained_to_the_last_byte(tmp_path_factory, tensors):
    entries, place = {}, 0
    for name, (shape, dtype) in tensors.items():
        end = place + DTYPES[dtype][1] // 8 * torch.Size(shape).numel()
        entries[name] = entry(shape, place, end, dtype)
        place = end
    entries.pop("__metadata__", None)
    path = write(tmp_path_factory.mktemp("x"), header(entries, bytes(place)))
    if place != sum(item["data_offsets"][1] - item["data_offsets"][0] for item in entries.values()):
        return
    found = read_checkpoint(path)
    assert {item.name: (item.shape, item.bytes) for item in found.tensors} == {
        name: (tuple(item["shape"]), item["data_offsets"][1] - item["data_offsets"][0])
        for name, item in entries.items()
    }
    assert sum(part.bytes for part in found.parts) == path.stat().st_size
    assert found.problems == ()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_torch_saves_is_read_as_torch_loads_it(model, tmp_path, zipped):
    path = saved(model.state_dict(), tmp_path, _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(path)
    loaded = torch.load(path, weights_only=True)
    assert [(item.name, item.shape, item.dtype) for item in found.tensors] == [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in loaded.items()
    ]
    shared = {item.name: item.shares for item in found.tensors if item.shares}
    assert shared == {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    distinct = stored_report(found).stored.distinct_params
    assert distinct == sum(parameter.numel() for parameter in model.parameters())
    assert sum(part.bytes for part in found.parts) == path.stat().st_size


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.bool]
)
def test_every_dtype_is_told_by_torchs_name(tmp_path, dtype):
    (found,) = read_checkpoint(saved({"x": torch.zeros(3, 2).to(dtype)}, tmp_path)).tensors
    assert f"torch.{found.dtype}" == str(dtype)
    assert found.bytes == 6 * dtype.itemsize


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 3, "state_dict": {"x": torch.ones(2)}},
        {"model": OrderedDict(x=torch.ones(2)), "optimizer": {"state": {}}},
        {"x": torch.nn.Parameter(torch.ones(2)), "steps": 4, "name": "mine"},
        OrderedDict(x=torch.ones(4)[1:3]),
    ],
    ids=["nested", "trainer", "parameter", "view"],
)
def test_the_weights_are_found_among_other_things(tmp_path, state):
    (found,) = read_checkpoint(saved(state, tmp_path)).tensors
    assert (found.name, found.shape) == ("x", (2,))


def described(raw: bytes):
    return described_in(OpenFile(Path(), io.BytesIO(), 0, Budget(Path())), io.BytesIO(raw))


def test_a_table_as_python_2_pickled_it_is_read():
    assert described(b"ccollections\nOrderedDict\n(](](U\x01aK\x01eetR.") == {"a": 1}


def test_an_index_brings_its_shards_together(tmp_path):
    write(tmp_path, header({"a": entry()}, bytes(8)), "one.safetensors")
    write(tmp_path, header({"b": entry((1,), 0, 4)}, bytes(4)), "two.safetensors")
    places = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    path = write(tmp_path, json.dumps(places).encode(), "model.safetensors.index.json")
    for found in (read_checkpoint(path), read_checkpoint(tmp_path)):
        assert [(item.name, item.file) for item in found.tensors] == [
            ("a", "one.safetensors"),
            ("b", "two.safetensors"),
        ]
        assert sum(part.bytes for part in found.parts) == sum(
            (tmp_path / name).stat().st_size for name in ("one.safetensors", "two.safetensors")
        )


def test_a_gap_is_told_and_explained(tmp_path):
    found = read_checkpoint(write(tmp_path, header({"a": entry((1,), 4, 8)}, bytes(10))))
    assert {part.what: part.bytes for part in found.parts}["gaps"] == 6
    assert "6 bytes belong to no tensor" in found.problems[0]


def test_headers_are_read_without_torch(tmp_path, model):
    saved(model.state_dict(), tmp_path)
    code = (
        "import sys; from bertscope import cli; sys.argv = ['bertscope', 'count', sys.argv[1]]; cli._run();"
        "sys.exit(' '.join({'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)) or 0)"
    )
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# ---- broken and hostile files ----


class _Harm:
    """Return the call that unpickling would make: it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def zipped(folder: Path, pickled: bytes, records: dict[str, bytes] | None = None, **options) -> Path:
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in (records or {}).items():
            archive.writestr(f"archive/data/{name}", data)
    return path


def legacy(obj: bytes) -> bytes:
    return b"".join((pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2), pickle.dumps({}, 2), obj))


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("form", ["zip", "legacy", "alone"])
def test_a_pickle_with_code_runs_nothing(cli, tmp_path, protocol, form):
    mark = tmp_path / "harmed"
    raw = pickle.dumps({"x": _Harm(mark)}, protocol)
    if form == "zip":
        path = zipped(tmp_path, raw)
    else:
        path = write(tmp_path, legacy(raw) if form == "legacy" else raw, "pytorch_model.bin")
    result = cli("count", path)
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert not mark.exists()
    assert "nothing was loaded or run" in result.err
    if form == "zip" and protocol > 1:
        assert "it calls posix.system" in result.err


def test_a_whole_model_is_refused_with_what_to_save_instead(cli, tmp_path):
    torch.save(torch.nn.Linear(2, 3), tmp_path / "model.pt")
    result = cli("count", tmp_path / "model.pt")
    assert result.code == 2
    assert "weights are what torch.save(model.state_dict(), ...) writes; nothing was loaded or run" in result.err


def test_a_file_beyond_reason_is_not_read(cli, tmp_path):
    path = zipped(tmp_path, b"\0" * (9 << 20), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert "a pickle of 9,437,184 bytes" in cli("count", path).err
    path = zipped(tmp_path, b"\x80\x02" + b"N" * (1 << 20) + b".")
    assert "more than 1,048,576 instructions" in cli("count", path).err
    path = write(tmp_path, struct.pack("<Q", 17 << 20) + b" " * (17 << 20))
    assert "at most 16,777,216" in cli("count", path).err


class Mine(torch.Tensor):
    """A tensor of another class."""


def test_a_program_and_tensors_of_another_class_are_named(cli, tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    assert "it is a program of TorchScript; " in cli("count", tmp_path / "program.pt").err

    torch.save({"weight": torch.ones(2).as_subclass(Mine)}, tmp_path / "mine.pt")
    assert "tensors of a class that is not torch's own" in cli("count", tmp_path / "mine.pt").err
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as made:
        made.writestr("config.json", "{}")
    assert "(torch.export, Keras and NumPy write such ones)" in cli("count", tmp_path / "m.pt2").err


def test_a_directory_of_a_million_entries_is_refused(cli, tmp_path):
    path = zipped(tmp_path, b"")
    raw = bytearray(path.read_bytes())
    end = raw.rfind(b"PK\x05\x06")
    raw[end + 12 : end + 16] = struct.pack("<I", 17 << 20)
    path.write_bytes(bytes(raw))
    assert "a directory of 17,825,792 bytes" in cli("count", path).err


@pytest.mark.parametrize("zipped_", [True, False], ids=["zip", "legacy"])
def test_a_truncated_file_of_torch_is_told_wherever_it_ends(model, tmp_path, zipped_):
    raw = saved(model.state_dict(), tmp_path, _use_new_zipfile_serialization=zipped_).read_bytes()
    for end in (*range(0, 200, 13), *range(200, len(raw), max(1, len(raw) // 40)), len(raw) - 1):
        with pytest.raises(BertscopeError):
            read_checkpoint(write(tmp_path, raw[:end], "cut.bin"))


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    good = saved(OrderedDict(x=torch.ones(4)), tmp_path)
    with zipfile.ZipFile(good) as archive:
        raw = archive.read("pytorch_model/data.pkl")
    assert raw.count(b"K\x04\x85") == 1
    path = zipped(tmp_path, raw.replace(b"K\x04\x85", b"K\x05\x85"), {"0": bytes(16)})
    with pytest.raises(SourceError, match="reaches beyond its storage"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "shard",
    ["../one.safetensors", "/etc/passwd", "a/one.safetensors", "..", ".", "", "a\\b.safetensors", "C:x.safetensors",
     "x\0.safetensors", 5, None, ["one.safetensors"], {}, "config.json", "model.safetensors.index.json"],
)  # fmt: skip
def test_an_index_reaches_no_file_but_those_beside_it(cli, tmp_path, shard):
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner):
        write(folder, header({"a": entry()}, bytes(8)), "one.safetensors")
    path = write(inner, json.dumps({"weight_map": {"a": shard}}).encode(), "model.safetensors.index.json")
    result = cli("count", path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "the plain name of a file in the folder of the index" in result.err


def test_an_index_that_names_a_tensor_of_no_file_is_one_line(cli, tmp_path):
    write(tmp_path, header({"a": entry()}, bytes(8)), "one.safetensors")
    places = b'{"weight_map": {"b": "one.safetensors"}}'
    result = cli("count", write(tmp_path, places, "model.safetensors.index.json"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "'b' lies in one.safetensors, and it does not" in result.err


def test_links_are_followed(cli, tmp_path):
    good = write(tmp_path, header({"a": entry()}, bytes(8)), "blob")
    (tmp_path / "link.safetensors").symlink_to(good)
    assert cli("count", tmp_path / "link.safetensors").code == 0  # the cache of the hub is made of links


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_description_or_a_refusal(raw):
    try:
        described(raw)
    except SourceError as error:
        assert str(error)  # noqa: PT017
