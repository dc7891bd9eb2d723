"""The wheel, and the CI kit as docs/ci.md shows it: a nested pytest, pre-commit in a repository, the action's steps."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import yaml

import bertscope
from tests.child_server import loaded
from tests.conftest import ROOT
from tests.test_docs import CI, README, block, script

ENV = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "GIT_", "PRE_COMMIT"))}
ENV |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
HOLDS = "model: bert-tiny\nexpected:\n  distinct_params: 4385920\n"
DIFFERS = HOLDS.replace("4385920", "4385921")
CODE = "import torch\n\nopen('imported', 'w')\nbuild = lambda: torch.nn.Sequential(torch.nn.Linear(2, 3))\n"
OWN = "model: my_models:build\nexpected:\n  layers:\n    '0': 8\n"
OWN_LINE = "own.bertscope.yaml:4: own: layers.0: expected 8, got 9, difference +1"
LINE = "wrong.bertscope.yaml:3: wrong: distinct_params: expected 4,385,921, got 4,385,920, difference -1"


def run(*command: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """A command in a folder, with this checkout on Python's path."""
    return subprocess.run(list(map(str, command)), cwd=cwd, env=ENV | variables, capture_output=True, text=True,
                          check=False, timeout=300)  # fmt: skip


def project(folder: Path, **files: str) -> Path:
    """A folder with such expectation files."""
    for name, text in files.items():
        (folder / f"{name}.bertscope.yaml").write_text(text)
    return folder


# ---- pytest -------------------------------------------------------------------------------------


# Without the plugins that are installed, which take a second to load.
PLUGIN = ("-p", "bertscope.pytest_plugin", "-q")
PYTEST = (sys.executable, "-m", "pytest", *PLUGIN)  # where no test needs torch


def nested(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    """A pytest of its own, in a process that has torch loaded."""
    return run(*loaded("pytest"), *PLUGIN, *words, cwd=cwd)


def test_a_nested_pytest_gives_one_test_for_each_expectation(tmp_path):
    project(
        tmp_path,
        models=HOLDS + "  ties: {}\n  flops:\n"
        "    sentence: {batch: 1, seq: 8, mode: inference, matmul_flops: 6389760}\n",
        wrong=DIFFERS,
        broken="model: bert-tony\n",
        empty="model: bert-tiny",
    )
    (tmp_path / "test_readme.py").write_text(block(CI, "python", "import torch\nfrom"))
    (tmp_path / "test_wrong.py").write_text(
        "import torch\n\ndef test_fixture(assert_params):\n"
        "    assert_params(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), 14)\n"
    )
    done = nested("--junitxml", "report.xml", cwd=tmp_path)
    assert done.returncode == 1
    assert f"\n{LINE}\n" in done.stdout
    assert "broken.bertscope.yaml:1: no preset or file named 'bert-tony'" in done.stdout
    assert "'bertscope check --write empty.bertscope.yaml' adds the current counts" in done.stdout
    assert "Traceback" not in done.stdout
    assert re.search(r"4 failed, 4 passed", done.stdout)
    assert "AssertionError: Sequential: unique parameters: expected 14, got 13, difference -1" in done.stdout
    assert "0: 9 (Linear)" in done.stdout
    assert "bertscope/testing.py" not in done.stdout  # pytest shows the line of the test that fails
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")}
    assert {"flops.sentence", "ties", "readable", "test_the_head_has_its_size"} <= set(cases)
    properties = {item.get("name"): item.get("value") for item in cases["flops.sentence"].iter("property")}
    assert properties == {"expected": "6389760", "got": "6389760"}


def test_an_unexpected_error_in_one_file_is_a_failing_test_and_the_others_run(tmp_path):
    project(tmp_path, a=HOLDS, b=HOLDS)
    (tmp_path / "conftest.py").write_text(
        "from bertscope.sources import expectation_files as module\nreal = module.read_expectation_file\n\n"
        "def read(path, **options):\n    return real(path, **options) if path.name[0] == 'b' else {}['slip']\n\n"
        "module.read_expectation_file = read\n"
    )
    done = nested(cwd=tmp_path)
    assert (done.returncode, "1 failed, 1 passed" in done.stdout) == (1, True), done.stdout
    assert "a.bertscope.yaml:1: unexpected error: KeyError (conftest.py:5)" in done.stdout


def test_one_expectation_can_be_named_and_is_collected_without_torch(tmp_path):
    both = DIFFERS + "  layer_params: 4385920\n"
    project(tmp_path, wrong=both, other=both)
    asked = ("-k", "layer_params", "wrong.bertscope.yaml::layer_params", "other.bertscope.yaml")
    assert "2 passed, 1 deselected" in nested(*asked, cwd=tmp_path).stdout
    (tmp_path / "conftest.py").write_text(
        "import sys\n\ndef pytest_collection_finish(session):\n    assert 'torch' not in sys.modules\n"
    )
    (tmp_path / "other.bertscope.yaml").unlink()
    done = run(*PYTEST, "--collect-only", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[:2] == [
        "wrong.bertscope.yaml::distinct_params",
        "wrong.bertscope.yaml::layer_params",
    ]


def test_a_run_without_expectation_files_imports_nothing_for_them(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n"
        "    assert not {'torch', 'yaml', 'rich', 'typer', 'bertscope.config'} & set(sys.modules)\n"
    )
    assert "1 passed" in run(*PYTEST, cwd=tmp_path).stdout


def test_assert_params_knows_both_conventions_and_what_is_trainable():
    import torch

    from bertscope.testing import assert_params

    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False), "b": torch.nn.Linear(2, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    assert_params(tied, 6, trainable=6)
    assert_params(tied, 12, over_layers=True, trainable=12)
    tied["a"].weight.requires_grad_(False)
    assert_params(tied, 6, trainable=0)
    with pytest.raises(AssertionError, match="trainable parameters: expected 6, got 0, difference -6"):
        assert_params(tied, 6, trainable=6)
    with pytest.raises(AssertionError, match="expected 6, got 12"):
        assert_params(tied, 6, over_layers=True)
    with pytest.raises(AssertionError, match="not counted, since not yet initialised: weight"):
        assert_params(torch.nn.LazyLinear(3), 9)
    for wrong in (6.0, "6", True, None):
        with pytest.raises(TypeError, match="is an integer"):
            assert_params(tied, wrong)


def test_assert_flops_and_assert_fits_say_what_is_and_how_to_update():
    """By hand: 10 x 2 x 3 x 4 = 240 FLOPs."""
    import torch

    from bertscope.testing import assert_fits, assert_flops

    linear = torch.nn.Linear(3, 4)
    assert_flops(linear, 240, torch.ones(10, 3))
    assert_flops("bert-tiny", 6_389_760, batch=1, seq=8)
    with pytest.raises(
        AssertionError, match=r"Linear: matmul FLOPs: expected 241, got 240, difference -1 \(to update: 240\)"
    ):
        assert_flops(linear, 241, input_size=(10, 3))
    with pytest.raises(TypeError, match=r"a number of FLOPs is an integer; got 2\.5"):
        assert_flops(linear, 2.5)
    assert_fits(linear, "t4", torch.ones(10, 3))
    wrong = r"(?s)bert-base-uncased: expected a step that fits on t4; got: .*Does not fit.*to update: a smaller batch"
    with pytest.raises(AssertionError, match=wrong):
        assert_fits("bert-base-uncased", "t4", batch=4096)


def test_pytest_imports_the_code_that_a_file_names_when_its_first_test_runs(tmp_path):
    project(tmp_path, own=OWN)
    (tmp_path / "my_models.py").write_text(CODE)
    assert "own.bertscope.yaml::layers.0" in nested("--collect-only", cwd=tmp_path).stdout
    assert not (tmp_path / "imported").exists()
    done = nested(cwd=tmp_path)
    assert (done.returncode, f"\n{OWN_LINE}\n" in done.stdout) == (1, True), done.stdout
    project(tmp_path, own=OWN.replace("8", "9"))
    assert "1 passed" in nested(cwd=tmp_path).stdout


# ---- pre-commit ---------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    """git in a folder, as somebody."""
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "init.defaultBranch=main")
    done = run("git", *who, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def with_torch_loaded(programs: Path) -> dict[str, str]:
    """Return the variables of an environment whose `bertscope`, in a new folder, is forked with torch loaded."""
    programs.mkdir()
    (programs / "bertscope").write_text(f'#!/bin/sh\nexec {shlex.join(loaded("bertscope"))} "$@"\n')
    (programs / "bertscope").chmod(0o755)
    return {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def hooked(tmp_path):
    """A repository whose pre-commit takes the hook from another one, as docs/ci.md says; and how it is run."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    pytest.importorskip("pre_commit", reason="pre-commit is in the extra 'test'")
    hooks, repository, programs = (tmp_path / name for name in ("hooks", "repository", "bin"))
    for folder in (hooks, repository):
        folder.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    git(hooks, "init", "--quiet")
    git(hooks, "add", ".")
    git(hooks, "commit", "--quiet", "-m", "hooks")
    config = block(CI, "yaml", "repos:").replace("https://github.com/OWNER/bertscope", str(hooks))
    (repository / ".pre-commit-config.yaml").write_text(config.replace("REVISION", git(hooks, "rev-parse", "HEAD")))
    git(repository, "init", "--quiet")
    variables = {"PRE_COMMIT_HOME": str(tmp_path / "cache"), **with_torch_loaded(programs)}

    def precommit() -> subprocess.CompletedProcess:
        git(repository, "add", ".")
        return run(sys.executable, "-m", "pre_commit", "run", "--all-files", cwd=repository, **variables)

    return repository, precommit


def test_pre_commit_passes_holds_back_and_passes_over(hooked):
    repository, precommit = hooked
    done = precommit()
    assert (done.returncode, "Skipped" in done.stdout) == (0, True), done.stdout + done.stderr
    project(repository, holds=HOLDS, both=HOLDS + "  layer_params: 4385920\n")
    done = precommit()
    assert (done.returncode, "Passed" in done.stdout) == (0, True), done.stdout
    project(repository, wrong=DIFFERS)
    done = precommit()
    assert done.returncode == 1
    assert LINE in done.stdout
    assert "3 files: 3 expectations passed, 1 failed" in done.stdout  # one process for all


def test_pre_commit_checks_a_link_and_an_ending_in_capitals(hooked):
    repository, precommit = hooked
    (repository / "text").write_text(DIFFERS)
    (repository / "wrong.bertscope.yaml").symlink_to("text")
    done = precommit()
    assert (done.returncode, "expected 4,385,921, got 4,385,920" in done.stdout) == (1, True), done.stdout
    (repository / "wrong.bertscope.yaml").rename(repository / "wrong.bertscope.YAML")
    done = precommit()
    assert (done.returncode, "expected 4,385,921, got 4,385,920" in done.stdout) == (1, True), done.stdout


def test_pre_commit_can_check_everything_on_any_change(hooked):
    repository, precommit = hooked
    path = repository / ".pre-commit-config.yaml"
    settings = re.findall(r"`(files: [^`]*|pass_filenames: [^`]*|args: [^`]*)`", (ROOT / "docs" / "ci.md").read_text())
    assert len(settings) == 2
    path.write_text(path.read_text() + "".join(f"        {setting}\n" for setting in settings))
    (repository / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 2}')
    project(repository, mine="model: config.json\nexpected: {layers: {layer: 7087872}, groups: {encoder: 14175744}}\n")
    assert precommit().returncode == 0
    (repository / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 3}')
    done = precommit()
    assert done.returncode == 1
    assert "groups.encoder: expected 14,175,744, got 21,263,616, difference +7,087,872" in done.stdout


# ---- the action ---------------------------------------------------------------------------------

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def test_the_action_of_the_readme_gives_inputs_that_there_are():
    steps = yaml.safe_load(block(CI, "yaml", "steps:"))["steps"]
    assert set(steps[1]["with"]) <= set(ACTION["inputs"])
    assert ACTION["runs"]["using"] == "composite"
    assert all("shell" in step for step in ACTION["runs"]["steps"] if "run" in step)
    assert all({"description", "default"} == set(item) for item in ACTION["inputs"].values())
    assert ACTION["inputs"]["base"]["default"] == "${{ github.event.pull_request.base.sha }}"


def step(name: str, cwd: Path, inputs: dict[str, str], **variables: str) -> subprocess.CompletedProcess:
    """One step of the action as GitHub runs it: bash -e, expressions put in."""
    (found,) = [step for step in ACTION["runs"]["steps"] if step.get("name") == name]
    assert "${{" not in found["run"]  # an input in a script could be a script; it goes through the environment
    values = {key: item["default"] for key, item in ACTION["inputs"].items()} | inputs
    environment = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)
        for key, text in found["env"].items()
    }
    assert "${{" not in "".join(environment.values())
    return run(
        "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"], cwd=cwd, **environment, **variables
    )


@pytest.fixture(scope="session")
def installed(once, tmp_path_factory) -> dict[str, str]:
    """Return the variables of an environment with what the action's first step installs, without its dependencies."""

    @once
    def install() -> dict[str, str]:
        return install_into(tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("bin"))

    return install()


def install_into(site: Path, programs: Path) -> dict[str, str]:
    """Install with the action's first step into a separate folder; return the variables of the environment."""
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    path = f"{site}/bin{os.pathsep}{programs}{os.pathsep}{os.environ['PATH']}"
    done = step(
        "Install", site, {"pip-arguments": f"--no-deps --target {site}"}, PATH=path, GITHUB_ACTION_PATH=str(ROOT)
    )
    assert done.returncode == 0, done.stderr
    assert (site / "bertscope" / "pytest_plugin.py").exists()
    return {"PATH": path, "PYTHONPATH": str(site)}


def test_the_actions_steps_annotate_at_file_and_line(installed, tmp_path):
    project(tmp_path, holds=HOLDS)
    (tmp_path / "configs").mkdir()
    project(tmp_path / "configs", wrong=DIFFERS)
    done = step("Check", tmp_path, {}, **installed)
    assert done.returncode == 1
    place, _, message = LINE.partition(":3: ")
    assert f"::error title=bertscope check,file=configs/{place},line=3::{message}\n" in done.stdout
    assert done.stdout.endswith("2 files: 1 expectation passed, 1 failed\n")
    done = step("Check", tmp_path, {"files": "holds.bertscope.yaml bert-tiny"}, **with_torch_loaded(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (0, "2 files: 16 expectations passed, 0 failed\n")


def test_the_action_gives_outputs_and_a_summary_where_github_asks_for_them(tmp_path):
    """The numbers of the first expectation of each kind, and a table of all in Markdown."""
    program = with_torch_loaded(tmp_path / "bin")
    project(tmp_path, a=DIFFERS + "  flops:\n    x: {batch: 1, seq: 8, mode: inference, matmul_flops: 1}\n", b=HOLDS)
    files = {"GITHUB_OUTPUT": str(tmp_path / "outputs"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    (tmp_path / "outputs").write_text("before=1\n")
    assert step("Check", tmp_path, {}, **program, **files).returncode == 1
    assert (tmp_path / "outputs").read_text() == "before=1\nparams=4385920\nflops=6389760\n"
    assert "| FAILED | a | distinct\\_params | 4,385,921 | 4,385,920 | -1 |" in (tmp_path / "summary").read_text()
    assert {item["value"] for item in ACTION["outputs"].values()} == {
        f"${{{{ steps.check.outputs.{name} }}}}" for name in ("params", "flops", "peak")
    }
    files["GITHUB_OUTPUT"] = str(tmp_path / "absent" / "outputs")
    done = step("Check", tmp_path, {"files": "b.bertscope.yaml"}, **program, **files)
    assert (done.returncode, "cannot be written: No such file" in done.stderr) == (0, True)


def test_the_action_compares_with_the_base_of_a_pull_request(tmp_path):
    repository, program = tmp_path / "repository", with_torch_loaded(tmp_path / "bin")
    repository.mkdir()
    git(repository, "init", "--quiet")
    for layers in (1, 2):
        (repository / "config.json").write_text(f'{{"model_type": "bert", "num_hidden_layers": {layers}}}')
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", f"{layers}")
    inputs = {"compare": "config.json", "base": git(repository, "rev-parse", "HEAD~1")}
    done = step("Compare", repository, inputs, **program, GITHUB_STEP_SUMMARY=str(tmp_path / "summary"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "| num_hidden_layers | 1 | 2 |".replace("_", "\\_") in (tmp_path / "summary").read_text()
    (repository / "new.json").write_text('{"model_type": "bert"}')
    inputs["compare"] = "new.json config.json"  # a pull request adds the first one
    done = step("Compare", repository, inputs, **program, GITHUB_STEP_SUMMARY=str(tmp_path / "more"))
    assert (done.returncode, "has no new.json" in done.stderr) == (0, True)
    summary = (tmp_path / "more").read_text()
    assert summary.startswith("new.json is not compared with the base; the log says why.\n")
    assert "| unique parameters |" in summary


def test_the_action_imports_code_only_with_its_input(tmp_path):
    program = with_torch_loaded(tmp_path / "bin")
    project(tmp_path, own=OWN)
    (tmp_path / "my_models.py").write_text(CODE)
    done = step("Check", tmp_path, {}, **program)
    assert (done.returncode, "add --allow-code" in done.stderr) == (2, True), done.stdout + done.stderr
    assert not (tmp_path / "imported").exists()
    done = step("Check", tmp_path, {"allow-code": "true"}, **program)
    place, _, message = OWN_LINE.partition(":4: ")
    assert done.returncode == 1
    assert f"::error title=bertscope check,file={place},line=4::{message}\n" in done.stdout


def test_the_actions_steps_run_nothing_of_the_workspace_and_take_a_name_for_a_name(installed, tmp_path):
    for name in ("pip", "typing", "json"):
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')\n")
    project(tmp_path, **{"victim": HOLDS, "-ovictim": DIFFERS})
    step("Install", tmp_path, {"pip-arguments": "--version"}, **installed, GITHUB_ACTION_PATH=str(tmp_path / "absent"))
    done = step("Check", tmp_path, {"files": "victim.bertscope.yaml -ovictim.bertscope.yaml"}, **installed)
    assert (done.returncode, "expected 4,385,921, got 4,385,920" in done.stdout) == (1, True)
    assert (tmp_path / "victim.bertscope.yaml").read_text() == HOLDS
    assert not (tmp_path / "canary").exists()


def test_an_installed_bertscope_is_a_plugin_by_itself_and_can_be_left_out(installed, tmp_path):
    project(tmp_path, broken="model: bert-tony\n")
    others = " -p no:".join(("", "cacheprovider", "hypothesispytest", "xdist", "xdist.looponfail")).split()
    pytest_here = (sys.executable, "-m", "pytest", "-q", *others)
    variables = installed | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    done = run(*pytest_here, cwd=tmp_path, **variables)
    line = "\nbroken.bertscope.yaml:1: no preset or file named 'bert-tony'"
    assert (done.returncode, line in done.stdout) == (1, True), done.stdout + done.stderr
    done = run(*pytest_here, "-p", "no:bertscope", cwd=tmp_path, **variables)
    assert "no tests ran" in done.stdout


def test_the_junit_command_of_the_readme_writes_a_report(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project(tmp_path, models=block(CI, "yaml", "model:"))
    (command,) = [line for line in block(CI, "sh", "bertscope check --format junit").splitlines() if line]
    assert cli(*command.split()[1:]).code == 0
    (suite,) = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("6", "0", "0")


def test_the_wheel_holds_every_preset_and_template_and_no_test(installed):
    site = Path(installed["PYTHONPATH"])
    names = {str(path.relative_to(site)) for path in site.rglob("*")}
    with ZipFile(site / "bertscope" / "presets.zip") as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    assert packed == {path.name: path.read_bytes() for path in (ROOT / "presets").iterdir()}
    assert "bertscope/commands/sample_grid.yaml" in names
    folder = ROOT / "bertscope" / "views" / "page" / "templates"
    assert {str(path.relative_to(ROOT)) for path in folder.iterdir()} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "presets"))]


def test_an_installed_bertscope_reads_its_presets_out_of_their_archive(installed, tmp_path):
    """By name, by a name of the hub, a config.json, and by the path that a listing shows."""
    code = (
        "import bertscope; rows = bertscope.presets().rows; report = bertscope.check([rows[0].path, 'bert-tiny'])\n"
        "assert len(report.having('passed')) == len(report.findings) > 9 and 'presets.zip' in rows[0].path\n"
        "print(len(rows), *(bertscope.count(name).total for name in ('intfloat/e5-small', 'gpt2', rows[0].path)))"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | installed)
    number = len(list((ROOT / "presets").iterdir()))
    assert (done.stdout.split(), done.stderr) == ([str(number), "33360000", "124439808", "11221680"], "")


def test_the_metadata_take_authors_and_addresses_from_the_citation(installed, monkeypatch):
    (metadata,) = Path(installed["PYTHONPATH"]).glob("bertscope-*.dist-info/METADATA")
    head, _, body = metadata.read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert "\nAuthor: The bertscope authors\n" in head
    assert ("Project-URL" in head, body) == (False, README)
    hooks = SimpleNamespace(MetadataHookInterface=object, BuildHookInterface=object)
    for module in ("metadata.plugin", "builders.hooks.plugin"):  # only builds install hatchling
        monkeypatch.setitem(sys.modules, f"hatchling.{module}.interface", hooks)
    hook = script("package_metadata")
    assert hook.absolute(README, "") == README
    home = "https://github.com/OWNER/bertscope"
    found = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", hook.absolute(README, home))
    assert ("!", f"{home}/raw/HEAD/docs/step.svg") in found
    assert ("", f"{home}/blob/HEAD/docs/accuracy.md") in found
    assert all(target.startswith("https://") for _, target in found)
    assert hook.addresses(home)["Changelog"] == f"{home}/blob/HEAD/CHANGELOG.md"
    person = {"given-names": "Ada", "family-names": "Lovelace", "email": "ada@example.org"}
    assert hook.people({"authors": [person]}) == [{"name": "Ada Lovelace", "email": "ada@example.org"}]


def test_the_citation_says_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert (citation["title"], citation["version"]) == ("bertscope", bertscope.__version__)
    assert f'description = "{citation["abstract"]}"' in project
    assert f"keywords = {json.dumps(citation['keywords'])}" in project
    assert f'license = "{citation["license"]}"' in project
    assert re.search(rf"^## {citation['version']}, ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_source_archive_has_every_file_that_the_documents_link_to():
    listed = re.findall(
        r'"/([^"]+)"', (ROOT / "pyproject.toml").read_text().split("targets.sdist]")[1].split("[tool.pytest")[0]
    )
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text()):
            path = (page.parent / target).resolve().relative_to(ROOT)
            assert path.parts[0] in listed, f"{page.name} links to {path}, which the sdist lacks"
