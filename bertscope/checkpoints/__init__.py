"""Checkpoints by their headers: which tensors, shapes and dtypes a file holds, without loading or running anything.

`model.safetensors`, `pytorch_model.bin`, either of them in shards with an index, or a folder with one of these.
Here is what such files are called; `reading` reads them.
"""

from __future__ import annotations

from pathlib import Path

from bertscope.text_files import readable

# In the order in which transformers looks for them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
INDEX = ".index.json"


def is_weights(path: Path) -> bool:
    """Whether a file's name says that it holds weights, or is the index of some."""
    return path.suffix in SUFFIXES or path.name.endswith(INDEX)


def weights_in(folder: Path) -> Path | None:
    """The weights in a folder, the first of those that transformers would take."""
    with readable(folder):
        return next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
