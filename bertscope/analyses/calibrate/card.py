"""The card of a calibration: all calls of torch.cuda, and what nvidia-smi and the driver say. A test replaces it."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import bertscope
from bertscope.errors import SelectionError, one_line
from bertscope.reports.calibration import Machine
from bertscope.torch_access import torch

_SMI_SECONDS = 20
_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}


class Card:
    """The first CUDA device; the first call creates the context."""

    device = "cuda"

    def start(self) -> None:
        """Create the context; raise SelectionError without a device, with torch's reason."""
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # torch without CUDA; no device, or a driver that is too old
            reason = one_line(str(error), limit=200)
            raise SelectionError(f"torch finds no CUDA device here; calibrate measures one ({reason})") from None
        torch.empty(1, device=self.device)
        self.synchronize()

    def machine(self) -> Machine:
        """Return the card, its driver and the versions."""
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Machine(
            card=card.name,
            memory_bytes=card.total_memory,
            capability=(card.major, card.minor),
            driver=driver_version(),
            torch_version=str(torch.__version__),
            cuda_version=str(torch.version.cuda or torch.version.hip or ""),
            python_version=platform.python_version(),
            bertscope_version=bertscope.__version__,
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        )

    def free_bytes(self) -> int:
        """Return the memory of the device that is free, as the driver says."""
        return int(torch.cuda.mem_get_info()[0])

    def allocated_bytes(self) -> int:
        """Return the bytes that the allocator has handed out."""
        return int(torch.cuda.memory_allocated())

    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator has taken from the driver."""
        return int(torch.cuda.memory_reserved())

    def peaks(self) -> tuple[int, int]:
        """Return the highest allocated and reserved bytes since the last reset."""
        return int(torch.cuda.max_memory_allocated()), int(torch.cuda.max_memory_reserved())

    def reset_peaks(self) -> None:
        """Reset both peaks to what is allocated and reserved now."""
        torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize()

    def forget_build(self) -> None:
        """Return the memory that the build of a model freed to the driver, and reset the peaks.

        The build makes the weight of the head before it is tied. An estimate has the parameters only, as a run that
        moves its model to the device.
        """
        torch.cuda.empty_cache()
        self.reset_peaks()

    def limit(self, limit_bytes: int, memory_bytes: int) -> None:
        """Limit what the allocator may reserve.

        torch truncates fraction * memory to bytes: half a byte more keeps a quotient that was rounded down from taking
        away the last byte, and with it a whole segment.
        """
        torch.cuda.set_per_process_memory_fraction(min((limit_bytes + 0.5) / memory_bytes, 1.0))

    def smi_bytes(self) -> int | None:
        """Return the memory that nvidia-smi shows for this process; None if it does not list it."""
        lines = _smi("--query-compute-apps=pid,used_memory").splitlines()
        own = [line.partition(",")[2] for line in lines if line.partition(",")[0].strip() == str(os.getpid())]
        with suppress(ValueError):  # [N/A] on some systems
            return sum(int(size) * 2**20 for size in own) if own else None
        return None


@contextmanager
def hidden_card() -> Iterator[None]:
    """Have torch find no CUDA device, so that an estimate in this process does not create the context.

    The optimizers of torch 2.15, also without CUDA tensors, ask the stream of the device if a graph captures it.
    """
    found = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = found


def this_card() -> tuple[str, int] | None:
    """Return the name and the memory of the first CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return card.name, card.total_memory


def driver_version() -> str:
    """Return the version of the driver by nvidia-smi or by the kernel module; empty if none tells it."""
    for line in _smi("--query-gpu=driver_version").splitlines():
        return line.strip()[:40]
    with suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text()[:1000].split()
        return next((word for word in words if "." in word and set(word) <= set("0123456789.")), "")[:40]
    return ""


def _smi(query: str) -> str:
    """Return what nvidia-smi answers; nothing if there is none or if it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)  # noqa: S603
        return done.stdout if done.returncode == 0 else ""
    return ""


def chosen_kernel(name: str) -> AbstractContextManager[Any]:
    """Have torch use one kernel of fused attention; empty: its own choice."""
    if not name:
        return nullcontext()
    attention: Any = torch.nn.attention
    chosen: AbstractContextManager[Any] = attention.sdpa_kernel([getattr(attention.SDPBackend, _BACKENDS[name])])
    return chosen
