"""A parsed command line: its options, request, models and output."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bertscope.commands.exit_codes import failure
from bertscope.commands.options import INPUTS, option_row, parameters
from bertscope.commands.table import COMMANDS, Command
from bertscope.config import ARCHITECTURES, unknown_architecture
from bertscope.errors import BertscopeError, ConfigError, SelectionError, SourceError, one_line
from bertscope.files import check_writable, open_file, readable, write_file
from bertscope.processes.signals import is_debug
from bertscope.progress import listening
from bertscope.reports.base import UNCOUNTED
from bertscope.settings.generate import option_words
from bertscope.settings.request import OF_MODEL, Request, Source, in_words, read_settings, unknown_setting
from bertscope.settings.rows import CodeName, Row, SettingError, no_effect
from bertscope.settings.run_config import QUESTIONS, SETTINGS, STORED
from bertscope.sources.adapters import ADAPTER_CONFIG
from bertscope.sources.find import find
from bertscope.sources.model_source import ModelSource, quantized_for_counting
from bertscope.torch_import import load_meta_kernels, without_meta_kernels
from bertscope.views.console import Target, asked_by, message, progress_bar, stdout_target

if TYPE_CHECKING:
    from torch import nn

MAX_BYTES = 1 << 20  # the largest pyproject.toml of a known project has some 50 KiB
HEADED = ("estimate", "profile", "fit", "flops", "report")  # commands in which a project may choose the class of a BERT
_COMPARED = ("batch", "seq", "precision", "checkpointing", "gpu")  # by any command
_MARK = b"[tool.bertscope]"
_OUTPUTS = ("fmt", "output", "verbose", "rows", "emit", "others", "batch_total", "may_change")
_PRICED = ("time", "sequences", "price")  # of further commands of the same name
_STDOUT = Path("-")
_RUNNING = ("estimate", "flops", "fit", "plan", "profile")
_FORMATS = {".json": "json", ".csv": "csv", ".md": "markdown", ".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot",
            ".gv": "dot", ".svg": "svg", ".html": "html"}  # fmt: skip
Result = TypeVar("Result")


def execute(command: Command, options: dict[str, Any]) -> int | None:
    """Run a command with its options' values; return its exit code. It first checks that outputs can be written.

    Each Path option names an output, unless it is in INPUTS. `--output -` is standard output, and the suffix of another
    file chooses the format if no other is wanted.
    """
    output = options.get("output")
    if output == _STDOUT:
        options = {**options, "output": None}
    elif output and options.get("fmt") in (None, "table", "text", "html") and command.name != "sweep":
        written = _FORMATS.get(output.suffix.lower(), "")
        options |= {"fmt": written} if written in option_row(command.name, "fmt").choices else {}
    try:
        check_outputs([value for name, value in options.items() if isinstance(value, Path) and name not in INPUTS])
        body = getattr(import_module(f"bertscope.commands.{command.body}"), command.name, CommandLine.answer)
        call = CommandLine(command, options)
        with asked_by(call.further):
            code: int | None = body(call)
    except (EOFError, OSError, SystemExit) as error:  # Typer would end with exit codes that mean something else
        return failure(error)
    return code


class CommandLine(SimpleNamespace):
    """A parsed command line: an attribute for each option, and what commands do with them."""

    own_module: nn.Module | None = None  # built from the user's code, without typed inputs

    def __init__(self, command: Command, options: Mapping[str, Any]) -> None:
        file = options.get("training_file")
        if file is not None and file.name == ADAPTER_CONFIG:  # it has adapters and no settings of a run
            if options.get("lora"):
                raise SelectionError(f"--lora and --from {file} both describe adapters; leave one out")
            options = {**options, "lora": str(file), "training_file": None}
        if (columns := options.get("columns")) and options["style"] == "torchinfo":
            from bertscope.reports.modules import TORCHINFO_OF_A_RUN

            is_of_a_run = not {name.strip() for name in columns.split(",")}.isdisjoint(TORCHINFO_OF_A_RUN)
            options = {**options, "shapes": options["shapes"] or is_of_a_run}
        super().__init__(**options)
        self.command, self.given, self.project = command, options, project()
        defaults = self.project
        is_used = defaults and command.name in HEADED and not self.architecture and self.add_pooling_layer is None
        self.usual_class = defaults.table.get("architecture", "") if defaults and is_used else ""
        if defaults and self.usual_class:
            defaults.note_used(["architecture"])
        self._refuse_idle()
        if command.settings:
            self.request = _request(command, options, defaults)

    def answer(self) -> None:
        """Show what the public function returns for the options that are its arguments."""
        import bertscope

        function = getattr(bertscope, self.command.name)
        names = [name for name in signature(function).parameters if hasattr(self, name)]
        self.show(function(**{name: getattr(self, name) for name in names}))

    def about(self, subject: Any, wants: Collection[str] | None = None) -> Request:
        """Return the request about a model; with `wants` the answer is a pair: the report and what is wanted."""
        return replace(self.request, subject=subject, wants=wants)

    def found(self, model: str | None = None, **changes: Any) -> ModelSource:
        """Return the source that MODEL, or another name that was typed, means with the model options."""
        options = {name: getattr(self, name) for name in OF_MODEL if hasattr(self, name)} | changes
        source = find(CodeName(self.model if model is None else model), **options)
        is_bert = source.bert_config is not None
        return source.with_options(architecture=self.usual_class) if self.usual_class and is_bert else source

    def source(self, model: str | None = None, **changes: Any) -> ModelSource:
        """Return the same, and print its notes."""
        source = self.found(model, **changes)
        for notice in source.notice.splitlines():
            note(notice)
        return source

    def built(self, model: str | None = None, **changes: Any) -> tuple[ModelSource, nn.Module]:
        """Return the source that MODEL names, and its model on meta."""
        source = self.source(model, **changes)
        if source.bert_config:
            without_meta_kernels()
        else:  # what else a model runs to build itself is not known
            load_meta_kernels()
        from bertscope.tracing.module_tree import freeze  # torch is imported from here on

        built = quantized_for_counting(source, getattr(self, "quantize", STORED))
        freeze(built, getattr(self, "freeze", None) or ())
        if source.has_own_dtypes and not getattr(self, "inputs", None):
            self.own_module = built
        return source, built

    @cached_property
    def _lacks_input(self) -> bool:
        """Return True if inputs cannot be derived from the user's module, so that a next command would need them."""
        from bertscope.tracing.inputs import inputs_for

        with suppress(BertscopeError):
            inputs_for(self.own_module, 1, 8)  # type: ignore[arg-type]
            return False
        return True

    def traced(self, source: ModelSource) -> dict[str, Any] | None:
        """Return a forward pass's shapes on meta, if they are wanted."""
        if not self.shapes:
            return None
        from bertscope.api.requests import length_of
        from bertscope.tracing.flops import source_shapes

        texts = self.inputs or ()
        return source_shapes(source, self.batch, length_of(self.seq, source, batch=self.batch, texts=texts), texts)

    def each(self, result_of: Callable[[str], Result]) -> tuple[Result, ...]:
        """Return the result for each model; with several models an error names the one that it concerns.

        Several models are all found before the work for the first begins.
        """

        def named(function: Callable[[str], Any], model: str) -> Any:
            try:
                return function(model)
            except BertscopeError as error:
                if self.others and model not in str(error):
                    error.at(model)
                raise

        models = (self.model, *(self.others or ()))
        for model in models if self.others else ():
            named(self.found, model)
        return tuple(named(result_of, model) for model in models)

    def _refuse_idle(self) -> None:
        """Raise SelectionError for an option, or several models, without effect next to another option."""
        table = {name: option_row(self.command.name, name) for name in self.given.keys() - set(self.command.settings)}
        for name, row in table.items():
            if self.given[name] in (None, (), [], "", row.default) or not (other := row.unmet(self.given)):
                continue
            value, pair = self.given[other], [_named(key, table) for key in (name, other)]
            if name != "others":
                raise SettingError(no_effect(pair[0], pair[1], value), [name, other])
            shown = f"{pair[1].form} {value}" if pair[1].choices and value is not True else pair[1].form
            number = 1 + len(self.others)
            raise SettingError(f"{shown} takes one MODEL; got {number}; give one, or leave {shown} out", [other])

    def further(self, name: str, changes: Mapping[str, Any]) -> str:
        """Return another command's line with what was typed for this one that it takes too, and with changes."""
        command, line = COMMANDS[name], ["bertscope", name]
        if name == self.command.name and changes.keys() <= {"timeline", "plot"} and all(map(self.given.get, changes)):
            return ""  # it was typed
        if self.own_module is not None and (name in _RUNNING or changes.get("shapes")) and self._lacks_input:
            return ""
        options = self.given.keys() - {"model"} - set(self.command.settings)
        usual = {key for key in options if self.given[key] == option_row(self.command.name, key).default}
        typed = {
            key: value
            for key, value in self.given.items()
            if key not in {*_OUTPUTS, *usual, *_PRICED * (name != self.command.name)}
        }
        typed |= {"input": typed.get("input") or typed.get("inputs")} | dict(changes)
        typed |= {"inputs": typed["input"]}
        if self.command.name == "diff":
            if self.b is None:
                return ""
            typed |= {"model": self.a, "others": [self.b]}
        keys = [parameter.name for parameter in parameters(command)]
        if name == "run":  # all words after the script are the script's own
            last = ("module", "script", "arguments")
            keys = [*(key for key in keys if key not in last), *(key for key in last if key in keys)]
        for key in sorted(keys, key=lambda key: {"file": 0, "model": 1}.get(key, 2)):  # as the command reads them
            value = typed.get(key)
            is_setting = key in command.settings
            row = QUESTIONS[name].table[key] if is_setting else option_row(name, key)
            if value is None or value in ((), [], "") or (not is_setting and key != "model" and value == row.default):
                continue
            line += option_words(row, value, key)
        return shlex.join(line)

    def show(self, report: Any, *, fmt: str = "", view: str = "", lang: str = "", **table_options: Any) -> None:
        """Write the report to stdout or into the file, in the wanted format, or another one.

        `lang` is for a view with several languages.
        """
        fmt = fmt or self.fmt
        if fmt == "json":
            write(report.to_json(), self.output)
            return
        from bertscope.views.views import display

        options: dict[str, Any] = {"lang": lang} if lang else {}
        if fmt in ("table", "text"):
            target = Target() if self.output else stdout_target()
            options |= {"target": replace(target, verbose=getattr(self, "verbose", False)), **table_options}
        write(display(report, fmt, view=view, **options), self.output)

    def show_all(self, *reports: Any, has_notes: bool = True, **options: Any) -> None:
        """Print the first report's notes; write the only report, or several as one comparison."""
        if has_notes:
            print_notes(reports[0])
        from bertscope.reports.page import combined

        self.show(combined(reports), **(options if len(reports) == 1 else {}))


def _named(name: str, table: Mapping[str, Row]) -> Row:
    """Return an option's row with the name in messages: of its option, or of the argument in capitals."""
    if name not in table:  # a setting
        return SETTINGS[name]
    row = table[name]
    shown = row.metavar.strip("[.]") if row.is_argument else (row.option or name).partition("/")[0].replace("-", "_")
    return replace(row, name=shown)


def _request(command: Command, options: Mapping[str, Any], defaults: Project | None) -> Request:
    """Return what options, --from and pyproject.toml ask for; print which project settings are used."""
    question, names = QUESTIONS[command.name], command.settings
    settings = {name: options[name] for name in names if options[name] is not None}
    if options.get("no_calibration"):
        settings["calibration"] = False
    sources = [read_settings(settings, compared=question.compared, is_text=True, records=question.records, permit=True)]
    file = options.get("training_file")
    if file is not None:
        from bertscope.sources.training_files import read_training_file

        file = read_training_file(file)
    if defaults:
        taken = {name: value for name, value in defaults.source.items() if name in names}
        sources += [{key: value for key, value in taken.items() if key in question.compared or len(value.values) == 1}]
    request = Request(question=command.name, sources=tuple(sources), training_file=file, plan=options.get("plan"))
    if defaults and sources[1]:
        values = (request if file is None else request.with_file(file)).values()
        defaults.note_used([name for name, value in sources[1].items() if values.get(name) == value])
    return request


class Project(NamedTuple):
    """The table `[tool.bertscope]` in the nearest pyproject.toml: defaults for the command line only.

    gpu = "t4"                              # any setting, in each command that takes it
    precision = "autocast-bf16"
    architecture = "BertForSequenceClassification"  # a BERT's class, in HEADED commands
    check = ["models.bertscope.yaml"]       # files to check, relative to pyproject.toml
    """

    path: Path
    table: dict[str, Any]
    source: Source  # the settings of a run in it; a command that takes one value refuses several

    def note_used(self, names: Collection[str]) -> None:
        """Print which keys of the table a command uses, with their values."""

        if used := {name: self.table[name] for name in names if name in self.table}:
            text = f"{one_line(str(self.path), limit=200)} sets {one_line(in_words(used))}"
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
    with readable(path), open_file(path, "remove it") as file:
        content = file.read(MAX_BYTES + 1)
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

    def wrong(message: str) -> ConfigError:
        return ConfigError(f"[tool.bertscope]: {message}", where=str(path))

    if not isinstance(table, dict):
        raise wrong("must be a table")
    known = ("architecture", "check")
    if "lang" in table:
        raise wrong("lang is not a setting: reports are in English; remove it, and use 'bertscope explain --lang zh'")
    for key, value in table.items():
        if key not in known and key not in SETTINGS:
            raise wrong(unknown_setting(key, [*known, *SETTINGS]))
        items = value if key == "check" else [value]
        if key in known and (not isinstance(items, list) or not all(isinstance(word, str) and word for word in items)):
            rule = "a list of files" if key == "check" else "a text"
            raise wrong(f"{key} must be {rule}; got {str(value)[:60]!r}")
    if table.get("architecture") not in (None, *ARCHITECTURES):
        raise wrong(f"architecture: {unknown_architecture(table['architecture']).of_file}")
    settings = {key: value for key, value in table.items() if key in SETTINGS}
    where = f"{path}: [tool.bertscope]"
    return Project(path, table, read_settings(settings, compared=_COMPARED, where=where, is_default=True))


# ---- output: as text in the chosen format, to stdout or to a file, whole or not at all ----


def print_notes(report: Any, *, has_file: bool = True) -> None:
    """Print on stderr what a training file's keys do, and what the report could not give."""
    from bertscope.views import footer

    file = getattr(report, "training_file", None)
    if has_file and file is not None:
        for line in footer.training_file_notes(file, report.run.device):
            note(line)
    for item in getattr(report, "notes", ()):
        if item.key != UNCOUNTED:  # which the answer says
            note(footer.note_text(item))


def write(text: str, output: Path | None) -> None:
    """Write the text to stdout, or replace a file atomically."""
    if output is not None:
        write_file(output, text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def check_outputs(paths: Sequence[Path]) -> None:
    """Raise SourceError before the work begins if a file cannot be written, or if two outputs name the same file."""
    try:
        os.getcwd()
    except OSError:
        raise SourceError("the working directory was deleted; change to a folder that exists") from None
    if _STDOUT in paths:
        raise SourceError("- is standard output, which only --output takes; name a file")
    files = [target for path in paths if (target := check_writable(path))]
    for path in files:
        if files.count(path) > 1:
            raise SourceError(f"two outputs name {path.name}; give each a different file")


def note(text: str) -> None:
    """Print a note for the user on stderr."""
    print(message(f"note: {one_line(text, limit=2000)}"), file=sys.stderr)


_LINE_SECONDS = 5.0  # between two lines of progress in a log
_LONG_SECONDS = 15.0  # of work from which a log has details


class Progress:
    """Display of progress on stderr after the first second: a bar in a terminal, a few lines elsewhere.

    `total` is the number of stages; a text names its stage before a colon, if it has one. A stage has one line,
    and two lines are _LINE_SECONDS apart. In long work further lines have details, each after twice the time of the
    last one. With --debug each text is a line.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.started = time.monotonic()
        self.begun: list[str] = []  # the stages, in order
        self.shown = ""
        self.next_seconds = 1.0  # of the next line
        self.next_detail = _LONG_SECONDS
        self.bar: Any = None
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Show the text, or outside a terminal its stage."""
        stage = text.partition(": ")[0]
        seconds = time.monotonic() - self.started
        name, is_timed, _ = stage.partition(", about ")  # how long it takes is not its name
        if [name] != self.begun[-1:]:
            self.begun.append(name)
        if self.is_terminal and seconds >= 1:
            label = one_line(text, limit=60)
            if self.bar is None:
                self.bar = progress_bar()
                self.bar.add_task(label, total=None)
                self.bar.tasks[0].start_time = self.started
                self.bar.start()
            total = max(self.total, len(self.begun)) if self.total else None
            self.bar.update(self.bar.task_ids[0], description=label, completed=len(self.begun) - 1, total=total)
            return
        has_detail, key = seconds >= self.next_detail, text if is_debug() else name + is_timed
        if has_detail or (key != self.shown and (seconds >= self.next_seconds or is_debug())):
            self.shown, self.next_seconds = key, seconds + _LINE_SECONDS
            self.next_detail = 2 * seconds if has_detail else self.next_detail
            position = f"{len(self.begun)} of {max(self.total, len(self.begun))}, " if self.total else ""
            shown = one_line(text if has_detail or is_debug() else stage, limit=100)
            print(f"{shown} ({position}{seconds:.0f} s)", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a note for the user."""
        note(text)

    def expect(self, stages: int) -> None:
        """Add to the number of stages."""
        self.total += stages


def with_progress(function: Callable[..., Result], *args: Any, **keywords: Any) -> Result:
    """Return what a function returns, and show its progress."""
    shown = Progress()
    try:
        with listening(shown):
            return function(*args, **keywords)
    finally:
        if shown.bar is not None:
            shown.bar.stop()
