"""Fuzzing: hostile files and words for every reader, ranks with faults, and signals at any moment.

    python benchmarks/fuzz.py --runs 10000 --signals 300 --seed 7

The script damages good inputs of `tests/corpus.py` at random (bytes, values, structure, lengths) and runs a command on
each, in this process. `tests/fuzzing.py` defines the failures: code that runs, a changed file of the user, an uncaught
exception, an exit code other than 0 (the damage had no effect), 1 (the answer is no), 2 or, of a measurement, 3, more
than one line on stderr with 2, unprintable text, more than 10 s of CPU time or 1 GiB of memory for one input, a
remaining child process, a partial file, a port that is open to the network. With --signals it then sends signals to
other processes that run commands: they must end as documented and leave no process, temporary folder or partial file.
`tests/test_fuzz.py` is a short run of the same with a fixed seed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.child_server import forking, loaded
from tests.conftest import ROOT, default_signals
from tests.corpus import EXPECTED, TINY, Kind, cases, kinds, prepared
from tests.fuzzing import descendants, judged, listening, remaining

COMMANDS = (
    "count small.json --format json -o out.json", "estimate small.json --batch 1 --seq 8",
    "sweep grid.yaml -o rows.jsonl --workers 2",
    "fit small.json --seq 8 --budget 9MiB --format json -o out.json", "check mine.bertscope.yaml",
    f"report {TINY} --no-fit -o page.html", f"profile {TINY} --steps 1 --format json -o out.json",
    f"profile {TINY.replace('batch 1', 'batch 2')} --steps 1 --nproc 2 --strategy fsdp --format json -o out.json",
)  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)  # SIGKILL: to a child
END_SECONDS = 120  # a busy machine needs that
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Run and print a summary; return 1 if an input or a signal failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--signals", type=int, default=0)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--only", nargs="*", metavar="KIND", help="inputs of these kinds only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, forking():
        folder = Path(name).resolve()
        failures = inputs(options.runs, options.seed, folder, options.only)
        failures += signals(options.signals, options.seed, folder)
    return int(failures > 0)


def inputs(runs: int, seed: int, folder: Path, only: Sequence[str] | None) -> int:
    """Run commands with damaged inputs, the kinds in turn; return the number of failures."""
    loaded("")  # the server of children, which is no child of a command
    codes: Counter[tuple[str, int]] = Counter()
    failures, slowest, largest = 0, 0.0, 0
    made = {kind: row for kind, row in kinds().items() if not only or kind in only}
    homes = {kind: prepared(row, folder / kind) for kind, row in made.items()}
    streams = {kind: cases(kind, row, seed, homes[kind]) for kind, row in made.items()}
    for kind in islice(_turns(made), runs):
        arguments = next(streams[kind])
        path = homes[kind] / made[kind].name
        content = path.read_bytes() if made[kind].name else b""
        verdict = judged(list(arguments), homes[kind])
        codes[kind, verdict.code] += 1
        slowest, largest = max(slowest, verdict.seconds), max(largest, verdict.grown)
        if verdict.faults:
            failures += 1
            kept = Path(tempfile.gettempdir()) / f"bertscope-fuzz-{seed}-{failures}-{path.name if content else 'word'}"
            kept.write_bytes(content)
            words = "; ".join(verdict.faults)
            print(f"FAILED {kind}: {words}; {arguments!a}, kept as {kept}\n{verdict.err[-1500:]!a}", flush=True)
    for kind in made:
        told = ", ".join(f"exit {code}: {count}" for (which, code), count in sorted(codes.items()) if which == kind)
        print(f"{kind:14s}{told}")
    print(
        f"{sum(codes.values())} runs, {failures} failures, slowest {slowest:.2f} s, "
        f"most memory {largest / 2**20:.0f} MiB more than before"
    )
    return failures


def _turns(made: dict[str, Kind]) -> Iterator[str]:
    for number in count():
        yield from (kind for kind, row in made.items() if number % row.rounds == 0)


# ---- signals ----


def signals(number: int, seed: int, folder: Path) -> int:
    """Send signals to commands at random moments, and print what happened; return the number of failures."""
    if not number:
        return 0
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a child whose parent has ended becomes one of this process
    source = random.Random(seed)  # noqa: S311 no secret
    durations: dict[str, float] = {}
    codes: Counter[tuple[str, int]] = Counter()
    failures = 0
    for turn, command in zip(range(number), cycle(COMMANDS), strict=False):
        home = prepared(Kind(name="tmp/x"), folder / f"signal-{turn}")
        (home / "mine.bertscope.yaml").write_text(EXPECTED)
        if command not in durations:
            began = time.monotonic()
            _ended(_started(command, home))
            durations[command] = time.monotonic() - began
            home = prepared(Kind(name="tmp/x"), folder / f"signal-{turn}-again")
            (home / "mine.bertscope.yaml").write_text(EXPECTED)
        chosen, moment = source.choice(SIGNALS), source.uniform(0, 1.1 * durations[command])
        code, faults = _disturbed(command, home, chosen, moment)
        codes[chosen.name, code] += 1
        if faults:
            failures += 1
            print(f"FAILED {chosen.name} after {moment:.2f} of {durations[command]:.2f} s: {command}\n"
                  f"  {'; '.join(faults)}", flush=True)  # fmt: skip
    for chosen in SIGNALS:
        told = sorted((code, times) for (name, code), times in codes.items() if name == chosen.name)
        print(f"{chosen.name:10s}{', '.join(f'exit {code}: {times}' for code, times in told)}")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
    print(f"{number} signals, {failures} failures")
    return failures


def _started(command: str, home: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(  # noqa: S603 words of this file
        [sys.executable, "-m", "bertscope", *command.split()], cwd=home, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals,
    )  # fmt: skip


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", "it did not end"


def _disturbed(command: str, home: Path, chosen: signal.Signals, moment: float) -> tuple[int, list[str]]:
    """Return the exit code of a command that a signal has disturbed, and its faults."""
    before = descendants()
    process = _started(command, home)
    while process.poll() is None and not _catches(process.pid):
        time.sleep(0.005)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=moment)
    open_ports = listening(descendants(str(process.pid)))
    killed = sorted(descendants(str(process.pid))) if chosen == signal.SIGKILL else [process.pid]
    if process.poll() is None and killed:
        with suppress(ProcessLookupError):
            os.kill(int(killed[int(moment * 1000) % len(killed)]), chosen)
    out, err = _ended(process)
    code = process.returncode
    left = remaining(before)
    for pid in left:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)
    expected = {0, 1, 3} if chosen == signal.SIGKILL else {0, 1, 128 + chosen}
    faults = [
        *([f"exit code {code}: {err[-500:]!a}"] if code not in expected else []),
        *([f"a traceback: {err[-500:]!a}"] if "Traceback" in out + err else []),
        *([f"processes are left: {left}"] if left else []),
        *([f"it listens to the network: {open_ports}"] if open_ports else []),
        *([f"left in TMPDIR: {names}"] if (names := [path.name for path in (home / "tmp").iterdir()]) else []),
        *_partial(home),
    ]
    return code, faults


def _catches(pid: int) -> bool:
    """Return True when a process has a function for SIGTERM: earlier it is not the program that ends."""
    text = Path(f"/proc/{pid}/status").read_text()
    return bool(int(text.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def _partial(home: Path) -> Iterator[str]:
    """Yield the names of files that are not whole; a last row may be cut, since the next sweep computes it again."""
    known = {"grid.yaml", "small.json", "good.yaml", "own.py", "notes.txt", "evil.py", "mine.bertscope.yaml", "tmp"}
    for path in home.iterdir():
        if path.name in known:
            continue
        text = path.read_text()
        try:
            if path.name == "out.json":
                json.loads(text)
            elif path.name == "rows.jsonl":
                _ = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            elif path.name != "page.html" or not text.rstrip().endswith("</html>"):
                yield f"{path.name} is left"
        except ValueError:
            yield f"{path.name} is not whole"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
