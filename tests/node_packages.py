"""Packages of node for tests, installed once into pytest's cache."""

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--silent")


def node_packages(config: pytest.Config, tools: Path, *packages: str) -> Path:
    """Return a folder with the files of `tools` and the packages of its package.json; skip the test without them."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here, so {packages[0]} cannot run")
    folder = config.cache.mkdir(tools.name)
    with (folder / "lock").open("w") as lock:  # two workers would install into one folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_there = all((folder / "node_modules" / name).exists() for name in packages)
        is_same = is_there and (folder / "package.json").read_text() == (tools / "package.json").read_text()
        shutil.copytree(tools, folder, dirs_exist_ok=True)
        if is_same:
            return folder
        done = subprocess.run(INSTALL, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            pytest.skip(f"npm cannot install {packages[0]} here: {(done.stderr or done.stdout)[-300:]}")
    return folder
