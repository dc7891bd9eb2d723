"""The pages of the tests: of one model with a fit table, and of two models."""

import json

import pytest

from tests.conftest import run_cli


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "two.html"
    result = run_cli("report", "bert-tiny", "--compare", "bert-mini", "--no-fit", "--seq", "32", "-o", str(path))
    assert result.code == 0, result.err
    return path


@pytest.fixture(scope="package")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page_file, data_file = folder / "report.html", folder / "report.json"
    for path, extra in ((page_file, ()), (data_file, ("--format", "json"))):
        result = run_cli("report", "bert-tiny", "--seq", "32", "--budget", "1GiB", "-o", str(path), *extra)
        assert result.code == 0, result.err
    return page_file, json.loads(data_file.read_text())
