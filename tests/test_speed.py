"""`benchmarks/speed.py`: its ratios, the processes that it counts, its inputs, and the page that shows its tables."""

import json
import subprocess
import sys

import pytest

from benchmarks import speed
from tests.conftest import ROOT

# A child of a child, whose parent ignores its end, as a server does; it uses 0.3 s.
FORKED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if not os.fork():
    while time.process_time() < 0.3: pass
    os._exit(0)
try: os.wait()
except ChildProcessError: pass
"""


def test_the_ratios_are_those_to_import_torch_of_the_same_run(monkeypatch, capsys):
    imports = iter([speed.Usage(1.0, 2.0, 2**20)] + [speed.Usage(seconds, 2.0, 2**20) for seconds in (1.0, 2.0, 4.0)])

    def measured(command, folder):
        if command == speed.IMPORT_TORCH:
            return next(imports)
        return speed.Usage(6.5 if command[-1] == "20-files" else 6.0, 3.0, 3 * 2**20)

    monkeypatch.setattr(speed, "measured", measured)
    monkeypatch.setattr(speed, "adopt_orphans", lambda: None)
    arguments = ["--here", "--runs", "3", "--only", "check", "--files", "10", "--format", "markdown"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *arguments])
    speed.main()
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "| bertscope |" in line]
    cells = "6.00 (6.00 to 6.00) | 3.00 (1.50 to 6.00) | 1.50 (1.50 to 1.50) | 3 (3 to 3) | 3.00 (3.00 to 3.00)"
    assert row == f"| check | bertscope | `check` of 10 files | {cells} | 50.0 ms a file (50.0 to 50.0) | 8 ms a file |"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
def test_the_time_of_a_process_that_nobody_waits_for_is_counted():
    code = (
        "import sys, pathlib, tempfile\nfrom benchmarks import speed\nspeed.adopt_orphans()\n"
        "print(speed.measured([sys.executable, '-S', '-c', sys.argv[1]], pathlib.Path(tempfile.mkdtemp())).cpu_seconds)"
    )
    done = subprocess.run([sys.executable, "-c", code, FORKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.25


def test_the_code_of_every_peer_is_valid_and_every_target_is_used():
    found = [*speed.works(10)]
    for work in found:
        if work.command[1] == "-c":
            compile(work.command[2], work.tool, "exec")
    assert {work.target for work in found} - {""} == set(speed.TARGETS)


def test_the_files_that_check_gets_are_right(cli, tmp_path):
    for number in (0, 9):
        (tmp_path / f"{number}.bertscope.yaml").write_text(speed.expectation(30522 + number))
    assert cli("check", tmp_path).code == 0


def test_the_page_shows_the_tables_of_its_file():
    found = json.loads((ROOT / "docs" / "speed.json").read_text())
    page = (ROOT / "docs" / "speed.md").read_text()
    assert page.endswith(f"## Result\n\n{speed.rendered(found, 'markdown')}\n")
