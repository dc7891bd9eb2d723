"""`check`: expectations against models, for people and for CI."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from bertscope.sources.presets import config_paths, preset_dir, preset_paths, read_preset


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
    expected = sum(len(read_preset(path).expected) for path in preset_paths().values())
    expected += 2 * (len(config_paths()) - unbuilt)  # the counts of presets that transformers builds
    files = len(preset_paths()) + len(config_paths())
    assert result.out == f"{files} files: {expected} expectations passed, 0 failed\n"


@pytest.mark.parametrize("words", [("mine.yaml",), ("--update",), ("--write", "mine.yaml")])
def test_the_presets_are_checked_by_themselves(cli, preset, words):
    before = preset.read_text()
    result = cli("check", "--presets", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(("error: --presets checks the packaged presets only", "error: --write takes one FILE"))
    assert preset.read_text() == before


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


def test_a_change_of_the_configuration_fails_every_count_that_it_moves(cli, preset):
    change(preset, "hidden_size: 128", "hidden_size: 256")
    result = cli("check", "mine.yaml", "--format", "json")
    failed = {finding["key"] for finding in result.json["findings"] if finding["status"] == "failed"}
    assert "distinct_params" in failed
    assert "layers.token" in failed
    assert len(failed) == 15
    assert result.code == 1


def test_a_missing_file_is_one_line(cli):
    result = cli("check", "nowhere.yaml")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "check the path" in result.err


def test_a_file_that_expects_nothing_is_no_pass(cli, preset):
    preset.write_text(preset.read_text().partition("expected:")[0])
    result = cli("check", "mine.yaml", "bert-tiny")
    assert result.code == 2
    assert "'bertscope check --write" in result.err
    assert "15 expectations passed" in result.out


def test_write_records_counts_that_hold_and_keeps_the_rest_of_the_file(cli, preset):
    whole = preset.read_text()
    preset.write_text(whole.partition("expected:")[0].rstrip())
    assert cli("check", "--write", "mine.yaml").err == "note: added the current counts to mine.yaml\n"
    assert preset.read_text() == whole
    assert cli("check", "mine.yaml").code == 0


def test_write_refuses_a_file_that_expects_something_and_leaves_it_alone(cli, preset):
    before = preset.read_text()
    result = cli("check", "--write", "mine.yaml")
    assert result.code == 2
    assert "expects 15 things already" in result.err
    assert preset.read_text() == before
    preset.write_text("expected:\n" + before.partition("expected:")[0])
    assert "plain 'key: value' lines" in cli("check", "--write", "mine.yaml").err


def test_github_annotations_stand_at_file_and_line(cli, preset):
    line = change(preset, "pooler: 16512", "pooler: 1")
    out = cli("check", "mine.yaml", "--format", "github").out
    assert f"::error title=bertscope check,file=mine.yaml,line={line}::mine: " in out
    assert "::error" not in cli("check", "bert-tiny", "--format", "github").out


def test_junit_has_a_case_for_every_expectation(cli, preset):
    change(preset, "token_type: 256", "token_type: 255")
    suite = ElementTree.fromstring(cli("check", "mine.yaml", "--format", "junit").out)[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("15", "1", "0")
    (failed,) = [case for case in suite if len(case)]
    assert failed.get("name") == "layers.token_type"
    assert failed[0].get("message") == "layers.token_type: expected 255, got 256, difference +1"


def test_junit_escapes_what_xml_cannot_hold(cli, tmp_path):
    path = tmp_path / "a<&\"'>.yaml"
    path.write_text("config: \x01\n")
    suite = ElementTree.fromstring(cli("check", path, "--format", "junit").out)[0]
    assert suite.get("errors") == "1"


@pytest.mark.parametrize(
    "text",
    [
        "{architecture: BertModel, config: {num_hidden_layers: 1}}",
        "  architecture: BertModel\n  config:\n    num_hidden_layers: 1\n",
        "architecture: BertModel\nconfig: {num_hidden_layers: 1}\n...\n",
    ],
)
def test_write_refuses_a_form_that_it_cannot_append_to(cli, tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    result = cli("check", "--write", path)
    assert result.code == 2
    assert "plain 'key: value' lines" in result.err
    assert path.read_text() == text


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
    path.write_text("{}")
    assert "expected counts belong in a preset" in cli("check", path).err
    assert "directly after it" in cli("check", "--write", path, "--format", "json").err


def test_a_finding_is_one_line_whatever_the_file_is_called(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text('architecture: BertModel\nconfig: {}\nexpected: {groups: {"a\\nb": 5, "\\uFFFF": 1}}\n')
    assert len(cli("check", path).out.splitlines()) == 3
    suite = ElementTree.fromstring(cli("check", path, "--format", "junit").out)[0]
    assert suite.get("failures") == "2"


def test_another_class_can_be_checked_against_the_expectations(cli, preset):
    result = cli("check", "mine.yaml", "--architecture", "BertForSequenceClassification")
    assert result.code == 1
    assert "distinct_params: expected 4,385,920, got 4,386,178, difference +258" in result.out
    assert cli("check", "mine.yaml", "--architecture", "BertModel").code == 0
    assert cli("check", "mine.yaml", "--architecture", "BertForChess").code == 2
