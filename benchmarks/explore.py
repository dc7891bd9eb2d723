"""The response time of `explore` to a key, and its start-up time next to `bertscope tree`; needs the extra 'explore'.

    python benchmarks/explore.py [--model bert-large-zh] [--unfold] [--runs N]

The script runs `explore` in a pseudo-terminal of 80 x 24. The response time is from writing a key to the first bytes
of the answer, both while `explore` computes FLOPs and memory and afterwards. The start-up time is from the command to
the first screen; next to it is the time of the whole process of `tree`, which reads the same data. Linux and macOS.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import time

BERTSCOPE = [sys.executable, "-m", "bertscope"]
KEYS = {"down": b"\x1b[B", "up": b"\x1b[A", "params": b"p", "FLOPs": b"f", "order": b"o", "all": b"x"}
PAUSE_SECONDS = 0.12  # between keys, to separate the answers


class Terminal:
    """A pseudo-terminal that runs the command."""

    def __init__(self, command: list[str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.started = time.perf_counter()
        environment = os.environ | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)  # noqa: S603  our command
        os.close(slave)
        self.got = b""

    def read(self, seconds: float) -> None:
        """Read the output of that many seconds."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.got += os.read(self.master, 65536)

    def answer_seconds(self, key: bytes) -> float:
        """Return the seconds from a key to the first output."""
        self.read(PAUSE_SECONDS)
        start = time.perf_counter()
        os.write(self.master, key)
        select.select([self.master], [], [], 10)
        return time.perf_counter() - start


def explored(command: list[str]) -> tuple[float, dict[str, list[tuple[float, str]]]]:
    """Return the seconds until the first screen, and the response times of all keys while it loads and afterwards."""
    terminal = Terminal(command)
    while b"computing" not in terminal.got:
        terminal.read(0.01)
    drawn = time.perf_counter() - terminal.started
    times: dict[str, list[tuple[float, str]]] = {"loading": [], "loaded": []}
    while len(times["loaded"]) < 4 * len(KEYS):
        for name, key in KEYS.items():
            when = "loaded" if b"unique" in terminal.got else "loading"
            times[when].append((terminal.answer_seconds(key), name))
    os.write(terminal.master, b"q")
    terminal.process.wait(timeout=30)
    return drawn, times


def main() -> None:
    """Print medians and the slowest key."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large-zh")
    parser.add_argument("--unfold", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    same = [arguments.model, *(["--unfold"] if arguments.unfold else [])]
    trees, starts, keys = [], [], {"loading": [], "loaded": []}
    for _ in range(arguments.runs):  # interleaved, so that a drifting machine hits both
        start = time.perf_counter()
        subprocess.run([*BERTSCOPE, "tree", *same], check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our command
        trees.append(time.perf_counter() - start)
        drawn, times = explored([*BERTSCOPE, "explore", *same, "--batch", "8", "--seq", "512"])
        starts.append(drawn)
        for when, found in times.items():
            keys[when] += found
    tree, first = statistics.median(trees), statistics.median(starts)
    print(
        f"first picture after {first:.2f} s; tree takes {tree:.2f} s: {first - tree:+.2f} s, ratio {first / tree:.2f}"
    )
    for when, found in keys.items():
        slowest, name = max(found)
        median = statistics.median(seconds for seconds, _ in found)
        print(f"{when:8} {1000 * median:4.0f} ms a key in the median, {1000 * slowest:.0f} ms the slowest ({name})")


if __name__ == "__main__":
    main()
