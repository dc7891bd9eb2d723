"""Defaults of options from the table `[tool.bertscope]` in the nearest pyproject.toml, for the command line only.

gpu = "t4"                              # a setting of a run: of each command that takes it
precision = "autocast-bf16"
architecture = "BertForSequenceClassification"  # the class of a BERT in the commands of HEADED
check = ["models.bertscope.yaml"]       # the files of check, relative to pyproject.toml
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from bertscope.errors import ConfigError, SourceError, one_line
from bertscope.frozen import dataclass

if TYPE_CHECKING:
    from bertscope.settings.resolve import Layer

MAX_BYTES = 1 << 20  # the largest pyproject.toml of a known project has some 50 KiB
HEADED = ("estimate", "profile", "fit", "flops", "report")
_MARK = b"[tool.bertscope]"
_COMPARED = ("batch", "seq", "precision", "checkpointing", "gpu")  # a command that takes one value refuses several


@dataclass(frozen=True, kw_only=True)
class Project:
    """The table of a project; an empty value for a key that it does not have."""

    path: Path
    architecture: str = ""
    check: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def layer(self, settings: Mapping[str, Any], compared: Collection[str], records: Any) -> Layer:
        """Return the layer of these settings of the table."""
        from bertscope.settings.resolve import Layer  # most projects have no table

        where = f"{self.path}: [tool.bertscope]"
        return Layer(settings, compared=[*compared, *_COMPARED], where=where, is_default=True, records=records)

    def note_used(self, values: Sequence[str]) -> None:
        """Print which values of the table a command uses."""
        if values:
            text = f"{one_line(str(self.path), limit=200)} sets {one_line(', '.join(values))}"
            print(f"note: {text}", file=sys.stderr)


def project() -> Project | None:
    """Return the table of the nearest pyproject.toml, in the working directory or above; None without one.

    Raises SourceError for a file that cannot be read, ConfigError for an unknown key and a wrong value.
    """
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return None
    path = next((path for folder in (here, *here.parents) if (path := folder / "pyproject.toml").is_file()), None)
    return _read(path) if path else None


@cache
def _read(path: Path) -> Project | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}; check its permissions", where=str(path)) from None
    if _MARK not in content:
        return None
    if sys.version_info < (3, 11):  # which has no reader of TOML
        name = one_line(str(path), limit=200)
        print(f"note: {name}: [tool.bertscope] needs Python 3.11; it is ignored", file=sys.stderr)
        return None
    if len(content) > MAX_BYTES:
        raise SourceError(f"has more than {MAX_BYTES:,} bytes; remove [tool.bertscope] from it", where=str(path))
    import tomllib

    try:
        table = tomllib.loads(content.decode()).get("tool", {}).get("bertscope", {})
    except (ValueError, RecursionError, AttributeError) as error:
        raise SourceError(f"not valid TOML: {one_line(str(error), limit=200)}; correct it", where=str(path)) from None
    return _checked(table, path)


def _checked(table: Any, path: Path) -> Project:
    """Return the table with checked values."""
    from bertscope.config import ARCHITECTURES, unknown_architecture
    from bertscope.settings.resolve import unknown_setting
    from bertscope.settings.run_config import ESTIMATED, SETTINGS

    def wrong(message: str) -> ConfigError:
        """Return the error about the file."""
        return ConfigError(f"[tool.bertscope]: {message}", where=str(path))

    if not isinstance(table, dict):
        raise wrong("must be a table")
    own = ("architecture", "check")
    if "lang" in table:
        raise wrong("lang is no setting: reports are in English; remove it, and use 'bertscope explain --lang zh'")
    for key, value in table.items():
        if key not in own and key not in SETTINGS:
            raise wrong(unknown_setting(key, [*own, *SETTINGS]))
        words = value if key == "check" else [value]
        if key in own and (not isinstance(words, list) or not all(isinstance(word, str) and word for word in words)):
            rule = "a list of files" if key == "check" else "a text"
            raise wrong(f"{key} must be {rule}; got {str(value)[:60]!r}")
    if table.get("architecture") not in (None, *ARCHITECTURES):
        raise wrong(f"architecture: {unknown_architecture(table['architecture']).message}")
    settings = {key: value for key, value in table.items() if key in SETTINGS}
    found = Project(
        path=path, architecture=table.get("architecture", ""),
        check=tuple(table.get("check", ())), settings=settings,
    )  # fmt: skip
    found.layer(settings, (), ESTIMATED)
    return found


def _in_lines(example: str, width: int) -> str:
    """Return an example, if it is wider than that, in several lines that end before an option."""
    if len(example) <= width:
        return example
    rows = [""]
    for words in re.split(r" (?=-)", example):
        if rows[-1].strip() and len(f"{rows[-1]} {words} \\") > width:
            rows.append("     ")
        rows[-1] += f" {words}" if rows[-1] else words
    return " \\\n".join(rows)


# The headings of a command's options in its help: those that most runs need, those of this command, and the others.
SECTIONS = "arguments", "common", "options", "model", "sizes", "loop", "card", "ranks", "measurement", "output"
_EXPLAINED = SECTIONS[:3]  # in a help that would be longer than two screens
_MOST_LINES = 100
_WHOLE = "bertscope.whole_help"  # key of ctx.meta


def _shortest(param: Any) -> str:
    """Return an option without its short form: `--lora`, or `--[no-]time` for one that can be negated."""
    name = str(max(param.opts, key=len))
    return f"--[no-]{name[2:]}" if param.secondary_opts else name


class WithProjectDefaults(TyperCommand):
    """A command whose options have the defaults of the project; a note names those that are used."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words with the defaults of the project; an error names this command."""
        try:
            return self._parsed(ctx, _joined(args, self.params))
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # Typer's error for an option without its value
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def whole_help(self, ctx: Any) -> str:
        """Return the help with the meaning of every option."""
        ctx.meta[_WHOLE] = True
        try:
            return str(super().get_help(ctx))
        finally:
            del ctx.meta[_WHOLE]

    def get_help(self, ctx: Any) -> str:
        """Return the whole help, or if it is long one that only names the options that few runs need."""
        whole = self.whole_help(ctx)
        return whole if whole.count("\n") < _MOST_LINES else str(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options under the headings of SECTIONS."""
        sections: dict[str, list[Any]] = {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            by_default = "output" if param.name == "help" else "options"
            heading = "arguments" if is_argument else getattr(param, "rich_help_panel", None) or by_default
            if record := param.get_help_record(ctx):
                sections[heading].append((param, record))
        for heading, listed in sections.items():
            if not listed:
                continue
            with formatter.section(f"{heading.capitalize()}{' options' if heading == 'common' else ''}"):
                if heading in _EXPLAINED or _WHOLE in ctx.meta:
                    formatter.write_dl([record for _, record in listed])
                else:
                    words = ", ".join(_shortest(param) for param, _ in listed)
                    formatter.write(fill(words, formatter.width, initial_indent="  ", subsequent_indent="  ",
                                         break_on_hyphens=False) + "\n")  # fmt: skip
        if _WHOLE not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"'{ctx.command_path} --help-all' explains every option.")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples; those that are wider than the help take several lines of the shell."""
        whole = self.epilog
        try:
            self.epilog = "\n".join(_in_lines(line, formatter.width - 2) for line in (whole or "").split("\n"))
            super().format_epilog(ctx, formatter)
        finally:
            self.epilog = whole

    def _parsed(self, ctx: Any, args: list[str]) -> list[str]:
        found = None if ctx.resilient_parsing or {"-h", "--help", "--help-all"} & set(args) else project()
        if found is None:
            return super().parse_args(ctx, args)
        names = {param.name for param in self.params}
        ctx.default_map = {name: value for name, value in _defaults(found, ctx).items() if name in names}
        rest = super().parse_args(ctx, args)
        files = ctx.default_map.pop("files", lambda: None)()
        takes_files = bool(files) and not ctx.params["files"]  # no words are a value, so no default is looked up
        if takes_files:
            ctx.params["files"] = files
        is_used = _source(ctx, "architecture") == "DEFAULT_MAP" and ctx.params.get("architecture")
        used = [found.architecture] if is_used else []
        found.note_used(used + (list(found.check) if takes_files else []))
        return rest


def _joined(args: Sequence[str], params: Sequence[Any]) -> list[str]:
    """Return the words with one value for each option that takes a list: `--seq 128 --seq 512` is `--seq 128,512`."""
    lists = {option: param.name for param in params if "[," in str(param.metavar) for option in param.opts}
    words: list[str] = []
    places: dict[str, int] = {}  # of the value of each such option
    awaiting = None  # the option whose value may be the next word
    for word in args:
        option, equals, value = word.partition("=")
        name = awaiting
        if awaiting is None or word.startswith("-"):
            name = lists.get(option) if equals else None
        elif awaiting in places:
            words.pop()  # the option
            value = word
        awaiting = None if equals else lists.get(word)
        if name in places:
            words[places[name]] += f",{value}"
            continue
        if name is not None:
            places[name] = len(words)
        words.append(word)
    return words


def _source(ctx: Any, name: str) -> str:
    found = ctx.get_parameter_source(name)
    return found.name if found else ""


def _defaults(found: Project, ctx: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that return the default of an option, None if an option that excludes it is given.

    Options of the command line are evaluated before those that are not given.
    """

    def unless_given(others: Collection[str], value: Any) -> Callable[[], Any]:
        """Return a function that returns the value unless one of the other options is given."""
        return lambda: None if any(_source(ctx, name) == "COMMANDLINE" for name in others) else value or None

    files = [str(found.path.parent / file) for file in found.check]
    defaults = {"files": unless_given(("write_to", "presets"), files)}
    if ctx.info_name in HEADED:
        defaults["architecture"] = unless_given(("add_pooling_layer",), found.architecture)
    return defaults
