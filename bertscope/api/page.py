"""`bertscope.report` and `bertscope.diff`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertscope.analyses import page as pages
from bertscope.analyses.verify import verify
from bertscope.api import requests
from bertscope.api.memory import ModelRequest, noted
from bertscope.api.requests import public_function
from bertscope.checkpoints.reading import Checkpoint
from bertscope.errors import SelectionError
from bertscope.progress import expect
from bertscope.reports.page import DiffReport, PageReport
from bertscope.settings.checkpointing import FULL, NONE
from bertscope.settings.request import Request
from bertscope.settings.run_config import STORED
from bertscope.sources.find import Model, source_of, stored_alone
from bertscope.sources.model_source import built_for_counting
from bertscope.units import FP32

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import GivenInputs, RunSettings


@public_function()
def report(
    model: Model | Request,
    compare: Model | None = None,
    *,
    fit: bool = True,
    inputs: Any = None,
    name: str | None = None,
    **settings: Unpack[RunSettings],
) -> PageReport:
    """Return every report about a model, or about two; `to_html()` of the result is the page of `bertscope report`.

    The fit table has the precisions and strategies that are asked for, in a 16 GiB budget unless a `budget` or a
    `gpu` is given; `fit=False` leaves it out. The other parts describe the step in the first precision. A module runs
    with `inputs`, or tensors with `input_size` and `dtypes`; without them with what its method
    `example_inputs(batch, seq)` returns, or with inputs derived from its forward.

    >>> config = bertscope.BertConfig(num_hidden_layers=1, max_position_embeddings=32)
    >>> page = bertscope.report(config, batch=1, seq=16, fit=False)
    >>> page["encoder"].params
    7087872
    """
    data = requests.inputs_of(inputs, settings, seq=settings.get("seq"))
    request = requests.request_of("report", model, settings)
    module = request.subject if data is None else requests.built(request.subject)[0]
    sources = [source_of(module, name=name, inputs=requests.batched(data))]
    sources += [] if compare is None else [source_of(compare)]
    batch = {} if data is None else {"batch": requests.batch_of(data)}
    works = []
    for source in sources:
        takes = source.strategies(built_for_counting(source))
        usual = {"checkpointing": [name for name in (NONE, FULL) if name in takes]}
        usual["precision"] = [STORED if source.has_own_dtypes else FP32.name]
        works.append(ModelRequest.of(request, source, other_sources=sources, **batch, **usual))
    run, limit, gpu = works[0].run, works[0].limit, works[0].gpu
    if not fit and "budget" in request.named:
        raise request.error("{budget} is for the fit table, which is left out", "budget")
    expect(len(sources) * (3 + fit))  # the stages of a model: parameters, FLOPs, memory, and maybe the fit table
    models = []
    for work in works:
        part = pages.model_part(
            work.source,
            work.by_precision,
            gpu or (limit.budget if fit else None),
            limit.context,
            limit.margin,
            has_fit=fit,
        )
        models.append(replace(part, memory=replace(part.memory, training_file=noted(request, work.runs))))
    difference = pages.diff(*sources, batch=run.batch, seq=run.seq) if compare is not None else None
    return PageReport(models=tuple(models), diff=difference, written=time.strftime("%Y-%m-%d"))


@public_function()
def diff(
    a: Model | Checkpoint,
    b: Model | Checkpoint,
    *,
    batch: int = 1,
    seq: int | None = None,
    inputs: Any = None,
    **keywords: Unpack[GivenInputs],
) -> DiffReport | Any:
    """Return the differences between two models: settings, parameters, totals, and forward FLOPs at one size.

    Paths are compared without their prefix (`bert.` or another family's), so that a model with a head matches
    the same model without one, and without peft's wrappers, so that only adapters differ. Modules run with the
    same `inputs`, or tensors with `input_size` and `dtypes`; without them as in `report`. A model and a checkpoint (a
    file with tensors, or a folder with one and no config.json) are compared by `verify`, and two checkpoints by their
    headers.

    >>> difference = bertscope.diff("bert-base-cased", "bert-base-uncased")
    >>> difference["embeddings.word_embeddings.weight"].shape_b
    (30522, 768)
    """
    stored = [side if isinstance(side, Checkpoint) else stored_alone(side) for side in (a, b)]
    data = requests.only_inputs_of(inputs, keywords)
    if any(stored):
        requests.refuse_sizes(batch, seq, "on a checkpoint")
        if data is not None:
            raise SelectionError("inputs have no effect on a checkpoint; leave them out")
    if stored.count(None) == 1:
        model: Any = a if stored[0] is None else b
        return verify(model, stored[0] or stored[1])
    if data is not None:
        requests.refuse_sizes(batch, seq, "on a module with inputs")
        batch = requests.batch_of(data)
    one, other = (known or source_of(side, inputs=data) for known, side in zip(stored, (a, b), strict=True))
    sides = [side for side in (one, other) if data is None and not isinstance(side, Checkpoint)]
    seq = requests.length_of(seq, *sides, batch=batch)
    difference = pages.diff(one, other, batch=batch, seq=seq)
    return replace(difference, inputs_given=data is not None)
