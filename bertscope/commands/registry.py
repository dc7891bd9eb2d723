"""Registration of commands, and bundles of options that become parameters of a command."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from bertscope.commands.output import check_outputs
from bertscope.commands.process import Unexpected
from bertscope.render.console import choose_color

Color = Annotated[
    Literal["auto", "always", "never"] | None,
    typer.Option(help="Colour; auto: by the terminal, NO_COLOR and FORCE_COLOR.", show_default=False),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error, as BERTSCOPE_DEBUG=1 does.", show_default=False)
]


class OneOf(tuple[str, ...]):
    """The words that an option allows, from a table: `Annotated[str, OneOf(TABLE), typer.Option(...)]`."""


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The options that `bertscope` takes before a command, and that each command takes."""

    color: Color = None
    debug: Debug = False


@dataclass(frozen=True)
class Registered:
    """A command: its place in the list of commands, its function, and further settings for Typer."""

    place: int
    function: Callable[..., Any]
    settings: dict[str, Any]


_REGISTERED: dict[str, Registered] = {}


def command(*, place: int = 1000, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a command; `place` orders the list of commands.

    `settings` are those of Typer's decorator: name, epilog, short_help, cls.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _REGISTERED[function.__module__] = Registered(place, function, settings)
        return function

    return register


def add_commands(app: typer.Typer, package: str) -> None:
    """Import every module of the package, and add the commands that they register to the app."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
    for item in sorted(_REGISTERED.values(), key=lambda item: item.place):
        app.command(**item.settings)(with_bundles(item.function))


def with_bundles(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with a parameter for each field of the bundles (dataclasses) among its parameters.

    If a bundle has a default, its fields are the defaults of the options. The command first checks that every output
    file can be written: each option of type Path names one.
    """
    signature = inspect.signature(function, eval_str=True)
    bundles = {item.name: item.annotation for item in signature.parameters.values() if is_dataclass(item.annotation)}

    @functools.wraps(function)
    def run(**given: Any) -> Any:
        shared = _taken(SharedOptions, given)
        if shared.color is not None:
            choose_color(shared.color)
        check_outputs([value for value in given.values() if isinstance(value, Path)])
        for name, bundle in bundles.items():
            given[name] = _taken(bundle, given)
        try:
            return function(**given)  # `bertscope.commands.process` reads --debug: an error may come before parsing
        except (EOFError, OSError) as error:  # Typer ends with exit code 1 for them, which means "no"
            raise Unexpected from error

    params = [param for item in signature.parameters.values() for param in _unbundled(item)]
    params += _fields(SharedOptions, None)
    run.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in params}
    return run


def _taken(bundle: Any, given: dict[str, Any]) -> Any:
    """Move the values of a bundle's fields out of `given`, into the bundle."""
    return bundle(**{field.name: given.pop(field.name) for field in fields(bundle)})


def _unbundled(item: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if is_dataclass(item.annotation):
        yield from _fields(item.annotation, item.default)
    else:
        yield item.replace(annotation=_narrowed(item.annotation), kind=inspect.Parameter.KEYWORD_ONLY)


def _fields(bundle: Any, defaults: object) -> Iterator[inspect.Parameter]:
    annotations = get_type_hints(bundle, include_extras=True)
    for field in fields(bundle):
        default = getattr(defaults, field.name, field.default)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=_narrowed(annotations[field.name]),
        )


def _narrowed(annotation: Any) -> Any:
    """Return the annotation with the words of its `OneOf`, if any, instead of `str`."""
    kind, *others = get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
    words = next((item for item in others if isinstance(item, OneOf)), None)
    if words is None:
        return annotation
    taken: Any = Literal[tuple(words)]
    form: Any = Annotated
    metadata = [item for item in others if item is not words]
    parts = (taken | None if type(None) in get_args(kind) else taken, *metadata)
    return form[parts]
