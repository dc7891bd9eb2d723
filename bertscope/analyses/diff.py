"""`diff`: two models, parameter by parameter, with equal changes of neighbouring layers folded."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bertscope.analyses.count import count
from bertscope.analyses.flops_model import FlopsRun
from bertscope.config import RULES
from bertscope.model import build
from bertscope.presets import Source
from bertscope.reports import CountReport, DiffReport, DiffRow, FieldChange, Shape

# Recorded by the file, of no effect on the model.
_RECORDED = ("architectures", "transformers_version")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def diff(a: Source, b: Source, *, batch: int = 1, seq: int = 128) -> DiffReport:
    """What tells model `a` from model `b`: settings, parameters, totals, and forward FLOPs at one size.

    Paths are compared without `bert.` in front, so that a body and the same body under a head agree.
    """
    reports = [_counted(source) for source in (a, b)]
    flops = [FlopsRun(source=source).at(batch, seq).rows[0].forward.matmul_flops for source in (a, b)]
    return DiffReport(
        a=reports[0].subject,
        b=reports[1].subject,
        fields=tuple(_fields(a, b)),
        rows=tuple(_rows(_tensors(reports[0]), _tensors(reports[1]))),
        totals_a=reports[0].totals,
        totals_b=reports[1].totals,
        batch=batch,
        seq=seq,
        forward_flops_a=flops[0],
        forward_flops_b=flops[1],
    )


def _counted(source: Source) -> CountReport:
    model = build(source.config, source.architecture, add_pooling_layer=source.add_pooling_layer)
    return count(model, by="parameter", name=source.name)


def _fields(a: Source, b: Source) -> Iterator[FieldChange]:
    settings = []
    for source in (a, b):
        own = {"architecture": source.architecture}
        if source.architecture == "BertModel":
            own["add_pooling_layer"] = str(source.add_pooling_layer).lower()
        settings.append(own | source.config.to_dict())
    for field in ("architecture", "add_pooling_layer", *RULES):
        one, other = (setting.get(field) for setting in settings)
        if one != other and field not in _RECORDED:
            yield FieldChange(field=field, a=one, b=other)


def _tensors(report: CountReport) -> dict[str, tuple[Shape, int]]:
    """Path -> shape and count, each tensor under the address at which it counts as distinct."""
    return {row.path.removeprefix("bert."): (row.shapes[0], row.params) for row in report.rows if row.tied_to is None}


def _rows(a: dict[str, tuple[Shape, int]], b: dict[str, tuple[Shape, int]]) -> Iterator[DiffRow]:
    runs: dict[tuple[str, Shape, Shape], list[tuple[int, int, int]]] = {}
    for path in sorted({*a, *b}, key=_in_order):
        (shape_a, params_a), (shape_b, params_b) = a.get(path, (None, 0)), b.get(path, (None, 0))
        if shape_a != shape_b:
            number = _NUMBER.search(path)
            pattern = _NUMBER.sub("*", path, count=1)
            place = int(number[0]) if number else 0
            runs.setdefault((pattern, shape_a, shape_b), []).append((place, params_a, params_b))
    for (pattern, shape_a, shape_b), members in runs.items():
        for run in _consecutive(members):
            yield DiffRow(
                path=pattern.replace("*", _span(run[0][0], run[-1][0]), 1),
                status="added" if shape_a is None else "removed" if shape_b is None else "changed",
                copies=len(run),
                shape_a=shape_a,
                shape_b=shape_b,
                params_a=sum(member[1] for member in run),
                params_b=sum(member[2] for member in run),
            )


def _in_order(path: str) -> list[tuple[int, str]]:
    """Numbers by their size, and the same order from either side."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def _consecutive(members: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    run: list[tuple[int, int, int]] = []
    for member in sorted(members):
        if run and member[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(member)
    yield run


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
