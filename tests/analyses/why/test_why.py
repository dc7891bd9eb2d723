"""`bertscope why`: real files of torch, the command, frames as published snapshots have them, published messages."""

import gzip
import json
import pickle
import re
from dataclasses import replace

import pytest

import bertscope
from bertscope.analyses.why.findings import findings, message_report
from bertscope.analyses.why.history import NO_STACK, HeldBlock, History, StackKind, stack_kind
from bertscope.errors import SelectionError, SourceError
from bertscope.units import bytes_text, parse_bytes
from bertscope.views.step import LINE
from bertscope.views.views import display
from bertscope.views.why import finding_text
from tests.analyses.why.recording import GIB, Loop, Recording, documented, forward, frame, load, optimizer, own
from tests.analyses.why.test_faults import explained
from tests.conftest import OOM, data


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(documented())
    return path


def test_a_timeline_of_torchs_profiler_is_refused_with_the_kinds_that_are_read(cli, tmp_path):
    lists = json.dumps([[1, 2], [[0] * 9] * 2])  # as export_memory_timeline of torch 2.13 writes it
    (tmp_path / "timeline.json").write_text(lists)
    (tmp_path / "timeline.raw.json.gz").write_bytes(gzip.compress(lists.encode()))
    for path in tmp_path.iterdir():
        result = cli("why", path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "such as a memory timeline of torch's profiler; 'why' reads a snapshot that torch" in result.err


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
    assert result.out.startswith("The graphs of 4 earlier forward passes are still alive: 252.00 MiB.\nFix: Keep loss")
    assert "4.00 MiB failed in a forward pass at train.py:31 (train) on top of" in result.out
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


def test_another_process_is_what_the_card_has_and_this_process_does_not(tmp_path):
    card = Recording()
    Loop(card)
    card.oom(40 * 2**20, forward(431, own(31)), device_free=GIB)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(card.pickled())
    report = bertscope.why(path, "bert-tiny", gpu="t4")
    t4 = bertscope.estimate("bert-tiny", gpu="t4").gpu
    reserved = card.allocator.reserved_bytes
    assert report.other_bytes == t4.memory_bytes - GIB - reserved - t4.context_high_bytes
    assert "why_other" in [finding.key for finding in report.findings]


def test_a_message_with_a_model_says_which_batches_fit(tmp_path):
    path = tmp_path / "oom.log"
    path.write_text(
        "CUDA out of memory. Tried to allocate 514.00 MiB (GPU 0; 2.00 GiB total capacity; 1.40 GiB already allocated; "
        "106.81 MiB free; 1.50 GiB reserved in total by PyTorch)"
    )
    report = bertscope.why(path, "bert-tiny", batch=64, seq=128, checkpointing="none", optimizer="sgd")
    (found,) = (finding.values["batches"] for finding in report.findings if finding.key == "why_fits")
    fit = bertscope.fit("bert-tiny", 2 * GIB, device="cuda", seq=128, precision="fp32", checkpointing=["none", "full"],
                        optimizer="sgd")  # fmt: skip
    assert found == {row.checkpointing: row.batch for row in fit.rows}


def test_a_message_with_a_model_asks_for_the_step_that_failed(tmp_path):
    (tmp_path / "oom.log").write_text(OOM)
    for given in ({}, {"batch": 8}, {"seq": 128}):
        with pytest.raises(SelectionError, match="batch and seq"):
            bertscope.why(tmp_path / "oom.log", "bert-tiny", **given)


def test_that_the_step_is_too_large_comes_before_fragmentation(tmp_path):
    (tmp_path / "oom.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 500.00 "
        "MiB of which 5.00 MiB is free. Including non-PyTorch memory, this process has 495.00 MiB memory in use. Of "
        "the allocated memory 100.00 MiB is allocated by PyTorch, and 337.00 MiB is reserved by PyTorch but unallocated"
    )
    report = bertscope.why(tmp_path / "oom.log", "bert-tiny", batch=512, seq=512)
    first = report.findings[0]
    assert first.key == "why_fits"
    assert first.values["batches"]["none"] < 512
    assert first.values["size"] > 500 << 20
    assert "why_fragmentation" in {finding.key for finding in report.findings[1:]}


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_model_that_a_loop_keeps_is_counted(times):
    sizes = [4 << 20, *([(1 << 19) * (1 + number % 3) + 512 * number for number in range(40)])]
    kind = StackKind(part="parameters", lines=("search.py:12 (objective)",), phase="load")
    history = History([HeldBlock(size, kind) for size in sizes * times]).complete()
    (found,) = (reason for reason in findings(history) if reason.key == "why_models")
    assert (found.values["times"], found.values["size"]) == (times, (times - 1) * sum(sizes))


def test_the_diagnosis_is_the_same_if_equal_frames_are_one_object_or_several(snapshot, tmp_path):
    data = pickle.loads(snapshot.read_bytes())
    (tmp_path / "other.pickle").write_bytes(pickle.dumps(json.loads(json.dumps(data)), protocol=4))
    one, other = bertscope.why(snapshot), bertscope.why(tmp_path / "other.pickle")
    assert replace(other, name=one.name) == one


def test_standard_input_is_a_text_and_settings_need_a_model(cli, monkeypatch, tmp_path):
    (tmp_path / "log").write_text(f"[[0.5 0.25]]\n{OOM}")  # it begins like a timeline
    with (tmp_path / "log").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert cli("why", "-", "--format", "json").json["tried_bytes"] == 3 * GIB
    assert bertscope.why(tmp_path / "log").tried_bytes == 3 * GIB
    with pytest.raises(SelectionError, match="name the model after FILE"):
        bertscope.why(tmp_path / "log", batch=8)


def test_the_bare_list_of_torchs_memory_snapshot_is_read(tmp_path):
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


ENGINE = "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"


@pytest.mark.parametrize(
    ("frames", "phase", "part"),
    [
        (load(own(12)), "load", "parameters"), (optimizer("_init_group", own(34)), "optimizer", "optimizer_state"),
        (optimizer("_multi_tensor_adamw", own(34)), "optimizer", ""), (forward(431, own(31)), "forward", ""),
        (own(33), "user", "tensors"),
        ([*NATIVE, frame("??", 0, ENGINE), frame("thread48.o", 0, "execute_native_thread_routine")], "backward", ""),
    ],
)  # fmt: skip
def test_the_frames_tell_phase_and_part(frames, phase, part):
    assert (stack_kind(frames).phase, stack_kind(frames).part) == (phase, part)


def test_what_is_no_stack_is_none():
    assert [stack_kind(frames) for frames in (None, [], 7, "x", {})] == [NO_STACK] * 5


def test_two_moments_at_two_lines_of_an_own_optimizer_are_one_state():
    card = Recording()
    for line in (82, 84):
        step = [frame("/home/me/my/optimizers.py", line, "step"), *optimizer("", own(34))[1:]]
        for _ in range(40):
            card.alloc(2**20, step)
    assert [finding.key for finding in explained(card).findings] == ["why_optimizer"]


PUBLISHED = data("messages.yaml")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_message_is_explained_in_a_line_with_its_number(name):
    report = message_report(PUBLISHED[name]["text"], "log")
    for found in report.findings:
        sentence = finding_text(report, found)[0]
        assert len(sentence) <= LINE
        assert re.search(r"[0-9] [KMG]iB", sentence)
    assert display(report, "table").splitlines()[1].startswith("Fix: ")
    assert report.findings[0].key == f"why_{PUBLISHED[name]['finding']}", report.findings
    assert all((report.tried_bytes, report.total_bytes, report.allocated_bytes))


def test_the_numbers_of_a_message_are_those_that_a_reader_sees():
    report = message_report(PUBLISHED["lerf#73"]["text"], "log")
    assert report.tried_bytes == 3 * GIB
    assert report.total_bytes == parse_bytes("23.65GiB")
    assert report.free_bytes == parse_bytes("1.66GiB")
    assert report.reserved_bytes == parse_bytes("12.09GiB") + parse_bytes("4.84GiB")
    assert report.reserved_bytes - report.allocated_bytes == parse_bytes("4.84GiB")
    assert report.other_bytes == pytest.approx((23.65 - 1.66 - 20.81) * GIB, abs=2)


def test_the_traceback_before_a_message_tells_phase_and_line():
    frames = [
        ("train.py", 80, "<module>"), ("train.py", 31, "train"),
        ("/v/lib/python3.11/site-packages/torch/_tensor.py", 626, "backward"),
        ("/v/lib/python3.11/site-packages/torch/autograd/graph.py", 823, "_engine_run_backward"),
    ]  # fmt: skip
    lines = "\n".join(f'  File "{file}", line {line}, in {name}\n    code' for file, line, name in frames)
    log = f"step 1\nTraceback (most recent call last):\n{lines}\n{PUBLISHED['indonlu#35']['text']}\nend\n"
    report = message_report(log, "log")
    assert (report.phase, report.line) == ("backward", "train.py:31 (train)")


def test_the_last_message_of_a_log_is_read():
    log = f"{PUBLISHED['lerf#73']['text']}\nanother run\n{PUBLISHED['indonlu#35']['text']}\n"
    assert message_report(log, "log").tried_bytes == 120 * 2**20


@pytest.mark.parametrize(
    "text", ["", "CUDA out of memory.", "Tried to allocate nothing", "RuntimeError: CUDA error: out of memory"]
)
def test_a_text_without_the_numbers_is_refused(text):
    with pytest.raises(SourceError, match="no out-of-memory message"):
        message_report(text, "log")


@pytest.mark.parametrize(
    "end", ["", "Process 2 has 13.68 GiB memory in use.", "this process has 14.00 GiB memory in use."]
)
def test_a_message_that_is_cut_off_is_no_ground_for_a_diagnosis(end):
    """Without what PyTorch has allocated, all of the GPU would be held by other processes or libraries."""
    text = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 14 GiB of which 1 GiB is free. "
    with pytest.raises(SourceError, match="ends before the memory that PyTorch has allocated; give all of it"):
        message_report(text + end, "log")


def test_an_allocation_beyond_the_estimate_of_the_step_asks_for_the_settings_first(tmp_path):
    (tmp_path / "oom.log").write_text(PUBLISHED["GenerateU#10"]["text"])
    report = bertscope.why(tmp_path / "oom.log", "bert-tiny", batch=8, seq=128)
    assert [found.key for found in report.findings] == ["why_more", "why_fits"]
    first, fix, *_ = display(report, "table").splitlines()
    needed = sum(part.estimated_bytes or 0 for part in report.parts)
    assert first == f"These settings need {bytes_text(needed)} of tensors, but 14.06 GiB was allocated."
    assert fix.startswith("Fix: Are batch, seq, precision and architecture right?")


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 39.39 GiB "
    "of which 44.56 MiB is free. Process 7 has 39.34 GiB memory in use. Of the allocated memory 38.41 GiB is allocated "
    "by PyTorch, and 6.51 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("file", "function", "what", "remedy"),
    [
        ("/lib/python3.12/site-packages/torch/optim/adamw.py", "_init_group", "optimizer step", "LoRA"),
        ("/lib/python3.12/site-packages/transformers/trainer.py", "evaluation_loop", "evaluation", "logits"),
        ("/lib/python3.12/site-packages/torch/nn/modules/module.py", "_apply", "model", "16 bits"),
        ("/lib/python3.12/site-packages/torch/nn/modules/linear.py", "forward", "step", "batch size"),
    ],
)
def test_the_remedy_for_a_full_gpu_is_one_that_helps_where_it_failed(file, function, what, remedy):
    lines = ("Traceback (most recent call last):", '  File "train.py", line 9, in <module>',
             f'  File "{file}", line 1, in {function}', FULL)  # fmt: skip
    cause, fix = str(bertscope.why("\n".join(lines))).splitlines()[:2]
    assert cause == f"The {what} is too large: its tensors hold 38.41 of 39.39 GiB."
    assert remedy in fix
