"""`bertscope.explain`, `bertscope.diagram` and `bertscope.flops`: what a model computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from bertscope.analyses import diagram as diagrams
from bertscope.analyses import explain as steps
from bertscope.analyses.dataflow import ForwardInputs
from bertscope.api import requests
from bertscope.api.requests import public_function
from bertscope.errors import SelectionError, name_of, refuse_negative
from bertscope.model.bert import BertModel, BertPreTrainedModel
from bertscope.model.lora import PeftModel, base_model_of
from bertscope.reports.diagram import ClassReport, GraphReport
from bertscope.reports.explain import ExplainReport
from bertscope.reports.modules import FlopsReport
from bertscope.settings.request import Request
from bertscope.settings.run_config import INFERENCE, QUESTIONS, TRAINING
from bertscope.sources.bert import BertSource
from bertscope.sources.find import Model, source_of
from bertscope.tracing import flops as work
from bertscope.tracing.inputs import idle_sizes

_SizedReport = TypeVar("_SizedReport", bound="ExplainReport | GraphReport | ClassReport")

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import GivenInputs, RunSettings

    class DiagramOptions(GivenInputs, total=False):
        """Keywords for a class diagram and for a forward pass's inputs."""

        around: str | None
        implementation: str
        nn_module: bool
        config: bool


@public_function()
def explain(
    model: Model,
    path: str | None = None,
    *,
    batch: int = 1,
    seq: int | None = None,
    inputs: Any = (),
    name: str | None = None,
    **keywords: Unpack[GivenInputs],
) -> ExplainReport:
    """Return a model's steps, or those under `path` (in any naming), with the sums at each level.

    A `path` may also be a module, or a section of a BERT: config, inputs, outputs, caches, positions, checkpointing.
    FLOPs count the matrix products in a forward pass, 2 for a multiply-add. The steps in a model that is no
    BERT, or that has adapters, are its modules. It runs with `inputs`, or tensors with `input_size` and `dtypes`; texts
    such as `pixel_values=Bx3x224x224:float32` are those that cannot be derived. Raises SelectionError for a path that
    no step has.

    >>> explained = bertscope.explain(bertscope.BertConfig(), "pooler")
    >>> explained.steps[0].params.symbols, explained.steps[0].params.value
    ('hidden_size x hidden_size + hidden_size', 590592)
    """
    texts = isinstance(inputs, Sequence) and all(isinstance(item, str) for item in inputs)
    tensors = requests.only_inputs_of(None if texts else inputs, keywords)
    if tensors is not None:
        requests.refuse_sizes(batch, seq, "on a module with inputs")
        model, batch = source_of(requests.built(model)[0], name=name, inputs=tensors), requests.batch_of(tensors)
    elif isinstance(model, BertPreTrainedModel):
        has_pooler = not isinstance(model, BertModel) or model.pooler is not None
        architecture = type(model).__name__
        model = BertSource(
            name=name or architecture, config=model.config, architecture=architecture, add_pooling_layer=has_pooler
        )
    source = source_of(model, name=name)
    described = inputs if texts else ()
    seq = requests.length_of(seq, *[source] * (tensors is None), batch=batch, texts=described)
    report = steps.explain(source, path, batch=batch, seq=seq, inputs=described)
    return _without_idle_length(report, source, tensors, described)


def _without_idle_length(report: _SizedReport, model: Any, tensors: Any, described: Collection[str]) -> _SizedReport:
    """Return the report without the length where it changes no input."""
    source = source_of(model)
    is_known = described or not source.has_own_dtypes
    is_idle = tensors is not None or (is_known and "seq" in idle_sizes(source, described))
    return replace(report, seq=None) if is_idle and not isinstance(report, ClassReport) else report


@public_function(diagrams.class_diagram)
def diagram(
    model: Model,
    kind: str | None = None,
    path: str = "",
    *,
    name: str | None = None,
    depth: int | None = None,
    direction: str | None = None,
    forward_inputs: ForwardInputs | Mapping[str, Any] | None = None,
    inputs: Any = None,
    **options: Unpack[DiagramOptions],
) -> ClassReport | GraphReport:
    """Return one diagram, by default `class` for a BERT and `tree` for any other module.

    `class` draws all classes in an `implementation` (bertscope, transformers), or those around one class: `around`, or
    the module's at `path`; with `nn_module` also their base torch.nn.Module, with `config` the configuration. `forward`
    draws the dataflow in the module at `path` for `forward_inputs` (a mapping with the fields of ForwardInputs, in
    which a length None is the usual one), a module's `inputs`, or tensors with `input_size` and `dtypes`. `tree`
    draws the modules at and below `path`. Raises SelectionError for another kind, and for an unknown path or class.

    >>> print(bertscope.diagram(torch.nn.Sequential(torch.nn.Linear(3, 4)), "tree"))
    ---
    title: "Sequential, modules with their parameters in all copies"
    ---
    flowchart LR
      m0["Sequential<br/>16 params"]
      m1["0<br/>Linear<br/>16 params"]
      m0 --> m1
    <BLANKLINE>
    """
    tensors = requests.inputs_of(inputs, options)
    if tensors is not None and forward_inputs is not None:
        raise SelectionError(f"{name_of('forward_inputs')} has no effect on a module with inputs; leave it out")
    module, shown = requests.built(model, name)
    is_bert = isinstance(base_model_of(module), BertPreTrainedModel)
    is_own = isinstance(module, BertPreTrainedModel | PeftModel)
    kind = kind or ("class" if is_own or options.get("around") else "tree")
    if kind not in diagrams.KINDS:
        raise SelectionError(f"kind must be one of {', '.join(diagrams.KINDS)}; got {kind!r}")
    if isinstance(forward_inputs, Mapping):
        asked_inputs = ForwardInputs(**{**forward_inputs, "seq": forward_inputs.get("seq") or 0})
        sides = [source_of(model)] * (kind == "forward")
        seq = requests.length_of(asked_inputs.seq or None, *sides, batch=asked_inputs.batch, texts=asked_inputs.input)
        forward_inputs = ForwardInputs(**{**forward_inputs, "seq": seq})
        forward_inputs = forward_inputs if kind == "forward" or forward_inputs != ForwardInputs() else None
    settings = forward_inputs or ForwardInputs()
    if settings.input if is_bert else settings.cache or settings.head_mask:
        unused = f"{name_of('input')} has no effect on a BERT"
        if not is_bert:
            unused = f"{name_of('cache')} and {name_of('head_mask')} have an effect on a BERT only"
        raise SelectionError(f"{unused}; leave them out")
    refuse_negative(depth=depth)
    draw = diagrams.KINDS[kind]
    arguments = {"depth": depth, "direction": direction, "forward_inputs": forward_inputs, "inputs": tensors, **options}
    arguments = {key: value for key, value in arguments.items() if value is not None and value is not False}
    taken = {*signature(draw).parameters, *["inputs"] * (kind == "forward")}
    taken -= set() if is_bert else {"implementation"}
    if unused := next((key for key in arguments if key not in taken), ""):
        raise SelectionError(f"{name_of(unused)} has no effect on a diagram of kind {kind} of this model; leave it out")
    if arguments.pop("inputs", None) is not None:
        module = source_of(module, inputs=tensors).build()
        arguments.setdefault("forward_inputs", ForwardInputs(batch=requests.batch_of(tensors)))
    report = draw(module, path, name=shown, **arguments)
    return _without_idle_length(report, model, tensors, settings.input) if kind == "forward" else report


@public_function()
def flops(
    model: Model | Request, inputs: Any = None, *, name: str | None = None, **settings: Unpack[RunSettings]
) -> FlopsReport:
    """Count the FLOPs in one run of any model; mode "training" adds backward.

    A module runs with its `inputs`: a tensor, a tuple, or a dictionary of keywords; `input_size` and `dtypes` describe
    them. Without inputs, and for any other model, they are derived from its forward at `batch` and `seq`, of which
    there may be several; then layers of `checkpointing` are recomputed, and parameters that match `freeze` are not
    trained. The model runs on meta tensors, which compute and allocate nothing. One multiply-add counts as 2 FLOPs in
    `matmul_flops`, as in torch.utils.flop_counter.

    >>> bertscope.flops("bert-base-cased", batch=1, seq=512)[""].forward.matmul_flops
    120044126208
    >>> report = bertscope.flops(torch.nn.Linear(3, 4), input_size=(10, 3))
    >>> report[""].forward.matmul_flops == 10 * 2 * 3 * 4
    True
    """
    tensors = requests.inputs_of(inputs, settings)
    request = requests.request_of("flops", model, settings)
    if tensors is not None:
        if unused := sorted(request.named - {"mode"}):
            raise SelectionError(f"{unused[0]} is for a run without inputs; a given module already has some")
        module, shown = requests.built(request.subject, name)
        ((run_config, _),) = requests.resolved(request)
        return work.flops(module, tensors, mode=run_config.mode, name=shown)
    source = source_of(request.subject, name=name)
    requests.refuse_idle_of(request, source)
    resolved = request.resolved(**QUESTIONS["flops"].defaults, **requests.default_length(request, source))
    runs = [run for run, *_ in resolved]
    resized = requests.with_own_sizes(
        runs[0], source
    )  # a size that no input has was not named: all runs have its default
    fixed = {key: getattr(resized, key) for key in ("batch", "seq") if getattr(resized, key) != getattr(runs[0], key)}
    runs = [run.changed(**fixed) for run in runs]
    if runs[0].mode not in (INFERENCE, TRAINING):
        raise SelectionError(f"FLOPs depend on mode {INFERENCE} or {TRAINING}; got {runs[0].mode}")
    points = [tuple(dict.fromkeys(getattr(run, key) for run in runs)) for key in ("batch", "seq", "checkpointing")]
    report = work.flops_model(work.FlopsRun(source=source, run=replace(runs[0], batch=1, seq=1)), *points)
    return replace(report, seq=None) if fixed.get("seq") == 1 else report
