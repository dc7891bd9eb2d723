"""torch._dynamo, which takes half a second of CPU time to load and which an analysis hardly ever needs."""

import gc
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bertscope.torch_import import load_meta_kernels


class _LaterRules:
    """torch._dynamo.trace_rules before its package has run; torch.distributed empties its cache without a test."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch._dynamo.trace_rules"), name)

    def clear_lru_cache(self) -> None:
        """Do nothing: nothing is cached yet."""


class _LaterPackage(ModuleType):
    """torch._dynamo before its code has run, which happens when an attribute that it does not have yet is read."""

    def __getattr__(self, name: str) -> Any:
        if not self.__dict__.get("is_waiting"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.is_waiting = False
        self.__dict__.pop("trace_rules", None)  # the package imports the module of that name
        found: Any = self.__spec__
        self.__path__ = found.submodule_search_locations
        try:
            with torch._C._DisableTorchDispatch():  # its tensors are no model's
                found.loader.exec_module(self)
        except BaseException:  # the next use tries again, as after an import that failed
            del self.__path__
            self.is_waiting = True
            raise
        gc.collect()  # the cycles that it leaves hold the frames of its callers, and with them a model's tensors
        return getattr(self, name)

    def disable(self, function: Any = None, *settings: Any, **more: Any) -> Any:
        """Return a function that runs `function` as it is, and once the package is loaded, without compiling it."""
        disabled: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_waiting:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(self.__dict__["disable"](function, *settings, **more))
            return disabled[0](*args, **kwargs)

        return run if function is not None else self.decorators.disable(None, *settings, **more)

    def graph_break(self, *_: Any) -> None:
        """Do nothing, as outside a compiled function; each step of an optimizer calls it."""

    def is_compiling(self) -> bool:
        """Return False, as outside a compiled function; the models of transformers ask in each forward."""
        return False


def load_dynamo_later() -> None:
    """Have torch._dynamo run its code at its first real use; call this before operators run on meta.

    torch imports it (0.5 s of CPU time) to exclude meta kernels and dispatch modes from torch.compile, which is not in
    use while the package is not loaded. The package has no search path, which Python reads to import a module in it:
    any other use runs the package first, as an import does. Its settings, which FakeTensorMode reads, are there without
    it: they are a module that imports nothing of the package.
    Fallback: where the package is loaded or cannot be found, nothing.
    """
    load_meta_kernels()
    name = "torch._dynamo"
    if name in sys.modules or (found := find_spec(name)) is None or found.loader is None:
        return
    package = module_from_spec(found)
    del package.__path__
    package.__class__ = _LaterPackage
    package.is_waiting = True  # type: ignore[attr-defined]
    package.trace_rules = _LaterRules()  # type: ignore[attr-defined]
    torch._dynamo = sys.modules[name] = package
    settings = f"{name}.config"
    path = Path(str(found.origin)).with_name("config.py")
    if path.is_file() and (own := spec_from_file_location(settings, path)) and own.loader:
        package.config = sys.modules[settings] = module_from_spec(own)  # type: ignore[attr-defined]
        own.loader.exec_module(package.config)
