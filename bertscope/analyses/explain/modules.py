"""`explain` of any model: the modules that own parameters or compute matrix products, in the order of the forward pass.

A formula in the names of a module's attributes is shown only if its value is that of the built module; other parameters
are the sum of the sizes of their tensors, and other FLOPs are those that were counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from bertscope.analyses.explain.formulas import formula
from bertscope.analyses.explain.texts import LANGUAGES, SENTENCES
from bertscope.analyses.flops.count import flops_report, run_as_it_is
from bertscope.analyses.modules.module_tree import Held, Node, fold, noted, read
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.params.tree import tree
from bertscope.analyses.tracing.fake_tensors import META_ATTENTION, run_without_values
from bertscope.analyses.tracing.inputs import inputs_for
from bertscope.analyses.tracing.trace import Trace
from bertscope.errors import BertscopeError, SelectionError, suggestion
from bertscope.reports.base import Shape
from bertscope.reports.explain import Dims, ExplainReport, Formula, Step, Sum
from bertscope.reports.layer_ranges import expand
from bertscope.run_config import NONE
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn

_OWN = "(own)"  # the name of the root, and of the group of its own tensors and products
_MOST_TERMS = 6  # of a formula or a sum that names each of them


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The formulas of a class: of each tensor by its name, and of the FLOPs of a call, in names of attributes.

    In the FLOPs, `positions` is the number of elements of the output, or of the input, over its `channels`.
    """

    key: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    flops: str = ""
    channels: str = ""
    of_input: bool = False


_NORM = partial(_Rule, key="normalisation")
_KERNEL = "in_channels / groups * kernel_size"
_CONVOLUTION = _Rule(
    key="convolution",
    tensors={"weight": f"out_channels * {_KERNEL}", "bias": "out_channels"},
    flops=f"2 * positions * out_channels * {_KERNEL}",
    channels="out_channels",
)
_TRANSPOSED = _Rule(
    key="convolution",
    tensors={"weight": "in_channels * out_channels / groups * kernel_size", "bias": "out_channels"},
    flops="2 * positions * in_channels * out_channels / groups * kernel_size",
    channels="in_channels",
    of_input=True,
)
_LOOKUP = _Rule(key="lookup", tensors={"weight": "num_embeddings * embedding_dim"})
_RULES: tuple[tuple[tuple[type, ...], _Rule], ...] = (
    ((nn.Linear,), _Rule(
        key="linear",
        tensors={"weight": "in_features * out_features", "bias": "out_features"},
        flops="2 * positions * in_features * out_features",
        channels="out_features",
    )),
    ((nn.Embedding, nn.EmbeddingBag), _LOOKUP),
    ((nn.LayerNorm, nn.RMSNorm), _NORM(tensors=dict.fromkeys(("weight", "bias"), "normalized_shape"))),
    ((nn.GroupNorm,), _NORM(tensors=dict.fromkeys(("weight", "bias"), "num_channels"))),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
     _NORM(tensors=dict.fromkeys(("weight", "bias"), "num_features"))),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONVOLUTION),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSED),
    ((nn.MultiheadAttention,), _Rule(
        key="multihead",
        tensors={
            "in_proj_weight": "3 * embed_dim * embed_dim", "in_proj_bias": "3 * embed_dim",
            "q_proj_weight": "embed_dim * embed_dim", "k_proj_weight": "embed_dim * kdim",
            "v_proj_weight": "embed_dim * vdim", "bias_k": "embed_dim", "bias_v": "embed_dim",
        },
        flops="positions * (4 * 2 * embed_dim * embed_dim + 2 * 2 * keys * embed_dim)",
        channels="embed_dim",
    )),
)  # fmt: skip
# A dense layer of transformers, by its name: its weight is stored as (nx, nf).
_CONV1D = _Rule(
    key="conv1d", tensors={"weight": "nx * nf", "bias": "nf"}, flops="2 * positions * nx * nf", channels="nf"
)
_PRODUCTS = _Rule(key="products", flops="2 * 2 * positions * keys * width", channels="width")


@dataclass(frozen=True)
class _Run:
    """The shapes of a module's inputs and outputs, and of its own matrix products the FLOPs and the calls."""

    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    calls: int = 0


def explain_modules(
    source: ModelSource, path: str | None, *, language: str, batch: int, seq: int, inputs: Sequence[str] = ()
) -> ExplainReport:
    """Return the steps of any model, or those at and below `path`, and the sums of the children of its root.

    Without `inputs` a model whose forward pass cannot run is explained without shapes and FLOPs; the note has the
    reason. Raises SelectionError for a path that no module has, and the error of the run with `inputs`.
    """
    model = source.build(attention=META_ATTENTION).eval()
    recorded, note = None, ""
    try:
        given = inputs_for(model, batch, seq, given=inputs)
        recorded, _ = run_without_values(source, model, given, partial(run_as_it_is, training=False))
    except BertscopeError as error:
        if inputs:
            raise
        note = f"without shapes and FLOPs, since the forward pass did not run: {error.message}"
    runs = {} if recorded is None else _runs(recorded)
    root = noted(read(model), lambda node: runs.get(node.path, _Run()))
    walk = _Walk(model, fold(root), tuple(runs), language)
    return ExplainReport(
        subject=subject(model, source.name),
        language=language,
        batch=None if recorded is None else batch,
        seq=None if recorded is None else seq,
        steps=tuple(walk.steps(walk.root if path is None else _at(root, walk, path))),
        sums=tuple(_sums(model, walk, recorded)),
        questions=(),
        note=note,
    )


def _runs(recorded: Trace) -> dict[str, _Run]:
    """Return what was recorded of each module, in the order of the forward pass."""
    flops, calls = Counter[str](), Counter[str]()
    for (path, _, _), made in recorded.calls.items():
        flops[path] += made.work.matmul_flops
        calls[path] += made.calls if made.work.matmul_flops else 0
    return {
        path: _Run(
            tuple(given.shape for given in inputs),
            tuple(out.shape for out in recorded.outputs.get(path, ())),
            flops[path],
            calls[path],
        )
        for path, inputs in recorded.inputs.items()
    }


def _at(root: Node, walk: "_Walk", path: str) -> Node:
    """Return the folded node at a path, of one layer (`encoder.layer.1`) or of a range as reports write it.

    The path may lack the names of wrappers, such as `base_model.model` of peft.
    """
    for start in ("", f"{walk.top.path}."):
        single, several = root.descend(start + path), walk.root.descend(start + path)
        if path and (single or several):
            return fold(single) if single else several  # type: ignore[return-value]  # one of them is a node
    known = [node.path for node in walk.root.walk() if node.path]
    raise SelectionError(f"no module is called {path[:100]!r}; {suggestion(path, known)}")


class _Walk:
    """Maker of the steps of a folded tree."""

    def __init__(self, model: nn.Module, root: Node, order: Sequence[str], language: str) -> None:
        self.root, self.language = root, LANGUAGES.index(language)
        self.modules = dict(model.named_modules())
        self.order = {path: place for place, path in enumerate(order)}
        top = root
        while len(top.children) == 1 and top.children[0].children and top.children[0].copies == 1 and not top.held:
            (top,) = top.children
        self.top = top
        self.groups = {single: child for child in top.children for single in expand(child.path)}

    def steps(self, root: Node) -> Iterator[Step]:
        """Yield the steps at and below a node; a module that did not run follows the module that has it."""
        places: dict[str, int] = {}
        rows = []
        for node, _, copies, _ in root.rows():
            above = places.get(node.path.rpartition(".")[0], 0)
            places[node.path] = self.order.get(next(expand(node.path)), above)
            if node.note.flops or any(held.is_parameter and held.counts for held in node.held):
                rows.append((node, copies))
        for node, copies in sorted(rows, key=lambda row: places[row[0].path]):
            yield self.step(node, copies)

    def group(self, path: str) -> str:
        """Return the path of the group of a module: of a child of the root, "" for the root itself."""
        parts = next(expand(path)).split(".")
        starts = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((self.groups[start].path for start in starts if start in self.groups), "")

    def step(self, node: Node, copies: int) -> Step:
        """Return the step of a module."""
        module, run = self.modules[next(expand(node.path))], node.note
        own = [held for held in node.held if held.is_parameter]
        rule = _rule(module, own)
        texts = [SENTENCES[rule.key][self.language]]
        texts += [
            SENTENCES["tied"][self.language].format(name=_name(held), tied_to=held.tied_to)
            for held in own
            if held.tied_to
        ]
        if self.order and not run.outputs:
            texts.append(SENTENCES["not_called"][self.language])
        return Step(
            group=self.group(node.path) or _OWN,
            name=node.path or _OWN,
            path=node.path,
            tf_name="",
            type=node.type,
            inputs=tuple(map(_dims, run.inputs)),
            output=_dims(run.outputs[0]) if run.outputs else (),
            params=_params(module, rule, [held for held in own if not held.tied_to]),
            flops=_flops(module, rule, run) if run.flops else None,
            copies=copies,
            sentence=("" if self.language else " ").join(texts),
        )


def _dims(shape: tuple[int, ...]) -> Dims:
    return tuple(map(str, shape))


def _name(held: Held) -> str:
    return held.path.rpartition(".")[2]


def _rule(module: nn.Module, own: Sequence[Held]) -> _Rule:
    """Return the formulas of the module's class; those without formulas have only the key of their sentence."""
    found = next((rule for kinds, rule in _RULES if isinstance(module, kinds)), None)
    if found is not None:
        return found
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        return _CONV1D
    if not own:
        return _PRODUCTS if "att" in name.lower() else _Rule(key="own_products")
    is_norm = "norm" in name.lower() and all(len(held.shape or ()) == 1 for held in own)
    return _NORM() if is_norm else _Rule(key="own_sum")


# ---- formulas ----


def _params(module: nn.Module, rule: _Rule, own: Sequence[Held]) -> Formula | None:
    """Return the formula of the module's own tensors: by its class, else the sizes of each."""
    if not own:
        return None
    values: dict[str, object] = _attributes(module)
    terms = []
    for held in own:
        by_class = rule.tensors.get(_name(held))
        if by_class is None or formula(by_class, values).value != held.numel:  # not if another class stores it packed
            name = _name(held)
            by_class = name if name.isidentifier() else f"_{name}"  # of a ParameterList
            values[by_class] = _product(held.shape)
        terms.append(by_class)
    if len(terms) > _MOST_TERMS:
        sizes = Counter(_product(held.shape) for held in own)
        numbers = " + ".join(f"{times} x {size}" if times > 1 else size for size, times in sizes.items())
        total = sum(held.numel for held in own)
        return Formula(symbols=f"{len(own)} tensors", numbers=numbers.replace("*", "x"), value=total)
    return formula(" + ".join(f"{times} * {term}" if times > 1 else term for term, times in Counter(terms).items()),
                   values)  # fmt: skip


def _product(shape: Shape) -> str:
    return " * ".join(map(str, shape)) or "1" if shape is not None else "0"


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return the integers of a module, and its sizes as products such as `3 * 3`, by the names of the attributes."""
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if type(value) is int:
            found[name] = value
        elif isinstance(value, tuple) and value and all(type(size) is int for size in value):
            found[name] = _product(value)
    if "nf" in found and "nx" not in found:  # transformers before 4.45 stores only nf
        found["nx"] = module.get_parameter("weight").shape[0]
    return found


def _flops(module: nn.Module, rule: _Rule, run: _Run) -> Formula:
    """Return the FLOPs of the module's own matrix products: a formula if one gives their number, else as counted."""
    shape = next(iter(run.inputs if rule.of_input else run.outputs), ())
    values: dict[str, object] = _attributes(module) | {"width": shape[-1] if shape else 0, "calls": run.calls}
    channels = values.get(rule.channels)
    values["positions"] = prod(shape) // channels if isinstance(channels, int) and channels else 0
    lengths = {given[-2] for given in run.inputs if len(given) > 2}  # one of them is the number of keys
    for keys in sorted(lengths) if "keys" in rule.flops else (0,):
        for text in (rule.flops, f"calls * {rule.flops}") if rule.flops else ():
            made = formula(text, values | {"keys": keys})
            if made.value == run.flops:
                return made
    return Formula(symbols="counted", numbers="", value=run.flops)


# ---- sums ----


def _sums(model: nn.Module, walk: _Walk, recorded: Trace | None) -> Iterator[Sum]:
    """Yield each group by its steps and as counted, then all."""
    steps = list(walk.steps(walk.root))
    counted = tree(model, folded=False)
    params = {row.path: row.distinct_params for row in counted.rows}
    flops: dict[str, int] = {}
    if recorded is not None:
        about: dict[str, Any] = {"mode": "inference", "checkpointing": NONE, "batch": None, "seq": None, "loss": ""}
        for row in flops_report(model, recorded, None, **about).rows:
            flops |= dict.fromkeys(expand(row.path), row.forward.matmul_flops // row.copies)
    whole = [counted.totals.distinct_params, flops.get("", 0)]
    own = list(whole)
    for path in dict.fromkeys(child.path for child in walk.groups.values()):
        below = [sum(found.get(single, 0) for single in expand(path)) for found in (params, flops)]
        own = [left - part for left, part in zip(own, below, strict=True)]
        if any(below):
            yield _sum(path, [step for step in steps if step.group == path], *below)
    if any(own):
        yield _sum(_OWN, [step for step in steps if step.group == _OWN], *own)
    yield _sum("total", steps, *whole)


def _sum(group: str, steps: Sequence[Step], counted_params: int, counted_flops: int) -> Sum:
    terms = [step.params.value * step.copies for step in steps if step.params]
    return Sum(
        group=group,
        symbols=" + ".join(f"{term:,}" for term in terms) if len(terms) <= _MOST_TERMS else "",
        params=sum(terms),
        counted_params=counted_params,
        flops=sum(step.flops.value * step.copies for step in steps if step.flops),
        counted_flops=counted_flops,
    )
