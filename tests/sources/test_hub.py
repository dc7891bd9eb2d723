"""The local Hugging Face cache by hub names, and `--download` from a hub of our own on this machine."""

import hashlib
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import bertscope
from bertscope.sources.find import find, is_hub_name
from tests.child_server import loaded
from tests.conftest import ROOT, run_python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 12, "num_attention_heads": 3,
          "num_hidden_layers": 1, "vocab_size": 50, "intermediate_size": 8, "max_position_embeddings": 16}  # fmt: skip
CLEAN = {key: value for key, value in os.environ.items()
         if not key.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_CACHE"))}  # fmt: skip


def ask(*arguments: object, **variables: object) -> subprocess.CompletedProcess:
    words = [*loaded("bertscope", without="huggingface_hub transformers"), *arguments]
    env = CLEAN | {"PYTHONPATH": str(ROOT)} | {key: str(value) for key, value in variables.items()}
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env, check=False)


def cache(folder: Path, name: str, **config: object) -> Path:
    """A model in a cache as huggingface_hub lays it out, links included; its snapshot."""
    home = folder / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for made in (home / "refs", home / "blobs", snapshot):
        made.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    (home / "blobs" / "abc").write_text(json.dumps(CONFIG | config))
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    return snapshot


def places(tmp_path: Path) -> dict[str, tuple[Path, dict[str, Path]]]:
    return {
        "HF_HUB_CACHE": (tmp_path / "a", {"HF_HUB_CACHE": tmp_path / "a"}),
        "HUGGINGFACE_HUB_CACHE": (tmp_path / "b", {"HUGGINGFACE_HUB_CACHE": tmp_path / "b"}),
        "HF_HOME": (tmp_path / "c" / "hub", {"HF_HOME": tmp_path / "c"}),
        "XDG_CACHE_HOME": (tmp_path / "d" / "huggingface" / "hub", {"XDG_CACHE_HOME": tmp_path / "d"}),
        "HOME": (tmp_path / "e" / ".cache" / "huggingface" / "hub", {"HOME": tmp_path / "e"}),
        "TRANSFORMERS_CACHE": (tmp_path / "f", {"TRANSFORMERS_CACHE": tmp_path / "f", "HF_HOME": tmp_path / "none"}),
    }


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME",
                                      "TRANSFORMERS_CACHE"])  # fmt: skip
def test_a_cached_model_is_found_where_the_variables_say(tmp_path, monkeypatch, variable):
    folder, variables = places(tmp_path)[variable]
    cache(folder, "someone/some-bert")
    for key in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(key)
    for key, value in variables.items():
        monkeypatch.setenv(key, str(value))
    found = find("someone/some-bert")
    assert (found.name, found.bert_config.hidden_size) == ("someone/some-bert", 12)


def test_a_cached_model_without_an_owner_and_its_weights_are_found(tmp_path):
    import torch

    snapshot = cache(tmp_path, "old-bert")
    config = bertscope.BertConfig.from_dict(CONFIG)
    torch.save(bertscope.BertModel(config).state_dict(), snapshot / "pytorch_model.bin")
    done = ask("diff", "old-bert", HF_HUB_CACHE=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"yes: {COMMIT} holds old-bert (BertModel)")
    assert ask("count", "old-bert", "--stored", HF_HUB_CACHE=tmp_path).returncode == 0


def test_a_cached_adapter_is_found_with_its_cached_base_model(tmp_path):
    cache(tmp_path, "someone/some-bert")
    snapshot = cache(tmp_path, "someone/some-lora")
    (snapshot / "config.json").unlink()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "someone/some-bert", "r": 2}
    (snapshot / "adapter_config.json").write_text(json.dumps(adapter))
    done = ask("count", "someone/some-lora", "--format", "json", HF_HUB_CACHE=tmp_path)
    found = json.loads(done.stdout)
    assert (found["subject"]["name"], found["subject"]["lora"]) == (
        "someone/some-bert", "r=2,alpha=8,target=query+value",
    )  # fmt: skip
    assert found["totals"]["trainable_params"] == 1 * 2 * 2 * (12 + 12)  # layers x targets x r x (in + out)


def test_a_model_that_is_not_cached_is_one_line_and_no_request(tmp_path):
    nowhere = {"HF_HOME": tmp_path, "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = ask("count", "someone/else", **nowhere)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--download fetches it from the Hugging Face hub" in done.stderr
    refused = ask("count", "someone/else", "--download", **nowhere)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "someone/else cannot be downloaded" in refused.stderr


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as a snapshot asks for."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self):
        self.do_GET(head=True)

    def do_GET(self, head: bool = False):
        type(self).asked.append(self.path)
        name = self.path.rpartition("/")[2].partition("?")[0]
        if "/resolve/" in self.path and name in self.files:
            body = self.files[name]
        elif self.path.startswith("/api/models/someone/fresh/tree"):  # of huggingface_hub 2
            body = json.dumps([
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in self.files.items()
            ]).encode()  # fmt: skip
        elif self.path.startswith("/api/models/someone/fresh"):
            siblings = [{"rfilename": file} for file in self.files]
            body = json.dumps({"id": "someone/fresh", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Nothing: the tests say what they need."""


@pytest.fixture
def hub(tmp_path):
    import io

    import torch

    out = io.BytesIO()
    torch.save(bertscope.BertModel(bertscope.BertConfig.from_dict(CONFIG)).state_dict(), out)
    _Hub.files = {"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": out.getvalue(), "README.md": b"x"}
    _Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": tmp_path / "home",
        "NO_PROXY": "127.0.0.1",
    }
    server.shutdown()


def test_download_fetches_the_configuration_alone_and_then_it_is_cached(hub):
    assert ask("count", "someone/fresh", **hub).returncode == 2
    assert _Hub.asked == []
    done = ask("count", "someone/fresh", "--download", "--format", "json", **hub)
    assert done.returncode == 0, done.stderr
    assert not any("pytorch_model" in path or "README" in path for path in _Hub.asked)
    asked = len(_Hub.asked)
    again = ask("count", "someone/fresh", "--format", "json", **hub)
    assert json.loads(again.stdout)["totals"] == json.loads(done.stdout)["totals"]
    assert len(_Hub.asked) == asked > 0


def test_verify_downloads_the_weights_and_nothing_else(hub):
    done = ask("diff", "someone/fresh", "--download", **hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("yes: ")
    assert not any("README" in path for path in _Hub.asked)


@pytest.mark.parametrize(
    "name", ["../../etc", "a/b/c", "a--b", "/etc", "a/../b", "", "-x", "a b", "a/", "/a", ".a", "x" * 200]
)
def test_what_can_be_no_hub_name_is_never_looked_up(name):
    assert not is_hub_name(name)


def test_a_preset_needs_neither_the_cache_nor_its_library():
    code = (
        "import sys; from bertscope import cli; sys.argv = ['bertscope', 'count', 'google-bert/bert-base-cased'];"
        "cli._run(); unwanted = {'huggingface_hub', 'transformers', 'bertscope.checkpoints.reading'};"
        "sys.exit(' '.join(unwanted & set(sys.modules)) or 0)"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
