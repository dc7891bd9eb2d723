"""Plan files: the JSON of `bertscope plan`, whose first plan other commands take."""

from __future__ import annotations

import os
from pathlib import Path

from bertscope.errors import BertscopeError, SourceError
from bertscope.reports.plan import PlanReport
from bertscope.settings.checkpointing import Checkpointing
from bertscope.text_files import read_text, readable

_WANTED = "give what 'bertscope plan ... --emit json' wrote"


def read_plan(path: str | os.PathLike[str]) -> PlanReport:
    """Return the report in a file; raises SourceError for another file, and for a plan that did not fit."""
    from bertscope.reports.json import from_json

    file = Path(path)
    with readable(path):
        if not file.exists():
            raise SourceError(f"{file} does not exist; {_WANTED}")
    try:
        report = from_json(read_text(file))
        if not isinstance(report, PlanReport) or not report.rows:
            raise SourceError(f"{file} is no plan; {_WANTED}")
        Checkpointing.parse(report.rows[0].checkpointing)
    except BertscopeError as error:
        raise error.at(f"{file}") from None
    if not report.fits:
        raise SourceError(f"{file}: no plan in it fits; {_WANTED}")
    return report
