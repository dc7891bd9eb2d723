"""The folder of a run for torch.compile: its own, unreadable for others, and gone at the end."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bertscope import estimate
from bertscope.errors import SelectionError, WorkerError
from bertscope.processes.folders import OwnFolder, compile_environment
from bertscope.torch_access import compile_module, nn
from tests.child_server import run_loaded
from tests.conftest import run_python

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")


def test_children_compile_into_a_folder_of_their_own_that_is_gone_afterwards(tmp_path, monkeypatch):
    """Another user may have made the usual one, with libraries that torch would load."""
    foreign = tmp_path / "torchinductor_root"
    foreign.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(VARIABLES[0], raising=False)
    told = run_python(
        "import json, os; from bertscope.processes.folders import compile_environment as given\n"
        f"folders = [given()[name] for name in {VARIABLES}]\n"
        "print(json.dumps([[folder, os.stat(folder).st_mode & 0o777] for folder in folders]))"
    )
    (folder, mode), again = json.loads(told.stdout)
    assert again == [folder, mode]
    assert Path(folder).parent == tmp_path
    assert mode == stat.S_IRWXU
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
@pytest.mark.parametrize("name", ["ctypes", "types"])
def test_the_python_that_torch_compile_starts_imports_nothing_from_the_working_directory(tmp_path, name, monkeypatch):
    """inductor loads a library in `python -c "from ctypes import cdll"` to learn what the CPU can do."""
    (tmp_path / f"{name}.py").write_text("import os; os._exit(3)")
    command = [sys.executable, "-c", "from ctypes import cdll"]
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode
    compile_module(nn.Identity())
    assert not subprocess.run(command, cwd=tmp_path, check=False).returncode


def test_a_script_that_a_child_runs_may_start_programs_that_import_what_is_next_to_them():
    assert compile_environment().keys() == set(VARIABLES)  # PYTHONSAFEPATH would hide it from them


def test_a_folder_for_compiled_code_that_the_user_names_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLES[0], str(tmp_path))
    assert compile_environment()[VARIABLES[0]] == str(tmp_path)
    monkeypatch.setenv(VARIABLES[0], "/dev/null")
    with pytest.raises(SelectionError, match=f"^{VARIABLES[0]} names '/dev/null': File exists; name a folder"):
        estimate("bert-tiny", compile=True, seq=8)


def test_an_estimate_of_a_compiled_step_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(VARIABLES[0], raising=False)
    run = "torch.nn.Linear(2, 2), torch.ones(2), mode='inference', compile=True"
    assert not run_loaded(f"import bertscope, torch; bertscope.estimate({run})").returncode
    assert list(tmp_path.iterdir()) == []


def test_a_command_whose_libraries_import_torchs_compiler_leaves_no_folder(tmp_path, monkeypatch):
    """The import makes the folder in which torch.compile would write."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv(VARIABLES[0], raising=False)
    done = run_python(
        "import os; from bertscope import cli\n"
        "cli._run = lambda: __import__('torch._dynamo')\n"  # as transformers and many modules do
        "cli.start(); folder = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
        "print(folder, oct(os.stat(folder).st_mode & 0o777), len(os.listdir(os.path.dirname(folder))))"
    )
    folder, mode, count = done.stdout.split()
    assert (Path(folder).parent, mode, count) == (tmp_path / "tmp", "0o700", "1")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="files have no locks there")
def test_the_folder_of_a_run_that_lives_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = OwnFolder(), OwnFolder()
    assert Path(first.name).exists()
    first.cleanup()
    second.cleanup()
    assert list(tmp_path.iterdir()) == []


def test_where_no_folder_can_be_made_one_line_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(WorkerError, match=r"no folder for temporary files: .*; let TMPDIR name one"):
        OwnFolder()
