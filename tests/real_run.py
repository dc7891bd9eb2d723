"""python tests/real_run.py STEPS SCRIPT [ARGUMENTS]: a script really, on the CPU, and the memory of its process.

The witness of a dry run: torch's profiler sees each allocation of the process, and nothing of bertscope runs. Prints a
line of JSON: for each optimizer step the highest bytes since the one before and the bytes after it, and the highest
bytes after the last step.
"""

import contextlib
import json
import os
import runpy
import sys

import torch
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "the end of step "


class Stop(BaseException):
    """The end of the script."""


def main() -> None:
    steps, sys.argv = int(sys.argv[1]), sys.argv[2:]
    first, done = [], []

    def stepped(optimizer, *_):
        first[:] = first or [optimizer]
        if optimizer is first[0]:
            done.append(0)
            with record_function(f"{_MARK}{len(done)}"):
                pass
            if len(done) > steps:
                raise Stop

    register_optimizer_step_post_hook(stepped)
    torch.save = lambda *_, **__: None
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, contextlib.suppress(Stop):
        runpy.run_path(sys.argv[0], run_name="__main__")
    live = peak = 0
    found = []
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith(_MARK):
            found.append((peak, live))
            peak = live
        elif event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            live += event.nbytes()
            peak = max(peak, live)
    print("\nREAL", json.dumps({"steps": found, "after": peak}), flush=True)
    os._exit(0)


main()
