"""The pytest plugin: every expectation of a `*.bertscope.yaml` is a test; and the fixture `assert_params`.

pytest loads it in every run of an environment that has bertscope, so it imports neither torch nor yaml
before such a file is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bertscope.errors import BertscopeError

if TYPE_CHECKING:
    from bertscope.analyses.check.check import Witness
    from bertscope.reports.check import Finding
    from bertscope.sources.bert import BertSource
    from bertscope.sources.expectations import Expectation

_SUFFIXES = (".bertscope.yaml", ".bertscope.yml")  # of expectation_files, which would import yaml


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """An expectation file is a module of tests."""
    return ExpectationFile.from_parent(parent, path=file_path) if file_path.name.endswith(_SUFFIXES) else None


class ExpectationFile(pytest.File):
    """One expectation file. A file that cannot be read is a failing test, lest it stop the others."""

    def collect(self) -> Iterator[pytest.Item]:
        """A test for each expectation."""
        from bertscope.errors import SourceError
        from bertscope.sources.expectation_files import read_expectation_file

        try:
            source = read_expectation_file(_shown(self.path))
            if not source.expected:
                raise SourceError(f"expects nothing; 'bertscope check --write {source.path}' records today's counts",
                                  where=f"{source.path}:1")  # fmt: skip
        except BertscopeError as error:
            yield Unreadable.from_parent(self, name="readable", error=error)
            return
        model = _Model(source)
        for expectation in source.expected:
            yield ExpectationItem.from_parent(self, name=expectation.key, model=model, expectation=expectation)


class _Model:
    """The model of one file, built when its first test runs."""

    def __init__(self, source: BertSource) -> None:
        self.source = source
        self._witness: Witness | None = None

    def finding(self, expectation: Expectation) -> Finding:
        """What became of the expectation."""
        if self._witness is None:
            from bertscope.analyses.check.check import Witness

            self._witness = Witness(self.source)
        return self._witness.finding(expectation)


class Differs(Exception):
    """An expectation that does not hold; the message is the line that `check` prints."""


class ExpectationItem(pytest.Item):
    """The test of one expectation."""

    def __init__(self, *, model: _Model, expectation: Expectation, **options: Any) -> None:
        super().__init__(**options)
        self.model, self.expectation = model, expectation

    def runtest(self) -> None:
        """Build the model once and compare."""
        from bertscope.render.check import line

        finding = self.model.finding(self.expectation)
        self.user_properties += [("expected", finding.expected), ("got", finding.got)]
        if finding.status != "passed":
            raise Differs(line(finding))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The line that `check` prints, and no traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, Differs) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """File, line (from 0) and title."""
        return self.path, self.expectation.line - 1, f"{self.model.source.name}: {self.name}"


class Unreadable(pytest.Item):
    """The failing test of a file that cannot be read."""

    def __init__(self, *, error: BertscopeError, **options: Any) -> None:
        super().__init__(**options)
        self.error = error

    def runtest(self) -> None:
        """Fail with what is wrong in the file."""
        raise Differs(str(self.error))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The error as one line."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The beginning of the file."""
        return self.path, 0, self.path.name


def _shown(path: Path) -> Path:
    """The path from the working directory when it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@pytest.fixture
def assert_params() -> Callable[..., None]:
    """`bertscope.testing.assert_params`: fail unless a module has so many parameters."""
    from bertscope.testing import assert_params

    return assert_params
