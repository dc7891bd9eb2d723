"""The estimate of a step against a plain training loop, and the state of each optimizer, by hand and measured."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import bertscope
from bertscope.errors import SelectionError
from bertscope.memory import optimizers
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import TORCH_DTYPES, make_optimizer
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import OPTIMIZERS
from tests.conftest import EVERY_CASE
from tests.memory.plain_loop import peak_bytes
from tests.memory.steps import estimated_trace, small

BATCH, SEQ = 3, 24
WIDE = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 500}
TOLERANCE = 0.001


def measured(source, run_config):
    """The peak of the plain loop of this model."""

    def model():
        built = bertscope.build(source.config, source.architecture, device="cpu")
        if run_config.checkpointing != "none":
            built.gradient_checkpointing_enable(strategy=run_config.checkpointing)
        return built

    def inputs(built, batch=run_config.batch):
        ids = torch.randint(0, source.config.vocab_size, (batch, run_config.seq))
        by_token = source.architecture == "BertForMaskedLM"
        labels = ids.clone() if by_token else torch.zeros(batch, dtype=torch.long)
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        return tokens | ({} if source.architecture == "BertModel" else {"labels": labels})

    arguments = {name: getattr(run_config, name) for name in ("momentum", "weight_decay") if getattr(run_config, name)}
    arguments |= {"fused": True} if run_config.optimizer_implementation == "fused" else {}
    row = OPTIMIZERS[run_config.optimizer]
    kind = getattr(torch.optim if row.in_torch else optimizers, row.class_name)
    held_out = partial(inputs, batch=run_config.eval_batch) if run_config.eval_batch else None
    loop = ("accumulate", "keep_gradients", "ema", "clip_grad_norm", "loop", "grad_scaler")
    return peak_bytes(
        model, inputs, lambda params: kind(params, lr=0.0, **arguments),
        autocast=TORCH_DTYPES[run_config.autocast] if run_config.autocast else None,
        make_held_out=held_out, held_out_batches=run_config.eval_batches, keeps_logits=bool(run_config.eval_samples),
        **{name: getattr(run_config, name) for name in loop},
    )  # fmt: skip


FORMED = {"attention": "eager", **WIDE}
BROAD = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 3000, "num_attention_heads": 4}
# Few tokens and a large vocabulary: the temporaries of the optimizer decide the peak.
SHORT = {"architecture": "BertModel", **FORMED, "vocab_size": 5000}
EVALUATED = {"eval_batch": 4 * BATCH, "eval_samples": 12 * BATCH}
# The model, the loop, and the phase of the peak where it is the point.
LOOPS = [
    *((FORMED | {"num_hidden_layers": 1 + ("checkpointing" in loop)}, loop, "") for loop in (
        {}, {"accumulate": 2}, {"keep_gradients": True, "accumulate": 2, "checkpointing": "full"},
        {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam", "weight_decay": 0.1},
        {"optimizer": "adagrad", "weight_decay": 0.1}, {"ema": True}, {"clip_grad_norm": True}, {"loop": "trainer"},
        {"loop": "freed", "accumulate": 2}, {"loop": "lightning"}, {"loop": "lightning", "accumulate": 2},
        {"optimizer": "adafactor", "accumulate": 2}, {"grad_scaler": True, "accumulate": 2, "clip_grad_norm": True},
    )),
    ({"architecture": "BertModel", **FORMED}, {"accumulate": 2, "precision": "autocast-bf16"}, ""),
    (BROAD, {"accumulate": 2, "precision": "autocast-bf16"}, ""),
    (BROAD | {"num_hidden_layers": 3},
     {"loop": "lightning", "precision": "autocast-bf16", "checkpointing": "full"}, ""),
    (BROAD, {"precision": "autocast-bf16", "grad_scaler": True}, ""),
    (BROAD, {"precision": "autocast-fp16", "grad_scaler": True, "clip_grad_norm": True, "accumulate": 2}, ""),
    *((WIDE, EVALUATED | loop, "evaluation") for loop in (
        {"eval_samples": 0}, {"eval_samples": 0, "loop": "freed", "accumulate": 2, "checkpointing": "full"},
        {"eval_samples": 0, "loop": "trainer"}, {"eval_samples": 4 * BATCH}, {}, {"loop": "freed"},
        {"loop": "lightning", "keep_gradients": True}, {"loop": "trainer", "ema": True},
    )),
    *((SHORT, {"batch": 1, "seq": 8, **loop}, phase) for loop, phase in (
        ({"optimizer": "rmsprop", "momentum": 0.9}, "optimizer"),
        *(({"optimizer": name}, "backward" if name == "asgd" else "optimizer") for name in (
            "adamax", "asgd", "nadam", "rprop", "lamb", "adamw-8bit", "adafactor-transformers",
            *EVERY_CASE * ("rmsprop", "adagrad", "adadelta", "radam", "lion", "adamw-transformers"),
        )),
        *EVERY_CASE * (({"grad_scaler": True}, "optimizer"),),
        ({"grad_scaler": True, "optimizer_implementation": "fused"}, "backward"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("model", "loop", "phase"), LOOPS, ids=str)
def test_the_estimate_is_the_peak_of_a_plain_loop(model, loop, phase):
    source, run_config = small(**model), RunConfig(**{"batch": BATCH, "seq": SEQ, **loop})
    trace = Simulator(source).trace(run_config)
    assert trace.peak_bytes == pytest.approx(measured(source, run_config), rel=TOLERANCE)
    assert phase in ("", max(trace.peaks(), key=lambda moment: moment.live_bytes).phase)


def test_at_each_batch_of_a_search_the_evaluation_stays_as_it_is():
    source, run_config = small(), RunConfig(seq=SEQ, eval_batch=40, eval_samples=80, device="cuda")
    simulator = Simulator(source)
    training, batch = (
        simulator.trace(run.changed(batch=50)) for run in (run_config.changed(eval_batch=None), run_config)
    )
    peaks = {moment.phase: moment.live_bytes for moment in batch.peaks()}
    at_two = {moment.phase: moment.live_bytes for moment in simulator.trace(run_config.changed(batch=2)).peaks()}
    grown = training.state_bytes - simulator.trace(run_config.changed(batch=2, eval_batch=None)).state_bytes
    assert peaks.pop("evaluation") == pytest.approx(at_two["evaluation"] + grown, rel=TOLERANCE)
    assert peaks == {moment.phase: moment.live_bytes for moment in training.peaks()}


@pytest.mark.parametrize("optimizer", ["none", "adamw"])
@pytest.mark.parametrize("loop", ["plain", "freed", "lightning"])
def test_a_measured_step_has_the_estimated_peaks_in_each_loop(loop, optimizer):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    (variant,) = bertscope.profile(module, torch.rand(8, 64), optimizer=optimizer, loop=loop, steps=0).variants
    peaks = [[phase.peak_bytes for phase in memory.phases] for memory in (variant.estimated, variant.measured)]
    assert peaks[0] == peaks[1]


def test_no_optimizer_state_exists_for_a_parameter_without_gradient():
    trace = estimated_trace(small("BertModel"), RunConfig(batch=1, seq=8))
    state = {block.path for block, _ in trace.state if block.part == "optimizer_state"}
    assert "encoder.layer.0.output.dense.weight.exp_avg" in state
    assert not any(path.startswith("pooler") for path in state)  # the loss is the sum of the hidden states


class _Table(torch.nn.Module):
    """A module with a table that is a buffer or a plain attribute; one that it replaces in each step is no state."""

    def __init__(self, *, is_buffer):
        super().__init__()
        self.linear, self.last = torch.nn.Linear(8, 8), torch.zeros(3)
        table = torch.randn(100, 8)
        if is_buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, ids):
        self.last = self.linear(self.table[ids]).square().mean()
        return self.last


def test_a_table_that_is_a_plain_attribute_counts_as_a_buffer_does():
    ids = {"ids": torch.zeros(4, dtype=torch.long)}
    reports = [bertscope.profile(_Table(is_buffer=value), ids, steps=0)["none"] for value in (True, False)]
    estimated, measured = (
        {getattr(report, name).peak.peak_bytes for report in reports} for name in ("estimated", "measured")
    )
    assert len(estimated) == len(measured) == 1
    (buffer_bytes,) = {report.estimated.peak.parts.buffers for report in reports}
    assert buffer_bytes == 100 * 8 * 4 + 3 * 4


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
    ({"optimizer": "adadelta"}, 8 * ELEMENTS + COUNTER),
    ({"optimizer": "adamax"}, 8 * ELEMENTS + COUNTER),
    ({"optimizer": "asgd"}, 4 * ELEMENTS + 3 * COUNTER),  # step, eta and mu are numbers
    ({"optimizer": "nadam"}, 8 * ELEMENTS + 2 * COUNTER),  # step and mu_product
    ({"optimizer": "radam"}, 8 * ELEMENTS + COUNTER),
    ({"optimizer": "rprop"}, 8 * ELEMENTS + COUNTER),
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


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.in_torch and name != "rprop"])
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


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("loop", ["plain", "trainer", "freed"])
def test_the_peak_in_the_other_loop_is_that_of_an_estimate_there(loop, batch):
    run_config = RunConfig(batch=batch, seq=8, loop=loop, device="cuda", optimizer="sgd")  # in which no batch waits
    simulator = Simulator(small())
    other = simulator.trace(replace(run_config, loop=run_config.other_loop))
    assert simulator.trace(run_config).other_peak_bytes == other.peak_bytes
