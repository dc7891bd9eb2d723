"""Arguments of public functions: any kind of model, inputs of modules, and the request that settings make."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature, signature
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from bertscope.config import POSITIONS
from bertscope.errors import SelectionError, one_line, typed_arguments
from bertscope.gpus import find_device
from bertscope.reports.memory import TrainingFile, TrainingKey
from bertscope.reports.plan import PlanReport
from bertscope.settings.request import OF_MODEL, Request, Source, placed, read_settings
from bertscope.settings.rows import CodeObject, SettingError, rows
from bertscope.settings.run_config import AUTOCAST, CUDA, LIGHTNING, QUESTIONS, STORED, Question, RunConfig
from bertscope.settings.training import MODEL, TrainingArguments
from bertscope.sources.find import Model, source_of
from bertscope.sources.model_source import ModelSource, quantized_for_counting

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import GivenInputs
    from bertscope.torch_access import nn
    from bertscope.tracing.module_tree import InOut

    class ShapesOfRun(GivenInputs, total=False):
        """Keywords for the shapes of a forward pass."""

        shapes: Mapping[str, InOut] | bool | None
        batch: int
        seq: int | None
        inputs: Any


Function = TypeVar("Function", bound=Callable[..., Any])
INPUT_KEYWORDS = ("input_data", "input_size", "dtypes")


def _shared(
    *, training_file: TrainingFile | TrainingArguments | str | PathLike[str] | None = None,
    plan: PlanReport | str | PathLike[str] | None = None, input_data: Any = None,
    input_size: Sequence[Any] | None = None, dtypes: Sequence[Any] | None = None,
) -> None:  # fmt: skip
    """Take the keywords of files and of a module's inputs, which many functions have."""


def public_function(*passed_on: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that lists the keywords of a public function in its signature and docstring.

    It takes the keywords of functions to which it passes them on, a module's inputs, and its settings in QUESTIONS.
    """

    def decorate(function: Function) -> Function:
        explicit = [item for item in signature(function).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
        names = {item.name for item in explicit}
        passed = [item for other in passed_on for item in signature(other).parameters.values()]
        passed = [item.replace(kind=Parameter.KEYWORD_ONLY) for item in passed if item.default is not Parameter.empty]
        listed = {item.name: item for item in explicit} | {item.name: item for item in passed if item.name not in names}
        question = QUESTIONS.get(function.__name__, Question(records=(), files=()))
        table = {name: row for name, row in question.table.items() if name not in listed}
        every = signature(_shared).parameters
        shared = {name: every[name] for name in (*question.files, *INPUT_KEYWORDS * ("inputs" in listed))}
        if table:
            lines = "\n".join(f"        {name}: {row.help} Takes {row.takes}." for name, row in table.items())
            function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    Settings of the run:\n{lines}\n    "
        added = {name: question.defaults.get(name, row.default) for name, row in table.items()}
        settings = {name: Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in added.items()}
        function.__signature__ = Signature([*(listed | shared | settings | listed).values()])  # type: ignore[attr-defined]
        return typed_arguments(function, *passed_on, _shared)

    return decorate


def is_module(model: Model) -> TypeGuard[nn.Module]:
    """Return True for a module in torch, which is imported then."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def built(model: Model, name: str | None = None, quantize: str = STORED) -> tuple[nn.Module, str | None]:
    """Return the given module itself, or a source's model on meta with such weights, and the name for its report."""
    if is_module(model) and quantize == STORED:
        return model, name
    source = source_of(model, name=name)
    return quantized_for_counting(source, quantize), source.name


def inputs_of(inputs: Any, keywords: GivenInputs, **determined: Any) -> Any:
    """Take a module's inputs out of a function's keywords, and return them; None without any.

    They are `inputs`, or `input_data` as torchinfo calls them, or tensors on meta of `input_size`, a size or several,
    whose `dtypes` are by default float32. Raises SelectionError for two of these, for a size that is none, and for a
    value of what the inputs determine.
    """
    data, input_size, dtypes = (keywords.pop(key, None) for key in INPUT_KEYWORDS)  # type: ignore[misc]
    if sum(item is not None for item in (inputs, data, input_size)) > 1:
        raise SelectionError("give one of inputs, input_data and input_size")
    inputs = data if inputs is None else inputs
    values = [name for name, value in determined.items() if value is not None]
    if values and (inputs is not None or input_size is not None):
        raise SelectionError(f"{values[0]} is determined by the inputs; leave it out")
    if input_size is None:
        if dtypes is not None:
            raise SelectionError("dtypes belong to input_size; give it too, or leave dtypes out")
        return inputs
    from bertscope.torch_access import torch

    is_list = isinstance(input_size, Sequence) and not all(isinstance(size, int) for size in input_size)
    sizes: Any = list(input_size) if is_list else [input_size]
    numbers = [number for size in sizes for number in (size if isinstance(size, (tuple, list)) else [None])]
    if not sizes[0] or not all(type(number) is int and number > 0 for number in numbers):
        raise SelectionError(f"input_size is a size such as (1, 3, 224, 224), or a list of sizes; got {input_size!r}")
    kinds = list(dtypes or [torch.float32] * len(sizes))
    if len(kinds) != len(sizes):
        raise SelectionError(f"dtypes has one dtype for each size; got {len(kinds)} for {len(sizes)} sizes")
    return tuple(torch.empty(tuple(size), dtype=kind, device="meta") for size, kind in zip(sizes, kinds, strict=True))


def only_inputs_of(inputs: Any, keywords: GivenInputs) -> Any:
    """Return the same for a function without other keywords; raises SelectionError for one that is left."""
    tensors = inputs_of(inputs, keywords)
    for name in keywords:
        raise SelectionError(f"there is no keyword {name[:60]!r}; leave it out")
    return tensors


def with_objects(settings: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return settings in which the caller's optimizer and loss function have a name; raises SelectionError."""
    optimizer, loss = (settings.get(name) for name in ("optimizer", "loss"))
    named = {name: value for name, value in settings.items() if value is not None or name not in ("optimizer", "loss")}
    if callable(loss):
        named["loss"] = CodeObject(MODEL, loss, getattr(loss, "__name__", type(loss).__name__))
    if optimizer is None or isinstance(optimizer, str):
        return named
    from bertscope.tracing.fake_tensors import given_optimizer

    chosen = given_optimizer(optimizer, list(model.parameters()) if is_module(model) else [])
    if isinstance(chosen["optimizer"], CodeObject):
        for name in ("momentum", "weight_decay", "optimizer_implementation"):
            if name in settings:
                raise SelectionError(f"{chosen['optimizer'].label} sets its {name} itself; leave the keyword out")
    return named | chosen


def batch_of(inputs: Any, dimension: int = 0) -> int:
    """Return the first tensor's first size, or its second, the length; raises SelectionError if none has one."""
    from bertscope.tracing.log import tensors

    for item in tensors(inputs):
        if item.ndim > dimension:
            return item.shape[dimension]  # type: ignore[no-any-return]
    what = ("first size is the batch", "second size is the length")[dimension]
    raise SelectionError(f"the inputs have no tensor whose {what}")


def with_own_sizes(run_config: RunConfig, source: ModelSource, inputs: Any = None) -> RunConfig:
    """Return the run with the batch and the length of a module's own inputs, which no setting chooses.

    The length is the second size of a tensor of tokens, and else 1.
    """
    texts = run_config.input if source.has_own_dtypes else ()
    if inputs is None and not texts and (source.has_own_dtypes or source.bert_config is not None):
        return run_config
    from bertscope.tracing import inputs as run_inputs
    from bertscope.tracing.log import tensors

    idle = {"batch", "seq"} if inputs is not None else run_inputs.idle_sizes(source, texts)
    if inputs is None:
        inputs = run_inputs.described_inputs(texts, run_config.batch, run_config.seq)
    first = next((item for item in tensors(inputs) if item.ndim), None)
    sizes = dict.fromkeys(idle, 1)
    if first is not None:
        is_tokens = first.ndim > 1 and not first.is_floating_point()
        sizes |= {"batch": first.shape[0], "seq": first.shape[1] if is_tokens else 1}
    return run_config.changed(**{name: sizes[name] for name in idle})


def batched(inputs: Any, *, has_length: bool = False) -> Callable[[int, int], Any] | None:
    """Return a function from a batch and a length to inputs like these on meta; None without inputs.

    Their first sizes that are the batch follow it; if the inputs have a length, second sizes that are it follow too.
    """
    if inputs is None:
        return None
    from bertscope import torch_access

    torch = torch_access.torch
    before = [batch_of(inputs, dimension) for dimension in range(1 + has_length)]

    def of_sizes(item: Any, wanted: Sequence[int]) -> Any:
        """Return a tensor on meta of another batch and length, and any other value as it is."""
        if not isinstance(item, torch.Tensor):
            return item
        sizes = [new if size == old else size for size, old, new in zip(item.shape, before, wanted)]  # noqa: B905
        return torch.empty((*sizes, *item.shape[len(sizes) :]), dtype=item.dtype, device="meta")

    return lambda batch, seq: torch_access.tree_map(partial(of_sizes, wanted=(batch, seq)), inputs)


def refuse_sizes(batch: int, seq: int | None, when: str) -> None:
    """Raise SelectionError if `batch` or `seq` is set although neither has an effect."""
    if (batch, seq) != (1, None):
        raise SelectionError(f"batch and seq have no effect {when}; leave them out")


def shapes_of_run(
    model: Model, *, shapes: Mapping[str, InOut] | bool | None = None, batch: int = 1, seq: int | None = None,
    inputs: Any = None, **keywords: Unpack[GivenInputs]
) -> Mapping[str, InOut] | None:  # fmt: skip
    """Return a run's shapes with the inputs, or if `shapes` is True at this batch and length; else `shapes`."""
    tensors = only_inputs_of(inputs, keywords)
    if tensors is not None or shapes is True:
        from bertscope.tracing.flops import source_shapes

        source = source_of(model if tensors is None else built(model)[0], inputs=tensors)
        if tensors is not None:
            refuse_sizes(batch, seq, "on a module with inputs")
        return source_shapes(source, batch, length_of(seq, *[source] * (tensors is None), batch=batch))
    refuse_sizes(batch, seq, "without shapes=True")
    return shapes or None


def length_of(seq: int | None, *sources: ModelSource, batch: int = 1, texts: Collection[str] = ()) -> int:
    """Return the length, or without one the default, or the limit of a model that takes less.

    Raises SettingError for a size without effect next to inputs that the texts describe.
    """
    _refuse_idle([texts], [*["seq"] * (seq is not None), *["batch"] * (batch != 1)], *sources)
    return min([RunConfig.seq, *(longest_input(source, RunConfig.seq) for source in sources)]) if seq is None else seq


def longest_input(source: ModelSource, usual: int) -> int:
    """Return the longest input, or the usual length if the model's file shows that it takes it."""
    if source.bert_config is not None:
        return source.bert_config.max_position_embeddings
    parts = [source.settings, *(part for part in source.settings.values() if isinstance(part, Mapping))]
    known = [part[name] for part in parts for name in POSITIONS if isinstance(part.get(name), int)]
    if not source.has_own_dtypes and all(most >= usual + 2 for most in known):  # RoBERTa's begin after the padding's
        return usual
    from bertscope.tracing.inputs import positions

    return positions(source.build())


def request_of(question: str, model: Any, settings: Mapping[str, Any]) -> Request:
    """Return a public function's request: the keywords, and behind them what a front end passes as `model`.

    A training file precedes a project's defaults. A plan's run is a default between both; its strategy is
    compared with others that are asked for. Raises SettingError for a setting that the function does not take.
    """
    row = QUESTIONS[question]
    request = model if isinstance(model, Request) else Request(question=question, subject=model)
    if of_model := next((name for name in OF_MODEL if name in settings), ""):
        raise SelectionError(f"{of_model} is for the model; give bertscope.load(MODEL, {of_model}=...) instead")
    keywords = with_objects(settings, request.subject)
    request = replace(request, question=question)
    file, plan = (keywords.pop(name, None) if name in row.files else None for name in ("training_file", "plan"))
    file, plan = (request.training_file if file is None else file), (request.plan if plan is None else plan)
    for name in row.unused:
        if name in keywords:
            raise SelectionError(f"{question} does not depend on {name}; leave it out")
    request = request.over(read_settings(keywords, compared=row.compared, records=row.records, permit=True))
    if plan is not None or file is not None:
        from bertscope.sources import training_files
    if plan is not None:
        request = request.with_plan(plan if isinstance(plan, PlanReport) else training_files.read_plan(plan))
    if file is not None:
        known = isinstance(file, TrainingFile)
        request = request.with_file(file if known else training_files.read_training_file(file))
    file = request.training_file
    if file is not None and file.lora and request.subject is not None:
        source = None if is_module(request.subject) else source_of(request.subject)
        if source is not None and not source.lora:
            where = training_files.place_of_adapters(file)
            return replace(request, subject=replace(source.with_options(lora=file.lora), lora_where=where))
        effect = f"the model has {source.lora}" if source else "a module is taken as it is"
        left_out = TrainingKey(key="lora", value=file.lora, effect=effect)
        request = replace(request, training_file=replace(file, replaced=(left_out,)))
    return request


def gpu_here(*index: int) -> tuple[str, int] | None:
    """Return the name and the bytes of the GPU in use, or with this index; None without one."""
    from bertscope.measure.profile_job import this_gpu

    return this_gpu(*index)


def limit_on(gpu: str | int) -> Source:
    """Return the limit of a GPU: its name, the index of one here, or its memory in bytes or as text such as 16GiB."""
    if not isinstance(gpu, (str, int)) or isinstance(gpu, bool):
        raise SelectionError(f"fits takes a GPU's name, an index, bytes or 16GiB; got {one_line(repr(gpu), limit=60)}")
    limit: dict[str, Any] = {"gpu": gpu, "device": CUDA}
    if isinstance(gpu, int) and gpu < 1024:  # a larger number is its bytes
        here = gpu_here(gpu)
        if here is None:
            raise SelectionError(f"torch finds no CUDA device {gpu} here; give a name such as t4, or the bytes")
        known = find_device(*here)
        limit |= {"gpu": known.name} if known else {"gpu": None, "budget": here[1]}
    elif isinstance(gpu, int) or re.fullmatch(r"[0-9.]+ ?[KMGT]?i?B", gpu):
        limit = {"budget": gpu}
    return read_settings({name: value for name, value in limit.items() if value is not None})


def resolved(
    request: Request, source: ModelSource | None = None, other_sources: Any = (), **defaults: Any
) -> list[tuple[Any, ...]]:
    """Return the records of each run, with the function's defaults; parameters of own code keep their dtypes.

    A size that changes no input of the source, nor of the other sources, is refused.
    """
    defaults = {**QUESTIONS[request.question].defaults, **defaults}
    if source is not None:
        refuse_idle_of(request, source, *other_sources)
        defaults |= default_length(request, source, defaults.get("seq", RunConfig.seq))
        if source.has_own_dtypes:
            defaults = {"precision": STORED, **loop_of(source.build()), **defaults}
    records = request.resolved(**defaults)
    if source is not None and request.plan is not None:
        from bertscope.memory.plan import check_plan

        check_plan(source, request.permitted_plan)
    return records


def refuse_idle_of(request: Request, *sources: ModelSource) -> None:
    """Raise SettingError for a batch or a length in a request or its plan that changes no input of these sources."""
    values = request.values()
    try:
        texts = values["input"].values if "input" in values else [()]
        _refuse_idle(texts, {"batch", "seq"} & request.named, *sources)
    except SettingError as error:
        raise placed(error, values) from None
    if request.plan is not None and with_own_sizes(request.plan.run, sources[0]) != request.plan.run:
        raise SelectionError("the batch and the seq of the plan are not those of its input; run 'bertscope plan' again")


def _refuse_idle(described: Collection[Collection[str]], named: Collection[str], *sources: ModelSource) -> None:
    if named and any(source.bert_config is None for source in sources):
        from bertscope.tracing.inputs import refuse_idle

        refuse_idle(described, named, *sources)


def default_length(request: Request, source: ModelSource, usual: int = RunConfig.seq) -> dict[str, int]:
    """Return the usual length, or the limit of a model that takes less, as the default if nobody gave a length."""
    return {} if request.has("seq") else {"seq": min(usual, longest_input(source, usual))}


def of_module(request: Request) -> Request:
    """Return the request without what a training file says and a module with inputs determines, such as the batch."""
    determined = [name for name, row in rows(*request.row.records).items() if not row.of_modules]
    file = request.training_file
    if file is not None:
        file = replace(file, fields={name: value for name, value in file.fields.items() if name not in determined})
    return replace(request.without(*determined), training_file=file)


def module_records(request: Request, module: nn.Module) -> tuple[Any, ...]:
    """Return the records for a module with its inputs; raises SelectionError for a setting that they determine."""
    table = rows(*request.row.records)
    sources = (item for source in request.sources for item in source.items())
    plain = (name for name, value in sources if not isinstance(value.values[0], CodeObject))
    determined = (name for name in plain if not table[name].of_modules)
    if fixed := next(determined, ""):
        allowed = ", ".join(key for key, row in table.items() if row.of_modules)
        raise SelectionError(f"{fixed} is determined by the module and its inputs; allowed: {allowed}")
    ((run_config, limit, *further),) = request.resolved(precision=STORED, **loop_of(module))
    if run_config.precision != STORED and not run_config.autocast:
        raise SelectionError(f"the module determines its dtypes; precision is {STORED} or {AUTOCAST}...")
    return run_config, limit, *further


def loop_of(module: nn.Module) -> dict[str, str]:
    """Return the loop in which a module of this class is trained, if its class says it: a LightningModule's Trainer."""
    is_lightning = any(base.__name__ == "LightningModule" for base in type(module).__mro__)
    return {"loop": LIGHTNING} if is_lightning else {}
