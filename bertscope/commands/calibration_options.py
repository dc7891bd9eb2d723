"""Options for what a calibration of the card gives: of `estimate` and `fit`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bertscope.calibrations import Calibration, calibration_here, calibration_of, calibrations
from bertscope.commands.output import note
from bertscope.reports.memory import Gpu

_NO_TIME = "no time: {why}; 'bertscope calibrate' on the machine with the card measures the rates that it needs"


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """The use of calibrations."""

    no_calibration: Annotated[
        bool,
        typer.Option("--no-calibration", help="Use what is published for a card, and no measurement of calibrate."),
    ] = False

    time: Annotated[
        bool,
        typer.Option("--time", help="Predict the time of a step on a calibrated card, tokens per second and MFU."),
    ] = False

    def found(self, card: Gpu | None) -> Calibration | None:
        """Return the calibration of a GPU of the table, of this machine's card for None; None without one."""
        if self.no_calibration or not any(calibrations()):
            return None
        if card is not None:
            return calibration_of(card)
        from bertscope.analyses.calibrate.card import this_card

        here = this_card()
        return calibration_here(*here) if here else None

    def of_gpu(self, card: Gpu) -> Gpu:
        """Return a GPU of the table with what its calibration measured, if there is one."""
        found = self.found(card)
        return card if found is None else found.on(card)

    def note_no_time(
        self, calibration: Calibration | None, card: Gpu | None, *, has_times: bool, on_cuda: bool
    ) -> None:
        """Say why there is no time if it is wanted."""
        if not self.time or has_times:
            return
        if not on_cuda:
            note("no time: it is predicted for CUDA only; give --gpu or --device cuda")
        elif calibration is None:
            note(_NO_TIME.format(why=f"there is no calibration of {card.name if card else 'a card here'}"))
        else:
            note(_NO_TIME.format(why="nothing that fits in one process runs in a precision that the calibration has"))
