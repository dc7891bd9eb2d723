"""`diff --base`: a model at a git revision and in the working directory."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_ci_kit import git

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
CONFIG = '{"model_type": "bert", "num_hidden_layers": %d, "hidden_size": 16, "num_attention_heads": 2}'
NET = "import torch\nfrom widths import width\n\n\ndef build():\n    return torch.nn.Linear(2, width)\n"


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A repository whose branch `base` has smaller models than its working directory."""
    folder = tmp_path / "repository"
    (folder / "nets").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "config.json").write_text(CONFIG % 1)
    (folder / "nets" / "net.py").write_text(NET)
    (folder / "nets" / "widths.py").write_text("width = 3\n")
    (folder / "link.json").symlink_to("/etc/hostname")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "base")
    git(folder, "branch", "base")
    (folder / "config.json").write_text(CONFIG % 2)
    (folder / "nets" / "widths.py").write_text("width = 5\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_configuration_differs_by_its_new_layer_and_the_repository_stays(cli, repository, tmp_path):
    before = contents(repository)
    done = cli("diff", "--base", "base", "config.json", "--exit-code", "--format", "json")
    assert done.code == 1
    assert [(row["field"], row["a"], row["b"]) for row in done.json["fields"]] == [("num_hidden_layers", 1, 2)]
    assert (done.json["a"]["name"], done.json["b"]["name"]) == ("config.json at base", "config.json")
    assert contents(repository) == before
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_code_of_the_revision_imports_its_own_neighbours(cli, repository, monkeypatch):
    """By hand: 2 x 3 + 3 = 9 parameters before, 2 x 5 + 5 = 15 now."""
    for folder, name in ((".", "nets/net.py:build"), ("nets", "net:build")):
        monkeypatch.chdir(repository / folder)
        done = cli("diff", "--base", "HEAD", name, "--format", "json")
        assert (done.json["totals_a"]["distinct_params"], done.json["totals_b"]["distinct_params"]) == (9, 15), done.err
        assert "note: runs your code at HEAD too" in done.err


REFUSED = {
    ("nope", "config.json"): "git has no revision 'nope' here",
    ("", "config.json"): "git has no revision '' here",
    ("a\0b", "config.json"): "embedded null byte",
    ("--output=x", "config.json"): "git has no revision '--output=x' here",
    ("base", "bert-tiny"): "base has no bert-tiny",
    ("base", "../other.json"): "is not a file in the repository",
    ("base", "link.json"): "is not a file in the repository",
    ("base", "nets"): "base:nets has no config.json",
}


@pytest.mark.parametrize(("base", "model"), REFUSED)
def test_another_file_or_revision_is_one_line(cli, repository, base, model):
    done = cli("diff", f"--base={base}", model)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert REFUSED[base, model] in done.err


def test_nothing_that_git_can_run_runs(cli, repository, tmp_path):
    """Hooks, filters of attributes, the monitor of the file system and the pager."""
    touch = f"touch {tmp_path}/ran"
    (repository / ".gitattributes").write_text("*.json filter=evil\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "--quiet", "-m", "attributes")
    for key in ("core.fsmonitor", "core.pager", "filter.evil.smudge", "diff.external"):
        git(repository, "config", key, touch)
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{touch}\n")
    hook.chmod(0o755)
    assert cli("diff", "--base", "HEAD", "config.json").code == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("names", [("n" * 4000,), ("a", "a/b"), (".",), ("missing",)], ids=lambda names: names[0][:9])
def test_a_tree_that_no_folder_can_hold_is_one_line(cli, repository, names):
    """git checks no name and no file of a tree that somebody else made."""

    def written(kind: str, raw: bytes) -> str:
        command = ["git", "hash-object", "-t", kind, "-w", "--literally", "--stdin"]
        return subprocess.run(command, input=raw, capture_output=True, check=True).stdout.decode().strip()

    blob = "12" * 20 if names == ("missing",) else written("blob", b"{}")
    inner = written("tree", b"100644 b\0" + bytes.fromhex(blob))
    rows = [b"40000 a\0" + bytes.fromhex(inner) if "/" in name else f"100644 {name}\0".encode() + bytes.fromhex(blob)
            for name in names]  # fmt: skip
    about = f"tree {written('tree', b''.join(rows))}\nauthor a <a> 1 +0\ncommitter a <a> 1 +0\n\nx\n"
    done = cli("diff", f"--base={written('commit', about.encode())}", "config.json")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_a_large_file_is_left_out_and_too_many_are_refused(cli, repository, monkeypatch):
    (repository / "weights.bin").write_bytes(bytes(1000))
    git(repository, "add", "weights.bin")
    git(repository, "commit", "--quiet", "-m", "weights")
    monkeypatch.setattr("bertscope.commands.revision._LARGEST", 999)
    assert cli("diff", "--base", "HEAD", "config.json").code == 0
    monkeypatch.setattr("bertscope.commands.revision.MAX_BYTES", 100)
    assert "the most for --base" in cli("diff", "--base", "HEAD", "config.json").err


def test_outside_a_repository_git_says_so(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git failed: fatal: not a git repository" in cli("diff", "--base", "HEAD", "config.json").err
