"""bertscope: everything about a BERT before you run it, and the proof.

Names load on first use, so that `import bertscope` does not import torch.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` is not imported: a file of that name may lie where `python -m bertscope` starts
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "BertConfig": "bertscope.config",
    "BertscopeError": "bertscope.errors",
    "load": "bertscope.sources",
    "build": "bertscope.model",
    "count": "bertscope.analyses.count",
    "tree": "bertscope.analyses.tree",
    "check": "bertscope.analyses.check",
    "flops": "bertscope.analyses.flops",
    "diagram": "bertscope.analyses.diagram",
    "diff": "bertscope.analyses.diff",
    "verify": "bertscope.analyses.verify",
    "read_checkpoint": "bertscope.checkpoints.reading",
    "explain": "bertscope.analyses.explain",
    "estimate": "bertscope.analyses.estimate",
    "profile": "bertscope.analyses.measure",
    "convert": "bertscope.conversion",
    "schema": "bertscope.schemas",
    "to_json": "bertscope.reports",
    "from_json": "bertscope.report_reader",
    "doctor": "bertscope.analyses.doctor",
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
