"""bertscope: parameters, FLOPs, memory and diagrams of BERT models, computed before a run and checked by measurement.

Names load on first use, so that `import bertscope` does not import torch.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # not from `typing`: the working directory may contain a typing.py
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "BertConfig": "bertscope.config",
    "Lora": "bertscope.config.lora",
    "BertscopeError": "bertscope.errors",
    "load": "bertscope.sources.find",
    "build": "bertscope.model",
    "count": "bertscope.analyses.params.count",
    "tree": "bertscope.analyses.params.tree",
    "check": "bertscope.analyses.check.check",
    "flops": "bertscope.analyses.flops.count",
    "diagram": "bertscope.analyses.diagram.diagram",
    "diff": "bertscope.analyses.page.diff",
    "verify": "bertscope.analyses.checkpoint.verify",
    "read_checkpoint": "bertscope.checkpoints.reading",
    "explain": "bertscope.analyses.explain.steps",
    "estimate": "bertscope.analyses.memory.estimate",
    "profile": "bertscope.analyses.memory.profiler_run",
    "read_training_file": "bertscope.sources.training_files",
    "convert": "bertscope.sources.convert",
    "schema": "bertscope.reports.json",
    "to_json": "bertscope.reports.base",
    "from_json": "bertscope.reports.json",
    "doctor": "bertscope.analyses.check.doctor",
    **dict.fromkeys(
        (
            "BertModel",
            "BertForPreTraining",
            "BertForMaskedLM",
            "BertLMHeadModel",
            "BertForNextSentencePrediction",
            "BertForSequenceClassification",
            "BertForMultipleChoice",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
        ),
        "bertscope.model",
    ),
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bertscope' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
