"""The wheel carries the presets and works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bertscope.sources.presets import config_paths, preset_paths
from tests.conftest import ROOT
from tests.test_ci_kit import installed  # noqa: F401


def test_the_wheel_holds_every_preset_and_template_and_no_test(installed):  # noqa: F811
    site = Path(installed["PYTHONPATH"])
    names = {str(path.relative_to(site)) for path in site.rglob("*")}
    assert {f"bertscope/_presets/{path.name}" for path in (ROOT / "presets").glob("*.yaml")} <= names
    assert "bertscope/commands/sample_grid.yaml" in names
    folder = ROOT / "bertscope" / "render" / "page" / "templates"
    assert {str(path.relative_to(ROOT)) for path in folder.iterdir()} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "presets"))]


def test_the_installed_wheel_counts_from_any_folder(installed, tmp_path):  # noqa: F811
    code = (
        "import bertscope, sys; assert bertscope.__file__.startswith(sys.argv[1]), bertscope.__file__;"
        "from bertscope import cli; sys.argv = ['bertscope', 'check', '--presets']; sys.exit(cli._run())"
    )
    site = installed["PYTHONPATH"]
    done = subprocess.run([sys.executable, "-c", code, site], cwd=tmp_path, env=os.environ | {"PYTHONPATH": site},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(preset_paths()) + len(config_paths())} files: ")
    assert done.stdout.endswith("expectations passed, 0 failed\n")


def test_python_dash_m_works_from_the_checkout(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bertscope", "presets"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "bert-large-zh" in done.stdout
