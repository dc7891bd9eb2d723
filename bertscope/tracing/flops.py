"""`flops`: what the operators of a run cost by its log, and of a source a sweep, the polynomial and the conventions.

If layers may be equal, three run, or three periods of layers; if their work is equal, one is repeated for all.
Otherwise (frozen parameters, a strategy that chooses layers) all run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from bertscope.config import BertConfig
from bertscope.errors import SelectionError, name_of
from bertscope.model.modules import copied
from bertscope.reports.base import as_data, to_json
from bertscope.reports.json import from_json, not_negative
from bertscope.reports.memory import BACKWARD, FORWARD, RECOMPUTE
from bertscope.reports.modules import (
    Convention,
    FlopsReport,
    FlopsRow,
    ModuleCall,
    OperatorRow,
    Polynomial,
    SweepPoint,
    Work,
)
from bertscope.settings.checkpointing import NONE, with_eager_attention
from bertscope.settings.run_config import FLASH_KERNELS, INFERENCE, TRAINING, RunConfig
from bertscope.settings.run_config import FORWARD as FORWARD_ONLY
from bertscope.settings.training import MODEL
from bertscope.sources.find import teachers
from bertscope.sources.model_source import REPEATED, ModelSource, built_for_counting
from bertscope.torch_access import is_plain_meta, load_dynamo_later, nn, operator_packet, torch
from bertscope.tracing.cache import saved
from bertscope.tracing.fake_tensors import (
    META_ATTENTION,
    DataDependentAnswers,
    OperatorResults,
    fake_copy,
    mark_valid,
    on_meta,
    random_state_kept,
    run_without_values,
)
from bertscope.tracing.inputs import arguments, inputs_for, loss_of, running_module
from bertscope.tracing.log import bytes_moved, cost, shape_of, tensors, windows_of
from bertscope.tracing.losses import add_teacher, batch_of_texts, loss_function
from bertscope.tracing.module_tree import InOut, Node, fold, freeze, read, subject, totals
from bertscope.tracing.record import Device, Recorder
from bertscope.tracing.repeat import RAN, Repeated, layer_stacks, repeated, shortened

_RESULTS = OperatorResults(is_plain_meta)
_Result = TypeVar("_Result")


@dataclass
class Calls:
    """One operator's calls in one module and phase."""

    role: str = ""
    calls: int = 0
    elements: int = 0
    work: Work = field(default_factory=Work)


@dataclass
class Trace:
    """The calls by (path, phase, operator), and the calls of modules by their beginning."""

    calls: dict[tuple[str, str, str], Calls] = field(default_factory=partial(defaultdict, Calls))
    modules: list[ModuleCall] = field(default_factory=list)

    def shapes(self) -> dict[str, InOut]:
        """Return the inputs and outputs of each module's first call by path, in the order of these calls."""
        shapes: dict[str, InOut] = {}
        for call in self.modules:
            shapes.setdefault(call.path, (call.inputs, call.outputs))
        return shapes


class _AnyDevice(Device):
    """The device that the tensors are on, mostly meta, whose memory does not count."""

    has_memory = False

    def __init__(self, *, is_masked: bool) -> None:
        self.answers = DataDependentAnswers(is_masked=is_masked)

    def number(self, tensor: Any) -> Any:
        has_value = not (tensor.is_meta or hasattr(tensor, "fake_mode"))
        return super().number(tensor) if has_value else self.answers.value(tensor)

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator, and note which values are known."""
        places = self.answers.valid(operator, args)
        out = _RESULTS.run(operator, args, kwargs) if places is None else places
        self.answers.note(operator, args, out)
        return out


def trace(model: nn.Module, run: Callable[[], _Result], padding: float = 0.0) -> tuple[Trace, _Result]:
    """Run `run`, which calls `model`; return the record of its operators and shapes, and its result.

    `padding` is the share of each sequence that a mask marked by `mark_valid` hides.
    """
    load_dynamo_later()
    windows = windows_of(model)
    recorder = Recorder(_AnyDevice(is_masked=padding > 0), model, keeps_args=True)
    with recorder.watching():
        result = run()
    log, recorded, begun, flops = recorder.log, Trace(), 0, list[int]()
    for number, call in enumerate(log.calls):
        while begun < len(log.modules) and log.modules[begun].begun <= number:
            if (window := windows.get(log.modules[begun].path)) is not None:
                window.enter(log.modules[begun].inputs)
            begun += 1
        backward = BACKWARD if call.position.phase == BACKWARD else FORWARD
        phase = RECOMPUTE if call.position.recomputation else backward
        calls = recorded.calls[call.position.path, phase, str(operator_packet(call.operator))]
        calls.role, matmul, elementwise = cost(call.operator, call.args, call.kwargs, call.out)
        window = windows.get(call.position.path) if matmul else None
        calls.calls += 1
        calls.elements += sum(tensor.numel() for tensor in tensors(call.out)[:1])
        calls.work += Work(
            matmul_flops=matmul,
            elementwise_flops=elementwise,
            bytes_moved=bytes_moved(call.operator, call.args, call.kwargs, call.out),
            needed_flops=matmul if window is None else window.needed_flops(call.operator, call.args, matmul),
        )
        flops.append(matmul)
    for module_run in log.modules:
        inputs, outputs = (tuple(map(shape_of, seen)) for seen in (module_run.inputs, module_run.outputs))
        matmul = sum(flops[number] for number in module_run.calls)
        recorded.modules.append(ModuleCall(path=module_run.path, inputs=inputs, outputs=outputs, matmul_flops=matmul))
    return recorded, result


class RunShapes(dict[str, InOut]):
    """A run's shapes by the path of the module (its first call), the FLOPs of its matrix products, its calls."""

    matmul_flops: int = 0
    calls: tuple[ModuleCall, ...] = ()


def source_shapes(source: ModelSource, batch: int, seq: int, described: Collection[str] = ()) -> RunShapes:
    """Return the shapes of a run of a source's model, with the `described` inputs of `inputs_for`."""

    def build(device: str = "meta") -> nn.Module:
        if device == "meta":
            return built_for_counting(source, attention=META_ATTENTION).eval()
        return source.build(device=device, attention=META_ATTENTION).eval()

    inputs = inputs_for(model := build(), batch, seq, described=described)
    return run_without_values(source, model, inputs, shapes_of, build, described)


def shapes_of(model: nn.Module, inputs: Any) -> RunShapes:
    """Return the shapes and dtypes of each module's inputs and outputs by path, without computing values.

    A module that does not run is absent. The FLOPs of two layers of `built_for_counting` count for all. Raises
    SelectionError for sizes that the model cannot run.
    """
    args, kwargs = arguments(inputs)
    stacks = {f"{path}.": vars(module)[REPEATED] for path, module in model.named_modules() if REPEATED in vars(module)}

    def of_all(path: str, flops: int) -> int:
        return flops * next((layers for stack, layers in stacks.items() if path.startswith(stack)), 2) // 2

    recorded, _ = trace(model, partial(model, *args, **kwargs))
    run = RunShapes(recorded.shapes())
    run.matmul_flops = sum(of_all(path, calls.work.matmul_flops) for (path, *_), calls in recorded.calls.items())
    run.calls = tuple(recorded.modules)
    return run


# ---- the report ----

MODES = ("inference", "training")
PHASES = (FORWARD, BACKWARD, RECOMPUTE)


def flops(module: nn.Module, inputs: Any, *, mode: str = "inference", name: str | None = None) -> FlopsReport:
    """Count the work of one run of any module; `inputs` is a tensor, a tuple, or a dictionary of keywords.

    The module runs on meta tensors, which compute and allocate nothing; if it cannot, a copy runs with its parameters'
    values. One multiply-add counts as 2 FLOPs in `matmul_flops`, as in torch.utils.flop_counter. Mode "training" adds
    the operators of the backward pass.
    """
    if mode not in MODES:
        raise SelectionError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    training = mode == "training"
    with running_module(name or type(module).__name__, module, "meta tensors"):
        try:
            recorded, loss = run_as_it_is(fake_copy(module, device="meta"), on_meta(inputs), training)
        except (RuntimeError, TypeError):  # of torch, for tensors without values
            if any(parameter.is_meta for parameter in module.parameters()):
                raise
            with random_state_kept(module):
                recorded, loss = run_as_it_is(copied(module), inputs, training)
    return flops_report(module, recorded, name, mode=mode, checkpointing=NONE, batch=None, seq=None, loss=loss)


def run_as_it_is(
    module: nn.Module, inputs: Any, training: bool, padding: float = 0.0, loss: Callable[..., Any] | None = None
) -> tuple[Trace, str]:
    """Run any module on tensors with values; return the trace, and the name of the loss that backward starts from."""
    mark_valid(inputs, padding)
    args, kwargs = arguments(inputs)

    def step() -> str:
        with torch.set_grad_enabled(training):
            output = module(*args, **kwargs) if loss is None else loss(module, inputs)
        if not training:
            return ""
        value, name = loss_of(output)
        if not value.requires_grad:
            raise SelectionError(
                f"the loss depends on nothing that is trained; freeze less, or use {name_of('mode')} inference"
            )
        value.backward()
        return name

    return trace(module, step, padding)


def flops_report(
    module: nn.Module, recorded: Trace, name: str | None, tree: Repeated | None = None, **about: Any
) -> FlopsReport:
    """Return the report on a recorded run; `tree` counts more layers than ran, `about` has the other fields."""
    tree = tree or Repeated(work_tree(module, recorded))
    return FlopsReport(
        subject=subject(module, name),
        rows=tuple(_rows(tree.root)),
        operators=_operators(recorded, tree),
        traced_layers=tree.ran,
        **about,
    )


def work_tree(module: nn.Module, recorded: Trace) -> Node:
    """Return the module tree with the work of each module itself, by phase, as its note."""
    nothing, works = [Work()] * len(PHASES), dict[str, list[Work]]()
    for (path, phase, _), calls in recorded.calls.items():
        works.setdefault(path, [*nothing])[PHASES.index(phase)] += calls.work
    return fold(read(module, works, nothing))


def _subtree(node: Node) -> list[Work]:
    works: list[Work] = node.note
    for child in node.children:
        works = [work + below * child.copies for work, below in zip(works, _subtree(child), strict=True)]
    return works


def _rows(root: Node) -> Iterator[FlopsRow]:
    whole = sum(work.matmul_flops for work in _subtree(root)) or 1
    for node, depth, copies, is_last in root.rows():
        forward, backward, recompute = (work * copies for work in _subtree(node))
        total = forward + backward + recompute
        yield FlopsRow(
            name=node.name, path=node.path, type=node.type, depth=depth, copies=copies, is_last=is_last,
            forward=forward, backward=backward, recompute=recompute, total=total,
            macs=total.macs, intensity=total.intensity, share=total.matmul_flops / whole,
        )  # fmt: skip


def _operators(recorded: Trace, tree: Repeated) -> tuple[OperatorRow, ...]:
    rows: dict[tuple[str, str], OperatorRow] = {}
    for (path, phase, operator), calls in recorded.calls.items():
        empty = OperatorRow(operator=operator, phase=phase, calls=0, role=calls.role, elements=0, work=Work())
        row = rows.get((operator, phase), empty)
        rows[operator, phase] = replace(
            row,
            calls=row.calls + tree.scaled(path, calls.calls),
            elements=row.elements + tree.scaled(path, calls.elements),
            work=row.work + tree.scaled(path, calls.work),
        )
    return tuple(sorted(rows.values(), key=lambda row: (PHASES.index(row.phase), -row.work.matmul_flops, row.operator)))


def conventions(
    report: FlopsReport, config: BertConfig | None, distinct_params: int, batch: int, seq: int
) -> Iterator[Convention]:
    """Yield every convention that applies to this model and mode; the closed form needs a BertConfig."""
    total, forward, training = report.rows[0].total, report.rows[0].forward, report.mode == "training"
    passes = 3 if training else 1  # forward, and backward as twice the forward
    normalized, exponentiated = (
        sum(row.elements for row in report.operators if row.phase == "forward" and row.operator in operators)
        for operators in (("aten.native_layer_norm",), ("aten._softmax", "aten._safe_softmax"))
    )
    yield Convention(
        name="torch", value=total.matmul_flops, unit="FLOPs", source="torch.utils.flop_counter",
        how="matrix products only, a multiply-add counts as 2, as dispatched",
    )  # fmt: skip
    yield Convention(
        name="macs", value=total.macs, unit="MACs", how="matrix products only, a multiply-add counts as 1",
        source="half of torch.utils.flop_counter; the MACs of calflops",
    )  # fmt: skip
    yield Convention(
        name="calflops",
        value=passes * (forward.matmul_flops + 5 * normalized + exponentiated),
        unit="FLOPs",
        how="a multiply-add counts as 2, LayerNorm 5 and softmax 1 for each element, GELU and additions not counted"
        + ("; backward is 2 x forward, whatever is frozen" if training else ""),
        source="calflops 0.3.2, README: BERT-base-chinese at 1 x 128",
    )
    if not training:
        yield Convention(
            name="fvcore", value=forward.macs + 5 * normalized, unit="MACs", source="fvcore 0.1.5, FlopCountAnalysis",
            how="a multiply-add counts as 1, and LayerNorm 5 for each element",
        )  # fmt: skip
    if config is not None:
        scores = 4 * config.num_hidden_layers * config.hidden_size * seq
        formula = (
            "6 N + 12 L H Q T for each token"
            if training
            else "2 N + 4 L H Q T for each token (a third of a training step)"
        )
        yield Convention(
            name="palm",
            value=batch * seq * passes * (2 * distinct_params + scores),
            unit="FLOPs",
            how=f"{formula}; N: the parameters, embeddings included",
            source="Chowdhery et al. 2022, arXiv:2204.02311, appendix B",
        )


_SAMPLES = (2, 3, 4)  # lengths
_WITNESS = (3, 7)


@dataclass(frozen=True, kw_only=True)
class FlopsRun:
    """A model and the run whose FLOPs are counted, at any size; the optimizer step is not counted."""

    source: ModelSource
    run: RunConfig = RunConfig(mode=INFERENCE)

    def at(self, batch: int, seq: int) -> FlopsReport:
        """Return the report at one batch and sequence length."""
        sized = self._sized(batch, seq)
        report: FlopsReport = saved("flops", self.source, sized.run, sized._of_few_layers, to_json, _read)
        return report

    def of_all_layers(self, batch: int, seq: int) -> FlopsReport:
        """Return the same report from a run of every layer."""
        sized = self._sized(batch, seq)
        return sized._report(*sized._run(self.source))

    def _sized(self, batch: int, seq: int) -> "FlopsRun":
        return replace(self, run=replace(self.run, batch=batch, seq=seq))

    def _of_few_layers(self) -> FlopsReport:
        stacks = layer_stacks(self.source, checkpointing=self.run.checkpointing, frozen=self.run.freeze)
        few = {stack.path: stack.few(RAN) for stack in stacks}
        if sum(map(len, few.values())) < sum(len(stack.kinds) for stack in stacks):
            counts = {stack.field: len(few[stack.path]) for stack in stacks}
            checkpointing = shortened(self.run.checkpointing, few)
            shallow = replace(self, run=replace(self.run, checkpointing=checkpointing))
            model, recorded, loss = shallow._run(self.source.with_layer_counts(counts))
            tree = repeated(work_tree(model, recorded), {stack.path: stack.copies(RAN) for stack in stacks})
            if tree is not None:
                return self._report(model, recorded, loss, tree)
        return self._report(*self._run(self.source))

    def _run(self, source: ModelSource) -> tuple[nn.Module, Trace, str]:
        """Return the model of this source on meta, its trace, and the name of the loss that backward starts from."""
        training = self.run.mode == TRAINING
        source = source.for_run()

        def build_at(device: str = "meta") -> nn.Module:
            build_one = methodcaller("build", device=device, attention=None)
            model: nn.Module = build_one(source)
            if getattr(source, "attention", None) in FLASH_KERNELS:  # which take no fp32
                model.to(torch.bfloat16)
            freeze(model, self.run.freeze)
            add_teacher(model, teachers(self.run.loss), build_one)
            model.train(training)
            source.checkpoint(model, with_eager_attention(self.run.checkpointing))
            return model

        model = build_at()
        labels = training and self.run.loss == MODEL
        inputs = inputs_for(model, self.run.batch, self.run.seq, labels=labels, described=self.run.input)
        inputs = batch_of_texts(self.run, inputs)
        run = partial(run_as_it_is, training=training, padding=self.run.padding, loss=loss_function(self.run))
        recorded, loss = run_without_values(source, model, inputs, run, build_at, self.run.input)
        return model, recorded, loss if labels or not training else self.run.loss

    def _report(self, model: nn.Module, recorded: Trace, loss: str, tree: Repeated | None = None) -> FlopsReport:
        run, encoder = self.run, None
        inputs = inputs_for(model, run.batch, run.seq, described=run.input)
        if isinstance(inputs, dict):  # the encoder's tokens, of a model with cross-attention
            ids = inputs.get("input_ids") if "decoder_input_ids" in inputs else None
            encoder = inputs.get("encoder_hidden_states", ids)
        report = flops_report(
            model, recorded, self.source.name, tree, mode=run.mode, checkpointing=run.checkpointing,
            batch=run.batch, seq=run.seq, loss=loss, encoder_seq=None if encoder is None else encoder.shape[1],
        )  # fmt: skip
        config = self.source.bert_config  # with the number of all layers
        return report if config is None else replace(report, subject=replace(report.subject, config=config.to_dict()))


def step_flops(source: ModelSource, run_config: RunConfig) -> int:
    """Return the matmul FLOPs of a step, including recomputation."""
    if run_config.mode == FORWARD_ONLY:  # its operators are those of inference
        run_config = run_config.changed(mode=INFERENCE, checkpointing=NONE)
    run = FlopsRun(source=source, run=run_config)

    def at(batch: int) -> int:
        return run.at(batch, run_config.seq).rows[0].total.matmul_flops

    batch = run_config.batch
    if run_config.loss == MODEL or batch <= 2:
        return run_config.accumulate * at(batch)
    pair = at(2) - 2 * at(1)  # of an example with another one: all other products are those of one
    return run_config.accumulate * (batch * at(1) + batch * (batch - 1) // 2 * pair)


def _read(text: Any) -> FlopsReport:
    """Return the report of a file of the cache; raises ValueError or SourceError for another."""
    report = from_json(str(text))
    if not isinstance(report, FlopsReport):
        raise ValueError("another report")
    not_negative(as_data(report))
    return report


def flops_model(
    run: FlopsRun, batches: Sequence[int] = (1,), seqs: Sequence[int] = (128,), strategies: Sequence[str] = ()
) -> FlopsReport:
    """Return the report of the first point, with a sweep over all, the polynomial and the conventions."""
    strategies = strategies or [run.run.checkpointing]
    runs = [replace(run, run=run.run.changed(checkpointing=strategy)) for strategy in strategies]
    reports = [one.at(batch, seq) for one in runs for batch in batches for seq in seqs]
    config = run.source.bert_config
    params = totals(read(built_for_counting(run.source, most=2)), None).distinct_params if config else 0
    sweep = tuple(map(sweep_point, reports))
    rules = tuple(conventions(reports[0], config, params, batches[0], seqs[0]))
    return replace(
        reports[0],
        sweep=sweep,
        polynomial=_polynomial(runs[0], [point for point in sweep if point.checkpointing == sweep[0].checkpointing]),
        conventions=rules if run.run.loss == MODEL else rules[:2],  # those of the step's own operators
    )


def sweep_point(report: FlopsReport) -> SweepPoint:
    """Return a report's totals as one point of a sweep."""
    row = report.rows[0]
    return SweepPoint(
        batch=report.batch or 0,
        seq=report.seq or 0,
        checkpointing=report.checkpointing,
        forward_flops=row.forward.matmul_flops,
        backward_flops=row.backward.matmul_flops,
        total_flops=row.total.matmul_flops,
    )


def _polynomial(run: FlopsRun, known: Sequence[SweepPoint]) -> Polynomial | None:
    """Return the FLOPs polynomial from three lengths, those of the known points first.

    None if a further point differs, at another batch too, or if the model cannot run it.
    """
    config = run.source.bert_config
    if config is None or config.max_position_embeddings < _WITNESS[1] or config.chunk_size_feed_forward > 1:
        return None
    points = {point.seq: point for point in known if (point.batch, point.seq) != _WITNESS}
    for seq in _SAMPLES:
        if len(points) < 3 and seq not in points:
            points[seq] = sweep_point(run.at(1, seq))
    one, two, three = list(points)[:3]
    of_one, of_two, of_three = (Fraction(points[seq].total_flops, points[seq].batch) for seq in (one, two, three))
    slope = (of_two - of_one) / (two - one)
    quadratic = ((of_three - of_two) / (three - two) - slope) / (three - one)
    linear = slope - quadratic * (one + two)
    constant = of_one - linear * one - quadratic * one**2
    if any(term.denominator != 1 for term in (constant, linear, quadratic)):
        return None
    for point in (*known, sweep_point(run.at(*_WITNESS))):
        if point.total_flops != point.batch * (constant + linear * point.seq + quadratic * point.seq**2):
            return None
    return Polynomial(constant=int(constant), linear=int(linear), quadratic=int(quadratic), verified_at=_WITNESS)
