"""The recorder's log of a run on fake tensors is that of the real run, row by row."""

import json

import pytest

from tests.child_server import run_loaded
from tests.conftest import ROOT

LOGGED = """
import json, torch
from bertscope.memory.kernels import cpu_scratch
from bertscope.tracing.record import Device, Recorder, SeenTensor
from tests.dry_run.cpu_device import installed_cpu
from tests.dry_run.programs import PROGRAMS
class Cpu(Device):
    def scratch(self, operator, args):
        return cpu_scratch(operator, args)
def shapes(value):
    if isinstance(value, SeenTensor):
        return [value.shape]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [shape for item in inner for shape in shapes(item)]
def rows(recorder):
    log = recorder.log
    for number, call in enumerate(log.calls):
        is_counter = call.position.phase == "optimizer" and not any(shapes(call.args))  # on the CPU beside a card
        if call.position.phase in ("forward", "backward", "optimizer") and not is_counter:
            blocks = [(b.size_bytes, b.shape, b.dtype, b.owner) for b in log.blocks if b.call == number]
            yield log.operator(number), call.position, call.line.rpartition("/")[2], blocks
found = {"fake": {}, "live": {}}  # the card goes before the first backward pass of a process
torch.set_num_threads(1)
for kind in found:
    for name in ("plain", "recomputed", "recomputed_reentrant", "accumulated_and_clipped", "own_function"):
        torch.manual_seed(0)
        if kind == "live":
            recorder = Recorder(Cpu(), keeps_args=True)
            with recorder.watching():
                PROGRAMS[name]()
        else:
            with installed_cpu(name, steps=9) as here:
                recorder = here.recorder
                recorder.keeps_args = True
                PROGRAMS[name]()
        recorder.close()
        found[kind][name] = list(rows(recorder))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def logs():
    done = run_loaded(LOGGED, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", ["plain", "recomputed", "recomputed_reentrant", "accumulated_and_clipped", "own_function"]
)
def test_the_log_of_a_fake_run_is_that_of_the_real_run_row_by_row(logs, name):
    live, fake = logs["live"][name], logs["fake"][name]
    assert len(live) == len(fake) > 30
    for real, ours in zip(live, fake, strict=True):
        assert ours == real


def test_the_rows_of_a_step_can_be_read(logs):
    rows = [(name, place[1]) for name, place, *_ in logs["live"]["own_function"] if place[0] == 1]
    assert rows[:3] == [("t", "forward"), ("addmm", "forward"), ("mul", "forward")]
    assert ("addmm", "backward") not in rows
    assert ("mm", "backward") in rows
