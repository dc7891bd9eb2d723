"""The wheel carries the presets and works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from bertscope.sources.presets import preset_paths
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that a user would install, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_preset_and_template_and_no_test(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    presets = {f"bertscope/_presets/{path.name}" for path in (ROOT / "presets").glob("*.yaml")}
    assert presets <= set(names)
    folder = ROOT / "bertscope" / "render" / "page" / "templates"
    assert {str(path.relative_to(ROOT)) for path in folder.iterdir()} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "presets"))]


def test_the_installed_wheel_counts_from_any_folder(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import bertscope, sys; assert bertscope.__file__.startswith(sys.argv[1]), bertscope.__file__;"
        "from bertscope import cli; sys.argv = ['bertscope', 'check']; sys.exit(cli._run())"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(preset_paths())} files: ")
    assert done.stdout.endswith("expectations passed, 0 failed\n")


def test_python_dash_m_works_from_the_checkout(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bertscope", "presets"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "bert-large-zh" in done.stdout
