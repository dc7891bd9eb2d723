"""`check`: the expected counts in preset files against the models that they describe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from bertscope import __version__
from bertscope._torch import torch
from bertscope.analyses.count import count
from bertscope.errors import BertscopeError, SourceError, suggestion
from bertscope.model import build
from bertscope.presets import Expectation, Source, preset_paths
from bertscope.reports import CheckReport, Finding
from bertscope.sources import load


def check(
    models: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (), *, architecture: str | None = None
) -> CheckReport:
    """Every expectation of the files (all presets without one) against the model that each file describes.

    `architecture` builds another class than the files name.
    A file that cannot be read, or that expects nothing, gives a finding with status "error".
    """
    given = [models] if isinstance(models, (str, os.PathLike)) else models
    names = [os.fspath(model) for model in given] or list(preset_paths())
    findings = [finding for name in names for finding in _check_one(name, architecture)]
    return CheckReport(
        findings=tuple(findings), files=len(names), torch_version=str(torch.__version__), bertscope_version=__version__
    )


def _check_one(name: str, architecture: str | None) -> Iterator[Finding]:
    try:
        source = load(name, architecture=architecture)
        if not source.expected:
            raise SourceError(f"{source.path} expects nothing: {_remedy(source)}")
        got = counts(source)
    except BertscopeError as error:
        yield Finding(
            model=name, key="", expected=None, got=None, path=name, line=1, status="error", message=str(error)
        )
        return
    for expectation in source.expected:
        yield _compare(source, expectation, got)


def _remedy(source: Source) -> str:
    if source.path is not None and source.path.suffix == ".json":
        return "expected counts stand in a preset file (.yaml); write one with this configuration"
    return f"'bertscope check --write {source.path}' records today's counts"


def counts(source: Source) -> dict[str, int]:
    """Today's counts under the keys that `expected` may hold; `layers` count one copy of a folded layer."""
    model = build(source.config, source.architecture, add_pooling_layer=source.add_pooling_layer)
    by_layer, by_group = count(model), count(model, by="group")
    found = {
        "distinct_params": by_layer.totals.distinct_params,
        "layer_params": by_layer.totals.layer_params,
        **{f"groups.{row.name}": row.params for row in by_group.rows},
    }
    for row in by_layer.rows:
        found[f"layers.{row.name}"] = row.each_params
        found.update({f"layers.{row.name}.{part.name}": part.each_params for part in row.parts})
    return found


def _compare(source: Source, expectation: Expectation, got: dict[str, int]) -> Finding:
    value = got.get(expectation.key)
    message = ""
    if value is None:
        message = (
            f"{expectation.key}: expected {expectation.params:,}, got nothing: {source.architecture} has no such row; "
            f"{suggestion(expectation.key, got)}"
        )
    elif value != expectation.params:
        message = (
            f"{expectation.key}: expected {expectation.params:,}, got {value:,}, "
            f"difference {value - expectation.params:+,}"
        )
    return Finding(
        model=source.name,
        key=expectation.key,
        expected=expectation.params,
        got=value,
        path=_shown(source.path),
        line=expectation.line,
        status="failed" if message else "passed",
        message=message,
    )


def _shown(path: Path | None) -> str:
    """The path from the working directory when it lies below it, as editors and CI want it."""
    try:
        return str(path.resolve().relative_to(Path.cwd())) if path else ""
    except ValueError:
        return str(path)


def expected_block(source: Source) -> str:
    """Today's counts as the `expected:` block of a preset file."""
    found = counts(source)
    lines = ["expected:"]
    lines += [f"  {key}: {value}" for key, value in found.items() if "." not in key]
    for table in ("groups", "layers"):
        lines.append(f"  {table}:")
        lines += [
            f"    {key.partition('.')[2]}: {value}" for key, value in found.items() if key.startswith(table + ".")
        ]
    return "\n".join(lines) + "\n"
