"""Twenty published out-of-memory messages: their numbers are read, and what they say is named.

The figures are those of the issues named; the sentences are torch's of the version that wrote them.
"""

from __future__ import annotations

import pytest

from bertscope.analyses.memory.why.messages import message_report
from bertscope.errors import SourceError
from bertscope.units import parse_bytes

GIB = 2**30


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
