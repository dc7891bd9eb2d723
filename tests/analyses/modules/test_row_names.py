"""Law: `count`, `tree`, `flops`, `estimate` and `diagram` give a module the same row; shared tensors may be untied."""

from typing import Any

import pytest
import torch
from torch import nn

from bertscope.analyses.diagram import tree_diagram
from bertscope.analyses.params import count, tree
from bertscope.memory.estimate import module_memory
from bertscope.reports.layer_ranges import expand
from bertscope.settings.run_config import RunConfig
from bertscope.tracing.flops import flops
from bertscope.tracing.module_tree import row_paths, untie

IDS = torch.ones(1, 4, dtype=torch.long)


def t5() -> nn.Module:
    from transformers import T5Config, T5Model

    return T5Model(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=16, num_layers=3, num_heads=2))


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    return AlbertModel(
        AlbertConfig(vocab_size=16, embedding_size=4, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
                     intermediate_size=16, max_position_embeddings=8)
    )  # fmt: skip


def sequential() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Sequential(nn.ReLU(), nn.ReLU()))


# The inputs of each model, and rows that `estimate` must show.
MODELS: dict[str, tuple[Any, Any, set[str]]] = {
    "T5": (
        t5,
        {"input_ids": IDS, "decoder_input_ids": IDS},
        {f"encoder.block.{blocks}.layer.{part}.layer_norm" for blocks in ("0", "1-2") for part in (0, 1)},
    ),
    "ALBERT": (albert, {"input_ids": IDS}, {"encoder.albert_layer_groups.0.albert_layers.0.ffn"}),
    "Sequential": (sequential, torch.ones(2, 8), {"0-3", "4.0-1"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_report_shows_the_rows_of_the_folded_tree_and_every_module_is_in_one(name):
    make, inputs, shown = MODELS[name]
    model = make().eval()
    rows = [row.path for row in tree(model).rows]
    memory = module_memory(model, inputs, RunConfig(mode="training", optimizer="none"))
    kept = {row.path for row in memory.saved}
    assert kept | {phase.path for phase in memory.phases} <= set(rows)
    assert shown <= kept
    assert {row.path for row in count(model, by="module").rows} <= set(rows)
    assert [row.path for row in flops(model, inputs).rows] == rows
    assert [node.path for node in tree_diagram(model).nodes] == rows
    single = [path for row in rows for path in expand(row)]
    assert len(set(single)) == len(single)
    assert {path for path, _ in model.named_modules()} <= set(single)
    assert row_paths(model) == {path: row for row in rows for path in expand(row)}


def test_flops_leaves_a_module_of_two_addresses_as_it_is():
    model = t5()
    before = dict(model.named_parameters(remove_duplicate=False))
    flops(model, MODELS["T5"][1])
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is tensor for name, tensor in before.items())


def test_a_module_whose_own_name_reads_as_a_range_is_one_module():
    model = nn.ModuleDict({"0-3": nn.Linear(2, 2), "0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    assert row_paths(model) == {"": "", "0-3": "0-3'", "0": "0-1", "1": "0-1"}


@pytest.mark.parametrize(("preset", "published"), [("base", 133_577_846), ("large", 367_511_158)])
def test_a_bert_for_pretraining_without_ties_has_its_published_count(cli, preset, published):
    # the parameters of the checkpoints with both names of the decoder's weight and of its bias
    result = cli("count", f"bert-{preset}-uncased", "-a", "BertForPreTraining", "--untie", "--format", "json")
    totals = result.json["totals"]
    assert totals["distinct_params"] == totals["layer_params"] == published
    assert result.json["ties"] == []
    assert "counted without ties" in result.err


class Shared(nn.Module):
    """A tensor with three names, a module with two, and a child that holds its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 2)
        self.two = nn.Linear(3, 2)
        self.two.weight = self.one.weight
        self.again = nn.Sequential(self.one, nn.LazyLinear(4))
        self.two.parent = self


def test_every_name_of_a_tensor_has_a_tensor_of_its_own():
    model = Shared()
    del model.two.parent
    names = sum(p.numel() for n, p in model.named_parameters(remove_duplicate=False) if "again.1" not in n)
    assert untie(model) == 6 + 8  # the weight of `two`, and `again.0`
    assert sum(p.numel() for n, p in model.named_parameters() if "again.1" not in n) == names == 24


def test_a_cycle_ends_and_frozen_parameters_stay_frozen():
    model = Shared()
    model.one.weight.requires_grad_(False)
    untie(model)
    assert not model.two.weight.requires_grad


def test_the_bias_of_the_head_itself_is_a_part_of_its_row(cli):
    out = cli("count", "bert-tiny", "-a", "BertForPreTraining", "--untie", "--by", "layer").out
    rows = [line.split() for line in out[out.index(" cls.predictions ") : out.index(" cls.seq_")].splitlines()]
    assert [row[0] for row in rows] == ["cls.predictions", "(own)", "transform", "decoder"]
    assert "30,522" in rows[1]
    assert "3,984,628" in rows[0]  # 30,522 + 16,768 + 3,937,338


def test_a_checkpoint_cannot_be_untied(cli, user_folder):
    result = cli("count", user_folder / "my-bert" / "model.safetensors", "--untie")
    assert (result.code, result.out) == (2, "")
