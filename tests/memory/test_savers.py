"""Chunked loss, step in backward and offloading: against plain loops, closed forms and a real GPU's arithmetic."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import bertscope
from bertscope.errors import BertscopeError
from bertscope.memory.estimate import MemoryTraces
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import run_model
from bertscope.memory.summary import host_cost
from bertscope.model.savers import HostOptimizer, StepInBackward, chunked_loss
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import SAVERS
from bertscope.sources.find import source_of
from bertscope.units import bytes_text
from bertscope.views.plan import emitted
from tests.conftest import EVERY_CASE
from tests.memory.plain_loop import peak_bytes, tokenized
from tests.memory.steps import estimated_trace, small, whole_trace
from tests.views.test_plan_code import layers, plan

BATCH, SEQ, VOCABULARY = 6, 24, 2000
FSDP = Parallelism(strategy="fsdp", world_size=2)
MASKED = small("BertForMaskedLM", hidden_size=64, intermediate_size=256, vocab_size=VOCABULARY)
CAUSAL = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=VOCABULARY, n_positions=32, attn_pdrop=0.0,
                    resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
DEEP = small("BertForMaskedLM", num_hidden_layers=12, hidden_size=32, intermediate_size=64)
SIZES = {"batch": 4, "seq": 16}


def labelled(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, SEQ))
    return {**tokenized(ids, segments=hasattr(model.model, "bert")), "labels": ids.clone()}


def part_of_loss(last: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(last(hidden.flatten(0, 1)).float(), labels.flatten(), reduction="sum")


class InChunks(nn.Module):
    """A language model with the loss of its chunks, by its parts: body, head and last layer."""

    def __init__(self, model: nn.Module, chunks: int) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if hasattr(self.model, "bert"):
            head = self.model.cls.predictions
            hidden, last = head.transform(self.model.bert(**inputs).last_hidden_state), head.decoder
        else:
            hidden, last = self.model.transformer(**inputs).last_hidden_state, self.model.lm_head
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        loss = 0.0
        size = -(-labels.shape[1] // self.chunks)
        for part in zip(hidden.split(size, dim=1), labels.split(size, dim=1), strict=True):
            loss += checkpoint(part_of_loss, last, *part, use_reentrant=False, preserve_rng_state=False)
        return {"loss": loss / (labels != -100).sum()}


SGD = partial(torch.optim.SGD, lr=0.0)


def plain_peak(make_model, make_optimizer=SGD, **loop) -> int:
    return peak_bytes(make_model, labelled, make_optimizer, criterion=lambda output: output["loss"], **loop)


@pytest.mark.parametrize("chunks", [1, 5, 64])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_a_loss_in_chunks_needs_what_a_plain_loop_needs(chunks, precision):
    run = RunConfig(batch=BATCH, seq=SEQ, loss_chunks=chunks, optimizer="sgd", loop="trainer", precision=precision)
    autocast = torch.bfloat16 if precision != "fp32" else None
    real = plain_peak(lambda: InChunks(MASKED.for_run().build(device="cpu"), chunks), loop="trainer", autocast=autocast)
    assert estimated_trace(MASKED, run).peak_bytes == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("chunks", [3, 24])
def test_a_causal_loss_in_chunks_needs_what_a_plain_loop_needs(chunks, tmp_path):
    CAUSAL.save_pretrained(tmp_path)
    source = source_of(str(tmp_path)).with_options(architecture="GPT2LMHeadModel")
    run = RunConfig(batch=BATCH, seq=SEQ, loss_chunks=chunks, optimizer="sgd", loop="freed")
    real = plain_peak(lambda: InChunks(GPT2LMHeadModel(CAUSAL), chunks), loop="freed")
    assert estimated_trace(source, run).peak_bytes == pytest.approx(real, rel=1e-3)


def test_a_loss_in_chunks_is_the_loss_of_the_class():
    torch.manual_seed(0)
    for model, is_causal in ((MASKED.for_run().build(device="cpu"), False), (GPT2LMHeadModel(CAUSAL), True)):
        batch = labelled(InChunks(model.eval(), 1))
        batch["labels"][:, :3] = -100
        gradients = []
        for loss in (model(**batch).loss, chunked_loss(model, batch, 5, is_causal=is_causal)):
            model.zero_grad()
            loss.backward()
            gradients.append(
                [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]
            )
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_chunks_recompute_the_last_layer_only():
    with_chunks, without = (
        Simulator(MASKED).flops(RunConfig(batch=BATCH, seq=SEQ, loss_chunks=chunks)) for chunks in (5, 0)
    )
    assert with_chunks - without == 2 * BATCH * SEQ * 64 * VOCABULARY


class InBackward:
    """The optimizer of each parameter in its hook, as PyTorch's tutorial writes it; the loop has nothing to do."""

    def __init__(self, make, params) -> None:
        optimizers = {param: make([param], foreach=False) for param in params}

        def update(param: torch.Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in optimizers:
            param.register_post_accumulate_grad_hook(update)

    def step(self) -> None:
        pass

    def zero_grad(self, set_to_none: bool) -> None:
        pass


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("loop", ["plain", "freed"])
def test_a_step_in_backward_needs_what_a_plain_loop_needs(name, loop):
    run = RunConfig(batch=BATCH, seq=SEQ, optimizer=name, loop=loop, step_in_backward=True)
    make = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, lr=0.1)}[name]
    real = plain_peak(lambda: Wrapped(MASKED.for_run().build(device="cpu")), partial(InBackward, make), loop=loop)
    assert estimated_trace(MASKED, run).peak_bytes == pytest.approx(real, rel=1e-3)


class Wrapped(nn.Module):
    """A model under the name that the others have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.model(**inputs)


def test_gradients_of_a_step_in_backward_live_one_at_a_time():
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    peaks = [
        bertscope.estimate(layers, input_size=(1, 256), optimizer="sgd", step_in_backward=is_in_backward, loop="freed")
        .variants[0].estimated.cost.peak.parts.gradients
        for is_in_backward in (True, False)
    ]  # fmt: skip
    assert peaks[0] <= 257 * 256 * 4 < 8 * 256 * 256 * 4 <= peaks[1]


@pytest.mark.parametrize("saver", [StepInBackward, HostOptimizer])
def test_an_optimizer_elsewhere_computes_the_same_weights(saver):
    weights = []
    for make in (torch.optim.AdamW, lambda params: saver(params, torch.optim.AdamW)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = make(model.parameters())
        for _ in range(3):
            model(torch.ones(3, 4)).square().sum().backward()
            if saver is HostOptimizer or isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step()
                optimizer.zero_grad()
        weights.append(list(model.parameters()))
    torch.testing.assert_close(*weights)


def host_of(source, **settings) -> dict[str, int]:
    run = RunConfig(**SIZES, device="cuda", **settings)
    return host_cost(Simulator(source).trace(run), run)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offloaded_activations_are_the_tensors_that_torch_saves(checkpointing):
    source = small("BertForMaskedLM", "eager")
    run = RunConfig(**SIZES, dropout=False, checkpointing=checkpointing, device="cuda")
    model = run_model(source, run, "cpu").train()
    ids = torch.ones(4, 16, dtype=torch.long)
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**tokenized(ids), labels=ids)
    cost = host_of(source, dropout=False, checkpointing=checkpointing, offload_activations=True)
    assert cost["host_bytes"] == pytest.approx(sum(sizes), rel=1e-3)
    assert cost["copied_bytes"] == pytest.approx(2 * sum(sizes), rel=1e-3)


def test_the_host_of_an_optimizer_has_weights_gradients_and_state():
    params = sum(param.numel() for param in MASKED.build(device="meta").parameters())
    counters = len(list(MASKED.build(device="meta").parameters()))
    cost = host_of(MASKED, offload_optimizer=True)
    assert cost["host_bytes"] - 16 * params in range(0, 4 * counters + 1)  # copy, gradient, two moments
    assert cost["copied_bytes"] == 8 * params  # gradients down, weights up
    several = host_of(MASKED, offload_optimizer=True, accumulate=3)
    assert several["copied_bytes"] == (3 + 1) * 4 * params


def test_the_host_of_a_rank_has_its_shards():
    """The rows of every parameter are even, so that the shards of two ranks are equal."""
    params = sum(param.numel() for param in MASKED.build(device="meta").parameters())
    counters = len(list(MASKED.build(device="meta").parameters()))
    cost = host_of(MASKED, offload_optimizer=True, parallelism=FSDP)
    assert cost["host_bytes"] - 8 * params in range(0, 4 * counters + 1)
    assert cost["copied_bytes"] == 4 * params


def test_a_step_in_backward_leaves_no_shards_of_gradients():
    params = sum(param.numel() for param in DEEP.build(device="meta").parameters())
    for is_in_backward in (True, False):
        run = RunConfig(batch=1, seq=8, device="cuda", optimizer="sgd", loop="freed", step_in_backward=is_in_backward,
                        parallelism=FSDP)  # fmt: skip
        left = sum(event.size_bytes for event in whole_trace(DEEP, run).events if event.phase != "optimizer")
        assert (left == 0) if is_in_backward else left >= 2 * params


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_in_chunks_runs_where_weights_are_gathered(precision):
    peaks = []
    for chunks in (0, 8):
        run = RunConfig(**SIZES, device="cuda", loss_chunks=chunks, precision=precision, parallelism=FSDP)
        peaks.append(Simulator(MASKED).trace(run).peak_bytes)
    assert peaks[1] < peaks[0]


def test_an_offloaded_optimizer_leaves_no_state_and_no_gradient_on_the_gpu():
    run = RunConfig(**SIZES, device="cuda", offload_optimizer=True)
    trace = estimated_trace(MASKED, run)
    assert "optimizer_state" not in [kind.block.part for kind in trace.kinds]
    assert "gradients" not in [trace.kinds[number].block.part for number in trace.held]


TRACED = [
    {"step_in_backward": True, "checkpointing": "full", "reentrant": True},
    {"offload_activations": True, "offload_optimizer": True, "loss_chunks": 3, "precision": "autocast-bf16",
     "accumulate": 2, "loop": "trainer"},
    {"loss_chunks": 4, "device": "cpu", "checkpointing": "full"},
    {"step_in_backward": True, "device": "cpu"},
    {"offload_optimizer": True},
    {"offload_activations": True, "checkpointing": "full"},
]  # fmt: skip


@pytest.mark.parametrize("settings", TRACED if EVERY_CASE else TRACED[:2], ids=" ".join)
def test_savers_are_traced_alike_with_few_layers_all_layers_and_other_batches(settings):
    run = RunConfig(**SIZES, **{"device": "cuda", **settings})
    traces = MemoryTraces(DEEP).trace(run), whole_trace(DEEP, run), Simulator(DEEP).trace(run)
    assert len({trace.peak_bytes for trace in traces}) == 1
    assert len({tuple(host_cost(trace, run).items()) for trace in traces}) == 1


@pytest.mark.parametrize(("source", "settings", "message"), [
    ("BertModel", {"loss_chunks": 4}, "BertModel has no logits of tokens only; leave loss_chunks out, or choose"),
    ("BertForPreTraining", {"loss_chunks": 4}, "BertForPreTraining has no logits of tokens only"),
    ("BertForMaskedLM", {"loss_chunks": 4, "compile": True}, "loss_chunks is modelled without compile"),
    ("BertForMaskedLM", {"loss_chunks": 4, "mode": "inference"}, "loss_chunks has no effect with mode inference"),
    ("BertForMaskedLM", {"loss_chunks": 4, "eval_batch": 2, "eval_samples": 4}, "eval_samples has no effect with"),
    ("BertForMaskedLM", {"step_in_backward": True, "clip_grad_norm": True}, "step_in_backward is modelled wi"),
    ("BertForMaskedLM", {"step_in_backward": True, "accumulate": 2}, "step_in_backward is modelled w"),
    ("BertForMaskedLM", {"step_in_backward": True, "strategy": "ddp", "world_size": 2},
     "step_in_backward has no effect with strategy ddp"),
    ("BertForMaskedLM", {"offload_activations": True}, "offload_activations has no effect with device cpu"),
    ("BertForMaskedLM", {"offload_optimizer": True, "device": "cuda", "optimizer": "adamw-8bit"}, "offload_optimizer"),
])  # fmt: skip
def test_a_saver_without_effect_or_model_is_refused_in_one_line(source, settings, message):
    model = small(source)
    with pytest.raises(BertscopeError) as error:
        bertscope.estimate(model, **SIZES, **settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words", [*SAVERS, "loss-chunks,offload-optimizer,offload-activations"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_the_emitted_step_of_every_saver_trains_as_a_plain_loop(words, precision):
    changes = {key: value for word in words.split(",") for key, value in SAVERS[word].items()}
    report = plan(layers("bert.encoder.layer", 1), precision=precision, **changes)
    report = replace(report, run=report.run.changed(device="cuda"),
                     subject=replace(report.subject, architecture="BertForMaskedLM"))  # fmt: skip
    torch.manual_seed(0)
    batch = labelled(Wrapped(MASKED.for_run().build(device="cpu")))
    weights = []
    for names in ({}, {"__name__": "plan"}):
        torch.manual_seed(0)
        model = MASKED.without_dropout().for_run().build(device="cpu").train()
        if names:
            exec(emitted(report, "torch"), names)
            names["save_operators"](model, names["PLAN"])
            optimizer = names["make_optimizer"](model, torch.optim.SGD, lr=0.1)
            names["train_step"](model, [batch, batch], optimizer)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(2):
                (model(**batch).loss / 2).backward()
                if "step_in_backward" in changes or number:  # the former updates after each micro-batch
                    optimizer.step()
                    optimizer.zero_grad()
        weights.append(list(model.parameters()))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for form in ("trainer", "lightning"):
        with pytest.raises(BertscopeError, match=f"{form} has no argument for the step"):
            emitted(report, form)


def test_a_plan_may_take_a_loss_in_chunks_and_says_that_logits_are_recomputed():
    source = small("BertForMaskedLM", hidden_size=32, vocab_size=900)
    run = {"batch": 64, "seq": 16, "device": "cuda"}
    peaks = [bertscope.estimate(source, **run, loss_chunks=chunks, checkpointing="full")["full"].memory.cost.gpu_bytes
             for chunks in (0, 8)]  # fmt: skip
    report = bertscope.plan(source, sum(peaks) // 2, may_change="offload-activations,loss-chunks", margin=0, **run)
    assert report.first.changes == {"loss_chunks": 8}
    assert "with loss-chunks (same result)" in str(report)
    assert "recomputing the logits" in str(report)
    assert report.first.cost.recompute_flops >= 2 * 64 * 16 * 32 * 900


def test_a_plan_says_what_offloading_copies():
    source = small("BertForMaskedLM", hidden_size=128, vocab_size=9000)
    run = {"batch": 1, "seq": 8, "device": "cuda"}
    least = bertscope.estimate(source, **run, offload_optimizer=True)["none"].memory.cost.gpu_bytes
    report = bertscope.plan(source, least, may_change="offload-optimizer", margin=0, **run)
    assert report.first.changes == {"offload_optimizer": True}
    assert "with offload-optimizer (same result)" in str(report)
    assert f"copying {bytes_text(report.first.cost.copied_bytes)} (" in " ".join(str(report).split())


def test_an_optimizer_object_is_refused_with_a_step_in_backward():
    model = nn.Linear(4, 4)
    with pytest.raises(BertscopeError, match="step_in_backward makes the optimizers itself; give optimizer as a word"):
        bertscope.estimate(
            model, input_size=(2, 4), optimizer=torch.optim.SGD(model.parameters()), step_in_backward=True
        )


def test_a_data_sheet_adds_the_time_of_copies_to_the_step():
    run = {"batch": 16, "gpu": "a100-80gb", "time": True}
    plain, offloaded = (
        bertscope.estimate("bert-base-uncased", **run, offload_optimizer=offloads)["none"].memory.cost
        for offloads in (False, True)
    )
    added = offloaded.time.step.low_seconds - plain.time.step.low_seconds
    assert offloaded.copied_bytes == 8 * 109_482_240 - 4 * (768 * 768 + 768)  # the pooler has no gradient
    assert added == pytest.approx(offloaded.copied_bytes / 55e9)
