"""The command line of a child process: the parent's packages, and nothing from the working directory."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import bertscope
from bertscope.processes.child import Child, ForkedChild, ForkServer, Worker, child_command

HOSTILE = ("typing", "torch", "json", "pkgutil", "site", "importlib", "linecache", "sitecustomize", "usercustomize",
           "bertscope", "typer", "yaml", "os", "re", "signal", "optional")  # fmt: skip
CANARY = "ran-the-code-of-this-folder"
PROBE = """
def main():
    import importlib.util, json, typing, bertscope.errors
    found = {name: importlib.util.find_spec(name) is not None for name in ("optional", "helper", "torch", "yaml")}
    print(json.dumps(found | {"typing": typing.__file__, "bertscope": bertscope.__file__}))
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A working directory full of modules that leave a file when they run, in front of sys.path as by `python -m`."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(folder / CANARY)!r}, 'w').close()\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), "", *sys.path])
    return folder


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """A folder of the user's own modules."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "helper.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder


def asked() -> dict[str, object]:
    done = subprocess.run(child_command("probe:main"), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_child_runs_no_module_of_the_working_directory(probe, hostile):
    found = asked()
    assert found == {"optional": False, "helper": True, "torch": True, "yaml": True, "bertscope": bertscope.__file__,
                     "typing": found["typing"]}  # fmt: skip
    assert not str(found["typing"]).startswith(str(hostile))
    assert not (hostile / CANARY).exists()


def test_a_process_that_outlives_a_child_with_its_streams_holds_up_nobody(tmp_path, monkeypatch):
    acts = "os.setsid(); print(os.getpid(), flush=True); time.sleep(9)"
    code = f"import os, time\ndef main():\n    if os.fork() == 0: {acts}"
    (tmp_path / "daemon.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    worker, begun = Worker(Child("daemon:main"), lambda line: ("pid", int(line))), time.monotonic()
    pid = worker.inbox.get(timeout=50)[2]
    worker.stop(5.0)
    assert time.monotonic() - begun < 9
    os.kill(pid, signal.SIGKILL)


def test_a_child_imports_from_the_working_directory_if_pythonpath_names_it(probe, monkeypatch):
    (probe / "optional.py").write_text("")
    monkeypatch.chdir(probe)
    monkeypatch.setenv("PYTHONPATH", str(probe))
    assert asked()["optional"]


def test_a_child_runs_the_package_that_the_parent_runs_from_the_working_directory(probe, monkeypatch):
    """As `python -m bertscope` in a checkout does."""
    root = os.path.dirname(os.path.dirname(bertscope.__file__))
    monkeypatch.chdir(root)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert asked()["bertscope"] == bertscope.__file__


def test_a_child_sees_the_packages_of_the_users_own_site(probe, tmp_path, monkeypatch):
    import site

    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "optional.py").write_text("")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "USER_SITE", str(tmp_path / "user"))
    assert asked()["optional"]


def test_a_deleted_working_directory_changes_nothing(probe, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert asked()["helper"]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A function that starts a server for the code of a module with `load` and `main`."""
    servers = []

    def start(code):
        (tmp_path / "probe.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        servers.append(ForkServer("probe:load", "probe:main"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_forks_share_the_imports_of_their_server_and_end_alone(served):
    server = served(
        "import os, sys\n"
        "def load():\n    global loaded\n    loaded = os.getpid()\n"
        "def main():\n"
        "    print(os.getpid(), loaded, os.getpgid(0), sys.stdin.readline().strip(), flush=True)\n"
        "    sys.stderr.write('to stderr')\n"
        "    sys.exit(7) if sys.stdin.readline() == 'exit\\n' else os.kill(os.getpid(), 11)\n"
    )
    children = [ForkedChild(server), ForkedChild(server)]
    for number, child in enumerate(children):
        child.stdin.write(b"job %d\n" % number)
    lines = [child.stdout.readline().split() for child in children]
    assert [line[3:] for line in lines] == [[b"job", b"0"], [b"job", b"1"]]
    assert [int(line[0]) for line in lines] == [child.pid for child in children]
    assert {int(line[1]) for line in lines} == {server.process.pid}
    assert [int(line[2]) for line in lines] == [child.pid for child in children]  # each leads its group
    with pytest.raises(subprocess.TimeoutExpired):
        children[0].wait(0.01)
    children[0].stdin.write(b"exit\n")
    children[1].stdin.write(b"die\n")
    assert [child.wait(60) for child in children] == [7, -11]
    assert children[0].stderr.read().startswith(b"to stderr")


def test_a_child_of_a_server_that_cannot_load_ends_without_a_word(served):
    child = ForkedChild(served("def load():\n    raise ImportError('no torch')\n"))
    assert child.stdout.read() == b""
    assert child.wait(60) != 0
    child.kill_group()


def test_a_server_whose_parent_was_killed_before_it_ran_ends(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("bertscope.processes.child.os.getpid", lambda: 2**22)  # a process that is gone
        server = served("import time\ndef load():\n    time.sleep(600)\n")
    assert server.process.wait(60) == 1


def test_a_child_that_is_killed_before_it_exists_ends_its_server(served):
    child = ForkedChild(served("import time\ndef load():\n    time.sleep(600)\n"))
    child.kill_group()
    assert child.wait(60) == -9
