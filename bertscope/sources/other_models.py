"""Sources of models from other code: their base class, `module:attribute`, and a module from Python."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bertscope.errors import (
    BertscopeError,
    ConfigError,
    SelectionError,
    SourceError,
    is_out_of_memory,
    name_of,
    suggestion,
)
from bertscope.frozen import dataclass
from bertscope.settings.checkpointing import FULL, NONE, SELECTIVE, Checkpointing
from bertscope.settings.code_names import NO_PERMIT, CodeName
from bertscope.sources.building import built_on, note_values

if TYPE_CHECKING:
    from bertscope.config import Lora
    from bertscope.torch_access import nn

_folders_of_files: set[Path] = set()  # from which `file.py:attribute` was imported in this process
_REMEDY = "count, tree, flops, estimate, profile, fit, report, explain, diagram, diff and check take any model"


@dataclass(frozen=True, kw_only=True)
class OtherSource:
    """A model that `bertscope.model` does not build, without known layers, fields and other classes."""

    name: str
    architecture: str | None = None
    stored_dtype: str | None = None
    where: str = ""  # `file:line` of its definition, if there is one
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # in its file, if there is one
    bert_config = None
    layers = 0
    layer_path = ""
    has_equal_layers = False
    has_own_dtypes = False

    @property
    def family(self) -> str:
        """Return the kind of model in a few words."""
        return "a module"

    @property
    def notice(self) -> str:
        """Return an empty string: there is nothing to note."""
        return ""

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        """Build the model."""
        raise NotImplementedError

    def to_data(self) -> dict[str, Any]:
        """Raise SelectionError: only Python has this model."""
        raise SelectionError(f"{self.name} is {self.family}; another process measures only what it can build by name")

    def for_run(self) -> OtherSource:
        """Return itself: a run builds the same model."""
        return self

    def with_layers(self, layers: int) -> NoReturn:
        """Raise SelectionError."""
        raise SelectionError(f"{self.name} is {self.family}; its number of layers cannot be changed", where=self.where)

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        """Return nothing: no field is known."""
        return {}

    def with_layer_counts(self, counts: Mapping[str, int]) -> OtherSource:
        """Return the source, which has no such fields."""
        return self

    def with_options(
        self,
        *,
        architecture: str | None = None,
        attention: str | None = None,
        add_pooling_layer: bool | None = None,
        lora: Lora | str | None = None,
    ) -> OtherSource:
        """Return the source; raises ConfigError for any option that is not None."""
        self._refuse_options_of_berts(add_pooling_layer, lora)
        if architecture or attention:
            raise ConfigError(
                f"{self.name} decides its class and attention by itself; leave {name_of('architecture')} and "
                f"{name_of('attention')}"
            )
        return self

    def _refuse_options_of_berts(self, add_pooling_layer: bool | None, lora: Lora | str | None) -> None:
        if add_pooling_layer is not None:
            raise ConfigError(
                f"only a BertModel comes with and without a pooler; {self.name} is {self.family}; leave "
                f"{name_of('add_pooling_layer')} out"
            )
        if lora is not None:
            raise ConfigError(
                f"{name_of('lora')} is for BERTs, and {self.name} is {self.family}; give module:attribute of a "
                "function that returns peft's model"
            )

    def with_fields(self, fields: Mapping[str, object]) -> OtherSource:
        """Return the source; raises SelectionError for any field but the attention kernel, which it ignores."""
        if names := [name for name in fields if name != "attn_implementation"]:
            raise SelectionError(f"{self.name} is {self.family}; {', '.join(names)} can be set for a BERT only")
        return self

    def other_classes(self) -> tuple[()]:
        """Return nothing: no other class is known."""
        return ()

    def strategies(self, model: Any) -> tuple[str, ...]:
        """Return `none`, and `full` if the class of the built model supports it; such a class has `selective` too."""
        return (NONE, FULL) if getattr(model, "supports_gradient_checkpointing", False) else (NONE,)

    def checkpoint(self, model: Any, strategy: str, *, reentrant: bool = False) -> None:
        """Make the built model recompute its layers, if its class can."""
        if strategy == NONE:
            return
        chosen = Checkpointing.parse(strategy, use_reentrant=reentrant)
        if chosen is not None and chosen.kept:
            from bertscope.model.lists import keep_layers

            keep_layers(model, chosen)
            return
        known = self.strategies(model)
        if strategy not in known and (strategy != SELECTIVE or FULL not in known):
            raise SelectionError(
                f"{type(model).__name__} takes {name_of('checkpointing')} none, or selective and full where its "
                "class supports it"
            )
        from bertscope.model.encoder import selective_contexts

        options: dict[str, Any] = {"context_fn": selective_contexts} if strategy == SELECTIVE else {}
        with warnings.catch_warnings():  # transformers 5 deprecates this name
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable({"use_reentrant": reentrant, **options})

    def confined(self) -> AbstractContextManager[Any]:
        """Return an empty context: the user asked for this code by its name."""
        return contextlib.nullcontext()

    def require(self, ability: str) -> NoReturn:
        """Raise SelectionError with the remedy: an option or a setting can be left out."""
        remedy = "leave it out" if ability.startswith(("--", name_of("")[0])) else _REMEDY
        raise SelectionError(f"{self.name} is {self.family}; {ability} is for BERTs only; {remedy}", where=self.where)


@dataclass(frozen=True, kw_only=True)
class GivenModule(OtherSource):
    """A module that exists already in Python; it is not changed. `inputs`, or what makes them for a size, run it."""

    module: nn.Module
    inputs: Any = field(default=None, compare=False)
    has_own_dtypes = True

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        """Return a copy of the module on the device."""
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
class FactorySource(OtherSource):
    """The module that its name gives: the attribute is a module, or a function or class to call.

    The code is `package.module:attribute` or `path/to/file.py:attribute`; only a CodeName is imported.
    """

    code: str
    has_own_dtypes = True

    @property
    def family(self) -> str:
        """Return the kind of model in a few words."""
        return "a factory's module"

    @property
    def notice(self) -> str:
        """Return a note on the code that runs."""
        return f"runs your code: imports {self.code.rpartition(':')[0]} and takes {self.code} from it"

    def to_data(self) -> dict[str, Any]:
        """Return the name and the code, which another process imports again if it has the permit."""
        return {"name": self.name, "code": str(self.code)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> FactorySource:
        """Return the source that `to_data` wrote."""
        return cls(**data)

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
        """Raise SourceError for a class or function that requires arguments."""
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
        """Return the name of another attribute of the same module."""
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
