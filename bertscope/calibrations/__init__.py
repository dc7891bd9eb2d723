"""The calibrations in the user's folder, and those in this folder, which the project ships: JSON of `profile --save`.

A file is read like any other from outside: its size is bounded, its types and the signs of its numbers are checked.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bertscope.errors import SelectionError, SourceError
from bertscope.files import read_text
from bertscope.frozen import Record
from bertscope.gpus import Gpu, find_device
from bertscope.reports.json import from_json
from bertscope.reports.tool import CalibrationReport

SHIPPED = Path(__file__).parent
_MOST_FILES = 100
_LARGEST = 2**60  # bytes, FLOP/s: no GPU has more


class Calibration(Record, kw_only=False):
    """A calibration, and if it is in the user's folder."""

    report: CalibrationReport
    is_own: bool = False

    @property
    def text(self) -> str:
        """Return where the numbers come from, with the GPU, the versions and the date."""
        machine = self.report.machine
        rest = f"{machine.date} (driver {machine.driver or 'unknown'}, torch {machine.torch_version})"
        if self.is_own:
            return f"calibrated on this machine, {rest}"
        return f"calibration of {machine.gpu}, {rest}"

    def on(self, gpu: Gpu | None) -> Gpu:
        """Return the GPU with the measured memory and context."""
        machine = self.report.machine
        gpu = gpu or Gpu(name=gpu_name(machine.gpu), memory_bytes=0, source="")
        low, high = self.report.context_bytes or (gpu.context_low_bytes, gpu.context_high_bytes)
        gpu = replace(gpu, source=self.text, context_source=self.text, calibration=self.text)
        return replace(gpu, memory_bytes=machine.memory_bytes, context_low_bytes=low, context_high_bytes=high)


def user_folder() -> Path:
    """Return the folder of the user's calibrations, which may not exist: XDG_DATA_HOME, on Windows LOCALAPPDATA."""
    variable = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_DATA_HOME", "")
    data = Path(variable) if os.path.isabs(variable) else Path(os.path.expanduser("~"), ".local", "share")
    return data / "bertscope" / "calibrations"


def gpu_name(gpu: str) -> str:
    """Return a GPU's name as a file is named: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower(), flags=re.ASCII).strip("-")[:80] or "gpu"


def read_calibration(path: Path) -> CalibrationReport:
    """Return the calibration in a file; raise SourceError for anything else."""
    text, report = "", None
    try:
        text = read_text(path)
        report = from_json(text)
    except SourceError as error:
        if isinstance(error.__cause__, OSError):
            raise
        if '"kind": "calibration"' in text[:100]:
            raise error.at(str(path)) from None
    if not isinstance(report, CalibrationReport):
        what = "what 'bertscope profile --device cuda --save FILE' writes"
        raise SourceError(f"{path} is not a calibration, which is {what}; give such a file")
    numbers: list[float] = []
    for step in report.steps:
        numbers += [value for value in vars(step).values() if isinstance(value, (int, float))] + [*step.step_seconds]
        if step.work is not None:
            numbers += [step.work.moved_bytes, step.work.calls, *step.work.matmul_flops.values()]
    above_zero = report.machine.memory_bytes, *report.rates.values()
    if not all(0 <= number <= _LARGEST for number in numbers) or not all(0 < rate <= _LARGEST for rate in above_zero):
        raise SourceError(f"{path} has a number that no GPU has; measure again with 'bertscope profile --save FILE'")
    return report


def with_saved(report: CalibrationReport, path: Path) -> CalibrationReport:
    """Return a calibration with what its file has already of the same GPU and versions; any other file is replaced."""
    try:
        return report.after(read_calibration(path)) if path.is_file() else report
    except SourceError:
        return report


def calibrations() -> Iterator[Calibration]:
    """Yield the calibrations, first from the user's folder; other files there are passed over."""
    for folder, is_own in ((user_folder(), True), (SHIPPED, False)):
        files: list[Path] = []
        with suppress(OSError):
            files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
        for path in files[:_MOST_FILES]:
            with suppress(SourceError):
                yield Calibration(read_calibration(path), is_own)


def calibration_of(gpu: Gpu) -> Calibration | None:
    """Return the calibration of a GPU of the table."""
    return next((item for item in calibrations() if _gpu(item) == gpu.name), None)


def calibration_in(path: str, gpu: str | None) -> Calibration:
    """Return the calibration in a file; raise SourceError for another file, SelectionError for another GPU's."""
    calibration = Calibration(read_calibration(Path(path)))
    if gpu is not None and (calibrated := _gpu(calibration)) != gpu:
        raise SelectionError(f"{path} is a calibration of {calibrated}, not of {gpu}; give that GPU or another file")
    return calibration


def _gpu(calibration: Calibration) -> str:
    machine = calibration.report.machine
    gpu = find_device(machine.gpu, machine.memory_bytes)
    return gpu.name if gpu else gpu_name(machine.gpu)


def calibration_here(gpu: str, memory_bytes: int) -> Calibration | None:
    """Return the calibration of the GPU of this machine, by the name and the memory that torch gives."""
    for item in calibrations():
        machine = item.report.machine
        if machine.gpu == gpu and math.isclose(machine.memory_bytes, memory_bytes, rel_tol=0.01):
            return item
    return None


def gpu_of(calibration: Calibration) -> Gpu:
    """Return the GPU of a calibration, with what the table has of it."""
    machine = calibration.report.machine
    return calibration.on(find_device(machine.gpu, machine.memory_bytes))
