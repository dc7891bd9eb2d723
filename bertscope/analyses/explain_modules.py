"""`explain` of any model: its modules that own parameters or compute matrix products, in the order of the forward."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from bertscope.errors import BertscopeError, SelectionError, suggestion
from bertscope.reports.base import Note, Shape
from bertscope.reports.explain import Dims, ExplainReport, Formula, Step, Sum
from bertscope.reports.layer_ranges import expand
from bertscope.settings.checkpointing import NONE
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn
from bertscope.tracing.fake_tensors import META_ATTENTION, run_without_values
from bertscope.tracing.flops import Trace, flops_report, run_as_it_is
from bertscope.tracing.inputs import inputs_for
from bertscope.tracing.module_tree import Held, Node, fold, read, subject

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
}  # fmt: skip
_MAX_FORMULA = 500  # characters; the longest has about 150
_NAME = re.compile(r"[A-Za-z_]\w*")
_MOST_TERMS = 6  # of a formula or a sum that names each of them
_OWN_SUM = "own_sum"  # the key of the sentence on tensors without a formula of the class
_OWN = "(own)"  # the name of the root, and of the group of its own tensors and products


def formula(symbols: str, values: Mapping[str, object]) -> Formula:
    """Return a formula with its numbers and value; `values` has an integer or a product as text for each name."""
    if values.get("groups") == 1:
        symbols = symbols.replace(" / groups", "")
    numbers = _NAME.sub(lambda name: str(values[name[0]]), symbols)
    shown, shown_numbers = (text.replace(" * ", " x ") for text in (symbols, numbers))
    terms = tuple(value_of(term) for term in re.split(r"(?<=\)) \+ (?=\()", numbers)) if ") + (" in numbers else ()
    return Formula(symbols=shown, numbers=shown_numbers, value=value_of(numbers), terms=terms)


def value_of(numbers: str) -> int:
    """Return the value of a formula of integers, +, -, *, / and parentheses; raise ValueError for any other text."""
    if len(numbers) > _MAX_FORMULA:
        raise ValueError(f"a formula has at most {_MAX_FORMULA} characters; got {len(numbers)}")
    return _computed(ast.parse(numbers, mode="eval").body)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(f"a formula holds integers, +, -, * and parentheses; got {ast.unparse(node)[:40]!r}")


class Run(NamedTuple):
    """The shapes of a module's inputs and outputs in its first call, its FLOPs without its children, and its calls."""

    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    calls: int = 0


class ModuleRule(NamedTuple):
    """A class's formulas: of each tensor by its name, and of the FLOPs of a call, in names of attributes.

    In the FLOPs, `positions` is the number of elements of the output, or of the input, over its `channels`, or over
    its last size.
    """

    key: str
    tensors: Mapping[str, str] = {}
    flops: str = ""
    channels: str = ""
    of_input: bool = False


def _norm(size: str = "") -> ModuleRule:
    return ModuleRule("normalisation", dict.fromkeys(("weight", "bias"), size) if size else {})


_KERNEL = "in_channels / groups * kernel_size"
_TRANSPOSED = "in_channels * out_channels / groups * kernel_size"
_RULES: tuple[tuple[tuple[type, ...], ModuleRule], ...] = (
    ((nn.Linear,), ModuleRule(
        "linear", {"weight": "in_features * out_features", "bias": "out_features"},
        "2 * positions * in_features * out_features", "out_features",
    )),
    ((nn.Embedding, nn.EmbeddingBag), ModuleRule("lookup", {"weight": "num_embeddings * embedding_dim"})),
    ((nn.LayerNorm, nn.RMSNorm), _norm("normalized_shape")),
    ((nn.GroupNorm,), _norm("num_channels")),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
     _norm("num_features")),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), ModuleRule(
        "convolution", {"weight": f"out_channels * {_KERNEL}", "bias": "out_channels"},
        f"2 * positions * out_channels * {_KERNEL}", "out_channels",
    )),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ModuleRule(
        "convolution", {"weight": _TRANSPOSED, "bias": "out_channels"},
        f"2 * positions * {_TRANSPOSED}", "in_channels", of_input=True,
    )),
    ((nn.MultiheadAttention,), ModuleRule(
        "multihead",
        {
            "in_proj_weight": "3 * embed_dim * embed_dim", "in_proj_bias": "3 * embed_dim",
            "q_proj_weight": "embed_dim * embed_dim", "k_proj_weight": "embed_dim * kdim",
            "v_proj_weight": "embed_dim * vdim", "bias_k": "embed_dim", "bias_v": "embed_dim",
        },
        "positions * (4 * 2 * embed_dim * embed_dim + 2 * 2 * keys * embed_dim)", "embed_dim",
    )),
)  # fmt: skip
# A dense layer of transformers, by its name: its weight is stored as (nx, nf).
_CONV1D = ModuleRule("conv1d", {"weight": "nx * nf", "bias": "nf"}, "2 * positions * nx * nf", "nf")


def _rule_of(module: nn.Module, tensors: Sequence[Held], run: Run) -> ModuleRule:
    rule = next((rule for kinds, rule in _RULES if isinstance(module, kinds)), None)
    if rule is not None:
        return rule
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        return _CONV1D
    if run.flops and "att" in name.lower():
        return ModuleRule("products", flops="2 * 2 * positions * keys * width")
    if not tensors:
        return ModuleRule("own_products")
    is_norm = "norm" in name.lower() and all(len(held.shape or ()) == 1 for held in tensors)
    return _norm() if is_norm else ModuleRule(_OWN_SUM)


def _params(values: dict[str, object], rule: ModuleRule, tensors: Sequence[Held]) -> Formula | None:
    terms = []
    for held in tensors:
        name = held.path.rpartition(".")[2]
        term = rule.tensors.get(name)
        if term is None or not _made(term, values, held.numel):  # a subclass may store it packed
            term = name if name.isidentifier() else f"_{name}"  # of a ParameterList
            values = {**values, term: _product(held.shape)}
        terms.append(term)
    if len(terms) > _MOST_TERMS:
        sizes = Counter(_product(held.shape) for held in tensors)
        numbers = " + ".join(f"{times} x {size}" if times > 1 else size for size, times in sizes.items())
        total = sum(held.numel for held in tensors)
        return Formula(symbols=f"{len(tensors)} tensors", numbers=numbers.replace("*", "x"), value=total)
    symbols = " + ".join(f"{times} * {term}" if times > 1 else term for term, times in Counter(terms).items())
    return formula(symbols, values) if tensors else None


def _made(symbols: str, values: Mapping[str, object], wanted: int) -> Formula | None:
    try:
        candidate = formula(symbols, values)
    except KeyError:
        return None
    return candidate if candidate.value == wanted else None


def _product(shape: Shape) -> str:
    return " * ".join(map(str, shape or ())) or "1"


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return the integers of a module, and its sizes as products such as `3 * 3`, by the attributes' names."""
    attributes: dict[str, object] = {}
    for name, value in vars(module).items():
        if type(value) is int:
            attributes[name] = value
        elif isinstance(value, tuple) and value and all(type(size) is int for size in value):
            attributes[name] = _product(value)
    if "nf" in attributes and "nx" not in attributes:  # transformers before 4.45 stores only nf
        attributes["nx"] = module.get_parameter("weight").shape[0]
    return attributes


def _flops(module: nn.Module, values: Mapping[str, object], rule: ModuleRule, run: Run) -> Formula:
    # The number of keys of an attention is a length of one of its inputs; the width of all heads is the output's or the
    # width of one of its dense layers.
    shape = next(iter(run.inputs if rule.of_input else run.outputs), ())
    channels = values.get(rule.channels, shape[-1] if shape else 0)
    positions = prod(shape) // channels if isinstance(channels, int) and channels else 0
    lengths = sorted({sizes[-2] for sizes in run.inputs if len(sizes) > 2}) if "keys" in rule.flops else [0]
    dense = [layer.out_features for layer in module.children() if isinstance(layer, nn.Linear)]
    widths = dict.fromkeys([*shape[-1:], *dense]) if "width" in rule.flops else [0]
    for keys, width in product(lengths, widths):
        of_run = {"positions": positions, "calls": run.calls, "keys": keys, "width": width}
        for text in (rule.flops, f"calls * {rule.flops}") if rule.flops else ():
            if formula_of_run := _made(text, {**values, **of_run}, run.flops):
                return formula_of_run
    return Formula(symbols="counted", numbers="", value=run.flops)


def explain_modules(
    source: ModelSource, model: nn.Module, path: str | None, *, batch: int, seq: int, inputs: Sequence[str] = ()
) -> ExplainReport:
    """Return the steps of the model of a source, or those at and below `path`, and the sums of its root's children.

    Without `inputs` a model whose forward pass cannot run is explained without shapes and FLOPs; the note has the
    reason. Raises SelectionError for a path that no module has, and the error of the run with `inputs`.
    """
    recorded, notes = None, tuple[Note, ...]()

    def made(device: str) -> nn.Module:
        return source.build(device=device, attention=META_ATTENTION)

    def run(model: nn.Module, inputs: Any) -> Trace:
        return run_as_it_is(model.eval(), inputs, training=False)[0]

    try:
        example = inputs_for(model, batch, seq, described=inputs)
        recorded = run_without_values(source, model, example, run, made, inputs)
    except BertscopeError as error:
        if inputs:
            raise
        notes = (Note(key="explain_no_forward", values={"reason": error.message}),)
    walk = _ModuleWalk(model, recorded)
    steps, at = walk.steps(walk.root), ""
    chosen = steps
    if path is not None:
        node = walk.find(path, f"{getattr(model, 'base_model_prefix', '')}.")
        numbers = {single: step.number for step in steps for single in expand(step.path)}
        at, chosen = node.path, [replace(step, number=numbers[next(expand(step.path))]) for step in walk.steps(node)]
    return ExplainReport(
        subject=subject(model, source.name),
        batch=None if recorded is None else batch,
        seq=None if recorded is None else seq,
        steps=tuple(chosen),
        sums=tuple(walk.sums(steps, at, chosen)),
        questions=(),
        notes=notes,
    )


class _ModuleWalk:
    def __init__(self, model: nn.Module, recorded: Trace | None) -> None:
        runs: dict[str, Run] = {}
        if recorded is not None:
            flops, calls = Counter[str](), Counter(call.path for call in recorded.modules)
            for (path, _, _), total in recorded.calls.items():
                flops[path] += total.work.matmul_flops
            shapes = recorded.shapes()
            for path in dict.fromkeys((*shapes, *flops)):  # the root of TorchScript has no hooks, so no shapes
                inputs, outputs = (tuple(item.shape for item in items) for items in shapes.get(path, ((), ())))
                runs[path] = Run(inputs, outputs, flops[path], calls[path] or 1)
        self.model, self.recorded = model, recorded
        self.modules = dict(model.named_modules())
        self.order = {path: index for index, path in enumerate(runs)}
        self.plain = read(model, runs, Run())
        top = self.root = fold(self.plain)
        while len(top.children) == 1 and top.children[0].children and top.children[0].copies == 1 and not top.held:
            (top,) = top.children
        self.top = top
        self.groups = {single: child for child in top.children for single in expand(child.path)}

    def find(self, path: str, prefix: str) -> Node:
        # The path may lack the names of wrappers, such as `base_model.model` of peft, and lack or have the `prefix` of
        # a model in a class with a head, such as `bert.`.
        for name in (path, f"{self.top.path}.{path}", prefix + path, path.removeprefix(prefix)):
            single, several = self.plain.descend(name), self.root.descend(name)
            if path and (single or several):
                return fold(single) if single else several  # type: ignore[return-value]  # one of them is a node
        known = [node.path for node in self.root.walk() if node.path]
        raise SelectionError(f"no module is called {path[:100]!r}; {suggestion(path, known)}")

    def steps(self, root: Node) -> list[Step]:
        """Return the steps at and below a node; a module that did not run follows the module that has it."""
        places: dict[str, int] = {}
        rows = []
        for node, _, copies, _ in root.rows():
            above = places.get(node.path.rpartition(".")[0], 0)
            places[node.path] = self.order.get(next(expand(node.path)), above)
            if node.note.flops or any(held.is_parameter and held.counts for held in node.held):
                rows.append((node, copies))
        ordered = sorted(rows, key=lambda row: places[row[0].path])
        return [self.step(number, node, copies) for number, (node, copies) in enumerate(ordered, 1)]

    def step(self, number: int, node: Node, copies: int) -> Step:
        path = next(expand(node.path))
        module, run = self.modules[path], node.note
        starts = (path[:end] for end in [*(dot.start() for dot in re.finditer(r"\.", path)), len(path)])
        group = next((self.groups[start].path for start in starts if start in self.groups), "")  # of the root: none
        tensors = [held for held in node.held if held.is_parameter]
        rule, values = _rule_of(module, tensors, run), _attributes(module)
        said = [Note(key=rule.key)]
        said += [Note(key=_OWN_SUM)] if tensors and not rule.tensors and rule.flops else []
        said += [
            Note(key="tied", values={"name": held.path.rpartition(".")[2], "tied_to": held.tied_to})
            for held in tensors
            if held.tied_to
        ]
        said += [Note(key="unknown")] if any(held.shape is None for held in tensors) else []
        said += [Note(key="not_called")] if self.order and not run.outputs else []
        return Step(
            number=number,
            group=group or _OWN,
            name=node.path or _OWN,
            path=node.path,
            tf_name="",
            type=node.type,
            inputs=tuple(map(_dims, run.inputs)),
            output=_dims(run.outputs[0]) if run.outputs else (),
            params=_params(values, rule, [item for item in tensors if not item.tied_to and item.shape is not None]),
            flops=_flops(module, values, rule, run) if run.flops else None,
            copies=copies,
            sentences=tuple(said),
        )

    def sums(self, steps: Sequence[Step], at: str, chosen: Sequence[Step]) -> Iterator[Sum]:
        params = {node.path: sum(held.distinct_numel for held in node.params) for node in self.plain.walk()}
        flops: dict[str, int] = {}
        if self.recorded is not None:
            about: dict[str, Any] = {"mode": "inference", "checkpointing": NONE, "batch": None, "seq": None, "loss": ""}
            for row in flops_report(self.model, self.recorded, None, **about).rows:
                flops |= dict.fromkeys(expand(row.path), row.forward.matmul_flops // row.copies)
        if at:
            single = next(expand(at))
            yield replace(sum_of(at, chosen, params[single], flops.get(single, 0)), symbols=_written(chosen))
        whole = [params[""], flops.get("", 0)]
        rest = list(whole)
        for path in dict.fromkeys(child.path for child in self.groups.values()):
            below = [sum(counts.get(single, 0) for single in expand(path)) for counts in (params, flops)]
            rest = [left - part for left, part in zip(rest, below, strict=True)]
            if any(below):
                yield sum_of(path, [step for step in steps if step.group == path], *below)
        if any(rest):
            yield sum_of(_OWN, [step for step in steps if step.group == _OWN], *rest)
        yield sum_of("total", steps, *whole)


def _dims(shape: tuple[int, ...]) -> Dims:
    return tuple(map(str, shape))


def _written(steps: Sequence[Step]) -> str:
    terms = Counter(step.params.numbers for step in steps for _ in range(step.copies) if step.params)
    written = [f"{times} x ({term})" if times > 1 else f"({term})" for term, times in terms.items()]
    several = " + ".join(written) if len(written) <= _MOST_TERMS else ""
    return several if steps[1:] else several.strip("()")


def sum_of(group: str, steps: Sequence[Step], counted_params: int, counted_flops: int) -> Sum:
    """Return the sum of some steps in all their copies, next to what is counted on the built model."""
    terms = [step.params.value * step.copies for step in steps if step.params]
    return Sum(
        group=group,
        symbols=" + ".join(f"{term:,}" for term in terms) if len(terms) <= _MOST_TERMS else "",
        params=sum(terms),
        counted_params=counted_params,
        flops=sum(step.flops.value * step.copies for step in steps if step.flops),
        counted_flops=counted_flops,
    )
