"""The oracle: transformers 4.43.4, the version that the documents cite; with another version its tests are skipped."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.set_verbosity_error()

from bertscope import BertConfig  # noqa: E402
from bertscope.model import CLASSES, build  # noqa: E402


class _Skipped(pytest.Module):
    """A file of tests for the oracle where another version is installed."""

    def collect(self):
        """Skip the file, which is not imported."""
        found = f"transformers {transformers.__version__}"
        pytest.skip(f"the oracle is transformers 4.43.4, here is {found}; .ci/run has both", allow_module_level=True)


if transformers.__version__ != "4.43.4":

    def pytest_pycollect_makemodule(module_path, parent):
        return _Skipped.from_parent(parent, path=module_path)


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
