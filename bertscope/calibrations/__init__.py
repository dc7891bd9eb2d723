"""The calibrations that `calibrate` stored for the user, and those in this folder, which the project ships, as JSON.

A file is read like any other from outside: its size is bounded, its types and the signs of its numbers are checked.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertscope.errors import SourceError
from bertscope.frozen import dataclass
from bertscope.gpus import Gpu, find_device
from bertscope.reports.calibration import CalibrationReport
from bertscope.reports.json import from_json
from bertscope.text_files import read_text

SHIPPED = Path(__file__).parent
_UNFINISHED = ".part.json"
_MOST_FILES = 100
_LARGEST = 2**60  # bytes, FLOP/s: no card has more


@dataclass(frozen=True)
class Calibration:
    """A complete calibration, its file, and if `calibrate` stored it for this user."""

    report: CalibrationReport
    path: Path
    is_own: bool

    @property
    def text(self) -> str:
        """Return where the numbers come from, with the card, the versions and the date."""
        machine = self.report.machine
        assert machine is not None  # noqa: S101 a complete one has a machine
        rest = f"{machine.date} (driver {machine.driver or 'unknown'}, torch {machine.torch_version})"
        if self.is_own:
            return f"calibrated on this machine, {rest}"
        return f"calibration of {machine.card}, {rest}"

    def on(self, card: Gpu | None) -> Gpu:
        """Return the card with the measured memory, context and workspaces."""
        machine, workspaces = self.report.machine, self.report.workspace_bytes
        assert machine is not None  # noqa: S101 as above
        card = card or Gpu(name=card_name(machine.card), memory_bytes=0, source="")
        low, high = self.report.context_bytes or (card.context_low_bytes, card.context_high_bytes)
        forward, backward = workspaces or (0, 0)
        return replace(
            card, memory_bytes=machine.memory_bytes, source=self.text, context_low_bytes=low, context_high_bytes=high,
            context_source=self.text, workspace_forward_bytes=forward, workspace_backward_bytes=backward,
            calibration=self.text,
        )  # fmt: skip


def user_folder() -> Path:
    """Return the folder of the user's calibrations, which may not exist: XDG_DATA_HOME, on Windows LOCALAPPDATA."""
    given = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_DATA_HOME", "")
    data = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".local", "share")
    return data / "bertscope" / "calibrations"


def card_name(card: str) -> str:
    """Return the name of a card as a file is named: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower(), flags=re.ASCII).strip("-")[:80] or "card"


def paths_for(card: str) -> tuple[Path, Path]:
    """Return the files of a card in the user's folder: of its calibration, and of one that is not complete."""
    folder, name = user_folder(), card_name(card)
    return folder / f"{name}.json", folder / f"{name}{_UNFINISHED}"


def read_calibration(path: Path) -> CalibrationReport:
    """Return the calibration in a file; raise SourceError for anything else."""
    report = from_json(read_text(path))
    if not isinstance(report, CalibrationReport):
        raise SourceError(f"{path} is a report of {report.kind}, and not of calibrate")
    for row in report.rows:
        numbers = [value for value in vars(row).values() if isinstance(value, (int, float))]
        numbers += [*row.workspaces.values(), *row.step_seconds]
        rates = [*row.rates.values()]
        if row.work is not None:
            numbers += [row.work.moved_bytes, row.work.calls, *row.work.matmul_flops.values()]
        if not all(0 <= number <= _LARGEST for number in numbers) or not all(0 < rate <= _LARGEST for rate in rates):
            raise SourceError(f"{path}: {row.name[:80]} has a number that no card has; run 'bertscope calibrate' again")
    return report


def calibrations() -> Iterator[Calibration]:
    """Yield the complete calibrations, those of the user first; a file that is none is passed over."""
    for folder, is_own in ((user_folder(), True), (SHIPPED, False)):
        for path in _files(folder):
            report = _read(path)
            if report is not None and report.is_complete:
                yield Calibration(report, path, is_own)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")[:_MOST_FILES]
    except OSError:
        return []


def _read(path: Path) -> CalibrationReport | None:
    try:
        return None if path.name.endswith(_UNFINISHED) else read_calibration(path)
    except SourceError:
        return None


def calibration_of(card: Gpu) -> Calibration | None:
    """Return the calibration of a GPU of the table."""
    return next((item for item in calibrations() if _gpu(item) == card.name), None)


def _gpu(calibration: Calibration) -> str:
    machine: Any = calibration.report.machine
    found = find_device(machine.card, machine.memory_bytes)
    return found.name if found else card_name(machine.card)


def calibration_here(card: str, memory_bytes: int) -> Calibration | None:
    """Return the calibration of the card of this machine, by the name and the memory that torch gives."""
    for item in calibrations():
        machine = item.report.machine
        if (
            machine is not None
            and machine.card == card
            and math.isclose(machine.memory_bytes, memory_bytes, rel_tol=0.01)
        ):
            return item
    return None


def card_of(calibration: Calibration) -> Gpu:
    """Return the card of a calibration, with what the table has of it."""
    machine: Any = calibration.report.machine
    return calibration.on(find_device(machine.card, machine.memory_bytes))
