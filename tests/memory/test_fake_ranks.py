"""One rank of a parallel job, estimated in one process: closed forms of state and traffic, and real ranks on gloo."""

import functools
import subprocess
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import gloo_rank
from bertscope.errors import SelectionError
from bertscope.memory.estimate import source_trace
from bertscope.memory.ranks import fake_ranks
from bertscope.memory.step import run_model
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import torch
from tests.child_server import loaded
from tests.memory.steps import SMALL, small

RUN = RunConfig(batch=1, seq=8)


@functools.cache
def traced(strategy, *mesh, layers=1, checkpointing="none"):
    parallelism = Parallelism(strategy=strategy, mesh="x".join(map(str, mesh)))
    run_config = replace(RUN, parallelism=parallelism, checkpointing=checkpointing)
    return source_trace(small(num_hidden_layers=layers), run_config)


def shard_rows(parameter, ranks):
    """The rows of a rank: those of rank 0, rounded up."""
    return -(-parameter.shape[0] // ranks)


@pytest.mark.parametrize("ranks", [2, 1024])
def test_a_rank_has_its_rows_of_each_parameter_and_of_both_moments(ranks):
    parameters = list(run_model(small(), RUN).parameters())
    rows = sum(shard_rows(parameter, ranks) * parameter[0].numel() for parameter in parameters)
    found = Counter()
    for block, size in traced("fsdp", ranks).state:
        found[block.part] += size
    counters = 4 * len(parameters)  # AdamW's number of steps
    assert (found["parameters"], found["optimizer_state"]) == (4 * rows, 2 * 4 * rows + counters)


@pytest.mark.parametrize(("strategy", "mesh"), [("fsdp", (1024,)), ("hsdp", (2, 4))])
def test_a_step_gathers_the_padded_parameters_twice_and_scatters_the_gradients_once(strategy, mesh):
    ranks = mesh[-1]
    padded = sum(
        4 * ranks * shard_rows(parameter, ranks) * parameter[0].numel()
        for parameter in run_model(small(), RUN).parameters()
    )
    found = Counter()
    for call in traced(strategy, *mesh).collectives:
        found[call.phase, call.kind] += call.full_bytes
    expected = {("forward", "all-gather"): padded, ("backward", "all-gather"): padded,
                ("backward", "reduce-scatter"): padded}  # fmt: skip
    if strategy == "hsdp":
        expected["backward", "all-reduce"] = padded // ranks
    assert found == expected


def test_of_a_million_ranks_the_last_has_the_padding_of_each_parameter_and_no_moments():
    source = small()
    run_config = replace(RUN, parallelism=Parallelism(strategy="fsdp", world_size=2**20, rank=2**20 - 1))
    parameters = list(run_model(source, run_config).parameters())
    found = Counter()
    for block, size in source_trace(source, run_config).state:
        found[block.part] += size
    assert found["parameters"] == sum(4 * parameter[0].numel() for parameter in parameters)
    assert found["optimizer_state"] == 4 * len(parameters)


def test_kept_parameters_are_gathered_once_and_need_more_memory_in_forward():
    traces = {name: traced(name, 2, layers=2) for name in ("fsdp", "fsdp-no-reshard")}
    phases = {name: {call.phase for call in trace.collectives if call.kind == "all-gather"}
              for name, trace in traces.items()}  # fmt: skip
    assert phases == {"fsdp": {"forward", "backward"}, "fsdp-no-reshard": {"forward"}}
    peaks = {name: trace.peaks()[0].live_bytes for name, trace in traces.items()}
    assert peaks["fsdp"] < peaks["fsdp-no-reshard"]


def test_fsdp_allocates_gathered_parameters_and_reduced_gradients_in_streams_of_their_own():
    """The gradients of a rank, a half each: nothing of the stream of computation, and no other strategy has streams."""
    blocks = {name: Counter({}) for name in ("fsdp", "ddp")}
    for name, found in blocks.items():
        for event in traced(name, 2, layers=2).events:
            found[event.block.stream, event.block.part] += max(event.size_bytes, 0)
    of_fsdp = blocks["fsdp"]
    assert {stream for stream, _ in of_fsdp} == {"", "_allgather_base_", "_reduce_scatter_base_"}
    assert of_fsdp["_allgather_base_", "communication"] == of_fsdp["", "gathered_parameters"]
    assert of_fsdp["_reduce_scatter_base_", "gradients"] > 0 == of_fsdp["", "gradients"]
    assert {stream for stream, _ in blocks["ddp"]} == {""}


def test_checkpointing_adds_no_collective():
    calls = [traced("fsdp", 2, checkpointing=name).collectives for name in ("none", "full", "selective")]
    none, full, selective = (Counter(call[1::2] for call in found) for found in calls)
    assert none == full == selective


def test_the_gradients_with_tensor_parallelism_are_those_of_the_whole_model(monkeypatch):
    """Sums of the ranks' parts differ from whole sums in the last digits of fp32."""
    monkeypatch.setattr(gloo_rank, "FIELDS", SMALL | {"num_hidden_layers": 2})

    def start(words, **streams):
        return subprocess.Popen([*loaded(words[2]), *words[3:]], **streams)

    monkeypatch.setattr(gloo_rank, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    assert max(error for rank in gloo_rank.measured(()) for error in rank) < 1e-4


def test_a_process_of_a_real_job_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with (
            pytest.raises(SelectionError, match="belongs to a process group"),
            fake_ranks(Parallelism(strategy="fsdp", world_size=2)),
        ):
            pass
    finally:
        torch.distributed.destroy_process_group()


def test_a_torch_without_collectives_on_meta_is_an_error_that_names_a_version_that_has_them(monkeypatch):
    monkeypatch.setattr("bertscope.memory.ranks.has_kernel", lambda operator, key: False)
    with (
        pytest.raises(SelectionError, match=r"torch .* tested with torch 2\.11"),
        fake_ranks(Parallelism(strategy="tp", world_size=2)),
    ):
        pass
    assert not torch.distributed.is_initialized()


def test_after_an_estimate_the_process_belongs_to_no_job():
    with fake_ranks(Parallelism(strategy="fsdp", world_size=4)):
        assert torch.distributed.get_world_size() == 4
    assert not torch.distributed.is_initialized()
