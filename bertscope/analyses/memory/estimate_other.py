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
from bertscope.run_config import NONE, RunConfig
from bertscope.sources.find import ModelSource
from bertscope.sources.other_models import OtherSource
from bertscope.torch_access import nn, torch


def estimate_any(
    source: ModelSource, run_configs: Sequence[RunConfig], progress: Callable[[str], None] = lambda text: None
) -> MemoryReport:
    """The estimates of whatever MODEL names; a foreign model takes checkpointing `none`, or `full` if its class does.

    Raises SelectionError for what such a model cannot be asked.
    """
    if not isinstance(source, OtherSource):
        return estimate_report(source, run_configs, progress)
    if not all(run_config.dropout for run_config in run_configs):
        raise SelectionError(f"{source.name} is {source.family}; --no-dropout concerns BERTs built here alone")
    variants = []
    for run_config in run_configs:
        progress(f"estimating {run_config.checkpointing}")
        model = _model(source, run_config)
        inputs = _inputs(model, run_config)
        with quiet(source), told(f"{source.name} cannot be run on fake tensors"):
            found = module_memory(model, inputs, run_config, None)
        variants.append(
            Variant(checkpointing=run_config.checkpointing, reentrant=run_config.reentrant, estimated=found)
        )
    return memory_report(_model(source, run_configs[0]), run_configs[0], tuple(variants), name=source.name)


def _model(source: OtherSource, run_config: RunConfig) -> nn.Module:
    model = build_any(source).to(TORCH_DTYPES[run_config.dtype]).train(run_config.mode != "inference")
    freeze(model, run_config.freeze)
    if run_config.checkpointing != NONE:
        checkpoint(model, run_config.checkpointing, reentrant=run_config.reentrant)
    return model


def _inputs(model: nn.Module, run_config: RunConfig) -> dict[str, torch.Tensor]:
    inputs: dict[str, torch.Tensor] = inputs_for(
        model, run_config.batch, run_config.seq, labels=run_config.mode != "inference"
    )
    if run_config.padding:
        inputs["attention_mask"] = torch.empty(run_config.batch, run_config.seq, dtype=torch.long, device="meta")
    return inputs
