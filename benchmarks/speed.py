"""The time and the memory of bertscope's commands and of other tools for the same work, next to `import torch`.

    python -m benchmarks.speed [--here] [--runs N] [--only PART ...] [--files N] [--format text|markdown|json]
    python -m benchmarks.speed --read speed.json --format markdown

The first run makes a separate environment, build/peers, with the versions of `PINNED` in benchmarks/peers.py; with
--here the script uses the present one, and leaves out the tools that it does not have. Each row is a whole process:
the work, from the start of Python to its end. A run does all work once; before each part it starts a process that only
imports torch, and the ratios of the part are those to that process. The order within a part alternates from run to
run. A value is the median of the runs, with the lowest and the highest; work of more than 10 s runs once. The time
of a file or a point is that of N more of them next to the same work with N. Growth, except with layers, is measured
last; Ctrl-C shows what has been measured until then. The CPU time is that of all processes that the work has started;
the memory is the peak of the largest of them.

The part `step` is not run unless it is named: the time of a forward pass and of a training step of the built-in BERT
relative to transformers' BERT with the same weights and inputs, in turns within one process; the median of the pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import PACKAGES, ROOT, installed, run_in_own_environment, version

PAUSE_SECONDS = 0.01  # between two looks at the processes of a work
LIMIT_SECONDS = 1800
ONCE_SECONDS = 10  # work of more CPU time is not repeated
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
IMPORT_TORCH = [sys.executable, "-c", "import torch"]
CACHED = "cached"  # the part whose works read the cache that an earlier run of the same work has written
MODEL = "bert-large-uncased"  # BertForMaskedLM, as the peers' model
FAMILY = "roberta-24"  # a model of another family, from transformers
SIZES = {"layers": 24, "width": 1024, "batch": 8, "length": 128}  # what growth starts from
GROWTH = {
    "layers": (12, 24, 48, 96, 192, 10_000), "width": (512, 1024, 2048), "batch": (1, 32, 1024),
    "length": (128, 512, 2048), "files": (10, 100, 1000),
}  # fmt: skip
# Ways of a step whose layers differ from each other, or whose optimizer step is that of one rank.
WAYS = ("--checkpointing layers:0-5", "--clip-grad-norm", "--world-size 8 --strategy zero1",
        "--world-size 8 --strategy fsdp")  # fmt: skip
WAY_LAYERS = (12, 192)
POINTS = 1000  # of the sweep whose double runs too
# The settings of a grid besides its batches, and their combinations.
GRIDS = {
    "points": (4, "seq: [128, 512]\ncheckpointing: [none, full]"),
    "kinds": (42, "seq: [64, 128, 192, 256, 320, 384, 512]\ncheckpointing: [none, selective, full]\n"
                  "precision: [fp32, autocast-bf16]"),
}  # fmt: skip
MOST_OF_PEERS = 2048  # of each size
# The targets of this project: CPU seconds beyond `import torch`, for BERT-large; of `check` and `sweep` for one more.
TARGETS = {
    "count": -0.35, "tree": -0.35, "tree --style torch": -0.35, "flops": 0.5, "estimate": 1.0,
    "estimate --checkpointing": 1.4, "fit": 6.0, "report": 6.0, "check": 0.008, "sweep": 0.014,
    "reentrant": 2.0, "profile": 9.0,
}  # fmt: skip


# ---------------------------------------------------------------- the work


@dataclass(frozen=True)
class Work:
    """A process to measure: the part of the benchmark, the tool, what it is asked, and the target's name."""

    part: str
    tool: str
    asked: str
    command: list[str]
    target: str = ""
    number: int = 0  # of files or points; with their double it runs too, and the difference is divided by them
    doubled: tuple[str, ...] = ()  # the command with twice as many
    at: int = 0  # the size, for growth


# The same BERT from transformers for every peer, with eager attention: for sdpa, and with a pad token, transformers
# reads values of the mask or the ids, which a tensor on meta does not have.
PEER_MODEL = """
import torch, transformers
from torch._subclasses.fake_tensor import FakeTensorMode
def bert(device="meta", vocabulary=30522):
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(width // 64, 2), pad_token_id=None,
        intermediate_size=4 * width, max_position_embeddings=max(length, 512), vocab_size=vocabulary,
        attn_implementation="eager")
    with torch.device(device):
        return transformers.BertForMaskedLM(config)
def ids(device="meta"):
    return torch.ones(batch, length, dtype=torch.long, device=device)
"""
MEM_TRACKER = """
from torch.distributed._tools.mem_tracker import MemTracker
def peak(checkpointing=None):
    with FakeTensorMode():
        model = bert("cpu").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        optimizer, tokens = torch.optim.AdamW(model.parameters()), ids("cpu")
        def step():
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        step()  # creates the optimizer's state; MemTracker tracks only one step
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step()
    print(tracker.get_tracker_snapshot("peak"))
"""
PROFILER = """
from torch.profiler import profile
def measure(checkpointing):
    model = bert("cpu").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, tokens = torch.optim.AdamW(model.parameters()), ids("cpu")
    def step():
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(4):
        step()
    with profile(profile_memory=True, record_shapes=True, with_stack=True) as found:
        step()
    found.export_memory_timeline("timeline.json", device="cpu")
measure(False), measure(True)
"""
PEERS = {
    "torchinfo": "import torchinfo\nprint(torchinfo.summary(bert(), depth=9, verbose=0))",
    "torchinfo, on the CPU": "import torchinfo\nprint(torchinfo.summary(bert('cpu'), depth=9, verbose=0))",
    "torchinfo, forward": "import torchinfo\n"
    "print(torchinfo.summary(bert(), input_data=ids(), device='meta', depth=9, verbose=0))",
    "torchinfo, files": "import torchinfo\n"
    "for n in range(files): print(torchinfo.summary(bert(vocabulary=30522 + n), verbose=0).total_params)",
    "fvcore": "from fvcore.nn import parameter_count_table\nprint(parameter_count_table(bert(), max_depth=9))",
    "fvcore, forward": "from fvcore.nn import FlopCountAnalysis\n"
    "print(FlopCountAnalysis(bert(), (ids(),)).unsupported_ops_warnings(False).by_module())",
    "fvcore, files": "from fvcore.nn import parameter_count\n"
    "for n in range(files): print(parameter_count(bert(vocabulary=30522 + n))[''])",
    "calflops": "from calflops import calculate_flops\n"
    "print(calculate_flops(model=bert(), kwargs={'input_ids': ids()}, print_results=False))",
    "accelerate": "from accelerate.utils import calculate_maximum_sizes\nprint(calculate_maximum_sizes(bert())[0])",
    "accelerate, training": "from accelerate.commands.estimate import estimate_training_usage\n"
    "from accelerate.utils import calculate_maximum_sizes\n"
    "print(estimate_training_usage(calculate_maximum_sizes(bert())[0], 'float32'))",
    "FlopCounterMode": "from torch.utils.flop_counter import FlopCounterMode\n"
    "with FlopCounterMode(depth=9): bert()(ids())",
    "transformers": "print(bert())",
    "MemTracker": MEM_TRACKER + "peak()",
    "MemTracker, both": MEM_TRACKER + "peak(), peak('full')",
    "MemTracker, reentrant": MEM_TRACKER + "peak('reentrant')",
    "torch.profiler": PROFILER,
}
PACKAGE_OF = {"FlopCounterMode": "torch", "MemTracker": "torch", "torch.profiler": "torch"}


def peer(part: str, name: str, asked: str, at: int = 0, **sizes: int) -> Work:
    """Return the work of another tool, with the sizes of BERT-large where none are given."""
    given = SIZES | {"files": 1} | sizes
    code = "".join(f"{size} = {value}\n" for size, value in given.items()) + PEER_MODEL + PEERS[name]
    command, files = [sys.executable, "-c", code], sizes.get("files", 0)
    if not files or at:
        return Work(part, name.partition(",")[0], asked, command, at=at)
    doubled = peer(part, name, asked, 1, **sizes | {"files": 2 * files}).command
    return Work(part, name.partition(",")[0], asked, command, "", files, tuple(doubled))


def own(part: str, words: str, target: str = "", number: int = 0, at: int = 0, asked: str = "") -> Work:
    """Return the work of a command of bertscope; of so many files or points, as its last word says."""
    command = [sys.executable, "-m", "bertscope", *words.split()]
    doubled = (*command[:-1], command[-1].replace(str(number), str(2 * number))) if number else ()
    return Work(part, "bertscope", asked or f"`{words}`", command, target, number, doubled, at)


def again(words: str) -> Work:
    """Return a command of bertscope that reads what its first run has kept."""
    second = own(CACHED, words, asked=f"`{words}`, the second time")
    return replace(second, command=["env", "BERTSCOPE_CACHE=cache", *second.command])


def swept(workers: int, grid: str, of: str, number: int = 0) -> Work:
    """Return a sweep over a grid, from its first point: a file of rows of an earlier run would be continued."""
    words = f"sweep -o rows.jsonl --workers {workers} {grid}.yaml"
    found = own("sweep", words, "sweep" if number else "", number, asked=f"`sweep` of {of}")
    first = ("env", "sh", "-c", 'rm -f rows.jsonl && exec "$0" "$@"')
    return replace(found, command=[*first, *found.command], doubled=(*first, *found.doubled) if number else ())


def works(files: int) -> Iterator[Work]:
    """Yield all work, part by part."""
    step = "--attention eager -b 32 -s 512"
    for command in ("count", "tree", "tree --style torch"):
        yield own("count", f"{command} {MODEL}", command)
    yield peer("count", "transformers", "the model on meta, `print`")
    yield peer("count", "torchinfo", "`summary` on meta")
    yield peer("count", "torchinfo, on the CPU", "`summary` on the CPU")
    yield peer("count", "fvcore", "`parameter_count_table` on meta")
    yield peer("count", "accelerate", "`calculate_maximum_sizes` on meta")
    yield own("flops", f"flops {MODEL} --attention eager -b 8 -s 128", "flops")
    for name, call in (("FlopCounterMode", ""), ("torchinfo, forward", "`summary(input_data=...)`"),
                       ("fvcore, forward", "`FlopCountAnalysis`"), ("calflops", "`calculate_flops`")):  # fmt: skip
        yield peer("flops", name, f"{call} on meta, 8 x 128".strip())
    yield own("estimate", f"estimate {MODEL} {step}", "estimate")
    yield peer("estimate", "MemTracker", "2 steps on fake tensors, 32 x 512", batch=32, length=512)
    yield peer("estimate", "accelerate, training", "`estimate_training_usage`, without activations")
    yield own("checkpointing", f"estimate {MODEL} {step} --checkpointing none,full", "estimate --checkpointing")
    yield peer("checkpointing", "MemTracker, both", "the same with and without, 32 x 512", batch=32, length=512)
    budget = "--budget 16GiB"
    fit = f"fit {MODEL} {budget}"
    ways = "--checkpointing none,selective,every-2,full --precision fp32,autocast-bf16"
    yield own("fit", f"{fit} {ways}", "fit", asked=f"`{fit}`, 4 strategies in 2 precisions")
    for words in (f"estimate {MODEL}", f"estimate {MODEL} --format json", f"estimate {MODEL} --gpu t4",
                  f"fit {MODEL} --gpu t4 --precision fp32 --checkpointing none,selective,full"):  # fmt: skip
        yield again(words)
    yield own("report", f"report {MODEL} -o page.html", "report")
    for words in (f"estimate {FAMILY} -b 32 -s 512", f"fit {FAMILY} {budget} --checkpointing none,full"):
        yield own("family", words, asked=f"`{words}`, RoBERTa-large")
        yield again(words)
    yield swept(1, f"{POINTS}-points", f"{POINTS:,} points of 4 kinds, 1 process", POINTS)
    for workers in (1, 2):
        yield swept(workers, "9996-kinds", f"9,996 points of 42 kinds, {workers} process{'es'[: 2 * workers - 2]}")
    yield own("check", f"check {files}-files", "check", files, asked=f"`check` of {files:,} files")
    yield peer("check", "torchinfo, files", f"`summary` on meta, {files:,} models", files=files)
    yield peer("check", "fvcore, files", f"`parameter_count` on meta, {files:,} models", files=files)
    words = "--attention eager -b 8 -s 128 --checkpointing full --reentrant"
    yield own("reentrant", f"estimate layers-96 {words}", "reentrant", asked=f"`estimate CONFIG {words}`, 96 layers")
    yield peer("reentrant", "MemTracker, reentrant", "2 steps on fake tensors, 8 x 128, 24 layers")
    yield own("profile", "profile bert-tiny --attention eager -b 8 -s 128 --checkpointing none,full", "profile")
    yield peer("profile", "torch.profiler", "5 steps each, 8 x 128", layers=2, width=128)
    for size, values in GROWTH.items():
        for value in values:
            yield from growing(size, value)


def growing(size: str, value: int) -> Iterator[Work]:
    """Yield the work at one value of a size, BERT-large at 8 x 128 otherwise; other tools get its ends."""
    part, ends = f"growth-{size}", (GROWTH[size][0], max(most for most in GROWTH[size] if most <= MOST_OF_PEERS))
    if size == "files":
        yield own(part, f"check {value}-files", at=value, asked="`check`")
        if value <= 100:
            yield peer(part, "torchinfo, files", "`summary`", value, files=value)
        return
    given = SIZES | {size: value}
    run = "layers-24" if size == "batch" else f"{size}-{value}"
    run += f" --attention eager -b {given['batch']} -s {given['length']}"
    if size in ("layers", "width"):
        yield own(part, f"count {size}-{value}", at=value, asked="`count`")
    yield own(part, f"flops {run}", at=value, asked="`flops`")
    yield own(part, f"estimate {run}", at=value, asked="`estimate`")
    for way in WAYS if size == "layers" and value in WAY_LAYERS else ():
        yield own(part, f"estimate {run} {way}", at=value, asked=f"`estimate {way}`")
    if value in ends:
        if size in ("layers", "width"):
            yield peer(part, "torchinfo", "`summary`", value, **given)
        yield peer(part, "FlopCounterMode", "forward", value, **given)
    if value in (ends[0], 48 if size == "layers" else ends[1]):  # 96 layers take minutes
        yield peer(part, "MemTracker", "2 steps", value, **given)


def write_inputs(folder: Path, all_works: Iterable[Work]) -> None:
    """Write the configurations, the expectation files and the grids that the commands name."""
    for size in ("layers", "width", "length"):
        for value in GROWTH[size]:
            write_config(folder / f"{size}-{value}", SIZES | {size: value})
    write_config(folder / FAMILY, SIZES, model_type="roberta", architectures=["RobertaForMaskedLM"],
                 max_position_embeddings=514)  # fmt: skip
    for name in {command[-1] for work in all_works for command in (work.command, work.doubled) if command}:
        number, _, kind = name.removesuffix(".yaml").partition("-")
        if kind == "files":
            (folder / name).mkdir(exist_ok=True)
            for each in range(int(number)):
                (folder / name / f"m{each:05}.bertscope.yaml").write_text(expectation(30522 + each))
        elif kind in GRIDS:
            batches = [*range(1, int(number) // GRIDS[kind][0] + 1)]
            (folder / name).write_text(f"model: {MODEL}\nbatch: {batches}\n{GRIDS[kind][1]}\n")


def write_config(folder: Path, sizes: dict[str, int], **fields: Any) -> None:
    """Write the configuration of a BERT of these sizes into a new folder."""
    config = {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30522,
        "hidden_size": sizes["width"], "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["width"] // 64, "intermediate_size": 4 * sizes["width"],
        "max_position_embeddings": max(sizes["length"], 512),
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))


def expectation(vocabulary: int) -> str:
    """Return an expectation file of BERT-large with another vocabulary; each token adds 1,024 weights and a bias."""
    sizes = "hidden_size: 1024, num_hidden_layers: 24, num_attention_heads: 16, intermediate_size: 4096"
    expected = 335_174_458 + (vocabulary - 30522) * (1024 + 1)
    return (
        f"architecture: BertForMaskedLM\nconfig: {{{sizes}, vocab_size: {vocabulary}}}\n"
        f"expected:\n  distinct_params: {expected}\n"
    )


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Usage:
    """The use of a work: of all its processes the CPU time, of the largest the peak of its memory."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose parent ends, so that its time is counted (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def measured(command: list[str], folder: Path) -> Usage:
    """Run a command to its end, with all processes that it starts; raise RuntimeError if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    environment["BERTSCOPE_CACHE"] = ""  # a second run of a work would read what the first kept
    seen: dict[int, tuple[float, int]] = {}
    waited, peak, code = 0.0, 0, 0
    with (folder / "stderr.txt").open("wb+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603  our command
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            while True:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if pid:
                    waited += used.ru_utime + used.ru_stime
                    peak = max(peak, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
                    if pid == process.pid:
                        code = process.returncode = os.waitstatus_to_exitcode(status)
                    continue
                seen |= {found: use for found in descendants(os.getpid()) if (use := use_of(found))}
                if time.perf_counter() - start > LIMIT_SECONDS:
                    raise RuntimeError(f"no end within {LIMIT_SECONDS} s")
                time.sleep(PAUSE_SECONDS)
        except ChildProcessError:  # none is left
            wall = time.perf_counter() - start
        finally:
            for left in [*descendants(os.getpid())]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
        if code:
            errors.seek(0)
            raise RuntimeError((errors.read().decode(errors="replace").strip() or f"exit code {code}").splitlines()[-1])
    # A process whose parent ignores its end is counted in `seen` only, the last hundredth of a second in `waited` only.
    sampled = sum(seconds for seconds, _ in seen.values())
    return Usage(max(waited, sampled), wall, max([peak, *(memory for _, memory in seen.values())]))


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that descend from a process, as /proc shows them (Linux)."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def use_of(pid: int) -> tuple[float, int] | None:
    """Return the CPU seconds of a process and the peak of its memory in bytes; None if it has ended."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    _, found, rest = status.partition("VmHWM:")
    peak = int(rest.split()[0]) * 1024 if found else 0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), peak


@dataclass
class Measurement:
    """The usages of one work in several runs, each with that of `import torch` in the same run."""

    work: Work
    usages: list[Usage] = field(default_factory=list)
    imports: list[Usage] = field(default_factory=list)
    doubled: list[Usage] = field(default_factory=list)  # with twice the files or points
    failure: str = ""


def run_all(chosen: list[Work], runs: int) -> list[Measurement]:
    """Run all work `runs` times; an interrupt ends it."""
    measurements = [Measurement(work) for work in chosen]
    parts: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        parts.setdefault(measurement.work.part, []).append(measurement)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts a background job with SIGINT ignored
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        folder = Path(name).resolve()
        write_inputs(folder, chosen)
        measured(IMPORT_TORCH, folder)  # fill the disk cache
        for work in chosen:
            if work.part == CACHED:
                measured(work.command, folder)
        for growth in (False, True):
            last = {part for part in parts if part.startswith("growth-") and part != "growth-layers"}
            now = {part: members for part, members in parts.items() if (part in last) == growth}
            for run in range(runs):
                for part, members in now.items():
                    _run_part(members[:: -1 if run % 2 else 1], folder)
                    print(f"run {run + 1} of {runs}: {part}", file=sys.stderr, flush=True)
    return measurements


def _run_part(members: list[Measurement], folder: Path) -> None:
    """Run the work of a part once, after `import torch`."""
    floor = measured(IMPORT_TORCH, folder)
    for measurement in members:
        if measurement.failure or any(usage.cpu_seconds > ONCE_SECONDS for usage in measurement.usages):
            continue
        try:
            usage = measured(measurement.work.command, folder)
            if measurement.work.doubled:
                measurement.doubled.append(measured(list(measurement.work.doubled), folder))
            measurement.usages.append(usage)
            measurement.imports.append(floor)
        except RuntimeError as error:
            measurement.failure = str(error)[:120]


# ---------------------------------------------------------------- result and output


def result(measurements: list[Measurement], runs: int, load: list[float]) -> dict[str, Any]:
    """Return everything that is printed, as plain data; `--read` takes it."""
    names = {"python": platform.python_version()} | {tool: version(tool) for tool in PACKAGES if installed(tool)}
    command = ("git", "rev-parse", "--short", "HEAD")
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  # the own git
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": asked.stdout.strip(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "load_before": load[0],
        "load_after": os.getloadavg()[0],
        "versions": names,
        "runs": runs,
        "works": [
            {
                "part": work.part, "tool": work.tool, "asked": work.asked, "at": work.at, "number": work.number,
                "target_seconds": TARGETS.get(work.target), "failure": measurement.failure,
                "usages": [asdict(usage) for usage in measurement.usages],
                "import_torch": [asdict(usage) for usage in measurement.imports],
                **({"doubled": [asdict(usage) for usage in measurement.doubled]} if measurement.doubled else {}),
            }
            for measurement in measurements for work in [measurement.work]
        ],
        "step": [],
    }  # fmt: skip


def values(work: dict[str, Any], name: str, way: str) -> list[float]:
    """Return a value of each run: of the work itself, as a ratio to `import torch`, or beyond it."""
    pairs = [(use[name], floor[name]) for use, floor in zip(work["usages"], work["import_torch"], strict=True)]
    return [{"itself": use, "ratio": use / floor, "beyond": use - floor}[way] for use, floor in pairs]


def cell(found: list[float], digits: int = 2, factor: float = 1, unit: str = "") -> str:
    """Return the median, with the lowest and the highest value where they differ."""
    if not found:
        return ""
    low, middle, high = (
        f"{factor * value:,.{digits}f}" for value in (min(found), statistics.median(found), max(found))
    )
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low} to {high})"


def beyond(work: dict[str, Any]) -> tuple[str, str]:
    """Return the CPU time beyond `import torch` and its target; of files or points that of one more."""
    number, target = work["number"], work["target_seconds"]
    if not number:
        limit = "" if target is None else f"{target:.2f} s"
        return cell(values(work, "cpu_seconds", "beyond"), unit=" s"), limit
    pairs = zip(work["usages"], work["doubled"], strict=True)
    found = [(twice["cpu_seconds"] - once["cpu_seconds"]) / number for once, twice in pairs]
    unit = f" ms a {'point' if work['part'] == 'sweep' else 'file'}"
    return cell(found, 1, 1000, unit), "" if target is None else f"{target * 1000:.0f}{unit}"


HEAD = ("part", "tool", "work", "CPU, s", "CPU, ratio", "memory, MiB", "CPU beyond `import torch`", "target")


def tables(found: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield a title and the rows of each table; the first row has the names of the columns."""
    rows = [HEAD]
    floors = [floor for work in found["works"] for floor in work["import_torch"]]
    if floors:
        whole = {"usages": floors, "import_torch": floors}
        cells = (cell(values(whole, "cpu_seconds", "itself")), "1",
                 cell(values(whole, "peak_bytes", "itself"), 0, 2**-20), "", "")  # fmt: skip
        rows.append(("", "torch", "`import torch`", *cells))
    for work in found["works"]:
        if work["failure"]:
            rows.append((work["part"], work["tool"], work["asked"], f"FAILED: {work['failure']}", *[""] * 4))
        elif not work["at"] and work["usages"]:
            cells = (
                cell(values(work, "cpu_seconds", "itself")), cell(values(work, "cpu_seconds", "ratio")),
                cell(values(work, "peak_bytes", "itself"), 0, 2**-20), *beyond(work),
            )  # fmt: skip
            rows.append((work["part"], work["tool"], work["asked"], *cells))
    if len(rows) > 2:
        yield "Whole processes", rows
    for size in GROWTH:
        grown: dict[tuple[str, str], dict[int, str]] = {}
        for work in found["works"]:
            if work["part"] == f"growth-{size}" and work["usages"]:
                key = work["tool"], work["asked"]
                grown.setdefault(key, {})[work["at"]] = cell([statistics.median(values(work, "cpu_seconds", "beyond"))])
        if grown:
            columns = sorted({at for cells in grown.values() for at in cells})
            rows = [
                (
                    "tool",
                    "work",
                    *(f"{at:,} {size}" if size in ("layers", "files") else f"{size} {at:,}" for at in columns),
                )
            ]
            rows += [(*key, *(cells.get(at, "") for at in columns)) for key, cells in grown.items()]
            yield f"Growth with {size}: CPU seconds beyond `import torch`", rows
    if found["step"]:
        yield "A step of the built-in BERT relative to transformers' BERT: median (middle half) of the ratios", [
            ("kernel", "size", "mask", "mode", "ratio"), *map(tuple, found["step"])
        ]  # fmt: skip


# Sizes with which no time grows: one sentence of the page, whose file has the numbers.
_FLAT = tuple(f"Growth with {size}" for size in ("width", "batch", "length"))


def rendered(found: dict[str, Any], form: str) -> str:
    """Return the result as text, Markdown or JSON."""
    if form == "json":
        return json.dumps(found, indent=1)
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    runs = sorted({len(work["usages"]) for work in found["works"] if work["usages"]}) or [0]
    lines = [
        f"{found['date']}, commit {found['commit']}, {runs[0]} to {runs[-1]} runs; {found['machine']}, "
        f"load {found['load_before']:.1f} before and {found['load_after']:.1f} after; {versions}."
    ]
    for title, rows in tables(found):
        if form == "markdown" and title.startswith(_FLAT):
            continue
        if form == "markdown":
            lines += ["", f"### {title}", ""]
            marked = [f"| {' | '.join(row)} |" for row in rows]
            lines += [marked[0], "|" + "---|" * len(rows[0]), *marked[1:]]
        else:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["", title, ""]
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


# ---------------------------------------------------------------- the step of the built-in model


def step_ratios(pairs: int) -> Iterator[tuple[str, ...]]:
    """Yield the ratio of the built-in BERT-base to transformers' BERT-base, for each kernel, size, mask and mode."""
    import torch
    import transformers

    import bertscope

    transformers.logging.set_verbosity_error()
    for attention in ("eager", "sdpa"):
        reference = transformers.BertForMaskedLM(transformers.BertConfig(attn_implementation=attention))
        model = bertscope.BertForMaskedLM(bertscope.BertConfig(attn_implementation=attention))
        model.load_state_dict(reference.state_dict())
        for batch, length in ((8, 128), (2, 512)):
            ids = torch.randint(1, 30522, (batch, length))
            padding = torch.ones_like(ids)
            padding[:, length * 3 // 4 :] = 0
            for mask in ({}, {"attention_mask": padding}):
                for training in (False, True):
                    given = {"input_ids": ids, **mask, **({"labels": ids} if training else {})}
                    found = [_step_ratio(model, reference, given, training, bool(n % 2)) for n in range(pairs + 1)][1:]
                    low, middle, high = statistics.quantiles(found, n=4) if pairs > 1 else found * 3
                    yield (
                        attention, f"{batch} x {length}", "padded" if mask else "none",
                        "training" if training else "forward", f"{middle:.3f} ({low:.3f} to {high:.3f})",
                    )  # fmt: skip


def _step_ratio(model: Any, reference: Any, given: dict[str, Any], training: bool, reverse: bool) -> float:
    """Return the time of one step of the model over that of the reference; without labels only the forward pass."""
    import torch

    seconds = {}
    for each in (reference, model) if reverse else (model, reference):
        each.train(training)
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            output = each(**given)
            if training:
                output.loss.backward()
        seconds[each] = time.perf_counter() - start
        each.zero_grad(set_to_none=True)
    return seconds[model] / seconds[reference]


# ---------------------------------------------------------------- run


def main() -> None:
    """Measure what is selected, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="use the present environment")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--files", type=int, default=100, help="of the part `check`")
    parser.add_argument("--only", nargs="+", metavar="PART", help="%(metavar)s: count, flops, ..., growth-layers, step")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print a JSON of before; measure nothing")
    options = parser.parse_args()
    if options.read:
        print(rendered(json.loads(options.read.read_text()), options.format))
        return
    if not options.here:
        run_in_own_environment("benchmarks.speed")
    present = {"bertscope": True} | {name: installed(name) for name in PACKAGES}
    chosen = [work for work in works(options.files) if present.get(PACKAGE_OF.get(work.tool, work.tool))]
    parts = [*dict.fromkeys(work.part for work in chosen)]
    if wrong := set(options.only or ()) - {*parts, "step"}:
        parser.error(f"unknown: {', '.join(sorted(wrong))}; the parts are {', '.join(parts)}, step")
    load = os.getloadavg()
    selected = options.only or parts
    found = result(run_all([work for work in chosen if work.part in selected], options.runs), options.runs, load)
    if "step" in selected:
        found["step"] = [*step_ratios(3 * options.runs)]
    print(rendered(found, options.format))


if __name__ == "__main__":
    main()
