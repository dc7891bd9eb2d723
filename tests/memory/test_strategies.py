"""The strategies on one fake rank: state, traffic and peaks against closed forms, torch and each other."""

import inspect
from collections import Counter
from dataclasses import replace

import pytest

import bertscope
from bertscope.memory.estimate import MemoryTraces, source_trace
from bertscope.memory.ranks import bucket_sizes, fake_ranks, rank_groups, units_text, zero_shares
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import run_model
from bertscope.memory.summary import COLLECTIVE_SHARES, estimated, kind_of, sent_bytes
from bertscope.settings.parallelism import STRATEGIES, Parallelism
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import torch
from tests.memory.steps import small, whole_trace

STEP = RunConfig(batch=2, seq=8)
MESHES = {"ddp": (2,), "zero1": (2,), "fsdp": (2,), "fsdp-no-reshard": (2,), "hsdp": (2, 2), "tp": (2,),
          "tp+fsdp": (2, 2)}  # fmt: skip


def on(strategy, *mesh, **settings):
    return replace(
        STEP, parallelism=Parallelism(strategy=strategy, mesh="x".join(map(str, mesh or MESHES[strategy])), **settings)
    )


def state(trace, part):
    return sum(size for block, size in trace.state if block.part == part)


def moved(trace, phase, kind):
    return sum(call.full_bytes for call in trace.collectives if (call.phase, call.kind) == (phase, kind))


@pytest.fixture(scope="module")
def source():
    return small(num_hidden_layers=2)


@pytest.fixture(scope="module")
def parameters(source):
    return dict(run_model(source, STEP).named_parameters())


@pytest.fixture(scope="module")
def traces(source):
    """The trace of one rank by strategy, and that of one process."""
    found = {name: source_trace(source, on(name)) for name in MESHES}
    return found | {"none": source_trace(source, STEP)}


def test_every_strategy_is_tried_here():
    assert set(MESHES) | {"none"} == set(STRATEGIES)


def test_ddp_adds_its_buckets_to_one_process_in_every_phase(traces, parameters):
    buckets = sum(param.nbytes for param in parameters.values())
    assert state(traces["ddp"], "communication") == buckets
    alone, ddp = ({moment.phase: moment.live_bytes for moment in traces[name].peaks()} for name in ("none", "ddp"))
    broadcast = 2 * 32 * 8  # the two buffers of 32 positions as one tensor, before forward
    assert {name: ddp[name] - alone[name] for name in ddp} == dict.fromkeys(alone, buckets)
    assert moved(traces["ddp"], "forward", "broadcast") == broadcast
    assert moved(traces["ddp"], "backward", "all-reduce") == buckets


def test_the_optimizer_states_of_all_zero_ranks_are_that_of_one_process(source, traces):
    ranks = [source_trace(source, on("zero1", rank=rank)) for rank in range(2)]
    assert sum(state(trace, "optimizer_state") for trace in ranks) == state(traces["none"], "optimizer_state")
    assert all(state(trace, "parameters") == state(traces["none"], "parameters") for trace in ranks)
    assert moved(ranks[0], "optimizer", "broadcast") == state(traces["none"], "parameters")


def test_the_shares_of_zero_ranks_are_those_of_torchs_optimizer(source, parameters):
    parallelism = Parallelism(strategy="zero1", world_size=3)
    model = run_model(source, STEP)
    with fake_ranks(parallelism):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)._partition_parameters()
    torchs = [sum(param.numel() for group in part for param in group["params"]) for part in parts]
    ours = [
        group.updated_params for group in rank_groups(model, parallelism) for _ in range(group.first, group.last + 1)
    ]
    assert ours == torchs


def test_zero_ranks_that_update_nothing_are_one_group_and_like_the_first_of_them(source):
    model = run_model(source, STEP)
    tensors = len([param for param in model.parameters() if param.requires_grad])
    *_, last = rank_groups(model, Parallelism(strategy="zero1", world_size=2**20))
    assert (last.first, last.last, last.updated_params) == (tensors, 2**20 - 1, 0)
    few, many = (source_trace(source, on("zero1", size, rank=tensors)) for size in (tensors + 1, 2**20))
    assert many.state == few.state
    assert many.events == few.events
    assert {call.ranks for call in many.collectives} == {2**20}


@pytest.mark.parametrize(("strategy", "mesh"), [("hsdp", (2, 3)), ("tp+fsdp", (3, 2))])
def test_each_rank_updates_the_elements_of_its_shards(source, strategy, mesh):
    groups = rank_groups(
        run_model(source, STEP), Parallelism(strategy=strategy, mesh="x".join(map(str, mesh))), source.layer_path
    )
    assert groups[0].first == 0
    assert groups[-1].last == Parallelism(strategy=strategy, mesh="x".join(map(str, mesh))).world_size - 1
    trace = source_trace(source, on(strategy, *mesh, rank=groups[-1].last))
    moments = [block for block, _ in trace.state if block.path.endswith(".exp_avg")]
    assert sum(torch.Size(block.shape).numel() for block in moments) == groups[-1].updated_params


def test_of_five_rows_of_three_ranks_two_have_two_and_one_has_one():
    model = torch.nn.Linear(4, 5, bias=False)
    groups = rank_groups(model, Parallelism(strategy="fsdp", world_size=3))
    assert [(group.first, group.last, group.updated_params) for group in groups] == [(0, 1, 8), (2, 2, 4)]


def test_a_tensor_parallel_layer_needs_six_all_reduces_of_its_hidden_states(source, traces):
    hidden = 4 * STEP.batch * STEP.seq * 16
    assert moved(traces["tp"], "forward", "all-reduce") == source.layers * 2 * hidden
    assert moved(traces["tp"], "backward", "all-reduce") == source.layers * 4 * hidden


def test_tensor_parallelism_halves_the_projections_of_the_layers_only(traces, parameters):
    names = ("query", "key", "value", "intermediate.dense", "output.dense.weight")
    divided = sum(
        param.nbytes for path, param in parameters.items() if ".layer." in path and any(name in path for name in names)
    )
    whole = sum(param.nbytes for param in parameters.values())
    assert state(traces["tp"], "parameters") == whole - divided // 2


def test_a_policy_gathers_and_reduces_in_its_dtype(source, traces):
    mixed = source_trace(source, on("fsdp", param_dtype="bf16"))
    for phase, kind in (("forward", "all-gather"), ("backward", "all-gather"), ("backward", "reduce-scatter")):
        assert 2 * moved(mixed, phase, kind) == moved(traces["fsdp"], phase, kind)
    assert mixed.state_bytes == traces["fsdp"].state_bytes


@pytest.mark.parametrize(
    ("name", "checkpointing", "layers", "traced"), [("tp+fsdp", "full", 6, 3), ("ddp", "layers:0-5", 7, 4)]
)
def test_repeated_layers_give_the_trace_of_all_layers(name, checkpointing, layers, traced):
    source = small(num_hidden_layers=layers)
    run_config = replace(on(name), checkpointing=checkpointing, clip_grad_norm=True, optimizer="sgd")
    full, short = whole_trace(source, run_config), MemoryTraces(source).trace(run_config)
    assert short.traced_layers == traced
    assert [moment.live_bytes for moment in short.peaks()] == [moment.live_bytes for moment in full.peaks()]
    assert Counter(short.collectives) == Counter(full.collectives)


def test_the_largest_parameter_left_goes_to_the_rank_with_the_fewest_numbers():
    # 7 to rank 0, 5 to rank 1, which then has the fewest and takes 4, the second 4 goes to rank 0; three ranks are idle
    assert zero_shares([4, 7, 5, 4], 2) == [[1, 3], [2, 0]]
    assert zero_shares([4, 7, 5, 4], 7) == [[1], [2], [0], [3]]


@pytest.mark.parametrize(("ranks", "device"), [(8, "cuda"), (2**20, "cpu")])
def test_the_update_of_a_rank_from_its_own_list_is_that_of_torch(ranks, device):
    source = small(num_hidden_layers=6)
    parallelism = Parallelism(strategy="zero1", world_size=ranks, rank=1)
    settings = {"device": device, "checkpointing": "full", "clip_grad_norm": True}
    run_config = RunConfig(batch=2, seq=4, parallelism=parallelism, **settings)
    full, short = whole_trace(source, run_config), MemoryTraces(source).trace(run_config)
    assert short.traced_layers == 3
    assert estimated(short, run_config, {}).phases == estimated(full, run_config, {}).phases
    assert Counter(short.collectives) == Counter(full.collectives)


def test_a_ring_of_four_sends_three_quarters_and_for_a_reduction_of_all_twice_that():
    assert {kind: sent_bytes(kind, 1000, 4) for kind in COLLECTIVE_SHARES} == {
        "all-gather": 750, "reduce-scatter": 750, "all-reduce": 1500, "broadcast": 750,
    }  # fmt: skip


def test_waiting_for_a_collective_moves_nothing():
    names = ("wait_tensor", "_allgather_base_", "all_reduce")
    assert [kind_of(name) for name in names] == ["", "all-gather", "all-reduce"]


def test_buckets_end_when_they_reach_their_limit():
    """From the last parameter on: 1 MiB, then 25 MiB."""
    million = 2**18  # fp32 numbers of 1 MiB
    model = torch.nn.ParameterList(torch.empty(count * million, device="meta") for count in (10, 20, 6, 1))
    assert [size >> 20 for size in bucket_sizes(model)] == [1, 26, 10]


def test_buckets_are_those_of_torchs_reducer():
    model = run_model(small(hidden_size=256, vocab_size=5000, num_hidden_layers=30), STEP)
    given = list(model.parameters())[::-1]
    places, _ = torch.distributed._compute_bucket_assignment_by_size(given, [2**20, 25 * 2**20], [False] * len(given))
    torchs = [sum(given[place].nbytes for place in bucket) for bucket in places]
    assert len(torchs) == 3
    assert sorted(bucket_sizes(model)) == sorted(torchs)


def test_accumulated_micro_batches_multiply_what_travels_before_the_optimizer_step():
    one, four = (
        Simulator(small()).report([replace(on("fsdp"), accumulate=count)]).variants[0].traffic for count in (1, 4)
    )
    assert [4 * row.full_bytes for row in one] == [row.full_bytes for row in four]


def test_the_rows_of_a_report_add_up_to_the_trace(source, traces):
    report = Simulator(source).report([on("fsdp")])
    rows = report.variants[0].traffic
    assert sum(row.full_bytes for row in rows) == sum(call.full_bytes for call in traces["fsdp"].collectives)
    assert {row.ranks for row in rows} == {2}
    gathers = [row for row in rows if row.collective == "all-gather"]
    gathered = {phase: {row.path: row.full_bytes for row in gathers if row.phase == phase}
                for phase in ("forward", "backward")}  # fmt: skip
    assert set(gathered["forward"]) == {"", "bert.encoder.layer.0-1"}
    assert gathered["backward"] == gathered["forward"]


def test_gradients_on_two_meshes_are_clipped_without_more_memory_at_the_peaks(source, traces):
    name = "tp+fsdp"
    clipped = source_trace(source, replace(on(name), clip_grad_norm=True))
    more = [one.live_bytes - other.live_bytes for one, other in zip(clipped.peaks(), traces[name].peaks(), strict=True)]
    assert more[:2] == [0, 0]
    assert 0 <= more[2] < 4096  # the norms


class Stacked(torch.nn.Module):
    """A stem, five equal blocks and a head, of sizes 6 x 4, 4 x 4 and 4 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(4, 2, bias=False)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(5))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def split(*names: str) -> torch.nn.Module:
    """The same model, whose class names the modules that stay whole, as models of transformers do."""
    model = Stacked()
    model._no_split_modules = list(names)
    return model


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (Stacked(), "5 x Linear"),
        (split("Linear"), "7 x Linear"),
        (split("Absent"), "5 x Linear"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.LayerNorm(2)),
         "1 x Linear, 1 x LayerNorm"),
    ],
    ids=["a list", "named", "an absent name", "children"],
)  # fmt: skip
def test_the_units_of_a_model_without_a_known_stack_are_those_that_users_shard(model, units):
    fsdp = Parallelism(strategy="fsdp", world_size=2)
    assert units_text(model, fsdp, "") == units
    assert units_text(model, Parallelism(strategy="ddp", world_size=2), "") == ""


def test_each_unit_of_any_model_is_gathered_alone(tmp_path):
    path = tmp_path / "stacked.py"
    path.write_text("import torch\n\n\n" + inspect.getsource(Stacked))
    run = {"batch": 2, "input": ["x=Bx6:float32"], "strategy": "fsdp", "world_size": 2}
    report = bertscope.estimate(f"{path}:Stacked", **run)
    rows = [row for row in report.variants[0].traffic if (row.phase, row.collective) == ("forward", "all-gather")]
    sizes = Counter({row.full_bytes // row.calls: row.calls for row in rows})
    assert sizes == {4 * 16: 5, 4 * (24 + 8): 1}  # each block by itself, and what is left together
    assert report.units == "5 x Linear"
