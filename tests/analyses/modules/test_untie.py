"""Separation of shared tensors, for counts that have each name."""

import pytest
from torch import nn

from bertscope.analyses.modules.totals import untie


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
