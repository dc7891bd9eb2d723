"""The settings of a public function: the request, its runs and limit, and the GPU whose memory counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter, Signature, signature
from os import PathLike
from typing import TYPE_CHECKING, Any

from bertscope.api.arguments import Function, input_parameters, longest_input
from bertscope.errors import SelectionError
from bertscope.reports.memory import TrainingFile
from bertscope.settings.request import Request, Resolved, read_settings
from bertscope.settings.rows import rows
from bertscope.settings.run_config import AUTOCAST, LIGHTNING, QUESTIONS, STORED, Limit, RunConfig
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from bertscope.torch_access import nn


def with_settings(function: Function) -> Function:
    """List a public function's settings in its signature and docstring, with the defaults in QUESTIONS."""
    question = QUESTIONS[function.__name__]
    parameters = [item for item in signature(function).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
    table = {name: row for name, row in question.table.items() if name not in {item.name for item in parameters}}
    listed = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in question.files]
    listed += [*input_parameters(parameters), *(
        Parameter(name, Parameter.KEYWORD_ONLY, default=question.defaults.get(name, row.default))
        for name, row in table.items()
    )]  # fmt: skip
    function.__signature__ = Signature([*parameters, *listed])  # type: ignore[attr-defined]
    lines = "\n".join(f"        {name}: {row.help} Takes {row.takes}." for name, row in table.items())
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    Settings of the run:\n{lines}\n    "
    return function


def requested(question: str, model: Any, settings: Mapping[str, Any], **others: Any) -> Request:
    """Return a public function's request: the keywords, and behind them what a front end passes as `model`.

    A training file precedes a project's defaults. The run of a plan is a default between both; its strategy is
    compared with others that are asked for. Raises SettingError for a setting that the function does not take.
    """
    row, keywords = QUESTIONS[question], dict(settings)
    request = model if isinstance(model, Request) else Request.of(question, model)
    request = replace(request, **{"question": question, "records": row.records, "compared": row.compared} | others)
    file, plan = (keywords.pop(name, None) if name in row.files else None for name in ("training_file", "plan"))
    file, plan = (request.training_file if file is None else file), (request.plan if plan is None else plan)
    for name in row.unused:
        if name in keywords:
            raise SelectionError(f"{question} does not depend on {name}; leave it out")
    request = request.over(read_settings(keywords, compared=request.compared, records=request.records, permit=True))
    if plan is not None:
        from bertscope.sources.training_files import read_plan

        request = request.with_plan(read_plan(plan) if isinstance(plan, str | PathLike) else plan)
    if file is not None:
        from bertscope.sources.training_files import read_training_file

        request = request.with_file(file if isinstance(file, TrainingFile) else read_training_file(str(file)))
    return request


def resolved(request: Request, source: ModelSource | None = None, **defaults: Any) -> Resolved:
    """Return the runs and limits, with the function's defaults; parameters of own code keep their dtypes."""
    defaults = {**QUESTIONS[request.question].defaults, **defaults}
    if source is not None:
        defaults |= default_length(request, source, defaults.get("seq", RunConfig.seq))
        if source.has_own_dtypes:
            defaults = {"precision": STORED, **loop_of(source.build()), **defaults}
        if request.plan is not None:
            from bertscope.memory.plan import check_plan

            check_plan(source, request.plan)
    return request.resolved(**defaults)


def default_length(request: Request, source: ModelSource, usual: int = RunConfig.seq) -> dict[str, int]:
    """Return the longest sequence of the model as the default, if nobody gave a length and `usual` is longer."""
    longest = usual if request.has("seq") else longest_input(source, usual)
    return {"seq": longest} if longest < usual else {}


def module_records(request: Request, module: nn.Module, *, takes_limit: bool = False) -> tuple[Any, ...]:
    """Return the records for a module with its inputs; raises SelectionError for a setting that they determine."""
    table = rows(*request.records)
    if fixed := next((name for source in request.sources for name in source if not table[name].of_modules), ""):
        allowed = ", ".join(key for key, row in table.items() if row.of_modules)
        raise SelectionError(f"{fixed} is determined by the module and its inputs; allowed: {allowed}")
    ((run_config, limit, *further),) = request.resolved(precision=STORED, **loop_of(module)).points
    if run_config.precision != STORED and not run_config.autocast:
        raise SelectionError(f"the module determines its dtypes; precision is {STORED} or {AUTOCAST}...")
    if limit != Limit() and not takes_limit:
        raise SelectionError("gpu and budget are for an estimate without loss; leave them or loss out")
    return run_config, limit, *further


def loop_of(module: nn.Module) -> dict[str, str]:
    """Return the loop in which a module of this class is trained, if its class says it: a LightningModule's Trainer."""
    is_lightning = any(base.__name__ == "LightningModule" for base in type(module).__mro__)
    return {"loop": LIGHTNING} if is_lightning else {}
