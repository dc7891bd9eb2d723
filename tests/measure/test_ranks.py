"""`profile --nproc`: real ranks need the estimated memory; one that dies or hangs ends the run with its name."""

import errno
import json
import os
import signal
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertscope.commands import memory as command_module
from bertscope.errors import SourceError
from bertscope.measure import profile as profile_module
from bertscope.measure import rank
from bertscope.measure.profile import profile_report
from bertscope.measure.profile_job import Job, RankLaunch, Sent
from bertscope.measure.profile_worker import job_error
from bertscope.measure.watch import RanksWatch
from bertscope.memory.simulator import Simulator
from bertscope.processes.child import can_fork
from bertscope.processes.folders import OwnFolder
from bertscope.progress import listening
from bertscope.reports.memory import RankRow
from bertscope.reports.step import Parts, PhasePeak, StepCost
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import torch
from tests.conftest import EVERY_CASE
from tests.measure.test_profile import is_gone
from tests.memory.steps import small

needs_forks = pytest.mark.skipif(not can_fork(), reason="ranks are forked on Linux only")
LIMIT = 600.0  # that a starved machine needs too
OWN = """
import json, os, signal, socket, sys, time
from contextlib import suppress
from pathlib import Path
import torch

unpickled = []
sys.addaudithook(lambda event, words: unpickled.append(str(words)) if event == "pickle.find_class" else None)

def look():
    sockets, files = set(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != os.getpgrp():
                continue
            for link in os.listdir(folder / "fd"):
                with suppress(OSError):
                    files.append(os.readlink(folder / "fd" / link))
    tables = "".join(path.read_text() for path in Path("/proc/net").glob("tcp*"))
    rows = [line.split() for line in tables.splitlines()]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files]
    reached = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        try:
            other.connect(("192.0.2.1", 9))  # sends nothing, and gives the address of this machine, if it has one
            address = other.getsockname()[0]
        except OSError:
            address = "127.0.0.2"
    for _, port in found:
        with socket.socket() as client:
            client.settimeout(1)
            if client.connect_ex((address, int(port, 16))) == 0:
                reached.append([address, port])
    (store,) = Path("tmp").glob("*/store")
    mode = store.parent.stat().st_mode & 0o777
    Path("seen").write_text(json.dumps({"listening": found, "reached": reached, "mode": mode, "pickle": unpickled}))

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        if os.environ.get("RANK") == "1" and os.environ["WHAT"] == "listen":
            look()
        elif os.environ.get("RANK") == "1":
            print("a last word", file=sys.stderr, flush=True)
            if os.environ["WHAT"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            Path("pid").write_text(str(os.getpid()))
            time.sleep(1000)
        elif os.environ.get("RANK") == "0":  # and not the child that estimates
            Path("first").write_text(str(os.getpid()))
        return self.linear(x)
"""


NO_SYNC = {"accumulate": 3, "sync_each_batch": False}
IN_LIGHTNING = {"loop": "lightning", "precision": "autocast-bf16"}


def job(strategy, mesh, **settings):
    run_config = RunConfig.of(
        {"batch": 2, "seq": 8, "strategy": strategy, "mesh": "x".join(map(str, mesh)), **settings}
    )
    ranks = run_config.parallelism.world_size
    return Job(source=small(vocab_size=101), run_config=run_config, steps=1, threads=1, launch=RankLaunch(nproc=ranks))


@needs_forks
@pytest.mark.parametrize(
    ("strategy", "more"),
    [("fsdp", {"checkpointing": "full", **NO_SYNC}), ("zero1", {}), ("tp", {}), ("ddp", NO_SYNC),
     ("fsdp", IN_LIGHTNING), *EVERY_CASE * (("fsdp-no-reshard", {}), ("ddp", {**IN_LIGHTNING, "accumulate": 2}))],
)  # fmt: skip
def test_real_ranks_take_the_estimated_memory_and_send_the_estimated_bytes(strategy, more):
    asked = job(strategy, (2,), **more)
    (variant,) = profile_report([asked], timeout_seconds=LIMIT)[0].variants
    assert variant.failure == ""
    assert abs(variant.largest_error[0]) <= 64
    (estimated,) = Simulator(asked.source).report([asked.run_config]).variants

    def sums(rows):
        found = {}
        for row in rows:
            key = row.phase, row.collective
            found[key] = found.get(key, 0) + row.full_bytes
        return found

    assert sums(variant.traffic) == sums(estimated.traffic)
    assert sorted(number for row in variant.rank_rows for number in row.ranks) == [0, 1]
    assert all(len(row.step_seconds) == 1 for row in variant.rank_rows)
    # Of 101 rows rank 0 has 51 and rank 1 has 50; ZeRO divides whole tensors.
    assert len(variant.rank_rows) == (1 if strategy in ("ddp", "tp") else 2)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module whose rank 1 dies or hangs."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    yield tmp_path
    assert list((tmp_path / "tmp").iterdir()) == []


@needs_forks
def test_the_ranks_of_one_machine_listen_to_loopback_only_and_unpickle_nothing(cli, own, monkeypatch):
    monkeypatch.setenv("WHAT", "listen")
    result = cli(*WORDS, "--steps", "1")
    assert result.code == 0, result.err
    seen = json.loads((own / "seen").read_text())
    assert seen["listening"]  # gloo's pairs
    assert {address for address, _ in seen["listening"]} <= {"0100007F", "0" * 24 + "01000000"}  # as in /proc/net/tcp
    assert seen["reached"] == []
    assert seen["mode"] == 0o700
    assert seen["pickle"] == []


WORDS = ("profile", "own.py:Own", "--nproc", "2", "--strategy", "fsdp", "--input", "x=Bx8:float32", "--batch", "2")


@needs_forks
def test_a_rank_that_is_killed_is_named_with_its_last_words(cli, own, monkeypatch):
    monkeypatch.setenv("WHAT", "die")
    result = cli(*WORDS)
    assert (result.code, result.out) == (3, "")
    assert "rank 1 was killed by SIGKILL" in result.err
    assert "(its last words: a last word) while in the forward phase of the first steps" in result.err


@needs_forks
def test_a_rank_that_hangs_is_named_with_its_place_and_is_gone_at_the_timeout(cli, own, monkeypatch):
    pid, first = own / "pid", own / "first"

    since: dict[tuple[str, ...], float] = {}  # what the system says of rank 0, and when it was first seen

    def now() -> float:
        """Return the time, which makes a leap when rank 1 hangs and rank 0 has slept for a second: it waits for it."""
        time_now = time.monotonic()
        if all(path.exists() and path.read_text() for path in (pid, first)):
            stat = Path(f"/proc/{first.read_text()}/stat")
            fields = (
                stat.read_text().rpartition(")")[2].split() if stat.exists() else ["S"]
            )  # it is gone after the leap
            looked = (fields[0], *fields[11:13])  # its state, and the time that it took in user and system mode
            if fields[0] == "S" and (fields == ["S"] or time_now - since.setdefault(looked, time_now) > 1):
                return time_now + 10 * LIMIT
        return time_now

    monkeypatch.setattr(profile_module, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setenv("WHAT", "hang")
    result = cli(*WORDS, "--timeout", str(LIMIT))
    assert (result.code, result.out) == (3, "")
    assert "rank 1 hung until the time limit while in the forward phase of the first steps" in result.err
    assert f"(in forward at {own}/own.py:" in result.err
    assert is_gone(int(pid.read_text()))


def test_the_folder_of_a_killed_run_is_removed_by_the_next_and_no_other_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, running = OwnFolder(), OwnFolder()
    killed.lock.close()  # as the system does when a process ends
    foreign, link, strange = (tmp_path / f"bertscope-{name}" for name in ("foreign", "link", "strange"))
    foreign.mkdir()
    (foreign / "notes").write_text("mine")
    link.symlink_to(killed.name)
    strange.mkdir()
    (strange / "bertscope.lock").symlink_to(foreign / "notes")
    OwnFolder().cleanup()
    assert not Path(killed.name).exists()
    assert Path(running.name).exists()
    assert (foreign / "notes").read_text() == "mine"
    assert strange.exists()
    running.cleanup()


def test_an_error_of_a_job_has_a_kind_and_its_own_words():
    for error in (OSError(errno.EMFILE, "x"), RuntimeError(f"gloo: {os.strerror(errno.EMFILE)}")):
        assert job_error(error, job("fsdp", (2,)))[0] == "files"
    asked = job("fsdp", (2,))
    assert job_error(RuntimeError("strange"), asked) == ("failed", "RuntimeError: strange")
    for error in (RuntimeError("CUDA out of memory. Tried"), MemoryError()):
        assert job_error(error, asked)[0] == "out of memory"
    assert job_error(SourceError("it fails", where="own.py:3"), asked) == ("error", ["it fails", "own.py:3", 2])
    text = profile_module._failure(asked, Sent(), "the child", "files", "has too many open files")
    assert text == (
        "the child has too many open files while loading torch; raise the limit that 'ulimit -n' shows, such as "
        "'ulimit -n 1024'"
    )


@needs_forks
def test_ctrl_c_leaves_no_rank(cli, own, monkeypatch):
    pid = own / "pid"

    class Interrupting:
        """Interruption of the program when a rank runs."""

        def __call__(self, text):
            if pid.exists() and pid.read_text():
                raise KeyboardInterrupt

        def expect(self, stages):
            pass

    def interrupted(function, *args):
        with listening(Interrupting()):
            return function(*args)

    monkeypatch.setattr(command_module, "with_progress", interrupted)
    monkeypatch.setenv("WHAT", "hang")
    result = cli(*WORDS)
    assert (result.code, result.out) == (130, "")
    assert "was interrupted while " in result.err
    assert is_gone(int(pid.read_text()))


@needs_forks
def test_a_model_that_a_strategy_cannot_divide_is_a_wrong_question(cli, own):
    result = cli(*[{"fsdp": "tp"}.get(word, word) for word in WORDS])
    assert (result.code, result.out) == (2, "")
    assert "tensor parallelism" in result.err


# ---- what the parent reads, without processes ----


def row(number, peak_bytes, seconds=1.0):
    peak = PhasePeak(phase="forward", peak_bytes=peak_bytes, path="", operator="", parts=Parts(parameters=peak_bytes))
    return RankRow(
        ranks=(number,),
        state_bytes=10,
        cost=StepCost(peak=peak),
        phases=(peak,),
        traffic=(),
        step_seconds=(seconds,),
    )


class Process:
    """A rank that says what a test has it say, on the ends of its streams."""

    def __init__(self):
        self.stdin, self.returncode = BytesIO(), None
        (out, self.out), (err, self.err) = os.pipe(), os.pipe()
        self.stdout, self.stderr, self.pid = os.fdopen(out, "rb"), os.fdopen(err, "rb"), os.getpid()

    def say(self, *messages):
        os.write(self.out, b"".join(json.dumps(message, default=vars).encode() + b"\n" for message in messages))

    def print(self, text):
        os.write(self.err, text.encode())

    def end(self, code):
        self.returncode = code
        os.close(self.err)
        os.close(self.out)

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode

    def kill_group(self):
        if self.returncode is None:
            self.end(-9)


@pytest.fixture
def ranks():
    """The processes of four ranks, and what watches them."""
    processes = [Process() for _ in range(4)]
    watch = RanksWatch(job("fsdp", (4,)), iter(processes).__next__)
    sent = [Job.from_json(process.stdin.getvalue()) for process in processes]
    assert [one.launch.rank for one in sent] == [0, 1, 2, 3]
    yield processes, watch
    watch.close()


def heard(watch, count):
    """Read that many messages; return those for the report."""
    return [message for _ in range(count) for message in watch.read(60)]


def test_ranks_that_agree_are_one_row_with_the_slowest_step(ranks):
    processes, watch = ranks
    for number in (3, 0, 1, 2):
        processes[number].say(("row", row(number, 100 if number != 2 else 90, seconds=float(number))))
    assert heard(watch, 4) == []
    agreeing, other = watch.folded()
    assert (agreeing.ranks, agreeing.step_seconds, other.ranks) == ((0, 1, 3), (3.0,), (2,))


def test_memory_is_kept_of_ranks_that_end_while_they_are_timed(ranks):
    processes, watch = ranks
    processes[0].say(("row", row(0, 100)))
    processes[1].say(("row", replace(row(1, 100), step_seconds=())))
    assert heard(watch, 2) == []
    (both,) = watch.folded()
    assert (both.ranks, both.step_seconds, both.peak_bytes) == ((0, 1), (), 100)


def test_the_stage_of_the_first_rank_is_told_and_the_end_of_all_is_known(ranks):
    processes, watch = ranks
    for process in processes:
        process.say(("stage", "working"))
    assert heard(watch, 4) == [("stage", "working")]
    assert not watch.has_ended
    for process in processes:
        process.end(0)
    assert heard(watch, 4) == []
    assert watch.has_ended
    assert watch.failure() is None


def test_the_rank_that_was_killed_is_named_and_not_those_that_lost_it(ranks):
    processes, watch = ranks
    for number in range(2):
        processes[number].say(("stage", "working"))
        processes[number].print(f"words\nof {number}\n")
    processes[0].say(("failed", "RuntimeError: Connection closed by peer"))
    heard(watch, 3)
    assert watch.failure() is None  # another rank may have been killed
    processes[1].end(-signal.SIGSEGV)
    heard(watch, 1)
    who, stage, (kind, text) = watch.failure()
    assert (who, stage, kind) == ("rank 1", "working", "died")
    assert text == "was killed by SIGSEGV (its last words: of 1)"


def test_an_error_that_no_lost_rank_explains_is_told_at_once(ranks):
    processes, watch = ranks
    processes[1].say(("stage", "working"), ("failed", "ValueError: wrong"))
    heard(watch, 2)
    assert watch.failure() == ("rank 1", "working", ("failed", "ValueError: wrong"))


STACK = 'Current thread 0x1 (most recent call first):\n{}  File "/x/loop.py", line 3 in main\n'
IN_COLLECTIVE = '  File "/y/torch/distributed/distributed_c10d.py", line 9 in barrier\n'


@pytest.mark.parametrize(
    ("stages", "stacks", "who"),
    [
        ((2, 1, 2, 2), ("", "", "", ""), "rank 1"),  # the one that is behind
        ((2, 2, 2, 2), (IN_COLLECTIVE, IN_COLLECTIVE, "", IN_COLLECTIVE), "rank 2"),  # the one that is in no collective
        ((2, 2, 2, 2), (IN_COLLECTIVE, "", "", IN_COLLECTIVE), "ranks 1, 2"),
        ((2, 2, 2, 2), (IN_COLLECTIVE,) * 4, "the ranks"),
    ],
)
def test_the_rank_that_the_others_wait_for_hangs(ranks, monkeypatch, stages, stacks, who):
    processes, watch = ranks
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    for process, count, stack in zip(processes, stages, stacks, strict=True):
        process.say(*(("stage", f"stage {place}") for place in range(count)))
        process.print(STACK.format(stack))
    heard(watch, sum(stages))
    found, _, (kind, _) = watch.failure(("timeout", "ran for longer than 1 s"))
    assert (found, kind) == (who, "timeout" if who == "the ranks" else "hung")


def test_a_rank_with_cuda_has_the_gpu_of_its_number_and_nccl(monkeypatch):
    class Stop(Exception):
        """The end of the test."""

    seen = {}

    def join(backend, **settings):
        seen["backend"] = backend
        raise Stop

    monkeypatch.setattr(torch.cuda, "set_device", lambda number: seen.update(device=number))
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(os, "environ", {})
    asked = job("fsdp", (4,))
    asked = replace(asked, run_config=replace(asked.run_config, device="cuda"))
    with pytest.raises(Stop):
        rank._run(asked, asked.launch, 3, lambda *message: None)
    assert seen == {"device": 3, "backend": "nccl"}
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "3", "4"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_fewer_gpus_than_ranks_are_a_wrong_question(monkeypatch):
    asked = job("fsdp", (4,))
    asked = replace(asked, run_config=replace(asked.run_config, device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(rank.SelectionError, match="finds 2 CUDA devices here, and each of 4 ranks needs one"):
        rank.run_rank(asked, lambda *message: None)
