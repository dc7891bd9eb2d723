"""The pages of the tests: of one model with a fit table, and of two models."""

from __future__ import annotations

import json

import pytest

from bertscope.analyses.page import report as page_analysis
from tests.conftest import run_cli


@pytest.fixture(scope="package", autouse=True)
def _one_length():
    """Ask for one length beside that of the page: the tables grow with it, not the laws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_analysis, "LENGTHS", (64,))
        yield


@pytest.fixture(scope="package")
def two(tmp_path_factory, _one_length):
    path = tmp_path_factory.mktemp("two") / "two.html"
    result = run_cli("report", "bert-tiny", "--compare", "bert-mini", "--no-fit", "--seq", "32", "-o", str(path))
    assert result.code == 0, result.err
    return path


@pytest.fixture(scope="package")
def written(tmp_path_factory, _one_length):
    folder = tmp_path_factory.mktemp("page")
    page_file, data_file = folder / "report.html", folder / "report.json"
    for path, extra in ((page_file, ()), (data_file, ("--format", "json"))):
        result = run_cli("report", "bert-tiny", "--seq", "32", "--budget", "1GiB", "-o", str(path), *extra)
        assert result.code == 0, result.err
    return page_file, json.loads(data_file.read_text())
