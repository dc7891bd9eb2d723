"""A configuration is data: whatever it says, no code of its folder runs, nothing connects and nobody is asked.

These tests also pass with transformers 5, whose families differ.
"""

import builtins
import contextlib
import importlib
import json
import socket
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from bertscope.errors import ConfigError
from bertscope.sources.find import find
from tests.conftest import cases

pytest.importorskip("transformers", reason="it is in the extra 'test'")

from bertscope.sources import transformers_models
from bertscope.sources.transformers_models import confined

CODE = """
open({canary!r}, "a").write("x")
from transformers import PretrainedConfig, PreTrainedModel
class EvilConfig(PretrainedConfig):
    model_type = "evil"
class EvilModel(PreTrainedModel):
    config_class = EvilConfig
"""
CLASSES = dict.fromkeys(("AutoConfig", "AutoModel", "AutoBackbone"), "configuration_evil.EvilConfig")
ISSUE = {
    "model_type": "dpt", "architectures": ["DPTForDepthEstimation"], "is_hybrid": False,
    "backbone": "./m/evil", "backbone_kwargs": {"trust_remote_code": True},
}  # fmt: skip
TINY = {
    "model_type": "dinov2", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "out_features": ["stage1", "stage2"],
}  # fmt: skip


class Trap:
    """A folder with code that must not run, and a record of what was tried."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.evil, self.canary = home, home / "m" / "evil", home / "CANARY"
        self.tried: list[str] = []
        self.evil.mkdir(parents=True)
        (self.evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": CLASSES}))
        (self.evil / "configuration_evil.py").write_text(CODE.format(canary=str(self.canary)))
        monkeypatch.chdir(home)
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
            with contextlib.suppress(AttributeError):
                monkeypatch.setattr(f"{name}.HF_MODULES_CACHE", str(home / "modules"))
        for place, name in (
            (socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection"), (builtins, "input"),
        ):  # fmt: skip
            monkeypatch.setattr(place, name, self._recorder(name))

    def _recorder(self, name: str):
        def record(*args: object, **options: object) -> None:
            self.tried.append(f"{name}{args}")
            raise OSError("a test reaches nothing")

        return record

    def write(self, config: dict) -> Path:
        """Write a configuration into the folder `m`, one setting a line."""
        path = self.home / "m" / "config.json"
        path.write_text(json.dumps(config, indent=1))
        return path

    def poison(self) -> dict:
        """Return every setting that is known to lead to code or the network."""
        evil = str(self.evil)
        return {
            "_name_or_path": evil,
            "name_or_path": evil,
            "auto_map": {name: f"{evil}--{place}" for name, place in CLASSES.items()},
            "backbone": evil,
            "backbone_kwargs": {"trust_remote_code": True},
            "use_pretrained_backbone": True,
            "use_timm_backbone": False,
            "trust_remote_code": True,
            "attn_implementation": "evil/kernel",
            "_attn_implementation": {"": "evil/kernel"},
            "_attn_implementation_internal": "evil/kernel",
        }

    def check(self) -> None:
        """Fail where code ran, something connected or somebody was asked."""
        assert not self.canary.exists()
        assert self.tried == []


@pytest.fixture
def trap(tmp_path, monkeypatch):
    found = Trap(tmp_path, monkeypatch)
    yield found
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def families() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


@pytest.fixture(autouse=True)
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("setting", "words"),
    cases("leads_to_code.yaml", "settings"),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_leads_to_code_is_refused_at_every_depth(trap, setting, words):
    key = next(iter(setting))
    for line, config in (
        (3, {"model_type": "dpt", **setting}),
        (3, {"model_type": "dpt", "backbone_config": {"model_type": "bit", "a": {**setting}}}),
        (4, {"model_type": "dpt", "hidden_size": 8, "layers": [[{"text_config": {**setting}}]]}),
    ):
        with pytest.raises(ConfigError, match=f"config.json:{line}: {key} ") as error:
            find(trap.write(config))
        assert words in str(error.value)


def test_every_family_is_refused_with_poison(trap):
    """Ask `find`, which every command asks first and which takes a tenth of a command's time."""
    for model_type in families():
        if model_type != "bert":  # which is built here
            with pytest.raises(ConfigError, match=r"backbone|trust_remote_code|implementation"):
                find(trap.write({"model_type": model_type, **trap.poison()}))
    trap.check()


def test_the_guard_holds_without_the_refusals(cli, trap, monkeypatch):
    """Build families with a backbone, which transformers finds in several ways, from settings that are refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.setattr("bertscope.sources.transformers_models._refusal", lambda key, value: "")
    poison = trap.poison()
    implementations = {key: poison.pop(key) for key in [*poison] if "implementation" in key}
    for model_type in ("detr", "dpt", "maskformer", "upernet", "zoedepth"):
        config = CONFIG_MAPPING[model_type]().to_dict()
        small = {key: 1 for key, value in config.items() if key.endswith("layers") and isinstance(value, int)}
        for more in (
            poison,
            {"backbone": "evil/model", "use_timm_backbone": model_type < "m", "use_pretrained_backbone": True},
            {"backbone_config": {"model_type": "resnet", "hidden_sizes": [8], "depths": [1], **poison}},
            implementations,
        ):
            result = cli("count", trap.write({"model_type": model_type, "is_hybrid": False, **small, **more}))
            assert result.code in (0, 2), result.err
            assert result.err.count("error: ") <= 1, result.err
            trap.check()


def test_the_code_runs_where_nothing_guards(trap, cli, monkeypatch):
    """This shows that the trap works."""
    import transformers

    if int(transformers.__version__.split(".")[0]) >= 5:
        pytest.skip("transformers 5 does not take a folder for a backbone")
    monkeypatch.setattr("bertscope.sources.transformers_models._refusal", lambda key, value: "")
    monkeypatch.setattr("bertscope.sources.transformers_models.confined", contextlib.nullcontext)
    assert cli("count", trap.write(ISSUE)).code == 2
    assert trap.canary.exists()


def test_code_named_by_auto_map_is_left_out(cli, trap):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    poison = {key: value for key, value in trap.poison().items() if key in ("auto_map", "_name_or_path")}
    result = cli("count", trap.write({"model_type": "roberta", **sizes, **poison}), "--format", "json")
    assert result.code == 0, result.err
    assert "auto_map" not in result.json["subject"]["config"]
    parts = {name: {"model_type": "bert", **sizes, **poison} for name in ("encoder", "decoder")}
    path = trap.write({"model_type": "encoder-decoder", **parts, **poison})
    before = [*sys.path]
    assert cli("count", path).code == 0
    assert sys.path == before
    trap.check()


def test_a_backbone_described_in_the_configuration_is_built(cli, trap):
    own = {"is_hybrid": False, "neck_hidden_sizes": [8, 8], "fusion_hidden_size": 8, "reassemble_factors": [1, 1]}
    empty = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_kwargs": None}
    config = {"model_type": "dpt", "architectures": ["DPTForDepthEstimation"], "backbone_config": TINY, **own, **empty}
    result = cli("count", trap.write(config | {"_attn_implementation": "eager"}), "--format", "json")
    assert result.code == 0, result.err
    assert any(row["path"].startswith("backbone.") for row in result.json["rows"])
    trap.check()


def test_a_download_does_not_open_the_build_to_the_network(cli, trap, monkeypatch):
    import huggingface_hub.constants as settings

    seen = []

    def look(*args):
        seen.append(settings.HF_HUB_OFFLINE)
        return original(*args)

    original = transformers_models._model_class
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("bertscope.sources.find.fetched_folder", lambda name, weights=False: trap.home / "m")
    monkeypatch.setattr(transformers_models, "_model_class", look)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    trap.write({"model_type": "roberta", **sizes})
    assert cli("count", "someone/some-model", "--download").code == 0
    assert (seen, settings.HF_HUB_OFFLINE) == ([True], False)
    trap.check()


def test_the_guard_ends_with_the_build_and_binds_one_thread(trap, monkeypatch):
    import transformers.dynamic_module_utils as dynamic

    def state():
        return torch.load, dynamic.get_class_in_module, dynamic.TIME_OUT_REMOTE_CODE, {**vars(socket.socket)}

    before = state()
    other = threading.Thread(target=_look_up)
    with contextlib.suppress(ZeroDivisionError), confined():
        with confined():
            pass
        refusing = [socket.create_connection, socket.getaddrinfo, torch.load, dynamic.get_class_in_module]
        with contextlib.suppress(ImportError):  # transformers 5
            refusing.append(importlib.import_module("transformers.integrations.hub_kernels").get_kernel)
        for refused in refusing:
            with pytest.raises(PermissionError):
                refused("localhost", 1)
        with pytest.raises(PermissionError), socket.socket() as opened:
            opened.connect(("localhost", 1))
        assert dynamic.TIME_OUT_REMOTE_CODE == 0
        other.start()
        other.join()
        raise ZeroDivisionError
    assert state() == before
    assert len(trap.tried) == 1  # by the other thread


def _look_up() -> None:
    with contextlib.suppress(OSError):
        socket.getaddrinfo("localhost", 1)


def test_hub_requests_fail_in_a_session_that_was_opened_before(trap, monkeypatch):
    import huggingface_hub
    import huggingface_hub.constants as settings

    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    with pytest.raises(Exception, match=r".*"):
        huggingface_hub.model_info("someone/some-model")
    assert trap.tried
    trap.tried.clear()
    with confined(), pytest.raises(Exception, match=r"(?i)offline"):
        huggingface_hub.model_info("someone/some-model")
    trap.check()
    with pytest.raises(Exception, match=r".*"):
        huggingface_hub.model_info("someone/some-model")
    assert trap.tried  # online again
