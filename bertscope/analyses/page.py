"""`report`: every report about one model, or about two side by side."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from typing import Any

from bertscope import __version__
from bertscope.analyses.diagram.forward import Given, forward_diagram
from bertscope.analyses.flops import FlopsRun, flops_model
from bertscope.analyses.memory.fit import estimate_on, fit_report
from bertscope.analyses.memory.plan import plan_report
from bertscope.analyses.memory.simulator import Simulator
from bertscope.analyses.params import count, tree
from bertscope.analyses.tracing.inputs import positions
from bertscope.checkpoints.gguf import name_in_torch
from bertscope.checkpoints.reading import Checkpoint, sums
from bertscope.config import RULES
from bertscope.errors import BertscopeError
from bertscope.gpus import Gpu
from bertscope.model.lora import base_model_of, name_without_adapter
from bertscope.model.state_dict import modern_name
from bertscope.progress import stage
from bertscope.reports.base import Shape, Subject, Totals
from bertscope.reports.diagram import GraphReport
from bertscope.reports.layer_ranges import collapse, expand, in_order
from bertscope.reports.memory import FitReport
from bertscope.reports.page import (
    DiffReport,
    DiffRow,
    FieldChange,
    ModelPart,
    PageReport,
)
from bertscope.reports.plan import PlanReport
from bertscope.settings.checkpointing import NONE
from bertscope.settings.rows import MAX_SIZE
from bertscope.settings.run_config import INFERENCE, TRAINING, RunConfig
from bertscope.sources.building import built_for_counting
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn, torch
from bertscope.units import FP32

# Fields of a config.json that have no effect on the model.
_RECORDED = ("architectures", "transformers_version", "torch_dtype", "dtype", "auto_map")


def diff(a: ModelSource | Checkpoint, b: ModelSource | Checkpoint, *, batch: int = 1, seq: int = 128) -> DiffReport:
    """Return the differences between two models, or two checkpoints: settings, parameters, totals, forward FLOPs.

    The FLOPs of a model whose forward pass does not run with the inputs that bertscope derives are None.

    Paths are compared without their prefix (`bert.` or that of another family), so that a model with a head matches
    the same model without one, and without the wrappers of peft, so that only adapters differ.
    """
    one, other = (_StoredSide(side) if isinstance(side, Checkpoint) else _Side(side) for side in (a, b))
    return DiffReport(
        a=one.subject,
        b=other.subject,
        fields=tuple(_fields(one, other)),
        rows=tuple(_rows(one.tensors(), other.tensors())),
        totals_a=one.totals,
        totals_b=other.totals,
        batch=batch,
        seq=seq,
        forward_flops_a=one.forward_flops(batch, seq),
        forward_flops_b=other.forward_flops(batch, seq),
    )


class _Side:
    """One of the two models, its parameters, and the prefix of its paths."""

    def __init__(self, source: ModelSource) -> None:
        model = built_for_counting(source)
        self.source = source
        self.report = count(model, by="parameter", name=source.name)
        self.subject, self.totals = self.report.subject, self.report.totals
        self.prefix = f"{getattr(base_model_of(model), 'base_model_prefix', 'bert')}."

    def settings(self) -> dict[str, Any]:
        """Return the settings in its file, with the values of the built model."""
        about = self.report.subject
        return {**self.source.settings, **(about.config or {}), "architecture": about.architecture}

    def tensors(self) -> dict[str, tuple[Shape, int]]:
        """Return shape and number of elements by path; each tied tensor under its first path only."""
        rows = [row for row in self.report.rows if row.tied_to is None]
        paths = [name_without_adapter(row.path).removeprefix(self.prefix) for row in rows]
        return {
            path: (row.shapes[0], row.each_params)
            for folded, row in zip(paths, rows, strict=True)
            for path in (expand(folded) if row.copies > 1 else [folded])
        }

    def forward_flops(self, batch: int, seq: int) -> int | None:
        """Return the FLOPs of a forward pass; None if it does not run."""
        try:
            return FlopsRun(source=self.source).at(batch, seq).rows[0].forward.matmul_flops
        except BertscopeError:
            if self.source.bert_config is not None:  # then the sizes are wrong
                raise
            return None


class _StoredSide:
    """A checkpoint as one of the two models, by its header."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.stored = sums(checkpoint)
        self.subject = Subject(name=checkpoint.name, architecture=checkpoint.format, dtype="stored",
                               torch_version=str(torch.__version__), bertscope_version=__version__,
                               obtained="read from the file's header")  # fmt: skip
        params, size = self.stored.distinct_params, self.stored.weight_bytes
        self.totals = Totals(
            distinct_params=params, layer_params=self.stored.stored_params, trainable_params=params, frozen_params=0,
            trainable_layer_params=params, frozen_layer_params=0, buffer_params=0, buffer_bytes=0, param_bytes=size,
            fp32_bytes=4 * params, bf16_bytes=2 * params, unknown_tensors=0,
        )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Return the format, and the dtypes with their packing."""
        dtypes = (f"{row.dtype} ({row.packing})" if row.packing else row.dtype for row in self.stored.dtypes)
        return {
            "architecture": self.stored.format,
            "dtypes": ", ".join(dtypes),
            "weight_bytes": self.stored.weight_bytes,
        }

    def tensors(self) -> dict[str, tuple[Shape, int]]:
        """Return shape and number of elements by name, in torch's names without `bert.`; each storage once."""
        in_torch = name_in_torch if self.stored.format == "gguf" else str
        return {
            modern_name(in_torch(tensor.name)).removeprefix("bert."): (tensor.shape, tensor.params)
            for tensor in self.checkpoint.tensors
            if not tensor.shares
        }

    def forward_flops(self, batch: int, seq: int) -> int | None:
        """Return None: a file does not say how its tensors are used."""
        return None


def _fields(a: _Side | _StoredSide, b: _Side | _StoredSide) -> Iterator[FieldChange]:
    settings = [a.settings(), b.settings()]
    known = () if isinstance(a, _StoredSide) else ("add_pooling_layer", *RULES)
    own = [side.source.settings if isinstance(side, _Side) else side.settings() for side in (a, b)]
    for field in dict.fromkeys(("architecture", *known, *(name for names in own for name in names))):
        one, other = (setting.get(field) for setting in settings)
        if one != other and field not in _RECORDED and not field.startswith("_"):
            yield FieldChange(field=field, a=one, b=other)


def _rows(a: dict[str, tuple[Shape, int]], b: dict[str, tuple[Shape, int]]) -> Iterator[DiffRow]:
    changed = []
    for path in {**a, **b}:
        (shape_a, params_a), (shape_b, params_b) = a.get(path, (None, 0)), b.get(path, (None, 0))
        if shape_a != shape_b:
            changed.append((path, (shape_a, shape_b), (params_a, params_b)))
    for path, (shape_a, shape_b), params in collapse(sorted(changed, key=lambda change: in_order(change[0]))):
        yield DiffRow(
            path=path,
            status="added" if shape_a is None else "removed" if shape_b is None else "changed",
            copies=len(params),
            shape_a=shape_a,
            shape_b=shape_b,
            params_a=sum(count[0] for count in params),
            params_b=sum(count[1] for count in params),
        )


LENGTHS = (64, 128, 256, 384, 512)
STAGES = ("parameters", "FLOPs", "fit", "memory")


def page_report(
    sources: Sequence[ModelSource], variants: Sequence[Sequence[RunConfig]], limit: int | Gpu | None,
    context_bytes: int | None = None, *, has_fit: bool = True,
) -> PageReport:  # fmt: skip
    """Return the page of one source, or of two with their differences, with or without a `fit` table for the limit.

    The fit table has all `variants` of a source. The other parts describe the step of those in the first precision.
    """
    card, limit = limit if isinstance(limit, Gpu) else None, limit if has_fit else None
    models = tuple(
        _model(source, runs, card, limit, context_bytes) for source, runs in zip(sources, variants, strict=True)
    )
    differences = None
    if len(sources) == 2:
        first = variants[0][0]
        differences = diff(sources[0], sources[1], batch=first.batch, seq=first.seq)
    return PageReport(models=models, diff=differences, written=time.strftime("%Y-%m-%d"))


def _model(
    source: ModelSource, variants: Sequence[RunConfig], card: Gpu | None, limit: int | Gpu | None,
    context_bytes: int | None,
) -> ModelPart:  # fmt: skip
    run_config = variants[0]
    of_first = [variant for variant in variants if variant.precision == run_config.precision]
    batch, seq, inputs = run_config.batch, run_config.seq, run_config.input
    with stage(f"{source.name}, parameters"):
        model = built_for_counting(source)
        tensors = count(model, by="parameter", name=source.name, dtype=FP32.name)
        modules = tree(model, name=source.name)
    most = positions(base_model_of(model))
    lengths = tuple(length for length in LENGTHS if length <= most < MAX_SIZE)  # an own module may have any limit
    sizes = tuple(dict.fromkeys((seq, *lengths)))
    work = FlopsRun(source=source, run=RunConfig(mode=INFERENCE, input=inputs))
    training = FlopsRun(source=source, run=run_config.counted(mode=TRAINING, checkpointing=NONE))
    with stage(f"{source.name}, FLOPs"):
        flops, training_flops = flops_model(work, (batch,), sizes), flops_model(training, (batch,), (seq,))
    given = Given(batch=batch, seq=seq, input=inputs)
    forward = _dataflow(source, model, "", given)
    repeated = (node.path for node in forward.nodes if node.copies > 1) if forward else iter(())
    layer = f"{source.layer_path}.0" if source.layers else next(repeated, "")
    steps = Simulator(source)

    def fits(asked: int | None = None) -> FitReport | None:
        """Return the largest batch of each variant, or if the asked batch fits."""
        if limit is None:
            return None
        return fit_report(source, variants, (seq,), limit, batch=asked, context_bytes=context_bytes,
                          known_steps={source.architecture: steps}, tries_other_head=False)  # fmt: skip

    # The search verifies that layers repeat with fewer runs than the estimate, which then needs none.
    with stage(f"{source.name}, fit") if limit is not None else nullcontext():
        fit, asked = fits(), fits(batch)
        plan = _plan(source, run_config, asked, limit, context_bytes)
    with stage(f"{source.name}, memory"):
        memory = estimate_on(source, of_first, card, steps)[1]
    return ModelPart(
        batch=batch,
        seq=seq,
        tensors=tensors,
        tree=modules,
        flops=flops,
        training=training_flops,
        memory=memory,
        fit=fit,
        asked=asked,
        plan=plan,
        forward=forward,
        layer=_dataflow(source, model, layer, given) if layer else None,
    )


def _plan(
    source: ModelSource, run_config: RunConfig, asked: FitReport | None, limit: int | Gpu | None, context: int | None
) -> PlanReport | None:
    """Return the plans for the batch of the page, if it does not fit without recomputation."""
    plain = [row for row in asked.rows if row.checkpointing == NONE] if asked else []
    if limit is None or not plain or any(row.fits for row in plain) or run_config.mode != TRAINING:
        return None
    with suppress(BertscopeError):  # a model without layers whose products could be kept
        return plan_report(source, run_config.changed(checkpointing=NONE), limit, context_bytes=context)
    return None


def _dataflow(source: ModelSource, model: nn.Module, path: str, given: Given) -> GraphReport | None:
    with suppress(BertscopeError), source.confined(), redirect_stdout(sys.stderr):  # it does not run the layer
        return forward_diagram(model, path, name=source.name, given=given)
    return None
