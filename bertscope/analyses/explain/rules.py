"""Formulas of modules: of parameters and of the FLOPs of a forward pass, in the names of a module's attributes.

A formula is used only if its value is that of the built module; other parameters are the sum of the sizes of their
tensors, and other FLOPs are those that were counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod

from bertscope.analyses.explain.formulas import formula
from bertscope.analyses.modules.module_tree import Held
from bertscope.reports.base import Shape
from bertscope.reports.explain import Formula
from bertscope.torch_access import nn

OWN_SUM = "own_sum"  # the key of the sentence on tensors without a formula of the class
MOST_TERMS = 6  # of a formula or a sum that names each of them


@dataclass(frozen=True)
class Run:
    """The shapes of a module's inputs and outputs in its first call, the FLOPs of its own products, and its calls."""

    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The formulas of a class: of each tensor by its name, and of the FLOPs of a call, in names of attributes.

    In the FLOPs, `positions` is the number of elements of the output, or of the input, over its `channels`, or over
    its last size.
    """

    key: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    flops: str = ""
    channels: str = ""
    of_input: bool = False


_NORM = partial(Rule, key="normalisation")
_KERNEL = "in_channels / groups * kernel_size"
_CONVOLUTION = Rule(
    key="convolution",
    tensors={"weight": f"out_channels * {_KERNEL}", "bias": "out_channels"},
    flops=f"2 * positions * out_channels * {_KERNEL}",
    channels="out_channels",
)
_TRANSPOSED = Rule(
    key="convolution",
    tensors={"weight": "in_channels * out_channels / groups * kernel_size", "bias": "out_channels"},
    flops="2 * positions * in_channels * out_channels / groups * kernel_size",
    channels="in_channels",
    of_input=True,
)
_LOOKUP = Rule(key="lookup", tensors={"weight": "num_embeddings * embedding_dim"})
_RULES: tuple[tuple[tuple[type, ...], Rule], ...] = (
    ((nn.Linear,), Rule(
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
    ((nn.MultiheadAttention,), Rule(
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
_CONV1D = Rule(
    key="conv1d", tensors={"weight": "nx * nf", "bias": "nf"}, flops="2 * positions * nx * nf", channels="nf"
)
_PRODUCTS = Rule(key="products", flops="2 * 2 * positions * keys * width")


def rule_of(module: nn.Module, own: Sequence[Held], run: Run) -> Rule:
    """Return the formulas of a module's class; those without formulas have only the key of their sentence."""
    found = next((rule for kinds, rule in _RULES if isinstance(module, kinds)), None)
    if found is not None:
        return found
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        return _CONV1D
    if run.flops and "att" in name.lower():
        return _PRODUCTS
    if not own:
        return Rule(key="own_products")
    is_norm = "norm" in name.lower() and all(len(held.shape or ()) == 1 for held in own)
    return _NORM() if is_norm else Rule(key=OWN_SUM)


def params_formula(module: nn.Module, rule: Rule, own: Sequence[Held]) -> Formula | None:
    """Return the formula of the module's own tensors: by its class, else the sizes of each."""
    if not own:
        return None
    values: dict[str, object] = _attributes(module)
    terms = []
    for held in own:
        by_class = rule.tensors.get(tensor_name(held))
        if by_class is None or not _made(by_class, values, held.numel):  # a subclass may store it packed
            name = tensor_name(held)
            by_class = name if name.isidentifier() else f"_{name}"  # of a ParameterList
            values[by_class] = _product(held.shape)
        terms.append(by_class)
    if len(terms) > MOST_TERMS:
        sizes = Counter(_product(held.shape) for held in own)
        numbers = " + ".join(f"{times} x {size}" if times > 1 else size for size, times in sizes.items())
        total = sum(held.numel for held in own)
        return Formula(symbols=f"{len(own)} tensors", numbers=numbers.replace("*", "x"), value=total)
    return formula(" + ".join(f"{times} * {term}" if times > 1 else term for term, times in Counter(terms).items()),
                   values)  # fmt: skip


def _made(symbols: str, values: Mapping[str, object], wanted: int) -> Formula | None:
    """Return the formula if the module has all of its attributes and it gives the wanted value."""
    try:
        made = formula(symbols, values)
    except KeyError:
        return None
    return made if made.value == wanted else None


def _product(shape: Shape) -> str:
    return " * ".join(map(str, shape or ())) or "1"


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


def flops_formula(module: nn.Module, rule: Rule, run: Run) -> Formula:
    """Return the FLOPs of the module's own matrix products: a formula if one gives their number, else as counted.

    The number of keys of an attention is a length of one of its inputs; the width of all heads is that of the output or
    of one of its dense layers.
    """
    shape = next(iter(run.inputs if rule.of_input else run.outputs), ())
    values: dict[str, object] = {"calls": run.calls, **_attributes(module)}
    channels = values.get(rule.channels, shape[-1] if shape else 0)
    values["positions"] = prod(shape) // channels if isinstance(channels, int) and channels else 0
    lengths = sorted({given[-2] for given in run.inputs if len(given) > 2}) if "keys" in rule.flops else [0]
    dense = [layer.out_features for layer in module.children() if isinstance(layer, nn.Linear)]
    widths = dict.fromkeys([*shape[-1:], *dense]) if "width" in rule.flops else [0]
    for keys, width in product(lengths, widths):
        for text in (rule.flops, f"calls * {rule.flops}") if rule.flops else ():
            if made := _made(text, values | {"keys": keys, "width": width}, run.flops):
                return made
    return Formula(symbols="counted", numbers="", value=run.flops)


def tensor_name(held: Held) -> str:
    """Return the name of a tensor in its module."""
    return held.path.rpartition(".")[2]
