"""The arguments of a public function: models, inputs, and the settings that become runs, a limit and a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

from bertscope.calibrations import Calibration, calibration_here, calibration_in, calibration_of, calibrations, card_of
from bertscope.config import POSITIONS, BertConfig
from bertscope.errors import SelectionError
from bertscope.gpus import Gpu, find_gpu
from bertscope.reports.memory import TrainingFile, TrainingKey
from bertscope.reports.plan import PlanReport
from bertscope.settings.generate import INPUT_KEYWORDS
from bertscope.settings.request import Request, Resolved, read_settings
from bertscope.settings.rows import SettingError, rows
from bertscope.settings.run_config import AUTOCAST, CUDA, QUESTIONS, STORED, TRAINER, Limit, RunConfig
from bertscope.sources.building import built_for_counting
from bertscope.sources.find import source_of
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from bertscope.analyses.memory.step import Loss
    from bertscope.analyses.modules.module_tree import InOut
    from bertscope.settings.keywords import GivenInputs, RunSettings
    from bertscope.torch_access import nn

    class ShapesOfRun(GivenInputs, total=False):
        """Keywords for the shapes of a forward pass."""

        shapes: Mapping[str, InOut] | bool | None
        batch: int
        seq: int | None
        inputs: Any


class Configuration(Protocol):
    """A configuration of transformers."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its config.json."""


# A module, a name or path as for the command line, a configuration or its dictionary, or `bertscope.load(...)`.
Model: TypeAlias = "nn.Module | ModelSource | BertConfig | Configuration | Mapping[str, Any] | str | os.PathLike[str]"


def is_module(model: Model) -> TypeGuard[nn.Module]:
    """Return True for a module of torch, which is imported then."""
    if "torch" not in sys.modules:
        return False
    from bertscope.torch_access import nn

    return isinstance(model, nn.Module)


def built(model: Model, name: str | None = None) -> tuple[nn.Module, str | None]:
    """Return the given module itself, or the model of a source on meta, and the name for its report."""
    if is_module(model):
        return model, name
    source = source_of(model, name=name)
    return built_for_counting(source), source.name


def inputs_of(inputs: Any, keywords: GivenInputs) -> Any:
    """Take the inputs of a module out of the keywords of a function, and return them; None without any.

    They are `inputs`, or `input_data` as torchinfo calls them, or tensors on meta of `input_size`, a size or several,
    whose `dtypes` are by default float32. Raises SelectionError for two of these, and for a size that is none.
    """
    data, input_size, dtypes = (keywords.pop(key, None) for key in INPUT_KEYWORDS)  # type: ignore[misc]
    if sum(item is not None for item in (inputs, data, input_size)) > 1:
        raise SelectionError("give one of inputs, input_data and input_size")
    inputs = data if inputs is None else inputs
    if input_size is None:
        if dtypes is not None:
            raise SelectionError("dtypes are those of input_size; give it too, or leave dtypes out")
        return inputs
    from bertscope.torch_access import torch

    sizes: Any = [input_size] if all(isinstance(size, int) for size in input_size) else list(input_size)
    if not sizes[0] or not all(type(number) is int and number > 0 for size in sizes for number in _numbers(size)):
        raise SelectionError(f"input_size is a size such as (1, 3, 224, 224), or a list of sizes; got {input_size!r}")
    kinds = list(dtypes or [torch.float32] * len(sizes))
    if len(kinds) != len(sizes):
        raise SelectionError(f"dtypes has one dtype for each size; got {len(kinds)} for {len(sizes)} sizes")
    return tuple(torch.empty(tuple(size), dtype=kind, device="meta") for size, kind in zip(sizes, kinds, strict=True))


def function_of(settings: RunSettings) -> Loss | None:
    """Take the loss out of the settings if it is a function, and return it."""
    found = settings.get("loss")
    if isinstance(found, str):
        return None
    settings.pop("loss", None)
    return found


def inputs_on_device(inputs: Any, device: str) -> Any:
    """Return inputs of `input_size` with values on a device, and any other inputs as they are."""
    from bertscope.torch_access import torch

    is_of_sizes = isinstance(inputs, tuple) and all(isinstance(item, torch.Tensor) and item.is_meta for item in inputs)
    return tuple(torch.ones_like(tensor, device=device) for tensor in inputs) if is_of_sizes else inputs


def batch_of(inputs: Any) -> int:
    """Return the first size of the first tensor of the inputs; raises SelectionError if none has one."""
    return _size_of(inputs, 0, "first size is the batch")


def _size_of(inputs: Any, place: int, what: str) -> int:
    from bertscope.torch_access import torch, tree_leaves

    for item in tree_leaves(inputs):
        if isinstance(item, torch.Tensor) and item.ndim > place:
            return item.shape[place]
    raise SelectionError(f"the inputs have no tensor whose {what}")


def batched(inputs: Any, *, has_length: bool = False) -> Callable[[int, int], Any] | None:
    """Return a function from a batch and a length to inputs like these on meta; None without inputs.

    Their first sizes that are the batch follow it; if the inputs have a length, second sizes that are it follow too.
    """
    if inputs is None:
        return None
    from bertscope.torch_access import torch, tree_map

    own = [batch_of(inputs), _size_of(inputs, 1, "second size is the length")] if has_length else [batch_of(inputs)]

    def of_sizes(item: Any, wanted: Sequence[int]) -> Any:
        """Return a tensor on meta of another batch and length, and any other value as it is."""
        if not isinstance(item, torch.Tensor):
            return item
        sizes = [new if size == old else size for size, old, new in zip(item.shape, own, wanted)]  # noqa: B905
        return torch.empty((*sizes, *item.shape[len(sizes) :]), dtype=item.dtype, device="meta")

    return lambda batch, seq: tree_map(partial(of_sizes, wanted=(batch, seq)), inputs)


def _numbers(size: Any) -> Sequence[Any]:
    return size if isinstance(size, Sequence) and not isinstance(size, str) else [None]


def refuse_sizes(batch: int, seq: int | None, when: str) -> None:
    """Raise SelectionError if `batch` or `seq` is set although neither has an effect."""
    if (batch, seq) != (1, None):
        raise SelectionError(f"batch and seq have no effect {when}; leave them out")


def shapes_of_run(
    model: Model, *, shapes: Mapping[str, InOut] | bool | None = None, batch: int = 1, seq: int | None = None,
    inputs: Any = None, input_size: Any = None, dtypes: Any = None, input_data: Any = None,
) -> Mapping[str, InOut] | None:  # fmt: skip
    """Return the shapes of a run with the inputs, or if `shapes` is True at this batch and length; else `shapes`."""
    given = inputs_of(inputs, {"input_size": input_size, "dtypes": dtypes, "input_data": input_data})
    if given is not None or shapes is True:
        from bertscope.analyses.tracing.operators import source_shapes

        source = source_of(model if given is None else built(model)[0], inputs=given)
        if given is not None:
            refuse_sizes(batch, seq, "on a module with inputs")
        return source_shapes(source, batch, usual_length(*[source] * (given is None)) if seq is None else seq)
    refuse_sizes(batch, seq, "without shapes=True")
    return shapes or None


def requested(question: str, model: Any, settings: Mapping[str, Any], **others: Any) -> Request:
    """Return the request of a public function: the keywords, and behind them what a front end passes as `model`.

    A training file precedes the defaults of a project. The run of a plan is a default between both; its strategy is
    compared with others that are asked for. Raises SettingError for a setting that the function does not take.
    """
    own, keywords = QUESTIONS[question], dict(settings)
    request = model if isinstance(model, Request) else Request.of(question, model)
    request = replace(request, **{"question": question, "records": own.records, "compared": own.compared} | others)
    file, plan = (keywords.pop(name, None) if name in own.files else None for name in ("training_file", "plan"))
    file, plan = (request.training_file if file is None else file), (request.plan if plan is None else plan)
    for name in own.unused:
        if name in keywords:
            raise SelectionError(f"{question} does not depend on {name}; leave it out")
    request = request.over(read_settings(keywords, compared=request.compared, records=request.records, permit=True))
    if plan is not None:
        from bertscope.sources.training_files import read_plan

        request = request.with_plan(plan if isinstance(plan, PlanReport) else read_plan(plan))
    if file is not None:
        from bertscope.sources.training_files import read_training_file

        request = request.with_file(file if isinstance(file, TrainingFile) else read_training_file(str(file)))
    return request


def resolved(request: Request, source: ModelSource | None = None, **defaults: Any) -> Resolved:
    """Return the runs and limits, with the defaults of the function; parameters of own code keep their dtypes."""
    defaults = {**QUESTIONS[request.question].defaults, **defaults}
    if source is not None:
        defaults |= default_length(request, source, defaults.get("seq", RunConfig.seq))
        if source.has_own_dtypes:
            defaults = {"precision": STORED, **loop_of(source.build()), **defaults}
        if request.plan is not None:
            from bertscope.analyses.memory.plan import check_plan

            check_plan(source, request.plan)
    return request.resolved(**defaults)


def default_length(request: Request, source: ModelSource, usual: int = RunConfig.seq) -> dict[str, int]:
    """Return the longest sequence of the model as the default, if nobody gave a length and `usual` is longer."""
    longest = usual if request.has("seq") else _longest(source, usual)
    return {"seq": longest} if longest < usual else {}


def module_records(request: Request, module: nn.Module, *, takes_limit: bool = False) -> tuple[Any, ...]:
    """Return the records for a module with its inputs; raises SelectionError for a setting that they determine."""
    table = rows(*request.records)
    if fixed := next((name for source in request.sources for name in source if not table[name].of_modules), ""):
        allowed = ", ".join(key for key, row in table.items() if row.of_modules)
        raise SelectionError(f"{fixed} is determined by the module and its inputs; allowed: {allowed}")
    ((run_config, limit, *others),) = request.resolved(precision=STORED, **loop_of(module)).points
    if run_config.precision != STORED and not run_config.autocast:
        raise SelectionError(f"the module determines its dtypes; precision is {STORED} or {AUTOCAST}...")
    if limit != Limit() and not takes_limit:
        raise SelectionError("gpu and budget are for an estimate without loss; leave them or loss out")
    return run_config, limit, *others


def with_limit(request: Request, memory: Gpu | int | None) -> Gpu | int:
    """Return the GPU or the budget of a search; raises SettingError if there is neither."""
    if memory is None:
        raise request.error("give either {budget}, such as 16GiB, or {gpu}, such as t4", "budget", "gpu")
    return memory


def noted(request: Request, runs: Sequence[RunConfig], searched: str = "") -> TrainingFile | None:
    """Return the training file with the settings for which the runs have other values.

    `searched` is the setting that the function searches a value for.
    """
    file: TrainingFile | None = request.training_file
    if file is None:
        return None
    replaced = []
    for name, value in file.fields.items():
        used = list(dict.fromkeys(run.flat()[name] for run in runs))
        if name == searched or value not in used:
            words = ", ".join(str(item).lower() for item in used)
            effect = "it is searched" if name == searched else f"an option sets {words}"
            replaced.append(TrainingKey(key=name, value=value, effect=effect))
    return replace(file, replaced=tuple(replaced))


def usual_length(*sources: ModelSource) -> int:
    """Return the default length, or the limit of a model that takes less."""
    return min([RunConfig.seq, *(_longest(source, RunConfig.seq) for source in sources)])


def _longest(source: ModelSource, usual: int) -> int:
    """Return the length limit of a model; of one whose file shows that it takes the usual length, that one."""
    if source.bert_config is not None:
        return source.bert_config.max_position_embeddings
    parts = [source.settings, *(part for part in source.settings.values() if isinstance(part, Mapping))]
    known = [part[name] for part in parts for name in POSITIONS if isinstance(part.get(name), int)]
    if not source.has_own_dtypes and all(most >= usual + 2 for most in known):  # RoBERTa's begin after the padding's
        return usual
    from bertscope.analyses.tracing.inputs import positions

    return positions(source.build())


def loop_of(module: nn.Module) -> dict[str, str]:
    """Return the loop in which a module of this class is trained, if its class says it: a LightningModule's Trainer."""
    is_lightning = any(base.__name__ == "LightningModule" for base in type(module).__mro__)
    return {"loop": TRAINER} if is_lightning else {}


def calibration_for(limit: Limit, run_config: RunConfig) -> Calibration | None:
    """Return the calibration of the limit, its GPU or, for a run on cuda, this machine's card; None without one."""
    if isinstance(limit.calibration, str):
        if run_config.device != CUDA:
            device = run_config.device
            raise SelectionError(f"{limit.calibration} is a calibration of a GPU; leave it or the device {device} out")
        return calibration_in(limit.calibration, limit.gpu)
    if not limit.calibration or run_config.device != CUDA or not any(calibrations()):
        return None
    if limit.gpu is not None:
        return calibration_of(find_gpu(limit.gpu))
    from bertscope.analyses.memory.calibration import this_card

    here = this_card()
    return calibration_here(*here) if here else None


def card_for(limit: Limit, run_config: RunConfig) -> Gpu | None:
    """Return the card of a run with what a calibration measured; None if no GPU is named or calibrated.

    A card that is not named has as much memory as the budget, if there is one.
    """
    known = find_gpu(limit.gpu) if limit.gpu is not None else None
    if known is None and limit.budget is None and limit.context is not None:
        raise SettingError("{context} has no effect without {gpu}; give it too, or leave {context} out", ["context"])
    if known is not None and limit.context is not None:
        known = replace(known, context_low_bytes=limit.context, context_high_bytes=limit.context)
    found = calibration_for(limit, run_config)
    if found is None:
        return known
    if known is not None:
        return found.on(known)
    card = card_of(found)
    return card if limit.budget is None else replace(card, memory_bytes=limit.budget)
