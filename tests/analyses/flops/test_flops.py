"""FLOPs: exact figures, and the laws of forward, backward and recomputation."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import bertscope
from bertscope.settings.run_config import RunConfig
from bertscope.sources.bert import BertSource
from bertscope.tracing.flops import FlopsRun, flops_model
from tests.models import RUNNING

CLASSIFIER = "BertForSequenceClassification"


def source(preset: str = "bert-tiny", architecture: str | None = None, **fields) -> BertSource:
    found = bertscope.load(preset, architecture=architecture)
    return replace(found, config=replace(found.config, **fields))


def total(preset: str, architecture: str, seq: int, **options) -> int:
    run = FlopsRun(source=source(preset, architecture), run=RunConfig(**{"mode": "inference", **options}))
    return run.at(1, seq).rows[0].total.matmul_flops


# Matrix products alone, a multiply-add counts as 2, two labels, batch 1; found with another program.
EXACT = [
    ("bert-base-chinese", 128, (22_348_434_432, 67_045_303_296, 89_392_555_008)),
    ("bert-large-uncased", 128, (78_922_125_312, 236_766_375_936, 315_686_400_000)),
    ("bert-large-uncased", 512, (335_009_550_336, 1_005_028_651_008, 1_340_036_100_096)),
]


@pytest.mark.parametrize(("preset", "seq", "figures"), EXACT)
def test_forward_training_and_checkpointing_are_the_exact_figures(preset, seq, figures):
    assert total(preset, CLASSIFIER, seq) == figures[0]
    assert total(preset, CLASSIFIER, seq, mode="training") == figures[1]
    assert total(preset, CLASSIFIER, seq, mode="training", checkpointing="full") == figures[2]


@pytest.mark.parametrize(
    ("architecture", "frozen", "ratio"),
    [
        ("BertModel", (), 2.99989),  # the pooler's output is unused
        (CLASSIFIER, (), 3.0),
        (CLASSIFIER, ("embeddings",), 2.9797),
        (CLASSIFIER, ("embeddings", *(f"encoder.layer.{number}" for number in range(6))), 1.9798),
    ],
)
def test_backward_is_what_is_dispatched_and_no_constant_factor(architecture, frozen, ratio):
    whole = total("bert-base-uncased", architecture, 128, mode="training", freeze=frozen)
    assert whole / total("bert-base-uncased", architecture, 128) == pytest.approx(ratio, abs=5e-5)


def test_palm_counts_twice_each_parameter_and_the_scores_of_each_layer():
    found = conventions_of("bert-base-chinese", "BertModel", seq=128)
    assert found["palm"] == 128 * (2 * 102_267_648 + 4 * 12 * 768 * 128)


@pytest.mark.parametrize(
    ("preset", "architecture", "flops_of_calflops", "macs_of_calflops"),
    [  # calflops 0.3.2 and flops-profiler 0.1.2 on transformers 4.43.4, eager, 1 x 128, as they printed
        ("bert-base-chinese", "BertModel", 22_363_078_656, 11_174_215_680),
        ("bert-large-uncased", "BertModel", 78_960_525_312, 39_461_060_608),
        ("bert-base-uncased", "BertForMaskedLM", 28_514_254_848, 14_249_558_016),
        ("bert-base-uncased", CLASSIFIER, 22_363_081_728, 11_174_217_216),
    ],
)
def test_what_calflops_prints_is_reproduced(preset, architecture, flops_of_calflops, macs_of_calflops):
    found = conventions_of(preset, architecture, seq=128)
    assert (found["calflops"], found["macs"]) == (flops_of_calflops, macs_of_calflops)


def test_what_fvcore_prints_is_reproduced():
    # fvcore 0.1.5 on transformers 4.43.4, eager, 1 x 128
    assert conventions_of("bert-large-uncased", "BertModel", seq=128)["fvcore"] == 39_493_173_248


def conventions_of(preset, architecture, *, seq, mode="inference"):
    run = FlopsRun(source=source(preset, architecture, attn_implementation="eager"), run=RunConfig(mode=mode))
    return {item.name: item.value for item in flops_model(run, (1,), (seq,)).conventions}


def test_eager_and_sdpa_count_the_same_in_train_and_in_eval():
    found = set()
    for attention in ("eager", "sdpa"):
        run = FlopsRun(source=source(architecture="BertForMaskedLM", attn_implementation=attention))
        found.add(run.at(2, 16).rows[0].forward.matmul_flops)
        found.add(replace(run, run=RunConfig()).at(2, 16).rows[0].forward.matmul_flops)
    assert len(found) == 1


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_module_is_at_least_the_sum_of_its_children(mode):
    rows = FlopsRun(source=source(architecture="BertForPreTraining"), run=RunConfig(mode=mode)).at(2, 16).rows
    for place, row in enumerate(rows):
        children = [
            other for other in rows[place + 1 :] if other.depth == row.depth + 1 and other.path.startswith(row.path)
        ]
        for phase in ("forward", "backward", "total"):
            below = sum(getattr(child, phase).matmul_flops for child in children if _under(child.path, row.path))
            assert getattr(row, phase).matmul_flops >= below
        assert row.total == row.forward + row.backward + row.recompute
        assert row.macs * 2 == row.total.matmul_flops


def _under(path: str, parent: str) -> bool:
    return not parent or path.startswith(f"{parent}.")


def test_the_backward_of_a_linear_layer_is_told_as_its_own():
    rows = {row.path: row for row in FlopsRun(source=source(), run=RunConfig(mode="training")).at(2, 16).rows}
    for name in ("query", "key", "value"):
        row = rows[f"encoder.layer.0-1.attention.self.{name}"]
        assert row.backward.matmul_flops == 2 * row.forward.matmul_flops == 2 * 2 * (2 * 2 * 16 * 128 * 128)
    assert rows["encoder.layer.0-1.attention.self.dropout"].backward.matmul_flops == 0


@pytest.mark.parametrize(
    ("strategy", "layers"), [("full", 4), ("every-2", 2), ("layers:1-3", 3), ("none", 0), ("selective", 0)]
)
def test_recomputation_is_one_forward_of_the_layers_recomputed(strategy, layers):
    run = FlopsRun(source=source(num_hidden_layers=4), run=RunConfig(mode="training", checkpointing=strategy))
    rows = {row.path: row for row in run.at(2, 16).rows}
    assert rows[""].recompute.matmul_flops == layers * rows["encoder"].forward.matmul_flops // 4
    assert rows[""].recompute == rows["encoder"].recompute


@pytest.mark.parametrize(
    ("mode", "checkpointing", "layers"),
    [
        ("inference", "none", 3),
        ("training", "selective", 3),
        ("training", "every-3", 9),
    ],
)
def test_few_layers_multiplied_equal_all_layers_run(mode, checkpointing, layers):
    run = FlopsRun(source=source(num_hidden_layers=layers + 3), run=RunConfig(mode=mode, checkpointing=checkpointing))
    few, every = run.at(2, 16), run.of_all_layers(2, 16)
    assert few.traced_layers == layers
    assert every.traced_layers is None
    assert few.rows == every.rows
    assert few.operators == every.operators


def test_the_polynomial_gives_every_point_of_the_sweep():
    for mode in ("inference", "training"):
        run = FlopsRun(source=source(architecture=CLASSIFIER), run=RunConfig(mode=mode))
        report = flops_model(run, (1, 5), (8, 100, 512))
        poly = report.polynomial
        assert poly is not None
        for point in report.sweep:
            value = poly.constant + poly.linear * point.seq + poly.quadratic * point.seq**2
            assert point.batch * value == point.total_flops


def test_the_polynomial_is_the_closed_form_of_the_model():
    config = bertscope.load("bert-large-zh").config
    h, i, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    poly = flops_model(FlopsRun(source=bertscope.load("bert-large-zh"))).polynomial
    assert (poly.constant, poly.quadratic) == (0, layers * 2 * 2 * h)
    assert poly.linear == layers * 2 * (4 * h * h + 2 * h * i)


@pytest.mark.parametrize("name", RUNNING)
def test_a_module_that_misleads_naive_counters_has_the_flops_found_by_hand(name):
    trap = RUNNING[name]
    report = bertscope.flops(trap.make(), trap.inputs)
    assert report.rows[0].forward.matmul_flops == trap.forward_flops


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.conv = nn.Conv1d(1, 2, 2)

    def forward(self, x):
        return self.conv(torch.fft.fft(self.up(x)).real[:, None])


def test_any_module_is_counted_and_what_is_unknown_is_said():
    report = bertscope.flops(Toy(), torch.ones(4, 3))
    rows = {row.path: row.total.matmul_flops for row in report.rows}
    assert rows["up"] == 2 * 4 * 3 * 5
    assert rows["conv"] == 2 * 4 * 2 * 4 * 2
    assert report.unknown_operators == ("aten._fft_r2c",) or "aten._fft_r2c" in report.unknown_operators


def test_fused_attention_on_the_cpu_counts_as_on_meta():
    class Attend(nn.Module):
        def forward(self, q):
            out = nn.functional.scaled_dot_product_attention(q, q, q)
            return out * float(out.sum().item() != 0.5)  # keeps it off meta

    q = torch.rand(2, 3, 8, 16)
    assert bertscope.flops(Attend(), q).rows[0].total.matmul_flops == 2 * 2 * 2 * 3 * 8 * 8 * 16


def test_counting_leaves_the_module_as_it_was():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bertscope.flops(model, torch.rand(4, 3), mode="training")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_decoder_with_cross_attention_names_the_length_of_the_encoders_states(cli, tmp_path):
    decoder = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(decoder))
    assert "batch 1, seq 64, encoder length 64" in cli("flops", str(tmp_path), "--seq", "64").out
    assert cli("flops", str(tmp_path), "--seq", "64", "--format", "json").json["encoder_seq"] == 64
    assert "encoder length" not in cli("flops", "bert-tiny", "--seq", "64").out


def test_tree_writes_equal_shapes_once(cli, tmp_path):
    decoder = {"model_type": "bert", "is_decoder": True, "num_hidden_layers": 4, "architectures": ["BertLMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(decoder))
    out = cli("tree", str(tmp_path), "--shapes", "--seq", "16", "--depth", "0").out
    assert "[1, 16, 30522], 8 x [1, 12, 16, 64]" in out
