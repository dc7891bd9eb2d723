"""`estimate` of a module from elsewhere: every layer is run, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bertscope.analyses.flops.other import checkpoint
from bertscope.analyses.memory.estimate import estimate_report, memory_report, module_memory
from bertscope.analyses.memory.step import TORCH_DTYPES
from bertscope.analyses.modules.build import build_any, quiet, told
from bertscope.analyses.modules.freeze import freeze
from bertscope.analyses.tracing.inputs import inputs_for
from bertscope.errors import SelectionError
from bertscope.reports.memory import MemoryReport, Variant
from bertscope.run_config import RunSpec
from bertscope.sources.find import AnyModel
from bertscope.sources.other_models import ForeignSource
from bertscope.torch_access import nn, torch


def estimate_any(
    source: AnyModel, specs: Sequence[RunSpec], progress: Callable[[str], None] = lambda text: None
) -> MemoryReport:
    """The estimates of whatever MODEL names; a foreign model takes checkpointing `none`, or `full` if its class does.

    Raises SelectionError for what such a model cannot be asked.
    """
    if not isinstance(source, ForeignSource):
        return estimate_report(source, specs, progress)
    if not all(spec.dropout for spec in specs):
        raise SelectionError(f"{source.name} is {source.family}; --no-dropout concerns BERTs built here alone")
    variants = []
    for spec in specs:
        progress(f"estimating {spec.checkpointing}")
        model = _model(source, spec)
        inputs = _inputs(model, spec)
        with quiet(source), told(f"{source.name} cannot be run on fake tensors"):
            found = module_memory(model, inputs, spec, None)
        variants.append(Variant(checkpointing=spec.checkpointing, reentrant=spec.reentrant, estimated=found))
    return memory_report(_model(source, specs[0]), specs[0], tuple(variants), name=source.name)


def _model(source: ForeignSource, spec: RunSpec) -> nn.Module:
    model = build_any(source).to(TORCH_DTYPES[spec.dtype]).train(spec.mode != "inference")
    freeze(model, spec.freeze)
    if spec.checkpointing != "none":
        checkpoint(model, spec.checkpointing, reentrant=spec.reentrant)
    return model


def _inputs(model: nn.Module, spec: RunSpec) -> dict[str, torch.Tensor]:
    inputs: dict[str, torch.Tensor] = inputs_for(model, spec.batch, spec.seq, labels=spec.mode != "inference")
    if spec.padding:
        inputs["attention_mask"] = torch.empty(spec.batch, spec.seq, dtype=torch.long, device="meta")
    return inputs
