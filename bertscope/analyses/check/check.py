"""`check`: comparison of models with the values that their files expect."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bertscope import __version__
from bertscope.analyses.params.count import count
from bertscope.errors import BertscopeError, SourceError, suggestion
from bertscope.reports.check import CheckReport, Finding
from bertscope.reports.params import CountReport
from bertscope.sources.bert import BertSource
from bertscope.sources.expectation_files import files_to_check, load_expected
from bertscope.sources.expectations import TIES_KEY, Expectation
from bertscope.torch_access import torch

MAX_RUN_LAYERS = 768  # over the memory runs of one file: 8 s of CPU time


def check(
    models: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (), *, architecture: str | None = None
) -> CheckReport:
    """Compare every expectation of the files (default: all presets) with the model that each file describes.

    A folder means the `*.bertscope.yaml` in it. `architecture` overrides the class in the files. A file that cannot
    be read, that expects nothing, or whose run fails gives a finding with status "error".
    """
    given = [models] if isinstance(models, (str, os.PathLike)) else models
    names = files_to_check([os.fspath(model) for model in given])
    findings = [finding for name in names for finding in _check_one(name, architecture)]
    return CheckReport(
        findings=tuple(findings), files=len(names), torch_version=str(torch.__version__), bertscope_version=__version__
    )


def _check_one(name: str, architecture: str | None) -> Iterator[Finding]:
    try:
        source = load_expected(name, architecture=architecture)
        if not source.expected:
            remedy = f"'bertscope check --write {source.path}' adds the current counts"
            if source.path is not None and source.path.suffix == ".json":
                remedy = "expected counts belong in a preset file (.yaml); write one with this configuration"
            raise SourceError(f"{source.path} expects nothing: {remedy}")
        runs = [item for item in source.expected if item.key.startswith("memory.")]
        layers = source.config.num_hidden_layers
        if len(runs) * layers > MAX_RUN_LAYERS:
            raise SourceError(
                f"{len(runs)} memory runs of {layers} layers are more than {MAX_RUN_LAYERS:,} layers in all; "
                "put some in another file",
                where=f"{source.path}:{runs[0].line}",
            )
        witness = Witness(source)
        witness.counted  # noqa: B018  # a model that cannot be built is one error, not one for each expectation
    except BertscopeError as error:
        yield _error(error, model=name, path=name)
        return
    for expectation in source.expected:
        yield witness.finding(expectation)


def _error(error: BertscopeError, *, model: str, path: str, line: int = 1, key: str = "") -> Finding:
    """Return the finding for an error, at the file and line that the error names."""
    place, _, number = error.where.rpartition(":")
    if place and number.isdecimal():
        path, line = _shown(Path(place)), int(number)
    return Finding(
        model=model, key=key, expected=None, got=None, path=path, line=line, status="error", message=str(error)
    )


@dataclass
class Witness:
    """The numbers of one model, each computed once, when needed."""

    source: BertSource

    @cached_property
    def counted(self) -> CountReport:
        """Return the parameters by layer."""
        return count(self.source.build())

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the counts under the keys of `expected`; `layers` count one copy of a folded layer."""
        totals = self.counted.totals
        found = {"distinct_params": totals.distinct_params, "layer_params": totals.layer_params}
        found |= {f"groups.{row.name}": row.params for row in count(self.source.build(), by="group").rows}
        for row in self.counted.rows:
            found[f"layers.{row.name}"] = row.each_params
            found |= {f"layers.{row.name}.{part.name}": part.each_params for part in row.parts}
        return found

    @cached_property
    def ties(self) -> dict[str, str]:
        """Return the first path of each tied tensor by its other paths."""
        return {tie.path: tie.is_path for tie in self.counted.ties}

    def got(self, expectation: Expectation) -> int | str | None:
        """Return the value of the model for that key; None if it has no such row or tie."""
        kind, _, name = expectation.key.partition(".")
        if kind == TIES_KEY:
            return self.ties.get(name) if name else len(self.ties)
        run = expectation.run
        if run is None:
            return self.counts.get(expectation.key)
        if kind == "memory":
            from bertscope.analyses.memory.estimate import estimate_memory

            return estimate_memory(self.source, run).peak.peak_bytes
        from bertscope.analyses.flops.sweep import FlopsRun

        variant = FlopsRun(source=self.source, mode=run.mode, checkpointing=run.checkpointing, freeze=run.freeze)
        return variant.at(run.batch, run.seq).rows[0].total.matmul_flops

    def finding(self, expectation: Expectation) -> Finding:
        """Return the result of one expectation."""
        path = _shown(self.source.path)
        try:
            got = self.got(expectation)
        except BertscopeError as error:
            where = f"{path}:{expectation.line}"
            placed = error if error.where else SourceError(f"{expectation.key}: {error.message}", where=where)
            return _error(placed, model=self.source.name, path=path, line=expectation.line, key=expectation.key)
        holds = expectation.accepts(got)
        return Finding(
            model=self.source.name,
            key=expectation.key,
            expected=expectation.value,
            got=got,
            path=path,
            line=expectation.line,
            status="passed" if holds else "failed",
            message="" if holds else self._message(expectation, got),
            tolerance=expectation.tolerance,
        )

    def _message(self, expectation: Expectation, got: int | str | None) -> str:
        key, expected = expectation.key, expectation.value
        if key == TIES_KEY:
            listed = {item.key.partition(".")[2] for item in self.source.expected}
            more = [f"{path} is {is_path}" for path, is_path in self.ties.items() if path not in listed]
            return f"ties: expected {expected}, got {got}" + (f"; not listed: {', '.join(more[:4])}" if more else "")
        if isinstance(expected, str):
            return f"{key}: expected {expected}, got {got or 'nothing: no tensor is tied under that address'}"
        if not isinstance(got, int):
            hint = suggestion(key, self.counts)
            return f"{key}: expected {expected:,}, got nothing: {self.source.architecture} has no such row; {hint}"
        within = f" within {100 * expectation.tolerance:g} %" if expectation.tolerance else ""
        share = f" ({100 * (got - expected) / expected:+.2f} %)" if expectation.tolerance and expected else ""
        return f"{key}: expected {expected:,}{within}, got {got:,}, difference {got - expected:+,}{share}"


def _shown(path: Path | None) -> str:
    """Return a path below the working directory relative to it, as editors and CI expect, and any other as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd())) if path else ""
    except (ValueError, OSError):
        return str(path)


def expected_block(source: BertSource) -> str:
    """Return the counts, and the ties if any, as the `expected:` block of a file."""
    witness = Witness(source)
    lines = ["expected:", *(f"  {key}: {value}" for key, value in witness.counts.items() if "." not in key)]
    for table in ("groups", "layers"):
        rows = {key.partition(".")[2]: value for key, value in witness.counts.items() if key.startswith(f"{table}.")}
        lines += [f"  {table}:", *(f"    {row}: {value}" for row, value in rows.items())]
    if witness.ties:
        lines += ["  ties:", *(f"    {path}: {is_path}" for path, is_path in witness.ties.items())]
    return "\n".join(lines) + "\n"
