"""`bertscope run`: the answer, the search, the errors, the sandbox; and scripts that were measured on an H200."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import bertscope
from bertscope.dry_run import script as script_module
from bertscope.dry_run.script import ScriptRun, fitted, with_value
from bertscope.errors import BertscopeError, SelectionError, SourceError, WorkerError
from bertscope.reports.run import RunReport
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.units import bytes_text
from tests.child_server import run_loaded
from tests.conftest import DATA, ROOT

SCRIPTS = DATA / "h200" / "scripts"
MEASURED = json.loads((SCRIPTS / "measured.json").read_text())["runs"]
SECONDS = str(10**6 + os.getpid())  # that processes of these tests sleep, and of no others
STEP = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step(batch):
    model(torch.randn(batch, 256).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


STARTING = script_module.starting


@pytest.fixture
def as_the_program_starts_it(monkeypatch):
    """Start runs as the program does; in other tests a server with torch loaded forks them."""
    monkeypatch.setattr(script_module, "starting", STARTING)


def needs_namespaces():
    """Skip where the system refuses namespaces to this user, as some containers do."""
    done = subprocess.run(["unshare", "-Urmn", "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("the system allows no namespaces here: unshare -Urmn true fails")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script in an empty folder, which becomes the working directory, and return its name."""
    needs_namespaces()
    monkeypatch.chdir(tmp_path)

    def write(code, name="train.py"):
        Path(name).write_text(code)
        return name

    return write


# ---- the answer ----


def test_the_report_has_the_peak_of_each_phase_with_the_line_of_the_script(cli, script, tmp_path):
    shutil.copy(DATA / "scripts" / "train.py", tmp_path)
    result = cli("run", "--gpu", "t4", "--format", "json", "--snapshot", "step.pickle", "train.py", "--epochs", "2")
    report = bertscope.from_json(result.out)
    assert (result.code, report.answer, report.arguments) == (0, "yes", ("--epochs", "2"))
    text = (tmp_path / "train.py").read_text().splitlines()
    for phase in report.phases:
        if phase.step == 3 and phase.phase in ("forward", "backward", "optimizer", "evaluation"):
            file, _, number = phase.line.partition(":")
            word = {"optimizer": "step()", "forward": "model(tokens", "evaluation": "model(tokens"}
            assert (file, word.get(phase.phase, "backward()") in text[int(number) - 1]) == ("train.py", True), phase
        assert phase.cost.peak.parts.total == phase.peak_bytes
        assert phase.left_bytes <= phase.peak_bytes
    assert sum(row.held_bytes for row in report.held) == report.peak.peak_bytes
    assert report.cost.max_allocated_bytes <= report.cost.reserved_bytes <= report.cost.gpu_bytes
    assert bertscope.from_json(report.to_json()) == report
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "step.pickle"}  # model.pt was discarded
    answer = cli("why", "step.pickle", "--format", "json")
    assert answer.code == 0
    assert answer.json["moment"] == "peak"


@pytest.mark.parametrize("collate", ["torch.stack", "lambda rows: torch.nn.Identity()(torch.stack(rows))"])
def test_outputs_that_an_evaluation_keeps_count_for_all_of_its_batches(script, collate):
    """Of 60 batches few run; each keeps 1 MiB, and the answer is about all of them.

    A module that transforms data on the CPU, with gradients on, is no model that trains.
    """
    keeping = f"""
kept, loader = [], torch.utils.data.DataLoader(torch.randn(480, 256), batch_size=8, collate_fn={collate})
for _ in range(3):
    step(8)
model.eval()
for batch in loader:
    with torch.no_grad():
        kept.append(model(batch.cuda()).repeat(128, 1))
"""
    report = bertscope.run(script(STEP + keeping), budget="60MiB", context=0)
    whole = report.evaluation
    assert (whole.batches, whole.added_bytes) == (60, 2**20)
    assert 60 * 2**20 < whole.highest_bytes < 68 * 2**20
    assert sum(row.held_bytes for row in report.held) == whole.highest_bytes
    assert report.held[0].line == "train.py:16"
    assert report.answer == "no"
    assert f"so its peak is {bytes_text(whole.highest_bytes)}" in " ".join(str(report).split())


def test_the_script_finds_the_card_that_was_asked_for_and_our_numbers(script):
    name = script(
        STEP
        + """
step(64)
assert torch.cuda.get_device_name() == "t4" and torch.cuda.get_device_capability() == (7, 5)
assert not torch.cuda.is_bf16_supported(including_emulation=False)
free, total = torch.cuda.mem_get_info()
assert 13 * 2**30 < free < total == torch.cuda.get_device_properties(0).total_memory
assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() <= torch.cuda.max_memory_reserved()
open("allocated", "w").write(str(torch.cuda.max_memory_allocated()))
assert open("allocated").read() == str(torch.cuda.max_memory_allocated())
raise SystemExit(0)
"""
    )
    report = bertscope.run(name, gpu="t4")
    assert (report.updates, report.answer) == (1, "yes")
    assert not Path("allocated").exists()


def test_what_scripts_ask_of_a_card_has_an_answer_and_threads_find_it(script):
    name = script(
        STEP
        + """
import os, pickle
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    moved = list(pool.map(lambda tensor: tensor.to("cuda"), [torch.ones(9) for _ in range(9)]))
assert all(tensor.is_cuda for tensor in moved)
again = pickle.loads(pickle.dumps(model))
assert isinstance(again[0].weight, torch.nn.Parameter) and again[0].weight.is_cuda
assert torch.equal(pickle.loads(pickle.dumps(torch.ones(2))), torch.ones(2))
with torch.inference_mode():
    assert not moved[0][None].is_inference() and (moved[0] + 1)[None].is_inference()
held = torch.cuda.memory_allocated()
torch.save({"saved": torch.ones(2**20).cuda()}, "saved.pt")
assert torch.cuda.memory_allocated() == held
assert torch.load("saved.pt", map_location="cpu", mmap=True)["saved"].shape == (2**20,)
assert torch.load("saved.pt")["saved"].is_cuda and torch.cuda.memory_allocated() == held
assert torch.allclose(torch.ones(2).cuda(), torch.ones(2).cuda())
assert not torch.equal(torch.zeros(2).cuda(), torch.ones(2).cuda())
losses = [model(torch.ones(2, 256).cuda()).mean() for _ in range(2)]
assert torch.tensor(losses).tolist() == [1.0, 1.0]
@torch.jit.script
def scaled(x: torch.Tensor): return x * torch.tensor(x.size(-1))
assert scaled(losses[0][None]).is_cuda
params = dict(model.named_parameters())
assert torch.func.grad(lambda w: torch.func.functional_call(model, w, (torch.ones(2, 256).cuda(),)).sum())(params)
assert torch.zeros(2).type(torch.cuda.HalfTensor).dtype == torch.float16 and torch.cuda.FloatTensor(2, 3).is_cuda
with torch.cuda.nvtx.range("step"):
    step(64)
torch.cuda.profiler.start()
torch.cuda.memory._record_memory_history()
torch.cuda.memory._dump_snapshot("snapshot.pickle")
torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
assert (torch.zeros(2, device="cuda:1") + torch.ones(2).cuda()).is_cuda
os.makedirs("triton/runtime")
open("triton/runtime/jit.py", "w").write("class JITFunction:\\n    def run(self, *_, grid, warmup): 1 / 0")
from triton.runtime.jit import JITFunction
written = torch.zeros(3, dtype=torch.long).cuda()
assert written.sum().item() == 0
JITFunction().run(written, grid=(1,), warmup=False)
written.sum().item()
"""
    )
    report = bertscope.run(name, gpu="t4")
    assert report.updates == 1
    assert {remark.split()[0] for remark in report.remarks} == {"a", "Triton's"}
    assert report.assumed == (f"train.py:{len(Path(name).read_text().splitlines())} (item)",)


def test_a_script_that_has_no_room_shows_what_it_needs_without_the_limit(script):
    report = bertscope.run(script(STEP + "step(2**20)"), budget="3GiB")
    unlimited = bertscope.run(script(STEP + "step(2**20)"))
    assert (report.answer, report.failure != "", report.peak.cost) == ("no", True, unlimited.peak.cost)
    assert "more than 3.00 GiB; out of memory at train.py:6." in " ".join(str(report).split())


def test_a_request_without_room_raises_the_error_at_the_line_of_the_script(cli, script):
    name = script(
        STEP
        + """
for batch in (2**20, 2**14):
    try:
        step(batch)
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate" in str(error)
        print("lowered")
step(2**20)
"""
    )
    result = cli("run", "--budget", "3GiB", "--format", "json", name)
    assert result.code == 1
    assert "lowered" in result.err
    report = bertscope.from_json(result.out)
    assert ": at train.py:6 it asks for 1.00 GiB more, with" in str(report)
    assert "of 3.00 GiB in use" in str(report)
    assert "temporaries" not in str(report)  # of a forward pass that did not end
    assert f"bertscope.run({report.script!r}, gpu=" in str(report)
    assert (report.answer, len(report.refused_bytes)) == ("no", 2)
    assert report.phases[-1].cost.reserved_bytes <= 3 * 2**30


def test_after_a_request_without_room_the_answer_is_about_what_the_script_did_then(script):
    """What the failed attempt held is no part of the peak, which is that of the smaller batch."""
    tried = "try:\n    step(2**20)\nexcept torch.OutOfMemoryError: pass\n"
    peaks = []
    for code in (tried, ""):
        report = bertscope.run(script(STEP + code + "step(2**14)\n"), budget="3GiB")
        peaks.append((report.answer, report.peak.peak_bytes, report.peak.cost.peak.parts, report.peak.phase))
    assert peaks[0] == peaks[1]


def test_an_operator_with_a_formula_takes_the_kernel_of_a_gpu(script):
    name = script("""
import torch
model = torch.nn.Sequential(torch.nn.RMSNorm(1024), torch.nn.SiLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(2048, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    peak = bertscope.run(name).peak
    # When silu_backward ends, its result, its input and the norm's input are alive; the norm saves its weight and a
    # number for each row, but no normalized input; then the loss and its gradient.
    assert (peak.peak_bytes, peak.cost.peak.operator) == (3 * 2**23 + 4 * 1024 + 4 * 2048 + 2 * 512, "silu_backward")


@pytest.mark.parametrize(("kind", "saved"), [("GRU", 5), ("LSTM", 4)])
def test_a_recurrent_layer_saves_the_gates_that_its_cell_saves_on_a_gpu(script, kind, saved):
    """Without cuDNN, whose reserve is a remark."""
    report = bertscope.run(
        script(f"""
import torch
model = torch.nn.{kind}(64, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(1, 2048, 64).cuda())[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    )
    largest = max(row.held_bytes // row.blocks for row in report.held if row.part == "activations")
    assert largest <= saved * 2048 * 512 * 4 <= report.peak.cost.peak.parts.activations
    assert ["cuDNN" in remark for remark in report.remarks] == [True]


def test_what_depends_on_values_takes_the_most(script):
    """No layer is dropped, a count of unknown booleans counts all, and a distribution takes unknown parameters."""
    code = """
class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.layerdrop = torch.nn.Linear(32, 32), 0.999
    def forward(self, x):
        return x if self.training and torch.rand([]) < self.layerdrop else self.layer(x)
out = Dropping().cuda()(torch.randn(4, 32).cuda())
assert out.grad_fn is not None
assert (out > 0).sum() == 128 and (out > 0).sum(1).max().item() == 32
assert torch.arange(128)[(out > 0).flatten().cpu()].tolist() == list(range(128))
torch.distributions.Normal(out, out.exp()).rsample().sum().backward()
step(4)
"""
    report = bertscope.run(script(STEP + code), timeout=300)
    assert any(remark.startswith("layerdrop") for remark in report.remarks)


def test_a_generation_ends_at_its_longest_length_though_no_token_is_known(script):
    code = """
tokens, unfinished = torch.ones(4, 1).long().cuda(), torch.ones(4).long().cuda()
while not unfinished.max() == 0:
    token = torch.rand(4, 999).cuda().argmax(-1)
    tokens = torch.cat([tokens, token[:, None]], 1)
    unfinished = unfinished & ~((token == 2) | torch.full((4,), tokens.shape[1] == 8, device="cuda"))
assert tokens.shape == (4, 8)
step(4)
"""
    report = bertscope.run(script(STEP + code), timeout=300)
    assert report.updates == 1
    assert report.assumed


def test_a_comparison_with_a_loss_is_named_and_its_float_is_one_for_everything_else(script):
    name = script("""
import json, torch
model = torch.nn.Linear(256, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
total, best = 0.0, float("inf")
for number in range(3):
    loss = model(torch.randn(8, 256).cuda()).pow(2).mean()
    loss.backward()
    optimizer.step()
    total += loss.item()
    assert json.dumps([total, f"{loss.item():.2f}"]) == f'[{number + 1}.0, "1.00"]'
    torch.save({"loss": total}, "best.pt")
    assert type(torch.load("best.pt", weights_only=True)["loss"]) is float
    if round(total / (number + 1), 4) < best:
        best = 0.5
""")
    assert bertscope.run(name).assumed == ("train.py:14 (lt)",)


def test_unknown_values_are_finite_and_masks_are_known(script):
    """So the checks of a Trainer, and that of nn.Transformer for a causal mask, are no doubt of the report."""
    code = """
out = model(torch.randn(4, 256).cuda())
loss, mask = out.mean(), torch.triu(torch.full((64, 64), float("-inf"), device="cuda"), 1)
assert not (loss.isnan() or loss.isinf() or out.isnan().any()) and loss.isfinite() and out.isfinite().all()
assert mask[0].isinf().sum() == 63
assert len(out.new_ones(4, 32)[torch.eye(4, 32).cuda() > 0]) == 4
assert not (mask == 0).all() and (mask == torch.full_like(mask, float("-inf")).triu(1)).all()
step(4)
"""
    assert bertscope.run(script(STEP + code), timeout=300).assumed == ()


def test_an_evaluation_after_all_epochs_is_reached(script):
    report = bertscope.run(script("""
import torch
model = torch.nn.Linear(64, 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(torch.zeros(80, 64), batch_size=8)
for _ in range(30):
    for x in loader:
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
with torch.no_grad():
    model.eval()(torch.zeros(1000, 64).cuda())
"""), timeout=300)  # fmt: skip
    assert (report.updates, report.peak.phase) == (6, "evaluation")


def test_a_trainer_ends_after_its_steps_and_the_script_goes_on_to_its_evaluation(script):
    """What fails after the last step, such as reading what was not saved, leaves the answer."""
    report = bertscope.run(script("""
import torch
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 512)
    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(out, labels), "logits": out}
rows = [{"x": torch.zeros(64), "labels": 1}] * 200
args = TrainingArguments("out", report_to="none", per_device_eval_batch_size=100, disable_tqdm=True)
trainer = Trainer(Model(), args, train_dataset=rows, eval_dataset=rows)
trainer.train()
trainer.evaluate()
open("out/checkpoint-500/trainer_state.json")
"""), timeout=300)  # fmt: skip
    assert (report.updates, report.peak.phase) == (3, "evaluation")
    assert "failed after its last step at train.py:16" in report.remarks[-1]


def test_what_a_loss_gets_from_a_model_is_an_activation_and_a_batch_made_on_the_gpu_an_input(script):
    code = """
criterion = torch.nn.MSELoss()
for _ in range(3):
    x = torch.randn(1024, 256, device="cuda")
    criterion(model(x).exp(), x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    report = bertscope.run(script(STEP + code), timeout=300)
    parts = {row.part for row in report.held if row.line == "train.py:13"}
    assert report.peak.phase == "backward"
    assert ("inputs" not in parts, "activations" in parts) == (True, True)
    assert [row.part for row in report.held if row.line == "train.py:12"] == ["inputs"]


def test_a_script_that_takes_batches_by_next_ends_after_its_steps(script):
    name = script(
        STEP
        + """
def forever():
    loader = iter(torch.utils.data.DataLoader(torch.zeros(99, 1)))
    while True:
        yield next(loader)
batches = forever()
while next(batches) is not None:
    step(4)
"""
    )
    assert bertscope.run(name).updates == 3


@pytest.mark.parametrize("name", ["site-packages/train.py", "link.py"])
def test_a_script_of_a_package_or_behind_a_link_has_its_lines_and_the_modules_next_to_it(script, name):
    Path("site-packages").mkdir()
    script(STEP, "site-packages/beside.py")
    script("from beside import step\nfor _ in range(3): step(4)\n", "site-packages/train.py")
    Path("link.py").symlink_to("site-packages/train.py")
    assert bertscope.run(name).peak.line == f"{Path(name).name}:2"


@pytest.mark.parametrize("before", ["", "first = optimizer\n"])
def test_an_optimizer_that_never_steps_does_not_count_the_steps(script, before):
    """An optimizer that the script replaces, and one whose `step` is never called, as in SAM."""
    name = script(f"{STEP}{before}optimizer = torch.optim.AdamW(model.parameters())\nfor _ in range(99): step(4)\n")
    assert bertscope.run(name).updates == 3


def test_the_largest_value_of_an_argument_fits_and_the_next_does_not(script):
    name = script(STEP + "import sys\nfor _ in range(3): step(2**17 * int(sys.argv[sys.argv.index('--batch') + 1]))\n")
    report = bertscope.run(name, ["--batch", "1"], budget="2GiB", context="100MiB", fit="batch=1..2")
    assert {row.value: row.answer for row in report.rows} == {1: "yes", 2: "no"}
    assert "no, out of memory at 1.25 GiB" in str(report)
    assert (report.largest, bertscope.from_json(report.to_json())) == (1, report)


def test_a_search_ends_at_an_argument_that_the_script_does_not_read(script):
    name = script(STEP + "for _ in range(3): step(4)\n")
    with pytest.raises(SelectionError, match="the same memory in every phase with batch 1 and 16; does it read"):
        bertscope.run(name, budget="8GiB", fit="batch=1..512")


def test_a_search_spells_an_argument_as_the_script_does(script):
    read = (
        "import argparse; a = argparse.ArgumentParser(); a.add_argument('--batch-size', type=int); n = a.parse_args()"
    )
    name = script(f"{STEP}{read}.batch_size\nfor _ in range(3): step(n)\n")
    assert bertscope.run(name, budget="8GiB", fit="batch_size=1..2").largest == 2


def costing(taken, budget):
    """A run of a script that takes these bytes by its last argument."""

    def run(asked):
        size = taken(int(asked.arguments[-1]))
        peak = PhasePeak(phase="forward", peak_bytes=size, path="", operator="", parts=Parts(activations=size))
        lacking = ByteRange(low_bytes=max(size - budget, 0), high_bytes=max(size - budget, 0))
        cost = StepCost(peak=peak, limit_bytes=budget, shortfall=lacking)
        return RunReport(script="", arguments=asked.arguments, gpu=None, budget_bytes=budget, updates=3,
                         phases=(), cost=cost)  # fmt: skip

    return run


@pytest.mark.parametrize("largest", [0, 1, 2, 37, 511, 512])
@pytest.mark.parametrize("granule", [1, 2**21])
def test_a_search_finds_the_largest_value_in_few_runs(largest, granule):
    """A script that takes 5 MB for each of its batch, in steps of the allocator; the budget ends after `largest`."""

    def taken(value):
        return -(-(10_000_000 + 5_000_000 * value) // granule) * granule

    runs = []
    run = costing(lambda value: runs.append(value) or taken(value), taken(largest))
    report = fitted(ScriptRun(script="train.py", arguments=("--batch", "1")), "batch=1..512", run, taken(largest))
    assert report.largest == largest
    assert len(runs) == len(set(runs)) <= 12


def test_a_function_that_a_package_compiles_and_nobody_calls_is_no_remark(script):
    code = "compiled = torch.compile(lambda x: x + 1)\ncompiled(torch.ones(1))\n"
    remarks = [bertscope.run(script(STEP + code[:end] + "step(4)")).remarks for end in (code.index("\n") + 1, None)]
    assert [any("compile" in remark for remark in known) for known in remarks] == [False, True]


def test_each_remark_of_a_run_is_a_sentence_and_names_in_code_keep_their_letters(script, cli):
    code = "import torch\ntorch.compile(torch.nn.Sequential(torch.nn.Conv1d(1, 4, 3), torch.nn.LSTM(6, 8)).cuda())"
    shown = cli("run", "--gpu", "t4", "-v", script(f"{code}(torch.ones(1, 8).cuda())[0].sum().backward()")).out
    remarks = [line.strip() for line in shown.splitlines() if re.search("cuDNN|compile ran", line)]
    assert len(remarks) == 3
    assert all(remark.endswith(".") and (remark[0].isupper() or "." in remark.split()[0]) for remark in remarks)


@pytest.mark.parametrize(("largest", "highest"), [(64, 64), (0, 3)])
def test_a_search_over_an_argument_that_saves_memory_says_that_the_peak_falls(largest, highest):
    """A script that takes 80 MB by its number of chunks, with 10 MB."""
    report = fitted(ScriptRun(script="train.py"), f"chunks=1..{highest}", costing(lambda n: 80 // n, 10), 10)
    assert report.largest == largest
    assert ["does not grow evenly" in remark for remark in report.remarks] == [True] * bool(largest)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["--b", "1"], ["--b", "8"]), (["--b=1", "x"], ["--b=8", "x"]), (["b=1"], ["b=8"]), (["x"], ["x", "--b", "8"]),
     (["-b", "1", "--bb", "2"], ["-b", "8", "--bb", "2"])],
)  # fmt: skip
def test_a_value_is_put_where_the_argument_stands(given, expected):
    assert with_value(given, "b", 8) == expected


@pytest.mark.usefixtures("as_the_program_starts_it")  # the server of the tests has loaded the library that asks the hub
@pytest.mark.parametrize("name", ["FacebookAI/roberta-base", "nobody/model"])
def test_a_name_of_a_preset_is_a_model_without_its_weights_and_any_other_names_the_network(cli, script, name):
    pytest.importorskip("transformers")
    code = (
        f"import torch\nfrom transformers import AutoConfig, AutoModel\nconfig = AutoConfig.from_pretrained({name!r})\n"
    )
    train = f"""
config.num_hidden_layers = 1
model = AutoModel.from_pretrained({name!r}, config=config).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 8, dtype=torch.long).cuda())[0].sum().backward()
optimizer.step()
"""
    done = cli("run", script(code + train), "-v")
    if name == "nobody/model":
        assert done.code == 2
        assert "train.py:3" in done.err
        assert done.err.rstrip().endswith("with --network")
    else:
        assert done.code == 0, done.err
        assert f"{name} was made from its preset" in " ".join(done.out.split())


# ---- what is refused ----


FAULTS = {  # what a run tells: whose fault it is, and the line
    "raise ValueError('no data')": ("failed", "train.py:1"),
    "def f(:": ("failed", "train.py:1"),
    "raise MemoryError": ("failed", "train.py:1"),
    "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E": ("failed", "train.py:3"),
    "class E(Exception):\n    def __str__(self): raise E\nraise SystemExit(E())": ("failed", ""),
    "class M(type): __name__ = property(lambda _: 1 / 0)\nclass E(Exception, metaclass=M): pass\nraise E": (
        "failed", "train.py:3",
    ),
    "import sys\nsys.exit(3)": ("failed", ""),
    STEP + "torch.nn.Embedding(9, 4, sparse=True).cuda()(torch.ones(2).long().cuda()).sum().backward()": (
        "refused", "train.py:9",
    ),
    STEP + "import threading as t\nrun = t.Thread(target=step, args=(4,))\nrun.start()\nrun.join()": ("refused", ""),
    STEP + "torch.jit.script(torch.nn.Linear(2, 2)).cuda()": ("refused", "train.py:9"),
    STEP + "torch.multiprocessing.spawn(print, nprocs=2)": ("refused", "train.py:9"),
    STEP + "model.share_memory()": ("refused", "train.py:9"),
    STEP + "from torch.distributed.launcher.api import elastic_launch\nelastic_launch(None, None)()": (
        "refused", "train.py:10",
    ),
    STEP + "op = torch.library.custom_op('my::op', lambda x: x, mutates_args=(), schema='(Tensor x) -> Tensor')\n"
    "op(model[0].weight)": ("refused", "train.py:10"),
    STEP + "import bertscope\nbertscope.run(lambda: step(4))": ("failed", "train.py:10"),
    STEP + "torch.cuda.CUDAGraph()": ("refused", "train.py:9"),
    STEP + "from torch.utils.cpp_extension import load_inline\nload_inline('x', '', cuda_sources=[' '])": (
        "refused", "train.py:10",
    ),
    STEP + "torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged, device='cuda') + 1": (
        "refused", "train.py:9",
    ),
    STEP + "from torch.nn.attention.flex_attention import flex_attention\nx = torch.ones(1, 1, 128, 16).cuda()\n"
    "flex_attention(x, x, x)": ("refused", "train.py:11"),
    STEP + "step(4)": ("report", None),
}  # fmt: skip


def test_a_script_that_fails_is_named_with_its_line_and_whose_fault_it_is(tmp_path):
    (tmp_path / "faults.json").write_text(json.dumps([*FAULTS]))
    code = """
import json
from pathlib import Path
from bertscope.dry_run.child import _run_file, record
from bertscope.dry_run.script import ScriptRun
from bertscope.errors import BertscopeError
found = []
for code in json.loads(Path("faults.json").read_text()):
    Path("train.py").write_text(code)
    asked = ScriptRun(script="train.py", folder=str(Path.cwd()))
    try:
        record(asked, lambda: _run_file(asked))
        found.append(("report", None))
    except BertscopeError as error:
        found.append(("refused" if error.exit_code == 3 else "failed", error.where))
print(json.dumps(found))
"""
    done = run_loaded(code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [list(wanted) for wanted in FAULTS.values()]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [("print(1)", SelectionError, "nothing on a CUDA device"), ("raise SystemExit('no')", BertscopeError, "no"),
     ("import os\nos._exit(0)", WorkerError, "exit code 0"),
     ("import builtins\nbuiltins.len = builtins.open = None\nraise ValueError('mine')", BertscopeError,
      "train.py:3: ValueError: mine"),
     ("import json, os\nos._exit = None\njson.JSONEncoder.encode = None\nraise ValueError", WorkerError,
      "no report could be made"),
     ("import ctypes\nctypes.string_at(0)", WorkerError, "was killed by SIGSEGV"),
     ("import subprocess\nfor _ in range(9): subprocess.Popen(['sleep', '1000'])\nwhile True: pass", WorkerError,
      "longer than 5 s")],
)  # fmt: skip
def test_a_script_without_a_report_is_one_line_with_its_exit_code(script, code, kind, words, capsys):
    before = set(children())
    with pytest.raises(kind, match=words) as failed:
        bertscope.run(script(code.replace("1000", SECONDS)), timeout=5 if "while" in code else 100)
    assert failed.value.exit_code == (3 if kind is WorkerError else 2)
    assert "\n" not in str(failed.value)
    assert "Traceback" not in capsys.readouterr().err
    assert set(children()) <= before


@pytest.mark.parametrize(
    ("code", "exit_code", "answer"),
    [("import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()", 3, "no model and no optimizer step ran on the GPU"),
     ("model.eval()(torch.randn(4, 256).cuda())", 0, "; no optimizer step ran."),
     ("import os\nif os.fork() == 0:\n    raise SystemExit(0)\nos.wait()\nstep(4)", 0, "Fits on t4")],
)  # fmt: skip
def test_without_an_optimizer_step_in_its_own_process_the_answer_says_so(script, cli, code, exit_code, answer):
    done = cli("run", "--gpu", "t4", "--snapshot", "step.pickle", script(STEP + code))
    assert (Path("step.pickle").exists(), "did not write step.pickle" in done.err) == (not exit_code, bool(exit_code))
    assert (done.code, answer in done.out, "Fits on t4" in done.out) == (exit_code, True, exit_code == 0), done.out


def test_a_wrong_question_runs_nothing(tmp_path):
    with pytest.raises(SourceError, match="no script"):
        bertscope.run(tmp_path / "none.py")
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    for words in ({"fit": "batch"}, {"fit": "b=4..2", "gpu": "t4"}, {"fit": "b=1..2"}, {"context": "1GiB"},
                  {"gpu": "t4", "budget": "1GiB"}, {"gpu": "t5"}, {"batch": 8}, {"budget": "1MiB"}):  # fmt: skip
        with pytest.raises(BertscopeError):
            bertscope.run(tmp_path / "train.py", **words)
    assert not (tmp_path / "ran").exists()


# ---- the sandbox ----

HOSTILE = (
    STEP
    + """
import ctypes, os, shutil, signal, socket, subprocess, sys
here = os.getcwd()
def tried(act):
    try:
        act()
    except BaseException as error:
        print(type(error).__name__)
for act in (
    lambda: open("written", "w"), lambda: open(os.path.expanduser("~/.bertscope-hostile"), "w"),
    lambda: open("/etc/bertscope-hostile", "w"), lambda: open("/dev/shm/bertscope-hostile", "w"),
    lambda: os.remove("kept"), lambda: os.chmod(here, 0o777), lambda: os.symlink("kept", "link"),
    lambda: open("/proc/sys/kernel/core_pattern", "w").write("x"),
    lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True), lambda: os.kill(1, signal.SIGKILL),
    lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2).sendall(b"out"),
    lambda: os.write(2, b"y" * 2**25),  # one line, which is read in blocks
    lambda: ctypes.CDLL(None).umount2(b"/", 2), lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
):
    tried(act)
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "1000"])
for number in range(3, 50):
    tried(lambda: os.fstat(number))
shutil.rmtree(here, ignore_errors=True)
while True:
    tried(lambda: step(4))
"""
)


@pytest.mark.usefixtures("as_the_program_starts_it")
def test_a_hostile_script_leaves_nothing_behind(script, tmp_path):
    name = script(HOSTILE.replace("1000", SECONDS))
    Path("kept").write_text("mine")
    mode = tmp_path.stat().st_mode
    before = set(children())
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        report = bertscope.run(name, [str(server.getsockname()[1])], timeout=300)
        with pytest.raises(TimeoutError):
            server.accept()
    assert report.updates == 3
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "kept"}
    assert Path("kept").read_text() == "mine"
    assert tmp_path.stat().st_mode == mode
    places = ("~/.bertscope-hostile", "/etc/bertscope-hostile", "/dev/shm/bertscope-hostile")
    assert not any(os.path.exists(os.path.expanduser(place)) for place in places)
    assert set(children()) <= before


def test_a_script_has_no_socket_to_the_host(script, tmp_path):
    name = script(
        STEP
        + """
import socket, sys
for kind, address in ((socket.AF_UNIX, sys.argv[1]), (socket.AF_UNIX, "\\0" + sys.argv[2]), (socket.AF_VSOCK, (2, 1))):
    try:
        socket.socket(kind).connect(address)
    except (ConnectionRefusedError, PermissionError):
        step(4)
import ctypes, os
keyctl = 250 if os.uname().machine == "x86_64" else 219
if ctypes.CDLL(None).syscall(keyctl, 0, -3, 1) == -1:  # the key ring of the host's session
    step(4)
"""
    )
    paths = str(tmp_path / "host"), f"\0{tmp_path}"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        for listener, path in zip((named, abstract), paths, strict=True):
            listener.bind(path)
            listener.listen()
        assert bertscope.run(name, [paths[0], paths[1][1:]], steps=4).updates == 4


def children():
    """The command lines of processes that sleep as long as the hostile script asks for."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", SECONDS.encode()]:
            yield folder.name


@pytest.mark.usefixtures("as_the_program_starts_it")
def test_a_line_that_a_script_writes_is_not_taken_for_its_report(script):
    path = SCRIPTS / MEASURED["own"]["script"]
    report = bertscope.run(path, MEASURED["own"]["arguments"], steps=1)
    line = json.dumps(["report", [report, None]], default=vars)
    name = script(
        f"""
import os
for number in range(3, 60):
    try:
        os.write(number, {line.encode()!r} + b"\\n")
    except OSError:
        pass
"""
    )
    with pytest.raises(WorkerError, match="its parent expected a message"):
        bertscope.run(name)


def started(setting):
    """The command of a server of runs that has this setting of the sandbox."""
    code = f"from bertscope.dry_run import sandbox\n{setting}\nfrom bertscope.processes.child import serve\nserve()"
    return lambda entry: [sys.executable, "-c", code]


@pytest.mark.usefixtures("as_the_program_starts_it")
def test_a_script_with_too_many_processes_ends_with_all_of_them(script, monkeypatch):
    traced = "import ctypes, os, time\nctypes.CDLL(None).ptrace(16, 1, 0, 0)"  # would stop the first process
    code = f"{traced}\nwhile True:\n    if os.fork() == 0: os.fork() and os._exit(0); time.sleep(1000)"
    name = script(code)  # each leaves a process that nobody but the first one waits for
    command = started("sandbox._MOST_PROCESSES = 9")
    monkeypatch.setattr("bertscope.processes.child.child_command", command)
    with pytest.raises(WorkerError, match="started more than 9 processes"):
        bertscope.run(name)


@pytest.mark.usefixtures("as_the_program_starts_it")
def test_a_file_that_another_process_removes_meanwhile_does_not_end_the_run(script, monkeypatch):
    """A mount in the folder for temporary files makes the sandbox cover all that is in it one by one."""
    removing = """
import os
mount = sandbox._mount
def removed(source, target, *rest, **settings):
    path = "/" + target.partition("/sandbox/root/")[2]
    if path.endswith("-vanishes") and os.path.exists(path):
        (os.rmdir if os.path.isdir(path) else os.remove)(path)
    mount(source, target, *rest, **settings)
sandbox._mount = removed
begin = sandbox._Cover.__init__
def with_mount(self, folder):
    begin(self, folder)
    self.mounts[folder] = "tmpfs"
sandbox._Cover.__init__ = with_mount
"""
    folder = tempfile.mkdtemp(suffix="-vanishes")
    file, path = tempfile.mkstemp(suffix="-vanishes")
    os.close(file)
    monkeypatch.setattr("bertscope.processes.child.child_command", started(removing))
    assert bertscope.run(script(STEP + "step(4)")).updates == 1
    assert not os.path.exists(folder)
    assert not os.path.exists(path)


@pytest.mark.usefixtures("as_the_program_starts_it")
def test_without_namespaces_the_run_is_refused_unless_it_is_asked_for(script, monkeypatch, tmp_path, cli):
    name = script(STEP + "torch.save(model.state_dict(), 'model.pt')\nfor _ in range(3): step(4)\n")
    lost = "def refused(*_, **__): raise OSError(1, 'no namespaces')\nsandbox.enter = refused"
    monkeypatch.setattr("bertscope.processes.child.child_command", started(lost))
    refused = cli("run", name)
    assert (refused.code, "--no-sandbox" in refused.err, refused.out) == (3, True, "")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)  # and a fork of the server runs
    done = cli("run", "--no-sandbox", "--format", "json", name)
    assert done.code == 0
    assert done.json["updates"] == 3
    assert not (tmp_path / "model.pt").exists()


# ---- a function, ranks, an H200 ----


def test_a_function_runs_in_this_process_and_leaves_it_as_it_was():
    code = """
import torch, bertscope
def train():
    model = torch.nn.Linear(256, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(9):
        model(torch.randn(64, 256).cuda()).sum().backward()
        optimizer.step()
import os
environment = dict(os.environ)
report = bertscope.run(train, gpu="t4")
assert dict(os.environ) == environment
assert (report.script, report.updates, report.answer) == ("train", 3, "yes"), report
assert not torch.cuda.is_available() and torch.inference_mode.__module__ == "torch.autograd.grad_mode"
weight = torch.ones(3, requires_grad=True)
(weight * 2).sum().backward()
try:
    bertscope.run(train, timeout=5)
except bertscope.BertscopeError as error:
    assert "timeout" in str(error)
"""
    done = run_loaded(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def as_rank(monkeypatch, rank, size):
    """Set what torchrun sets."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")


def test_a_batch_norm_over_ranks_saves_their_counts_too(script, monkeypatch):
    name = script("""
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(8, 3, 8, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    peaks = []
    for size in (1, 4):
        as_rank(monkeypatch, 0, size)
        peaks.append(bertscope.run(name).peak.peak_bytes)
    assert peaks[1] - peaks[0] == 512  # four numbers


def test_a_rank_of_several_holds_its_part_and_the_buckets(script, monkeypatch):
    code = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = nn.Linear(512, 512).to(device)
if {sharded}:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
else:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 512).to(device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert dist.get_world_size() == 4
gathered = [None] * 4
dist.all_gather_object(gathered, "own")
dist.broadcast_object_list(gathered)
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
assert gathered == ["own"] * 4
"""
    as_rank(monkeypatch, 2, 4)
    states = []
    for sharded in (False, True):
        report = bertscope.run(script(code.replace("{sharded}", str(sharded))))
        states.append(report.peak.cost.peak.parts.optimizer_state)
    params = 4 * (512 * 512 + 512)
    assert states[0] >= 2 * params
    assert 2 * params / 4 <= states[1] < 2 * params / 3


@pytest.mark.parametrize("name", ["own", "plain-fp16"])
def test_a_script_holds_what_it_held_on_an_h200_to_the_byte(name):
    needs_namespaces()
    run = MEASURED[name]
    report = bertscope.run(SCRIPTS / run["script"], run["arguments"], gpu="h200", steps=3)
    assert report.cost.reserved_bytes == run["reserved_bytes"]
    highest = max(peak for peak, _ in run["steps"])
    assert report.cost.max_allocated_bytes == pytest.approx(highest, abs=1024)


SHUFFLED = f"""{STEP}
import random
from itertools import count
random.seed(7)
for _ in count():
    step(random.choice([4, 4096, 16384]))
"""


def test_with_several_seeds_a_script_draws_other_batches_and_each_is_replayed(script):
    report = bertscope.run(script(SHUFFLED), steps=6, seeds=4)
    assert report.histories[0].reserved_bytes == report.cost.reserved_bytes
    assert len(report.histories) == 4
    assert len({history.grown_step for history in report.histories}) > 1
    assert all(history.emptied_bytes <= history.reserved_bytes for history in report.histories)
    assert bertscope.run(script(SHUFFLED), steps=6).histories == ()


def test_a_search_has_one_seed(script):
    with pytest.raises(SelectionError, match="one seed"):
        bertscope.run(script(SHUFFLED), gpu="t4", fit="n=1..2", seeds=2)
