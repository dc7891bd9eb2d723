"""`bertscope check`."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertscope.commands.model_options import AllowCode, Architecture, complete_model
from bertscope.commands.output import note, output_option, show, write_file
from bertscope.commands.process import complain
from bertscope.commands.project import WithProjectDefaults
from bertscope.commands.registry import command
from bertscope.errors import SourceError
from bertscope.render import check as renderer
from bertscope.reports.tool import CheckReport
from bertscope.sources.expectation_files import (
    ExpectedModel,
    files_to_check,
    is_expectation_file,
    read_expectation_file,
    with_expected,
)
from bertscope.sources.presets import config_paths, preset_paths, read_preset
from bertscope.text_files import MAX_YAML_BYTES, read_yaml

_SHOWN = 12  # files that a note names
EXAMPLES = """
  bertscope check
  bertscope check models.bertscope.yaml presets/bert-tiny.yaml my-bert.yaml
  bertscope check --presets
  bertscope check --format github .
  bertscope check --format junit --output report.xml models.bertscope.yaml
  bertscope check --write my-bert.yaml
  bertscope check --update models.bertscope.yaml
  bertscope check --allow-code models.bertscope.yaml
exit codes: 0 all pass, 1 one fails, 2 no file, or one that cannot be checked
"""


class WithFilesLikeOptions(WithProjectDefaults):
    """A command that takes file names like options: pre-commit passes those of a repository, which anyone may choose.

    A file named `-oother.bertscope.yaml` would have the report overwrite another one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words with `./` before such names."""
        return super().parse_args(ctx, [f"./{word}" if _is_file_like_option(word) else word for word in args])


def _is_file_like_option(word: str) -> bool:
    return word.startswith("-") and word.lower().endswith((".yaml", ".yml", ".json")) and os.path.lexists(word)


@command(examples=EXAMPLES, cls=WithFilesLikeOptions)
def check(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILES]...",
            help="Expectation files (*.bertscope.yaml), folders with such files, preset files or names; "
            "default: every *.bertscope.yaml in the working directory and below.",
            autocompletion=complete_model,
        ),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="Check the packaged presets.")] = False,
    write_to: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Add the current counts to a file without expectations."),
    ] = None,
    update: Annotated[
        bool,
        typer.Option("--update", help="Show what differs, then write the current values into the files; exit code 0."),
    ] = False,
    allow_code: AllowCode = False,
    architecture: Architecture = None,
    fmt: Annotated[
        Literal["text", "table", "json", "csv", "markdown", "github", "junit"],
        typer.Option(
            "--format",
            "-f",
            help="The format: text and github list failures only, the others list all.",
            rich_help_panel="common",
        ),
    ] = "text",
    output: Annotated[
        Path | None, output_option("--format text, table, json, csv, markdown, github and junit (.xml)")
    ] = None,
) -> int:
    """Verify the expectations in files: counts, ties, FLOPs of a run, estimated peak memory.

    A failure names expected, got, the difference, and the file and line of the expectation.
    """
    if write_to is not None:
        if files or presets or output or update or fmt != "text" or str(write_to).startswith("-"):
            raise SourceError(
                "--write takes one FILE, directly after it, and --allow-code; run 'bertscope check' apart"
            )
        _record(write_to, allow_code)
        return 0
    _refuse_contradictions(files, presets=presets, update=update, architecture=architecture)
    from bertscope.analyses.check import check as analyse
    from bertscope.analyses.check import update as analyse_update

    others = [str(path) for path in config_paths().values() if presets]
    names = [*map(str, preset_paths().values()), *others] if presets else files or ["."]
    if not all(map(os.path.isdir, files_to_check(names))):  # else nothing can be counted
        _collect_after_torch()
    if update:
        report, changes = analyse_update(names, allow_code=allow_code)
    else:
        report, changes = analyse(names, architecture=architecture, allow_code=allow_code), {}
    unknown = [finding for finding in report.having("error") if finding.model in others]
    if unknown:
        report = replace(report, findings=tuple(item for item in report.findings if item not in unknown))
    for finding in unknown:  # the installed transformers does not build it
        note(f"{finding.path} is not checked: {finding.message}")
    if any(map(os.path.isdir, names)):
        _note_searched(report)
    show(report, fmt, output)
    texts = {path: with_expected(path, values) for path, values in changes.items()}  # all of them, or none is written
    for path, values in changes.items():
        write_file(path, texts[path])
        note(f"updated {path}: {', '.join(values)}")
    for finding in report.having("error"):
        complain(renderer.finding_message(finding), 2)
    if report.having("error"):
        return 2
    return 1 if not update and report.having("failed") else 0


def _collect_after_torch() -> None:
    """Import torch, then enable garbage collection except for its objects: runs leave cycles behind."""
    from bertscope.analyses import params  # noqa: F401

    gc.freeze()
    gc.set_threshold(100_000)  # a run has more objects than Python's 700, and few of them are left
    gc.enable()


def _refuse_contradictions(files: list[str] | None, *, presets: bool, update: bool, architecture: str | None) -> None:
    """Raise SourceError for options that exclude each other."""
    if presets and (files or update):
        raise SourceError("--presets checks the packaged presets only; leave FILES and --update out")
    if update and (architecture or not files):
        raise SourceError("--update takes FILES, and builds the classes that they name; leave --architecture out")


def _note_searched(report: CheckReport) -> None:
    """Name the files that were checked, since a search chose them."""
    paths = list(dict.fromkeys(finding.path for finding in report.findings if finding.key))
    if paths:
        more = f" and {len(paths) - _SHOWN:,} more" if len(paths) > _SHOWN else ""
        note(f"checked {', '.join(paths[:_SHOWN]) + more}")


def _record(path: Path, allow_code: bool) -> None:
    """Append the current counts to the file; its content stays as it is."""
    if is_expectation_file(path):
        model = read_expectation_file(path, allow_code=allow_code)
    else:
        preset = read_preset(path)
        model = ExpectedModel(name=preset.name, source=preset, path=path, expected=preset.expected)
    if model.expected:
        raise SourceError(
            f"expects {len(model.expected)} things already; 'bertscope check --update {path}' rewrites their values",
            where=f"{path}:{model.expected[0].line}",
        )
    from bertscope.analyses.check import expected_block

    content = path.read_bytes()
    newline = b"\r\n" if b"\r\n" in content else b"\n"
    content += b"" if content.endswith(b"\n") else newline
    content += expected_block(model).encode().replace(b"\n", newline)
    try:
        read_yaml(content.decode("utf-8-sig"), path)
    except SourceError:
        raise SourceError(
            f"{path} is not in the form of plain 'key: value' lines from the first column without an 'expected' of "
            "its own; rewrite it so, and the counts can be appended"
        ) from None
    if len(content) > MAX_YAML_BYTES:
        raise SourceError(f"{path} has no room for the counts: {MAX_YAML_BYTES >> 10} KiB are the most; shorten it")
    write_file(path, content)
    note(f"added the current counts to {path}")
