"""Sources of models from other code: `module:attribute`, and a module from Python."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertscope.errors import BertscopeError, SelectionError, SourceError, is_out_of_memory, suggestion
from bertscope.frozen import dataclass
from bertscope.settings.rows import NO_PERMIT, CodeName
from bertscope.sources.model_source import ModelSource, built_on, note_values

if TYPE_CHECKING:
    from bertscope.torch_access import nn

_folders_of_files: set[Path] = set()  # from which `file.py:attribute` was imported in this process


@dataclass(frozen=True, kw_only=True)
class GivenModule(ModelSource):
    """A module that exists already in Python; it is not changed. `inputs`, or what makes them for a size, run it."""

    module: nn.Module
    inputs: Any = field(default=None, compare=False)
    has_own_dtypes = True

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        from bertscope.torch_access import nn, torch

        memo: dict[int, Any] = {}
        attributes = (value for part in self.module.modules() for value in vars(part).values())
        others = (value for value in attributes if isinstance(value, torch.Tensor))  # such as the weight of weight_norm
        for tensor in (*self.module.parameters(), *self.module.buffers(), *others):
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        built = copy.deepcopy(self.module, memo)
        if self.inputs is not None:
            own = self.inputs
            built.example_inputs = lambda batch, seq: own(batch, seq) if callable(own) else own  # type: ignore[assignment]
        return built


@dataclass(frozen=True, kw_only=True)
class FactorySource(ModelSource):
    """The module that its name gives: the attribute is a module, or a function or class to call.

    The code is `package.module:attribute` or `path/to/file.py:attribute`; only a CodeName is imported.
    """

    code: str
    has_own_dtypes = True

    family = "a factory's module"

    @property
    def notice(self) -> str:
        return f"runs your code: imports {self.code.rpartition(':')[0]} and takes {self.code} from it"

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "code": str(self.code)}

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        """Import the attribute, and call it without arguments unless it is a module."""
        from bertscope.torch_access import nn

        place, attribute = self._import_from()
        known = set(sys.modules)

        def make() -> Any:
            """Import the module anew if an attempt on another device failed, and take the attribute from it."""
            for name in set(sys.modules) - known:
                if name.partition(".")[0] == place.partition(".")[0]:
                    del sys.modules[name]
            found: Any = importlib.import_module(place)
            for name in attribute.split("."):
                if not hasattr(found, name):
                    own = [key for key, item in vars(found).items() if getattr(item, "__module__", "") == place]
                    raise SourceError(f"{self.name}: {place} has no attribute {name!r}; {suggestion(name, own)[:300]}")
                found = getattr(found, name)
            if isinstance(found, nn.Module):  # one object for all builds, which runs would change
                if device != "meta" and any(param.is_meta for param in found.parameters()):
                    raise SelectionError(
                        f"{self.name} is a module that its import builds; a real run needs a function or class that "
                        "returns it"
                    )
                return GivenModule(name=self.name, module=found).build(device=device)
            if not callable(found):
                return found
            self._check_arguments(found)
            return found()

        with as_source_error(self.name), contextlib.redirect_stdout(sys.stderr):
            module, how = built_on(device, make, self.name)
        note_values(how)
        if not isinstance(module, nn.Module):
            raise SourceError(
                f"{self.name} gives an object of type {type(module).__name__}, not a torch.nn.Module; write a "
                f"function that returns only the module, and name it: {self._other_name('build')}"
            )
        return module

    def _import_from(self) -> tuple[str, str]:
        """Return the dotted names of module and attribute, and put the folder to import from first into sys.path.

        Modules that earlier files imported from other folders are forgotten, as they may have the same names.
        """
        if not isinstance(self.code, CodeName):
            raise SourceError(f"{self.code[:100]!r} {NO_PERMIT}")
        place, _, attribute = self.code.rpartition(":")
        folder = Path.cwd()  # as `python -m` does
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            if not path.is_file():
                raise SourceError(f"no file {place[:100]!r}; the part before the colon is a file or an importable name")
            folder, place = path.parent, path.stem
            while (folder / "__init__.py").is_file() and folder.name.isidentifier():  # of a package
                folder, place = folder.parent, f"{folder.name}.{place}"
            others = tuple(os.path.join(other, "") for other in _folders_of_files - {folder})
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(others):
                    del sys.modules[name]
            _folders_of_files.add(folder)
            found = sys.modules.get(place)
            if found is not None and getattr(found, "__file__", None) != str(path):
                raise SourceError(f"{self.name}: a module named {place} is imported already; rename the file")
        if str(folder) not in sys.path[:1]:
            sys.path.insert(0, str(folder))
        return place, attribute

    def _check_arguments(self, found: Any) -> None:
        try:
            takes = inspect.signature(found).parameters.values()
        except (ValueError, TypeError):  # some callables have no signature
            return
        required = required_names(takes)
        if required:
            call = f"{self.code.rpartition(':')[2]}({', '.join(f'{name}=...' for name in required)})"
            raise SourceError(
                f"{self.name} requires arguments and is called without; add `def build(): return {call[:200]}` to its "
                f"file and name {self._other_name('build')}"
            )

    def _other_name(self, attribute: str) -> str:
        return f"{self.code.rpartition(':')[0]}:{attribute}"


def required_names(takes: Iterable[inspect.Parameter]) -> list[str]:
    """Return the names of the parameters without which a function cannot be called."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [item.name for item in takes if item.default is item.empty and item.kind not in variadic]


@contextmanager
def as_source_error(what: str, remedy: Callable[[], str] = str) -> Iterator[None]:
    """Raise a SourceError with file, line and remedy for any error in code outside this package.

    An error for lack of memory stays as it is.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a factory may call sys.exit
        if isinstance(error, BertscopeError) or is_out_of_memory(error):
            raise
        line = next(iter(str(error).strip().splitlines()), "")
        told = f"{type(error).__name__}{_place(error)}: {line[:200].rstrip('.')}{remedy()}"
        raise SourceError(f"{what}: {told}") from error


def _place(error: BaseException) -> str:
    """Return the file and line of the innermost code that is neither torch's nor of this package."""
    place, torch = "", getattr(sys.modules.get("torch"), "__file__", None) or __file__
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if not {Path(torch).parent, Path(__file__).parents[1]} & {*file.parents} and file.name[0] != "<":
            place = f" ({file.name}:{line})"
    return place
