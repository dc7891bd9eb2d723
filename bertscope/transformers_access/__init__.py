"""flash-attn for transformers on a machine without that package: its functions, and the answers to what is asked.

The functions work on tensors without values: operators with their shapes, and no kernels. Source: flash-attn 2.8
(flash_attn/flash_attn_interface.py, bert_padding.py, layers/rotary.py) and flash-attn 3
(hopper/flash_attn_interface.py). Their workspaces are in memory/kernels.py.
tests/test_transformers_access.py fails when transformers changes one of the names of the answers.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module, reload
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from traceback import walk_stack
from types import ModuleType
from typing import Any

from bertscope.torch_access import always, nn, torch

_MISSING = object()
_UTILITIES = "transformers.modeling_flash_attention_utils"
# The functions that say if flash-attn is installed, which the modules of transformers import by their names.
_VERSIONS = ("2_available", "3_available", "greater_or_equal", "greater_or_equal_2_10")
_ANSWERS = [f"is_flash_attn_{version}" for version in _VERSIONS]
# The methods that look for a GPU too: of transformers 5, 4.48 and 4.43.
_CHECKS = {"_flash_attn_can_dispatch", "_check_and_enable_flash_attn_2"}
_CHECKS |= {f"_flash_attn_{version}_can_dispatch" for version in (2, 3)}
# What transformers 5 keeps of its first import of flash-attn.
_IMPORTED = (
    "_loaded_implementation _flash_fn _flash_varlen_fn _flash_with_kvcache_fn _pad_fn _unpad_fn "
    "_process_flash_kwargs_fn _process_with_kvcache_kwargs_fn"
)
_ALIGNMENT = 8  # of the width of a head
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
_FORWARD = "(Tensor q, Tensor k, Tensor v, {}bool causal, int left, int right, int version) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor rng_state, Tensor(a!) dq, "
    "Tensor(b!) dk, Tensor(c!) dv, {}bool causal, int left, int right, int version) -> ()"
)
# The parameters of flash_attn_func by the version of flash-attn, which transformers looks for.
_SETTINGS = {
    2: "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    3: "softmax_scale causal window_size softcap deterministic return_attn_probs",
}
_PACKAGES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}
_FUNCTIONS = {
    "flash_attn_func": "q k v",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_with_kvcache": "q k_cache v_cache",  # of generation, which no analysis runs
}


# ---- flash-attn's functions ----


@cache
def _operators() -> tuple[Any, Any]:
    """Return the library and the operators, which have shapes only; under the names of flash-attn."""
    library = torch.library.Library("bertscope_flash_attn", "DEF")
    for kind, lengths in (("", ""), ("varlen_", _LENGTHS)):
        for name, schema, shapes in (("forward", _FORWARD, results), ("backward", _BACKWARD, always(None))):
            library.define(f"_flash_attn_{kind}{name}{schema.format(lengths)}")
            library.impl(f"_flash_attn_{kind}{name}", shapes, "Meta")
    return library, torch.ops.bertscope_flash_attn


def results(q: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the logarithms of the sums of softmax, and the state of the random numbers of version 2."""
    lse = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    random = torch.empty(2 if settings[-1] == 2 else 0, dtype=torch.int64, device=q.device)
    return torch.empty_like(q), torch.empty(lse, dtype=torch.float32, device=q.device), random


class _Attention(torch.autograd.Function):
    """flash-attn's attention: it saves q, k, v, out, softmax_lse and rng_state, and of packed sequences their ends."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: Any, v: Any, lengths: Any, settings: Any) -> Any:
        ctx.packed = q.shape if k is None else None
        q, k, v = q.unbind(-3) if k is None else (q, k, v)
        ctx.width, missing = q.shape[-1], -q.shape[-1] % _ALIGNMENT
        if missing:
            q, k, v = (nn.functional.pad(tensor, (0, missing)) for tensor in (q, k, v))
        ctx.kind, ctx.most, ctx.settings = "varlen_" if lengths else "", lengths[2:], settings
        forward = getattr(_operators()[1], f"_flash_attn_{ctx.kind}forward")
        out, lse, random = forward(q, k, v, *lengths, *settings)
        ctx.save_for_backward(q, k, v, out, lse, random, *lengths[:2])
        return out[..., : ctx.width]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, lse, random, *ends = ctx.saved_tensors
        if ctx.packed is None:
            whole, grads = None, [torch.empty_like(tensor) for tensor in (q, k, v)]
        else:
            whole = torch.empty((*ctx.packed[:-1], q.shape[-1]), dtype=q.dtype, device=q.device)
            grads = list(whole.unbind(-3))
        if missing := q.shape[-1] - ctx.width:
            dout = nn.functional.pad(dout, (0, missing))
        backward = getattr(_operators()[1], f"_flash_attn_{ctx.kind}backward")
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        backward(dout, q, k, v, out, lse, random, *grads, *ends, *ctx.most, *ctx.settings)
        grads = [grad[..., : ctx.width] for grad in grads]
        return (*(grads if whole is None else (whole[..., : ctx.width], None, None)), None, None)


def _function(name: str, version: int) -> Callable[..., torch.Tensor]:
    tensors = _FUNCTIONS[name].split()
    kind, usual = inspect.Parameter.POSITIONAL_OR_KEYWORD, {"causal": False, "window_size": (-1, -1)}
    parameters = [inspect.Parameter(item, kind) for item in tensors]
    parameters += [inspect.Parameter(item, kind, default=usual.get(item)) for item in _SETTINGS[version].split()]
    signature = inspect.Signature(parameters)

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        settings_given, first = bound.arguments, bound.args[0]
        if first.is_cuda and not hasattr(first, "fake_mode"):
            return _installed(name, version)(*args, **kwargs)
        packed = tensors[0] == "qkv"
        lengths = tuple(settings_given[item] for item in tensors[1 if packed else 3 :])
        lengths = (lengths[0], lengths[0], lengths[1], lengths[1]) if packed and lengths else lengths
        settings = (bool(settings_given["causal"]), *settings_given["window_size"], version)
        q, k, v = (first, None, None) if packed else (settings_given[item] for item in tensors[:3])
        out: torch.Tensor = _Attention.apply(q, k, v, lengths, settings)  # type: ignore[no-untyped-call]
        return out

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


@cache
def _installed(name: str, version: int) -> Callable[..., torch.Tensor]:
    stood = {key: sys.modules.pop(key) for key in modules() if key in sys.modules}
    try:
        function: Callable[..., torch.Tensor] = getattr(import_module(_PACKAGES[version]), name)
        return function
    finally:
        sys.modules.update(stood)


class _IndexFirstAxis(torch.autograd.Function):
    """The rows of these numbers; the backward pass scatters their gradients into zeros."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, rows = states.shape, states.reshape(states.shape[0], -1)
        return rows.gather(0, indices[:, None].expand(-1, rows.shape[1])).reshape(-1, *states.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,), rows = ctx.saved_tensors, grad.reshape(grad.shape[0], -1)
        whole = torch.zeros(ctx.shape[0], rows.shape[1], device=grad.device, dtype=grad.dtype)
        return whole.scatter_(0, indices[:, None].expand_as(rows), rows).reshape(ctx.shape), None


def pad_input(states: torch.Tensor, indices: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
    """Return the rows in zeros of batch x seq."""
    whole = torch.zeros(batch * seq, *states.shape[1:], device=states.device, dtype=states.dtype)
    whole[indices] = states
    return whole.view(batch, seq, *states.shape[1:])


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor, unused_mask: Any = None) -> tuple[Any, ...]:
    """Return the rows that the mask keeps, their places, the ends of the sequences, and their lengths."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten()).flatten()
    ends = nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = _IndexFirstAxis.apply(hidden.reshape(-1, *hidden.shape[2:]), indices)  # type: ignore[no-untyped-call]
    return rows, indices, ends, lengths.max().item(), lengths


class _RotaryEmbedding(nn.Module):
    """The tables of rotary embeddings, which grow to the longest sequence; without scaling, as ModernBERT uses it."""

    # transformers 4.50 passes pos_idx_in_fp32=True too.
    def __init__(self, dim: int, base: float = 1e4, interleaved: bool = False, device: Any = None, **_: Any) -> None:
        super().__init__()
        self.inv_freq: torch.Tensor
        self.dim, self.base, self.interleaved, self.scale_base = dim, base, interleaved, None
        self.register_buffer("inv_freq", torch.empty(dim // 2, device=device), persistent=False)
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        cached = self._cos_cached
        if cached is None or seqlen > cached.shape[0] or cached.device != device or cached.dtype != dtype:
            turns = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), self.inv_freq.float())
            self._cos_cached, self._sin_cached = torch.cos(turns).to(dtype), torch.sin(turns).to(dtype)


def apply_rotary(states: torch.Tensor, *_: Any, inplace: bool = False, **__: Any) -> torch.Tensor:
    """Return a tensor of the same shape, in place the same one."""
    return states if inplace else torch.empty_like(states)


def apply_rotary_emb(states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return a new tensor, and keep nothing for backward that is not a table."""
    return states * 1


@cache
def modules() -> dict[str, Any]:
    """Return what transformers imports of flash-attn 2 and 3, by the names of their modules."""
    two, three = ({name: _function(name, version) for name in _FUNCTIONS} for version in (2, 3))
    padding = {"index_first_axis": _IndexFirstAxis.apply, "pad_input": pad_input, "unpad_input": unpad_input}
    return {
        "flash_attn": two,
        _PACKAGES[2]: two,
        _PACKAGES[3]: three,
        "flash_attn.bert_padding": padding,
        "flash_attn.layers.rotary": {"RotaryEmbedding": _RotaryEmbedding, "apply_rotary_emb": apply_rotary_emb},
        "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary},
        **{f"flash_attn.{name}": {} for name in ("layers", "ops", "ops.triton")},
    }


# ---- what transformers asks ----


def replace_item(stack: ExitStack, items: Any, name: str, value: Any) -> None:
    """Set an item of a dictionary, such as that of a module, until the stack is closed."""
    original = items.get(name, _MISSING)
    items[name] = value
    stack.callback(*((items.pop, name) if original is _MISSING else (items.__setitem__, name, original)))


class ForOwnCode(MetaPathFinder, Loader):
    """Finds flash-attn, where it is not installed, for the user's own code: a library looks whether it is there."""

    def __enter__(self) -> None:
        sys.meta_path.append(self)

    def __exit__(self, *_: Any) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module of flash-attn if a file of the user imports it."""
        if fullname not in modules():
            return None
        files = [frame.f_code.co_filename for frame, _ in walk_stack(None)]
        importing = next((name for name in files if "importlib" not in name and name != __file__), "<")
        is_asked = any("importlib" in name and "util" in name for name in files)  # of find_spec
        is_own = not is_asked and importing[0] != "<" and "-packages" not in importing
        return ModuleSpec(fullname, self, is_package=True) if is_own else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        vars(module).update(modules()[module.__name__])


def stand_in_when_asked(stack: ExitStack, note: Callable[[str], None]) -> None:
    """Show transformers a flash-attn as soon as a model asks for it, where the package is not installed."""
    base: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel

    def checked(name: str) -> Callable[..., Any]:
        def check(model: Any, *args: Any, **kwargs: Any) -> Any:
            note("flash-attn is not installed here; what it allocates follows the rules for 2.8 and 3")
            stack.enter_context(flash_attn_stand_in(has_values=True))
            return getattr(model, name)(*args, **kwargs)

        return check

    if find_spec("flash_attn") is None:
        _replace_checks(stack, base, checked)


def _replace_checks(stack: ExitStack, base: Any, check_of: Callable[[str], Callable[..., Any]]) -> None:
    """Replace the checks that a model makes before it takes flash attention; each is found by its name."""
    for name in vars(base).keys() & _CHECKS:
        original, check = vars(base)[name], check_of(name)
        stack.callback(setattr, base, name, original)
        setattr(base, name, classmethod(check) if isinstance(original, classmethod) else check)


@contextmanager
def flash_attn_stand_in(*, has_values: bool = False) -> Iterator[None]:
    """Show transformers a flash-attn, of operators that have shapes only; the end restores what was there.

    With `has_values`, as on a simulated GPU, positions have values and autocast is the GPU's.
    Fallback of each name: where a version of transformers does not have it, it stays away.
    """
    with ExitStack() as stack:
        for name, content in modules().items():
            module = ModuleType(name)
            vars(module).update(content, __spec__=ModuleSpec(name, None, is_package=True), __path__=[])
            replace_item(stack, sys.modules, name, module)
        original = vars(import_module("transformers.utils.import_utils"))
        stack.callback(_answer, {name: original[name] for name in _ANSWERS if name in original})
        _answer(dict.fromkeys(_ANSWERS, always(True)))
        for name, module in list(sys.modules.items()):
            # ModernBERT of transformers 4.48 to 4.57, imported without flash-attn: its own names get that content.
            if name.startswith("transformers.models.") and vars(module).get("RotaryEmbedding") is object:
                reload(module)
        _import_late(stack, import_module(_UTILITIES))
        _pass_checks(stack, has_values)
        yield


def _answer(answers: dict[str, Any]) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers":
            for function in answers.keys() & vars(module).keys():
                setattr(module, function, answers[function])


def _import_late(stack: ExitStack, utilities: ModuleType) -> None:
    """Give modules in transformers before 4.48 the names that they import only if flash-attn is there."""
    if hasattr(utilities, "_lazy_imports"):
        return
    functions = modules()["flash_attn"] | modules()["flash_attn.bert_padding"] | {"_flash_supports_window_size": True}
    for name, function in functions.items():
        replace_item(stack, vars(utilities), name, function)
    for name, module in list(sys.modules.items()):
        is_model = name.startswith("transformers.models.") and "is_flash_attn_2_available" in vars(module)
        if is_model and "_flash_attention_forward" not in vars(module):
            forward = vars(utilities).get("_flash_attention_forward")
            replace_item(stack, vars(module), "_flash_attention_forward", forward)


def _pass_checks(stack: ExitStack, has_values: bool) -> None:
    """Have a model take flash attention if its class supports it, whatever is installed, and forget former imports."""
    base: Any = sys.modules["transformers"].PreTrainedModel
    utilities = vars(sys.modules[_UTILITIES])
    for name in utilities.keys() & set(_IMPORTED.split()):
        replace_item(stack, utilities, name, None)
    # It asks for the values of positions; without them they begin once.
    if "_is_packed_sequence" in utilities and not has_values:
        replace_item(stack, utilities, "_is_packed_sequence", always(False))
    for row in utilities.get("FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).values():
        replace_item(stack, row, "general_availability_check", always(True))
    _replace_checks(stack, base, always(_supports))
    if has_values:
        return
    # Attention asks for the dtype of autocast on a GPU, or on meta, which has none.
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    on_card = ("cuda", "meta")
    replace_item(stack, vars(torch), "is_autocast_enabled", lambda at="cuda": enabled("cpu" if at in on_card else at))
    replace_item(stack, vars(torch), "get_autocast_gpu_dtype", partial(dtype, "cpu"))


def _supports(model: Any, checked: Any = True, *_: Any, **__: Any) -> Any:
    """Return the version or the configuration to check if the class has flash attention; raise ValueError if not."""
    if not any(getattr(model, name, False) for name in ("_supports_flash_attn", "_supports_flash_attn_2")):
        kind = model if isinstance(model, type) else type(model)
        raise ValueError(f"{kind.__name__} has no flash attention in this transformers; use sdpa or eager attention")
    return checked
