"""ModelSource: a model's type for every analysis; only `build` builds it.

Two sources are here: a module from Python, and `module:attribute`, the user's own code.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from bertscope.config import ALL_LINEAR, MAX_BUILT_LAYERS, Lora, Quantization
from bertscope.errors import (
    BertscopeError,
    ConfigError,
    MissingExtraError,
    SelectionError,
    SourceError,
    importing,
    is_out_of_memory,
    name_of,
    suggestion,
)
from bertscope.frozen import Record
from bertscope.reports.base import reads_words
from bertscope.settings.checkpointing import FULL, NONE, SAVE
from bertscope.settings.rows import NO_PERMIT, CodeName, with_permits
from bertscope.units import QUANTIZED, UNQUANTIZED

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.config import BertConfig
    from bertscope.sources.bert import BertSource
    from bertscope.torch_access import nn

_REMEDY = "count, tree, flops, estimate, profile, fit, report, explain, diagram, diff and check take any model"


class SourceOptions(TypedDict, total=False):
    """The options that change a model; None leaves it as it is."""

    architecture: str | None
    attention: str | None
    add_pooling_layer: bool | None
    lora: Lora | str | None


class ModelSource(Record):
    """A model: a preset, a `config.json` of any family, a checkpoint, `module:attribute`, a module from Python.

    A source raises a one-line error for what it does not support. This class has no known layers, fields and other
    classes; a subclass overrides what it knows. Example inputs do not belong to a source: `tracing.inputs`
    derives them from the `forward` of the built module.
    """

    name: str  # in reports
    architecture: str | None = None  # the name of the class to build, if the source gives one
    stored_dtype: str | None = None  # of the published weights, if the source gives one
    where: str = ""  # `file:line` of its definition, if there is one
    # Those that affect the model, by their names in its file, except those of a BertConfig.
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # The adapters that peft adds: names and values as in an adapter_config.json, and what reports show of them.
    adapter: Mapping[str, Any] = field(default_factory=dict, hash=False)
    lora: Lora | str | None = None
    lora_where: str = field(default="", compare=False)  # `file:line` of the adapters' targets, if a file names them

    has_own_dtypes = False  # True: the user's code chooses the parameters' dtypes, which then stay as built

    @property
    def family(self) -> str:
        """Return the kind of model in a few words, such as `a gpt2 in transformers`."""
        return "a module"

    @property
    def notice(self) -> str:
        """Return a note for the user before the model is built, or an empty string."""
        return ""

    @property
    def quantization(self) -> Any:
        """Return the `quantization_config` in the model's file, which may be anything; None without one."""
        return None

    @property
    def bert_config(self) -> BertConfig | None:
        """Return the configuration that closed formulas of a BERT need; None for another family."""
        return None

    @property
    def reads_words(self) -> bool:
        """Return True for a model whose configuration has a vocabulary: its inputs follow the sequence length."""
        return self.bert_config is not None or reads_words(self.settings)

    @property
    def layers(self) -> int:
        """Return the number of layers at `layer_path`; 0 without one."""
        return 0

    @property
    def layer_path(self) -> str:
        """Return the path of the layer stack that `with_layers` can shorten; empty without one."""
        return ""

    @property
    def has_equal_layers(self) -> bool:
        """Return True if the configuration makes all layers at `layer_path` equal."""
        return False

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        """Build the model with its adapters; `attention` is the kernel for a source that sets none.

        Raises SourceError or ConfigError for a model that cannot be built, and where peft cannot add the adapters.
        """
        if not self.adapter:
            return self._model(device, attention)
        with importing("peft", "HF_", "PEFT_", "TRANSFORMERS_"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import peft

        linear: dict[str, None] = {}

        def make() -> Any:
            base = self._model(device, attention)
            names = (path for path, part in base.named_modules() if type(part).__name__ in ("Linear", "Conv1D"))
            linear.update(dict.fromkeys(path.rpartition(".")[2] for path in names))
            return peft.get_peft_model(base, peft.get_peft_config(copy.deepcopy(dict(self.adapter))))

        def remedy() -> str:
            names = ", ".join(linear)[:200]
            return f"; write target={ALL_LINEAR}, or target= with some of its linear layers: {names}" if linear else ""

        adapters = f"the adapters in {self.lora_where}" if self.lora_where else "these adapters"
        what = f"{self.name}: peft {peft.__version__} cannot add {adapters}"
        with self.confined():
            model = self._built(device, make, what, remedy)
        model.lora = self.lora

        def stored() -> Any:
            """Return the tensors that peft's `save_pretrained` writes."""
            return peft.get_peft_model_state_dict(model, model.state_dict(keep_vars=True))

        model.stored = stored
        return model.eval()  # type: ignore[no-any-return]

    def _model(self, device: str, attention: str | None) -> nn.Module:
        """Build the model without adapters."""
        raise NotImplementedError

    def _built(self, device: str, make: Callable[[], Any], what: str, remedy: Callable[[], str] = str) -> Any:
        """Return what `make` builds on the device; raises SourceError that begins with `what` for its errors."""
        from bertscope.model.modules import built_on

        with as_source_error(what, remedy):
            return built_on(device, make, self.name)

    def to_data(self) -> dict[str, Any]:
        """Return the source's arguments as JSON data, from which another process makes the same source.

        Raises SelectionError for a source that another process cannot make.
        """
        raise SelectionError(f"{self.name} is {self.family}; another process measures only what it can build by name")

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ModelSource:
        """Return the source that `to_data` wrote."""
        return cls(**data)

    def for_run(self) -> ModelSource:
        """Return the source as a run builds it; raises SelectionError for an attention kernel that it does not have."""
        return self

    def with_layers(self, layers: int) -> ModelSource:
        """Return the source with another number of layers at `layer_path`."""
        raise SelectionError(f"{self.name} is {self.family}; its number of layers cannot be changed", where=self.where)

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        """Return the configuration's fields that give numbers of layers, from the built model if needed."""
        return {}

    def with_layer_counts(self, counts: Mapping[str, int]) -> ModelSource:
        """Return the source with other values of such fields."""
        return self

    def with_options(self, **options: Unpack[SourceOptions]) -> ModelSource:
        """Return the source with the options that are not None; raises ConfigError for one that it does not take."""
        self._refuse_pooler(options)
        if options.get("architecture") or options.get("attention"):
            raise ConfigError(
                f"{self.name} decides its class and attention by itself; leave {name_of('architecture')} and "
                f"{name_of('attention')}"
            )
        return self.with_adapters(options.get("lora"))

    def with_adapters(self, lora: Lora | str | None) -> ModelSource:
        """Return the source with adapters that peft adds; without `lora` the source itself."""
        if lora is None:
            return self
        self._refuse_further(lora)
        lora = Lora.parse(lora) if isinstance(lora, str) else lora
        return self.adapted({"peft_type": "LORA", **lora.to_peft()}, str(lora))

    def adapted(self, adapter: Mapping[str, Any], lora: str) -> ModelSource:
        """Return the source with the adapters in a configuration of peft; raises MissingExtraError without peft."""
        if find_spec("peft") is None:
            raise MissingExtraError(f"{name_of('lora')} for {self.family}", "peft")
        return replace(self, adapter=adapter, lora=lora)

    def _refuse_pooler(self, options: SourceOptions) -> None:
        if options.get("add_pooling_layer") is not None:
            raise ConfigError(
                f"only a BertModel comes with and without a pooler; {self.name} is {self.family}; leave "
                f"{name_of('add_pooling_layer')} out"
            )

    def _refuse_further(self, lora: Lora | str | None) -> None:
        if lora is not None and self.lora is not None:
            raise ConfigError(
                f"{self.name} has adapters already ({self.lora}); leave {name_of('lora')} out, or name its base model"
            )

    def with_fields(self, fields: Mapping[str, object]) -> ModelSource:
        """Return the source with other fields of a BertConfig; raises SelectionError for another family.

        The attention kernel can be set for any family, and has no effect there.
        """
        if names := [name for name in fields if name != "attn_implementation"]:
            raise SelectionError(f"{self.name} is {self.family}; {', '.join(names)} can be set for a BERT only")
        return self

    def other_classes(self) -> tuple[ModelSource, ...]:
        """Return the sources of the other classes that the same configuration can build."""
        return ()

    def strategies(self, model: Any) -> tuple[str, ...]:
        """Return the strategies of checkpointing to compare by default, those that the built model takes."""
        return (NONE, FULL) if getattr(model, "supports_gradient_checkpointing", False) else (NONE,)

    def checkpoint(self, model: Any, strategy: str, *, reentrant: bool = False) -> None:
        """Make the built model recompute its layers; raises SelectionError for a strategy that it does not take.

        With adapters the input of the first layer requires a gradient, as in peft after checkpointing, but for plans.
        """
        if strategy != NONE:
            from bertscope.model.modules import recompute, require_gradients

            recompute(model, strategy, self.strategies(model), reentrant)
            if self.adapter and not strategy.startswith(SAVE):
                require_gradients(model)

    def quantize(self, model: Any, setting: str, computes_in: Any = None, *, on_cuda: bool = False) -> None:
        """Quantize the built model's weights as the setting says, or for `stored` as the model's file says."""
        how = Quantization(kind=setting) if setting in QUANTIZED else None
        if setting not in (*QUANTIZED, UNQUANTIZED):
            how = Quantization.of(self.quantization, self.stored_dtype)
        if how:
            from bertscope.model.quantized import quantize

            quantize(model, how, computes_in, on_cuda=on_cuda)

    def confined(self) -> AbstractContextManager[Any]:
        """Return the context in which the built model runs; there transformers has no network and no pickles."""
        return nullcontext()

    def require(self, ability: str) -> BertSource:
        """Return the BERT that `ability` needs; raises SelectionError with the remedy for another family."""
        remedy = "leave it out" if ability.startswith(("--", name_of("")[0])) else _REMEDY
        raise SelectionError(f"{self.name} is {self.family}; {ability} is for BERTs only; {remedy}", where=self.where)


REPEATED = "_bertscope_layers"  # of a list of two equal layers: the number that `module_tree.read` repeats them for


def quantized_for_counting(source: ModelSource, quantize: str) -> nn.Module:
    """Build the model on meta with such weights; as it is where its file has weights of another method."""
    model = built_for_counting(source)
    with suppress(ConfigError):  # which the source's notice names
        source.quantize(model, quantize)
    return model


def built_for_counting(source: ModelSource, *, most: int = MAX_BUILT_LAYERS, attention: str | None = None) -> nn.Module:
    """Build the model on meta; of more than `most` equal layers two, which are counted for all and not run."""
    if source.layers <= most or not source.has_equal_layers:
        return source.build(attention=attention)
    short = source.with_layers(2)
    model = short.build(attention=attention)
    setattr(model.get_submodule(source.layer_path), REPEATED, source.layers)
    for module in model.modules():
        if vars(module).get("config") is short.bert_config:
            module.config = source.bert_config  # type: ignore[assignment]
    return model


def all_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its path; the second layer of `built_for_counting` represents all behind it."""
    stacks = {f"{path}.": vars(part)[REPEATED] for path, part in model.named_modules() if REPEATED in vars(part)}
    prefix, copies = next(iter(stacks.items()), ("", 0))
    second = [named for named in model.named_parameters() if copies and named[0].startswith(f"{prefix}1.")]
    for path, param in model.named_parameters():
        yield path, param
        if second and param is second[-1][1]:
            for number in range(2, copies):
                yield from ((f"{prefix}{number}.{path.removeprefix(f'{prefix}1.')}", param) for path, param in second)


_SHOWN_LATE = ("rich", "jinja2")  # what shows an answer, imported after the user's code, which may have a namesake
_folders_of_files: set[Path] = set()  # from which `file.py:attribute` was imported in this process


class GivenModule(ModelSource):
    """A module that exists already in Python; it is not changed. `inputs`, or what makes them for a size, run it."""

    module: nn.Module
    inputs: Any = field(default=None, compare=False)
    has_own_dtypes = True

    def _model(self, device: str, attention: str | None) -> nn.Module:
        from bertscope.model.modules import copied

        built = copied(self.module, device)
        if self.inputs is not None:
            inputs = self.inputs
            built.example_inputs = lambda batch, seq: inputs(batch, seq) if callable(inputs) else inputs  # type: ignore[assignment]
        return built


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
        return {"name": self.name, "code": str(self.code), "adapter": dict(self.adapter), "lora": self.lora}

    def _model(self, device: str, attention: str | None) -> nn.Module:
        """Import the attribute, and call it without arguments unless it is a module."""
        from bertscope.torch_access import nn
        from bertscope.transformers_access import ForOwnCode

        module_name, attribute = self._import_from()
        known = set(sys.modules)

        def make() -> Any:
            """Import the module anew if an attempt on another device failed, and take the attribute from it."""
            for name in set(sys.modules) - known:
                if name.partition(".")[0] == module_name.partition(".")[0]:
                    del sys.modules[name]
            target: Any = importlib.import_module(module_name)
            for name in attribute.split("."):
                if not hasattr(target, name):
                    items = vars(target).items()
                    names = [key for key, item in items if getattr(item, "__module__", "") == module_name]
                    lacks = f"{module_name} has no attribute {name!r}"
                    raise SourceError(f"{self.name}: {lacks}; {suggestion(name, names)}")
                target = getattr(target, name)
            if isinstance(target, nn.Module):  # one object for all builds, which runs would change
                if device != "meta" and any(param.is_meta for param in target.parameters()):
                    raise SelectionError(
                        f"{self.name} is a module that its import builds; a real run needs a function or class that "
                        "returns it"
                    )
                return GivenModule(name=self.name, module=target).build(device=device)
            if not callable(target):
                return target
            self._check_arguments(target)
            return target()

        with contextlib.redirect_stdout(sys.stderr), ForOwnCode():
            module = self._built(device, make, self.name)
        if not isinstance(module, nn.Module):
            raise SourceError(
                f"{self.name} gives an object of type {type(module).__name__}, not a torch.nn.Module; write a "
                f"function that returns only the module, and name it: {self._other_name('build')}"
            )
        return module

    def _import_from(self) -> tuple[str, str]:
        # Modules that earlier files imported from other folders are forgotten, and the folders are no longer searched,
        # as they may have the same names.
        if not isinstance(self.code, CodeName):
            raise SourceError(f"{self.code[:100]!r} {NO_PERMIT}")
        module_name, _, attribute = self.code.rpartition(":")
        folder = Path.cwd()  # as `python -m` does
        if module_name.endswith(".py"):
            path = Path(os.path.realpath(os.path.expanduser(module_name)))
            if not path.is_file():
                raise SourceError(
                    f"no file {module_name[:100]!r}; the part before the colon is a file or an importable name"
                )
            folder, module_name = path.parent, path.stem
            while (folder / "__init__.py").is_file() and folder.name.isidentifier():  # of a package
                folder, module_name = folder.parent, f"{folder.name}.{module_name}"
            earlier = _folders_of_files - {folder}
            folders = tuple(os.path.join(other, "") for other in earlier)
            sys.path[:] = [item for item in sys.path if Path(item) not in earlier]
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(folders):
                    del sys.modules[name]
            _folders_of_files.add(folder)
            loaded = sys.modules.get(module_name)
            if loaded is not None and getattr(loaded, "__file__", None) != str(path):
                raise SourceError(f"{self.name}: a module named {module_name} is imported already; rename the file")
        for name in _SHOWN_LATE:
            if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
                importlib.import_module(name)
        if str(folder) not in sys.path[:1]:
            sys.path.insert(0, str(folder))
        return module_name, attribute

    def _check_arguments(self, factory: Any) -> None:
        try:
            takes = inspect.signature(factory).parameters.values()
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


def source_from_data(kind: str, data: Mapping[str, Any], permits: Collection[str]) -> ModelSource:
    """Return the source whose class is named `kind` from its `to_data`; `permits` are for its code."""
    kinds = {source.__name__: source for source in ModelSource.__subclasses__()}
    return with_permits(kinds[kind].from_data(data), permits)


def required_names(takes: Iterable[inspect.Parameter]) -> list[str]:
    """Return the parameters' names without which a function cannot be called."""
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
    location, torch = "", getattr(sys.modules.get("torch"), "__file__", None) or __file__
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if not {Path(torch).parent, Path(__file__).parents[1]} & {*file.parents} and file.name[0] != "<":
            location = f" ({file.name}:{line})"
    return location
