"""`profile`: a child that measures, dies, hangs or is interrupted; nothing of it is left behind."""

import csv
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bertscope
from bertscope.errors import SelectionError, SourceError
from bertscope.measure import profile as profile_module
from bertscope.measure.profile import about_left, profile_report
from bertscope.measure.profile_job import MESSAGES, Job, read_message
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import run_model
from bertscope.memory.summary import memory
from bertscope.processes import child as child_module
from bertscope.processes.folders import OwnFolder, compile_folder
from bertscope.reports.base import SCHEMA
from bertscope.reports.memory import Timing
from bertscope.settings.run_config import RunConfig
from bertscope.tracing.module_tree import row_paths
from tests.child_server import loaded
from tests.conftest import ROOT, TERMINAL, default_signals, run_cli
from tests.memory.steps import estimated_trace, real_trace, small
from tests.test_cli import ENV, PROGRAM, on_a_terminal

SMALL_YAML = """architecture: BertForMaskedLM
config: {vocab_size: 99, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 40}
"""
LONG = ("profile", "small.yaml", "--steps", "1000", "--batch", "4", "--optimizer", "sgd")
SHORT = ("--steps", "1", "--batch", "1", "--seq", "8", "--mode", "inference")


STARTED: list[subprocess.Popen] = []
STARTING = profile_module.starting


@pytest.fixture
def as_the_program_starts_it(monkeypatch):
    """Start children as the program does; in other tests a server with torch loaded forks them."""
    monkeypatch.setattr(profile_module, "starting", STARTING)


SAY = "import json, sys\nsay = lambda *message: print(json.dumps(message), flush=True)\nasked = sys.stdin.readline()\n"


@pytest.fixture
def child_of(monkeypatch, as_the_program_starts_it):
    """A function that has each child run this code instead of its job."""
    monkeypatch.setattr(child_module, "can_fork", lambda: False)
    return lambda code: monkeypatch.setattr(
        child_module, "child_command", lambda entry: [sys.executable, "-I", "-c", code]
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small model, which is also where temporary files go."""
    (tmp_path / "small.yaml").write_text(SMALL_YAML)
    (tmp_path / "tmp").mkdir()
    compile_folder()  # of this process, until its end
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    loaded("bertscope")  # the server
    others = children_of(os.getpid())
    yield tmp_path
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:  # the test failed
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [child for child in children_of(os.getpid()) if child not in others] == []


def children_of(parent: int) -> list[int]:
    """The processes whose parent is this one, zombies too."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(status.parent.name))
    return found


def start(folder: Path, *args: str) -> subprocess.Popen:
    environment = ENV | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), "BERTSCOPE_DEBUG": "1"}
    process = subprocess.Popen(
        [*PROGRAM, *args], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=default_signals,
    )  # fmt: skip
    STARTED.append(process)
    return process


def wait_for(process: subprocess.Popen, words: str) -> list[str]:
    """Return the text on stderr up to these words."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError("".join(lines))


def is_gone(pid: int, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One whole run, `--checkpointing` alone, with everything that it can write."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "small.yaml").write_text(SMALL_YAML)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in TERMINAL:
            patch.delenv(name, raising=False)
        done = run_cli("profile", "small.yaml", "--checkpointing", "--batch", "2", "--seq", "16", "--format", "json",
                       "--timeline", "step.csv", "--snapshot", "step.pickle", "--steps", "2", "--debug")  # fmt: skip
    assert done.code == 0, done.err
    return folder, done.json, done.err


def test_stdout_is_data_and_stderr_is_progress(measured):
    _, data, err = measured
    assert (data["schema"], data["kind"], data["subject"]["obtained"]) == (SCHEMA, "memory", "measured")
    assert [variant["checkpointing"] for variant in data["variants"]] == ["none", "full"]
    assert re.search(r"^none(, about \d+ s left)?: ", err, re.MULTILINE)
    assert re.search(r"^full(, about \d+ s left)?: ", err, re.MULTILINE)
    assert "\x1b" not in err


def test_what_selective_checkpointing_keeps_is_measured_in_the_modules_that_made_it():
    """Its own mode hides what is dispatched to a profile, names of modules too."""
    source, run_config = small(num_hidden_layers=2), RunConfig(batch=3, seq=24, checkpointing="selective")
    rows = row_paths(run_model(source, run_config))
    paths = [
        {row.path for row in memory(trace(source, run_config), "", rows).saved}
        for trace in (estimated_trace, real_trace)
    ]
    assert "bert.encoder.layer.0-1.intermediate.dense" in paths[1]
    assert paths[0] - paths[1] <= {"bert.encoder"}


def test_time_work_and_the_process_are_reported(measured):
    _, data, _ = measured
    for variant in data["variants"]:
        timing, process = variant["timing"], variant["process"]
        assert len(timing["step_seconds"]) == 2
        assert min(timing["step_seconds"]) <= timing["median_seconds"] <= max(timing["step_seconds"])
        assert timing["tokens_per_second"] == pytest.approx(2 * 16 / timing["median_seconds"])
        assert timing["flops_per_second"] == pytest.approx(timing["flops"] / timing["median_seconds"])
        assert 0 < process["resident_before_bytes"] <= process["high_water_bytes"] <= process["run_high_water_bytes"]
    plain, full = (variant["timing"]["flops"] for variant in data["variants"])
    assert full > plain


def test_the_strategies_run_their_timed_steps_in_turn(measured):
    _, data, err = measured
    shown = [line.partition(" (")[0] for line in err.splitlines() if line.startswith("timing step")]
    assert shown == [f"timing step {step} of 2: {name}" for step in (1, 2) for name in ("none", "full")]
    assert [variant["timing"]["is_in_turn"] for variant in data["variants"]] == [True, True]


def test_the_timeline_and_the_snapshot_are_written(measured):
    folder, data, _ = measured
    records = list(csv.DictReader(io.StringIO((folder / "step.csv").read_text())))
    assert {record["variant"] for record in records} == {"none", "full"}
    assert sorted(path.name for path in folder.iterdir()) == ["small.yaml", "step.csv", "step.pickle"]
    found = pickle.loads((folder / "step.pickle").read_bytes())
    live = peak = 0
    for entry in found["device_traces"][0]:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, live)
    assert peak == max(phase["peak_bytes"] for phase in data["variants"][1]["measured"]["phases"])


def test_pytorchs_own_viewer_reads_the_snapshot(measured):
    from torch.cuda._memory_viz import trace, trace_plot

    folder, _, _ = measured
    found = pickle.loads((folder / "step.pickle").read_bytes())
    assert "MEM[" in trace(found)
    page = trace_plot(found)
    assert "MemoryViz" in page


def test_out_of_memory_is_one_line_with_what_was_reached_and_what_to_try(cli, folder):
    result = cli("profile", "small.yaml", "--batch", "8192", "--memory-limit", "700MiB", "--steps", "1")
    assert (result.code, result.out) == (3, "")
    note = result.err.splitlines()[-1]
    assert note.startswith("note: none could not be measured: the child ran out of memory (limit 700.00 MiB, of which")
    assert "while in the forward phase of the first steps; the estimate is" in note
    assert "try a smaller batch or sequence, checkpointing, or a higher memory limit" in note


def test_a_limit_below_what_torch_takes_is_told_and_hangs_nothing(cli, folder):
    result = cli("profile", "small.yaml", "--memory-limit", "50MiB", "--timeout", "60")
    assert result.code == 3
    assert "ran out of memory (limit 50.00 MiB, of which torch and Python take" in result.err


def test_what_could_be_measured_is_shown_beside_what_could_not(cli, folder, child_of):
    memory_ = Simulator(small()).memory(RunConfig(batch=2, seq=8))
    timing = Timing(warmup_seconds=1.0)
    answers = {
        "none": (("estimated", memory_), ("out of memory", "")),
        "full": (("estimated", memory_), ("machine", "a machine"), ("measured", memory_), ("timing", timing),
                 ("seconds", 1.0)),
    }  # fmt: skip
    for name, messages in answers.items():
        (folder / name).write_text("".join(json.dumps(message, default=vars) + "\n" for message in messages))
    child_of(SAY + "print(open(json.loads(asked)['run_config']['checkpointing']).read(), end='')")
    result = cli("profile", "small.yaml", "--batch", "512", "--memory-limit", "800MiB", "--steps", "1",
                 "--checkpointing", "--optimizer", "sgd", "--format", "json")  # fmt: skip
    none, full = result.json["variants"]
    assert result.code == 3
    assert none["measured"] is None
    assert none["estimated"] is not None
    assert "ran out of memory" in none["failure"]
    assert (full["failure"], full["measured"] is None) == ("", False)


@pytest.mark.parametrize(("available", "asked"), [(10 * 100, "mmtt"), (2 * 100 - 1, "mtmt"), (None, "mtmt")])
def test_a_child_waits_for_its_turn_only_where_memory_is_left(folder, child_of, monkeypatch, available, asked):
    process = {"resident_before_bytes": 1, "high_water_bytes": 2, "run_high_water_bytes": 100}
    child_of(
        f"{SAY}open('log', 'a').write('m')\nsay('process', {process})\nsay('timing', {{'warmup_seconds': 1.0}})\n"
        "for line in sys.stdin:\n    open('log', 'a').write('t')\n    say('seconds', 2.0)\n"
    )
    monkeypatch.setattr(profile_module, "available_bytes", lambda: available)
    jobs = [Job(source=small(), run_config=RunConfig(checkpointing=name), steps=1) for name in ("none", "full")]
    report, *_ = profile_report(jobs)
    assert (folder / "log").read_text() == asked
    timings = [variant.timing for variant in report.variants]
    assert [timing.step_seconds for timing in timings] == [(2.0,), (2.0,)]
    assert [timing.is_in_turn for timing in timings] == [asked == "mmtt"] * 2


def test_a_child_that_hangs_is_ended_at_the_timeout_and_its_memory_is_kept(folder, child_of, monkeypatch):
    memory = Simulator(small()).memory(RunConfig(batch=2, seq=8))
    (folder / "memory.json").write_text(json.dumps(memory, default=vars))
    (folder / "log").touch()
    child_of(
        SAY + "say('measured', json.load(open('memory.json')))\nsay('timing', {'warmup_seconds': 1.0})\n"
        "for line in sys.stdin:\n    open('log', 'a').write('t')\n"
        "    len(open('log').read()) == 3 or say('seconds', 10.0)\n"
    )
    # In the third step each look at this clock takes 10 s, whether the step began before the parent waited or after.
    looks = count()
    clock = SimpleNamespace(monotonic=lambda: 10.0 * next(looks) if (folder / "log").stat().st_size == 3 else 0.0)
    monkeypatch.setattr(profile_module, "time", clock)
    report, *_ = profile_report([Job(source=small(), run_config=RunConfig(), steps=1000)], timeout_seconds=25)
    (variant,) = report.variants
    assert "the child ran for longer than 25 s while timing step 3 of 1000" in variant.failure
    assert "or a longer timeout" in variant.failure
    assert variant.measured is not None


def test_a_child_that_is_killed_is_an_answer(folder):
    process = start(folder, *LONG)
    wait_for(process, "timing step")
    (child,) = children_of(process.pid)
    os.kill(child, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0  # the memory had been measured before
    assert "could not be timed (its memory was measured)" in err
    assert "was killed by SIGKILL, as the system does when memory runs out while timing step" in err
    assert "saved for backward" in out


def test_a_child_does_not_outlive_a_parent_that_is_killed(folder):
    process = start(folder, *LONG)
    wait_for(process, "estimating")
    (child,) = children_of(process.pid)
    process.kill()
    process.communicate(timeout=300)
    assert is_gone(child)
    OwnFolder().cleanup()  # the next run removes the folder of this one


def test_a_module_is_not_run_on_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SelectionError, match="no CUDA device"):
        bertscope.profile(torch.nn.Linear(2, 2), torch.ones(1, 2), device="cuda")


def test_a_strategy_that_saves_at_no_batch_is_measured_too(cli, folder):
    result = cli("profile", "small.yaml", "--checkpointing", "full,every-2", "--steps", "1", "--batch", "2",
                 "--seq", "8", "--format", "json")  # fmt: skip
    assert result.code == 0
    assert [variant["break_even"] for variant in result.json["variants"]] == [None, None]
    assert all(variant["measured"] for variant in result.json["variants"])


def test_the_same_seed_gives_the_same_step(folder):
    run_config = RunConfig(batch=2, seq=8, mode="forward")
    jobs = [Job(source=small(num_hidden_layers=1), run_config=run_config, steps=0, threads=1, seed=7)] * 2
    one, two = profile_report(jobs)[0].variants
    assert one.measured.phases == two.measured.phases


def test_a_terminal_gets_a_bar_of_one_line_that_goes_away_and_no_file_is_left(folder):
    out = on_a_terminal("profile", str(folder / "small.yaml"), *SHORT, columns=100, NO_COLOR="1",
                        PYTHONPATH=str(ROOT), TMPDIR=str(folder / "tmp"))  # fmt: skip
    progress, _, rest = out.rpartition("\x1b[2K")
    assert progress.count("\n") == 1  # after the bar, which the next code removes
    assert " 0/1 0:00:0" in progress  # without colour an empty bar is blank
    assert rest.startswith("Peak ")


def test_a_job_goes_to_the_child_as_json_and_arrives_as_it_was():
    run_config = RunConfig(batch=3, freeze=("embeddings", "pooler"), padding=0.1, mode="forward")
    source = bertscope.load("bert-tiny", attention="eager", add_pooling_layer=False)
    config = replace(source.config, pruned_heads={0: (1,)}, layer_norm_eps=0.1 + 0.2)
    job = Job(
        source=replace(source, config=config),
        run_config=run_config,
        threads=2,
        other_run=RunConfig(),
        memory_limit_bytes=2**40,
    )
    found = Job.from_json(job.to_json())
    assert replace(found, source=job.source) == job
    for name in ("name", "config", "architecture", "add_pooling_layer"):
        assert getattr(found.source, name) == getattr(job.source, name)


def test_an_activation_without_a_name_is_refused_before_a_child_starts():
    job = Job(source=replace(small(), config=replace(small().config, hidden_act=torch.sin)), run_config=RunConfig())
    with pytest.raises(SelectionError, match="takes hidden_act by its name"):
        profile_report([job])


def test_an_answer_arrives_as_it_was():
    memory_ = Simulator(small()).memory(RunConfig(batch=2, seq=8, checkpointing="full"))
    assert read_message(json.dumps(["estimated", memory_], default=vars).encode()) == ("estimated", memory_)
    for kind in MESSAGES.keys() - {"break_even"}:  # which may be None
        with pytest.raises(SourceError, match="must be"):
            read_message(json.dumps([kind, None]).encode())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('hello', flush=True)", "printed 'hello' where its parent expected a message while loading"),
        ("print('[\"stage\", 1]')", "where its parent expected a message"),
        ("print('[' * 100_000)", "where its parent expected a message"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x1b\\n')", "where its parent expected a message"),
        ("while True: print('x' * 2**16, end='')", "where its parent expected a message"),
        ("print('[\"stage\", \"half', end='')", "ended with exit code 0 while loading torch; try"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV while loading torch; try"),
        ("import sys; sys.exit('broken \\x1b')", "ended with exit code 1: broken \\x1b while loading torch"),
    ],
)
def test_a_child_that_prints_no_message_is_one_line(folder, child_of, monkeypatch, code, words):
    child_of(code)
    monkeypatch.setattr("bertscope.processes.child._MAX_MESSAGE_BYTES", 2**20)
    report, *_ = profile_report([Job(source=small(), run_config=RunConfig())], timeout_seconds=300)
    (variant,) = report.variants
    assert words in variant.failure
    assert variant.failure.isprintable()
    assert len(variant.failure) < 400


def test_the_time_left_counts_the_memory_steps_to_come_and_the_timed_steps_of_all():
    assert about_left([2.0], measured=0, strategies=2, steps=3).startswith(f", about {2 * (2 + 3 + 2 * 3)} s")
    assert about_left([2.0, 4.0], measured=1, strategies=2, steps=0).startswith(f", about {3 * 2} s")
    assert about_left([], measured=0, strategies=2, steps=3) == ""


def test_the_first_of_several_micro_batches_tells_how_long_the_first_step_takes():
    expected = {"measured": 0, "strategies": 1, "steps": 2, "expected": 8.0}
    assert about_left([], **expected).startswith(f", about {8 * (3 + 2)} s")
    assert about_left([], **expected, taken=7.0).startswith(f", about {8 * (3 + 2) - 7} s")


def test_a_step_of_several_micro_batches_says_which_of_them_runs():
    class Listener(list):
        __call__ = list.append

        def expect(self, stages):
            """Count no stages."""

    with bertscope.listening(texts := Listener()):
        bertscope.profile(small(), batch=1, seq=8, accumulate=3, steps=1, checkpointing="none")
    stages = {text.partition(": ")[2] for text in texts}
    assert {f"in the backward phase of the measured step, micro-batch {number} of 3" for number in (1, 3)} <= stages
