"""python tests/real_run.py STEPS SCRIPT [ARGUMENTS]: a script really, on the CPU, and the memory of its process.

The witness of a dry run: torch's profiler sees each allocation of the process, and nothing of bertscope runs. Prints a
line of JSON, what `peaks` returns.
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

_MARK = "the end of a step"
# What oneDNN's convolutions and batch norm allocate and free while they run is left out; their results count.
_WITH_SCRATCH = tuple(f"aten::{name}" for name in (
    "convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward",
))  # fmt: skip


class Stop(BaseException):
    """The end of the script."""


def peaks(run, steps):
    """Return for each optimizer step the highest bytes since the one before and those after it, and the last highest.

    The run ends after one more step than `steps`.
    """
    first, done = [], []

    def stepped(optimizer, *_):
        first[:] = first or [optimizer]
        if optimizer is first[0]:
            done.append(0)
            with record_function(_MARK):
                pass
            if len(done) > steps:
                raise Stop

    hook = register_optimizer_step_post_hook(stepped)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, contextlib.suppress(Stop):
        run()
    hook.remove()
    live = peak = inside = 0
    found = []
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _MARK:
            found.append((peak, live))
            peak = live
        elif event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            if event.start_ns() >= inside:
                peak = max(peak, live, live + event.nbytes())
            live += event.nbytes()
        elif event.name() in _WITH_SCRATCH:
            inside = event.start_ns() + event.duration_ns()
    return {"steps": found, "after": peak}


if __name__ == "__main__":
    steps, sys.argv = int(sys.argv[1]), sys.argv[2:]
    torch.save = lambda *_, **__: None
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    torch.set_num_threads(1)
    found = peaks(lambda: runpy.run_path(sys.argv[0], run_name="__main__"), steps)
    print("\nREAL", json.dumps(found), flush=True)
    os._exit(0)
