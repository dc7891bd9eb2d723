"""`diff`: comparison of two models, parameter by parameter, with equal changes of neighbouring layers folded."""

from collections.abc import Iterator
from typing import Any

from bertscope.analyses.flops.sweep import FlopsRun
from bertscope.analyses.params.count import count
from bertscope.config import RULES
from bertscope.errors import BertscopeError
from bertscope.model.lora import base_model_of, name_without_adapter
from bertscope.reports.base import Shape
from bertscope.reports.layer_ranges import collapse, in_order
from bertscope.reports.page import DiffReport, DiffRow, FieldChange
from bertscope.sources.model_source import ModelSource

# Fields of a config.json that have no effect on the model.
_RECORDED = ("architectures", "transformers_version", "torch_dtype", "dtype", "auto_map")


def diff(a: ModelSource, b: ModelSource, *, batch: int = 1, seq: int = 128) -> DiffReport:
    """Return the differences between two models: settings, parameters, totals, and forward FLOPs at one size.

    The FLOPs of a model whose forward pass does not run with the inputs that bertscope derives are None.

    Paths are compared without their prefix (`bert.` or that of another family), so that a model with a head matches
    the same model without one, and without the wrappers of peft, so that only adapters differ.
    """
    one, other = _Side(a), _Side(b)
    return DiffReport(
        a=one.report.subject,
        b=other.report.subject,
        fields=tuple(_fields(one, other)),
        rows=tuple(_rows(one.tensors(), other.tensors())),
        totals_a=one.report.totals,
        totals_b=other.report.totals,
        batch=batch,
        seq=seq,
        forward_flops_a=_forward_flops(a, batch, seq),
        forward_flops_b=_forward_flops(b, batch, seq),
    )


def _forward_flops(source: ModelSource, batch: int, seq: int) -> int | None:
    try:
        return FlopsRun(source=source).at(batch, seq).rows[0].forward.matmul_flops
    except BertscopeError:
        if source.bert_config is not None:  # then the sizes are wrong
            raise
        return None


class _Side:
    """One of the two models, its parameters, and the prefix of its paths."""

    def __init__(self, source: ModelSource) -> None:
        model = source.build()
        self.source = source
        self.report = count(model, by="parameter", name=source.name)
        self.prefix = f"{getattr(base_model_of(model), 'base_model_prefix', 'bert')}."

    def settings(self) -> dict[str, Any]:
        """Return the settings in its file, with the values of the built model."""
        about = self.report.subject
        return {**self.source.settings, **(about.config or {}), "architecture": about.architecture}

    def tensors(self) -> dict[str, tuple[Shape, int]]:
        """Return shape and number of elements by path; each tied tensor under its first path only."""
        rows = [row for row in self.report.rows if row.tied_to is None]
        paths = [name_without_adapter(row.path).removeprefix(self.prefix) for row in rows]
        return {path: (row.shapes[0], row.params) for path, row in zip(paths, rows, strict=True)}


def _fields(a: _Side, b: _Side) -> Iterator[FieldChange]:
    settings = [a.settings(), b.settings()]
    for field in dict.fromkeys(("architecture", "add_pooling_layer", *RULES, *a.source.settings, *b.source.settings)):
        one, other = (setting.get(field) for setting in settings)
        if one != other and field not in _RECORDED and not field.startswith("_"):
            yield FieldChange(field=field, a=one, b=other)


def _rows(a: dict[str, tuple[Shape, int]], b: dict[str, tuple[Shape, int]]) -> Iterator[DiffRow]:
    changed = []
    for path in sorted({*a, *b}, key=in_order):
        (shape_a, params_a), (shape_b, params_b) = a.get(path, (None, 0)), b.get(path, (None, 0))
        if shape_a != shape_b:
            changed.append((path, (shape_a, shape_b), (params_a, params_b)))
    for path, (shape_a, shape_b), params in collapse(changed):
        yield DiffRow(
            path=path,
            status="added" if shape_a is None else "removed" if shape_b is None else "changed",
            copies=len(params),
            shape_a=shape_a,
            shape_b=shape_b,
            params_a=sum(count[0] for count in params),
            params_b=sum(count[1] for count in params),
        )
