"""Models in the local Hugging Face cache by their hub name; only `download` uses the network.

huggingface_hub reads HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and, for a download, HF_ENDPOINT
and HF_TOKEN. TRANSFORMERS_CACHE, which only transformers reads, is searched as well.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from bertscope.checkpoints import WEIGHTS
from bertscope.errors import MissingExtraError, SourceError, importing
from bertscope.text_files import readable

_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_CONFIGS = ("adapter_config.json", "config.json")


def is_hub_name(name: str) -> bool:
    """Return True if a model on the hub can have that name: `bert-base-cased`, `google-bert/bert-base-cased`."""
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def is_installed() -> bool:
    """Return True if huggingface_hub is installed, without importing it."""
    return find_spec("huggingface_hub") is not None


def cached_folder(name: str) -> Path | None:
    """Return the folder of that model's files in the local cache, or None."""
    if not is_hub_name(name) or not is_installed():
        return None
    with importing("huggingface_hub", "HF_", "HUGGINGFACE_"):
        from huggingface_hub import try_to_load_from_cache
    with readable(f"{name} in the Hugging Face cache"):
        others = map(os.environ.get, ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE"))
        for cache in (None, *filter(None, others)):  # None: huggingface_hub's own
            for file in (*_CONFIGS, *WEIGHTS):
                found = try_to_load_from_cache(name, file, cache_dir=cache)
                if isinstance(found, str):
                    return Path(found).parent
    return None


def download(name: str, *, weights: bool = False) -> Path:
    """Download the model's or adapter's configuration, and its weights if wanted, into the cache; return the folder.

    Raises SourceError with the reason of a failure, MissingExtraError without huggingface_hub.
    """
    if not is_hub_name(name):
        raise SourceError(f"{name[:100]!r} is no name on the hub; those look like google-bert/bert-base-cased")
    if not is_installed():
        raise MissingExtraError("--download", "hub")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_CONFIGS)))
        if weights:
            snapshot_download(name, allow_patterns=_weights_of(name))
    except Exception as error:  # errors of the hub, the network and the disk have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{name} cannot be downloaded: {type(error).__name__}: {reason[:300]}") from None
    return folder


def _weights_of(name: str) -> list[str]:
    """Return the patterns for one set of weights: safetensors if the model has them, then an adapter, else torch's."""
    from huggingface_hub import model_info

    files = {item.rfilename for item in model_info(name).siblings or ()}
    if files & {"model.safetensors", "model.safetensors.index.json"}:
        return ["model*.safetensors", "model.safetensors.index.json"]
    if "adapter_model.safetensors" in files:
        return ["adapter_model.safetensors"]
    return ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
