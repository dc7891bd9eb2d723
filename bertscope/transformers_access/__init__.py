"""The answers to what transformers asks of flash-attn, for a machine without that package.

tests/test_transformers_access.py fails when transformers changes one of these names.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, reload
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from bertscope.torch_access import torch
from bertscope.transformers_access.flash_attn import modules

_MISSING = object()
_UTILITIES = "transformers.modeling_flash_attention_utils"
# The functions that say if flash-attn is installed, which the modules of transformers import by their names.
_ANSWERS = [
    f"is_flash_attn_{end}" for end in ("2_available", "3_available", "greater_or_equal", "greater_or_equal_2_10")
]
# The methods that look for a card too: of transformers 5, 4.48 and 4.43.
_CHECKS = ["_flash_attn_can_dispatch", "_flash_attn_2_can_dispatch", "_flash_attn_3_can_dispatch",
           "_check_and_enable_flash_attn_2"]  # fmt: skip
# What transformers 5 keeps of its first import of flash-attn.
_KEPT = ["_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
         "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"]  # fmt: skip


def replace_item(stack: ExitStack, items: Any, name: str, value: Any) -> None:
    """Set an item of a dictionary, such as that of a module, until the stack is closed."""
    original = items.get(name, _MISSING)
    items[name] = value
    stack.callback(*((items.pop, name) if original is _MISSING else (items.__setitem__, name, original)))


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Show transformers a flash-attn, of operators that have shapes only; the end restores what was there.

    Fallback of each name: where a version of transformers does not have it, it stays away.
    """
    with ExitStack() as stack:
        for name, content in modules().items():
            module = ModuleType(name)
            vars(module).update(content, __spec__=ModuleSpec(name, None, is_package=True), __path__=[])
            replace_item(stack, sys.modules, name, module)
        original = vars(import_module("transformers.utils.import_utils"))
        stack.callback(_answer, {name: original[name] for name in _ANSWERS if name in original})
        _answer(dict.fromkeys(_ANSWERS, lambda *_, **__: True))
        for name, module in list(sys.modules.items()):
            # ModernBERT of transformers 4.48 to 4.57, imported without flash-attn: its own names get that content.
            if name.startswith("transformers.models.") and vars(module).get("RotaryEmbedding") is object:
                reload(module)
        _import_late(stack, import_module(_UTILITIES))
        _pass_checks(stack)
        yield


def _answer(answers: dict[str, Any]) -> None:
    """Replace these functions in each module of transformers that has imported them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers":
            for asked in answers.keys() & vars(module).keys():
                setattr(module, asked, answers[asked])


def _import_late(stack: ExitStack, utilities: ModuleType) -> None:
    """Give modules of transformers before 4.48 the names that they import only if flash-attn is there."""
    if hasattr(utilities, "_lazy_imports"):
        return
    found = modules()["flash_attn"] | modules()["flash_attn.bert_padding"] | {"_flash_supports_window_size": True}
    for name, function in found.items():
        replace_item(stack, vars(utilities), name, function)
    for name, module in list(sys.modules.items()):
        is_model = name.startswith("transformers.models.") and "is_flash_attn_2_available" in vars(module)
        if is_model and "_flash_attention_forward" not in vars(module):
            forward = vars(utilities).get("_flash_attention_forward")
            replace_item(stack, vars(module), "_flash_attention_forward", forward)


def _pass_checks(stack: ExitStack) -> None:
    """Have a model take flash attention if its class supports it, whatever is installed, and forget former imports."""
    base: Any = sys.modules["transformers"].PreTrainedModel
    utilities = vars(sys.modules[_UTILITIES])
    for name in utilities.keys() & set(_KEPT):
        replace_item(stack, utilities, name, None)
    if "_is_packed_sequence" in utilities:  # which asks for the values of positions; here they begin once
        replace_item(stack, utilities, "_is_packed_sequence", lambda *_, **__: False)
    for row in utilities.get("FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).values():
        replace_item(stack, row, "general_availability_check", lambda *_, **__: True)
    for name in vars(base).keys() & set(_CHECKS):
        original = vars(base)[name]
        stack.callback(setattr, base, name, original)
        setattr(base, name, classmethod(_supports) if isinstance(original, classmethod) else _supports)
    # Attention asks for the dtype of autocast on a card, or on meta, which has none.
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    on_card = ("cuda", "meta")
    replace_item(stack, vars(torch), "is_autocast_enabled", lambda at="cuda": enabled("cpu" if at in on_card else at))
    replace_item(stack, vars(torch), "get_autocast_gpu_dtype", lambda: dtype("cpu"))


def _supports(model: Any, checked: Any = True, *_: Any, **__: Any) -> Any:
    """Return the version or the configuration to check if the class has flash attention; raise ValueError if not."""
    if not any(getattr(model, name, False) for name in ("_supports_flash_attn", "_supports_flash_attn_2")):
        kind = model if isinstance(model, type) else type(model)
        raise ValueError(f"{kind.__name__} has no flash attention in this transformers; use sdpa or eager attention")
    return checked
