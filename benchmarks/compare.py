"""The proof that a change of the code changes no number: the outputs of many commands before and after.

    python -m benchmarks.compare record FOLDER [--jobs N] [--as-written] [--only TEXT]
    python -m benchmarks.compare compare BEFORE AFTER [--show TEXT]
    python -m benchmarks.compare list [--as-written]

`record` runs each command line and Python call of benchmarks/compare_commands.py in a process that is forked from one
with torch loaded, in a fresh folder with the same files, and writes a JSON file for each: exit code, stdout, stderr,
and the files that the command wrote or changed. Output that is JSON is kept as data. A recording depends on nothing
but the code and the versions of torch and transformers: one thread, a made-up calibration, no progress; folders,
versions and measured values are masked. `RENAMED` spells the list for the code after the change; --as-written leaves
it as it is, for the code before:
PYTHONPATH=FOLDER-OF-THAT-CODE python benchmarks/compare.py record BEFORE --as-written

`compare` compares exit codes and every value of the data by its path, such as `out.data.rows.3.peak_bytes`; of other
output the numbers in their order (`out.numbers`), and it counts the texts that have other words. `MOVED` is the table
of old and new paths and values, `EXPECTED` that of intended differences with their reasons. Exit code 1 if anything
else differs. --show prints the recorded differences of each command that contains the text.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import hashlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

# The list is that of this folder, the code and its tests are those of PYTHONPATH if it names another folder.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))
from compare_commands import commands, write_files

# Old and new spelling as regular expressions, applied in turn to a command line or call, such as
# (r"^(estimate .*)--autocast --dtype (\w+)", r"\1--precision autocast-\2").
RENAMED: list[tuple[str, str]] = [
    (r"^print (.*)", r"tree \1 --style torch"),
    (r"^verify bert-tiny my-bert ", "diff bert-tiny my-bert --strip-prefix auto "),  # its weights, not the model
    (r"^verify ", "diff "),
    (r"^convert (bert-\S+)$", r"presets \1 --config"),
    (r"^(?!explain)(.*?) --lang zh", r"\1"),
    (r'^(python: explain\(.*), language="zh"', r"\1"),
]
# The same for the files that commands read, with a pattern of the file's name in front.
RENAMED_IN_FILES: list[tuple[str, str, str]] = []


class Moved(NamedTuple):
    r"""Values with another path or form: patterns of the command and of the whole old path, and the new path.

    `value` takes an old value and the old object that has it, and returns the new value:
    Moved("", r"(.*\.run)\.dtype", r"\1.precision", lambda dtype, run: f"autocast-{run['autocast']}" if ... else dtype)
    """

    command: str
    path: str
    to: str
    value: Callable[[Any, dict[str, Any]], Any] = lambda value, _: value


class Expected(NamedTuple):
    """Intended differences: patterns of the command and of the whole path, old or new, and the reason.

    `kind` is one of changed, new and gone; empty for all.
    """

    command: str
    path: str
    why: str
    kind: str = ""


_STEP = r"(.*\.(?:estimated|measured|memory))"  # a Memory
_ROW = r"(.*\.(?:rows|table|front)\.\d+|.*\.cheaper)"  # a row of fit, plan, lengths, sweep and run --fit
_PHASE = r"(out\.data\.phases\.\d+)"  # of run
_POINT = r"(.*data(?:\.\d+)?(?:\.rows\.\d+)?)"  # of a sweep, in its file or its report
MOVED: list[Moved] = [
    Moved("", _STEP + r"\.kept_bytes", r"\1.cost.saved_bytes"),
    Moved("", _STEP + r"\.kept\.(\d+)\.kept_bytes", r"\1.saved.\2.total_bytes"),
    Moved("", _STEP + r"\.kept(\..*)?", r"\1.saved\2"),
    Moved("^plan", r"(.*\.lists\.\d+)\.kept(.*)\.kept_bytes", r"\1.saved\2.output_bytes"),
    Moved("^plan", r"(.*\.lists\.\d+)\.again(.*)\.kept_bytes", r"\1.recomputed_operators\2.output_bytes"),
    Moved("^plan", r"(.*\.lists\.\d+)\.kept(.*)\.again", r"\1.saved\2.recomputed"),
    Moved("^plan", r"(.*\.lists\.\d+)\.again(.*)\.again", r"\1.recomputed_operators\2.recomputed"),
    Moved("^plan", r"(.*\.lists\.\d+)\.kept(.*)", r"\1.saved\2"),
    Moved("^plan", r"(.*\.lists\.\d+)\.again(.*)", r"\1.recomputed_operators\2"),
    Moved("^plan", r"(.*)\.moved_bytes_again", r"\1.recompute_moved_bytes"),
    Moved("", r"(.*\.checkpointing)", r"\1", lambda text, _: str(text).replace("keep:", "save:")),
    Moved("", r"(.*\.|)card(\..*)?", r"\1gpu\2"),
    Moved("", r"(.*)\.card_threads", r"\1.gpu_threads"),
    Moved("", _STEP + r"\.other_loop_bytes", r"\1.cost.other_loop_bytes"),
    Moved("", r"(.*\.points\.\d+)\.peak_bytes", r"\1.own_bytes"),
    Moved("^run", r"(out\.data\.evaluation)\.peak_bytes", r"\1.highest_bytes"),
    Moved("", r"(.*)\.device\.allocated_bytes", r"\1.cost.max_allocated_bytes"),
    Moved("", r"(.*)\.device\.(workspace_bytes|reserved_loaded_bytes)", r"\1.cost.\2"),
    Moved("", r"(.*)\.device\.reserved_bytes", r"\1.cost.reserved.low_bytes"),
    Moved("", r"(.*)\.device\.card_bytes", r"\1.cost.gpu_bytes"),
    Moved("", r"(.*)\.device\.(context|allocated)_(low|high)_bytes", r"\1.cost.\2.\3_bytes"),
    Moved("", r"(.*\.variants\.\d+)\.answer", r"\1.estimated.cost.verdict"),
    Moved("", r"(.*\.variants\.\d+)\.(predicted|time_range|epoch)(.*)", r"\1.estimated.\2\3"),
    Moved("", _ROW + r"\.(predicted|time_range|epoch)(.*)", r"\1.cost.\2\3"),
    Moved("", r"(.*\.estimated)\.(predicted|time_range|epoch)(.*)", r"\1.cost.\2\3"),
    Moved("", r"(.*\.cost)\.predicted\.seconds", r"\1.time.step.low_seconds"),
    Moved("", r"(.*\.cost)\.predicted\.(.*)", r"\1.time.\2"),
    Moved("", r"(.*\.cost)\.time_range\.(.*)", r"\1.time.step.\2"),
    Moved("", r"(.*\.cost)\.epoch\.(.*)", r"\1.time.epoch.\2"),
    Moved("^(?!sweep)", _ROW + r"\.(?:peak|worst)_bytes", r"\1.cost.peak.peak_bytes"),
    Moved("^(?!sweep)", _ROW + r"\.reserved_bytes", r"\1.cost.reserved.low_bytes"),
    Moved("^(?!sweep)", _ROW + r"\.card_bytes", r"\1.cost.gpu_bytes"),
    Moved("^(?!sweep)", _ROW + r"\.answer", r"\1.cost.verdict"),
    Moved("", _ROW + r"\.step_flops", r"\1.cost.step_flops"),
    Moved("", _ROW + r"\.flops_again", r"\1.cost.recompute_flops"),
    Moved("", _ROW + r"\.share_again", r"\1.recompute_share"),
    Moved("", _ROW + r"\.other_loop_bytes", r"\1.cost.other_loop_bytes", lambda more, row: more + row["peak_bytes"]),
    Moved(
        "",
        r"(out\.data|.*\.fit|.*\.asked|.*\.reports\.\d+)\.context_(low|high)_bytes",
        r"\1.rows.0.cost.context.\2_bytes",
    ),
    Moved("", r"(out\.data|.*\.fit|.*\.asked|.*\.reports\.\d+)\.margin", r"\1.rows.0.cost.margin"),
    Moved("^run", _PHASE + r"\.reserved_bytes", r"\1.cost.reserved.low_bytes"),
    Moved("^run", _PHASE + r"\.(peak_bytes|phase|path|operator|parts.*)", r"\1.cost.peak.\2"),
    Moved("sweep", _POINT + r"\.(peak_bytes|parts\..*)", r"\1.cost.peak.\2"),
    Moved("sweep", _POINT + r"\.saved_bytes", r"\1.cost.saved_bytes"),
    Moved("sweep", _POINT + r"\.reserved_bytes", r"\1.cost.reserved.low_bytes"),
    Moved(
        "sweep",
        _POINT + r"\.card_bytes",
        r"\1.cost.gpu_bytes",
        lambda size, row: row["peak_bytes"] if size is None else size,
    ),
    Moved("sweep", _POINT + r"\.flops", r"\1.cost.step_flops"),
    Moved("sweep", _POINT + r"\.fits", r"\1.cost.verdict", lambda fits, _: fits or ""),
]
# The names of settings that left, and of those of ranks.
_LEFT, _OF_RANKS = "amsgrad|implementation|max_split_size_mb", "reduce_dtype|bucket_cap_mb|gradient_as_bucket_view"
_TIMES = "measured"
_COST = "every row on a step has one StepCost"
EXPECTED: list[Expected] = [
    Expected(r"--(amsgrad|max-split-size-mb|reduce-dtype|bucket-cap-mb|gradient-as-bucket-view)|"
             r"^(estimate|fit|flops) .*--implementation", r".*", "the option left: exit code 2"),
    Expected("", rf".*\brun\.({_LEFT}|parallelism\.({_OF_RANKS}))", "the setting left"),
    Expected("sweep", rf".*\.point\.({_LEFT}|{_OF_RANKS})", "the setting left"),
    Expected("schema", rf".*\$defs\.(RunConfig|Parallelism)\.(required\.\d+|properties\.({_LEFT}|{_OF_RANKS})\..*)",
             "the setting left"),
    Expected("", r".*\.schema|.*\.properties\.schema\.const|.*\.\$id", "schema 5"),
    Expected("", r".*\.cost\..*|.*\.cost", _COST, "new"),
    Expected("", r".*\.(predicted|time_range|epoch|fits|extra_flops|overhead_bytes|device|recompute_flops|answer|parts"
             r"|(peak|card|reserved|saved)_bytes|flops)", _COST, "gone"),
    Expected("--attention eager", r".*\.cost\.(reserved\.low_bytes|gpu_bytes)", "estimate says the bytes of fit"),
    Expected("^fit .*--gpu t4,a10 ", r"out\.numbers", "the table of several GPUs has the columns of fit"),
    Expected("fit", r".*\.cost\.reserved\.low_bytes", "a CPU has no caching allocator", "gone"),
    Expected("^sweep ", r".*\.cost\..*", _COST, "gone"),  # of a point without numbers
    Expected("^sweep cards", r".*\.cost\.gpu_bytes", "a context that is given is the one of the answer, as in fit"),
    Expected("^sweep .*markdown", r"out\.numbers", _COST),
    Expected("^schema", r".*", _COST),
    Expected("csv", r"out\.numbers", _COST),
    Expected("--calibration|^schema (calibration|config|comparison|fit|flops|memory|report|plan|sweep|tree|why)$",
             r".*", "a calibration is what profile --save writes; a card has no measured workspaces"),
    Expected("", r".*\bcard\.workspace_(forward|backward)_bytes|.*\$defs\.Gpu\..*",
             "a card has no measured workspaces"),
    Expected("own.py:conv|vit", r".*(estimated|notes|rows|\.phases|timeline)\b.*",
             "scratch of convolutions is not counted"),
    Expected("--gpu h200 --time", r".*", "the made-up calibration has no workspaces"),
    Expected("^convert (config|my-bert|.*--lossless)|^python: convert", r".*", "the config.json of a preset only"),
    Expected("^python: load", r".*\.(implementation|uses_transformers_masks)", "the setting left"),
    Expected("sweep", r".*\.key", "the key is a hash of all settings"),
    Expected("sweep .*csv", r"out\.numbers", "the key is a hash of all settings"),
    Expected("", r".*\.(step_seconds\.\d+|median_seconds|warmup_seconds|(tokens|flops)_per_second)", _TIMES),
    Expected("", r".*\.(resident_before|high_water|process_high_water|run_high_water)_bytes", _TIMES),
]  # fmt: skip

SECONDS = 120  # of a command
LISTED = 80  # paths
MASKED = {"measured", "machine", "torch_version", "bertscope_version", "versions"}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "COLUMNS": "120", "NO_COLOR": "1", "LC_ALL": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
_UNSTABLE = re.compile(r".*(\d s\)|\d 秒）)|USDT:.*")  # noqa: RUF001 progress; lines of torch's profiler
_LIBRARY = re.compile(r"(<(script|style)\b[^>]*>)(?!\s*[\[{]).{20000,}?</\2>", re.DOTALL)  # those of a page


# ---- record ----


def record(folder: Path, *, jobs: int, as_written: bool, only: str) -> None:
    """Run each command and write a file for each into the folder."""
    folder.mkdir(parents=True)
    left = [command for command in commands() if only in command]
    seconds: Counter[str] = Counter()
    place = Path(tempfile.mkdtemp(prefix="compare-"))  # a TemporaryDirectory would end with the first child
    files = place / "files"
    files.mkdir()
    load(files, [] if as_written else RENAMED_IN_FILES)
    running: dict[int, tuple[str, Path]] = {}
    while left or running:
        if left and len(running) < jobs:
            command, own = left.pop(0), Path(tempfile.mkdtemp(dir=place))
            shutil.copytree(files, own / "work")
            running[start(command if as_written else spelled(command), own)] = command, own
            continue
        pid, status, usage = os.wait4(-1, 0)
        command, own = running.pop(pid)
        seconds[command] = usage.ru_utime + usage.ru_stime
        found = {"command": command, "code": os.waitstatus_to_exitcode(status), **outputs(files, own)}
        name = f"{re.sub(r'[^A-Za-z0-9]+', '-', command)[:80]}-{hashlib.sha256(command.encode()).hexdigest()[:6]}"
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(own)
    shutil.rmtree(place)
    print(f"{len(seconds)} commands, {sum(seconds.values()):.0f} CPU s; the slowest:")
    for command, spent in seconds.most_common(5):
        print(f"{spent:7.1f} s  {command}")


def spelled(command: str) -> str:
    """Return the command as the code after the change takes it."""
    for old, new in RENAMED:
        command = re.sub(old, new, command)
    return command


def load(files: Path, renamed: list[tuple[str, str, str]]) -> None:
    """Write the files; import the package, and what a child imports that estimates one of their models.

    Only the child runs operators: they may start threads, which a process that forks must not have.
    """
    import torch

    import bertscope

    for module in pkgutil.walk_packages(bertscope.__path__, "bertscope."):
        with suppress(ImportError):  # of an extra that is not installed
            import_module(module.name)
    torch.set_num_threads(1)
    imported = files.parent / "modules"
    if not os.fork():
        write_files(files)
        for name, old, new in renamed:
            for path in files.rglob("*.*"):
                if re.search(name, str(path)):
                    path.write_text(re.sub(old, new, path.read_text()))
        bertscope.estimate(str(files / "roberta"), batch=1, seq=8)
        imported.write_text("\n".join(sys.modules))
        os._exit(0)
    os.wait()
    for name in imported.read_text().split():
        with suppress(Exception):  # some modules only others can import
            import_module(name)
    gc.collect()
    gc.freeze()


def start(command: str, own: Path) -> int:
    """Return the process id of a child that runs the command in the folder `own/work`."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(SECONDS)
        os.environ["HOME"], os.environ["XDG_DATA_HOME"] = str(own), str(own / "work" / "data")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(own / stream, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(own / "work" / ("project" if command.startswith("@project ") else "."))
        sys.path.insert(0, os.getcwd())
        if command.startswith("python: "):
            print_result(command.removeprefix("python: "))
        else:
            sys.argv = ["bertscope", *shlex.split(command.removeprefix("@project "))]
            (program,) = entry_points(group="console_scripts", name="bertscope")
            program.load()()
        sys.stdout.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def print_result(call: str) -> None:
    """Print the result of a call of a public function as JSON."""
    import torch

    import bertscope

    names = {name: getattr(bertscope, name) for name in bertscope.__all__} | {"torch": torch}
    result = eval(call, names)  # noqa: S307 a call of the list
    plain = not hasattr(result, "kind")
    print(json.dumps(result, default=lambda x: getattr(x, "__dict__", str(x))) if plain else bertscope.to_json(result))


def outputs(files: Path, own: Path) -> dict[str, Any]:
    """Return what a command wrote: both streams, and files that are new or have another content."""
    work = own / "work"
    paths = [path for path in sorted(work.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    earlier = {path: files / path.relative_to(work) for path in paths}
    written = [path for path in paths if not earlier[path].exists() or earlier[path].read_bytes() != path.read_bytes()]
    return {"out": content(own / "out", own), "err": content(own / "err", own)} | {
        "files": {str(path.relative_to(work)): content(path, own) for path in written}
    }


def content(path: Path, own: Path) -> Any:
    """Return JSON and lines of JSON as data, other text as its lines, and other bytes as their hash; masked."""
    import torch

    import bertscope

    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return [f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"]
    for found, shown in (
        (str(own / "work"), "FOLDER"), (str(own), "HOME"), (str(Path(bertscope.__path__[0]).parent), "REPOSITORY"),
        (torch.__version__, "TORCH"), (f"bertscope {bertscope.__version__}", "bertscope VERSION"),
    ):  # fmt: skip
        text = text.replace(found, shown)
    rows = [line for line in _LIBRARY.sub(r"\1</\2>", text).splitlines() if not _UNSTABLE.fullmatch(line)]
    if rows and all(row.startswith("{") and row.endswith("}") for row in rows):
        return {"data": [masked(json.loads(row)) for row in rows]}
    with suppress(ValueError):
        return {"data": masked(json.loads(text))}
    return rows


def masked(node: Any) -> Any:
    """Return data without the values that another run or version changes."""
    if isinstance(node, dict):
        return {key: "masked" if key in MASKED else masked(value) for key, value in node.items()}
    return [masked(value) for value in node] if isinstance(node, list) else node


# ---- compare ----


def flat(node: Any, path: str = "", above: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and the value of each leaf with the object that has it; of a text, its numbers and its words."""
    if isinstance(node, list) and "data" not in path.split("."):
        text = "\n".join(node)
        yield f"{path}.numbers", [number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)], above
        yield f"{path}.words", re.sub(r"[\d,.]+", "0", text), above
    elif node and isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from flat(value, f"{path}.{key}".lstrip("."), node if isinstance(node, dict) else above)
    else:
        yield path, node, above


def moved(recording: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an old recording by their new paths and in their new form."""
    rows = [row for row in MOVED if re.search(row.command, recording["command"])]
    values = {}
    for path, value, above in flat(recording):
        for row in rows:
            if match := re.fullmatch(row.path, path):
                path, value = match.expand(row.to), row.value(value, above)
        values[path] = value
    return values


def compare(before: Path, after: Path, show: str | None) -> int:
    """Print the differences of two recordings by path; return 1 if some are not in EXPECTED."""
    folders = [folder.glob("*.json") for folder in (before, after)]
    old, new = ({path.name: json.loads(path.read_text()) for path in paths} for paths in folders)
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for name in sorted(old.keys() ^ new.keys()):
        command = (old | new)[name]["command"]
        if any(re.search(row.command, command) and re.fullmatch(row.path, "") for row in EXPECTED if row.command):
            continue
        groups[f"only in {before if name in old else after}"].append((command, ""))
    for name in sorted(old.keys() & new.keys()):
        command, one = old[name]["command"], moved(old[name])
        other = {path: value for path, value, _ in flat(new[name])}
        if show is not None and show in command:
            texts = [json.dumps(side[name], indent=1, ensure_ascii=False).splitlines() for side in (old, new)]
            print(f"==== {command}", *difflib.unified_diff(*texts, lineterm="", n=2), sep="\n")
        counts["values"] += len(one)
        for path in dict.fromkeys((*one, *other)):
            a, b = one.get(path, "nothing"), other.get(path, "nothing")
            if repr(a) == repr(b):  # True is not 1
                continue
            kind = "changed" if path in one and path in other else "gone" if path in one else "new"
            rows = (row for row in EXPECTED if re.search(row.command, command) and row.kind in ("", kind))
            why = next((row.why for row in rows if re.fullmatch(row.path, path)), None)
            if why is not None:
                counts[f"differences as expected: {why}"] += 1
            elif path.endswith(".words"):
                counts["texts with other words"] += 1
            else:
                group = kind + "  " + re.sub(r"\.\d+\b", ".*", path)
                groups[group].append((command, difference(a, b)))
    for group, found in sorted(groups.items(), key=lambda item: -len(item[1]))[:LISTED]:
        concerned = {command for command, _ in found}
        print(f"{group}: {len(found)} in {len(concerned)} commands; {found[0][1]}\n    {found[0][0]}")
    for what, count in counts.items():
        print(f"{count:,} {what}")
    differing = {command for found in groups.values() for command, _ in found}
    print(f"{len(old)} and {len(new)} commands: {sum(map(len, groups.values())):,} differences in {len(differing)}")
    return 1 if groups else 0


def difference(a: Any, b: Any) -> str:
    """Return an old and a new value; of numbers of a text, the first that differ."""
    if isinstance(a, list) and isinstance(b, list):
        place = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        a, b = (f"[{place} of {len(item)}] {' '.join(item[place : place + 3])}" for item in (a, b))
    return f"{str(a)[:100]} -> {str(b)[:100]}"


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare", "list"))
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes of record")
    parser.add_argument("--as-written", action="store_true", help="do not spell the list by RENAMED")
    parser.add_argument("--only", default="", help="only the commands that contain this text")
    parser.add_argument("--show", help="print the differences of the commands that contain this text")
    given = parser.parse_args()
    if len(given.folders) != {"record": 1, "compare": 2, "list": 0}[given.action]:
        parser.error("record takes one folder, compare two, list none")
    if given.action == "list":
        print(*(command if given.as_written else spelled(command) for command in commands()), sep="\n")
        return 0
    if given.action == "compare":
        return compare(*given.folders, given.show)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    if os.environ.keys() - {"LC_CTYPE"} != (kept | ENVIRONMENT).keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], kept | ENVIRONMENT)  # noqa: S606
    record(given.folders[0], jobs=given.jobs, as_written=given.as_written, only=given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
