"""`check`: comparison of models with the values that their files expect; torch is imported for the first model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bertscope import __version__
from bertscope.errors import BertscopeError, Reason, SourceError, suggestion, typed_arguments
from bertscope.memory.simulator import Simulator
from bertscope.reports.modules import CountReport
from bertscope.reports.tool import CheckReport, Finding
from bertscope.sources.bert import TIES_KEY, Expectation
from bertscope.sources.expectation_files import ExpectedModel, files_to_check, load_expected, yaml_name
from bertscope.sources.model_source import as_source_error, built_for_counting
from bertscope.sources.transformers_models import largest_layers
from bertscope.tracing.cache import uncached
from bertscope.units import decimal

# An error that is no BertscopeError: one file must not end the check of the others.
_UNEXPECTED = ("unexpected error", lambda: "; report it, unless the model's own code raised it")
MAX_RUN_LAYERS = 768  # over the runs of one file that cannot repeat one layer for all: 8 s of CPU time


@typed_arguments
def check(
    models: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    *,
    architecture: str | None = None,
    allow_code: bool = False,
    changes: dict[Path, dict[str, Any]] | None = None,
) -> CheckReport:
    """Compare every expectation of the files (default: the working directory) with the model that each file describes.

    A folder means the `*.bertscope.yaml` at and below it. `architecture` overrides the class in the files. `allow_code`
    imports the `module:attribute` that a file names. A file that cannot be read, that expects nothing, or whose run
    fails gives a finding with status "error", and so does a folder without such files.

    `changes` gets for each file without an error the values with which its expectations pass: a key of an expectation
    with its new value, None for a row that the model does not have; under `ties` a mapping of all ties.

    >>> report = bertscope.check("bert-tiny")
    >>> len(report.having("passed")) > 0, report.having("failed")
    (True, ())
    """
    findings: list[Finding] = []
    paths = [models] if isinstance(models, (str, os.PathLike)) else models
    names = files_to_check([os.fspath(path) for path in paths])
    for name in names:
        witness, results = _checked(name, architecture, allow_code)
        if changes is not None and witness is not None:
            if witness.model.path != Path(name) or Path(name).suffix == ".json":
                error = SourceError(f"--update rewrites YAML files, and {name[:100]!r} is none; give the path of one")
                results = [_error(error, model=name, path=name)]
            failed = [finding for finding in results if finding.status == "failed"]
            if failed and not any(finding.status == "error" for finding in results):
                changes[witness.model.path] = witness.changes(failed)
        findings += results
    torch = sys.modules.get("torch")
    torch_version = str(torch.__version__) if torch else version("torch")
    return CheckReport(
        findings=tuple(findings), files=len(names), torch_version=torch_version, bertscope_version=__version__
    )


def _checked(name: str, architecture: str | None, allow_code: bool) -> tuple[Witness | None, list[Finding]]:
    try:
        with as_source_error(*_UNEXPECTED):
            witness = Witness(load_expected(name, architecture=architecture, allow_code=allow_code))
            source, path = witness.model.source, witness.model.path
            runs = [item for item in witness.model.expected if item.run]
            if source.has_equal_layers:  # FLOPs trace one layer for all
                runs = [item for item in runs if item.key.startswith("memory.")]
            layers = source.layers or largest_layers(source.settings)
            if len(runs) * layers > MAX_RUN_LAYERS:
                raise SourceError(
                    f"{len(runs)} runs of {layers} layers are more than {MAX_RUN_LAYERS:,} layers in all; "
                    "put some in another file",
                    where=f"{path}:{runs[0].line}",
                )
            witness.tables  # noqa: B018  # a model that cannot be built is one error, not one for each expectation
    except BertscopeError as error:
        return None, [_error(error if name in str(error) else error.at(f"{name}:1"), model=name, path=name)]
    return witness, [witness.finding(expectation) for expectation in witness.model.expected]


def _error(error: BertscopeError, *, model: str, path: str, line: int = 1, key: str = "") -> Finding:
    file, _, number = error.where.rpartition(":")
    if file and (error_line := decimal(number)) is not None:
        path, line = _shown(Path(file)), error_line
    return Finding(
        model=model,
        key=key,
        expected=None,
        got=None,
        path=path,
        line=line,
        status="error",
        message=Reason(error.marked),
    )


@dataclass
class Witness:
    """One model's numbers, each computed once, when needed."""

    model: ExpectedModel

    @cached_property
    def tables(self) -> list[CountReport]:
        """Return the parameters by layer and by group; an error of the model's code names its line."""
        from bertscope.analyses.params import counts

        try:
            model = built_for_counting(self.model.source, most=2)
        except BertscopeError as error:
            raise error.at(f"{self.model.path}:{self.model.line}") from None
        return counts(model, ("layer", "group"))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the counts under the keys of `expected`; `layers` count one copy of a folded layer.

        A row whose name another row has is under its path.
        """
        layers, groups = self.tables
        totals = layers.totals
        counts = {"distinct_params": totals.distinct_params, "layer_params": totals.layer_params}
        for table, report in (("groups", groups), ("layers", layers)):
            for row in report.rows:
                key = f"{table}.{row.name}"
                key = f"{table}.{row.path}" if key in counts else key
                counts[key] = row.each_params if table == "layers" else row.params
                counts |= {f"{key}.{part.name}": part.each_params for part in row.parts}
        return counts

    @cached_property
    def ties(self) -> dict[str, str]:
        """Return the first path of each tied tensor by its other paths."""
        return {tie.path: tie.is_path for tie in self.tables[0].ties}

    @uncached()
    def got(self, expectation: Expectation) -> int | str | None:
        """Return the model's value for that key; None if it has no such row or tie."""
        kind, _, name = expectation.key.partition(".")
        if kind == TIES_KEY:
            return self.ties.get(name) if name else len(self.ties)
        run = expectation.run
        if run is None:
            return self.counts.get(expectation.key)
        if self.model.source.bert_config is None:
            from bertscope.tracing.inputs import refuse_idle

            refuse_idle([run.input], expectation.sizes, self.model.source)
        if kind == "memory":
            return Simulator(self.model.source).trace(run).peak_bytes
        from bertscope.tracing.flops import FlopsRun

        report = FlopsRun(source=self.model.source, run=run).at(run.batch, run.seq)
        return report.rows[0].total.matmul_flops

    def finding(self, expectation: Expectation) -> Finding:
        """Return one expectation's result."""
        path = _shown(self.model.path)
        try:
            with as_source_error(*_UNEXPECTED):
                got = self.got(expectation)
        except BertscopeError as error:
            where = f"{path}:{expectation.line}"
            placed = error if error.where else SourceError(f"{expectation.key}: {error.of_file}", where=where)
            return _error(placed, model=self.model.name, path=path, line=expectation.line, key=expectation.key)
        status, message = ("passed", "") if expectation.accepts(got) else ("failed", self._message(expectation, got))
        return Finding(
            model=self.model.name, key=expectation.key, expected=expectation.value, got=got, path=path,
            line=expectation.line, status=status, message=message, tolerance=expectation.tolerance,
        )  # fmt: skip

    def changes(self, failed: Iterable[Finding]) -> dict[str, Any]:
        """Return the new values of these expectations; a table that loses a row gets all rows that it does not list."""
        listed = {item.key for item in self.model.expected}
        changes: dict[str, Any] = {}
        for finding in failed:
            table = finding.key.partition(".")[0]
            if table == TIES_KEY:
                changes[TIES_KEY] = self.ties
                continue
            changes[finding.key] = finding.got
            if finding.got is None:
                rows = {key: value for key, value in self.counts.items() if key.startswith(f"{table}.")}
                changes |= {key: value for key, value in rows.items() if key not in listed}
        return changes

    def _message(self, expectation: Expectation, got: int | str | None) -> str:
        key, expected = expectation.key, expectation.value
        if key == TIES_KEY:
            listed = {item.key.partition(".")[2] for item in self.model.expected}
            more = [f"{path} is {is_path}" for path, is_path in self.ties.items() if path not in listed]
            listing = f"; not listed: {', '.join(more[:4])}" if more else ""
            return f"ties: expected {expected}, got {got}{listing}"
        if isinstance(expected, str):
            return f"{key}: expected {expected}, got {got or 'nothing: no tensor is tied under that address'}"
        if not isinstance(got, int):
            kind, hint = self.tables[0].subject.architecture, suggestion(key, self.counts)
            return f"{key}: expected {expected:,}, got nothing: {kind} has no such row; {hint}"
        within = f" within {100 * expectation.tolerance:g} %" if expectation.tolerance else ""
        share = f" ({100 * (got - expected) / expected:+.2f} %)" if expectation.tolerance and expected else ""
        run = expectation.run if key.startswith("memory.") else None
        loop = f" with the {run.loop} loop" if run else ""
        return f"{key}: expected {expected:,}{within}, got {got:,}{loop}, difference {got - expected:+,}{share}"


def _shown(path: Path | None) -> str:
    """Return a path below the working directory relative to it, as editors and CI expect, and any other as it is."""
    try:
        return str(Path(os.path.realpath(path)).relative_to(Path.cwd())) if path else ""
    except (ValueError, OSError):
        return str(path)


def expected_block(model: ExpectedModel) -> str:
    """Return the counts, and the ties if any, as the `expected:` block of a file."""
    witness = Witness(model)
    lines = ["expected:", *(f"  {key}: {value}" for key, value in witness.counts.items() if "." not in key)]
    for table in ("groups", "layers"):
        rows = {key.partition(".")[2]: value for key, value in witness.counts.items() if key.startswith(f"{table}.")}
        lines += [f"  {table}:", *(f"    {yaml_name(row)}: {value}" for row, value in rows.items())]
    if witness.ties:
        shown = (f"    {yaml_name(path)}: {yaml_name(is_path)}" for path, is_path in witness.ties.items())
        lines += ["  ties:", *shown]
    return "\n".join(lines) + "\n"
