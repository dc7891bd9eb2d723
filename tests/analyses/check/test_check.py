"""`check`: expectations against models, for people and for CI, of the user's own code too; and `check --update`."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bertscope.sources.bert import preset_dir, preset_paths, read_preset


@pytest.fixture
def preset(tmp_path, monkeypatch):
    """A copy of bert-tiny.yaml in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text((preset_dir() / "bert-tiny.yaml").read_text())
    return path


def change(path, old, new) -> int:
    """Replace `old` by `new`; the line that it stands on."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if new in line)


def test_all_presets_hold(cli):
    result = cli("check", "--presets")
    unbuilt = len(re.findall("^note: .*json is not checked: .*transformers .* does not know", result.err, re.MULTILINE))
    assert (result.code, unbuilt) == (0, len(result.err.splitlines()))
    expected = sum(len(read_preset(path).expected) for path in preset_paths(".yaml").values())
    expected += 2 * (len(preset_paths(".json")) - unbuilt)  # the counts of presets that transformers builds
    assert result.out == f"{len(preset_paths())} files: {expected} expectations passed, 0 failed\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("layer.feed_forward: 131712", "layer.feed_forward: 131711", "expected 131,711, got 131,712, difference +1"),
        ("distinct_params: 4385920", "distinct_params: 5", "distinct_params: expected 5, got 4,385,920"),
        ("layer_params: 4385920", "layer_params: 1", "layer_params: expected 1, got 4,385,920, difference +4,385,919"),
        ("encoder: 396544", "encoder: 0", "groups.encoder: expected 0, got 396,544, difference +396,544"),
        ("poole", "poolee", "expected 16,512, got nothing"),
    ],
)  # fmt: skip
def test_a_wrong_count_shows_expected_got_difference_file_and_line(cli, preset, old, new, words):
    line = change(preset, old, new)
    result = cli("check", "mine.yaml")
    assert result.code == 1
    assert words in result.out
    assert f"mine.yaml:{line}: mine: " in result.out


def test_a_file_that_expects_nothing_is_no_pass(cli, preset):
    preset.write_text(preset.read_text().partition("expected:")[0])
    result = cli("check", "mine.yaml", "bert-tiny")
    assert result.code == 2
    assert "'bertscope check --write" in result.err
    assert "15 expectations passed" in result.out


def test_write_records_counts_that_hold_and_keeps_the_rest_of_the_file(cli, preset):
    whole = preset.read_text()
    preset.write_text(whole.partition("expected:")[0].rstrip())
    assert cli("check", "--write", "mine.yaml").err == "note: wrote the current counts to mine.yaml\n"
    assert preset.read_text() == whole
    assert cli("check", "mine.yaml").code == 0


def test_write_makes_a_new_file_that_names_its_model(cli, tmp_path, monkeypatch):
    (tmp_path / "bert.json").write_text('{"model_type": "bert", "num_hidden_layers": 1}')
    (tmp_path / "ci").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli("check", "bert.json", "-a", "BertModel", "--write", "ci/a.bertscope.yaml").code == 0
    assert (
        Path("ci/a.bertscope.yaml").read_text().startswith('model: "../bert.json"\narchitecture: BertModel\nexpected:')
    )
    assert cli("check", "bert-tiny", "--write", "b.bertscope.yaml").code == 0
    assert cli("check").code == 0
    assert "b.bertscope.yaml exists; name a new file" in cli("check", "bert-tiny", "--write", "b.bertscope.yaml").err


def test_write_refuses_a_file_that_expects_something_and_leaves_it_alone(cli, preset):
    before = preset.read_text()
    result = cli("check", "--write", "mine.yaml")
    assert result.code == 2
    assert "already has 15 expectations" in result.err
    assert preset.read_text() == before
    preset.write_text("expected:\n" + before.partition("expected:")[0])
    assert "plain 'key: value' lines" in cli("check", "--write", "mine.yaml").err


def test_write_keeps_a_mark_and_the_ends_of_lines(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes("\ufeffarchitecture: BertModel\r\nconfig: {num_hidden_layers: 1}\r\n".encode())
    assert cli("check", "--write", path).code == 0
    raw = path.read_bytes()
    assert raw.startswith(b"\xef\xbb\xbfarchitecture")
    assert raw.count(b"\n") == raw.count(b"\r\n") > 10
    assert cli("check", path).code == 0


def test_a_config_json_is_not_told_to_be_written_into(cli, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bert"}')
    for how in ((), ("--write",)):
        assert f"'bertscope check --write models.bertscope.yaml {path}'" in cli("check", *how, path).err
    assert "directly after it" in cli("check", "--write", path, "--format", "json").err


def test_a_finding_is_one_line_whatever_the_file_is_called(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text('architecture: BertModel\nconfig: {}\nexpected: {groups: {"a\\nb": 5, "\\uFFFF": 1}}\n')
    assert len(cli("check", path).out.splitlines()) == 3
    suite = ElementTree.fromstring(cli("check", path, "--format", "junit").out)[0]
    assert suite.get("failures") == "2"


CODE = """\
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = torch.nn.Embedding(10, 4), torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(4, 10)
        self.head.weight = self.words.weight

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    return Tagger()
"""
# By hand: words 10 * 4; a block 4 * 8 + 8 and 8 * 4 + 4; the head's bias 10, its weight is that of words.
# FLOPs of one token: two blocks of 2 * (4 * 8 + 8 * 4), the head 2 * 4 * 10.
FILE = """\
# gated in CI
model: MODULE:build   # the code of this project
expected:
  distinct_params: 202   # by hand
  layer_params: 242
  groups: {words: 40, blocks: 152, head: 50}
  layers:
    # from the paper
    words: 40
    blocks.0-1: 76
    blocks.0-1.up: 40
    blocks.0-1.down: 36   # narrow
    head: 50
  ties:
    head.weight: words.weight
  flops:
    token: {batch: 1, seq: 1, mode: inference, matmul_flops: 336}
"""

NARROW = CODE.replace("Linear(8, 4)", "Linear(8, 4, bias=False)")


@pytest.fixture
def project(tmp_path, monkeypatch, request):
    """A folder with a module of a unique name and its expectation file `own.bertscope.yaml`, as working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Without digits: a test replaces numbers in the file, and hash() differs from run to run.
    module = "own_models_" + "".join(chr(ord("a") + ord(letter) % 26) for letter in request.node.name)
    path = tmp_path / "own.bertscope.yaml"
    path.write_text(FILE.replace("MODULE", module))

    def write(code: str = CODE):
        sys.modules.pop(module, None)
        (tmp_path / f"{module}.py").write_text(code)
        return path

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    sys.modules.pop(module, None)


def test_an_own_model_has_counts_ties_and_flops_that_a_hand_computes(cli, project):
    project()
    result = cli("check", "--allow-code", "own.bertscope.yaml")
    assert (result.code, result.err) == (0, "")
    assert result.out == "1 file: 13 expectations passed, 0 failed\n"


def peak_bytes(report: dict) -> int:
    """The highest phase of the first variant of `estimate --format json`."""
    return max(phase["peak_bytes"] for phase in report["variants"][0]["estimated"]["phases"])


def test_code_is_not_imported_because_a_file_names_it(cli, project):
    project("open('canary', 'w')\n")
    for how in ((), ("--update",)):
        result = cli("check", *how, "own.bertscope.yaml", "--format", "github")
        assert result.code == 2
        assert result.err.startswith("error: own.bertscope.yaml:2: model 'own_models_")
        assert "add --allow-code to check" in result.err
        assert result.err.count("\n") == 1
        assert "file=own.bertscope.yaml,line=2::" in result.out
    assert "--allow-code" in cli("check", "--write", "own.bertscope.yaml").err
    assert not Path("canary").exists()


def test_an_error_of_the_code_is_one_line_at_the_line_of_the_model(cli, project):
    project("raise RuntimeError('no weights\\nhere')\n")
    result = cli("check", "--allow-code", "own.bertscope.yaml")
    assert result.code == 2
    assert result.err.startswith("error: own.bertscope.yaml:2: own_models_")
    assert "RuntimeError" in result.err
    assert result.err.count("\n") == 1


def test_a_changed_layer_of_an_own_model_has_its_file_and_line(cli, project):
    project(NARROW)
    result = cli("check", "--allow-code", "own.bertscope.yaml", "--format", "github")
    assert result.code == 1
    line = "line=12::own: layers.blocks.0-1.down: expected 36, got 32, difference -4\n"
    assert f"::error title=bertscope check,file=own.bertscope.yaml,{line}" in result.out
    suite = ElementTree.fromstring(cli("check", "--allow-code", "own.bertscope.yaml", "--format", "junit").out)[0]
    cases = {case.get("name"): case for case in suite if len(case)}
    assert list(cases) == ["distinct_params", "layer_params", "groups.blocks", "layers.blocks.0-1",
                           "layers.blocks.0-1.down"]  # fmt: skip
    assert cases["layers.blocks.0-1.down"].get("line") == "12"
    assert cases["layers.blocks.0-1.down"][0].get("message") == line.partition("own: ")[2].strip()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("13", "5", "0")


def test_the_peak_of_an_own_model_is_that_of_its_stored_dtypes(cli, project):
    path = project(CODE.replace("return Tagger()", "return Tagger().bfloat16()"))
    run = "batch: 2, seq: 8, mode: inference, loop: freed, peak_bytes: 1, tolerance: 1 %"
    path.write_text(path.read_text().partition("expected:")[0] + f"expected: {{memory: {{x: {{{run}}}}}}}\n")
    (found,) = cli("check", "--allow-code", path, "--format", "json").json["findings"]
    model = path.read_text().split()[5]
    run = ("--batch", "2", "--seq", "8", "--mode", "inference", "--loop", "freed", "--format", "json")
    assert found["got"] == peak_bytes(cli("estimate", model, *run).json)
    # In bf16: 202 parameters; at the relu of a block its input (2, 8, 4), and input and output of the relu (2, 8, 8).
    # In int64: the input ids (2, 8).
    assert found["got"] == 2 * (202 + 2 * 8 * (4 + 8 + 8)) + 8 * 2 * 8


# ---- update -------------------------------------------------------------------------------------


def test_update_shows_what_differs_and_writes_only_the_values_that_differ(cli, project):
    path = project(NARROW)
    before = path.read_text()
    result = cli("check", "--update", "--allow-code", "own.bertscope.yaml")
    assert result.code == 0
    assert "own.bertscope.yaml:12: layers.blocks.0-1.down: 36 -> 32\n" in result.out
    assert "failed" not in result.out
    assert result.out.endswith("5 of 13 values updated in 1 file\n")
    changed = ("distinct_params", "layer_params", "groups.blocks", "layers.blocks.0-1", "layers.blocks.0-1.down")
    assert result.err == f"note: updated own.bertscope.yaml: {', '.join(changed)}\n"
    # two blocks lose a bias of 4 each
    for old, new in (("202 ", "194 "), ("242", "234"), ("152", "144"), ("0-1: 76", "0-1: 72"), ("36 ", "32 ")):
        before = before.replace(old, new)
    assert path.read_text() == before
    assert cli("check", "--allow-code", "own.bertscope.yaml").code == 0


def test_update_without_a_difference_writes_nothing(cli, project):
    path = project()
    path.chmod(0o444)
    stat = path.stat()
    result = cli("check", "--update", "--allow-code", path)
    assert (result.code, result.err, result.out) == (0, "", "Nothing to update: all 13 expectations pass.\n")
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (stat.st_mtime_ns, stat.st_ino)


def test_update_replaces_rows_and_ties_that_are_gone(cli, project):
    path = project(CODE.replace("range(2)", "range(3)").replace("self.head.weight = ", "self.words.extra = "))
    result = cli("check", "--update", "--allow-code", path)
    assert result.code == 0
    assert "layers.blocks.0-1: 76 -> removed" in result.out
    assert cli("check", "--allow-code", path).code == 0
    text = path.read_text()
    assert "    blocks.0-2: 76\n    blocks.0-2.up: 40\n    blocks.0-2.down: 36   # narrow\n    head: 50\n" in text
    assert "0-1" not in text
    assert "    # from the paper\n    words: 40\n" in text


def test_update_leaves_a_file_with_an_error_alone(cli, project):
    path = project(NARROW)
    path.write_text(path.read_text() + "    long: {batch: 1, seq: 1, mode: training, freeze: [x], matmul_flops: 1}\n")
    before = path.read_text()
    assert cli("check", "--update", "--allow-code", path).code == 2
    assert path.read_text() == before
