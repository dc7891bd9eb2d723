"""A compiled step: inductor's programs on fake tensors, next to the allocator of a compiled step on this machine."""

import shutil
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bertscope.errors import SelectionError
from bertscope.measure.profiler_run import measured
from bertscope.memory.estimate import module_trace
from bertscope.memory.step import ModelStep
from bertscope.model.modules import selective_contexts
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import RunConfig

COMPILED = RunConfig(optimizer="none", loop="freed", compile=True)


class Block(nn.Module):
    """Three elementwise operators behind a linear layer; inductor makes one kernel of them."""

    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, inputs):
        return self.linear(inputs).sin().cos().exp()


def peaks(module, inputs, run_config=COMPILED):
    """The estimated peak of a step, and that of the same step without compilation."""
    found = (module_trace(module, inputs, one, None) for one in (run_config, run_config.changed(compile=False)))
    return [trace.peak_bytes for trace in found]


def test_fused_operators_allocate_nothing_between_them():
    module, inputs = Block(), torch.ones(256, 64)
    trace = module_trace(module, inputs, COMPILED.changed(mode="inference"), None)
    sizes = [event.size_bytes for event in trace.events if event.size_bytes == inputs.nbytes]
    assert len(sizes) == 1  # the product, into which the kernel writes its result
    eager = module_trace(module, inputs, RunConfig(mode="inference", loop="freed"), None)
    assert len([event for event in eager.events if event.size_bytes == inputs.nbytes]) == 4  # linear, sin, cos, exp


def test_a_module_that_is_compiled_is_never_estimated_as_eager():
    inputs = torch.ones(256, 64)
    compiled, eager = peaks(Block(), inputs)
    assert compiled < eager
    own = Block()
    own.compile()
    inside = nn.Sequential(Block(), nn.Tanh())
    inside[0].compile()
    without = RunConfig(optimizer="none", loop="freed")
    for module in (own, torch.compile(Block())):
        with pytest.warns(UserWarning, match="compiled: the model;"):
            assert module_trace(module, inputs, without, None).peak_bytes == compiled
    with pytest.warns(UserWarning, match="compiled: 0;"):
        found = module_trace(inside, inputs, without, None).peak_bytes
    assert found < module_trace(nn.Sequential(Block(), nn.Tanh()), inputs, without, None).peak_bytes


class Recomputed(Block):
    """A block of which backward recomputes all but the product."""

    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=False, context_fn=selective_contexts)


class Asking(Block):
    """A block that asks for a value of its input, in code that is not compiled."""

    def forward(self, inputs):
        return super().forward(inputs) if self.is_valid(inputs) else inputs

    @torch.compiler.disable
    def is_valid(self, inputs):
        return bool((inputs > 0).all())


def without_inductor(monkeypatch):
    from torch._inductor import async_compile

    monkeypatch.delattr(async_compile.AsyncCompile, "cpp_pybinding")


def with_an_older_stance(monkeypatch):
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: nullcontext())


@pytest.mark.parametrize(
    ("module", "change", "reason"),
    [
        (Block(), without_inductor, "cpp_pybinding"),
        (Block(), with_an_older_stance, "skip_guard_eval_unsafe"),
        (Asking(), lambda monkeypatch: None, "aten._local_scalar_dense.default"),
    ],
)
def test_a_step_that_is_not_compiled_on_fake_tensors_is_eager_with_a_range_and_its_reason(
    module, change, reason, monkeypatch
):
    with monkeypatch.context() as changed:
        change(changed)
        with pytest.warns(UserWarning, match=f"estimated as eager: torch .*{reason}.* times those of eager ones"):
            found = module_trace(module, torch.ones(256, 64), COMPILED, None)
    eager = module_trace(module, torch.ones(256, 64), COMPILED.changed(compile=False), None)
    assert found.peak_bytes == eager.peak_bytes


def test_a_compiled_model_on_several_ranks_is_refused():
    ranks = RunConfig(parallelism=Parallelism(strategy="ddp", world_size=2))
    with pytest.raises(SelectionError, match="one rank only"):
        module_trace(torch.compile(Block()), torch.ones(2, 64), ranks, None)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor compiles C++")
def test_the_peak_is_that_of_the_allocator_in_a_compiled_step(monkeypatch):
    # else inductor compiles a program for each instruction set of the processor, to see if it runs
    monkeypatch.setattr(import_module("torch._inductor.cpu_vec_isa"), "valid_vec_isa_list", list)
    module, inputs = nn.Sequential(Recomputed(), nn.LayerNorm(64), nn.Dropout(0.1)), torch.ones(256, 64)
    run = COMPILED.changed(accumulate=2)
    found = module_trace(module, inputs, run, None)
    step = ModelStep(module, {"input": inputs}, run, loss=lambda model, given: model(given["input"]).sum())
    fast = {"force_disable_caches": True, "cpp_cache_precompile_headers": False, "aot_inductor.debug_compile": True}
    with import_module("torch._inductor.config").patch(fast):  # headers are of another set; -O0
        step.run()
    step.model.zero_grad()  # without an optimizer nothing else does
    assert found.peak_bytes == pytest.approx(measured(step).peak_bytes, abs=64)
