"""A point function that computes nothing, for the laws of engines and files; and the command with it.

It appends the batch of each point to the file LOG, and kills its process at the batches in DEADLY, at the first time
or always. Nothing here imports torch.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from bertscope.analyses.sweep import pool
from bertscope.reports.memory import SweepRow
from bertscope.reports.step import Parts, PhasePeak, StepCost

FUNCTIONS = pool.Functions(f"{__name__ if __name__ != '__main__' else 'tests.analyses.sweep.fake_points'}:compute",
                    "tests.analyses.sweep.fake_points:load")  # fmt: skip


def load() -> None:
    """Import nothing."""


def compute(text: str) -> str:
    """Return a row whose peak is the batch."""
    data = json.loads(text)
    batch = data["point"]["batch"]
    log = Path(os.environ["LOG"])
    known = log.read_text().split() if log.exists() else []
    with log.open("a") as file:
        file.write(f"{batch}\n")
    time.sleep(float(os.environ.get("SECONDS", "0")))
    once, always = os.environ.get("DEADLY", ":").split(":")
    if str(batch) in always.split() or (str(batch) in once.split() and str(batch) not in known):
        os.kill(os.getpid(), signal.SIGKILL)
    peak = PhasePeak(phase="forward", peak_bytes=batch, path="", operator="", parts=Parts(inputs=batch))
    cost = StepCost(peak=peak)
    row = SweepRow(key=data["key"], point=data["point"], versions=data["versions"], cost=cost)
    return row.to_line()


if __name__ == "__main__":
    from bertscope import cli
    from bertscope.commands import exit_codes

    pool.local_rows = partial(pool.local_rows, functions=FUNCTIONS)
    Path(os.environ["PID"]).write_text(str(os.getpid()))
    sys.argv[0] = "bertscope"
    exit_codes.run(cli._run)
