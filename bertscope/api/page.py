"""`bertscope.report` and `bertscope.diff`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bertscope.analyses.page import diff as differences
from bertscope.analyses.page.report import page_report
from bertscope.api.given import Model
from bertscope.api.memory import Loop, bytes_of, run_config_of
from bertscope.gpus import find_gpu
from bertscope.reports.memory import Gpu
from bertscope.reports.page import DiffReport, PageReport
from bertscope.run_config import RunConfig
from bertscope.sources.find import source_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def report(
    model: Model,
    compare: Model | None = None,
    *,
    batch: int = 8,
    seq: int = 128,
    budget: int | str | None = "16GiB",
    gpu: str | Gpu | None = None,
    checkpointing: str | None = None,
    precision: str | None = None,
    context: int | str | None = None,
    inputs: Sequence[str] = (),
    name: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **run: Unpack[Loop],
) -> PageReport:
    """Return every report about a model, or about two; `to_html()` of the result is the page of `bertscope report`.

    `budget` is that of the fit table (bytes, or text), unless a `gpu` is given; None leaves the table out. The others
    are as in `fit`, with one precision by default. A module runs with the result of its method
    `example_inputs(batch, seq)`, by default with inputs derived from its forward. `progress` is called with the name
    of each part.

    >>> config = bertscope.BertConfig(num_hidden_layers=1, max_position_embeddings=32)
    >>> page = bertscope.report(config, batch=1, seq=16, budget=None)
    >>> page["encoder"].params
    7087872
    """
    sources = [source_of(model, name=name), *([source_of(compare)] if compare is not None else [])]
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    sizes = {"batch": batch, "seq": seq, "inputs": inputs}
    run_config = run_config_of({"device": "cuda" if card else RunConfig.device, **run, **sizes})
    return page_report(
        sources, run_config, card or bytes_of(budget), checkpointing=checkpointing, precision=precision,
        context_bytes=bytes_of(context), progress=progress,
    )  # fmt: skip


def diff(a: Model, b: Model, *, batch: int = 1, seq: int = 128) -> DiffReport:
    """Return the differences between two models: settings, parameters, totals, and forward FLOPs at one size.

    Paths are compared without their prefix (`bert.` or that of another family), so that a model with a head matches
    the same model without one, and without the wrappers of peft, so that only adapters differ. Modules run with
    the inputs of `report`.

    >>> difference = bertscope.diff("bert-base-cased", "bert-base-uncased")
    >>> difference["embeddings.word_embeddings.weight"].shape_b
    (30522, 768)
    """
    return differences.diff(source_of(a), source_of(b), batch=batch, seq=seq)
