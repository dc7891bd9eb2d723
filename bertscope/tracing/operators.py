"""The operators and modules of one run and their costs, as functions of its log."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bertscope.reports.memory import BACKWARD, FORWARD, RECOMPUTE
from bertscope.reports.modules import ModuleCall, Work
from bertscope.sources.model_source import REPEATED, ModelSource, built_for_counting
from bertscope.torch_access import is_plain_meta, load_dynamo_later, nn, operator_packet, torch
from bertscope.tracing.fake_tensors import (
    META_ATTENTION,
    DataDependentAnswers,
    OperatorResults,
    run_without_values,
)
from bertscope.tracing.inputs import arguments, inputs_for
from bertscope.tracing.module_tree import InOut
from bertscope.tracing.operator_costs import Window, bytes_moved, cost, shape_of, tensors, windows_of
from bertscope.tracing.record import Device, Recorder, RunLog, RunPlace

_RESULTS = OperatorResults(is_plain_meta)
_SCALAR = torch.ops.aten._local_scalar_dense.default
_Result = TypeVar("_Result")


@dataclass
class Calls:
    """The calls of one operator in one module and phase."""

    role: str = ""
    calls: int = 0
    elements: int = 0
    work: Work = field(default_factory=Work)


@dataclass
class Trace:
    """The calls by (path, phase, operator), and the calls of modules in the order of their beginnings."""

    calls: dict[tuple[str, str, str], Calls] = field(default_factory=lambda: defaultdict(Calls))
    modules: list[ModuleCall] = field(default_factory=list)

    def shapes(self) -> dict[str, InOut]:
        """Return the inputs and outputs of each module's first call by path, in the order of these calls."""
        found: dict[str, InOut] = {}
        for call in self.modules:
            found.setdefault(call.path, (call.inputs, call.outputs))
        return found


class _AnyDevice(Device):
    """The device that the tensors are on, mostly meta, whose memory does not count."""

    has_memory = False

    def __init__(self, *, is_masked: bool) -> None:
        self.answers = DataDependentAnswers(is_masked=is_masked)

    def takes(self, operator: Any, args: Any, kwargs: Any) -> bool:
        """Return False for the question after a number that is known, though its tensor has no value."""
        has_value = operator is not _SCALAR or not (args[0].is_meta or hasattr(args[0], "fake_mode"))
        return super().takes(operator, args, kwargs) and (has_value or not self.answers.knows(args[0]))

    def elsewhere(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the number."""
        return self.answers.value(operator, args[0]) if operator is _SCALAR else operator(*args, **kwargs)

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
    return _costs(recorder.log, windows), result


def _costs(log: RunLog, windows: Mapping[str, Window]) -> Trace:
    """Return what the operators and the modules of a log cost."""
    found, begun = Trace(), 0
    flops: list[int] = []
    for number, call in enumerate(log.calls):
        while begun < len(log.modules) and log.modules[begun].begun <= number:
            if (window := windows.get(log.modules[begun].path)) is not None:
                window.enter(log.modules[begun].inputs)
            begun += 1
        calls = found.calls[call.place.path, _phase(call.place), str(operator_packet(call.operator))]
        calls.role, matmul, elementwise = cost(call.operator, call.args, call.kwargs, call.out)
        window = windows.get(call.place.path) if matmul else None
        calls.calls += 1
        calls.elements += sum(tensor.numel() for tensor in tensors(call.out)[:1])
        calls.work += Work(
            matmul_flops=matmul,
            elementwise_flops=elementwise,
            bytes_moved=bytes_moved(call.operator, call.args, call.kwargs, call.out),
            needed_flops=matmul if window is None else window.needed_flops(call.operator, call.args, matmul),
        )
        flops.append(matmul)
    for run in log.modules:
        given, made = (tuple(map(shape_of, seen)) for seen in (run.inputs, run.outputs))
        own_flops = sum(flops[number] for number in run.own)
        found.modules.append(ModuleCall(path=run.path, inputs=given, outputs=made, matmul_flops=own_flops))
    return found


def _phase(place: RunPlace) -> str:
    return RECOMPUTE if place.recomputation else BACKWARD if place.phase == BACKWARD else FORWARD


class RunShapes(dict[str, InOut]):
    """The shapes of a run by the path of the module (its first call), the FLOPs of its matrix products, its calls."""

    matmul_flops: int = 0
    calls: tuple[ModuleCall, ...] = ()


def shapes(model: nn.Module, batch: int = 1, seq: int = 128) -> RunShapes:
    """Return the shapes and dtypes of each module's inputs and outputs by path, without computing values.

    A module that does not run is absent. Raises SelectionError for sizes that the model cannot run.
    """
    return shapes_of(model, inputs_for(model, batch, seq))


def source_shapes(source: ModelSource, batch: int, seq: int, given: Collection[str] = ()) -> RunShapes:
    """Return the same for the model of a source, with the `given` inputs of `inputs_for`."""

    def made(device: str = "meta") -> nn.Module:
        """Return the model on a device."""
        if device == "meta":
            return built_for_counting(source, attention=META_ATTENTION).eval()
        return source.build(device=device, attention=META_ATTENTION).eval()

    model = made()
    return run_without_values(source, model, inputs_for(model, batch, seq, given=given), shapes_of, made, given)


def shapes_of(model: nn.Module, inputs: Any) -> RunShapes:
    """Return the same for given inputs; the FLOPs of two layers of `built_for_counting` are those of all."""
    args, kwargs = arguments(inputs)
    stacks = {f"{path}.": vars(module)[REPEATED] for path, module in model.named_modules() if REPEATED in vars(module)}

    def of_all(path: str, flops: int) -> int:
        return flops * next((layers for stack, layers in stacks.items() if path.startswith(stack)), 2) // 2

    recorded, _ = trace(model, lambda: model(*args, **kwargs))
    found = RunShapes(recorded.shapes())
    found.matmul_flops = sum(of_all(path, calls.work.matmul_flops) for (path, *_), calls in recorded.calls.items())
    found.calls = tuple(recorded.modules)
    return found
