"""Modules from elsewhere on the meta device: those of transformers by their configuration, and a factory's."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bertscope.analyses.modules.confined import confined
from bertscope.errors import BertscopeError, ConfigError, MissingExtraError, SourceError, suggestion
from bertscope.model import build
from bertscope.sources.find import ModelSource
from bertscope.sources.other_models import OtherSource, without_code
from bertscope.torch_access import nn, torch


def build_any(source: ModelSource, *, attention: str | None = None) -> nn.Module:
    """The model on meta that a source stands for; `attention` is for a foreign one that has no choice of its own.

    Raises SourceError where transformers or the factory cannot build it.
    """
    if not isinstance(source, OtherSource):
        return build(source.config, source.architecture, add_pooling_layer=source.add_pooling_layer)
    with torch.device("meta"):
        if source.origin == "factory":
            return _from_factory(source.address)
        return _from_transformers(source, source.attention or attention)


# ---- transformers ----


def _from_transformers(source: OtherSource, attention: str | None) -> nn.Module:
    with quiet_transformers() as transformers:
        config_class = _config_class(transformers, source)
        options = {"attn_implementation": attention} if attention else {}
        with told(f"{source.path}: transformers {transformers.__version__} cannot build this {source.model_type}"):
            config = config_class.from_dict(without_code(source.config), **options)
            model_class = _model_class(transformers, source, type(config))
            with _without_values():
                model = model_class(config)
            model.tie_weights()
            built: nn.Module = model.eval()
    return built


def _config_class(transformers: Any, source: OtherSource) -> Any:
    try:
        return transformers.models.auto.configuration_auto.CONFIG_MAPPING[source.model_type]
    except KeyError:
        own = "; the code in its repository (auto_map) is not run" if "auto_map" in source.config else ""
        raise SourceError(
            f"transformers {transformers.__version__} does not know the model type {source.model_type!r}; "
            f"a newer one may{own}",
            where=str(source.path),
        ) from None


def _model_class(transformers: Any, source: OtherSource, config_class: type) -> Any:
    """The class of the given name if it takes such a configuration; without a name the one without a head."""
    family = [name for mapping in _mappings(transformers) for name in _names(mapping, config_class)]
    name = source.architecture or (family[0] if family else "")
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or getattr(found, "config_class", None) is not config_class:
        raise ConfigError(
            f"unknown architecture {name[:60]!r} for a {source.model_type}; {suggestion(name, set(family))}",
            field="architecture",
        )
    return found


def _mappings(transformers: Any) -> Iterator[Any]:
    home = transformers.models.auto.modeling_auto
    yield home.MODEL_MAPPING
    for name in sorted(vars(home)):
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING"):
            yield getattr(home, name)


def _names(mapping: Any, config_class: type) -> list[str]:
    try:
        found = mapping[config_class]
    except KeyError:
        return []
    return [item.__name__ for item in (found if isinstance(found, (list, tuple)) else [found])]


@contextmanager
def quiet_transformers(purpose: str = "a model of another family") -> Iterator[Any]:
    """Return the package, confined and with its warnings off until the end; raise MissingExtraError for `purpose`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import transformers
        except ImportError:
            raise MissingExtraError(purpose, "transformers") from None
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            with confined():
                yield transformers
        finally:
            transformers.logging.set_verbosity(before)


@contextmanager
def quiet(source: OtherSource) -> Iterator[None]:
    """Run such a model without messages of transformers, and confined as when it was built."""
    with ExitStack() as stack:
        if source.origin == "transformers":
            stack.enter_context(quiet_transformers())
        yield


@contextmanager
def _without_values() -> Iterator[None]:
    """No initial values: on meta there are none, and drawing them would import torch._dynamo."""
    with ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            from transformers.modeling_utils import no_init_weights

            stack.enter_context(no_init_weights())
        yield


# ---- a factory ----


def _from_factory(address: str) -> nn.Module:
    """What the attribute is or gives: a module, or something to call without arguments that returns one."""
    place, _, attribute = address.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    with told(address), contextlib.redirect_stdout(sys.stderr):
        found: Any = importlib.import_module(place)
        for name in attribute.split("."):
            found = getattr(found, name)
        module = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(module, nn.Module):
        raise SourceError(
            f"{address} gives a {type(module).__name__}; a torch.nn.Module is needed, or what returns one"
        )
    return module


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns whatever goes wrong in the code of others into a SourceError that says where."""
    try:
        yield
    except BertscopeError:
        raise
    except (Exception, SystemExit) as error:  # a factory may even leave
        line = next(iter(str(error).strip().splitlines()), "")
        raise SourceError(f"{what}: {type(error).__name__}{_place(error)}: {line}") from None


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename if trace else __file__
    is_theirs = file != __file__ and not file.startswith("<")
    return f" ({Path(file).name}:{trace.tb_lineno})" if trace and is_theirs else ""
