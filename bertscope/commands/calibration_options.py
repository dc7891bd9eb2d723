"""Options for what a calibration of the card gives: of `estimate` and `fit`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bertscope.calibrations import calibration_here, calibration_of, calibrations, card_of
from bertscope.reports.memory import Gpu


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """The use of calibrations."""

    no_calibration: Annotated[
        bool,
        typer.Option("--no-calibration", help="Use what is published for a card, and no measurement of calibrate."),
    ] = False

    def of_gpu(self, card: Gpu) -> Gpu:
        """Return a GPU of the table with what its calibration measured, if there is one."""
        found = None if self.no_calibration else calibration_of(card)
        return card if found is None else found.on(card)

    def here(self) -> Gpu | None:
        """Return this machine's card with what its calibration measured; None without a calibration."""
        if self.no_calibration or not any(calibrations()):
            return None
        from bertscope.analyses.calibrate.card import this_card

        card = this_card()
        found = card and calibration_here(*card)
        return card_of(found) if found else None
