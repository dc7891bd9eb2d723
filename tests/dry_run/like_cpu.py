"""python -m tests.dry_run.like_cpu STEPS SCRIPT [ARGUMENTS]: a dry run with the kernels of a CPU, as tests/real_run.py.

Prints the same line of JSON as the real run, in which the host's tensors count too; the highest bytes after the last
step are over all batches of its evaluation.

What the script asks for only where there is a GPU has to be off in both runs: transformers' Trainer trains in fp32 on a
CPU though `fp16=True` is set, and TRL starts Triton's kernels on a GPU.
"""

import json
import os
import runpy
import sys
from contextlib import suppress

import torch

from bertscope.dry_run.limits import Stop
from bertscope.dry_run.recording import Recording
from tests.dry_run.cpu_device import installed_cpu


def peaks(run, steps, name="program"):
    """Return what `tests.real_run.peaks` returns, of a dry run."""
    with installed_cpu(name, steps) as here:
        log, ends = here.recorder.log, []
        here.recorder.on_update.insert(0, lambda _: ends.append(len(log.events)))
        with suppress(Stop, StopIteration):
            run()
        here.recorder.close()
        found = Recording(log, "cpu", limits=here.limits)
    steps_found = [
        (max(found.live[max(begun - 1, 0) : end]), found.live[end - 1])
        for begun, end in zip([0, *ends], ends, strict=False)
    ]
    return {"steps": steps_found, "after": max(found.live[ends[-1] - 1 :])}


if __name__ == "__main__":
    steps, sys.argv = int(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    found = peaks(lambda: runpy.run_path(sys.argv[0], run_name="__main__"), steps, sys.argv[0])
    print("\nDRY", json.dumps(found), flush=True)
    os._exit(0)
