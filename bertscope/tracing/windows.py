"""Windows of local attention: the pairs of a query and a key that a module's mask lets through."""

from dataclasses import dataclass
from typing import Any

from bertscope.torch_access import nn, operator_name
from bertscope.tracing.operator_costs import longest

_PRODUCTS = ("bmm", "baddbmm")
_NO_LIMIT = -1


@dataclass
class Window:
    """The keys that a query sees: so many before its own position, and after it; -1 is no limit.

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
        """Return the pairs of a sequence: all, without the two triangles that the window hides."""
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
            seq = longest(args) if "varlen" in name else args[1].shape[1]
        elif "scaled_dot_product" in name:
            seq = args[1].shape[-2]
        else:
            return flops
        return flops * self.pairs(seq) // seq**2


def windows_of(model: nn.Module) -> dict[str, Window]:
    """Return the windows of the attention modules by their paths; nothing for a model without local attention.

    In a model with some, the causal masks of its other layers count too.
    """
    found = {path: window for path, module in model.named_modules() if (window := _window_of(module))}
    return found if any(window.is_local for window in found.values()) else {}


def _window_of(module: Any) -> Window | None:
    """Return the window of a module of transformers that is an attention, by the attributes that it is masked by."""
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
