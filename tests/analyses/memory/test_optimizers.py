"""The state of each optimizer in bytes, by hand and measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.analyses.memory import fake_run, optimizers
from bertscope.analyses.memory.estimate import module_trace
from bertscope.analyses.memory.events import MemoryTrace
from bertscope.analyses.memory.step import make_optimizer, meta_inputs, run_model
from bertscope.errors import SelectionError
from bertscope.settings.optimizers import OPTIMIZERS
from bertscope.settings.run_config import RunConfig
from tests.analyses.memory.steps import small

ROWS, COLUMNS = 96, 64
ELEMENTS = ROWS * COLUMNS  # 6144, a multiple of 256 and above 4096
COUNTER = 4  # torch's step counter, fp32
# 8 bits: a byte for each moment, the maxima of 6144 / 256 = 24 blocks for each moment, and two tables of 256 values.
EIGHT_BIT = 2 * ELEMENTS + 2 * 24 * 4 + 2 * 256 * 4
CLOSED_FORMS = [
    ({"optimizer": "sgd"}, 0),
    ({"optimizer": "sgd", "momentum": 0.9}, 4 * ELEMENTS),
    ({"optimizer": "adam"}, 8 * ELEMENTS + COUNTER),
    ({"optimizer": "adamw"}, 8 * ELEMENTS + COUNTER),
    ({"optimizer": "adafactor"}, 4 * (ROWS + COLUMNS) + COUNTER),
    ({"optimizer": "rmsprop"}, 4 * ELEMENTS + COUNTER),
    ({"optimizer": "rmsprop", "momentum": 0.9}, 8 * ELEMENTS + COUNTER),
    ({"optimizer": "adagrad"}, 4 * ELEMENTS + COUNTER),
    ({"optimizer": "lamb"}, 8 * ELEMENTS),  # You et al. 2020, algorithm 2: m and v
    ({"optimizer": "lion"}, 4 * ELEMENTS),  # Chen et al. 2023, algorithm 2: m
    ({"optimizer": "adamw-8bit"}, EIGHT_BIT),  # bitsandbytes 0.50.2, Optimizer2State.init_state
    ({"optimizer": "adamw-transformers"}, 8 * ELEMENTS),
    ({"optimizer": "adafactor-transformers"}, 4 * (ROWS + COLUMNS)),
]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the storages in the state, each once."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(("loop", "expected"), CLOSED_FORMS, ids=str)
def test_the_estimated_state_is_the_closed_form_and_what_the_optimizer_holds(loop, expected):
    module = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    (variant,) = bertscope.estimate(module, torch.rand(2, COLUMNS), **loop).variants
    assert variant.estimated.peak.parts.optimizer_state == expected
    optimizer = make_optimizer(module.parameters(), RunConfig(**loop))
    module(torch.rand(2, COLUMNS)).sum().backward()
    optimizer.step()
    assert state_bytes(optimizer) == expected


def test_every_optimizer_has_a_closed_form():
    assert {loop["optimizer"] for loop, _ in CLOSED_FORMS} == set(OPTIMIZERS)


def test_a_small_tensor_has_32_bit_moments_in_the_8_bit_optimizer():
    params = [torch.nn.Parameter(torch.ones(size)) for size in (4095, 4096, 4097)]
    optimizer = make_optimizer(params, RunConfig(optimizer="adamw-8bit"))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    small, first, second = (optimizer.state[param] for param in params)
    assert {name: value.dtype for name, value in small.items()} == dict.fromkeys(("state1", "state2"), torch.float32)
    assert first["state1"].dtype == torch.uint8
    assert [state["absmax1"].numel() for state in (first, second)] == [16, 17]
    assert first["qmap1"] is second["qmap1"]


def test_the_state_of_lion_is_fp32_in_the_fused_kernel_only():
    for implementation, dtype in (("default", torch.bfloat16), ("fused", torch.float32)):
        param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        optimizer = make_optimizer([param], RunConfig(optimizer="lion", optimizer_implementation=implementation))
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype == dtype


def test_lion_and_lamb_compute_their_papers_step():
    """One step from zero state on the gradient 2, by hand."""
    lion, lamb = (torch.nn.Parameter(torch.full((4,), 3.0)) for _ in range(2))
    lion.grad, lamb.grad = torch.full((4,), 2.0), torch.full((4,), 2.0)
    optimizers.Lion([lion], lr=0.5).step()
    assert torch.allclose(lion, torch.full((4,), 2.5))  # 3 - 0.5 sign(0.1 * 2)
    optimizers.Lamb([lamb], lr=0.5).step()
    # The update has one direction in all elements, so its norm is replaced by that of the weights: 3 - 0.5 * 3.
    assert torch.allclose(lamb, torch.full((4,), 1.5))


def test_a_module_with_fp16_parameters_takes_no_grad_scaler():
    module = torch.nn.Linear(4, 4).half()
    with pytest.raises(SelectionError, match="GradScaler takes no fp16 gradients"):
        bertscope.estimate(module, torch.rand(2, 4).half(), grad_scaler=True)


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.in_torch])
def test_the_table_says_which_optimizers_copy_the_gradient_for_weight_decay(name):
    """A second copy of one parameter, 1 MiB, in the step's peak."""

    def peak(**arguments) -> int:
        param = torch.nn.Parameter(torch.ones(512, 512))
        optimizer = getattr(torch.optim, OPTIMIZERS[name].class_name)([param], lr=0.0, foreach=False, **arguments)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            optimizer.step()
        live = highest = 0
        events = profiler.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                highest = max(highest, live)
        return highest

    assert (peak(weight_decay=0.1) - peak(weight_decay=0.0) >= 2**20) == ("weight_decay" in OPTIMIZERS[name].takes)


# ---- an optimizer step that is recorded once ----


@pytest.mark.parametrize(
    ("optimizer", "loop"), [("adamw", {"checkpointing": "full"}), ("adafactor", {"keep_gradients": True}), ("sgd", {})]
)
def test_a_reused_optimizer_step_has_the_events_of_one_that_runs(monkeypatch, optimizer, loop):
    first, second = (RunConfig(batch=batch, seq=8, optimizer=optimizer, **loop) for batch in (2, 5))
    monkeypatch.setattr(fake_run, "_UPDATES", {})
    fresh = step_trace(second)
    fake_run._UPDATES.clear()
    step_trace(first)
    reused = dict(fake_run._UPDATES)
    assert step_trace(second) == fresh
    assert reused == fake_run._UPDATES  # so nothing was recorded anew
    assert len(reused) == 1


def test_an_optimizer_step_of_other_parameters_or_gradients_runs_anew(monkeypatch):
    monkeypatch.setattr(fake_run, "_UPDATES", {})
    run_config = RunConfig(batch=2, seq=8)
    others = [replace(run_config, precision="bf16"), replace(run_config, freeze=("embeddings",)),
              replace(run_config, optimizer="sgd"), replace(run_config, precision="autocast-bf16")]  # fmt: skip
    for number, other in enumerate([run_config, *others], start=1):
        step_trace(other)
        assert len(fake_run._UPDATES) == number
    step_trace(run_config, hidden_size=32)
    assert len(fake_run._UPDATES) == 1 + len(others) + 1


def step_trace(run_config: RunConfig, **fields: int) -> MemoryTrace:
    """The trace of a step of a small model, which runs anew."""
    source = small(**fields)
    model = run_model(source, run_config)
    return module_trace(model, meta_inputs(model, run_config), run_config, None)
