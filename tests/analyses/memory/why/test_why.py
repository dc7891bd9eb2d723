"""`bertscope why`: real files of torch, the command, frames as published snapshots have them, published messages."""

from __future__ import annotations

import json

import pytest
import torch

import bertscope
from bertscope.analyses.memory.why.messages import message_report
from bertscope.analyses.memory.why.stacks import NO_STACK, stack_kind
from bertscope.errors import SelectionError, SourceError
from bertscope.units import parse_bytes
from tests.analyses.memory.why.recording import GIB, Loop, Recording, documented, forward, frame, load, optimizer, own
from tests.analyses.memory.why.test_faults import explained
from tests.conftest import OOM


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(documented())
    return path


def test_torchs_own_viewer_reads_the_snapshots_of_these_tests():
    from torch.cuda._memory_viz import segsum, trace

    card = Recording()
    Loop(card).train(2)
    assert "segments: " in segsum(card.data())
    shown = trace(card.data())
    assert f"{len(card.events)} entries" in shown
    assert shown.count("free completed") == sum(event["action"] == "free_completed" for event in card.events)


@pytest.mark.parametrize("suffix", ["json", "raw.json.gz"])
def test_a_timeline_of_torchs_profiler_is_refused_with_the_kinds_that_are_read(cli, tmp_path, suffix):
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
        torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    profiler.export_memory_timeline(str(tmp_path / f"timeline.{suffix}"), device="cpu")
    result = cli("why", tmp_path / f"timeline.{suffix}")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "such as a memory timeline of torch's profiler; 'why' reads a snapshot that torch" in result.err


def test_a_log_that_begins_like_a_timeline_is_read(tmp_path):
    (tmp_path / "log").write_text(f"[[0.5 0.25]]\n{OOM}")
    assert bertscope.why(tmp_path / "log").tried_bytes == 3 * GIB


def test_a_snapshot_of_estimate_has_the_parts_of_the_estimate(tmp_path, cli):
    path = tmp_path / "own.pickle"
    run = ("bert-tiny", "--batch", "8", "--device", "cuda")
    peak = max(cli("estimate", *run, "--snapshot", path, "--format", "json").json["variants"][0]["estimated"]["phases"],
               key=lambda phase: phase["peak_bytes"])  # fmt: skip
    data = cli("why", path, *run, "--format", "json").json
    for part in data["parts"]:  # sizes of the file are not rounded up to the allocator's 512 bytes
        assert part["held_bytes"] <= part["estimated_bytes"] <= part["held_bytes"] + 512 * part["blocks"]
    assert sum(part["estimated_bytes"] for part in data["parts"]) == peak["peak_bytes"]


def test_the_answer_names_the_fault_first_and_the_estimate_stands_next_to_it(cli, snapshot, tmp_path):
    result = cli("why", snapshot, "bert-tiny", "--plot", tmp_path / "history.svg")
    assert result.code == 0
    assert result.out.startswith("out of memory: a request of 4.00 MiB failed in a forward pass at train.py:31 (train)")
    assert "graphs of 4 earlier forward passes hold 252.00 MiB" in result.out.partition("\n\n")[0].replace("\n", " ")
    assert "estimate" in result.out
    picture = (tmp_path / "history.svg").read_text()
    assert picture.startswith("<svg") and "activations" in picture  # noqa: PT018 one picture


def test_the_rows_are_the_blocks_of_a_line_and_a_module(cli, snapshot):
    rows = cli("why", snapshot, "--format", "json").json["rows"]
    (row,) = (row for row in rows if row["module"] == "modeling_bert.py:431 (forward)")
    # Five passes of four layers, each with 8 x 128 x 1,024 activations in fp32.
    assert (row["part"], row["line"], row["blocks"], row["passes"]) == ("activations", "train.py:31 (train)", 20, 5)
    assert row["held_bytes"] == 20 * 4 * 8 * 128 * 1024
    assert cli("why", snapshot, "--format", "csv").out.startswith("line,module,part,blocks,passes,held_bytes")


def test_a_report_is_read_back(snapshot):
    report = bertscope.why(snapshot, "bert-tiny", batch=8, gpu="t4")
    assert bertscope.from_json(report.to_json()) == report


def test_another_process_is_what_the_card_has_and_this_process_does_not(tmp_path):
    card = Recording()
    Loop(card)
    card.oom(40 * 2**20, forward(431, own(31)), device_free=GIB)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(card.pickled())
    report = bertscope.why(path, "bert-tiny", gpu="t4")
    t4 = bertscope.estimate("bert-tiny", gpu="t4").card
    reserved = card.allocator.reserved_bytes
    assert report.other_bytes == t4.memory_bytes - GIB - reserved - t4.context_high_bytes
    assert "why_other" in [finding.key for finding in report.findings]


def test_a_message_with_a_model_says_which_batches_fit(tmp_path):
    path = tmp_path / "oom.log"
    path.write_text(
        "CUDA out of memory. Tried to allocate 514.00 MiB (GPU 0; 2.00 GiB total capacity; 1.40 GiB already allocated; "
        "106.81 MiB free; 1.50 GiB reserved in total by PyTorch)"
    )
    report = bertscope.why(path, "bert-tiny", batch=64, checkpointing="none", optimizer="sgd")
    found = {finding.values["checkpointing"]: finding.values["batch"]
             for finding in report.findings if finding.key == "why_fits"}  # fmt: skip
    fit = bertscope.fit("bert-tiny", 2 * GIB, device="cuda", seq=128, precision="fp32", checkpointing=["none", "full"],
                        optimizer="sgd")  # fmt: skip
    assert found == {row.checkpointing: row.batch for row in fit.rows}


def test_settings_without_a_model_are_refused(snapshot):
    with pytest.raises(SelectionError, match="name it after FILE"):
        bertscope.why(snapshot, batch=8)


def test_standard_input_is_a_text(cli, monkeypatch, tmp_path):
    (tmp_path / "log").write_text(OOM)
    with (tmp_path / "log").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert cli("why", "-", "--format", "json").json["tried_bytes"] == 3 * GIB


def test_the_bare_list_of_torchs_memory_snapshot_is_read(tmp_path):
    import pickle

    card = Recording()
    loop = Loop(card)
    path = tmp_path / "segments.pickle"
    path.write_bytes(pickle.dumps(card.segments()))
    report = bertscope.why(path)
    assert (report.moment, report.allocated_bytes) == ("end", sum(loop.sizes))
    assert json.loads(report.to_json())["parts"][0]["part"] == "parameters"


NATIVE = [
    frame("??", 0, "torch::unwind::unwind()"), frame("RegisterCUDA.cpp", 0, "at::wrapper_CUDA_div_Tensor"),
    frame("/conda/python-3.12.3/Objects/descrobject.c", 365, "method_vectorcall_VARARGS_KEYWORDS"),
]  # fmt: skip
START = [frame("/conda/python-3.12.3/Python/pythonrun.c", 1722, "run_eval_code_obj"), frame("??", 0, "_start")]


def test_a_line_is_the_users_between_frames_of_c():
    own_layer = [frame("/home/me/rmsnorm.py", 22, "forward"), frame("/home/me/block.py", 26, "forward")]
    found = stack_kind([*NATIVE, *own_layer, *START, *own(140, "run")])
    assert (found.phase, found.line, found.module) == ("forward", "rmsnorm.py:22 (forward)", "block.py:26 (forward)")
    assert (found.caller, found.loop) == ("train.py:140 (run)", "/home/me/project/train.py:run")
    assert found.marks == frozenset()  # run_eval_code_obj is no evaluation


def test_a_thread_of_autograd_is_the_backward_pass():
    engine = frame("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)")
    assert stack_kind([*NATIVE, engine, frame("thread48.o", 0, "execute_native_thread_routine")]).phase == "backward"


@pytest.mark.parametrize(
    ("frames", "phase", "part"),
    [
        (load(own(12)), "load", "parameters"), (optimizer("_init_group", own(34)), "optimizer", "optimizer_state"),
        (optimizer("_multi_tensor_adamw", own(34)), "optimizer", ""), (forward(431, own(31)), "forward", ""),
        (own(33), "user", "tensors"),
    ],
)  # fmt: skip
def test_the_frames_tell_phase_and_part(frames, phase, part):
    assert (stack_kind(frames).phase, stack_kind(frames).part) == (phase, part)


@pytest.mark.parametrize("frames", [None, [], 7, "x", {}])
def test_what_is_no_stack_is_none(frames):
    assert stack_kind(frames) == NO_STACK


def test_two_moments_at_two_lines_of_an_own_optimizer_are_one_state():
    card = Recording()
    for line in (82, 84):
        step = [frame("/home/me/my/optimizers.py", line, "step"), *optimizer("", own(34))[1:]]
        for _ in range(40):
            card.alloc(2**20, step)
    assert [finding.key for finding in explained(card).findings] == ["why_optimizer"]


def old(tried, total, allocated, free, reserved, *, word="reserved in total by PyTorch", device="CUDA") -> str:
    """A message of torch 1.x and 2.0."""
    return (
        f"RuntimeError: {device} out of memory. Tried to allocate {tried} (GPU 0; {total} total capacity; {allocated} "
        f"already allocated; {free} free; {reserved} {word})"
    )


def new(
    tried, total, free, allocated, unallocated, *, own="", device="CUDA", word="capacity", limit="", pools=""
) -> str:
    """A message of torch 2.1 and later; 2.1 and 2.2 write `capacty`."""
    return (
        f"torch.OutOfMemoryError: {device} out of memory. Tried to allocate {tried}. GPU 0 has a total {word} of "
        f"{total} of which {free} is free. {own}{limit}Of the allocated memory {allocated} is allocated by "
        f"PyTorch, {pools}and {unallocated} is reserved by PyTorch but unallocated. If reserved but "
        f"unallocated memory is large try setting PYTORCH_{device}_ALLOC_CONF=expandable_segments:True."
    )


def process(size: str) -> str:
    return f"Including non-PyTorch memory, this process has {size} memory in use. "


PUBLISHED = {
    # torch 1.0 to 1.3: "cached" is what is not allocated
    "pytorch#16417": (old("12.50 MiB", "10.92 GiB", "8.57 MiB", "9.28 GiB", "4.68 MiB", word="cached"), "free"),
    "pytorch/examples#621": (
        old("26.00 MiB", "1024.00 MiB", "435.61 MiB", "24.17 MiB", "26.39 MiB", word="cached"), "fragmentation"),
    "StructureFlow#35": (old("8.13 GiB", "10.76 GiB", "643.57 MiB", "8.20 GiB", "32.43 MiB", word="cached"), "request"),
    "bert_ner#10": (old("85.00 MiB", "4.00 GiB", "3.04 GiB", "9.21 MiB", "15.31 MiB", word="cached"), "full"),
    "pytorch-gpu-benchmark#1": (
        old("32.00 MiB", "7.79 GiB", "6.64 GiB", "21.00 MiB", "150.86 MiB", word="cached"), "fragmentation"),
    # torch 1.4 to 2.0
    "MADDoG#11": (old("2.87 GiB", "14.76 GiB", "8.77 GiB", "19.75 MiB", "13.71 GiB"), "fragmentation"),
    "vdsr_pytorch#2": (old("512.00 MiB", "15.90 GiB", "13.13 GiB", "415.88 MiB", "14.80 GiB"), "fragmentation"),
    "indonlu#35": (old("120.00 MiB", "31.75 GiB", "30.32 GiB", "9.50 MiB", "30.42 GiB"), "full"),
    "ml_things#4": (old("514.00 MiB", "15.75 GiB", "14.14 GiB", "106.81 MiB", "14.32 GiB"), "full"),
    "ResidualMaskingNetwork#15": (old("36.00 MiB", "10.76 GiB", "996.23 MiB", "8.81 MiB", "1010.00 MiB"), "other"),
    "vllm#783": (old("1.63 GiB", "44.56 GiB", "27.91 GiB", "565.31 MiB", "27.93 GiB"), "other"),
    "pytorch#59778": (old("2.26 GiB", "6.00 GiB", "781.59 MiB", "3.03 GiB", "1.24 GiB"), "free"),
    "bitsandbytes#758": (old("1024.00 MiB", "8.00 GiB", "12.19 GiB", "0 bytes", "12.68 GiB"), "shared"),
    # torch 2.1 and later
    "lerf#73": (new("3.00 GiB", "23.65 GiB", "1.66 GiB", "12.09 GiB", "4.84 GiB", own=process("20.81 GiB"),
                    word="capacty"), "fragmentation"),
    "NeuroLens#2": (new("55.57 GiB", "12.00 GiB", "9.02 GiB", "984.52 MiB", "463.48 MiB", word="capacty"), "request"),
    "GenerateU#10": (new("496.00 MiB", "14.75 GiB", "235.06 MiB", "14.06 GiB", "330.42 MiB", word="capacty",
                         own="Process 20398 has 14.52 GiB memory in use. "), "full"),
    "vllm#12529": (new("1.16 GiB", "7.75 GiB", "1.17 GiB", "4.81 GiB", "18.97 MiB", own=process("5.02 GiB")), "other"),
    "vss-engine": (new("136.00 MiB", "14.56 GiB", "58.38 MiB", "12.72 GiB", "69.61 MiB",
                       own="Process 244271 has 26.06 MiB memory in use. Process 238746 has 1.08 GiB memory in use. "
                       "Process 244515 has 468.00 MiB memory in use. " + process("12.90 GiB")), "other"),
    "TheRock#2118": (new("2.00 MiB", "255.98 GiB", "244.65 GiB", "1017.01 MiB", "54.99 MiB", device="HIP",
                         limit="1.05 GiB allowed; ",
                         pools="with 17.00 MiB allocated in private pools (e.g., HIP Graphs), "), "limit"),
    "ComfyUI#9529": (new("432.00 MiB", "15.92 GiB", "7.12 GiB", "8.08 GiB", "321.96 MiB", device="HIP"), "free"),
    "pytorch#175431": (new("2.00 MiB", "287.98 GiB", "203.49 GiB", "68.63 GiB", "14.93 GiB", device="HIP"),
                       "fragmentation"),
    "marimo-monai": (new("64.00 GiB", "24.00 GiB", "5.83 GiB", "16.85 GiB", "32.58 MiB"), "request"),
    # MPS
    "ComfyUI#7440": (
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). "
        "Tried to allocate 292.50 MiB on private pool.", "driver"),
    "clip-interrogator-ext#74": (
        "MPS backend out of memory (MPS allocated: 6.04 GB, other allocations: 1.04 GB, max allowed: 6.77 GB). Tried "
        "to allocate 459.07 MB on private pool.", "full"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_message_is_explained(name):
    text, key = PUBLISHED[name]
    report = message_report(text, "log")
    assert report.findings[0].key == f"why_{key}", report.findings
    assert all((report.tried_bytes, report.total_bytes, report.allocated_bytes))


def test_the_numbers_of_a_message_are_those_that_a_reader_sees():
    report = message_report(PUBLISHED["lerf#73"][0], "log")
    assert report.tried_bytes == 3 * GIB
    assert report.total_bytes == parse_bytes("23.65GiB")
    assert report.free_bytes == parse_bytes("1.66GiB")
    assert report.reserved_bytes == parse_bytes("12.09GiB") + parse_bytes("4.84GiB")
    assert report.unusable_bytes == parse_bytes("4.84GiB")
    assert report.other_bytes == pytest.approx((23.65 - 1.66 - 20.81) * GIB, abs=2)


def test_the_traceback_before_a_message_tells_phase_and_line():
    frames = [
        ("train.py", 80, "<module>"), ("train.py", 31, "train"),
        ("/v/lib/python3.11/site-packages/torch/_tensor.py", 626, "backward"),
        ("/v/lib/python3.11/site-packages/torch/autograd/graph.py", 823, "_engine_run_backward"),
    ]  # fmt: skip
    lines = "\n".join(f'  File "{file}", line {line}, in {name}\n    code' for file, line, name in frames)
    log = f"step 1\nTraceback (most recent call last):\n{lines}\n{PUBLISHED['indonlu#35'][0]}\nend\n"
    report = message_report(log, "log")
    assert (report.phase, report.line) == ("backward", "train.py:31 (train)")


def test_the_last_message_of_a_log_is_read():
    log = f"{PUBLISHED['lerf#73'][0]}\nanother run\n{PUBLISHED['indonlu#35'][0]}\n"
    assert message_report(log, "log").tried_bytes == 120 * 2**20


@pytest.mark.parametrize(
    "text", ["", "CUDA out of memory.", "Tried to allocate nothing", "RuntimeError: CUDA error: out of memory"]
)
def test_a_text_without_the_numbers_is_refused(text):
    with pytest.raises(SourceError, match="no out-of-memory message"):
        message_report(text, "log")
