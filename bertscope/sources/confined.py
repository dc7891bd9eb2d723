"""A guard around transformers, which a configuration can make download, prompt, unpickle or run code.

`safe_config` refuses the known settings with these effects; this second protection is independent of the settings.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_REFUSE = object()
# Module, or module:class; attribute; its value inside the guard. transformers and huggingface_hub read the
# environment once, at import; later only these attributes decide.
_CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
    ("transformers.utils.hub", "_is_offline_mode", True),  # 4.x keeps a copy
    ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0),  # seconds to wait for an answer; 0: no prompt
    ("transformers.dynamic_module_utils", "get_cached_module_file", _REFUSE),  # copies the code of a repository
    ("transformers.dynamic_module_utils", "get_class_in_module", _REFUSE),  # runs it
    ("transformers.integrations.hub_kernels", "_kernels_enabled", False),  # 5.x
    ("transformers.integrations.hub_kernels", "get_kernel", _REFUSE),  # fetches a kernel and runs its code
    ("torch", "load", _REFUSE),  # may run what a pickle names
    ("socket", "getaddrinfo", _REFUSE),
    ("socket", "create_connection", _REFUSE),
    ("socket:socket", "connect", _REFUSE),
    ("socket:socket", "connect_ex", _REFUSE),
)
_LOCK = threading.RLock()  # without it, two threads would restore each other's changes


@contextmanager
def confined() -> Iterator[None]:
    """Run code of transformers without network, prompts, pickles, or code that is not installed.

    Settings change for the whole process; functions are refused in this thread only. The end restores both.
    """
    with _LOCK, ExitStack() as stack:
        for place, name, value in _CHANGES:
            with contextlib.suppress(ImportError, AttributeError):  # not in every version
                _change(stack, place, name, value)
        _forget_connections()
        stack.callback(_forget_connections)
        yield


def _change(stack: ExitStack, place: str, name: str, value: Any) -> None:
    """Replace an attribute until the stack is closed; raises ImportError or AttributeError if it does not exist."""
    module, _, inner = place.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, inner) if inner else owner
    original, is_inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, _refusing(original, name) if value is _REFUSE else value)
    stack.callback(*((delattr, owner, name) if is_inherited else (setattr, owner, name, original)))


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that raises PermissionError in this thread and calls the original in any other."""
    thread = threading.get_ident()

    def refuse(*args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            raise PermissionError(f"{name} is not allowed while a model is built from a configuration, or run")
        return original(*args, **options)

    return refuse


def _forget_connections() -> None:
    """Close the sessions of huggingface_hub below 1.0, which keep the online or offline state they began with."""
    with contextlib.suppress(ImportError):
        from huggingface_hub.utils import reset_sessions  # type: ignore[attr-defined]

        reset_sessions()
