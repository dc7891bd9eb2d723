"""The messages between `profile` and its child: the job as JSON, and the child's answers as lines of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bertscope.config import BertConfig
from bertscope.errors import SelectionError
from bertscope.reports.memory import BreakEven, Memory, ProcessMemory, Timing
from bertscope.reports.reader import typed
from bertscope.run_config import RunConfig
from bertscope.sources.bert import BertSource


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one child."""

    source: BertSource
    run_config: RunConfig
    steps: int = 3
    threads: int | None = None
    seed: int = 0
    memory_limit_bytes: int | None = None
    beside: RunConfig | None = None  # the run of the first job, for the break-even batch
    wants_snapshot: bool = False  # the trace for PyTorch's memory viewer

    def to_json(self) -> str:
        """Return the job with what builds its model as JSON; raise SelectionError for a function as hidden_act."""
        config = self.source.config
        if callable(config.hidden_act):
            raise SelectionError("profile's child process takes hidden_act by its name, such as 'gelu'; got a function")
        source = {name: getattr(self.source, name) for name in ("name", "architecture", "add_pooling_layer")}
        return json.dumps(vars(self) | {"source": source | {"config": config.to_dict()}}, default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> Job:
        """Return the job that `to_json` wrote."""
        data = json.loads(text)
        source = data.pop("source")
        run_configs = {name: typed(RunConfig | None, data.pop(name), name) for name in ("run_config", "beside")}
        return cls(
            source=BertSource(**source | {"config": BertConfig.from_dict(source["config"])}), **run_configs, **data
        )


MESSAGES: dict[str, Any] = {  # kind -> type of its content
    "stage": str,
    "taken": int,
    "estimated": Memory,
    "outlook": BreakEven,
    "machine": str,
    "process": ProcessMemory,
    "measured": Memory,
    "snapshot": str,  # base64
    "timing": Timing,
    **dict.fromkeys(("refused", "out of memory", "failed"), str),
}
