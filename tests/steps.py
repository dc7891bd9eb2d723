"""One step twice: estimated on fake tensors, and really run under torch's profiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertscope import load
from bertscope.analyses.memory.estimate import Tapes
from bertscope.analyses.memory.events import Tape
from bertscope.analyses.memory.profiler_run import measured
from bertscope.analyses.memory.step import bert_inputs, bert_model, make_step
from bertscope.run_config import RunSpec
from bertscope.sources.presets import Source

SMALL = {
    "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def small(architecture: str = "BertForMaskedLM", attention: str = "sdpa", **fields: Any) -> Source:
    """A model of 2 layers, 16 wide, or as `fields` say."""
    source = load("bert-tiny", architecture=architecture, attention=attention)
    return replace(source, config=replace(source.config, **{**SMALL, **fields}))


def estimated_tape(source: Source, spec: RunSpec) -> Tape:
    """The tape from fake tensors."""
    return Tapes(source).tape(spec)[0]


def real_tape(source: Source, spec: RunSpec) -> Tape:
    """The allocator's own tape of the same step, really run."""
    model = bert_model(source, spec, "cpu")
    step = make_step(model, bert_inputs(model, spec, "cpu"), spec)
    step.make_optimizer_state()
    return measured(step)


def without_scratch(tape: Tape) -> Tape:
    """The tape without what a matrix product takes and gives back before anything else happens.

    oneDNN lays 16-bit operands out anew for its own use; no dispatcher sees that.
    """
    events, kept = list(tape.events), []
    place = 0
    while place < len(events):
        here, following = events[place], events[place + 1] if place + 1 < len(events) else None
        passes = following is not None and following.size_bytes == -here.size_bytes < 0
        if passes and here.operator in _PRODUCTS and here.block == following.block:
            place += 2
            continue
        kept.append(here)
        place += 1
    return replace(tape, events=tuple(kept))
