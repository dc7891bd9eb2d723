"""Checkpoint headers: names, shapes and dtypes of the tensors in a file, read without loading a tensor or running code.

A checkpoint is `model.safetensors`, `pytorch_model.bin`, shards of either with an index, the weights of an adapter of
peft, or a folder with one of these. This module has the file names; `reading` reads the files.
"""

from pathlib import Path

from bertscope.text_files import readable

# In the order in which transformers searches, then those of an adapter of peft.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
INDEX = ".index.json"


def is_weights(path: Path) -> bool:
    """Return True for the file name of weights or of an index of shards."""
    return path.suffix in SUFFIXES or path.name.endswith(INDEX)


def weights_in(folder: Path) -> Path | None:
    """Return the weights in a folder that transformers would load."""
    with readable(folder):
        return next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
