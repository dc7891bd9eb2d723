"""The oracle: transformers 4.43.4, the version that the documents cite."""

from __future__ import annotations

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.set_verbosity_error()

from bertscope import BertConfig  # noqa: E402
from bertscope.model import CLASSES, build  # noqa: E402


class Pair:
    """The reference's model and ours, of the same configuration."""

    def __init__(self, name: str, device: str, attention: str = "eager", **fields) -> None:
        reference_config = transformers.BertConfig(**fields, attn_implementation=attention)
        own_config = BertConfig.from_dict({**reference_config.to_dict(), "attn_implementation": attention})
        with torch.device(device):
            self.reference = getattr(transformers, name)(reference_config)
        self.own = build(own_config, name, device=device)


@pytest.fixture(scope="session")
def pair():
    return Pair


@pytest.fixture(params=list(CLASSES))
def name(request) -> str:
    return request.param
