"""The pytest plugin: each expectation of a `*.bertscope.yaml` file is a test; also the fixture `assert_params`.

pytest loads this module in every run where bertscope is installed, so it imports neither torch nor yaml
before pytest collects such a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bertscope.errors import BertscopeError, SourceError

if TYPE_CHECKING:
    from bertscope.analyses.check import Witness
    from bertscope.sources.bert import Expectation
    from bertscope.sources.expectation_files import ExpectedModel

_SUFFIXES = (".bertscope.yaml", ".bertscope.yml")  # of expectation_files, which would import yaml


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return the collector of an expectation file, and nothing for other files."""
    is_ours = file_path.name.lower().endswith(_SUFFIXES)
    return ExpectationFile.from_parent(parent, path=file_path) if is_ours else None


class ExpectationFile(pytest.File):
    """One expectation file. A file that cannot be read becomes a failing test, so that the other files still run."""

    model: ExpectedModel

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one test for each expectation."""
        from bertscope.sources.expectation_files import read_expectation_file
        from bertscope.sources.model_source import as_source_error

        is_below = self.path.is_relative_to(Path.cwd())
        try:
            path = self.path.relative_to(Path.cwd()) if is_below else self.path
            # pytest imports the project's code anyway; the first test imports what the file names.
            with as_source_error("unexpected error", lambda: "; report it"):
                self.model = read_expectation_file(path, allow_code=True)
            if not self.model.expected:
                raise SourceError(f"expects nothing; {self.model.how_to_record}", where=f"{path}:1")
        except BertscopeError as error:
            text = str(error if str(path) in str(error) else error.at(f"{path}:1"))
            about = {"name": "readable", "title": self.path.name, "line": 1, "failure": lambda item: text}
            yield ExpectationItem.from_parent(self, **about)
            return
        for expected in self.model.expected:
            title = f"{self.model.name}: {expected.key}"
            failure = partial(self._failure, expected)
            yield ExpectationItem.from_parent(self, name=expected.key, title=title, line=expected.line, failure=failure)

    def _failure(self, expected: Expectation, item: pytest.Item) -> str:
        from bertscope.views.tool import line

        finding = self.witness.finding(expected)
        item.user_properties += [("expected", finding.expected), ("got", finding.got)]
        return "" if finding.status == "passed" else line(finding)

    @cached_property
    def witness(self) -> Witness:
        """Return the file's model; it is built when the first test runs."""
        from bertscope.analyses.check import Witness

        return Witness(self.model)


class Differs(Exception):
    """An expectation's failure; the message is the line that `check` prints."""


class ExpectationItem(pytest.Item):
    """The test of one expectation, or of a file that cannot be read; its failure is one line without a traceback."""

    def __init__(self, *, title: str, line: int, failure: Callable[[pytest.Item], str], **options: Any) -> None:
        super().__init__(**options)
        self.title, self.line, self.failure = title, line, failure

    def runtest(self) -> None:
        """Raise the failure, if there is one."""
        if text := self.failure(self):
            raise Differs(text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the line that `check` prints."""
        return str(excinfo.value) if isinstance(excinfo.value, Differs) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return file, line (from 0) and title."""
        return self.path, self.line - 1, self.title


@pytest.fixture
def assert_params() -> Callable[..., None]:
    """Return `bertscope.testing.assert_params`."""
    from bertscope.testing import assert_params

    return assert_params
