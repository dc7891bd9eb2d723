"""Expectation files: what they may say, what becomes of it, and a line for everything that is wrong in one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertscope import load
from bertscope.errors import BertscopeError
from bertscope.files import read_yaml
from bertscope.sources.bert import Expectation
from bertscope.sources.expectation_files import read_expectation_file, with_expected
from tests.conftest import cases, data

TINY_MLM = "model: bert-tiny\narchitecture: BertForMaskedLM\nexpected:\n"
TIES = """\
  ties:
    cls.predictions.decoder.weight: bert.embeddings.word_embeddings.weight
    cls.predictions.bias: cls.predictions.decoder.bias
"""


@pytest.fixture
def checked(cli, tmp_path, monkeypatch):
    """`check --format json` of an expectation file with that text, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, name: str = "mine.bertscope.yaml"):
        (tmp_path / name).write_text(text)
        result = cli("check", name, "--format", "json")
        return result, {finding["key"]: finding for finding in result.json["findings"]}

    return run


def test_ties_are_all_of_them(checked):
    result, found = checked(TINY_MLM + TIES)
    assert (result.code, found["ties"]["got"]) == (0, 2)
    result, found = checked(TINY_MLM + TIES.rpartition("    cls")[0])
    assert result.code == 1
    assert found["ties"]["message"].endswith("not listed: cls.predictions.bias is cls.predictions.decoder.bias")


def test_no_ties_is_an_expectation(checked):
    assert checked("model: bert-tiny\nexpected: {ties: {}}\n")[0].code == 0
    assert checked(TINY_MLM + "  ties: {}\n")[0].code == 1
    untied = "architecture: BertForMaskedLM\nconfig: {num_hidden_layers: 1, tie_word_embeddings: false}\n"
    result, found = checked(untied + "expected:\n" + TIES)
    assert result.code == 1
    key = "ties.cls.predictions.decoder.weight"
    assert found[key]["line"] == 5
    assert found[key]["message"].endswith("got nothing: no tensor is tied under that address")


def test_flops_are_those_of_the_command(cli, checked):
    run = ("--batch", "4", "--seq", "64", "--mode", "training", "--checkpointing", "full", "--freeze", "embeddings")
    model = ("bert-tiny", "-a", "BertForMaskedLM")
    rows = cli("flops", *model, *run, "--format", "json").json["rows"]
    number = rows[0]["total"]["matmul_flops"]
    entry = "batch: 4, seq: 64, mode: training, checkpointing: full, freeze: [embeddings]"
    text = TINY_MLM + f"  flops:\n    step: {{{entry}, matmul_flops: {number}}}\n"
    assert checked(text)[0].code == 0
    result, found = checked(text.replace(str(number), str(number + 1)))
    assert result.code == 1
    assert (found["flops.step"]["got"], found["flops.step"]["line"]) == (number, 5)


@pytest.mark.parametrize("settings", data("expectations.yaml")["runs"])
def test_memory_is_the_estimate_of_that_run(checked, settings):
    from bertscope.memory.simulator import Simulator
    from bertscope.settings.run_config import RunConfig

    source = load("bert-tiny", architecture="BertForMaskedLM")
    run_config = RunConfig(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    )
    peak = Simulator(source).memory(run_config).peak.peak_bytes
    lines = "".join(f"      {key}: {str(value).lower()}\n" for key, value in settings.items()).replace("'", "")
    result, found = checked(TINY_MLM + f"  memory:\n    run:\n{lines}      peak_bytes: {peak}\n")
    assert (result.code, found["memory.run"]["got"]) == (0, peak)
    result, found = checked(TINY_MLM + f"  memory:\n    run:\n{lines}      peak_bytes: {peak - 1}\n")
    assert (result.code, found["memory.run"]["line"]) == (1, 6 + len(settings))


def test_a_peak_within_the_tolerance_holds_and_beside_it_does_not(checked):
    text = TINY_MLM + ("  memory:\n    run: {batch: 2, seq: 16, mode: training, peak_bytes: NUMBER, tolerance: 5 %}\n")
    peak = checked(text.replace("NUMBER", "1"))[1]["memory.run"]["got"]
    assert checked(text.replace("NUMBER", f"{peak / 2**20 / 1.04:.3f} MiB"))[0].code == 0
    result, found = checked(text.replace("NUMBER", str(round(peak / 1.06))))
    assert result.code == 1
    assert found["memory.run"]["tolerance"] == 0.05
    assert found["memory.run"]["message"].endswith("(+6.00 %)")
    assert "within 5 %, got" in found["memory.run"]["message"]
    assert f"got {peak:,} with the plain loop, difference" in found["memory.run"]["message"]


@settings(max_examples=50, deadline=None)
@given(value=st.integers(1, 10**12), share=st.floats(0, 0.99), off=st.floats(0, 2))
def test_a_tolerance_is_a_share_either_way(value, share, off):
    expectation = Expectation(key="memory.x", value=value, line=1, tolerance=share)
    for got in (value + round(off * share * value), value - round(off * share * value)):
        assert expectation.accepts(got) == (abs(got - value) <= share * value)
    assert not expectation.accepts(None)
    five_percent = Expectation(key="memory.x", value=100, line=1, tolerance=0.05)
    assert [got for got in (94, 95, 100, 105, 106) if five_percent.accepts(got)] == [95, 100, 105]


def test_a_path_is_one_beside_the_file(cli, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 1}')
    (tmp_path / "tests").mkdir()
    text = "model: MODEL\nexpected: {groups: {encoder: 7087872}}\n"
    monkeypatch.chdir("/")
    for number, model in enumerate(("../configs", "../configs/config.json", str(tmp_path / "configs"))):
        path = tmp_path / "tests" / f"{number}.bertscope.yaml"
        path.write_text(text.replace("MODEL", model))
        assert cli("check", path).code == 0


def test_class_attention_and_pooler_are_as_the_file_says(tmp_path):
    path = tmp_path / "x.bertscope.yaml"
    path.write_text("model: bert-tiny\nattention: eager\nadd_pooling_layer: false\n")
    source = read_expectation_file(path).source
    assert (source.config.attn_implementation, source.add_pooling_layer) == ("eager", False)
    path.write_text(TINY_MLM)
    assert read_expectation_file(path).source.architecture == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("  memory:\n    x: {batch: 1, seq: 5000, mode: training, peak_bytes: 1}\n", "max_position_embeddings 512"),
        ("  memory:\n    x: {batch: 1, seq: 8, mode: training, freeze: [nothing], peak_bytes: 1}\n", "nothing"),
        ("  flops:\n    x: {batch: 1, seq: 8, mode: training, freeze: [nothing], matmul_flops: 1}\n", "nothing"),
        ("  flops:\n    x: {batch: 1, seq: 5000, mode: inference, matmul_flops: 1}\n", "max_position_embeddings 512"),
    ],
)
def test_a_run_that_the_model_cannot_do_is_told_beside_what_was_checked(checked, entry, words):
    result, found = checked(TINY_MLM + "  distinct_params: 4416698\n" + entry)
    assert result.code == 2
    error = json.loads(result.err)["error"]  # with --format json
    assert (error["file"], error["line"]) == ("mine.bertscope.yaml", 6)
    assert words in result.err
    assert found["distinct_params"]["status"] == "passed"
    assert [finding["status"] for finding in found.values()].count("error") == 1


def test_a_folder_stands_for_the_files_in_it(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "model: bert-tiny\nexpected: {distinct_params: 4385920}\n"
    for place in (
        "a.bertscope.yaml",
        "deep/er/b.bertscope.yml",
        ".hidden/c.bertscope.yaml",
        "env/lib/d.bertscope.yaml",
        "node_modules/e.bertscope.yaml",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "linked").symlink_to("env")
    (tmp_path / "deep" / "above").symlink_to("..")
    assert cli("check", ".").out == "2 files: 2 expectations passed, 0 failed\n"
    assert cli("check").err == "note: checked a.bertscope.yaml, deep/er/b.bertscope.yml\n"
    assert cli("check", ".", "a.bertscope.yaml").out == "2 files: 2 expectations passed, 0 failed\n"
    assert cli("check", ".hidden").out == "1 file: 1 expectation passed, 0 failed\n"
    assert cli("check", "env/lib/d.bertscope.yaml", "--architecture", "BertForMaskedLM").code == 1
    assert "unknown architecture" in cli("check", "env/lib/d.bertscope.yaml", "-a", "Bert").err


@pytest.mark.parametrize("words", [(), (".",), ("inner",)])
def test_a_folder_without_expectation_files_is_an_error_that_says_how_to_write_one(cli, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "models.yaml").touch()
    result = cli("check", *words)
    assert (result.code, result.out) == (2, "")
    folder = tmp_path / (words or (".",))[0]
    assert result.err.startswith(f"error: no *.bertscope.yaml at or below {folder}; 'bertscope check --write models.b")
    assert "--presets" in result.err
    assert cli("check", *words, "--format", "github").out.startswith("::error title=bertscope check,file=")


BESIDE = {
    "runs.bertscope.yaml": TINY_MLM
    + "  memory: {x: {batch: 2, seq: 64, mode: training, parallelism: fsdp, peak_bytes: 1}}\n",
    "code.bertscope.yaml": "model: os:getcwd\nexpected: {distinct_params: 1}\n",
    "text.bertscope.yaml": "model: [bert-tiny\n",
    "empty.bertscope.yaml": "",
    "comment.bertscope.yaml": "# nothing\n",
    "nothing.bertscope.yaml": "model: bert-tiny\nexpected: {}\n",
    "tables.bertscope.yaml": "model: bert-tiny\nexpected: {groups: {}, flops: {}}\n",
    "family.bertscope.yaml": "model: config.json\nexpected: {distinct_params: 1}\n",
}


@pytest.mark.parametrize("name", [*BESIDE, "absent.bertscope.yaml"])
def test_a_file_that_cannot_be_checked_is_named_and_the_others_are_reported(cli, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bertscope.sources.transformers_models.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "z.bertscope.yaml").write_text("model: bert-tiny\nexpected: {distinct_params: 4385920}\n")
    if name in BESIDE:
        (tmp_path / name).write_text(BESIDE[name])
    files = () if name in BESIDE else (name, "z.bertscope.yaml")
    result = cli("check", *files)
    assert (result.code, result.out) == (2, "2 files: 1 expectation passed, 0 failed, 1 could not be checked\n")
    (error,) = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert error.startswith(f"error: {name}")
    found = cli("check", *files, "--format", "json").json["findings"]
    assert [finding["status"] for finding in found] == ["error", "passed"]
    assert f"::error title=bertscope check,file={name},line=" in cli("check", *files, "--format", "github").out
    assert 'tests="2" failures="0" errors="1"' in cli("check", *files, "--format", "junit").out
    assert f",{name}," in cli("check", *files, "--format", "csv").out


@pytest.mark.parametrize("place", ["load_expected", "Witness.got"])
def test_an_unexpected_error_is_one_of_its_file(cli, tmp_path, monkeypatch, place):
    from bertscope.analyses import check

    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.bertscope.yaml").write_text("model: bert-tiny\nexpected: {distinct_params: 4385920}\n")
    real = check.Witness.got if "got" in place else check.load_expected

    def fail(given, *more, **options):
        if "a.bertscope" in str(getattr(given, "model", given)):
            raise KeyError("a slip")
        return real(given, *more, **options)

    monkeypatch.setattr(f"bertscope.analyses.check.{place}", fail)
    result = cli("check")
    assert (result.code, result.out) == (2, "2 files: 1 expectation passed, 0 failed, 1 could not be checked\n")
    assert "error: a.bertscope.yaml:" in result.err
    assert "unexpected error: KeyError (test_expectations.py:" in result.err


@pytest.mark.parametrize("head", [TINY_MLM.partition("expected")[0], "architecture: BertForMaskedLM\nconfig: {}\n"])
def test_write_records_counts_and_ties_that_hold(cli, tmp_path, head):
    path = tmp_path / "mine.bertscope.yaml"
    path.write_text(head)
    assert cli("check", path).code == 2
    assert cli("check", "--write", path).code == 0
    assert path.read_text().startswith(head + "expected:\n")
    assert "    cls.predictions.decoder.weight: bert.embeddings.word_embeddings.weight\n" in path.read_text()
    assert cli("check", path).code == 0


# ---- new values in the text of a file ----


@pytest.mark.parametrize(
    ("text", "changes", "written"),
    [
        *cases("expectations.yaml", "written"),
        (
            "\ufeffexpected:\r\n  groups:\r\n    a: 1\r\n    b: 2 # b",
            {"groups.a": None, "groups.c d": 3},
            '\ufeffexpected:\r\n  groups:\r\n    b: 2 # b\r\n    "c d": 3',
        ),
    ],
)
def test_new_values_replace_the_old_ones_and_every_other_byte_of_the_file_stays(tmp_path, text, changes, written):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode())
    assert with_expected(path, changes) == written


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("expected:\n  groups:\n    ? a\n    : 1\n    b: 2\n", {"groups.a": None, "groups.c": 3}),
        ("expected:\n  ties:\n    a: |-\n      b\n    # a comment\n    c: d\n", {"ties": {"a": "e", "c": "d"}}),
        ("expected:\r  groups:\r    a: 1\r    b: 2\r", {"groups.a": None}),
        ("expected:\n  memory:\n    m:\n      peak_bytes: |-\n        9 GiB\n      batch: 1\n", {"memory.m": 9}),
    ],
)
def test_a_form_of_yaml_in_which_no_value_can_be_replaced_is_refused(tmp_path, text, changes):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(BertscopeError, match="write its expectations as plain 'key: value' lines"):
        with_expected(path, changes)


_TABLES = st.dictionaries(st.sampled_from(["a", "b 1", "c.0-1", "c.2", "d"]), st.integers(0, 10**9), min_size=1)


@settings(max_examples=50, deadline=None)
@given(old=_TABLES, new=_TABLES, is_flow=st.booleans(), newline=st.sampled_from(["\n", "\r\n"]), ends=st.booleans())
def test_any_table_becomes_any_other_and_all_comments_of_rows_that_stay_are_kept(
    tmp_path_factory, old, new, is_flow, newline, ends
):
    path = tmp_path_factory.getbasetemp() / "mine.yaml"
    rows = [f"{json.dumps(name)}: {value}" for name, value in old.items()]
    lines = [f"    {row}  # of {name}" for row, name in zip(rows, old, strict=True)]
    block = ["  groups: {" + ", ".join(rows) + "}"] if is_flow else ["  groups:", *lines]
    text = newline.join(["# top", "expected:", *block]) + newline * ends
    path.write_bytes(text.encode())
    changes = {f"groups.{name}": new.get(name) for name in {**old, **new}}
    written = with_expected(path, changes)
    assert read_yaml(written, path).plain() == {"expected": {"groups": new}}
    assert written.startswith("# top")
    assert is_flow or all(f"# of {name}" in written for name in old.keys() & new.keys())
    assert ("\r\n" in written) == (newline == "\r\n")
    unchanged = {name: value for name, value in old.items() if new.get(name) == value}
    assert all(f"{json.dumps(name)}: {value}" in written for name, value in unchanged.items())
