"""A run's log: its rows, their tensors, and what an operator costs.

Matmul FLOPs are counted by torch's formulas, elementwise FLOPs by a table.

Elementwise constants are those of ELECTRA's flops_computation.py (google-research/electra), which counts
each formula's arithmetic: GELU 8, LayerNorm 5, softmax 5; a backward kernel counts as twice its
forward. An operator in no table is reported as not counted.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from math import prod
from typing import Any, NamedTuple

from bertscope.reports.base import TensorShape
from bertscope.torch_access import argument_names, is_view, nn, operator_name, operator_packet, torch, tree_leaves


class SeenTensor(tuple[int, ...]):
    """A tensor in a log: its shape, as torch's formulas of FLOPs take it, with its dtype and its block of memory."""

    dtype: str
    itemsize: int
    block: int  # -1: no block on the device

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes as a tuple of no other class."""
        return tuple(self)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self)

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.numel() * self.itemsize


_TENSORS = (torch.Tensor, SeenTensor)


class Position(NamedTuple):
    """A run's position: the optimizer steps that ended, the phase, the module or parameter, the recomputation."""

    step: int
    phase: str
    path: str
    recomputation: int = 0  # its number; 0 outside


@dataclass
class Call:
    """A row: a call of an operator. Arguments and results are there if the recorder keeps them."""

    operator: Any  # or the name of what allocates and is no operator
    position: Position
    line: str  # of the user's code: file and number
    args: tuple[Any, ...] = ()  # each tensor as `SeenTensor`
    kwargs: Any = None
    out: Any = None
    reads: tuple[int, ...] = ()  # the blocks of its arguments; empty in a training step


@dataclass
class ModuleRun:
    """A row: a call of a module, which begins before the operator of that number and ends before the last one."""

    path: str
    inputs: list[SeenTensor]
    begun: int
    outputs: list[SeenTensor] = field(default_factory=list)
    ended: int = -1
    calls: list[int] = field(default_factory=list)  # the operators that run in no module inside it


@dataclass
class LoggedBlock:
    """A row: a block of memory on the device."""

    size_bytes: int
    shape: tuple[int, ...]  # of scratch: the numbers of its rule
    dtype: str  # of scratch: its rule
    call: int  # that allocated it; -1 before the first
    born: int  # the event
    owner: str  # its parameter, else the module that allocated it
    part: str = ""  # parameters, buffers, inputs, gradients, workspaces; "" is for the reader of the log to say
    variable: str = ""  # of the loop that refers to it
    stream: str = ""  # the CUDA stream, if it is not the compute stream
    freed: int = -1  # the event; -1 while it lives


class Event(NamedTuple):
    """A row: a block is allocated, or freed (`~block`)."""

    block: int
    position: Position
    call: int  # that ran last
    allocated_bytes: int  # by the allocator afterwards, and reserved; 0 without one
    reserved_bytes: int


@dataclass
class RunLog:
    """The rows of a run, and the marks that the program's loaders set."""

    calls: list[Call] = field(default_factory=list)
    modules: list[ModuleRun] = field(default_factory=list)  # if the recorder keeps arguments
    blocks: list[LoggedBlock] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    begun: dict[tuple[int, str], int] = field(default_factory=dict)  # step and phase -> the event when it first began
    refused: list[tuple[int, str, int]] = field(default_factory=list)  # requests without room: bytes, line, event

    def born(
        self,
        size: int,
        shape: Any,
        dtype: str,
        owner: str,
        at: Position,
        part: str = "",
        held: tuple[int, int] = (0, 0),
    ) -> int:
        """Add a block, and return its number; `held` are the allocator's bytes."""
        number, call = len(self.blocks), len(self.calls) - 1
        self.blocks.append(LoggedBlock(size, tuple(shape), dtype, call, len(self.events), owner, part))
        self.events.append(Event(number, at, call, *held))
        return number

    def freed(self, number: int, at: Position, held: tuple[int, int] = (0, 0)) -> None:
        """Free a block."""
        self.blocks[number].freed = len(self.events)
        self.events.append(Event(~number, at, len(self.calls) - 1, *held))

    def name(self, number: int, part: str, owner: str) -> None:
        """Name the use of a block, and the parameter or buffer that it is."""
        self.blocks[number].part, self.blocks[number].owner = part, owner

    def operator(self, call: int) -> str:
        """Return the name of the operator of a call; "" before the first."""
        operator = self.calls[call].operator if call >= 0 else ""
        return operator if isinstance(operator, str) else operator_name(operator)


# ---- what an operator costs ----

# The names of the operators by their operations for each element of the output.
_BY_OPERATIONS = {
    1: (
        "add add_ sub sub_ mul mul_ div div_ neg rsub pow sqrt rsqrt exp log tanh sigmoid relu relu_ erf abs clamp "
        "clamp_min maximum minimum where lt gt le ge eq ne logical_not logical_and bitwise_and bitwise_not cos sin "
        "reciprocal silu leaky_relu hardtanh tril triu threshold_backward tanh_backward sigmoid_backward addcmul "
        "mse_loss binary_cross_entropy_with_logits floor_divide remainder square ceil floor round sign scatter_add "
        "native_dropout_backward bernoulli_"
    ),
    2: "native_dropout",
    4: "mish silu_backward",
    5: (
        "_softmax _safe_softmax _log_softmax native_layer_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_no_training"
    ),
    8: "gelu mish_backward",
    10: "_softmax_backward_data _log_softmax_backward_data native_layer_norm_backward native_batch_norm_backward",
    16: "gelu_backward",
}
_PER_ELEMENT = {name: operations for operations, names in _BY_OPERATIONS.items() for name in names.split()}
# One operation for each element of the input, not of the output.
_BY_INPUT = "sum mean embedding_dense_backward nll_loss_forward max amax cumsum norm var_mean"
_MOVEMENTS = (
    "arange empty empty_like new_empty new_zeros new_ones zeros zeros_like ones ones_like full full_like fill_ "
    "zero_ clone copy_ _to_copy cat stack embedding index index_put index_put_ gather scatter select_backward "
    "slice_backward nll_loss_backward constant_pad_nd lift_fresh lift_fresh_copy scalar_tensor index_select repeat "
    "masked_fill masked_fill_ contiguous _unsafe_view _reshape_copy roll flip detach_ unfold_backward rand randn "
    "empty_strided new_empty_strided _local_scalar_dense set_ resize_ any all argmax sort topk nonzero scatter_"
)
_PER_INPUT, _MOVEMENT = frozenset(_BY_INPUT.split()), frozenset(_MOVEMENTS.split())
_ATTENTION = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}


_FLASH = "_flash_attn_"  # operators of flash-attn: (batch, length, heads, width), varlen (tokens, heads, width)


def cost(operator: Any, args: Any, kwargs: dict[str, Any], out: Any) -> tuple[str, int, int]:
    """Return the role, matmul FLOPs and elementwise FLOPs of one call on tensors, or on `SeenTensor`s."""
    from torch.utils.flop_counter import flop_registry

    packet = operator_packet(operator)
    name = packet.__name__
    if name in _ATTENTION:
        return "matmul", _attention_flops(*args[:3]), 0
    if name.removesuffix("_backward") in _ATTENTION:
        # The kernels compute the scores again; this is left out, so that eager and fused attention count the same.
        return "matmul", 2 * _attention_flops(*args[1:4]), 0
    if name.startswith(_FLASH):
        named = dict(zip(argument_names(operator), args, strict=False))
        query, value = named["q"], named["v"]
        products = 2 * query.numel() // query.shape[-1] * _keys(named) * (query.shape[-1] + value.shape[-1])
        return "matmul", int((1 + name.endswith("backward")) * products), 0
    if packet in flop_registry:
        return "matmul", int(flop_registry[packet](*args, **kwargs, out_val=out)), 0
    if is_view(operator) or name in _MOVEMENT:
        return "movement", 0, 0
    if name in _PER_INPUT:
        return "elementwise", 0, _numel(args[0])
    if name in _PER_ELEMENT:
        first = out[0] if type(out) in (tuple, list) and out else out
        return "elementwise", 0, _PER_ELEMENT[name] * _numel(first)
    return "unknown", 0, 0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the FLOPs of scores (B, N, S, D) @ (B, N, D, T) and context (B, N, S, T) @ (B, N, T, E)."""
    *outer, queries, width = query.shape
    keys, value_width = value.shape[-2:]
    return 2 * prod(outer) * queries * keys * (width + value_width)


def _keys(named: dict[str, Any]) -> int:
    """Return the keys of a sequence by the arguments of flash-attn; packed sequences all count as the longest one."""
    return int(named["max_seqlen_k"] if "max_seqlen_k" in named else named["k"].shape[1])


def bytes_moved(operator: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that one call reads and writes, each tensor once; a view moves nothing."""
    if is_view(operator):
        return 0
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors((args, kwargs, out)))


def tensors(tree: Any) -> list[Any]:
    """Return all tensors in nested containers, or in an output object that is a dataclass or has `to_tuple`.

    The arguments and results in a log have `SeenTensor`s.
    """
    if isinstance(tree, torch.Tensor):  # the result of most operators
        return [tree]
    if hasattr(tree, "to_tuple"):
        plain = tree.to_tuple()
    else:
        plain = [getattr(tree, item.name) for item in fields(tree)] if is_dataclass(tree) else tree
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, _TENSORS)]


def shape_of(tensor: torch.Tensor | SeenTensor) -> TensorShape:
    """Return shape and dtype as plain data."""
    return TensorShape(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, _TENSORS) else 0


# ---- windows of local attention: the pairs of a query and a key that a module's mask lets through ----

_PRODUCTS = ("bmm", "baddbmm")
_NO_LIMIT = -1


@dataclass
class Window:
    """The keys that a query sees: how many before its position, and after it; -1 is no limit.

    `chunk_width`, of Longformer, is the width of all heads of an attention that is computed in overlapping chunks.
    """

    left: int
    right: int
    chunk_width: int = 0
    sizes: tuple[int, ...] = ()  # of the input of a module with chunks: batch, length and width

    @property
    def is_local(self) -> bool:
        """Return True if the past is limited; a causal mask limits only the future."""
        return self.left != _NO_LIMIT

    def enter(self, inputs: Any) -> None:
        """Note the sizes of the input of a call."""
        self.sizes = inputs[0].shape if inputs else ()

    def pairs(self, seq: int) -> int:
        """Return a sequence's pairs: all, without the two triangles that the window hides."""
        hidden = (max(seq - 1 - side, 0) for side in (self.left, self.right) if side != _NO_LIMIT)
        return seq**2 - sum(size * (size + 1) // 2 for size in hidden)

    def needed_flops(self, operator: Any, args: Any, flops: int) -> int:
        """Return the FLOPs of a product of the attention module without the pairs that the window hides."""
        name = operator_name(operator)
        if self.chunk_width:  # scores and context, each 2 FLOPs for each pair and element
            batch, seq, _ = self.sizes
            return min(flops, 2 * batch * self.chunk_width * self.pairs(seq)) if name in _PRODUCTS else flops
        if name in _PRODUCTS:
            left, right = args[-2:]
            seq = sorted((*left.shape[-2:], right.shape[-1]))[1]  # of two lengths and the width of a head
            if sum(size == seq for size in (*left.shape[-2:], right.shape[-1])) < 2:
                return flops  # the queries are not as many as the keys
        elif "flash_attn" in name:
            seq = _keys(dict(zip(argument_names(operator), args, strict=False)))
        elif "scaled_dot_product" in name:
            seq = args[1].shape[-2]
        else:
            return flops
        return flops * self.pairs(seq) // seq**2


def windows_of(model: nn.Module) -> dict[str, Window]:
    """Return the windows of the attention modules by their paths; nothing for a model without local attention.

    In a model with some, the causal masks of its other layers count too.
    """
    windows = {path: window for path, module in model.named_modules() if (window := _window_of(module))}
    return windows if any(window.is_local for window in windows.values()) else {}


def _window_of(module: Any) -> Window | None:
    """Return the window of a module in transformers that is an attention, by the attributes that it is masked by."""
    known = vars(module)
    if size := known.get("one_sided_attn_window_size"):  # of Longformer and LED
        return Window(size, size, chunk_width=module.embed_dim)
    if isinstance(sides := known.get("local_attention"), tuple):  # of ModernBERT before transformers 5
        return Window(*sides) if sides[0] != _NO_LIMIT else None
    config = known.get("config")
    if "Attention" not in type(module).__name__ or getattr(config, "use_sliding_window", True) is False:
        return None
    size = known["sliding_window"] if "sliding_window" in known else getattr(config, "sliding_window", None)
    is_causal = known.get("is_causal", False)
    if not isinstance(size, int):
        return Window(_NO_LIMIT, 0) if is_causal else None
    return Window(size - 1, 0 if is_causal else size - 1)
