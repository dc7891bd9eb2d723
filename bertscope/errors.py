"""The error classes of bertscope and the exit code of each.

BertscopeError            a mistake in the input (exit code 2)
├── ConfigError           a value in a configuration
├── SourceError           a model, preset or file that cannot be found or read
├── SelectionError        a path, pattern, name or size that the model does not have
├── RowError              a name that no row of a report has
├── WorkerError           processes that ended before they did their work (exit code 3)
└── MissingExtraError     a function that needs an optional package

Every message is one line: what was given, what is allowed, what to do next. `process.EXIT_CODES` lists every exit code.
"""

from __future__ import annotations

import builtins
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from inspect import formatannotation, signature
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bertscope.units import visible

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


def one_line(text: str, limit: int = 600) -> str:
    """Return the text on one line, without control characters, cut at `limit`, for a terminal, a log or XML."""
    shown = visible(text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def in_a_sentence(text: str) -> str:
    """Return the text without its capital, but `LoRA` and `GPU` as they are."""
    return text if re.match(r"\w+[A-Z]", text) else text[:1].lower() + text[1:]


def as_sentence(text: str) -> str:
    """Return the text with a capital and a full stop; a name in code, such as `torch.compile`, keeps its letters."""
    begun = text[:1].upper() + text[1:] if re.match(r"[a-z]+('s)?[ :,]", text) else text
    return f"{begun}{'' if begun.endswith('.') else '.'}"


_NAMED = re.compile("\x02([^\x03]+)\x03")


def name_of(setting: str) -> str:
    """Return the name of a setting for an error; a command line shows its option, and Python its keyword.

    A command is named as `bertscope fit`, in Python the function `bertscope.fit()`.
    """
    return f"\x02{setting}\x03"


def _in_python(name: str) -> str:
    """Return the keyword of a setting, or the call of a command's function; a model is what `load` takes."""
    command, _, model = name.removeprefix("bertscope ").partition(" ")
    call = f"bertscope.load({model!r})" if model else f"bertscope.{command}()"
    return call if name.startswith("bertscope ") else name


@contextmanager
def assigned(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_form: ContextVar[Callable[[str], str]] = ContextVar("form", default=_in_python)


def naming(form: Callable[[str], str]) -> AbstractContextManager[None]:
    """Have reports inside the block name settings in the form of a command line, not by the keywords of Python."""
    return assigned(_form, form)


def named(setting: str) -> str:
    """Return the name of a setting for the text of a report: as `name_of`, where no error carries it to a front end."""
    return _form.get()(setting) or setting


class Reason(str):
    """A sentence on what is wrong, and after each "; " what to do, with the keywords of Python, as JSON has it.

    `shown` returns it for a front end.
    """

    marked: str

    def __new__(cls, text: str) -> Reason:
        """Take a text with the names that `name_of` marks."""
        marked = text.marked if isinstance(text, Reason) else text
        reason = super().__new__(cls, one_line(_NAMED.sub(lambda match: _in_python(match[1]), marked)))
        reason.marked = marked
        return reason

    def parts(self) -> tuple[str, str]:
        """Return what is wrong and its remedies for a front end, without those that name what it does not have."""
        what, *remedies = self.marked.split("; ")
        possible = [remedy for remedy in remedies if all(map(_form.get(), _NAMED.findall(remedy)))]
        what, remedy = (_NAMED.sub(lambda match: named(match[1]), text) for text in (what, "; ".join(possible)))
        return what, remedy


def shown(text: str) -> str:
    """Return a text of a report or an error for its front end."""
    return one_line("; ".join(filter(None, text.parts()))) if isinstance(text, Reason) else text


class BertscopeError(Exception):
    """An error that the user can correct; printed as one line on stderr, never as a traceback.

    >>> try:
    ...     bertscope.count("bert-tinny")
    ... except bertscope.BertscopeError as error:
    ...     print(error.message[:62])
    no preset or file named 'bert-tinny'; did you mean 'bert-tiny'
    """

    exit_code = 2

    def __init__(self, message: str, *, where: str = "") -> None:
        self.message = Reason(message)
        self.where = one_line(where)  # "file:line", when there is one
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    @property
    def marked(self) -> str:
        """Return the error for the text of another one, which names the settings in it too."""
        return f"{self.where}: {self.message.marked}" if self.where else self.message.marked

    @property
    def of_file(self) -> str:
        """Return the text of an error about a file, with marks on names that no key of the file changes."""
        return self.message.marked

    def at(self, where: str) -> BertscopeError:
        """Put a place (`file:line`) in front of the message, unless it already has one; return the error."""
        self.where = self.where or one_line(where)
        return self


class ConfigError(BertscopeError, ValueError):
    """A configuration value that no BERT can have; `field` names it."""

    def __init__(self, message: str, *, where: str = "", field: str = "") -> None:
        self.field = field
        super().__init__(message, where=where)


class SourceError(BertscopeError):
    """A model, preset or file that cannot be found or read."""


class SelectionError(BertscopeError, ValueError):
    """A path, pattern, name or size that does not exist in this model."""


def typed_arguments(function: Function, *passed_on: Callable[..., Any]) -> Function:
    """Return the function with a check of its arguments; SelectionError for one that its annotation does not allow.

    The keywords of other functions are annotated there.
    """

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        listed, hints = signature(checked).parameters, _hints(*passed_on, function)
        for name, value in [*zip(listed, args), *keywords.items()]:  # noqa: B905
            if value is not None and not _allows(hints.get(name, Any), value):
                allowed = formatannotation(listed[name].annotation).strip("'\"")
                wrong = f"{name_of(name)} takes {allowed}; got {one_line(repr(value), limit=60)}"
                raise SelectionError(
                    wrong + "; inputs=... gives a module's inputs" * ("inputs" in listed and hasattr(value, "dtype"))
                )
        return function(*args, **keywords)

    return checked  # type: ignore[return-value]


def refuse_negative(**numbers: int | None) -> None:
    """Raise SelectionError for a keyword's number below 0."""
    for name, number in numbers.items():
        if number is not None and number < 0:
            raise SelectionError(f"{name_of(name)} takes a whole number of at least 0; got {number}")


class _Unknown:
    """Stand-in for what only type checkers import; it may be anything."""

    def __class_getitem__(cls, item: Any) -> type[_Unknown]:
        return cls


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _Unknown


@cache
def _hints(*functions: Callable[..., Any]) -> dict[str, Any]:
    hints = dict[str, Any]()
    for function in functions:
        names = vars(builtins) | function.__globals__  # a text among them is an alias for type checkers
        known = _Names({name: _Unknown if isinstance(value, str) else value for name, value in names.items()})
        hints |= get_type_hints(function, localns=known)
    return hints


def _allows(hint: Any, value: Any) -> bool:
    """Return True for a value that the annotation allows; the items of a collection may be anything."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:  # the function itself names the words that it takes
        return isinstance(value, tuple(map(type, arguments)))
    if origin in (Union, UnionType):
        return any(_allows(argument, value) for argument in arguments)
    kind = {int: Integral, float: Real}.get(hint, origin or hint)
    is_open = kind in (Any, _Unknown) or not isinstance(kind, type)
    return is_open or (isinstance(value, kind) and not (isinstance(value, bool) and hint in (int, float)))


class RowError(BertscopeError, KeyError):
    """A name that no row of a report has, or that several rows have."""


class UnknownValueError(SelectionError):
    """A value that a step reads and that an estimate does not have; a measurement has it."""


class WorkerError(BertscopeError):
    """Processes that ended before they did their work."""

    exit_code = 3


class MissingExtraError(BertscopeError):
    """A function whose optional package is not installed; the message says how to install it."""

    def __init__(self, what: str, extra: str, *, otherwise: str = "") -> None:
        super().__init__(f"{what} needs the extra {extra!r}: {install_command(extra)}{otherwise}")


@contextmanager
def needs_extra(what: str, name: str, *, otherwise: str = "") -> Iterator[None]:
    """Raise a MissingExtraError for an import inside the block that fails."""
    try:
        yield
    except ImportError:
        raise MissingExtraError(what, name, otherwise=otherwise) from None


def install_command(extra: str) -> str:
    """Return the command that adds an extra, or several with commas: of pip, or of the tool that made its environment.

    pipx and uv write a file into the environment of a tool.
    """
    uv, pipx = f"uv pip install -p {sys.prefix}", "pipx runpip bertscope install"
    tools = {"pipx_metadata.json": pipx, "uv-receipt.toml": uv}
    install = next((command for file, command in tools.items() if (Path(sys.prefix) / file).is_file()), "pip install")
    return f"{install} 'bertscope[{extra}]'"


def _missing() -> list[str]:
    """Return the packages that bertscope cannot run without and that are not installed, as pip takes them."""
    from importlib import metadata

    try:
        required = [line for line in metadata.requires("bertscope") or () if ";" not in line]
    except metadata.PackageNotFoundError:  # run from its folder, without an installation
        return []
    return [line for line in required if not any(metadata.distributions(name=re.split(r"[^\w.-]", line)[0]))]


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the errors by which Python, torch and the system say that there is no more memory."""
    phrases = ("can't allocate memory", "out of memory", "annot allocate memory", "Resource temporarily unavailable",
             "std::bad_alloc", "cannot map zero-fill pages", "failed to map segment")  # fmt: skip
    return isinstance(error, MemoryError) or any(word in str(error) for word in phrases)


def told(error: BaseException) -> BertscopeError | None:
    """Return the error that one line tells, or None.

    It is a BertscopeError as it is, that memory ran out, or what a `pip install --no-deps` left out.
    """
    if isinstance(error, BertscopeError):
        return error
    if isinstance(error, ModuleNotFoundError) and (missing := _missing()):
        names = " ".join(f"'{line}'" for line in missing)
        return SourceError(f"packages that bertscope needs are not installed; pip install {names}")
    if not is_out_of_memory(error):
        return None
    text = one_line(" ".join(str(error).split()), limit=200)
    return WorkerError(f"memory ran out{': ' if text else ''}{text}; free memory, or raise its limit")


def line_for(error: Exception) -> str:
    """Return an error in one line, with the names of the front end; one that nobody expects is internal."""
    known = told(error)
    return shown(Reason(known.marked)) if known else f"internal error: {type(error).__name__}: {one_line(str(error))}"


@contextmanager
def importing(package: str, *prefixes: str) -> Iterator[None]:
    """Raise a SourceError that names what is not installed, or the variables with these prefixes that it refuses."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise told(error) or error from None
    except (ValueError, AttributeError, FileNotFoundError, PermissionError) as error:
        variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
        if not variables:
            raise
        said = " ".join(str(error).split())
        # Only names: a value may be a token.
        named = [name for name, value in variables.items() if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said)]
        names = ", ".join(named or variables)
        raise SourceError(
            f"{package} cannot be imported with this {names} ({type(error).__name__}: {said[:200]}); unset or fix it"
        ) from error


class BertscopeWarning(UserWarning):
    """A setting that has no effect, or a fallback to other code than the user asked for."""

    count = 0  # of all so far, those that a filter hides included

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        BertscopeWarning.count += 1


def nearest(text: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is nearest to `given`, upper and lower case alike; empty if none is near."""
    lowered = {word.lower(): word for word in known}
    near = difflib.get_close_matches(text[:100].lower(), lowered, n=1, cutoff=cutoff)
    return lowered[near[0]] if near else ""


_LISTED = 400  # characters


def suggestion(text: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x' or 'y'?` with the names nearest to `given`, or else the list of all names."""
    names = {name.lower(): name for name in sorted(known, reverse=True)}
    cutoff = 0.6 if len(text) > 2 else 0.5  # of two letters one may be wrong
    near = difflib.get_close_matches(text[:100].lower(), sorted(names), n=3, cutoff=cutoff)
    if near:
        return f"did you mean {either_of(repr(names[name]) for name in near)}?"
    listed = ", ".join(sorted(names.values()))
    if len(listed) > _LISTED:  # names are whole
        shown = listed[:_LISTED].rpartition(", ")[0]
        listed = f"{shown} and {len(names) - shown.count(', ') - 1} more"
    return f"known: {listed}"


def either_of(names: Iterable[str]) -> str:
    """Return `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
