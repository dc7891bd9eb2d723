"""A card, processes and a calibration for tests on a machine without CUDA."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from bertscope.analyses.calibrate import worker
from bertscope.analyses.calibrate.session import planned_report
from bertscope.reports.calibration import (
    CONTEXT,
    COPY,
    MEASURED,
    RATES,
    STEP,
    WORKSPACES,
    CalibrationPoint,
    CalibrationReport,
    CalibrationRow,
    CardWork,
    Machine,
)

MIB = 2**20
H200 = Machine(
    card="NVIDIA H200", memory_bytes=143771 * MIB, capability=(9, 0), driver="580.1", torch_version="2.11.0",
    cuda_version="13.0", python_version="3.12.1", bertscope_version="0.1.0", date="2026-11-22",
)  # fmt: skip


class FakeCard:
    """A card whose steps run on the CPU and whose sizes are given."""

    device = "cpu"

    def __init__(self, machine: Machine = H200) -> None:
        self._machine, self.limited = machine, 0
        self.free, self.used = 1000 * MIB, 0
        self.forgot_builds = 0

    def start(self) -> None:
        self.free -= 400 * MIB  # the context

    def machine(self) -> Machine:
        return self._machine

    def free_bytes(self) -> int:
        return self.free - self.reserved_bytes()

    def allocated_bytes(self) -> int:
        return 64 * MIB

    def reserved_bytes(self) -> int:
        return 100 * MIB

    def peaks(self) -> tuple[int, int]:
        return 64 * MIB, 100 * MIB

    def reset_peaks(self) -> None: ...

    def forget_build(self) -> None:
        self.forgot_builds += 1

    def synchronize(self) -> None: ...

    def limit(self, limit_bytes: int, memory_bytes: int) -> None:
        self.limited = limit_bytes

    def smi_bytes(self) -> int | None:
        return 500 * MIB


class FakeProcess:
    """A process that is a thread: `work(read, say)` gets the lines of the parent and answers."""

    def __init__(self, work) -> None:
        (stdin, to_stdin), (stdout, to_stdout), (stderr, to_stderr) = (os.pipe() for _ in range(3))
        self.stdin = os.fdopen(to_stdin, "wb", 0)
        self.stdout, self.stderr = (os.fdopen(number, "rb") for number in (stdout, stderr))
        self.returncode, self.killed = None, False
        lines, self._ends = os.fdopen(stdin, "rb"), [to_stdout, to_stderr]

        def say(kind, content) -> None:
            os.write(to_stdout, worker.json.dumps([kind, content], default=vars).encode() + b"\n")

        def live() -> None:
            try:
                work(lines.readline, say)
            except OSError:  # nobody reads any more
                pass
            finally:
                lines.close()
                self._end(1)

        self.thread = threading.Thread(target=live, daemon=True)
        self.thread.start()

    def _end(self, code: int) -> None:
        self.returncode = code if self.returncode is None else self.returncode
        while self._ends:
            os.close(self._ends.pop())

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode

    def kill_group(self) -> None:
        self.killed = True
        self.returncode = -9 if self.returncode is None else self.returncode


def calibration(machine: Machine = H200) -> CalibrationReport:
    """A complete calibration with round numbers: products at 100 TFLOP/s in fp32 and 500 in bf16, 1 TB/s."""
    rows = []
    for row in planned_report().rows:
        point, result = row.point, {}
        if point.kind == CONTEXT:
            result = {"context_bytes": 400 * MIB}
        elif point.kind == WORKSPACES:
            result = {"workspace_forward_bytes": 33 * MIB, "workspace_backward_bytes": 34 * MIB,
                      "workspaces": {"cuBLAS forward": 33 * MIB, "cuBLAS backward": 34 * MIB}}  # fmt: skip
        elif point.kind == RATES:
            result = {"rates": {"fp32": 100e12, "tf32": 200e12, "fp16": 500e12, "bf16": 500e12, COPY: 1e12}}
        elif point.kind == STEP:
            dtype = "fp32" if point.precision == "tf32" else point.precision
            work = CardWork(matmul_flops={dtype: point.batch * point.seq * 10**9}, moved_bytes=10**9, calls=100)
            result = {"context_bytes": 500 * MIB + point.batch * MIB, "work": work, "step_seconds": (1.0,),
                      "estimated_allocated_bytes": 101, "allocated_bytes": 100,
                      "estimated_reserved_bytes": 190, "reserved_bytes": 200}  # fmt: skip
        else:
            result = {"batch": 7 + point.more, "ran": point.more == 0}
        rows.append(replace(row, outcome=MEASURED, **result))
    return CalibrationReport(machine=machine, rows=tuple(rows))


def row(point: CalibrationPoint, **result) -> CalibrationRow:
    return CalibrationRow(point=point, outcome=MEASURED, **result)
