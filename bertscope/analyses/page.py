"""`report`: every report about one model, or about two side by side."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from bertscope import __version__
from bertscope.analyses.dataflow import ForwardInputs, forward_diagram
from bertscope.analyses.params import count, tree
from bertscope.checkpoints.gguf import name_in_torch
from bertscope.checkpoints.reading import Checkpoint, sums
from bertscope.config import RULES
from bertscope.errors import BertscopeError
from bertscope.gpus import Gpu
from bertscope.memory.fit import fit_report
from bertscope.memory.plan import plan_report
from bertscope.memory.simulator import Simulator
from bertscope.model.bert import modern_name
from bertscope.model.lora import base_model_of, name_without_adapter
from bertscope.progress import stage
from bertscope.reports.base import Shape, Subject, Totals
from bertscope.reports.diagram import GraphReport
from bertscope.reports.layer_ranges import collapse, expand, in_order
from bertscope.reports.page import DiffReport, DiffRow, FieldChange, ModelPart
from bertscope.settings.checkpointing import NONE
from bertscope.settings.rows import MAX_SIZE
from bertscope.settings.run_config import CPU, INFERENCE, TRAINING, RunConfig
from bertscope.sources.model_source import ModelSource, built_for_counting
from bertscope.torch_access import nn, torch
from bertscope.tracing.flops import FlopsRun, flops_model
from bertscope.tracing.inputs import idle_sizes, positions
from bertscope.units import FP32

# Fields of a config.json that have no effect on the model.
_RECORDED = ("architectures", "transformers_version", "torch_dtype", "dtype", "auto_map")


def diff(a: ModelSource | Checkpoint, b: ModelSource | Checkpoint, *, batch: int = 1, seq: int = 128) -> DiffReport:
    """Return the differences between two models or two checkpoints, without FLOPs if a forward pass does not run."""
    one, other = (
        _of_checkpoint(side) if isinstance(side, Checkpoint) else _of_model(side, batch, seq) for side in (a, b)
    )
    names = dict.fromkeys(("architecture", *one.fields, *other.fields))
    values = {name: (one.settings.get(name), other.settings.get(name)) for name in names}
    return DiffReport(
        a=one.subject,
        b=other.subject,
        fields=tuple(
            FieldChange(field=name, a=value, b=changed)
            for name, (value, changed) in values.items()
            if value != changed and name not in _RECORDED and not name.startswith("_")
        ),
        rows=tuple(_rows(one.tensors, other.tensors)),
        totals_a=one.totals,
        totals_b=other.totals,
        batch=batch,
        seq=seq,
        forward_flops_a=one.forward_flops,
        forward_flops_b=other.forward_flops,
    )


class _Side(NamedTuple):
    subject: Subject
    totals: Totals
    fields: Sequence[str]  # the settings that are compared, in their order
    settings: dict[str, Any]
    tensors: dict[str, tuple[Shape, int]]  # shape and number of elements by path; each tied tensor at its first path
    forward_flops: int | None = None  # None: a forward pass does not run, or a file does not say how


def _of_model(source: ModelSource, batch: int, seq: int) -> _Side:
    model = built_for_counting(source)
    report = count(model, by="parameter", name=source.name)
    about, prefix = report.subject, f"{getattr(base_model_of(model), 'base_model_prefix', 'bert')}."
    tensors = {}
    for row in report.rows:
        path = name_without_adapter(row.path).removeprefix(prefix)
        for single in () if row.tied_to else expand(path) if row.copies > 1 else [path]:
            tensors[single] = row.shapes[0], row.each_params
    flops = None
    try:
        flops = FlopsRun(source=source).at(batch, seq).rows[0].forward.matmul_flops
    except BertscopeError:
        if source.bert_config is not None:  # then the sizes are wrong
            raise
    settings = {**source.settings, **(about.config or {}), "architecture": about.architecture}
    fields = ("add_pooling_layer", *RULES, *source.settings)
    return _Side(about, report.totals, fields, settings, tensors, flops)


def _of_checkpoint(checkpoint: Checkpoint) -> _Side:
    stored = sums(checkpoint)
    params, size = stored.distinct_params, stored.weight_bytes
    dtypes = ", ".join(f"{row.dtype} ({row.packing})" if row.packing else row.dtype for row in stored.dtypes)
    settings = {"architecture": stored.format, "dtypes": dtypes, "weight_bytes": size}
    in_torch = name_in_torch if stored.format == "gguf" else str
    return _Side(
        Subject(name=checkpoint.name, architecture=checkpoint.format, dtype="stored",
                torch_version=str(torch.__version__), bertscope_version=__version__,
                obtained="read from the file's header"),
        Totals(
            distinct_params=params, layer_params=stored.stored_params, trainable_params=params, frozen_params=0,
            trainable_layer_params=params, frozen_layer_params=0, buffer_params=0, buffer_bytes=0, param_bytes=size,
            fp32_bytes=4 * params, bf16_bytes=2 * params, unknown_tensors=0,
        ),
        tuple(settings), settings,
        {modern_name(in_torch(tensor.name)).removeprefix("bert."): (tensor.shape, tensor.params)
         for tensor in checkpoint.tensors if not tensor.shares},
    )  # fmt: skip


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


def model_part(
    source: ModelSource, variants: Sequence[RunConfig], memory: Gpu | int | None, *room: Any, has_fit: bool = True
) -> ModelPart:
    """Return the reports of one model, with or without a fit table for the memory; `room` is its context and margin.

    The fit table has all `variants`. The other parts describe the step of those in the first precision.
    """
    if "seq" in (idle := idle_sizes(source, variants[0].input)):
        variants = [variant.changed(seq=1) for variant in variants]
    run_config = variants[0]
    of_first = [variant for variant in variants if variant.precision == run_config.precision]
    batch, seq, inputs = run_config.batch, run_config.seq, run_config.input
    with stage(f"{source.name}, parameters"):
        model = built_for_counting(source)
        tensors = count(model, by="parameter", name=source.name, dtype=FP32.name)
        modules = tree(model, name=source.name)
    most = positions(base_model_of(model))
    lengths = tuple(length for length in LENGTHS if length <= most < MAX_SIZE)  # an own module may have any limit
    sizes = tuple(dict.fromkeys((seq, *(lengths if "seq" not in idle else ()))))
    work = FlopsRun(source=source, run=RunConfig(mode=INFERENCE, input=inputs))
    training = FlopsRun(source=source, run=run_config.counted(mode=TRAINING, checkpointing=NONE))
    with stage(f"{source.name}, FLOPs"):
        flops, training_flops = flops_model(work, (batch,), sizes), flops_model(training, (batch,), (seq,))
    run_inputs = ForwardInputs(batch=batch, seq=seq, input=inputs)
    length = {"seq": None} if "seq" in idle else {}
    forward = _dataflow(source, model, "", run_inputs, **length)
    repeated = (node.path for node in forward.nodes if node.copies > 1) if forward else iter(())
    layer = f"{source.layer_path}.0" if source.layers else next(repeated, "")
    simulator = Simulator(source)
    limited = simulator if memory is None else simulator.limited(run_config, memory, *room)  # of every step here

    fit = for_batch = plan = None
    if memory is not None and has_fit:  # the search verifies that layers repeat, for the estimate too
        with stage(f"{source.name}, fit"):
            fit, for_batch = (
                replace(
                    fit_report(limited, variants, batch=size, tries_other_head=False, is_exact=False),
                    length_given="seq" in idle,
                )
                for size in (None, batch)
            )
            plain = [row for row in for_batch.rows if row.checkpointing == NONE]
            if plain and not any(row.fits for row in plain) and run_config.mode == TRAINING:
                with suppress(BertscopeError):  # a model without layers whose products could be kept
                    one = Simulator(source, one_batch=True).limited(run_config, memory, *room)
                    plan = plan_report(one, run_config.changed(checkpointing=NONE))
    with stage(f"{source.name}, memory"):
        report = (simulator if run_config.device == CPU else limited).report(of_first)  # no allocator retries on a CPU
    return ModelPart(
        batch=batch,
        seq=seq,
        tensors=tensors,
        tree=modules,
        flops=flops,
        training=training_flops,
        memory=report,
        fit=fit,
        batch_fit=for_batch,
        plan=plan,
        forward=forward,
        layer=_dataflow(source, model, layer, run_inputs, **length) if layer else None,
        idle=tuple(sorted(idle)),
    )


def _dataflow(
    source: ModelSource, model: nn.Module, path: str, run_inputs: ForwardInputs, **changes: Any
) -> GraphReport | None:
    with suppress(BertscopeError), source.confined(), redirect_stdout(sys.stderr):  # it does not run the layer
        return replace(forward_diagram(model, path, name=source.name, forward_inputs=run_inputs), **changes)
    return None
