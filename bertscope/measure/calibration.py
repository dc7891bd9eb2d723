"""The card of this machine, and what a calibration needs to know of it: versions, and two rates."""

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import bertscope
from bertscope.errors import UnknownValueError
from bertscope.measure.profile_job import Job, Say
from bertscope.memory.step_time import step_work
from bertscope.reports.calibration import COPY, Machine
from bertscope.torch_access import this_card, torch
from bertscope.units import PRECISIONS

_SMI_SECONDS = 20
_SIDE = 8192  # of the largest matrices: 256 MiB in fp32
_COPIED_BYTES = 2**30
_REPEATS = 10


def measure_card(job: Job, device: str, send: Say) -> None:
    """Send the card, the work of the job's step, and the rates of a large matrix product and of a large copy.

    A step of several precisions has a product for each. The tensors use at most a quarter of the free memory.
    """
    name, memory_bytes = this_card() or ("", 0)
    send("card", Machine(
        card=name, memory_bytes=memory_bytes, driver=_driver_version(), torch_version=str(torch.__version__),
        bertscope_version=bertscope.__version__, date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    ))  # fmt: skip
    names = {job.run_config.compute_precision}
    with suppress(UnknownValueError):  # its operators depend on values: no time follows from this step
        work = step_work(job.source, job.run_config)
        send("work", work)
        names |= work.matmul_flops.keys()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if job.memory_limit_bytes is not None:
        free = min(free, job.memory_limit_bytes - torch.cuda.memory_reserved())
    side = max(min(_SIDE, int((max(free, 0) / 64) ** 0.5) // 128 * 128), 128)
    rates = {name: _product_rate(side, name, device) for name in sorted(names & PRECISIONS.keys())}
    size = min(_COPIED_BYTES, max(free // 8, 1))
    given, copied = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))
    send("rates", {**rates, COPY: 2 * size / _seconds(partial(copied.copy_, given))})


def _driver_version() -> str:
    """Return the version of the driver by nvidia-smi or by the kernel module; empty if none tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)  # noqa: S603
        return done.stdout.partition("\n")[0].strip()[:40]
    with suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text()[:1000].split()
        return next((word for word in words if "." in word and set(word) <= set("0123456789.")), "")[:40]
    return ""


def _product_rate(side: int, precision: str, device: str) -> float:
    dtype = getattr(torch, PRECISIONS[precision].torch_name)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        return 2 * side**3 / _seconds(partial(torch.matmul, one, other))


def _seconds(call: Callable[[], Any]) -> float:
    """Return the time of one of several calls, after some that are not counted."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / _REPEATS
