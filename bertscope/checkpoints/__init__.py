"""Checkpoint headers: tensors' names, shapes and dtypes, read without loading a tensor or running code.

A checkpoint is `model.safetensors`, `pytorch_model.bin`, shards with an index, the weights of a peft
adapter, a GGUF or ONNX file, or a folder with one of these. This module has the file names; `reading` reads the files.
"""

import re
from contextlib import suppress
from pathlib import Path

from bertscope.errors import SourceError
from bertscope.files import open_file, readable

# In the order in which transformers searches, then those of an adapter of peft, then those of other programs: FSDP's
# `.metadata` and DeepSpeed's `latest`; last what `refused` names.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip
_OTHERS = (".metadata", "latest", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt",
           "model.onnx")  # fmt: skip
_REFUSED_NAMES = ("flax_model.msgpack", "tf_model.h5", "bert_model.ckpt.index", "model.ckpt.index", "saved_model.pb")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OTHER_SUFFIXES = (".gguf", ".onnx", ".pt2")
INDEX = ".index.json"
_TEXTS = (".yaml", ".yml", ".json", ".py")
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.serialization.MAGIC_NUMBER, pickled
MAGICS = (b"PK\x03\x04", LEGACY, b"GGUF", b"\x93NUMPY")  # the last is refused by its name
_TRANSFORMERS = (
    "transformers 4 writes safetensors: from_pretrained(FILE, config=CONFIG, {}=True).save_pretrained(FOLDER)"
)
_EXPORT = "export its weights in TensorFlow with safetensors.tensorflow.save_file"
# The end of a file's name -> what the file is, and how it becomes one that is read.
_REFUSED = {
    r"\.index|\.data-[0-9]+-of-[0-9]+": ("a TensorFlow checkpoint", _TRANSFORMERS.format("from_tf")),
    r"\.h5": ("an HDF5 file of Keras", _TRANSFORMERS.format("from_tf")),
    r"\.msgpack": ("weights of Flax", _TRANSFORMERS.format("from_flax")),
    r"\.keras": ("a model of Keras", _EXPORT),
    r"\.pb": ("a SavedModel of TensorFlow", _EXPORT),
}


def is_weights(path: Path) -> bool:
    """Return True for the file name of weights or a shard index, and for a file that begins like one."""
    is_known = path.suffix in (*SUFFIXES, *_OTHER_SUFFIXES) or path.name.endswith(INDEX) or path.name == _OTHERS[0]
    return is_known or bool(refused(path.name)) or (path.suffix not in _TEXTS and _begins_as_weights(path))


def _begins_as_weights(path: Path) -> bool:
    with suppress(SourceError), open_file(path, "") as file:
        start = file.read(32)
        return start.startswith(MAGICS) or start[8:10] == b'{"'  # safetensors
    return False


def refused(name: str) -> str:
    """Return what another framework's file is and how to convert it, by its name; empty for any other file."""
    for end, (what, how) in _REFUSED.items():
        if re.search(rf"({end})\Z", name):
            return f"{what}; only safetensors, PyTorch, GGUF and ONNX files are read; {how}"
    return ""


def weights_in(folder: Path) -> Path | None:
    """Return the weights in a folder that transformers would load, else another program's, refused ones last."""
    with readable(folder):
        path = next((folder / name for name in (*WEIGHTS, *_OTHERS) if (folder / name).exists()), None)
        files = sorted(folder.glob("*.gguf")) if path is None and folder.is_dir() else []
        is_one = len(files) == 1 or (bool(files) and "-of-" in files[0].name)  # else one must be named
        if is_one:
            return files[0]
        return path or next((folder / name for name in _REFUSED_NAMES if (folder / name).exists()), None)


def has_modules(folder: Path) -> bool:
    """Return True for a sentence-transformers folder with weights behind the first module, such as a Dense."""
    with readable(folder):
        is_listed = (folder / "modules.json").is_file()
        return is_listed and any(weights_in(module) is not None for module in folder.iterdir() if module.is_dir())
