"""`plan`: what is kept so that a step fits, against all plans of small models; `fit`: the fewest ranks."""

import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from torch import nn

import bertscope
from bertscope.errors import BertscopeError, SelectionError
from bertscope.memory import fit, plan
from bertscope.memory.layer_operators import layer_costs
from bertscope.memory.plan import PlanSpace, strategy_text
from bertscope.memory.simulator import Simulator
from bertscope.model import BertModel
from bertscope.model.modules import layer_lists
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.settings.checkpointing import Checkpointing, parse_strategies
from bertscope.settings.parallelism import SEARCHED, Parallelism
from bertscope.settings.run_config import RunConfig
from bertscope.sources.model_source import GivenModule
from bertscope.tracing.flops import FlopsRun
from bertscope.views.plan import notes
from tests.conftest import EVERY_CASE, kinds
from tests.memory.steps import SMALL_YAML, estimated_trace, fit_report, real_trace, small, whole_trace

MIB = 2**20
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # torch's fused kernel on a CPU


class Block(nn.Module):
    """A feed-forward layer: 8 -> 32 -> 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))).tanh())


class Net(nn.Module):
    """Four such layers; it takes 100 rows for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def example_inputs(self, batch: int, seq: int) -> torch.Tensor:
        return torch.zeros(100 * batch, 8)


OWN = GivenModule(name="net", module=Net())
RUN = RunConfig(batch=64, seq=1, optimizer="sgd", precision="stored")


def plan_report(source, run, memory, **others):
    return plan.plan_report(Simulator(source, one_batch=True).limited(run, memory), run, **others)


def fewest_report(source, budget, **others):
    return fit.fewest_report(Simulator(source).limited(STEP, budget), [STEP], [8], TOTAL, world_sizes=SIZES, **others)


def test_the_products_of_a_layer_are_those_that_a_reader_counts():
    (found,) = layer_costs(OWN, RUN)
    assert (found.path, found.layers) == ("blocks", 4)
    shown = [(item.name, item.number, item.module, item.output_bytes, item.flops) for item in found.operators]
    rows = 64 * 100
    assert shown == [
        ("addmm", 0, "up", rows * 32 * 4, 2 * rows * 8 * 32), ("addmm", 1, "down", rows * 8 * 4, 2 * rows * 8 * 32)
    ]  # fmt: skip
    assert all(item.recomputed for item in found.operators)  # tanh saves what comes after the last product


def test_the_last_product_of_a_layer_is_not_computed_again_if_backward_needs_nothing_behind_it():
    class Plain(Block):
        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    module = Net()
    module.blocks = nn.ModuleList(Plain() for _ in range(4))
    (found,) = layer_costs(GivenModule(name="net", module=module), RUN)
    assert [item.recomputed for item in found.operators] == [True, False]


def test_a_product_that_relu_overwrites_is_not_kept_and_its_flops_count_in_each_plan():
    class InPlace(Block):
        def forward(self, x):
            return x + torch.tanh(self.down(nn.functional.relu(self.up(x), inplace=True)))

    module = Net()
    module.blocks = nn.ModuleList(InPlace() for _ in range(4))
    source = GivenModule(name="net", module=module)
    (found,) = layer_costs(source, RUN)
    assert [item.module for item in found.operators] == ["down"]
    assert found.always_flops == 2 * 64 * 100 * 8 * 32  # of `up`
    plain = Simulator(source).trace(RUN).peak_bytes
    first = plan_report(source, RUN, plain - 1).rows[0]
    assert first.answer == "yes"
    assert first.cost.recompute_flops == found.always_flops  # the other layers are kept whole


@pytest.fixture(scope="module")
def every_plan():
    """Recompute FLOPs and peak of each set of products and number of layers."""
    space = PlanSpace(tuple(layer_costs(OWN, RUN)))
    steps, (own,) = Simulator(OWN), space.lists
    every = {}
    for (up, down), layers in product(product([0, 1], repeat=2), range(5)):
        kept = [f"addmm.{number}" for number, is_kept in enumerate((up, down)) if is_kept]
        text = f"save:{'+'.join(kept) or 'none'}@0-{layers - 1}" if layers else "none"
        again = layers * sum(item.flops for item, is_kept in zip(own.operators, (up, down), strict=True) if not is_kept)
        every[text] = (again, steps.trace(replace(RUN, checkpointing=text)).peak_bytes)
    return every


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_no_set_of_products_and_number_of_layers_is_cheaper_and_fits(every_plan, share):
    low, high = min(peak for _, peak in every_plan.values()), every_plan["none"][1]
    limit = int(low + share * (high - low))
    cheapest = min(again for again, peak in every_plan.values() if peak <= limit)
    report = plan_report(OWN, RUN, limit)
    assert report.rows[0].peak_bytes <= limit < report.cheaper.peak_bytes
    assert report.rows[0].cost.recompute_flops - cheapest <= 0.01 * report.rows[0].cost.step_flops
    assert report.cheaper.cost.recompute_flops <= report.rows[0].cost.recompute_flops


def test_the_rows_need_less_and_less_memory_and_more_and_more_flops():
    source, run = small(num_hidden_layers=2, attn_implementation="eager"), RunConfig(batch=64, seq=16, optimizer="sgd")
    steps = Simulator(source)
    none, full = (steps.trace(replace(run, checkpointing=name)).peak_bytes for name in ("none", "full"))
    report = plan_report(source, run, (none + full) // 2)
    sizes, flops = ([getattr(row.cost, name) for row in report.rows] for name in ("peak_bytes", "recompute_flops"))
    assert sizes == sorted(sizes, reverse=True)
    assert flops == sorted(flops)
    assert report.rows[-1].recompute_share == 1
    assert report.rows[-1].peak_bytes == full
    assert report.fits


def test_a_limit_above_the_plain_step_needs_no_plan_and_one_below_the_leanest_has_none():
    source, run = small(), RunConfig(batch=4, seq=8)
    plain = Simulator(source).trace(run).peak_bytes
    report = plan_report(source, run, plain)
    assert (report.rows[0].checkpointing, report.rows[0].cost.recompute_flops, report.cheaper) == ("none", 0, None)
    assert not plan_report(source, run, 1000).fits


def test_a_plan_is_found_where_the_leanest_one_does_not_fit_between_the_segments_of_the_allocator():
    source = small("BertForQuestionAnswering", hidden_size=512, num_attention_heads=8, intermediate_size=2048,
                   num_hidden_layers=4, vocab_size=3000, max_position_embeddings=128)  # fmt: skip
    run, limit = RunConfig(batch=24, seq=128, device="cuda", precision="autocast-bf16"), 1880 * MIB
    assert not fit_report(source, [replace(run, checkpointing="full")], [128], limit, batch=24).rows[0].fits
    report = plan_report(source, run, limit)
    assert report.fits
    assert report.rows[0].cost.gpu_bytes <= limit


@kinds(
    "strategy, precision",
    ["save:none", "save:addmm.4-5@0-1;addmm.0-5@2", "save:addmm.5", "save:addmm.0-3+scaled_dot_product_attention.0"],
    ["fp32", "autocast-bf16"],
)
def test_the_memory_of_a_plan_is_that_of_a_real_step(strategy, precision):
    source = small(num_hidden_layers=3)
    run = RunConfig(batch=3, seq=24, checkpointing=strategy, precision=precision)
    assert estimated_trace(source, run).peak_bytes == real_trace(source, run).peak_bytes


@kinds("kept, attention", [0, 1, 5, None], ["eager", "sdpa"])
def test_the_flops_again_are_those_of_the_counted_step(attention, kept):
    source = small(num_hidden_layers=4, attention=attention, **NO_DROPOUT)
    space = PlanSpace(tuple(layer_costs(source, RunConfig(batch=2, seq=16))))
    counts = tuple(own.layers for own, _ in space.products[:kept])
    counts += (0,) * (len(space.products) - len(counts))
    run = RunConfig(batch=2, seq=16, checkpointing=strategy_text(space.in_lists(counts)))
    counted = FlopsRun(source=source, run=run).at(2, 16).rows[0].recompute.matmul_flops
    assert space.recompute_flops(counts) == counted


def test_layers_that_keep_more_are_the_last_ones_and_the_text_says_so():
    space = PlanSpace(tuple(layer_costs(OWN, RUN)))
    first, other = (item.output_bytes for _, item in space.products)
    assert first < other  # down saves four times the FLOPs for a byte
    counts = space.filled(4 * first + other)
    assert counts == (4, 1)
    assert strategy_text(space.in_lists(counts)) == "save:blocks=addmm.1@0-2;blocks=addmm.0-1@3"
    assert space.next(counts) == (4, 2)


def test_a_strategy_of_kept_operators_is_read_as_it_is_written():
    text = "save:encoder.layer=addmm.0-3+addmm.5@0-11,13;decoder.layer=none"
    assert parse_strategies(f"none,{text},full") == ("none", text, "full")
    encoder, decoder = Checkpointing.parse(text).saved
    assert (encoder.text, decoder.text) == tuple(text.removeprefix("save:").split(";"))
    assert encoder.operators == {"addmm.0", "addmm.1", "addmm.2", "addmm.3", "addmm.5"}
    chosen = Checkpointing.parse(text)
    layers = chosen.saved_in("bert.encoder.layer", 14)
    assert (layers[0], layers[12], layers[13]) == (encoder.operators, None, encoder.operators)
    assert chosen.saved_in("decoder.layer", 2) == [frozenset(), frozenset()]
    assert chosen.saved_in("other", 2) == [None, None]


def test_a_plan_is_installed_on_a_live_module_and_gradients_stay_equal():
    model = BertModel(bertscope.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                           intermediate_size=40))  # fmt: skip
    assert layer_lists(model) == {"encoder.layer": ["encoder.layer.0", "encoder.layer.1"]}
    plain = bertscope.plan(model.config, "10GiB", batch=8, seq=16, optimizer="sgd").rows[0].peak_bytes
    report = bertscope.plan(model.config, plain - 40_000, batch=8, seq=16, optimizer="sgd")
    assert "save:" in report.rows[0].checkpointing
    ids, gradients = torch.arange(32).reshape(2, 16), []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        model(ids).last_hidden_state.square().sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        report.apply(model)
    assert all(map(torch.equal, *gradients))


def test_a_micro_batch_is_the_largest_that_needs_no_recomputation():
    run, source = RunConfig(seq=16, optimizer="sgd"), small()
    four = Simulator(source).trace(replace(run, batch=4, accumulate=2)).peak_bytes
    row = plan_report(source, run, four, batch_total=8).rows[0]
    assert (row.batch, row.accumulate, row.checkpointing) == (4, 2, "none")


def test_a_change_to_what_the_run_has_is_no_row_of_its_own():
    run = {"batch": 64, "seq": 16, "precision": "autocast-bf16", "may_change": "precision,sgd"}
    rows = bertscope.plan("bert-tiny", "20MiB", **run).rows
    assert [dict(row.changes) for row in rows if row.changes] == [{"optimizer": "sgd"}]


def test_other_settings_may_change_and_are_named():
    plain = bertscope.plan("bert-tiny", "10GiB", batch=2, seq=8, optimizer="sgd").rows[0].peak_bytes
    row = bertscope.plan("bert-tiny", plain, batch=2, seq=8, may_change="sgd", margin=0).rows[0]
    assert (row.changes, row.checkpointing, row.peak_bytes) == ({"optimizer": "sgd"}, "none", plain)
    report = bertscope.plan(OWN.module, 1000, batch=2, seq=1, optimizer="sgd", may_change="freeze,lora")
    assert [note.values["names"] for note in report.notes] == ["freeze", "lora"]
    assert [row.changes for row in report.rows] == [{}]
    with pytest.raises(SelectionError, match="may_change has no 'gpu'; known: 8bit, freeze, int8, lora, loss-chunks"):
        bertscope.plan("bert-tiny", "100MiB", may_change="gpu")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """The file of a plan for bert-tiny."""
    run = {"batch": 32, "seq": 64, "optimizer": "sgd"}
    plain = bertscope.estimate("bert-tiny", **run)["none"].memory.peak.peak_bytes
    report = bertscope.plan("bert-tiny", plain - 2 * MIB, margin=0, **run)
    assert report.fits
    assert report.rows[0].checkpointing.startswith("save:")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(report.to_json())
    return path


def changed(path, tmp_path, **values):
    """A copy of the file with other values of the subject or of the first row."""
    data = json.loads(path.read_text())
    for name, value in values.items():
        (data["subject"] if name in data["subject"] else data["rows"][0])[name] = value
    (tmp_path / "changed.json").write_text(json.dumps(data))
    return tmp_path / "changed.json"


def test_each_command_takes_the_file_of_a_plan(cli, plan_file, tmp_path):
    planned = json.loads(plan_file.read_text())["rows"][0]
    strategy, peak = planned["checkpointing"], planned["cost"]["peak"]["peak_bytes"]
    estimate = cli("estimate", "bert-tiny", "--plan", plan_file, "--checkpointing", "none", "--format", "json").json
    assert [variant["checkpointing"] for variant in estimate["variants"]] == ["none", strategy]
    assert bertscope.estimate("bert-tiny", plan=plan_file).variants[0].estimated.peak.peak_bytes == peak
    fit = cli("fit", "bert-tiny", "--plan", plan_file, "--budget", f"{peak}B", "--seq", "64", "--precision", "fp32",
              "--margin", "0", "--format", "json").json  # fmt: skip
    assert [row["checkpointing"] for row in fit["rows"]] == [strategy]
    assert fit["rows"][0]["batch"] >= 32
    if EVERY_CASE:
        (tmp_path / "grid.yaml").write_text("model: bert-tiny\nbatch: [2, 32]\n")
        sweep = cli(
            "sweep", tmp_path / "grid.yaml", "-o", tmp_path / "rows.jsonl", "--plan", plan_file, "--format", "json"
        )
        assert [row["cost"]["peak"]["peak_bytes"] for row in sweep.json["rows"]][1] == peak
        report = bertscope.report("bert-tiny", plan=plan_file, fit=False)
        assert [variant.checkpointing for variant in report.models[0].memory.variants] == [strategy]
    profile = bertscope.from_json(
        cli("profile", "bert-tiny", "--plan", plan_file, "--steps", "1", "--format", "json").out
    )
    assert profile.variants[0].measured.peak.peak_bytes == pytest.approx(peak, rel=1e-3)


def test_a_plan_for_another_model_or_attention_is_refused(cli, plan_file):
    for options in (("bert-mini",), ("bert-tiny", "--attention", "eager"), ("bert-tiny", "-a", "BertForMaskedLM")):
        result = cli("estimate", *options, "--plan", plan_file)
        assert (result.code, result.out) == (2, "")
        assert "the plan is for another" in result.err


def test_a_configuration_in_a_plan_without_a_field_is_that_with_its_default_of_none(cli, plan_file, tmp_path):
    config = json.loads(plan_file.read_text())["subject"]["config"]
    less = changed(plan_file, tmp_path, config={key: value for key, value in config.items() if value is not None})
    assert cli("estimate", "bert-tiny", "--plan", less).code == 0
    other = changed(plan_file, tmp_path, config=config | {"hidden_size": 99})
    assert "hidden_size 99, and this model has hidden_size 128" in cli("estimate", "bert-tiny", "--plan", other).err


def test_a_plan_whose_teacher_is_code_takes_the_same_loss_from_the_command_line(cli, plan_file, tmp_path):
    (tmp_path / "teacher.py").write_text("import bertscope\nbuild = bertscope.load('bert-tiny').build\n")
    loss, plan = f"distil:{tmp_path / 'teacher.py'}:build", json.loads(plan_file.read_text())
    plan["run"]["loss"] = loss
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = ("estimate", "bert-tiny", "--plan", tmp_path / "plan.json")
    assert "the plan: loss" in cli(*words).err
    assert cli(*words, "--loss", loss).code == 0


def test_a_plan_of_other_versions_runs_again_and_is_refused_if_it_differs(plan_file, tmp_path):
    old = changed(plan_file, tmp_path, torch_version="2.6.0")
    assert bertscope.estimate("bert-tiny", plan=old).variants
    peak = PhasePeak(phase="forward", peak_bytes=7, path="", operator="", parts=Parts(inputs=7))
    cost = asdict(StepCost(peak=peak, limit_bytes=7, shortfall=ByteRange()))
    with pytest.raises(SelectionError, match="now; make it again"):
        bertscope.estimate("bert-tiny", plan=changed(plan_file, tmp_path, torch_version="2.6.0", cost=cost))
    lists = json.loads(plan_file.read_text())["rows"][0]["lists"]
    lists[-1]["saved"][0]["number"] = 40
    with pytest.raises(SelectionError, match=r"call no addmm.40"):
        bertscope.estimate("bert-tiny", plan=changed(plan_file, tmp_path, torch_version="2.6.0", lists=lists))


@pytest.mark.parametrize("strategy", ["__import__('os')", "save:addmm.0\n", "full;rm", "save:" + "a.1+" * 5000 + "a.1"])
def test_a_hostile_strategy_in_a_plan_is_refused(plan_file, tmp_path, strategy):
    with pytest.raises(BertscopeError):
        bertscope.estimate("bert-tiny", plan=changed(plan_file, tmp_path, checkpointing=strategy))


STEP = RunConfig()
SIZES = (1, 2, 4)
TOTAL = 24


@pytest.fixture(scope="module")
def source():
    return small(vocab_size=400)


@pytest.fixture(scope="module")
def peaks(source):
    """The peak of a rank by strategy and number of ranks, for the batch of all."""

    def peak(strategy, size):
        ranks = Parallelism(strategy=strategy, world_size=2).of_size(size)
        run_config = replace(STEP, batch=-(-TOTAL // size), seq=8, parallelism=ranks)
        return whole_trace(source, run_config).peak_bytes

    return {strategy: [peak(strategy, size) for size in SIZES] for strategy in ("ddp", "fsdp")}


@kinds("place, strategy", [0, 1, 2], ["fsdp", "ddp"])
def test_the_number_of_ranks_is_the_least_whose_peak_fits(source, peaks, strategy, place):
    budget = peaks[strategy][place]
    (row,) = fewest_report(source, budget, strategies=[Parallelism(strategy=strategy, world_size=2)]).rows
    expected = next(size for size, peak in zip(SIZES, peaks[strategy], strict=True) if peak <= budget)
    assert (row.ranks, row.batch, row.peak_bytes) == (expected, -(-TOTAL // expected), budget)


def test_where_no_number_of_ranks_fits_the_answer_is_no_with_the_most(source, peaks):
    (row,) = fewest_report(source, 1000, strategies=[Parallelism(strategy="ddp", world_size=2)]).rows
    assert (row.fits, row.ranks, row.peak_bytes) == (False, 4, peaks["ddp"][-1])


def test_the_strategy_with_the_fewest_ranks_is_first(source, peaks):
    budget = (peaks["fsdp"][2] + min(peaks["ddp"][2], peaks["fsdp"][1])) // 2
    report = fewest_report(source, budget)
    assert {row.strategy for row in report.rows} == set(SEARCHED)
    assert [row.ranks for row in report.rows if row.fits] == sorted(row.ranks for row in report.rows if row.fits)
    assert (report.rows[0].ranks, report.batch_total) == (4, TOTAL)


def test_the_first_strategy_wins_of_equals_and_ends_the_search(source, peaks):
    budget = max(peaks["ddp"][1], peaks["fsdp"][1])
    report = fewest_report(source, budget)
    assert [(row.strategy, row.ranks) for row in report.rows] == [("ddp", 2)]


def test_a_search_takes_the_settings_of_ranks_for_the_strategies_that_have_them(cli, tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL_YAML)

    def rows(*words):
        result = cli("fit", tmp_path / "small.yaml", "--budget", "120MiB", "--batch-total", "64", "--seq", "8",
                     "--checkpointing", "none", "--precision", "fp32", "--optimizer", "sgd", "--format", "json",
                     *words)  # fmt: skip
        assert result.code == 0, result.err
        return {row["strategy"]: (row["ranks"], row["cost"]["peak"]["peak_bytes"]) for row in result.json["rows"]}

    plain, gathered = rows("--world-size", "4"), rows("--world-size", "4", "--param-dtype", "bf16")
    assert {ranks for ranks, _ in plain.values()} == {4}
    assert set(plain) == set(gathered) == set(SEARCHED)
    assert {name for name in plain if plain[name] != gathered[name]} == {"fsdp", "fsdp-no-reshard"}
    assert rows("--world-size", "4", "--strategy", "fsdp").keys() == {"fsdp"}


def test_a_plan_changes_the_run_only_if_no_plan_without_a_change_fits():
    source, run = small(), {"batch": 2, "seq": 8}
    limited = {**run, "margin": 0}
    none, full = (bertscope.estimate(source, checkpointing=name, **run).variants[0].estimated.peak.peak_bytes
                  for name in ("none", "full"))  # fmt: skip
    unchanged = bertscope.plan(source, none - 1, may_change="lora,sgd", **limited)
    assert (unchanged.answer, unchanged.first.changes) == ("yes", {})
    changed = bertscope.plan(source, full - 1, may_change="lora", **limited)
    assert (changed.answer, changed.first.changes.keys()) == ("yes", {"lora"})
    assert "with lora" in str(changed).split(":")[0]


def test_a_plan_may_quantize_the_weights_with_adapters_and_says_what_that_costs():
    run = {"batch": 2, "seq": 8, "margin": 0}
    leanest = min(bertscope.plan("bert-tiny", 10, may_change="lora", **run).rows, key=lambda row: row.peak_bytes)
    report = bertscope.plan("bert-tiny", leanest.peak_bytes - 1, may_change="lora,int8,nf4", **run)
    assert report.first.changes == {"quantize": "int8", "lora": "r=8,alpha=16,dropout=0.05"}
    model = bertscope.load("bert-tiny", lora="r=8,alpha=16,dropout=0.05")
    assert (
        bertscope.estimate(model, batch=2, seq=8, quantize="int8")["none"].estimated.peak.peak_bytes
        == report.first.peak_bytes
    )
    assert "with int8, lora" in str(report).split(":")[0]
    assert any("Quantized weights are rounded" in note for note in notes(report))
    adapted = bertscope.plan(model, 10, may_change="lora,nf4", **run)
    assert [row.changes for row in adapted.rows] == [{}, {"quantize": "nf4"}]
