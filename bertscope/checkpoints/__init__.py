"""Checkpoint headers: names, shapes and dtypes of the tensors in a file, read without loading a tensor or running code.

A checkpoint is `model.safetensors`, `pytorch_model.bin`, shards of either with an index, the weights of an adapter of
peft, a file of GGUF, ONNX, TensorFlow or Flax, or a folder with one of these. This module has the file names; `reading`
reads the files.
"""

from pathlib import Path

from bertscope.text_files import readable

# In the order in which transformers searches, then those of an adapter of peft, then those of other programs: FSDP's
# `.metadata`, DeepSpeed's `latest`, and TensorFlow's index as Google named it.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip
_OTHERS = (".metadata", "latest", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt",
           "flax_model.msgpack", "bert_model.ckpt.index", "model.onnx")  # fmt: skip
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OTHER_SUFFIXES = (".gguf", ".onnx", ".msgpack", ".index", ".h5", ".keras", ".pt2")
INDEX = ".index.json"


def is_weights(path: Path) -> bool:
    """Return True for the file name of weights or of an index of shards."""
    return path.suffix in (*SUFFIXES, *_OTHER_SUFFIXES) or path.name.endswith(INDEX) or path.name == _OTHERS[0]


def weights_in(folder: Path) -> Path | None:
    """Return the weights in a folder that transformers would load, else those of another program."""
    with readable(folder):
        found = next((folder / name for name in (*WEIGHTS, *_OTHERS) if (folder / name).exists()), None)
        files = sorted(folder.glob("*.gguf")) if found is None and folder.is_dir() else []
        is_one = len(files) == 1 or (bool(files) and "-of-" in files[0].name)  # else one must be named
        return files[0] if is_one else found


def has_modules(folder: Path) -> bool:
    """Return True for a folder of sentence-transformers with weights behind the first module, such as a Dense."""
    with readable(folder):
        is_listed = (folder / "modules.json").is_file()
        return is_listed and any(weights_in(module) is not None for module in folder.iterdir() if module.is_dir())
