"""The calls of torch.cuda, by the signatures that the installed torch has, without a card."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest

from bertscope.analyses.calibrate import worker
from bertscope.analyses.calibrate.card import Card, chosen_kernel, hidden_card
from bertscope.errors import SelectionError
from bertscope.torch_access import torch
from tests.analyses.calibrate.fakes import FakeCard
from tests.analyses.calibrate.test_session import TINY, measured

GIB = 2**30
PROPERTIES = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB, major=9, minor=0)
ANSWERS = {
    "init": None, "synchronize": None, "current_device": 0, "get_device_properties": PROPERTIES, "empty_cache": None,
    "mem_get_info": (139 * GIB, 140 * GIB), "memory_allocated": 1, "memory_reserved": 2, "max_memory_allocated": 3,
    "max_memory_reserved": 4, "reset_peak_memory_stats": None, "set_per_process_memory_fraction": None,
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of torch.cuda, which must fit the real function."""
    found = []

    def answer(name, value):
        signature = inspect.signature(getattr(torch.cuda, name))

        def call(*args, **kwargs):
            signature.bind(*args, **kwargs)
            found.append((name, args))
            return value

        return call

    for name, value in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, answer(name, value))
    monkeypatch.setattr(Card, "device", "cpu")
    return found


def test_every_call_fits_the_signature_of_the_installed_torch(calls):
    card = Card()
    card.start()
    assert (card.machine().card, card.machine().capability) == ("NVIDIA H200", (9, 0))
    assert (card.free_bytes(), card.allocated_bytes(), card.reserved_bytes()) == (139 * GIB, 1, 2)
    assert card.peaks() == (3, 4)
    card.reset_peaks()
    card.forget_build()
    card.limit(6 * GIB, 140 * GIB)
    assert {name for name, _ in calls} == set(ANSWERS)
    for kernel in ("", "flash", "efficient", "math", "cudnn"):
        with chosen_kernel(kernel):
            pass


def test_the_limit_has_its_last_byte_on_cards_of_any_size(calls):
    """torch takes the integer part of fraction * memory (setMemoryFraction in c10's CUDACachingAllocator)."""
    sizes = [(limit * GIB, memory) for limit in (6, 8, 10) for memory in range(80 * 10**9, 90 * 10**9, 10**8)]
    assert any(int(limit / memory * memory) < limit for limit, memory in sizes)
    for limit, memory in sizes:
        Card().limit(limit, memory)
        _, (fraction,) = calls[-1]
        assert int(fraction * memory) == limit
    Card().limit(8 * GIB, 8 * GIB)
    assert calls[-1][1] == (1.0,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_without_a_device_the_reason_of_torch_is_named():
    with pytest.raises(SelectionError, match=r"no CUDA device here; calibrate measures one \(.*(CUDA|NVIDIA)"):
        Card().start()


def test_an_estimate_in_the_process_of_a_point_finds_no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []

    class Watched(worker.Preparation):
        def __init__(self, *args):
            seen.append(torch.accelerator.is_available())
            super().__init__(*args)
            seen.append(torch.cuda.is_available())

    monkeypatch.setattr(worker, "Preparation", Watched)
    lines = [json.dumps({"point": vars(TINY), "capability": [9, 0], "memory_bytes": 10**10}).encode(), b""]
    told = []
    worker.measure_point(lambda: lines.pop(0), lambda *message: told.append(message), FakeCard())
    assert (seen, told) == ([False, False], [("ready", None)])
    assert torch.cuda.is_available()
    with pytest.raises(ValueError, match="estimate"), hidden_card():
        raise ValueError("an error of an estimate")
    assert torch.cuda.is_available()


def test_what_the_build_of_a_model_frees_is_returned_before_the_first_step(monkeypatch):
    card, before_steps = FakeCard(), []
    step = "bertscope.analyses.memory.step.ModelStep.run_first_steps"
    monkeypatch.setattr(step, lambda self: before_steps.append(card.forgot_builds))
    assert measured(TINY, card).outcome == "measured"
    assert before_steps == [1]
