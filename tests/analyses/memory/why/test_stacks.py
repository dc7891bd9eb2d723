"""What the frames of an allocation tell; each case was met in a published snapshot."""

from __future__ import annotations

import pytest

from bertscope.analyses.memory.why.stacks import NO_STACK, stack_kind
from tests.analyses.memory.why.recording import Recording, forward, frame, load, optimizer, own
from tests.analyses.memory.why.test_faults import explained

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
